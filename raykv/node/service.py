"""What a NodeActor does, without Ray: the copy threads, and the socket of engines and workers.

Threads: one accepts connections, one per connected worker reads its jobs, two serve each connected
EngineCore and some carry out what these order (`raykv.node.lines`), one notices that peers have
died, two copy for each device and for the host (`raykv.node.lanes`), those of
`raykv.node.states.capturing` look after hidden states where an engine has any, one looks after
checksums and what has expired, and one touches the pool's pages. For the first worker whose KV
cache is in CPU memory one loads the copy kernel, while copies already run without it. The pool and
the queue are guarded by one lock, which nobody holds while bytes are copied or a socket is waited
for.

A worker's memory is mapped here only as long as its process lives, whatever its children keep open.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from raykv.base import deadlines, threads
from raykv.base.errors import AttachError, HandleError, RayKVError, ThreadError
from raykv.base.ids import Direction, Refusal
from raykv.cluster.deaths import DeathWatch, Watch
from raykv.copy.plan import PlanError
from raykv.copy.rows import RowCopier
from raykv.memory import handles, kv_form, limits, region, room
from raykv.memory.words import CancelWords
from raykv.node import attached, copying, integrity, lines
from raykv.node.accounts.meter import NodeMeter
from raykv.node.devices import Devices
from raykv.node.keeper import PoolKeeper
from raykv.node.lanes import CopyLanes
from raykv.node.states.capturing import Capturing
from raykv.protocol import columns, copies, framing, node, wire
from raykv.protocol.engine import EngineHello, Welcome
from raykv.protocol.worker import AttachWorker, JobBatch, JobResults, not_done

logger = logging.getLogger("raykv.node")

# From a connection's start to the end of its attach message: strangers may say nothing. The message
# is sent at once; a frozen engine may attach anew when it wakes up.
NODE_HELLO_S = 10.0

# The same for a worker that cannot be served: the thread that tells it so holds up all others.
NODE_TURN_AWAY_S = 0.5


def fetch_nothing(order: copies.Fetch) -> copies.CopyResult:
    """The answer to a fetch where there are no other nodes."""
    return not_done(order.number, len(order.keys), Refusal.NODE_LOST)


class NodeService:
    """All copies between engines and the pool run here; the pool itself is the keeper's.

    Args:
        socket_name: where engines and workers connect.
        keeper: the pool.
        devices: access to GPUs.
        fetch: see `EngineLines`.
    """

    def __init__(
        self,
        socket_name: str,
        keeper: PoolKeeper,
        devices: Devices | None = None,
        fetch: Callable[[copies.Fetch], copies.CopyResult] = fetch_nothing,
    ) -> None:
        self.socket_name = socket_name
        self.keeper = keeper
        self.devices = devices or Devices()
        self.integrity = integrity.Integrity(keeper)
        self.rows = RowCopier()
        self.meter = NodeMeter()
        # Of `NodeStats`.
        self._counters: Counter[str] = Counter()
        self._lanes = CopyLanes(keeper, self._run)
        self._copying = copying.Copying(keeper, self.integrity, self.rows, self._lanes.give_way)
        self.capturing = Capturing(keeper, self.rows, self._lanes.give_way, self._end_job)
        # Guards the queue, the counters and the meter too.
        self._lock = keeper.lock
        self._workers: set[attached.AttachedWorker] = set()
        self._lines = lines.EngineLines(keeper, fetch)
        self.forms = kv_form.Forms()
        self._deaths = DeathWatch()
        self._listener: socket.socket | None = None
        self._threads: list[threads.SupervisedThread] = []
        self._has_complained = False
        self._has_kernel = False
        self._stopping = False

    # Life

    def start(self) -> None:
        """Find what a pool file holds, then listen, copy and prefault in threads.

        Raises:
            OSError: the socket's name is taken, by another NodeActor that still lives.
        """
        self._listener = wire.listen(self.socket_name)
        self.keeper.recover()
        self._threads.append(self._deaths.start())
        self._lanes.open()
        for target, on_failure in (
            (self._accept, threads.OnFailure.END_PROCESS),
            (self._look_after, threads.OnFailure.END_PROCESS),
            (self._prefault, threads.OnFailure.GIVE_UP),
            *[(self._lines.fetch, threads.OnFailure.END_PROCESS)] * lines.FETCH_THREADS,
        ):
            name = f"raykv-{target.__name__.lstrip('_')}"
            self._threads.append(threads.start_thread(name, target, on_failure))

    def _prefault(self) -> None:
        """Touch the pool's pages, without slowing down the engines that start meanwhile."""
        region.yield_to_others()
        path = self.keeper.pool_path
        if path and not limits.is_in_memory(Path(path)):
            # Pages of a file on a disk are written back when memory is short.
            self.keeper.pool.prefault()
        else:
            self.keeper.pool.prefault(lambda: limits.has_room(room.NEAR_BYTES))

    def _look_after(self) -> None:
        """End what is late, about once a second; while nothing is copied, work on checksums."""
        expire_at = self.keeper.now()
        while not self._stopping:
            is_wanted = self._lanes.is_wanted
            if is_wanted() or not self.integrity.work(is_wanted):
                self._lanes.rest()
            if self.keeper.now() >= expire_at:
                expire_at = self.keeper.now() + deadlines.WAKE_S
                self.keeper.expire()

    def stop(self) -> None:
        """End the connections and threads, free the pool; workers see their connection close."""
        self._stopping = True
        self._lanes.stop()
        self.capturing.stop()
        if self._listener is not None:
            # Without it the thread in `accept` would keep the socket's name taken.
            wire.hang_up(self._listener)
            self._listener.close()
        for worker in list(self._workers):
            worker.close_connection()
        self._lines.close()
        self.keeper.pool.stop()
        self._deaths.stop()
        for thread in self._threads:
            thread.join(deadlines.STOP_S)
        if self._lanes.join(deadlines.STOP_S):
            # Else a copy may still be on its way to or from what is page-locked.
            self.devices.close(deadlines.STOP_S)

    # Connections

    def _accept(self) -> None:
        assert self._listener is not None
        while not self._stopping:
            try:
                # bounded: strangers may never come; `stop` wakes it
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping:
                    logger.warning("a connection can't be taken: %s", error)
                    time.sleep(deadlines.LOOK_S)
                continue
            try:
                threads.start_thread("raykv-line", partial(self._serve, sock))
            except ThreadError as error:
                self._turn_away(sock, error)

    def _turn_away(self, sock: socket.socket, error: ThreadError) -> None:
        """Reply to a peer at once that it is not served, and why."""
        if not self._has_complained:
            self._has_complained = True
            logger.error("engines and workers are turned away (said once): %s", error)
        with contextlib.closing(sock), contextlib.suppress(RayKVError, OSError, ValueError):
            # What it has sent is read first: else it would see an error, and no answer.
            opening = attached.receive_hello(sock, wire.FrameReader(), NODE_TURN_AWAY_S)
            region.close_all(opening.fds)
            self._refuse(sock, f"the NodeActor: {error}")

    def _refuse(self, sock: socket.socket, error: str, *, unsuited: bool = False) -> None:
        # bounded: what is left of NODE_HELLO_S, or less
        sock.sendall(wire.frame(Welcome(self.keeper.life, error, unsuited)))

    def _serve(self, sock: socket.socket) -> None:
        """Serve one connection until it ends."""
        watch = None
        try:
            watch = self._deaths.watch(sock)
            reader = wire.FrameReader()
            try:
                opening = attached.receive_hello(sock, reader, NODE_HELLO_S)
            except RayKVError as error:
                self._refuse(sock, str(error))
                raise
            hello, fds = opening.hello, opening.fds
            if isinstance(hello, EngineHello):
                region.close_all(fds)
                self._lines.serve(watch, hello, reader, opening.behind)
            else:
                self._serve_worker(watch, hello, fds, reader)
        except Exception as error:
            # Whatever a stranger or a peer of another version sends ends only its own connection.
            if not self._stopping:
                logger.warning("a connection ended: %s: %s", type(error).__name__, error)
        finally:
            with contextlib.closing(sock):
                if watch is not None:
                    self._deaths.unwatch(watch)

    def _serve_worker(
        self, watch: Watch, hello: AttachWorker, fds: list[int], reader: wire.FrameReader
    ) -> None:
        worker = self._attach(watch.sock, hello, fds)
        try:
            worker.send(Welcome(self.keeper.life))
            worker.populate()
            self._read_jobs(watch, worker, reader)
        finally:
            self._detach(worker)

    def _attach(
        self, sock: socket.socket, hello: AttachWorker, fds: list[int]
    ) -> attached.AttachedWorker:
        """Map the memory that came with the first message."""
        try:
            worker = self._admit(sock, hello, fds)
        except RayKVError as error:
            self._refuse(sock, str(error), unsuited=isinstance(error, HandleError))
            raise
        wire.limit_sends(sock, deadlines.SEND_S)
        with self._lock:
            self._workers.add(worker)
            self.forms.take(hello.namespace, hello.layout.form)
            self.keeper.owner.jobs.begin_line(hello.life, hello.rank, hello.num_ranks)
        return worker

    def _admit(
        self, sock: socket.socket, hello: AttachWorker, fds: list[int]
    ) -> attached.AttachedWorker:
        if not fds:
            raise AttachError("the first message must attach, with memory and cancel words")
        try:
            words = CancelWords.received(fds[0])
        except RayKVError:
            region.close_all(fds[1:])
            raise
        try:
            kv = handles.open_kv(hello.layout, fds[1:], self.devices.driver)
        except RayKVError:
            words.close()
            raise
        worker = attached.AttachedWorker(sock, hello, kv, words, self.devices)
        try:
            attached.check_parts(worker)
            self._prepare_device(worker)
        except BaseException as error:
            worker.unmap()
            if isinstance(error, PlanError):
                raise AttachError(str(error)) from error
            raise
        return worker

    def _prepare_device(self, worker: attached.AttachedWorker) -> None:
        """Find out now, and not with the first job, whether a GPU can be used; page-lock the pool.
        For the first worker without a GPU load the copy kernel.

        Raises:
            HandleError: a GPU can't be used.
        """
        if not worker.device:
            self._load_kernel()
            return
        try:
            worker.backend(self.keeper.pool.address, self.rows)
        except RayKVError as error:
            raise HandleError(f"GPU {worker.device} can't be copied from: {error}") from error
        self._lanes.open(worker.device)
        self.devices.lock_pool(worker.device, self.keeper.pool, self.keeper.geometry)

    def _load_kernel(self) -> None:
        """Begin to load it, once. Without a thread for it copies take longer."""
        with self._lock:
            if self._has_kernel:
                return
            self._has_kernel = True
        with contextlib.suppress(ThreadError):
            self._threads.append(threads.start_thread("raykv-load", self.rows.load))

    def _read_jobs(
        self, watch: Watch, worker: attached.AttachedWorker, reader: wire.FrameReader
    ) -> None:
        # Locks of files, in the order of the captures that they belong to.
        fds: list[int] = []
        try:
            while True:
                data, more = wire.receive_with_fds(watch.sock, wire.MAX_LOCKS)
                fds += more
                columns.require(len(fds) <= wire.MAX_LOCKS, f"{len(fds)} locks without captures")
                if watch.has_died:
                    # What it sent before it died no longer matters.
                    raise AttachError("its process has ended")
                if not data[0]:
                    return
                for raw in reader.feed(data[0]):
                    batch = framing.receive(raw, JobBatch, "a worker", "this NodeActor")
                    self._take_batch(worker, batch, fds)
        finally:
            region.close_all(fds)

    def _take_batch(self, worker: attached.AttachedWorker, batch: JobBatch, fds: list[int]) -> None:
        """Admit a message's loads and queue its jobs; the locks of captures are taken off `fds`."""
        num_locks = sum(job.capture is not None and job.capture.has_lock for job in batch.jobs)
        columns.require(num_locks <= len(fds), "a capture whose lock has not come along")
        hello, now = worker.hello, self.keeper.now()
        rejected: list[tuple[attached.QueuedJob, Refusal]] = []
        cancelled = set(batch.cancelled)
        with self._lock:
            for namespace in {job.namespace for job in batch.jobs}:
                self.forms.take(namespace, hello.layout.form)
            jobs, about = self.keeper.owner.jobs, (hello.life, hello.rank, hello.num_ranks)
            for job in jobs.announce(*about, batch.jobs, self.keeper.now()):
                capture = job.job.capture
                lock_fd = fds.pop(0) if capture is not None and capture.has_lock else -1
                queued = attached.QueuedJob(worker, job, now, lock_fd)
                push = self._lanes.push if capture is None else self.capturing.push
                if not push(queued):
                    rejected.append((queued, Refusal.QUEUE_FULL))
            for lanes in (self._lanes, self.capturing.lanes):
                taken = lanes.take(
                    lambda q: q.worker is worker and q.admitted.job.job_id in cancelled
                )
                rejected += [(queued, Refusal.CANCELLED) for queued in taken]
        for queued, refusal in rejected:
            self._reject(queued, refusal)

    def _reject(self, queued: attached.QueuedJob, refusal: Refusal) -> None:
        """Answer a job that was not begun."""
        if queued.admitted.job.capture is not None:
            reason = "the engine gave the copy up: it took too long"
            if refusal is Refusal.QUEUE_FULL:
                reason = "too many captures wait"
            elif not queued.worker.is_open:
                reason = "the engine ended before they were copied"
            self.capturing.refuse(queued, reason)
        queued.admitted.refuse_rest(refusal)
        self._end_job(queued, 0)

    def _detach(self, worker: attached.AttachedWorker) -> None:
        """The worker is gone: drop its queued jobs, wait for those that run, unmap its KV."""
        worker.close_connection()
        hello = worker.hello
        with self._lock:
            self._workers.discard(worker)
            # What it has not stored is void from now on, though its copies may go on for a moment.
            self.keeper.owner.jobs.end_line(hello.life, hello.rank)
            self._lock.notify_all()
        # Whatever fails, its memory goes, and not before its jobs.
        with contextlib.ExitStack() as stack:
            stack.callback(worker.unmap)
            for queued in [*self._lanes.drop(worker), *self.capturing.lanes.drop(worker)]:
                stack.callback(self._reject, queued, Refusal.CANCELLED)

    # Copies

    def _run(self, queued: attached.QueuedJob) -> None:
        """Carry out one job; every failure becomes an answer, never an exception."""
        num_bytes = 0
        began = self.keeper.now()
        try:
            num_bytes = self._copying.carry_out(queued)
        except PlanError as error:
            logger.warning("refused a malformed job: %s", error)
            queued.admitted.refuse_rest(Refusal.BAD_HANDLE)
        except Exception:
            logger.exception("job %d failed", queued.admitted.job.job_id)
            queued.admitted.refuse_rest(Refusal.COPY_FAILED)
        waited_s, took_s = began - queued.submitted_at, self.keeper.now() - began
        with self._lock:
            self.meter.ran(queued.direction, waited_s, took_s)
        self._end_job(queued, num_bytes)

    def _end_job(self, queued: attached.QueuedJob, num_bytes: int) -> None:
        """No copy of a job runs any more, and `num_bytes` were copied: tell the worker."""
        job, took_s = queued.admitted, self.keeper.now() - queued.submitted_at
        with self._lock:
            self.keeper.end_chunks(job, sorted(job.under_way), ok=False)
            result = self.keeper.owner.jobs.end_job(job, num_bytes, took_s)
            if job.job.capture is None:
                self._count(queued, result, num_bytes)
        queued.worker.send(JobResults([result]))

    def _count(self, queued: attached.QueuedJob, result: copies.CopyResult, num_bytes: int) -> None:
        refused = [Refusal(each) for each in result.refusals]
        done = len(queued.admitted.keys) - len(refused)
        kind = "stored" if queued.direction is Direction.STORE else "loaded"
        self._counters[f"bytes_{kind}"] += num_bytes
        self._counters[f"chunks_{kind}"] += done
        self._counters["chunks_refused"] += len(refused)
        self._counters["jobs_cancelled"] += Refusal.CANCELLED in refused
        self.meter.refusals.update(refused)

    # Looking

    def is_copying(self) -> bool:
        """Whether copies wait or run."""
        return self._lanes.is_wanted()

    def stats(self) -> node.NodeStats:
        """Counters and gauges."""
        states = self.capturing.stats()
        with self._lock:
            now = node.NodeStats(
                pool_bytes=self.keeper.geometry.pool_bytes,
                prefaulted_bytes=self.keeper.pool.prefaulted_bytes,
                used_bytes=sum(self.keeper.owner.index.contents()[0].values()),
                num_workers=len(self._workers),
                ranks=dict(Counter(worker.hello.engine_id for worker in self._workers)),
                queued_jobs=len(self._lanes),
                quarantined=self.keeper.num_quarantined,
                locked_bytes=self.devices.locked_bytes,
                states=states,
                threads_failed=threads.num_failed(),
            )
            return msgspec.structs.replace(now, **self._counters)


def boot_life() -> int:
    """A life that is higher with every start of a process on this host until it reboots, in µs.

    Taken from the clock since boot, which nobody sets: it can't jump back.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
