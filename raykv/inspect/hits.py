"""What a pool of a size would have hit: a trace replayed through a policy, or unlimited.

The longest prefix of a request's chunks that is held is its hit. All of its chunks that are held
are touched; then the pool stores the missing ones, and gives up others for them as the policy says,
never chunks of this very request. Both go from the tail of the prompt to its head, as in a pool.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import chain, islice, repeat

from raykv.inspect.orders import EvictionPolicy
from raykv.inspect.trace_files import Request


def unlimited_hits(requests: Sequence[Request]) -> list[int]:
    """For each request, how many chunks of its prefix are held if nothing is ever given up."""
    held: set[int] = set()
    hits = []
    for request in requests:
        hits.append(held_prefix(request, held))
        held.update(request)
    return hits


def held_prefix(request: Request, held: Container[int]) -> int:
    """How many chunks of the unbroken prefix are held."""
    for number, chunk in enumerate(request):
        if chunk not in held:
            return number
    return len(request)


@dataclass
class _Pool:
    """What is held, and the policy, which is called as a pool would call it."""

    policy: EvictionPolicy[int]
    capacity: int

    def __post_init__(self) -> None:
        self.held: set[int] = set()
        # No longer the policy's, which may remember them.
        self._released: dict[int, None] = {}

    def touch(self, chunks: Sequence[int]) -> None:
        for chunk in reversed(chunks):
            if chunk in self._released:
                del self._released[chunk]
                self.policy.add(chunk)
            else:
                self.policy.touch(chunk)

    def release(self, chunks: Sequence[int]) -> None:
        """Those that are held are the next to be given up, from the last to the first."""
        for chunk in reversed(chunks):
            if chunk in self.held:
                self.policy.evicted(chunk)
                self._released[chunk] = None

    def store(self, chunks: Sequence[int]) -> None:
        for chunk in reversed(chunks):
            self.held.add(chunk)
            self.policy.add(chunk)

    def make_room(self, count: int, keep: set[int]) -> None:
        """Give up `count` chunks, none of `keep`."""
        ordered = chain(self._released, self.policy.candidates())
        others = (chunk for chunk in ordered if chunk not in keep)
        for chunk in list(islice(others, max(count, 0))):
            self._released.pop(chunk, None)
            self.policy.evicted(chunk)
            self.held.discard(chunk)


def replay(
    requests: Sequence[Request],
    policy: EvictionPolicy[int],
    capacity: int,
    endings: Sequence[Request] = (),
) -> float:
    """The prefix hit rate of a policy; see `prefix_hits`."""
    return sum(prefix_hits(requests, policy, capacity, endings)) / sum(map(len, requests))


def prefix_hits(
    requests: Sequence[Request],
    policy: EvictionPolicy[int],
    capacity: int,
    endings: Sequence[Request] = (),
) -> list[int]:
    """For each request, how many chunks of its prefix are held when it comes.

    `endings`: for each, which chunks are released after it; none: nothing ever is.
    """
    pool = _Pool(policy, capacity)
    hits = []
    for request, released in zip(requests, endings or repeat([]), strict=False):
        hits.append(held_prefix(request, pool.held))
        present = [chunk for chunk in request if chunk in pool.held]
        pool.touch(present)
        # The tail that exceeds the pool is not stored.
        missing = [chunk for chunk in request if chunk not in pool.held]
        missing = missing[: capacity - len(present)]
        pool.make_room(len(pool.held) + len(missing) - capacity, keep=set(request))
        pool.store(missing)
        pool.release(released)
    return hits
