"""`policy`: how much of the prompts the eviction policies find again, at several pool sizes.

It replays requests through one pool, as `raykv.inspect.hits` does. The hit rate is that of all
chunks of all requests. A capacity is a share of the distinct chunks of the trace.

The optimum knows the future: it gives up the chunk whose next use is the furthest, of those of one
request the deepest, and does not keep what it would give up next (L. Belady, 1966, with bypass). No
policy finds more chunks held. Where equal chunks have equal prefixes, a chunk is never used without
its prefix, so that this one keeps no chunk without its prefix either: all that it finds are prefix
hits, and no policy has more of these. "unlimited" is a pool in which all have room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush

from raykv.directory.table.policies import DEFAULT_POLICY, POLICIES, EvictionPolicy
from raykv.inspect.hits import UNIT, held_prefix, num_distinct, replay, unlimited_hits
from raykv.inspect.trace_files import Request, read_trace, synthetic
from raykv.lab.bench.arc import ARC
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.lab.bench.s3fifo import S3FIFO

COMPARED: Mapping[str, Callable[[], EvictionPolicy[tuple[str, bytes]]]] = {
    **POLICIES,
    "arc": ARC,
    "s3fifo": S3FIFO,
}
"""Those that the setting `eviction_policy` takes, and others that find less."""

PERCENTS = (1, 2, 5, 10, 20, 40)
"""Capacities, of the distinct chunks."""

GAP_PERCENTS = (5, 10)
"""Capacities at which a share of the gap must be closed."""

LEAST_GAP_CLOSED = 0.25
"""Of the gap between LRU and the optimum."""

NUM_REQUESTS = 3000
"""In a synthetic trace."""


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
    rates = {name: replay(requests, make(), capacity) for name, make in COMPARED.items()}
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


def unlimited_rate(requests: Sequence[Request]) -> float:
    """The hit rate if nothing is ever given up."""
    return sum(unlimited_hits(requests)) / sum(map(len, requests))


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
    """The number of the next request that has each chunk, for each request."""
    seen: dict[int, int] = {}
    following: list[list[int]] = []
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        following.append([seen.get(chunk, len(requests)) for chunk in request])
        seen.update(dict.fromkeys(request, number))
    following.reverse()
    return following
