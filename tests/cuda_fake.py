"""A driver that does in this process's memory what CUDA may do, in the least convenient order.

Work is queued per stream and carried out late: only when somebody asks whether an event is done,
a little at a time, from streams drawn at random. The copies of one batch are carried out in any
order, one by one, with other streams' work between them. A batch whose sources may be read at any
time reads some of them when it is submitted. So a wait that is missing loses or garbles bytes.
"""

from __future__ import annotations

import bisect
import ctypes
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from raykv.copy.cuda.driver import Copies, CUDAError, DeviceName, MoverError, SourceOrder, Urgency

MOST_STEPS = 6
"""Carried out each time that somebody asks."""


def _move(to: int, source: int | bytes, size: int) -> None:
    ctypes.memmove(to, source, size)


@dataclass
class Event:
    """`recorded` and `done`: numbers of its last record, and of the last one that was reached."""

    recorded: int = 0
    done: int = 0


@dataclass
class Step:
    """Work of a stream: `is_ready` says whether it may begin, `act` is done once."""

    act: Callable[[], object]
    is_ready: Callable[[], bool] = lambda: True


@dataclass
class Stream:
    """What is still to be done, in order; a set of steps may be done in any order."""

    urgency: Urgency | None
    work: deque[list[Step]] = field(default_factory=deque)
    is_frozen: bool = False


@dataclass(frozen=True)
class Call:
    """A call that was made: its name, its stream, and how many copies and bytes it was for."""

    name: str
    stream: int | None = None
    num_copies: int = 0
    num_bytes: int = 0
    event: int | None = None


