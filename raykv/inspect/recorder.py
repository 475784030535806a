"""A recorder follows a cluster for a while, and stamps what it hears with the time."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING

from raykv.base.errors import ClusterError
from raykv.base.threads import OnFailure, start_thread
from raykv.inspect.frames import frame
from raykv.inspect.sources import Row, chunk_rows, event_row, node_rows, request_pages, request_rows
from raykv.protocol.events import EventsMissed

if TYPE_CHECKING:
    import pandas as pd

    from raykv.client.cluster import Cluster

logger = logging.getLogger("raykv.inspect")

# Between two looks of a recorder at the cluster: events and requests are kept for far longer.
RECORD_PAUSE_S = 0.5

# For a recorder's thread, which may be waiting for one answer.
RECORDER_STOP_S = 15.0


MAX_ROWS = 500_000
"""Rows of a kind; beyond it the oldest are forgotten."""

MAX_ERRORS = 100
"""What went wrong while recording; the oldest are forgotten."""


class Recorder:
    """Records events, requests and transfers in a thread, from its start until `stop`.

    Use it as a context manager. What is kept is bounded: half a million rows of each kind, the
    latest. While the cluster does not answer nothing is recorded; `errors` says so, and
    events that were missed are rows of their own (`EventsMissed`).

    Args:
        cluster: from `raykv.connect()`.
        pause_s: between two looks.

    Raises:
        ClusterError: RayKV does not run there, or does not answer.
    """

    def __init__(self, cluster: Cluster, pause_s: float = RECORD_PAUSE_S) -> None:
        self._cluster = cluster
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._start_rows = list(chunk_rows(cluster, None, None))
        self._place = cluster.snapshot().place
        self._after = cluster.requests().last
        self._events: deque[Row] = deque(maxlen=MAX_ROWS)
        self._requests: deque[Row] = deque(maxlen=MAX_ROWS)
        self._transfers: deque[Row] = deque(maxlen=MAX_ROWS)
        self.errors: deque[str] = deque(maxlen=MAX_ERRORS)
        self._stopped = threading.Event()
        self._thread = start_thread("raykv-recorder", self._run, OnFailure.RUN_AGAIN)

    def stop(self) -> None:
        """Look once more, and end. What was recorded stays."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._thread.join(RECORDER_STOP_S)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def chunks_at_start(self) -> pd.DataFrame:
        """The chunks that were there when recording began: `occupancy` takes them too."""
        return frame("chunks", self._start_rows)

    def events(self) -> pd.DataFrame:
        """Events since the start, with times."""
        return frame("events", self._copy(self._events))

    def requests(self) -> pd.DataFrame:
        """Requests that have ended since the start; `age_s` is that of now."""
        now = time.time()
        rows = self._copy(self._requests)
        return frame("requests", ({**row, "age_s": now - row["at"]} for row in rows))

    def transfers(self) -> pd.DataFrame:
        """A row for each node and look: what it has moved until then; see `transfer_rates`."""
        return frame("transfers", self._copy(self._transfers))

    def _copy(self, rows: Iterable[Row]) -> list[Row]:
        with self._lock:
            return list(rows)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            # One more look after `stop`.
            is_last = self._stopped.wait(self._pause_s)
            for look in (self._take_events, self._take_requests, self._take_transfers):
                try:
                    look()
                except ClusterError as error:
                    self.errors.append(str(error))
                    logger.warning("not recorded for now: %s", error)

    def _take_events(self) -> None:
        for event in self._cluster.events(since=self._place, follow=False):
            if not isinstance(event, EventsMissed):
                self._place = (event.life, event.seq)
            row = {**event_row(event), "time_s": time.time()}
            with self._lock:
                self._events.append(row)

    def _take_requests(self) -> None:
        for page in request_pages(self._cluster, self._after):
            now = time.time()
            rows = [{**row, "at": now - row["age_s"]} for row in request_rows(page.found)]
            with self._lock:
                self._requests.extend(rows)
            self._after = page.following

    def _take_transfers(self) -> None:
        now = time.time()
        rows = [{**row, "time_s": now} for row in node_rows(self._cluster)]
        with self._lock:
            self._transfers.extend(rows)
