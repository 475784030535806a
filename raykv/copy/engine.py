"""What every copy back end promises, and the queue in which jobs wait for their lane.

A lane is one direction of one device, or of the host's memory. Lanes do not wait for each other: a
store may wait for what a GPU computes, and a request waits for a load. Within a lane the order of
submission is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from raykv.base.ids import Direction
from raykv.copy.plan import CopyRuns
from raykv.memory.words import Word

MAX_QUEUED_JOBS = 4096
"""Per lane. An engine submits a few jobs a step: a queue this long means that copies stand. Not for
all lanes together: stores that stand must leave room for loads."""

SPAN_BYTES = 32 << 20
"""Of chunks that are copied with one call of a back end, whose end is waited for, which takes as
long as the copy of a small chunk. A device gathers as much at once (`raykv.copy.cuda.lane.Limits`):
1 ms at the speed of PCIe, in which the next part is submitted. All chunks of a part fail together
when its job is cancelled, so it should not be much larger."""

HOST_SPAN_BYTES = 4 << 20
"""For stores out of the host's memory: half a millisecond, for which they may hold up a load. Loads
give way to none: with parts as large as a device's one of 96 MiB takes 0.8 ms less."""

HOST = ""
"""Stands in place of a device's UUID for KV caches in the host's memory."""


class LaneName(NamedTuple):
    """Jobs with the same one are carried out one after the other."""

    device: str
    direction: Direction


class StopSign:
    """Says that a copy is to end: when one of some words in memory is set.

    Words and not a function alone, because compiled code that runs without the GIL reads them.
    Another process may set them; who made the sign keeps their memory mapped while it is used.
    """

    def __init__(self, words: Sequence[Word] = ()) -> None:
        self._words = words
        self.rows = np.array(words, np.uint64).reshape(-1, 2)
        """Address and value of each word, shape [number of words, 2]."""

    def __call__(self) -> bool:
        """Whether a word is set."""
        return any(word.is_set for word in self._words)


class CopyBackend(Protocol):
    """Moves bytes between one worker's KV cache and the pool."""

    def copy_each(
        self, direction: Direction, parts: Iterable[CopyRuns], stop: StopSign
    ) -> Generator[bool]:
        """Carry out parts in order, with an answer for each; after a False there is none.

        `stop` is looked at before every run, and a large run may be cut into pieces with a look
        before each; when it is set nothing more is begun and the answer is False. A device is
        given bounded batches of runs, with a look before each.

        All bytes of a part have arrived when its answer is True. A device may begin the next part
        before it answers for one: a part without a True may or may not have been copied, but
        nothing is on its way any more when the answer is False, and when the generator raises,
        ends or is closed.
        """


J = TypeVar("J")


class JobQueue(Generic[J]):
    """The jobs that wait, and which lanes have one that runs; the caller locks."""

    def __init__(self, most: int = MAX_QUEUED_JOBS) -> None:
        self._most = most
        self._waiting: dict[LaneName, deque[J]] = {}
        self._running: set[LaneName] = set()

    def push(self, lane: LaneName, job: J) -> bool:
        """Append a job; False if the lane's queue is full, then nothing has changed."""
        jobs = self._waiting.setdefault(lane, deque())
        if len(jobs) >= self._most:
            return False
        jobs.append(job)
        return True

    def begin(self, lane: LaneName) -> J | None:
        """Begin the lane's oldest job, which runs until `end`; None if none waits."""
        assert lane not in self._running, lane
        jobs = self._waiting.get(lane)
        if not jobs:
            return None
        self._running.add(lane)
        return jobs.popleft()

    def end(self, lane: LaneName) -> None:
        """The lane's job has ended."""
        self._running.remove(lane)

    def must_give_way(self, lane: LaneName) -> bool:
        """Whether the lane's job should let others go first: loads, before stores, where both take
        the same processor and memory. A GPU has an engine for each direction.
        """
        loads = LaneName(HOST, Direction.LOAD)
        has_loads = loads in self._running or bool(self._waiting.get(loads))
        return lane == LaneName(HOST, Direction.STORE) and has_loads

    def take(self, wanted: Callable[[J], bool]) -> list[J]:
        """Take all waiting jobs for which `wanted` is True; those of a lane oldest first."""
        taken = [job for job in self if wanted(job)]
        for lane, jobs in self._waiting.items():
            self._waiting[lane] = deque(job for job in jobs if not wanted(job))
        return taken

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return not self._running and not len(self)

    def __iter__(self) -> Iterator[J]:
        for jobs in self._waiting.values():
            yield from jobs

    def __len__(self) -> int:
        """Jobs that wait; those that run are not in it."""
        return sum(len(jobs) for jobs in self._waiting.values())
