"""An actor's metrics over HTTP, for Prometheus to scrape.

    a scrape ──► one of `MAX_CONNECTIONS` daemon threads ──► collect ──► the text format

Nothing here can stop the actor or make it wait: without a port it lives without a server and says
why, a collection that fails or takes too long is answered with 503, and a client that is slow to
send or to read loses the connection.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from raykv.base import deadlines
from raykv.base.errors import ThreadError, first_line
from raykv.base.settings import MetricsPlace
from raykv.base.threads import OnFailure, start_thread
from raykv.metrics.table import METRICS, MetricKind
from raykv.protocol.measures import MetricFamily, MetricRow

logger = logging.getLogger("raykv.metrics")

MAX_CONNECTIONS = 8
"""Connections at a time; Prometheus keeps one open for each of its servers that scrape."""

PORTS_TRIED = 16
"""Ports tried, from the named one upwards: other actors on the host may have it."""

Collect = Callable[[], list[MetricFamily]]


class _Families(Collector):
    """Families as prometheus_client wants them; every scrape collects again."""

    def __init__(self, collect: Collect) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        """All families that have series."""
        for family in self._collect():
            yield exposed(family)


def exposed(family: MetricFamily) -> Metric:
    """A family as prometheus_client's."""
    known = METRICS[family.name]
    if known.kind is MetricKind.HISTOGRAM:
        histogram = HistogramMetricFamily(known.name, known.text, labels=known.labels)
        for row in family.rows:
            histogram.add_metric(row.labels, _buckets(row, known.bounds), row.histogram.total)
        return histogram
    make = CounterMetricFamily if known.kind is MetricKind.COUNTER else GaugeMetricFamily
    numbers = make(known.name, known.text, labels=known.labels)
    for row in family.rows:
        numbers.add_metric(row.labels, row.value)
    return numbers


def _buckets(row: MetricRow, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    """What is up to each bound, as Prometheus counts."""
    found: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*bounds, float("inf")), row.histogram.counts, strict=True):
        total += count
        found.append(("+Inf" if bound == float("inf") else str(bound), total))
    return found


class _Handler(WSGIRequestHandler):
    """Logs nothing, and gives up on slow clients."""

    timeout = deadlines.ANSWER_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """See `BaseHTTPRequestHandler.log_message`."""


class _Server(ThreadingWSGIServer):
    """A thread for each connection, up to a limit; the others are closed at once."""

    request_queue_size = 64

    def __init__(self, family: socket.AddressFamily, host: str, port: int) -> None:
        self.address_family = family
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """See `WSGIServer.server_bind`: but no question of what the host is called."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(timeout=0):
            self.shutdown_request(request)
            return
        try:
            serve = partial(self.process_request_thread, request, client_address)
            start_thread("raykv-scrape", serve)
        except ThreadError:
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """See `BaseServer.handle_error`: a client that went away is no error."""


class MetricsServer:
    """Shows what `collect` gives; `address` is where ("host:port"), or `problem` says why nowhere.

    Both are empty if it is switched off. It ends with the process.

    Args:
        place: where it should be.
        host: of this node, if the place names no address.
        collect: called in a thread of the server for each scrape.
    """

    def __init__(self, place: MetricsPlace, host: str, collect: Collect) -> None:
        self.address = ""
        self.problem = ""
        self._host = host
        self._registry = CollectorRegistry()
        self._registry.register(_Families(collect))
        self._complained = False
        if place.port == "off":
            return
        try:
            self._start(place)
        except Exception as error:
            self.problem = f"no metrics: {first_line(error)}"
            logger.warning("%s (metrics_port, metrics_address)", self.problem)

    def _start(self, place: MetricsPlace) -> None:
        bind_to = place.address or self._host
        server = _bound(bind_to, place.port)
        server.set_app(self._answer)
        is_any = bind_to in ("0.0.0.0", "::")
        self.address = _joined(self._host if is_any else bind_to, server.server_port)
        serve = partial(server.serve_forever, deadlines.WAKE_S)
        start_thread("raykv-metrics", serve, OnFailure.RUN_AGAIN)
        if place.port not in ("auto", str(server.server_port)):
            logger.warning("port %s is taken: metrics are at %s", place.port, self.address)

    def _answer(self, environ: Any, start_response: Any) -> Any:
        try:
            return make_wsgi_app(self._registry)(environ, start_response)
        except Exception as error:
            if not self._complained:
                self._complained = True
                logger.warning("metrics can't be collected (said once): %s", first_line(error))
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the metrics can't be collected now\n"]


def _bound(host: str, port: str) -> _Server:
    """A server that listens.

    Raises:
        OSError: no port is free, or the host has no such address.
    """
    infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family = infos[0][0]
    first = 0 if port == "auto" else int(port)
    ports = [0] if not first else range(first, min(first + PORTS_TRIED, 1 << 16))
    for number in ports:
        try:
            return _Server(family, host, number)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise OSError(error.errno, f"{host} port {number}: {error.strerror}") from error
    raise OSError(errno.EADDRINUSE, f"ports {first} to {ports[-1]} of {host} are all taken")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
