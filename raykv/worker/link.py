"""A worker's line to its NodeActor: jobs out, results in, and no wait without an end.

      submit          sent          result
  ──────────► QUEUED ─────► FLYING ────────► done
                 │             │ deadline: cancel word + message
                 │             ▼
                 │          CANCELLING ── result ──► done
                 │             │ grace over, or the line broke
                 │             ▼
                 │          the NodeActor is killed, and can't write any more ──► done, failed
                 └── no line, breaker open, or deadline ──► done, failed

The one thing that must never happen is that a copy goes on after its job was reported failed:
vLLM gives the blocks to another request, and a late copy would write into it. So a job that was
sent is reported only when the NodeActor has answered, or can't write any more.

A process that was sent SIGKILL exits late when it gets no core, when it has much memory to give
back, or when its driver or file system hangs. It has *halted* before that: none of its threads runs
its own code any more. That is enough for memory which only its own code writes to. What a GPU was
ordered to copy for it may still be copied until the driver has taken its context down, which is a
part of its exit. If neither comes about in `LINK_LAST_S` the engine ends itself.

Threads: the engine's thread submits, waits and drains; one thread of the link does everything
else. They share only what `_lock` guards.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from raykv.base import deadlines
from raykv.base.errors import AttachError
from raykv.base.ids import Direction, Refusal
from raykv.base.settings import Settings
from raykv.base.threads import OnFailure, SupervisedThread, end_process
from raykv.cluster import breaker, deaths
from raykv.memory.handles import MEMFD
from raykv.memory.words import CancelWords
from raykv.protocol import copies, engine, framing, measures, wire, worker
from raykv.worker.job import JobRequest, PendingJob, Stage, batches

logger = logging.getLogger("raykv.worker")

# For the exit of a NodeActor that was killed, which takes milliseconds on a quiet machine; then it
# is enough that none of its threads runs any more, where only these could write.
LINK_EXIT_S = 2.0

# For the exit of a killed NodeActor that a GPU may still copy for: a driver takes seconds to unlock
# hundreds of GiB. After that the engine ends, since its memory is not its own any more.
LINK_LAST_S = 60.0

ALL_LAYERS = 1 << 30
"""More than there are: waits for the end of a job."""

_NEVER_FAILED = measures.BreakerReport()


@dataclass(frozen=True)
class LinkSettings:
    """Deadlines in seconds. `step_deadline_s` is that of loads, and of a wait for stores."""

    step_deadline_s: float = Settings.step_deadline_s
    store_deadline_s: float = deadlines.STORE_DEADLINE_S
    cancel_grace_s: float = deadlines.GRACE_S
    connect_deadline_s: float = deadlines.ANSWER_S


@dataclass(frozen=True)
class LinkTarget:
    """Where the NodeActor is, and how the engine introduces itself there; `life` is that of its
    EngineCore.

    Where an engine has several places, `place` is this one's number, `part` the name of what is
    there, and `ranks` are its ranks, the first part of a chunk first; empty: all.
    """

    socket_name: str
    engine_id: str
    life: int
    namespace: str
    num_ranks: int
    slot_bytes: Mapping[int, int]
    place: int = 0
    part: str = ""
    ranks: tuple[int, ...] = ()

    def number_of(self, rank: int) -> int:
        """Which part of a chunk there is a rank's; of one place `rank` is that."""
        return self.ranks.index(rank) if self.ranks else rank