class FakeDriver:
    """See the module's docstring. `mover` None: as on a machine without torch for CUDA."""

    def __init__(self, seed: int = 0, mover: str | None = "fake") -> None:
        self.name = DeviceName("Fake GPU", "1.0")
        self.mover = mover
        self.calls: list[Call] = []
        self.fail_at: dict[tuple[str, int], str] = {}
        """(name, n): the n-th call of a name, from 0, fails with this error before it does
        anything."""
        self.is_mover_good = True
        """Else the first use of the mover says that it can't."""
        self.broken: str | None = None
        """An error that stays, as those of what a device has run do."""
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._handles = iter(range(1, 1 << 30))
        self.streams: dict[int, Stream] = {}
        self._dropped: list[Stream] = []
        self._events: dict[int, Event] = {}
        self._owned: dict[int, ctypes.Array[ctypes.c_char]] = {}
        self._ranges: list[tuple[int, int]] = []

    # What a test does

    def register(self, address: int, num_bytes: int) -> None:
        """Memory that copies may touch; one copy may not touch two of them."""
        bisect.insort(self._ranges, (address, address + num_bytes))

    def launch(self, stream: int, act: Callable[[], object]) -> None:
        """A kernel."""
        with self._lock:
            self.streams[stream].work.append([Step(act)])

    def run_all(self) -> None:
        """Carry out all that can be."""
        with self._lock:
            while self._step():
                pass

    def calls_of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]

    @property
    def num_pending(self) -> int:
        """Steps that were submitted and not carried out."""
        streams = (*self.streams.values(), *self._dropped)
        return sum(len(steps) for stream in streams for steps in stream.work)

    @property
    def num_allocations(self) -> int:
        return len(self._owned)

    # What a copy calls

    def make_stream(self, urgency: Urgency | None) -> int:
        with self._called("make_stream"):
            handle = next(self._handles)
            self.streams[handle] = Stream(urgency)
            return handle

    def make_event(self) -> int:
        with self._called("make_event"):
            handle = next(self._handles)
            self._events[handle] = Event()
            return handle

    def record(self, event: int, stream: int) -> None:
        with self._called("record", stream, event=event):
            found = self._events[event]
            found.recorded += 1
            number = found.recorded

            def reach() -> None:
                found.done = max(found.done, number)

            self.streams[stream].work.append([Step(reach)])

    def wait_event(self, stream: int, event: int) -> None:
        with self._called("wait_event", stream, event=event):
            found = self._events[event]
            number = found.recorded
            step = Step(lambda: None, lambda: found.done >= number)
            self.streams[stream].work.append([step])

    def is_done(self, event: int) -> bool:
        with self._called("is_done", event=event):
            for _ in range(self._random.randrange(MOST_STEPS)):
                self._step()
            found = self._events[event]
            return found.done >= found.recorded

    def copy_batch(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        with self._called("copy_batch", stream, copies):
            self._submit(stream, copies, order)

    def copy_one(self, stream: int, to: int, source: int, size: int) -> None:
        columns = (np.array([number], np.uint64) for number in (to, source, size))
        copies = Copies(*columns)
        with self._called("copy_one", stream, copies):
            self._submit(stream, copies, SourceOrder.STREAM)

    def move_pages(self, stream: int, copies: Copies) -> None:
        with self._called("move_pages", stream, copies):
            if not self.is_mover_good:
                self.mover = None
                raise MoverError("no C compiler")
            columns = np.concatenate((copies.to, copies.source, copies.size))
            assert not (columns % np.uint64(8)).any(), "a kernel moves whole words"
            self._submit(stream, copies, SourceOrder.STREAM)

    def allocate(self, num_bytes: int) -> int:
        with self._called("allocate"):
            memory = ctypes.create_string_buffer(num_bytes + 16)
            address = -(-ctypes.addressof(memory) // 16) * 16
            self._owned[address] = memory
            self.register(address, num_bytes)
            return address

    def free(self, address: int) -> None:
        with self._called("free"):
            self.run_all()
            del self._owned[address]
            self._ranges = [each for each in self._ranges if each[0] != address]

    allocate_host = allocate
    free_host = free

    def drop_stream(self, stream: int) -> None:
        with self._called("drop_stream", stream):
            self._dropped.append(self.streams.pop(stream))

    def drop_event(self, event: int) -> None:
        with self._called("drop_event", event=event):
            del self._events[event]

    # The device

    def _called(
        self,
        name: str,
        stream: int | None = None,
        copies: Copies | None = None,
        event: int | None = None,
    ) -> threading.RLock:
        with self._lock:
            number = self._counts[name]
            self._counts[name] += 1
            rows = (len(copies.size), int(copies.size.sum())) if copies else (0, 0)
            self.calls.append(Call(name, stream, *rows, event))
            if (name, number) in self.fail_at:
                raise CUDAError(f"{name} failed: {self.fail_at[name, number]}")
            if self.broken:
                raise CUDAError(f"{name} failed: {self.broken}")
        return self._lock

    def _submit(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        rows = zip(copies.to.tolist(), copies.source.tolist(), copies.size.tolist(), strict=True)
        steps = []
        for to, source, size in rows:
            if not self._is_known(to, size) or not self._is_known(source, size):
                raise CUDAError("cuMemcpyBatchAsync failed: CUDA_ERROR_INVALID_VALUE")
            steps.append(Step(self._copy(to, source, size, order)))
        self._random.shuffle(steps)
        self.streams[stream].work.append(steps)

    def _copy(self, to: int, source: int, size: int, order: SourceOrder) -> Callable[[], None]:
        if order is SourceOrder.ANY and self._random.random() < 0.5:
            early = ctypes.string_at(source, size)
            return partial(_move, to, early, size)
        return partial(_move, to, source, size)

    def _is_known(self, address: int, size: int) -> bool:
        at = bisect.bisect_right(self._ranges, (address, 1 << 63)) - 1
        return at >= 0 and address + size <= self._ranges[at][1]

    def _step(self) -> bool:
        """One step of a stream that can go on; False: there is none."""
        ready = []
        for stream in (*self.streams.values(), *self._dropped):
            while stream.work and not stream.work[0]:
                stream.work.popleft()
            if not stream.is_frozen and stream.work and stream.work[0][0].is_ready():
                ready.append(stream)
        if not ready:
            return False
        self._random.choice(ready).work[0].pop(0).act()
        return True


class Compute:
    """A worker's compute stream, its event, and a kernel that writes the KV cache."""

    def __init__(self, driver: FakeDriver) -> None:
        self._driver = driver
        self.stream = driver.make_stream(None)
        self.event = driver.make_event()

    def launch(self, act: Callable[[], object]) -> None:
        """A long kernel, and the event behind it."""
        for _ in range(30):
            self._driver.launch(self.stream, lambda: None)
        self._driver.launch(self.stream, act)
        self._driver.record(self.event, self.stream)


class WithoutWait(FakeDriver):
    """The mistake that the compute event is there for."""

    def wait_event(self, stream: int, event: int) -> None:
        pass
