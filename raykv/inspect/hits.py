"""What a pool of a size would have hit: a trace replayed through a policy, or unlimited.

The longest prefix of a request's chunks that is held is its hit. All of its chunks that are held
are touched; then the pool stores the missing ones, and gives up others for them as the policy says,
never chunks of this very request. Both go from the tail of the prompt to its head, as in a pool.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice

from raykv.inspect.orders import Policy
from raykv.inspect.trace_files import Request


def unlimited_hits(requests: Sequence[Request]) -> Iterator[int]:
    """For each request, how many chunks of its prefix are held if nothing is ever given up."""
    held: set[int] = set()
    for request in requests:
        yield held_prefix(request, held)
        held.update(request)


def held_prefix(request: Request, held: Container[int]) -> int:
    """How many chunks of the unbroken prefix are held."""
    for number, chunk in enumerate(request):
        if chunk not in held:
            return number
    return len(request)


def prefix_hits(requests: Sequence[Request], policy: Policy, capacity: int) -> Iterator[int]:
    """Yield for each request how many chunks of its prefix are held when it comes, after storing
    it. The policy is called as a pool would call it.
    """
    held: set[int] = set()
    for request in requests:
        hits = held_prefix(request, held)
        present = [chunk for chunk in request if chunk in held]
        for chunk in reversed(present):
            policy.touch(chunk)
        # The tail that exceeds the pool is not stored.
        missing = [chunk for chunk in dict.fromkeys(request) if chunk not in held]
        missing = missing[: capacity - len(present)]
        keep = set(request)
        others = (chunk for chunk in policy.candidates() if chunk not in keep)
        for chunk in list(islice(others, max(0, len(held) + len(missing) - capacity))):
            policy.evicted(chunk)
            held.discard(chunk)
        for chunk in reversed(missing):
            held.add(chunk)
            policy.add(chunk)
        yield hits