class WorkerLink:
    """See the module's docstring.

    Args:
        rank: of this worker among the engine's.
        layout: of the KV cache that is shared.
        kv_fds: what opens the KV cache in the NodeActor; not closed here.
        settings: deadlines.
        end_engine: ends this process, for a reason that it logs.
    """

    def __init__(
        self,
        rank: int,
        layout: worker.KVLayout,
        kv_fds: list[int],
        settings: LinkSettings,
        end_engine: Callable[[str], object] = end_process,
    ) -> None:
        self._rank = rank
        self._layout = layout
        self._kv_fds = kv_fds
        self._settings = settings
        self._end_engine = end_engine
        self._words = CancelWords.create()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Guards everything below that both threads touch.
        self._lock = threading.Condition()
        self._target: LinkTarget | None = None
        self._pending: dict[int, PendingJob] = {}
        self._outbox: deque[int] = deque()
        self._results: deque[copies.CopyResult] = deque()
        self._stopping = False
        self._node_life = 0
        self._breakers = breaker.Breakers(breaker.Pauses(*deadlines.RETRY_PAUSES_S))
        # Why the NodeActor can't open the KV cache, as it said last; else empty.
        self.unsuited = ""
        # Only the link's own thread touches the rest.
        self._sock: socket.socket | None = None
        self._socket_name = ""
        self._pidfd = -1
        self._reader = wire.FrameReader()
        self._thread = SupervisedThread("raykv-link", self._run, OnFailure.RUN_AGAIN)
        self._thread.revive()

    # The engine's thread

    @property
    def node_life(self) -> int:
        """Life of the NodeActor that is reached now; 0 while none is."""
        return self._node_life

    def following(self) -> WorkerLink:
        """The line to use from now on: this one, or one that takes its place between jobs."""
        return self

    def set_target(self, target: LinkTarget) -> None:
        """Where to connect; the same target again costs a comparison."""
        if target == self._target:
            return
        with self._lock:
            self._target = target
            # Whatever is known of the last one says nothing about this one.
            self._breakers.worked(measures.OWN_NODE)
        self._nudge()

    def submit(self, *requests: JobRequest) -> None:
        """Hand over jobs. Their results come through `drain`, whatever happens. Raises for jobs
        that were not accepted, of which nothing is done.
        """
        settings, now = self._settings, time.monotonic()
        jobs = {}
        for request in requests:
            is_load = request.direction is Direction.LOAD
            allowed_s = settings.step_deadline_s if is_load else settings.store_deadline_s
            jobs[request.job_id] = PendingJob(request, now + allowed_s)
        with self._lock:
            assert jobs.keys().isdisjoint(self._pending), jobs.keys()
            self._pending.update(jobs)
            self._outbox.extend(jobs)
        try:
            self._revive()
            self._nudge()
        except Exception:
            # The jobs were accepted: the next look for their results tries again.
            logger.exception("the line to the NodeActor could not be woken")

    @property
    def is_idle(self) -> bool:
        """Whether all jobs have ended, and `drain` has said so."""
        with self._lock:
            return not self._pending and not self._results

    def drain(self) -> list[copies.CopyResult]:
        """Jobs that have ended since the last call."""
        if not self._results:
            return []
        with self._lock:
            results = list(self._results)
            self._results.clear()
        return results

    def wait(self, job_ids: Collection[int]) -> None:
        """Return when none of the jobs touches the KV cache any more; unknown ids are ignored.

        The step's deadline is the jobs' deadline from now on, so that the wait has an end.
        """
        latest = time.monotonic() + self._settings.step_deadline_s
        with self._lock:
            for job_id in job_ids:
                pending = self._pending.get(job_id)
                if pending is not None:
                    pending.deadline = min(pending.deadline, latest)
            self._nudge()
            while any(job_id in self._pending for job_id in job_ids) and not self._stopping:
                self._lock.wait(deadlines.IDLE_LOOK_S)
                self._revive()

    def finish(self, job_ids: Collection[int]) -> None:
        """Return when the jobs have ended, as after `wait`; also where that one needs no wait."""
        self.wait(job_ids)

    def wait_layers(self, job_ids: Collection[int], count: int) -> bool:
        """Return when `count` layers of the jobs are there, or the jobs have ended.

        Their own deadlines end them. Unknown ids are ignored. False: it was given up, since the
        line is being closed.
        """
        with self._lock:
            while self._lacks(job_ids, count) and not self._stopping:
                self._lock.wait(deadlines.IDLE_LOOK_S)
                self._revive()
            return not self._lacks(job_ids, count)

    def _lacks(self, job_ids: Collection[int], count: int) -> bool:
        known = (self._pending[job_id] for job_id in job_ids if job_id in self._pending)
        return any(pending.layers < count for pending in known)

    def _revive(self) -> None:
        """Where there was no thread for the line, try again; jobs fail until that succeeds.

        None of them was sent: a thread that has begun ends with the line only.
        """
        if not self._stopping and not self._thread.revive():
            self._fail_queued()

    def close(self, timeout_s: float) -> None:
        """End the line. The NodeActor sees it and drops our jobs; returns within `timeout_s`."""
        with self._lock:
            self._stopping = True
        self._nudge()
        self._thread.join(timeout_s)

    def breaker_report(self) -> measures.BreakerReport:
        """Whether the NodeActor is left alone; each step asks, mostly where nothing has failed."""
        if not self._breakers.num_failed:
            return _NEVER_FAILED
        with self._lock:
            return self._breakers.report(time.monotonic())

    def _nudge(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake, 1)

    # The link's thread

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._step()
        except Exception as error:
            # The line begins anew, and so does this.
            self._disconnect(f"{type(error).__name__}: {error}")
            raise
        self._abandon_all()

    def _step(self) -> None:
        """Connect if needed, wait for something to happen, and deal with it."""
        if self._sock is not None and self._has_moved:
            self._disconnect("the engine is at another Ray node")
        if self._sock is None:
            self._try_connect()
        self._send_queued()
        self._enforce_deadlines()
        timeout_s = self._time_to_next_event()
        watched = [self._wake] if self._sock is None else [self._wake, self._sock.fileno()]
        readable = wire.wait_readable(watched, timeout_s)
        if self._wake in readable:
            os.eventfd_read(self._wake)
        if self._sock is not None and self._sock.fileno() in readable:
            self._receive(self._sock)

    @property
    def _has_moved(self) -> bool:
        """Whether the line is to a NodeActor that is not the engine's any more."""
        return self._target is not None and self._target.socket_name != self._socket_name

    def _time_to_deadline(self) -> float:
        now = time.monotonic()
        with self._lock:
            times = [pending.deadline for pending in self._pending.values()]
        return max(0.0, min(times, default=now + deadlines.WAKE_S) - now)

    def _time_to_next_event(self) -> float:
        times = [deadlines.WAKE_S, self._time_to_deadline()]
        if self._sock is None and self._target is not None:
            with self._lock:
                times.append(self._breakers.wait_s(measures.OWN_NODE, time.monotonic()))
        return min(times)

    def _try_connect(self) -> None:
        """One attempt, unless the breaker is open; jobs wait for the first attempt only."""
        target = self._target
        if target is None:
            return
        with self._lock:
            is_closed = self._breakers.is_closed(measures.OWN_NODE)
            call = self._breakers.begin(measures.OWN_NODE, time.monotonic())
        if not is_closed:
            self._fail_queued()
        if call is None:
            return
        try:
            self._connect(target)
        except Exception as error:
            self._failed(call, str(error) or type(error).__name__)
            self._fail_queued()
            return
        with self._lock:
            is_back = self._breakers.worked(measures.OWN_NODE)
        if is_back:
            logger.warning("the line to the NodeActor is there again")

    def _failed(self, call: int, reason: str) -> None:
        """Leave the NodeActor alone for a while; said once until it is back."""
        with self._lock:
            is_new = self._breakers.failed(measures.OWN_NODE, call, time.monotonic(), reason)
        if is_new and not self._stopping:
            logger.warning("no line to the NodeActor: %s", reason)

    def _connect(self, target: LinkTarget) -> None:
        give_up_at = time.monotonic() + self._settings.connect_deadline_s
        sock = wire.connect(target.socket_name, self._settings.connect_deadline_s)
        pidfd = -1
        try:
            pidfd = os.pidfd_open(wire.peer_of(sock))
            hello = worker.AttachWorker(
                target.engine_id,
                target.life,
                target.namespace,
                target.number_of(self._rank),
                target.num_ranks,
                dict(target.slot_bytes),
                # How KV lies in the chunks of a part is not known to those who look into them.
                replace(self._layout, form=worker.KVForm()) if target.part else self._layout,
            )
            wire.send_with_fds(sock, hello, [self._words.region.fd, *self._kv_fds])
            reader = wire.FrameReader()
            answer = self._await_attached(sock, reader, give_up_at)
        except BaseException:
            sock.close()
            if pidfd >= 0:
                os.close(pidfd)
            raise
        wire.limit_sends(sock, self._settings.cancel_grace_s)
        self._sock, self._pidfd, self._reader = sock, pidfd, reader
        self._socket_name = target.socket_name
        with self._lock:
            self._node_life = answer.life
        logger.info("attached to NodeActor, in its life %d", answer.life)

    def _await_attached(
        self, sock: socket.socket, reader: wire.FrameReader, give_up_at: float
    ) -> engine.Welcome:
        """Meanwhile jobs keep their deadlines, and the engine may end."""
        while True:
            left = give_up_at - time.monotonic()
            if left <= 0 or self._stopping:
                raise AttachError("the NodeActor has not answered in time")
            watched = [sock.fileno(), self._wake]
            readable = wire.wait_readable(watched, min(left, self._time_to_deadline()))
            self._enforce_deadlines()
            if self._wake in readable:
                os.eventfd_read(self._wake)
            if sock.fileno() not in readable:
                continue
            data = sock.recv(1 << 16)  # bounded: it is readable
            if not data:
                raise AttachError("the NodeActor closed the connection while we attached")
            for raw in reader.feed(data):
                answer = framing.receive(raw, worker.NodeMessage, "the NodeActor", "this worker")
                if not isinstance(answer, engine.Welcome):
                    raise AttachError(f"unexpected answer to the attach message: {answer}")
                self.unsuited = answer.error if answer.unsuited else ""
                if answer.error:
                    raise AttachError(answer.error)
                return answer

    def _send_queued(self) -> None:
        if self._sock is None:
            return
        with self._lock:
            requests = [self._pending[i].request for i in self._outbox if i in self._pending]
            for request in requests:
                self._pending[request.job_id].stage = Stage.FLYING
            self._outbox.clear()
        for request in requests:
            if request.num_bytes > wire.MAX_FRAME_BYTES:
                self._fail(self._pending[request.job_id], Refusal.BAD_HANDLE)
        fitting = [each for each in requests if each.num_bytes <= wire.MAX_FRAME_BYTES]
        plain = [each for each in fitting if each.job.capture is None]
        # No store of a message takes the slot of a load, which comes no later.
        plain.sort(key=lambda each: each.direction is not Direction.LOAD)
        for jobs in batches(plain, wire.MAX_FRAME_BYTES):
            self._send(worker.JobBatch(jobs))
        for request in fitting:
            if request.job.capture is not None:
                # One by one: each has its lock.
                self._send(worker.JobBatch([request.job]), [request.lock_fd])

    def _send(self, batch: worker.JobBatch, lock_fds: Collection[int] = ()) -> None:
        if self._sock is None:
            return
        try:
            fds = [fd for fd in lock_fds if fd >= 0]
            if fds:
                wire.send_with_fds(self._sock, batch, fds)
            else:
                # bounded: SO_SNDTIMEO, set when the line is up
                self._sock.sendall(wire.frame(batch))
        except OSError as error:
            self._disconnect(f"it does not take jobs: {error}")

    def _receive(self, sock: socket.socket) -> None:
        try:
            data = sock.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect("it is gone")
            return
        for raw in self._reader.feed(data):
            message = framing.receive(raw, worker.NodeMessage, "the NodeActor", "this worker")
            if isinstance(message, worker.JobResults):
                for result in message.results:
                    self._finish(result)
                self._note(message.layers)

    def _note(self, layers: dict[int, int]) -> None:
        """Layers that have come, of jobs that go on."""
        with self._lock:
            for job_id in layers.keys() & self._pending.keys():
                self._pending[job_id].layers = layers[job_id]
            self._lock.notify_all()

    def _finish(self, result: copies.CopyResult) -> None:
        with self._lock:
            pending = self._pending.pop(result.job_id, None)
            if pending is None:
                return
            believed = worker.believable(result, pending.request.num_chunks)
            if believed is not result:
                logger.warning("job %d counts as failed: its result is absurd", result.job_id)
            self._results.append(believed)
            self._lock.notify_all()

    def _fail(self, pending: PendingJob, refusal: Refusal) -> None:
        request = pending.request
        self._finish(worker.not_done(request.job_id, request.num_chunks, refusal))

    def _fail_queued(self) -> None:
        """There is no line: jobs that were never sent have failed."""
        with self._lock:
            queued = [p for p in self._pending.values() if p.stage is Stage.QUEUED]
            self._outbox.clear()
        for pending in queued:
            self._fail(pending, Refusal.NODE_LOST)

    def _enforce_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [p for p in self._pending.values() if now >= p.deadline]
        if not late:
            return
        if any(pending.stage is Stage.CANCELLING for pending in late):
            self._disconnect("it did not answer in time, and is ended")
            return
        for pending in late:
            self._cancel(pending, now)
        self._send(worker.JobBatch([], [pending.request.job_id for pending in late]))

    def _cancel(self, pending: PendingJob, now: float) -> None:
        if pending.stage is Stage.QUEUED:
            self._fail(pending, Refusal.NODE_LOST)
            return
        self._words.cancel(pending.request.job_id)
        with self._lock:
            pending.stage = Stage.CANCELLING
            pending.deadline = now + self._settings.cancel_grace_s

    def _disconnect(self, reason: str) -> None:
        """Give the NodeActor up: make sure that it is dead, then fail all that was sent to it."""
        with self._lock:
            self._node_life = 0
            flying = [p for p in self._pending.values() if p.stage is not Stage.QUEUED]
            call = self._breakers.begin(measures.OWN_NODE, time.monotonic())
        if call is not None:
            self._failed(call, reason)
        # What is in memory of the host only a NodeActor's own threads write to.
        by_device = self._layout.kind != MEMFD and any(
            pending.request.direction is Direction.LOAD for pending in flying
        )
        if flying and not self._end_node_actor(by_device):
            return
        self._close()
        for pending in flying:
            self._fail(pending, Refusal.NODE_LOST)
        self._fail_queued()

    def _end_node_actor(self, by_device: bool) -> bool:
        """Kill our node's NodeActor, also a stopped one; True when it can write nothing any more.

        Ray starts it again. There is no other way on: while it lives it may write into blocks
        that vLLM is about to give to another request. False only at the engine's end.

        Args:
            by_device: it may have ordered a GPU to write into our memory.
        """
        if self._pidfd < 0:
            return True
        killed_at = time.monotonic()
        is_killed = deaths.kill(self._pidfd)
        halted = False
        while not self._stopping:
            readable = wire.wait_readable([self._pidfd, self._wake], deadlines.IDLE_LOOK_S)
            if self._wake in readable:
                os.eventfd_read(self._wake)
            if self._pidfd in readable:
                return True
            since_s = time.monotonic() - killed_at
            if since_s < LINK_EXIT_S:
                continue
            halted = halted or (is_killed and deaths.has_halted(deadlines.PROMPT_S))
            if halted and not by_device:
                logger.error(
                    "the NodeActor was killed and has not exited after %.1f s, but none of its "
                    "threads runs any more: not waiting for it",
                    since_s,
                )
                return True
            if since_s >= LINK_LAST_S:
                self._end_engine(
                    f"the NodeActor was killed and has not exited after {since_s:.0f} s, so "
                    "that it, or a GPU on its behalf, might still write into this engine's KV "
                    "cache: look for what keeps its process (`ps`, `dmesg`: no free core, a "
                    "driver or a file system that hangs), and start the engine again"
                )
                return False
        return False

    def _abandon_all(self) -> None:
        """Give all jobs up at the end: no copy may outlive the engine's use of its memory."""
        for job_id in list(self._pending):
            self._words.cancel(job_id)
        self._close()

    def _close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
