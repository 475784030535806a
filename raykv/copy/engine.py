"""What every copy back end promises, and the queue in which jobs wait.

Loads pass stores: a request waits for a load, nobody waits for a store. Among jobs of one
direction the order of submission is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from raykv.copy.plan import CopyRuns
from raykv.types import Direction

MAX_QUEUED_JOBS = 4096
"""Per node. An engine submits a few jobs a step: a queue this long means that copies stand."""


class CopyBackend(Protocol):
    """Moves bytes between one worker's KV cache and the pool."""

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: Callable[[], bool]
    ) -> bool:
        """Carry out the rows [first, last) of `runs`.

        `stop` is asked before every run; when it says True nothing more is written and the
        answer is False. All bytes have arrived when the call returns True.
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
