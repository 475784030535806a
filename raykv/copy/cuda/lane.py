"""A GPU's streams of copies between KV caches in its memory and the page-locked pool.

Each device of a process has two lanes, one per direction, each with its stream; the loads' stream
has the higher priority, which CUDA heeds among kernels but not among copies. A lane carries out one
copy at a time: it waits until the device has finished what the worker gave it before (loads too:
zeroing of a block may still be on its way), then submits batches, a few of them on their way at
once, and ends when all of them have arrived. The parts of a copy follow each other without a gap:
one is submitted before the one in front of it is waited for.

What a copy promises, and how:

1. Nothing is read or written before the worker's compute event is done: the lane's stream waits
   for it, and no batch is submitted before that wait is over. So a copy that is stopped while it
   waits has nothing on its way.
2. Nothing is on its way when `copy` returns or raises: a copy that is stopped, or of which a call
   fails, waits for the batches that were submitted.
3. If that can't be known (the device does not answer for `CUDA_HANG_S`, or reports an error of
   what it was running, after which CUDA refuses everything), the process ends: bytes may still
   arrive in blocks that vLLM would use again, and with the process its copies end as well. Ray
   starts another NodeActor.

Its order of calls is tested on any machine with a driver that does in memory what CUDA may do, in
the least convenient order.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from typing import NoReturn

from raykv.base import deadlines
from raykv.base.ids import Direction
from raykv.copy.cuda import batches, pages
from raykv.copy.cuda.driver import CopyDriver, MoverError, SourceOrder
from raykv.copy.engine import StopSign
from raykv.copy.plan import CopyRuns
from raykv.memory.cuda.driver import CUDAError

logger = logging.getLogger("raykv.copy")

# A batch of at most 32 MiB takes milliseconds: a device that has not carried it out by then hangs.
# The batch cannot be taken back, so the process ends.
CUDA_HANG_S = 10.0

# How long a copy thread polls a device without a pause: a chunk takes a tenth of a millisecond, and
# so do falling asleep and waking up.
CUDA_SPIN_S = 0.0002

# Between two polls of a device after that; in threads that `raykv.base.threads.sleep_precisely` was
# called in, else Linux adds 50 µs to every sleep, also to one of no time.
CUDA_POLL_S = 0.0001

OnLost = Callable[[CUDAError], NoReturn]

NEVER = StopSign()
"""Nothing stops what was submitted."""

PARTS_IN_FLIGHT = 2
"""One is copied while the next one is submitted, which takes about as long on an H100."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what is in flight at once; at 50 GB/s it arrives within 1.5 ms.

    A batch takes up to 1.5 ms to submit (0.5 to 0.7 µs a run on an H100), before which the device
    does not begin with it: small ones, and some of them in flight; the first one of a copy is
    smaller still. But each costs a copy thread 50 µs besides. What is gathered takes half a
    millisecond each time, whatever its size: large ones. `staging_bytes` of the device's memory are
    taken for each direction when the first small pages are copied.
    """

    first_bytes: int = 2 << 20
    batch_bytes: int = 16 << 20
    batch_runs: int = 2048
    cut_bytes: int = batches.CUT_BYTES
    staging_bytes: int = 32 << 20
    gather_runs: int = 8192
    in_flight: int = 4
    compute_s: float = deadlines.STORE_DEADLINE_S
    hang_s: float = CUDA_HANG_S


def end_process(error: CUDAError) -> NoReturn:
    """Copies of this process can be neither finished nor taken back: see the module's docstring."""
    logger.critical("this process ends, because its copies may still be on their way: %s", error)
    os.kill(os.getpid(), signal.SIGKILL)
    raise error


@dataclass(frozen=True)
class Place:
    """Where one worker's copies go: addresses of its KV cache here and of the pool, and the event
    that it records when it has computed.

    The event may be recorded again at any time: a copy waits for the record that was the last one
    when it began.
    """

    kv: int
    pool: int
    compute_event: int | None


