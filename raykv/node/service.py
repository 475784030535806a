"""What a NodeActor does, without Ray: the pool, its slot table, the copy threads, the socket.

Threads: one accepts connections, one per connected worker reads its jobs, one notices that workers
have died, two copy for each device and for the host (`raykv.node.lanes`), those of
`raykv.node.states.capturing` look after hidden states where an engine has any, one looks after
checksums and stores that have expired, one touches the pool's pages, and one loads the copy kernel
while copies already run without it. The slot table and the queue are guarded by one lock, which
nobody holds while bytes are copied or a socket is waited for.

A worker's memory is mapped here only as long as its process lives, whatever its children keep open.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raykv.base.deadlines import (
    NODE_ACCEPT_PAUSE_S,
    NODE_COPY_WAIT_S,
    NODE_HELLO_S,
    NODE_SEND_S,
    NODE_STOP_S,
    NODE_STORE_EXPIRY_S,
    NODE_TURN_AWAY_S,
)
from raykv.base.errors import AttachError, HandleError, RayKVError, ThreadError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Direction, Epoch, Refusal
from raykv.base.threads import OnFailure, SupervisedThread, num_failed, start_thread
from raykv.cluster.deaths import DeathWatch, Watch
from raykv.copy.plan import PlanError
from raykv.copy.rows import RowCopier
from raykv.memory.handles import open_kv
from raykv.memory.kv_form import Forms
from raykv.memory.limits import has_room, is_in_memory
from raykv.memory.region import yield_to_others
from raykv.memory.room import NEAR_BYTES
from raykv.memory.words import CancelWords
from raykv.node.attached import (
    AttachedWorker,
    QueuedJob,
    check_parts,
    close_all,
    read_batch,
    receive_hello,
)
from raykv.node.copying import Copying, StoreWaits
from raykv.node.devices import Devices
from raykv.node.integrity import LOADS_PER_CHECK, Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.lanes import CopyLanes
from raykv.node.meter import NodeMeter
from raykv.node.states.capturing import Capturing
from raykv.protocol import wire
from raykv.protocol.columns import require
from raykv.protocol.node import NodeStats
from raykv.protocol.worker import AttachWorker, JobBatch, JobResults, WorkerAttached

logger = logging.getLogger("raykv.node")


@dataclass(frozen=True)
class ServiceSettings:
    """`copy_wait_s`: how long a store may wait for a slot's readers. `store_expiry_s`: how long
    for the other ranks of the same store. `loads_per_check`: see `Integrity`.
    """

    socket_name: str
    geometry: PoolGeometry
    pool_path: str = ""
    copy_wait_s: float = NODE_COPY_WAIT_S
    store_expiry_s: float = NODE_STORE_EXPIRY_S
    loads_per_check: int = LOADS_PER_CHECK


@dataclass(slots=True)
class _Counters:
    bytes_stored: int = 0
    bytes_loaded: int = 0
    chunks_stored: int = 0
    chunks_loaded: int = 0
    chunks_refused: int = 0
    jobs_cancelled: int = 0


class NodeService:
    """Owns one node's bytes: all copies into and out of the pool run here.

    Args:
        settings: sizes and times.
        epoch: the n-th life of this service on its node; rises with every start.
        devices: access to GPUs.
    """

    def __init__(
        self, settings: ServiceSettings, epoch: Epoch, devices: Devices | None = None
    ) -> None:
        self.settings = settings
        self.epoch = epoch
        self.devices = devices or Devices()
        self.keeper = PoolKeeper(settings.geometry, settings.pool_path)
        self.integrity = Integrity(self.keeper, settings.loads_per_check)
        self.rows = RowCopier()
        self.meter = NodeMeter()
        self._counters = _Counters()
        self._lanes = CopyLanes(self.keeper, self._run)
        waits = StoreWaits(settings.copy_wait_s, settings.store_expiry_s)
        self._copying = Copying(
            self.keeper, self.integrity, self.rows, epoch, waits, self._lanes.give_way
        )
        self.capturing = Capturing(
            self.keeper, self.rows, epoch, self._lanes.give_way, self._answer_capture
        )
        # Guards the queue, the counters and the meter too.
        self._lock = self.keeper.lock
        self._workers: set[AttachedWorker] = set()
        self.forms = Forms()
        self._deaths = DeathWatch()
        self._listener: socket.socket | None = None
        self._threads: list[SupervisedThread] = []
        self._has_complained = False
        self._stopping = False
        self._on_stored: Callable[[], None] = lambda: None

    # Life

    def start(self, on_stored: Callable[[], None] = lambda: None) -> None:
        """Take back what a pool file holds, then listen, copy and prefault in threads.

        `on_stored` is called from copy threads when there is something to report.

        Raises:
            OSError: the socket's name is taken, by another NodeActor that still lives.
        """
        self._on_stored = on_stored
        self._listener = wire.listen(self.settings.socket_name)
        self.keeper.recover()
        self._threads.append(self._deaths.start())
        self._lanes.open()
        for target, on_failure in (
            (self._accept, OnFailure.END_PROCESS),
            (self._look_after, OnFailure.END_PROCESS),
            (self.rows.load, OnFailure.GIVE_UP),
            (self._prefault, OnFailure.GIVE_UP),
        ):
            name = f"raykv-{target.__name__.lstrip('_')}"
            self._threads.append(start_thread(name, target, on_failure))

    def _prefault(self) -> None:
        """Touch the pool's pages, without slowing down the engines that start meanwhile."""
        yield_to_others()
        path = self.settings.pool_path
        if path and not is_in_memory(Path(path)):
            # Pages of a file on a disk are written back when memory is short.
            self.keeper.pool.prefault()
        else:
            self.keeper.pool.prefault(lambda: has_room(NEAR_BYTES))

    def _look_after(self) -> None:
        """Give up stores that have expired; while nothing is copied, work on checksums."""
        while not self._stopping:
            is_wanted = self._lanes.is_wanted
            if is_wanted() or not self.integrity.work(is_wanted):
                self._lanes.rest()
            with self._lock:
                self.keeper.table.expire(time.monotonic())

    def stop(self) -> None:
        """End the connections and threads, free the pool; workers see their connection close."""
        self._stopping = True
        self._lanes.stop()
        self.capturing.stop()
        if self._listener is not None:
            # Without it the thread in `accept` would keep the socket's name taken.
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for worker in list(self._workers):
            worker.close_connection()
        self.keeper.pool.stop()
        self._deaths.stop()
        for thread in self._threads:
            thread.join(NODE_STOP_S)
        if self._lanes.join(NODE_STOP_S):
            # Else a copy may still be on its way to or from what is page-locked.
            self.devices.close(NODE_STOP_S)

    # Connections

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    logger.warning("a connection can't be taken: %s", error)
                    time.sleep(NODE_ACCEPT_PAUSE_S)
                continue
            try:
                start_thread("raykv-worker", partial(self._serve, sock))
            except ThreadError as error:
                self._turn_away(sock, error)

    def _turn_away(self, sock: socket.socket, error: ThreadError) -> None:
        """Reply to a worker at once that it is not served, and why."""
        if not self._has_complained:
            self._has_complained = True
            logger.error("workers are turned away (said once): %s", error)
        with contextlib.closing(sock), contextlib.suppress(RayKVError, OSError, ValueError):
            # What it has sent is read first: else it would see an error, and no answer.
            _, fds = receive_hello(sock, wire.FrameReader(), NODE_TURN_AWAY_S)
            close_all(fds)
            sock.sendall(wire.frame(WorkerAttached(self.epoch, f"the NodeActor: {error}")))

    def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends."""
        worker = watch = None
        try:
            watch = self._deaths.watch(sock)
            worker, reader = self._attach(sock)
            self._read_jobs(watch, worker, reader)
        except Exception as error:
            # Whatever a stranger or a worker of another version sends ends only its own connection.
            if not self._stopping:
                logger.warning("a worker's connection ended: %s: %s", type(error).__name__, error)
        finally:
            with contextlib.closing(sock), contextlib.ExitStack() as stack:
                if watch is not None:
                    stack.callback(self._deaths.unwatch, watch)
                if worker is not None:
                    self._detach(worker)

    def _attach(self, sock: socket.socket) -> tuple[AttachedWorker, wire.FrameReader]:
        """Read the attach message and map the memory that came with it."""
        reader = wire.FrameReader()
        try:
            hello, fds = receive_hello(sock, reader, NODE_HELLO_S)
            worker = self._admit(sock, hello, fds)
        except RayKVError as error:
            is_unsuited = isinstance(error, HandleError)
            sock.sendall(wire.frame(WorkerAttached(self.epoch, str(error), is_unsuited)))
            raise
        with self._lock:
            self._workers.add(worker)
            self.forms.take(worker.hello.namespace, worker.hello.layout.form)
        wire.limit_sends(sock, NODE_SEND_S)
        worker.send(WorkerAttached(self.epoch))
        worker.populate()
        return worker, reader

    def _admit(self, sock: socket.socket, hello: AttachWorker, fds: list[int]) -> AttachedWorker:
        if not fds:
            raise AttachError("the first message must attach, with memory and cancel words")
        try:
            words = CancelWords.received(fds[0])
        except RayKVError:
            close_all(fds[1:])
            raise
        try:
            kv = open_kv(hello.layout, fds[1:], self.devices.driver)
        except RayKVError:
            words.close()
            raise
        worker = AttachedWorker(sock, hello, kv, words, self.devices)
        try:
            check_parts(worker)
            self._prepare_device(worker)
        except BaseException as error:
            worker.unmap()
            if isinstance(error, PlanError):
                raise AttachError(str(error)) from error
            raise
        return worker

    def _prepare_device(self, worker: AttachedWorker) -> None:
        """Find out now, and not with the first job, whether a GPU can be used; page-lock the pool.

        Raises:
            HandleError: it can't.
        """
        if not worker.device:
            return
        try:
            worker.backend(self.keeper.pool.address, self.rows)
        except RayKVError as error:
            raise HandleError(f"GPU {worker.device} can't be copied from: {error}") from error
        self._lanes.open(worker.device)
        self.devices.lock_pool(worker.device, self.keeper.pool, self.settings.geometry)

    def _read_jobs(self, watch: Watch, worker: AttachedWorker, reader: wire.FrameReader) -> None:
        # Locks of files, in the order of the captures that they belong to.
        fds: list[int] = []
        try:
            while True:
                data, more = wire.receive_with_fds(watch.sock, wire.MAX_LOCKS)
                fds += more
                require(len(fds) <= wire.MAX_LOCKS, f"{len(fds)} locks without captures")
                if watch.has_died:
                    # What it sent before it died no longer matters.
                    raise AttachError("its process has ended")
                if not data[0]:
                    return
                for raw in reader.feed(data[0]):
                    self._take_batch(worker, read_batch(raw), fds)
        finally:
            close_all(fds)

    def _take_batch(self, worker: AttachedWorker, batch: JobBatch, fds: list[int]) -> None:
        """Queue the jobs; the locks of captures are taken off `fds`."""
        now = time.monotonic()
        rejected: list[QueuedJob] = []
        self._take_captures(worker, batch, fds, now)
        with self._lock:
            for job in batch.jobs:
                if job.capture is not None:
                    continue
                queued = QueuedJob(worker, job, now)
                if queued.namespace != worker.last_namespace:
                    worker.last_namespace = queued.namespace
                    self.forms.take(queued.namespace, worker.hello.layout.form)
                if not self._lanes.push(queued):
                    queued.refuse_rest(Refusal.QUEUE_FULL)
                    rejected.append(queued)
            cancelled = set(batch.cancelled)
            for queued in self._lanes.take(
                lambda q: q.worker is worker and q.job.job_id in cancelled
            ):
                queued.refuse_rest(Refusal.CANCELLED)
                rejected.append(queued)
        for queued in rejected:
            self._answer(queued, 0)

    def _take_captures(
        self, worker: AttachedWorker, batch: JobBatch, fds: list[int], now: float
    ) -> None:
        """Queue a batch's captures; a lock that should have come and has not is a MessageError."""
        for job in batch.jobs:
            if job.capture is None:
                continue
            has_lock = job.capture.has_lock
            require(not has_lock or bool(fds), "a capture whose lock has not come along")
            queued = QueuedJob(worker, job, now, fds.pop(0) if has_lock else -1)
            if not self.capturing.push(queued):
                self.capturing.refuse(queued, Refusal.QUEUE_FULL, "too many captures wait")
        cancelled = set(batch.cancelled)
        if cancelled:
            self.capturing.cancel(worker, cancelled)

    def _answer_capture(self, queued: QueuedJob, num_bytes: int) -> None:
        queued.worker.send(JobResults([queued.result(num_bytes)]))

    def _detach(self, worker: AttachedWorker) -> None:
        """The worker is gone: drop its queued jobs, wait for those that run, unmap its KV."""
        worker.close_connection()
        with self._lock:
            self._workers.discard(worker)
        with contextlib.ExitStack() as stack:
            # Whatever fails, its memory goes, and not before its jobs.
            stack.callback(worker.unmap)
            stack.callback(self._lanes.drop, worker)
            self.capturing.drop(worker)

    # Copies

    def _run(self, queued: QueuedJob) -> None:
        """Carry out one job; every failure becomes an answer, never an exception."""
        num_bytes = 0
        began = time.monotonic()
        try:
            num_bytes = self._copying.carry_out(queued)
        except PlanError as error:
            logger.warning("refused a malformed job: %s", error)
            queued.refuse_rest(Refusal.BAD_HANDLE)
        except Exception:
            logger.exception("job %d failed", queued.job.job_id)
            queued.refuse_rest(Refusal.COPY_FAILED)
        waited_s, took_s = began - queued.submitted_at, time.monotonic() - began
        with self._lock:
            self.meter.ran(queued.direction, waited_s, took_s)
        self._answer(queued, num_bytes)

    def _answer(self, queued: QueuedJob, num_bytes: int) -> None:
        self._count(queued, num_bytes)
        queued.worker.send(JobResults([queued.result(num_bytes)]))
        if queued.direction is Direction.STORE and num_bytes:
            self._on_stored()

    def _count(self, queued: QueuedJob, num_bytes: int) -> None:
        done = len(queued.job.handles.keys) - len(queued.refusals)
        with self._lock:
            if queued.direction is Direction.STORE:
                self._counters.bytes_stored += num_bytes
                self._counters.chunks_stored += done
            else:
                self._counters.bytes_loaded += num_bytes
                self._counters.chunks_loaded += done
            self._counters.chunks_refused += len(queued.refusals)
            self.meter.refused(queued.refusals.values())
            self._counters.jobs_cancelled += Refusal.CANCELLED in queued.refusals.values()

    # Looking

    def is_copying(self) -> bool:
        """Whether copies wait or run."""
        return self._lanes.is_wanted()

    def stats(self) -> NodeStats:
        """Counters and gauges."""
        states = self.capturing.stats()
        with self._lock:
            return NodeStats(
                pool_bytes=self.settings.geometry.pool_bytes,
                prefaulted_bytes=self.keeper.pool.prefaulted_bytes,
                used_bytes=self.keeper.table.used_bytes,
                bytes_stored=self._counters.bytes_stored,
                bytes_loaded=self._counters.bytes_loaded,
                chunks_stored=self._counters.chunks_stored,
                chunks_loaded=self._counters.chunks_loaded,
                chunks_refused=self._counters.chunks_refused,
                jobs_cancelled=self._counters.jobs_cancelled,
                num_workers=len(self._workers),
                ranks=dict(Counter(worker.hello.engine_id for worker in self._workers)),
                queued_jobs=len(self._lanes),
                quarantined=self.keeper.num_quarantined,
                locked_bytes=self.devices.locked_bytes,
                states=states,
                threads_failed=num_failed(),
            )


def boot_epoch() -> Epoch:
    """An epoch that rises with every start of a process on this host until it reboots.

    Taken from the clock since boot, which nobody sets: it can't jump back.
    """
    return Epoch(time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000)


def process_id() -> int:
    """This process's id, for status pages."""
    return os.getpid()
