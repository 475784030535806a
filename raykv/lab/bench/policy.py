"""`policy`: how much of a trace's prompts the pool's order of eviction finds again, by pool size.

It replays requests through one pool, as `raykv.inspect.hits` does. The hit rate is that of all
chunks of all requests. A capacity is a share of the distinct chunks of the trace.
Where requests name their `session`, one more subject releases what a session leaves behind that no
other has used.

The optimum knows the future: it gives up the chunk whose next use is the furthest, of those of one
request the deepest, and does not keep what it would give up next (L. Belady, 1966, with bypass). No
policy finds more chunks held. Where equal chunks have equal prefixes, a chunk is never used without
its prefix, so that this one keeps no chunk without its prefix either: all that it finds are prefix
hits, and no policy has more of these. "unlimited" is a pool in which all have room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from pathlib import Path
from typing import Any

from raykv.base.errors import SettingError
from raykv.inspect.hits import held_prefix, prefix_hits, unlimited_hits
from raykv.inspect.orders import DEFAULT_POLICY, POLICIES, EvictionPolicy
from raykv.inspect.trace_files import Request, read_prompts, read_trace
from raykv.lab.bench.report import Options, Result, Row, Verdict, short

PERCENTS = (1, 2, 5, 10, 20)
"""Capacities, of the distinct chunks."""

RELEASED = f"{DEFAULT_POLICY}, released"
"""The default, told when a session is over; for traces that have sessions."""

LEAST_OF_LRU = 0.995
"""Of its hits, that the default finds at any capacity."""

LEAST_GAP_CLOSED = 0.2
"""Of the gap between LRU and the optimum, in traces without sessions."""

RELEASED_PERCENT, LEAST_GAP_RELEASED = 5, 0.3
"""Where releases must close more of it, and how much."""

UNIT = "hit rate"
GAP = "of the gap from lru"


@dataclass(frozen=True)
class TraceFile:
    """Requests, and what sessions leave behind after each; no endings: they have no sessions."""

    name: str
    requests: list[Request]
    endings: list[Request] = field(default_factory=list)


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: no trace is named, or one can't be read.
    """
    if not options.traces:
        raise SettingError("`raykv bench policy` replays a trace: name a file with --trace")
    result = Result("policy", is_wide=True)
    for trace in map(_read, options.traces):
        chunks, distinct = sum(map(len, trace.requests)), num_distinct(trace.requests)
        result.notes.append(
            f"{trace.name}: {len(trace.requests):,} requests, {chunks:,} chunks, "
            f"{distinct:,} distinct"
        )
        for percent in (2, 10) if options.quick else PERCENTS:
            measure(result, trace, percent)
    return result


def _read(path: str) -> TraceFile:
    requests = read_trace(path)
    endings = read_endings(path, requests)
    return TraceFile(
        Path(path).stem.removesuffix("_trace"), requests, endings if any(endings) else []
    )


def read_endings(path: str, requests: Sequence[Request]) -> list[Request]:
    """For each request of a trace, what its session leaves behind if that is the last of it: the
    chunks that no other session has used so far. Lines without a `session` end none.
    """
    sessions = [row.get("session") for _, row in read_prompts(path)]
    last = {session: number for number, session in enumerate(sessions)}
    users: dict[int, Any] = {}
    own: dict[Any, dict[int, None]] = {}
    endings: list[Request] = []
    for number, (session, request) in enumerate(zip(sessions, requests, strict=True)):
        for chunk in request:
            # None once two sessions have used it.
            users[chunk] = session if users.get(chunk, session) == session else None
        if session is None:
            endings.append([])
            continue
        own.setdefault(session, {}).update(dict.fromkeys(request))
        is_over = last[session] == number
        endings.append([chunk for chunk in own[session] if is_over and users[chunk] == session])
    return endings


class Releasing:
    """A policy that is told what is over: that is the next to be given up, unless it is used again.

    Args:
        policy: which order the others go in; it may remember what is released.
    """

    def __init__(self, policy: EvictionPolicy[int]) -> None:
        self._policy = policy
        self._held: set[int] = set()
        self._released: dict[int, None] = {}

    def add(self, name: int) -> None:
        """See `EvictionPolicy`, for `touch`, `evicted` and `candidates` too."""
        self._held.add(name)
        self._policy.add(name)

    def touch(self, name: int) -> None:
        if name in self._released:
            del self._released[name]
            self._policy.add(name)
        else:
            self._policy.touch(name)

    def evicted(self, name: int) -> None:
        self._held.discard(name)
        self._released.pop(name, None)
        self._policy.evicted(name)

    def candidates(self) -> Iterator[int]:
        return chain(self._released, self._policy.candidates())

    def release(self, names: Sequence[int]) -> None:
        """Those that are held are the next to be given up, from the last to the first."""
        for name in reversed(names):
            if name in self._held:
                self._policy.evicted(name)
                self._released[name] = None


def replay(requests: Sequence[Request], policy: EvictionPolicy[int], capacity: int) -> float:
    """The prefix hit rate of a policy."""
    return sum(prefix_hits(requests, policy, capacity)) / sum(map(len, requests))


def released_hits(
    requests: Sequence[Request],
    policy: EvictionPolicy[int],
    capacity: int,
    endings: Sequence[Request],
) -> Iterator[int]:
    """`prefix_hits`, where after each request the chunks of one of `endings` are released."""
    releasing = Releasing(policy)
    hits = prefix_hits(requests, releasing, capacity)
    for found, released in zip(hits, endings, strict=True):
        yield found
        releasing.release(released)


def measure(result: Result, trace: TraceFile, percent: int) -> None:
    """Rows and verdicts of one capacity."""
    case, requests = f"{trace.name}, {percent} %", trace.requests
    capacity = max(1, num_distinct(requests) * percent // 100)
    rates = {name: replay(requests, make(), capacity) for name, make in POLICIES.items()}
    if trace.endings:
        hits = released_hits(requests, POLICIES[DEFAULT_POLICY](), capacity, trace.endings)
        rates[RELEASED] = sum(hits) / sum(map(len, requests))
    rates |= {"optimum": optimal_rate(requests, capacity), "unlimited": unlimited_rate(requests)}
    ours, lru = rates[DEFAULT_POLICY], rates["lru"]
    gap = rates["optimum"] - lru
    closed = {name: (rate - lru) / gap if gap > 0 else 1.0 for name, rate in rates.items()}
    for name, rate in rates.items():
        result.rows += [Row(case, name, UNIT, (rate,)), Row(case, name, GAP, (closed[name],))]
    budgets = [(f"{DEFAULT_POLICY} finds what lru finds", ours, LEAST_OF_LRU * lru)]
    if not trace.endings:
        budgets.append(
            (f"{DEFAULT_POLICY} closes the gap", closed[DEFAULT_POLICY], LEAST_GAP_CLOSED)
        )
    elif percent == RELEASED_PERCENT:
        budgets.append(("releases close the gap", closed[RELEASED], LEAST_GAP_RELEASED))
    result.verdicts += [
        Verdict(f"{case}: {what}, at least {short(least)}", measured, least, is_most=False)
        for what, measured, least in budgets
    ]


def num_distinct(requests: Sequence[Request]) -> int:
    """Chunks that differ."""
    return len({chunk for request in requests for chunk in request})


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
