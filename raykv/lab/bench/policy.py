"""`policy`: hit rates of a trace's prompts with the pool's order of eviction, by pool size.

It replays requests through one pool, as `raykv.inspect.hits` does. The hit rate is over all chunks
of all requests. A capacity is a share of the distinct chunks of the trace.

The optimum knows the future: it evicts the chunk whose next use is the furthest, among those of one
request the deepest, and does not keep what it would evict next (L. Belady, 1966, with bypass). No
policy has more hits. Where equal chunks have equal prefixes, a chunk is never used without its
prefix, so the optimum keeps no chunk without its prefix: all its hits are prefix hits, and no
policy has more of these. "unlimited" is a pool with room for everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

from raykv.base.errors import SettingError
from raykv.inspect.hits import held_prefix, prefix_hits, unlimited_hits
from raykv.inspect.orders import DEFAULT_POLICY, POLICIES, Policy
from raykv.inspect.trace_files import Request, read_trace
from raykv.lab.bench.report import Options, Result

PERCENTS = (1, 2, 5, 10, 20)
"""Capacities, of the distinct chunks."""

LEAST_OF_LRU = 0.995
"""Share of LRU's hits that the default policy has at any capacity."""

LEAST_GAP_CLOSED = 0.2
"""Share of the gap between LRU and the optimum that the default closes."""

UNIT = "hit rate"
GAP = "of the gap from lru"


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: no trace is named, or one can't be read.
    """
    if not options.traces:
        raise SettingError("`raykv bench policy` replays a trace: name a file with --trace")
    result = Result("policy", is_wide=True)
    for path in options.traces:
        name, requests = Path(path).stem.removesuffix("_trace"), read_trace(path)
        chunks, distinct = sum(map(len, requests)), num_distinct(requests)
        result.notes.append(
            f"{name}: {len(requests):,} requests, {chunks:,} chunks, {distinct:,} distinct"
        )
        for percent in (2, 10) if options.quick else PERCENTS:
            measure(result, f"{name}, {percent} %", requests, max(1, distinct * percent // 100))
    return result


def replay(requests: Sequence[Request], policy: Policy, capacity: int) -> float:
    """Return the prefix hit rate of a policy."""
    return sum(prefix_hits(requests, policy, capacity)) / sum(map(len, requests))


def measure(result: Result, case: str, requests: Sequence[Request], capacity: int) -> None:
    """Rows and verdicts of one capacity."""
    rates = {name: replay(requests, make(), capacity) for name, make in POLICIES.items()}
    rates |= {"optimum": optimal_rate(requests, capacity), "unlimited": unlimited_rate(requests)}
    ours, lru = rates[DEFAULT_POLICY], rates["lru"]
    gap = rates["optimum"] - lru
    closed = {name: (rate - lru) / gap if gap > 0 else 1.0 for name, rate in rates.items()}
    for name, rate in rates.items():
        result.add(case, name, UNIT, rate)
        result.add(case, name, GAP, closed[name])
    finds = f"{case}: {DEFAULT_POLICY} finds 0.995 of what lru finds"
    closes = f"{case}: {DEFAULT_POLICY} closes a fifth of the gap"
    result.at_least(LEAST_OF_LRU * lru, ours, finds)
    result.at_least(LEAST_GAP_CLOSED, closed[DEFAULT_POLICY], closes)


def num_distinct(requests: Sequence[Request]) -> int:
    """Count distinct chunks."""
    return len({chunk for request in requests for chunk in request})


def unlimited_rate(requests: Sequence[Request]) -> float:
    """Return the hit rate without evictions."""
    return sum(unlimited_hits(requests)) / sum(map(len, requests))


def optimal_rate(requests: Sequence[Request], capacity: int) -> float:
    """Return the prefix hit rate of the optimum; see the module's docstring."""
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
