"""SchedulerActor: the cluster's one directory of chunks, a thin shell around `Directory`.

Guarantees of its calls: each is idempotent (callers repeat what got no answer), none blocks, none
calls another actor. Times come from this host's monotonic clock; the state itself knows no clock.
A message of another version, or an invalid one, raises and changes nothing.

What operators order is carried out by and by: each call moves it on, and a thread that nobody waits
for has the store of Ray's head keep it before anybody hears of it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray

from raykv.base import deadlines, settings, version
from raykv.cluster import ask, names
from raykv.cluster.logs import read_log, set_up_logging
from raykv.directory import answers, meter, steward
from raykv.directory.known import desk, directory
from raykv.directory.known.document import DRAWN_BITS, Orders
from raykv.metrics.discovery import TargetsFile, default_path
from raykv.metrics.server import MetricsServer
from raykv.metrics.table import numbers
from raykv.protocol import columns, engine, measures, node, operator, reader, sessions, status
from raykv.protocol.framing import decode, encode, receive

logger = logging.getLogger("raykv.scheduler")

HERE, NODE, OPERATOR = "the scheduler actor", "the NodeActor", "the operator"


class SchedulerActor:
    """Runs as the detached Ray actor `scheduler` in the namespace `raykv`."""

    def __init__(self, address: str, metrics: settings.MetricsPlace | None = None) -> None:
        set_up_logging()
        self._address = address
        self._steward = steward.Steward(address)
        left = self._steward.start()
        orders = Orders(left.orders, secrets.randbits(DRAWN_BITS), time.monotonic())
        self._orders = orders
        self._directory = directory.Directory(left.life, orders)
        self._desk = desk.OrderDesk(orders, left.pin_keys, self._directory.engines)
        self._meter = meter.ClusterMeter(self._directory)
        self._expires_at = 0.0
        self._metrics: MetricsServer | None = None
        if metrics is not None:
            try:
                self._show_metrics(metrics)
            except Exception:
                # A constructor that raised would be run again by Ray for ever.
                logger.exception("the scheduler actor lives without metrics")

    def _show_metrics(self, place: settings.MetricsPlace) -> None:
        """Serve them from threads, which collect what they show with a call that waits its turn."""
        here = ray.get_runtime_context().current_actor
        self._metrics = server = MetricsServer(
            place, ray.util.get_node_ip_address(), lambda: _collected(here)
        )
        path = default_path()
        if place.port != "off" and path is not None:
            own = [server.address] if server.address else []
            TargetsFile(path, self._address, lambda: own + _targets(here)).start()

    # NodeActors

    def report(self, raw: bytes) -> bytes:
        """`Report` → `ReportAnswer`."""
        with self._measured("report") as now:
            report = receive(raw, node.Report, NODE, HERE)
            return encode(self._directory.report(report, now))

    def orders(self) -> bytes:
        """→ `OrdersDocument` that is in force; empty: none is yet."""
        told = self._orders.told(self._tick())
        return b"" if told is None else encode(told)

    def pin_keys(self, digest: bytes) -> bytes:
        """→ `NamedKeys` of a pin; empty: they are not known."""
        self._tick()
        columns.require(isinstance(digest, bytes), f"the digest {digest!r}")
        return self._desk.pin_keys(digest)

    def show_orders(self, raw: bytes) -> None:
        """`OrdersDocument` that a node has seen, and that is perhaps not known here."""
        self._desk.show(receive(raw, operator.OrdersDocument, NODE, HERE))
        self._tick()

    # Engines

    def ask(self, raw: bytes) -> bytes:
        """`Ask` → `AskAnswer`."""
        with self._measured("ask") as now:
            return encode(self._directory.ask(receive(raw, engine.Ask, "the engine", HERE), now))

    # Operators

    def order(self, raw: bytes) -> bytes:
        """`OperatorOrder` → `OrderAnswer`; what becomes of it says `order_state`."""
        with self._measured("order"):
            order = receive(raw, operator.OperatorOrder, OPERATOR, HERE)
            error = self._desk.take(order)
            self._work(time.monotonic())
            return encode(operator.OrderAnswer(error))

    def order_state(self, order_id: str) -> bytes:
        """→ `OrderState`."""
        now = self._tick()
        columns.require(isinstance(order_id, str), f"the order {order_id!r}")
        return encode(self._desk.state(order_id, now))

    def has_heard(self, order_id: str) -> bool:
        """Whether all engines that live have heard what `NameWeights` of that id tells them."""
        now = self._tick()
        columns.require(isinstance(order_id, str), f"the order {order_id!r}")
        return self._desk.has_heard(order_id, now)

    def order_session(self, raw: bytes) -> bytes:
        """`SessionOrder` → `SessionAnswer`."""
        self._tick()
        order = receive(raw, sessions.SessionOrder, OPERATOR, HERE)
        nodes = self._directory.sessions.order(order.namespace, order.news)
        return encode(sessions.SessionAnswer(list(map(str, nodes))))

    def wish(self, raw: bytes) -> None:
        """`PoolWish`: nodes that match it get a NodeActor from now on, when they join too."""
        self._steward.set_wish(receive(raw, operator.PoolWish, OPERATOR, HERE))

    # Readers

    def events(self, life: int, after: int) -> bytes:
        """→ `EventPage`: what follows a place of the event log."""
        with self._measured("events") as now:
            _require_numbers(life, after)
            page = answers.event_page(self._directory, life, after, now)
            self._meter.read_events(after, page, now)
            return encode(page)

    def status(self) -> bytes:
        """→ `ClusterStatus`."""
        now = self._tick()
        server = self._metrics
        metrics = "" if server is None else server.address or server.problem
        base = status.ClusterStatus(
            self._address, self._directory.life, version.__version__, paused=False, metrics=metrics
        )
        return encode(answers.cluster_status(self._directory, self._orders.told(now), base, now))

    def where(self, raw: bytes) -> bytes:
        """`WhereQuery` → `WherePage`."""
        self._tick()
        query = receive(raw, reader.WhereQuery, OPERATOR, HERE)
        return encode(answers.where_page(self._directory, query))

    def prefixes(self, raw: bytes) -> bytes:
        """`PrefixQuery` → `PrefixPage`."""
        self._tick()
        query = receive(raw, reader.PrefixQuery, "the router", HERE)
        return encode(answers.prefix_page(self._directory, query))

    def spaces(self) -> bytes:
        """→ `SpacePage`."""
        self._tick()
        return encode(answers.space_page(self._directory))

    def metrics(self) -> bytes:
        """→ `ClusterMetrics`."""
        now = self._tick()
        build = numbers("raykv_build_info", {(version.__version__, "scheduler"): 1})
        return encode(
            measures.ClusterMetrics([build, *self._meter.families(self._orders.told(now), now)])
        )

    def targets(self) -> list[str]:
        """Where the NodeActors show their metrics."""
        self._tick()
        return self._meter.targets()

    def log(self, start: int | None) -> tuple[int, bytes]:
        """A piece of this actor's log; see `read_log`."""
        columns.require(start is None or isinstance(start, int), f"the place {start!r}")
        return read_log(start)

    def ping(self) -> str:
        """RayKV's version here; answers once the actor is up."""
        return version.__version__

    # Time

    @contextmanager
    def _measured(self, call: str) -> Iterator[float]:
        """The time at which a call begins; its duration is counted."""
        began = self._tick()
        try:
            yield began
        finally:
            self._meter.called(call, time.monotonic() - began)

    def _tick(self) -> float:
        now = time.monotonic()
        if now >= self._expires_at:
            self._expires_at = now + deadlines.IDLE_LOOK_S
            self._directory.expire(now)
        self._work(now)
        return now

    def _work(self, now: float) -> None:
        """Have the store keep one ordered document after another."""
        if self._desk.is_keeping and self._steward.has_kept:
            self._steward.forget_pins(self._desk.kept(now))
        draft = self._desk.next(now)
        if draft is not None:
            self._steward.keep(draft)


def scheduler_actor(address: str, metrics: settings.MetricsPlace = settings.ANY_PORT) -> Any:
    """The scheduler actor, created if there is none; creators that race get the same one.

    It lives on Ray's head node, without which there is no cluster, and on its successor: the loss
    of any other node does not cost the directory.
    """
    kind, environment = ray.remote(SchedulerActor), {"RAY_worker_niceness": "0"}
    made = ask.detached(kind, names.SCHEDULER, environment, resources=names.ON_HEAD)
    return made.remote(address, metrics)


def _collected(here: Any) -> list[measures.MetricFamily]:
    """Runs in threads of this actor: what it shows, collected when its turn comes."""
    raw: bytes = ray.get(here.metrics.remote(), timeout=deadlines.ANSWER_S)
    return decode(raw, measures.ClusterMetrics).families


def _targets(here: Any) -> list[str]:
    """Called in a thread of this actor, like `_collected`."""
    found: list[str] = ray.get(here.targets.remote(), timeout=deadlines.ANSWER_S)
    return found


def _require_numbers(*places: object) -> None:
    for number in places:
        is_number = isinstance(number, int) and 0 <= number <= columns.MAX_NUMBER
        columns.require(is_number, f"the position {number!r} in the event log")
