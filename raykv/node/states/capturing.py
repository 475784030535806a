"""Hidden states of requests: copied out of an engine's KV blocks, kept for a while, and written.

    push ─► a lane: room? copy ─► answer: the blocks are free ─► a writer: order, file ─► kept
               │ cancelled, malformed, failed, no room in time
               └──► the answer refuses, and the reason goes to the readers

A capture is admitted when its states fit into the memory that captures may take; what has been
kept longest goes first. While nothing can go, because all is still being written, the copy waits,
and with it the engine: it must not compute faster than can be written.

Threads begin with the first capture. They share what `_lock` guards; nobody holds it while bytes
are copied or a disk is waited for.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.base import deadlines
from raykv.base.errors import HiddenStatesError, ThreadError, first_line
from raykv.base.ids import Direction, Refusal, group_of
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.copy.engine import HOST, HOST_SPAN_BYTES, SPAN_BYTES
from raykv.copy.plan import CopyRuns, PlanError
from raykv.copy.rows import RowCopier
from raykv.node import attached, lanes
from raykv.node.keeper import PoolKeeper
from raykv.node.states import file, index
from raykv.protocol import copies, node

logger = logging.getLogger("raykv.node")

# For room in memory, while others are written to a disk: a request's blocks stay taken as long,
# which keeps the engine from computing faster than can be written. The engine gives up earlier.
STATES_ROOM_S = 60.0

Bytes = npt.NDArray[np.uint8]

NUM_WRITERS = 4

MAX_FOLDERS = 64
"""Folders that are searched for expired files."""


class _RefusedError(Exception):
    """A capture is refused, with the reason."""

    def __init__(self, refusal: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.refusal = refusal


@dataclass(frozen=True)
class _Copied:
    """What waits for a writer; `lock_fd` is closed by it."""

    capture: copies.Capture
    pages: Bytes
    lock_fd: int


class Capturing:
    """See the module's docstring. Every method may be called from any thread.

    Args:
        keeper: has the pool. Copies go to addresses relative to its beginning.
        rows: copies within the host's memory.
        give_way: lets loads go first; called before each part of a copy.
        answer: called with how the worker's job has ended, and the bytes that were copied.
    """

    def __init__(
        self,
        keeper: PoolKeeper,
        rows: RowCopier,
        give_way: Callable[[attached.QueuedJob], None],
        answer: Callable[[attached.QueuedJob, int], None],
    ) -> None:
        self._keeper = keeper
        self._rows = rows
        self._give_way = give_way
        self._answer = answer
        self.lanes = lanes.CopyLanes(keeper, self._run, "raykv-states")
        """Of captures; one for each device that has any."""
        self._lock = threading.Condition()
        self._index = index.CaptureIndex()
        self._unwritten: deque[_Copied] = deque()
        # Of `CaptureStats`.
        self._counters: Counter[str] = Counter()
        # By folder, how long files are kept there.
        self._folders: dict[Path, float] = {}
        self._threads: list[SupervisedThread] = []
        self._stopping = False

    # Jobs

    def push(self, queued: attached.QueuedJob) -> bool:
        """Accept a capture with its lock. False: there are too many, or no thread for them; nothing
        has changed.
        """
        with self._lock:
            if not self._threads:
                self._begin()
            if self._stopping or not all(thread.revive() for thread in self._threads):
                return False
        try:
            self.lanes.open(queued.lane.device, [queued.direction])
        except ThreadError:
            return False
        return self.lanes.push(queued)

    def refuse(self, queued: attached.QueuedJob, reason: str, *, is_admitted: bool = False) -> None:
        """A capture is not made; its reader gets the reason. The lock is not held meanwhile: the
        message to the reader may go to a slow disk.
        """
        capture, now = _capture(queued), time.monotonic()
        with self._lock:
            self._counters["failed"] += 1
            if is_admitted:
                self._index.fail(capture.request_id, reason, now)
            else:
                self._index.refuse(capture.request_id, capture.ttl_s, reason, now)
            self._lock.notify_all()
        _let_go(queued.lock_fd, reason)

    def stop(self) -> None:
        """End the threads; what is not written then has no file."""
        self.lanes.stop()
        with self._lock:
            self._stopping = True
            self._lock.notify_all()
        self.lanes.join(deadlines.STOP_S)
        for thread in self._threads:
            thread.join(deadlines.STOP_S)

    # Readers

    def stats(self) -> node.CaptureStats:
        """Counters, and what is in memory now."""
        with self._lock:
            return node.CaptureStats(self._index.num_bytes, **self._counters)

    def has(self, name: str) -> bool:
        """Whether a request is known by that name, captured or failed."""
        with self._lock:
            return bool(self._index.find(name))

    def states(self, name: str, deadline_s: float) -> file.HiddenStates:
        """The states of a request, as soon as they are there.

        Args:
            name: its id, or that which vLLM has appended something to.
            deadline_s: longest wait.

        Raises:
            HiddenStatesError: there are none, and why; or several requests have that name.
        """
        give_up_at = time.monotonic() + deadline_s
        with self._lock:
            while True:
                found = self._index.find(name)
                if len(found) > 1:
                    raise HiddenStatesError(
                        f"{name!r} stands for {len(found)} requests: {', '.join(found[:8])}"
                    )
                if found and (known := self._of(found[0])) is not None:
                    return known
                left = give_up_at - time.monotonic()
                if left <= 0 or self._stopping:
                    raise HiddenStatesError(_missing(name, is_known=bool(found)))
                self._lock.wait(min(left, deadlines.IDLE_LOOK_S))

    def _of(self, request_id: str) -> file.HiddenStates | None:
        entry = self._index[request_id]
        if entry.state is index.CaptureState.FAILED:
            raise HiddenStatesError(f"no hidden states of request {request_id}: {entry.reason}")
        return entry.states

    def _begin(self) -> None:
        for name, work in [("write", self._write_all)] * NUM_WRITERS + [
            ("expire", self._expire_all)
        ]:
            thread = SupervisedThread(f"raykv-states-{name}", work, OnFailure.END_PROCESS)
            self._threads.append(thread)

    # Threads that copy

    def _run(self, queued: attached.QueuedJob) -> None:
        num_bytes = 0
        try:
            num_bytes = self._carry_out(queued)
        except _RefusedError as refused:
            queued.admitted.refuse_rest(refused.refusal)
        finally:
            self._answer(queued, num_bytes)

    def _carry_out(self, queued: attached.QueuedJob) -> int:
        """Copy, and hand over to a writer; returns the bytes that were copied.

        Raises:
            _RefusedError: it was refused, and readers know.
        """
        capture = _capture(queued)
        is_admitted = False
        try:
            runs, pages = self._plan(queued, capture)
            self._admit(queued, capture, pages.nbytes)
            is_admitted = True
            self._copy(queued, runs)
        except Exception as error:
            refused = error if isinstance(error, _RefusedError) else None
            if refused is None:
                logger.warning("hidden states of %s: %s", capture.request_id, first_line(error))
                refused = _RefusedError(
                    Refusal.COPY_FAILED, f"the copy failed: {first_line(error)}"
                )
            self.refuse(queued, str(refused), is_admitted=is_admitted)
            raise refused from error
        with self._lock:
            self._counters.update(captured=1, bytes_captured=pages.nbytes)
            self._unwritten.append(_Copied(capture, pages, queued.lock_fd))
            self._lock.notify_all()
        return pages.nbytes

    def _plan(self, queued: attached.QueuedJob, capture: copies.Capture) -> tuple[CopyRuns, Bytes]:
        """What is to be copied, and fresh memory for it, [number of blocks, bytes of a page]."""
        block_ids = queued.admitted.job.block_ids
        try:
            planner = queued.worker.planner
            layer = planner.layer(group_of(queued.admitted.keys[0]), capture.layer)
            wrong = copies.capture_objection(capture, len(block_ids), layer.page_bytes)
            if wrong:
                raise PlanError(wrong)
            pages = np.empty((len(block_ids), layer.page_bytes), np.uint8)
            to = pages.ctypes.data - self._keeper.pool.address
            return planner.pages(layer, block_ids, to), pages
        except PlanError as error:
            logger.warning("refused a malformed capture: %s", error)
            raise _RefusedError(Refusal.BAD_HANDLE, f"invalid capture: {error}") from error

    def _admit(self, queued: attached.QueuedJob, capture: copies.Capture, num_bytes: int) -> None:
        """Wait for room.

        Raises:
            _RefusedError: there was none in time, or the engine has given up.
        """
        give_up_at = time.monotonic() + STATES_ROOM_S
        name, most = capture.request_id, capture.most_bytes
        with self._lock:
            if name in self._index:
                raise _RefusedError(Refusal.BAD_HANDLE, "a request of that name has been captured")
            while True:
                now = time.monotonic()
                if self._index.admit(name, num_bytes, most, capture.ttl_s, now):
                    return
                if now >= give_up_at or queued.stop() or self._stopping:
                    raise _RefusedError(
                        Refusal.CANCELLED,
                        f"hidden_states_bytes={most} has been full of states that are still being "
                        "written, for as long as a store may take",
                    )
                self._lock.wait(deadlines.IDLE_LOOK_S)

    def _copy(self, queued: attached.QueuedJob, runs: CopyRuns) -> None:
        backend = queued.worker.backend(self._keeper.pool.address, self._rows)
        most_bytes = HOST_SPAN_BYTES if queued.lane.device == HOST else SPAN_BYTES
        parts = self._parts(queued, runs, max(1, most_bytes // int(runs.size[0])))
        with contextlib.closing(backend.copy_each(Direction.STORE, parts, queued.stop)) as answers:
            done = all(answers)
        if not done or queued.stop():
            raise _RefusedError(Refusal.CANCELLED, "the engine ended, or gave the copy up")

    def _parts(self, queued: attached.QueuedJob, runs: CopyRuns, step: int) -> Iterator[CopyRuns]:
        """Pages copied at once; more urgent copies go before each."""
        for first in range(0, len(runs), step):
            self._give_way(queued)
            yield runs.some(slice(first, first + step))

    # The threads that write

    def _write_all(self) -> None:
        while (copied := self._next_to_write()) is not None:
            capture = copied.capture
            problem = ""
            try:
                states = arranged(copied.pages, capture)
                with self._lock:
                    self._index[capture.request_id].states = states
                    self._lock.notify_all()
                if capture.path:
                    file.write_states(capture.path, states)
            except Exception as error:
                problem = str(error) or type(error).__name__
                logger.warning("hidden states of %s: %s", capture.request_id, problem)
            _let_go(copied.lock_fd, problem)
            self._written(capture, problem)

    def _next_to_write(self) -> _Copied | None:
        with self._lock:
            while not self._stopping:
                if self._unwritten:
                    return self._unwritten.popleft()
                self._lock.wait(deadlines.WAKE_S)
        return None

    def _written(self, capture: copies.Capture, problem: str) -> None:
        name, now = capture.request_id, time.monotonic()
        with self._lock:
            if self._index[name].states is not None:
                self._index.written(name, now, problem)
            else:
                self._index.fail(name, problem, now)
            if capture.path:
                self._counters["files_failed" if problem else "files_written"] += 1
            folder = Path(capture.path).parent
            if capture.path and (folder in self._folders or len(self._folders) < MAX_FOLDERS):
                self._folders[folder] = capture.ttl_s
            self._lock.notify_all()

    # The thread that forgets

    def _expire_all(self) -> None:
        while not self._stopping:
            with self._lock:
                self._index.expire(time.monotonic())
                folders = dict(self._folders)
                self._lock.notify_all()
            for folder, ttl_s in folders.items():
                delete_expired(folder, ttl_s, time.time())
            give_up_at = time.monotonic() + deadlines.SELDOM_S
            with self._lock:
                while (left := give_up_at - time.monotonic()) > 0 and not self._stopping:
                    self._lock.wait(left)


def delete_expired(folder: Path, ttl_s: float, now: float) -> None:
    """Delete files of states, and their locks, that have not been cleaned up for this long.

    `now`: seconds since 1970.

    A file whose lock is gone belongs to the process that deleted the lock.
    """
    try:
        locks = [path for path in folder.iterdir() if path.name.endswith(file.LOCK_SUFFIX)]
    except OSError:
        return
    for lock in locks:
        if file.is_expired(lock, now, ttl_s):
            try:
                file.cleanup_hidden_states(str(lock).removesuffix(file.LOCK_SUFFIX))
            except OSError as error:
                logger.debug("%s can't be deleted: %s", lock, error)


def arranged(pages: Bytes, capture: copies.Capture) -> file.HiddenStates:
    """States in the order of their tokens, out of the blocks that they were copied from.

    Args:
        pages: [number of blocks, bytes of a page].
        capture: says how states lie in a page.
    """
    width = copies.STATE_WIDTHS[capture.dtype]
    token, state, number = (stride * width for stride in capture.strides)
    shape = (len(pages), capture.block_tokens, capture.num_states, capture.hidden_size)
    strides = (pages.strides[0], token, state, number)
    numbers: npt.NDArray[Any] = np.ndarray(shape, f"u{width}", pages, strides=strides)
    whole = numbers.reshape(-1, *shape[2:])[: capture.num_tokens]
    token_ids = np.frombuffer(capture.token_ids, "<i8").astype(np.int64)
    return file.HiddenStates(
        capture.request_id, np.ascontiguousarray(whole), capture.dtype, token_ids
    )


def _capture(queued: attached.QueuedJob) -> copies.Capture:
    job = queued.admitted.job
    assert job.capture is not None, job.job_id
    return job.capture


def _let_go(lock_fd: int, reason: str) -> None:
    if lock_fd >= 0:
        try:
            file.settle(lock_fd, reason)
        finally:
            with contextlib.suppress(OSError):
                os.close(lock_fd)


def _missing(name: str, *, is_known: bool) -> str:
    if is_known:
        return f"the hidden states of request {name} have not been copied in time"
    return (
        f"no hidden states of request {name} are here: it has not ended, its engine does not "
        "capture any, or they have expired or made room for others (hidden_states_ttl_s, "
        "hidden_states_bytes)"
    )