class Lane:
    """One direction of a device. Any thread may copy; one at a time does."""

    def __init__(
        self,
        driver: CopyDriver,
        direction: Direction,
        limits: Limits,
        on_lost: OnLost,
        choose: batches.ChooseRoute,
    ) -> None:
        self.direction = direction
        self._choose = choose
        self._driver, self._limits, self._on_lost = driver, limits, on_lost
        # Bytes and runs.
        self._at_once = {
            batches.Route.BATCH: (limits.batch_bytes, limits.batch_runs),
            batches.Route.GATHER: (limits.staging_bytes, limits.gather_runs),
        }
        bounds = zip(*self._at_once.values(), strict=True)
        self._most_bytes, self._most_runs = map(max, bounds)
        self._lock = threading.Lock()
        self._stream = driver.make_stream(direction)
        self._events = [driver.make_event() for _ in range(limits.in_flight)]
        self._end = driver.make_event()
        self._part_ends = [driver.make_event() for _ in range(PARTS_IN_FLIGHT)]
        self._buffer: int | None = None
        self._has_memory = True

    def copy_each(self, parts: Iterable[CopyRuns], place: Place, stop: StopSign) -> Generator[bool]:
        """Carry out all parts; see `CopyBackend.copy_each` and the module's promises.

        Raises:
            CUDAError: the device refused; nothing is on its way.
        """
        while not self._lock.acquire(timeout=deadlines.BRIEF_S):
            if stop():
                yield False
                return
        try:
            # The first one is made up while the device computes.
            rest = iter(parts)
            first = [*islice(rest, 1)]
            if not first:
                return
            if not self._wait_for_compute(place.compute_event, stop):
                yield False
                return
            with self._drained():
                is_whole = yield from self._copy_each(chain(first, rest), place, stop)
            if not is_whole:
                yield False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give the device's resources back; no copy may run."""
        if self._buffer is not None:
            self._driver.free(self._buffer)
        for event in (*self._events, *self._part_ends, self._end):
            self._driver.drop_event(event)
        self._driver.drop_stream(self._stream)

    def _copy_each(
        self, parts: Iterable[CopyRuns], place: Place, stop: StopSign
    ) -> Generator[bool, None, bool]:
        """True for each part that has arrived; returns False if it was stopped."""
        number, flying = 0, deque[int]()
        for part, rows in enumerate(parts):
            for route, batch in self._batches(rows, place, is_first=not part):
                turn = number % len(self._events)
                if number >= len(self._events):
                    self._await(self._events[turn])
                if stop():
                    return False
                if route is batches.Route.GATHER and self._driver.mover is not None:
                    self._submit_gather(batch, place)
                else:
                    self._submit_batch(batch, place)
                self._driver.record(self._events[turn], self._stream)
                number += 1
            end = self._part_ends[part % PARTS_IN_FLIGHT]
            self._driver.record(end, self._stream)
            flying.append(end)
            if len(flying) == PARTS_IN_FLIGHT:
                self._await(flying.popleft())
                yield True
        while flying:
            self._await(flying.popleft())
            yield True
        return True

    def _wait_for_compute(self, event: int | None, stop: StopSign) -> bool:
        """Whether the device has done what was asked for; False: stopped meanwhile.

        Raises:
            CUDAError: it has not for `deadlines.STORE_DEADLINE_S`.
        """
        if event is None:
            return not stop()
        done: bool | None = None
        try:
            self._driver.wait_event(self._stream, event)
            self._driver.record(self._end, self._stream)
            done = self._poll(self._end, self._limits.compute_s, stop)
        finally:
            if not done:
                self._renew_stream()
        if done is None:
            raise CUDAError(
                f"the GPU has not finished the step before a copy within "
                f"{self._limits.compute_s:.0f} s; the copy is given up"
            )
        return done

    def _renew_stream(self) -> None:
        """The copies of other workers shall not wait for the step of this one."""
        waiting, self._stream = self._stream, self._driver.make_stream(self.direction)
        self._driver.drop_stream(waiting)

    @contextlib.contextmanager
    def _drained(self) -> Iterator[None]:
        """Wait for all that was submitted, also when the body returns or raises."""
        try:
            yield
        finally:
            try:
                self._driver.record(self._end, self._stream)
            except CUDAError as error:
                self._on_lost(error)
            self._await(self._end)

    def _await(self, event: int) -> None:
        """Wait for what was submitted; if that can't be, this does not return."""
        try:
            done = self._poll(event, self._limits.hang_s, NEVER)
        except CUDAError as error:
            self._on_lost(error)
        if not done:
            self._on_lost(CUDAError(f"the GPU hangs: no copy for {self._limits.hang_s:.0f} s"))

    def _poll(self, event: int, limit_s: float, stop: StopSign) -> bool | None:
        """True if the event is done, False if the copy was stopped, None after the limit."""
        began = time.monotonic()
        while not self._driver.is_done(event):
            if stop():
                return False
            waited = time.monotonic() - began
            if waited > limit_s:
                return None
            time.sleep(CUDA_POLL_S if waited > CUDA_SPIN_S else 0)
        return not stop()

    def _batches(
        self, rows: CopyRuns, place: Place, *, is_first: bool
    ) -> Iterator[tuple[batches.Route, CopyRuns]]:
        """Batches and the way of each. What is gathered fits in the staging buffer."""
        limits, at_once = self._limits, self._at_once
        for some in batches.batches(rows, self._most_bytes, self._most_runs):
            route = batches.Route.GATHER if self._is_gathered(some, place) else batches.Route.BATCH
            if is_first and route is batches.Route.BATCH:
                least = min(limits.first_bytes, limits.batch_bytes)
                begin = next(batches.batches(some, least, limits.batch_runs))
                yield route, begin
                some = some.some(slice(len(begin), None))
            is_first = False
            yield from ((route, part) for part in batches.batches(some, *at_once[route]))

    def _is_gathered(self, batch: CopyRuns, place: Place) -> bool:
        if self._choose(self.direction, batch) is batches.Route.BATCH or self._driver.mover is None:
            return False
        if place.kv % pages.WORD_BYTES or not batches.has_words(batch):
            return False
        fits = int(batch.size.max()) <= self._limits.staging_bytes
        return fits and self._get_buffer() is not None

    def _get_buffer(self) -> int | None:
        """The staging buffer. One for all batches: the stream uses it for one after the other.

        Its memory is asked for once; None if vLLM has taken all of it.
        """
        if self._buffer is None and self._has_memory:
            try:
                self._buffer = self._driver.allocate(self._limits.staging_bytes)
            except CUDAError as error:
                self._has_memory = False
                logger.warning(
                    "small pages are copied one by one, which is slower: %d MiB of the GPU's "
                    "memory for staging can't be had (%s): lower gpu_memory_utilization a little",
                    self._limits.staging_bytes >> 20,
                    error,
                )
        return self._buffer

    def _submit_batch(self, batch: CopyRuns, place: Place) -> None:
        copies = batches.direct(batch, self.direction, place.kv, place.pool)
        self._driver.copy_batch(self._stream, copies, self._order)

    def _submit_gather(self, batch: CopyRuns, place: Place) -> None:
        buffer = self._get_buffer()
        assert buffer is not None, "only what can be staged is gathered"
        steps = batches.staged(batch, self.direction, place.kv, place.pool, buffer)
        try:
            if self.direction is Direction.STORE:
                self._driver.move_pages(self._stream, steps.pages)
                self._driver.copy_batch(self._stream, steps.blocks, self._order)
            else:
                self._driver.copy_batch(self._stream, steps.blocks, self._order)
                self._driver.move_pages(self._stream, steps.pages)
        except MoverError as error:
            logger.warning("small pages are copied one by one from now on: %s", error)
            self._submit_batch(batch, place)

    @property
    def _order(self) -> SourceOrder:
        """A slot that is read is not written meanwhile; a KV cache is."""
        return SourceOrder.ANY if self.direction is Direction.LOAD else SourceOrder.STREAM


class Device:
    """A GPU as this process copies to and from it. Made once, and used by all its workers.

    `choose` says which route a batch takes, where both are possible.
    """

    def __init__(
        self,
        driver: CopyDriver,
        limits: Limits | None = None,
        on_lost: OnLost = end_process,
        choose: batches.ChooseRoute = batches.usual_route,
    ) -> None:
        self.driver = driver
        self.limits = limits or Limits()
        self.lanes = {way: Lane(driver, way, self.limits, on_lost, choose) for way in Direction}

    def close(self) -> None:
        """Give the device's resources back; no copy may run."""
        for lane in self.lanes.values():
            lane.close()
