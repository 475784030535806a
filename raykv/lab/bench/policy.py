"""`policy`: how much of the prompts the eviction policies find again, at several pool sizes.

Replays requests through one pool. The longest prefix of a request's chunks that is held is its hit.
All of its chunks that are held are touched, the tail first; those that are missing are stored in
the order of the prompt, and for them others are given up as the policy says, never chunks of this
very request. The hit rate is that of all chunks of all requests. A capacity is a share of the
distinct chunks of the trace.

The optimum knows the future: it gives up the chunk whose next use is the furthest, of those of one
request the deepest, and does not keep what it would give up next (L. Belady, 1966, with bypass). No
policy finds more chunks held. Where equal chunks have equal prefixes, a chunk is never used without
its prefix, so that this one keeps no chunk without its prefix either: all that it finds are prefix
hits, and no policy has more of these. "unlimited" is a pool in which all have room.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from raykv.directory.table.policies import DEFAULT_POLICY, POLICIES, EvictionPolicy
from raykv.inspect.trace_files import Request, read_trace, synthetic
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict

PERCENTS = (1, 2, 5, 10, 20, 40)
"""Capacities, of the distinct chunks."""

GAP_PERCENTS = (5, 10)
"""Capacities at which a share of the gap must be closed."""

LEAST_GAP_CLOSED = 0.25
"""Of the gap between LRU and the optimum."""

NUM_REQUESTS = 3000
"""In a synthetic trace."""

UNIT = "hit rate"
NAMESPACE = "bench"


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("policy", BENCHMARKS["policy"].summary)
    if options.trace is not None:
        traces = {"": read_trace(options.trace)}
    else:
        traces = synthetic(200 if options.quick else NUM_REQUESTS)
    percents = (2, 10) if options.quick else PERCENTS
    for kind, requests in traces.items():
        result.notes.append(_note(kind, requests))
        for percent in percents:
            _measure(result, kind, requests, percent)
    return result


def _note(kind: str, requests: Sequence[Request]) -> str:
    chunks = sum(map(len, requests))
    name = f"{kind}: " if kind else ""
    return (
        f"{name}{len(requests):,} requests, {chunks:,} chunks, {num_distinct(requests):,} distinct"
    )


def _measure(result: Result, kind: str, requests: Sequence[Request], percent: int) -> None:
    """Rows and verdicts of one capacity."""
    case = f"{kind}, {percent} %" if kind else f"{percent} %"
    capacity = max(1, num_distinct(requests) * percent // 100)
    rates = {name: replay(requests, make(), capacity) for name, make in POLICIES.items()}
    optimum = optimal_rate(requests, capacity)
    subjects = {**rates, "optimum": optimum, "unlimited": unlimited_rate(requests)}
    result.rows += [Row(case, subject, UNIT, (rate,)) for subject, rate in subjects.items()]
    ours = rates.pop(DEFAULT_POLICY)
    best = max(rates, key=lambda name: rates[name])
    result.verdicts.append(
        Verdict(
            f"{case}: {DEFAULT_POLICY} at least as good as {best}", ours, rates[best], is_most=False
        )
    )
    gap = optimum - rates["lru"]
    if percent in GAP_PERCENTS and gap > 0:
        budget = f"{case}: at least {LEAST_GAP_CLOSED} of the gap from lru to the optimum closed"
        closed = (ours - rates["lru"]) / gap
        result.verdicts.append(Verdict(budget, closed, LEAST_GAP_CLOSED, is_most=False))


def num_distinct(requests: Sequence[Request]) -> int:
    """Chunks that differ."""
    return len({chunk for request in requests for chunk in request})


def unlimited_rate(requests: Sequence[Request]) -> float:
    """The hit rate if nothing is ever given up."""
    return sum(unlimited_hits(requests)) / sum(map(len, requests))


def unlimited_hits(requests: Sequence[Request]) -> list[int]:
    """Of each request how many chunks of its prefix are held, if nothing is ever given up."""
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
    """What is held, with the policy that is told of it as the block manager would."""

    policy: EvictionPolicy[tuple[str, bytes]]
    capacity: int

    def __post_init__(self) -> None:
        self.held: set[int] = set()
        self._names: dict[int, tuple[str, bytes]] = {}
        self._chunks: dict[tuple[str, bytes], int] = {}

    def touch(self, chunk: int) -> None:
        self.policy.touch(self._names[chunk])

    def store(self, chunks: Sequence[int]) -> None:
        for chunk in chunks:
            self.held.add(chunk)
            self.policy.add(self._name(chunk))

    def _name(self, chunk: int) -> tuple[str, bytes]:
        name = self._names.get(chunk)
        if name is None:
            name = self._names[chunk] = (NAMESPACE, chunk.to_bytes(8, "big"))
            self._chunks[name] = chunk
        return name

    def make_room(self, count: int, keep: set[int]) -> None:
        """Give up so many chunks, none of `keep`."""
        others = (name for name in self.policy.candidates() if self._chunks[name] not in keep)
        for name in list(islice(others, max(count, 0))):
            self.policy.evicted(name)
            self.held.discard(self._chunks[name])


def replay(
    requests: Sequence[Request], policy: EvictionPolicy[tuple[str, bytes]], capacity: int
) -> float:
    """The prefix hit rate of a policy."""
    return sum(prefix_hits(requests, policy, capacity)) / sum(map(len, requests))


def prefix_hits(
    requests: Sequence[Request], policy: EvictionPolicy[tuple[str, bytes]], capacity: int
) -> list[int]:
    """Of each request how many chunks of its prefix are held when it comes."""
    pool = _Pool(policy, capacity)
    hits = []
    for request in requests:
        hits.append(held_prefix(request, pool.held))
        present = [chunk for chunk in request if chunk in pool.held]
        for chunk in reversed(present):
            pool.touch(chunk)
        # What is more than the pool can have is not stored: the tail.
        missing = [chunk for chunk in request if chunk not in pool.held]
        missing = missing[: capacity - len(present)]
        pool.make_room(len(pool.held) + len(missing) - capacity, keep=set(request))
        pool.store(missing)
    return hits


def optimal_rate(requests: Sequence[Request], capacity: int) -> float:
    """The prefix hit rate of the optimum; see the module's docstring."""
    following = _next_uses(requests)
    # Of each held chunk, the next request that uses it.
    held: dict[int, int] = {}
    # Furthest next use first, then deepest; entries of chunks that were used since are stale.
    heap: list[tuple[int, int, int]] = []
    hits = 0
    for number, request in enumerate(requests):
        hits += held_prefix(request, held)
        for depth, chunk in enumerate(request):
            next_use = following[number][depth]
            held[chunk] = next_use
            heappush(heap, (-next_use, -depth, chunk))
        while len(held) > capacity:
            next_use, _, chunk = heappop(heap)
            if held.get(chunk) == -next_use:
                del held[chunk]
    return hits / sum(map(len, requests))


def _next_uses(requests: Sequence[Request]) -> list[list[int]]:
    """For each chunk of each request, the number of the next request that has it."""
    seen: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        following.append([seen.get(chunk, len(requests)) for chunk in request])
        seen.update(dict.fromkeys(request, number))
    following.reverse()
    return following
