"""The NodeActor's copy threads: one for loads and one for stores, of each device and of the host.

A store waits for what its engine computes, for seconds perhaps, and so does a load; each holds up
its own lane only. Captures of hidden states have other lanes. Nothing else is copied by these
threads: fetches, and reads for other nodes, have threads of their own (Ray's).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from functools import partial

from raykv.base import deadlines
from raykv.base.errors import ThreadError
from raykv.base.ids import Direction
from raykv.base.threads import OnFailure, SupervisedThread, sleep_precisely, start_thread
from raykv.copy.engine import HOST, JobQueue, LaneName
from raykv.node.attached import AttachedWorker, QueuedJob
from raykv.node.keeper import PoolKeeper

# How long a store within host memory lets loads go first before it copies the next 4 MiB: loads
# take milliseconds, and an endless stream of them leaves stores 200 MB/s.
NODE_GIVE_WAY_S = 0.02


class CopyLanes:
    """Jobs in their lanes. Any thread may call any method. The pool's lock guards the queue; it is
    not held while a job runs. A worker's `running` counts its jobs that run, of all lanes.

    Args:
        keeper: whose lock is shared; it is notified when a job has ended.
        run: carries out one job, in a lane's thread; must not raise.
        kind: the beginning of the threads' names.
    """

    def __init__(
        self, keeper: PoolKeeper, run: Callable[[QueuedJob], None], kind: str = "raykv"
    ) -> None:
        self._lock = keeper.lock
        self._mutex = keeper.mutex
        self._run = run
        self._kind = kind
        self._queue: JobQueue[QueuedJob] = JobQueue()
        # Notified when the lane has a job; a thread that waits there is not woken up by others.
        self._news: dict[LaneName, threading.Condition] = {}
        self._threads: list[SupervisedThread] = []
        # Notified when no job waits or runs.
        self._rest = threading.Condition(self._mutex)
        self._stopping = False

    def open(self, device: str = HOST, directions: Iterable[Direction] = Direction) -> None:
        """Start threads for a device, which live until `stop`.

        Raises:
            ThreadError: the system gives no more; the next call tries again.
        """
        with self._lock:
            for lane in [LaneName(device, direction) for direction in directions]:
                if lane in self._news:
                    continue
                self._news[lane] = threading.Condition(self._mutex)
                if self._stopping:
                    continue
                name = f"{self._kind}-{lane.direction.name.lower()}"
                try:
                    thread = start_thread(name, partial(self._serve, lane), OnFailure.END_PROCESS)
                except ThreadError:
                    # Nothing would carry out its jobs.
                    del self._news[lane]
                    raise
                self._threads.append(thread)

    def stop(self) -> None:
        """No job is begun any more."""
        with self._lock:
            self._stopping = True
            for news in (self._lock, self._rest, *self._news.values()):
                news.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for each thread, after `stop`, until the deadline; False if some copy still runs."""
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    # Jobs

    def push(self, queued: QueuedJob) -> bool:
        """Append a job to its lane, which must be open; False if that is full."""
        with self._lock:
            if not self._queue.push(queued.lane, queued):
                return False
            self._news[queued.lane].notify()
            return True

    def take(self, wanted: Callable[[QueuedJob], bool]) -> list[QueuedJob]:
        """Take jobs that wait out of the queue."""
        with self._lock:
            return self._queue.take(wanted)

    def drop(self, worker: AttachedWorker) -> list[QueuedJob]:
        """Take a worker's jobs out of the queue, and wait for those that run.

        Those end soon if the worker's connection is closed: they look before each of their runs.
        """
        with self._lock:
            dropped = self._queue.take(lambda queued: queued.worker is worker)
            while worker.running:
                self._lock.wait(deadlines.WAKE_S)
            return dropped

    def __len__(self) -> int:
        """Jobs that wait."""
        with self._lock:
            return len(self._queue)

    # Threads

    def _serve(self, lane: LaneName) -> None:
        sleep_precisely()
        while (queued := self._next(lane)) is not None:
            try:
                self._run(queued)
            finally:
                with self._lock:
                    self._queue.end(lane)
                    queued.worker.running -= 1
                    self._lock.notify_all()
                    if self._queue.is_idle:
                        self._rest.notify_all()

    def _next(self, lane: LaneName) -> QueuedJob | None:
        """The lane's next job, which counts as running; None at the end."""
        with self._lock:
            while not self._stopping:
                queued = self._queue.begin(lane)
                if queued is not None:
                    queued.worker.running += 1
                    return queued
                self._news[lane].wait(deadlines.WAKE_S)
        return None

    # Priorities

    def give_way(self, queued: QueuedJob) -> None:
        """Let loads go first, before the next bytes of a job are copied; for a bounded time."""
        give_up_at = time.monotonic() + NODE_GIVE_WAY_S
        with self._lock:
            while self._queue.must_give_way(queued.lane) and not self._stopping:
                left = give_up_at - time.monotonic()
                if left <= 0 or queued.stop():
                    return
                self._lock.wait(left)

    def is_wanted(self) -> bool:
        """Whether there is something more urgent to do than work for idle time."""
        with self._lock:
            return self._stopping or not self._queue.is_idle

    def rest(self) -> None:
        """Wait until there is time again, and at most `deadlines.WAKE_S`."""
        with self._lock:
            if not self._stopping:
                self._rest.wait(deadlines.WAKE_S)
