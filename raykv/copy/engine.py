"""What every copy back end promises, and the queue in which jobs wait.

Loads pass stores: a request waits for a load, nobody waits for a store. Among jobs of one
direction the order of submission is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from raykv.copy.plan import CopyRuns
from raykv.memory.words import Word
from raykv.types import Direction

MAX_QUEUED_JOBS = 4096
"""Per node. An engine submits a few jobs a step: a queue this long means that copies stand."""


class StopSign:
    """Says that a copy is to end: when one of some words in memory is set.

    Words and not a function alone, because compiled code that runs without the GIL reads them.
    Another process may set them; who made the sign keeps their memory mapped while it is used.
    """

    def __init__(self, words: Sequence[Word] = ()) -> None:
        self._words = tuple(words)
        pairs = [(word.address, word.value) for word in words]
        self.rows = np.array(pairs, np.uint64).reshape(-1, 2)
        """Address and value of each word, shape [number of words, 2]."""

    def __call__(self) -> bool:
        """Whether a word is set."""
        return any(word.is_set for word in self._words)


class CopyBackend(Protocol):
    """Moves bytes between one worker's KV cache and the pool."""

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: StopSign
    ) -> bool:
        """Carry out the rows [first, last) of `runs`.

        `stop` is looked at before every run, and a large run may be cut into pieces with a look
        before each; when it is set nothing more is begun and the answer is False. A device is
        given bounded batches of runs, with a look before each. All bytes have arrived when the
        call returns True, and nothing is on its way when it returns or raises at all.
        """


J = TypeVar("J")


class JobQueue(Generic[J]):
    """Two bounded queues in one; the caller locks."""

    def __init__(self, most: int = MAX_QUEUED_JOBS) -> None:
        self._most = most
        self._queues: dict[Direction, deque[J]] = {d: deque() for d in Direction}

    def push(self, direction: Direction, job: J) -> bool:
        """Append a job; False if the queue is full, then nothing has changed."""
        if len(self) >= self._most:
            return False
        self._queues[direction].append(job)
        return True

    def pop(self) -> J | None:
        """The next job: the oldest load, else the oldest store."""
        for direction in (Direction.LOAD, Direction.STORE):
            if self._queues[direction]:
                return self._queues[direction].popleft()
        return None

    def take(self, wanted: Callable[[J], bool]) -> list[J]:
        """Take all jobs for which `wanted` is True out of the queue, oldest first."""
        taken = [job for job in self if wanted(job)]
        for direction, queue in self._queues.items():
            self._queues[direction] = deque(job for job in queue if not wanted(job))
        return taken

    def __iter__(self) -> Iterator[J]:
        for direction in (Direction.LOAD, Direction.STORE):
            yield from self._queues[direction]

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())
