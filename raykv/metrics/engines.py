"""What a node's engines report of their work, added up over engines that come and go.

Engines report numbers since their own start, again and again. What one reports first in this life
of the NodeActor is where its counting begins: a new engine has reported zeros then, and one that
was there before this life does not add what was counted already.

Invariant: no sum ever falls, though an engine may find out later that tokens were missed for
another reason than it had reported: the new reason rises at once, and the old one stands still
until it has caught up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from raykv.base.ids import MissReason, TokenSource
from raykv.metrics.histogram import Histogram
from raykv.metrics.reach import Reach
from raykv.metrics.table import LATENCY_BOUNDS, LOOKUPS, histograms, numbers
from raykv.protocol.engine import Tell
from raykv.protocol.measures import BreakerReport, HistogramData, MetricFamily

MAX_ENGINES = 4096
"""Engines whose last numbers are remembered; a forgotten one starts again from zero."""

MISSED = "missed_tokens_"
WANTED = "wanted_chunks"

PLAIN = {
    "raykv_stores_without_room_total": "stores_without_room",
    "raykv_declined_fetches_total": "fetches_declined",
    "raykv_timed_out_waits_total": "waits_timed_out",
}
"""Metrics that are one counter of the engines."""

Label = tuple[str, ...]


@dataclass(slots=True)
class _Told:
    """What an engine has reported last."""

    seq: int
    counters: Mapping[str, int]
    lookups: HistogramData
    breakers: BreakerReport


@dataclass
class EngineTally:
    """Sums over engines, by the label of their namespace."""

    tokens: Counter[Label] = field(default_factory=Counter)
    plain: dict[str, Counter[Label]] = field(
        default_factory=lambda: {name: Counter() for name in PLAIN}
    )
    lookups: dict[str, Histogram] = field(default_factory=dict)
    reach: dict[str, Reach] = field(default_factory=dict)
    # Of all engines: how many have opened, calls that failed, and calls that were not made.
    breakers: Counter[str] = field(default_factory=Counter)
    _missed: Counter[Label] = field(default_factory=Counter)
    _missed_at_most: Counter[Label] = field(default_factory=Counter)
    _told: dict[int, _Told] = field(default_factory=dict)

    def take(self, label: str, tell: Tell) -> bool:
        """Take in what an engine says; False, without effect, for a repetition or what has no
        numbers.
        """
        if not tell.counters:
            return False
        before = self._told.get(tell.life)
        if before is not None and tell.seq <= before.seq:
            return False
        lookups = tell.latencies.get(LOOKUPS, HistogramData())
        now = _Told(tell.seq, tell.counters, lookups, tell.breakers)
        # The engine that reported last is forgotten last.
        self._told.pop(tell.life, None)
        self._told[tell.life] = now
        if len(self._told) > MAX_ENGINES:
            del self._told[next(iter(self._told))]
        self._begin(label)
        if before is None:
            self.reach[label].add(0, tell.wanted_keys)
        else:
            self._add(label, before, now, tell)
        return True

    def _begin(self, label: str) -> None:
        """Series exist before there is anything in them."""
        if label in self.reach:
            return
        self.reach[label] = Reach()
        self.lookups[label] = Histogram(LATENCY_BOUNDS)
        for source in TokenSource:
            self.tokens[label, str(source)] = 0
        for reason in MissReason:
            self._missed[label, str(reason)] = self._missed_at_most[label, str(reason)] = 0
        for counter in self.plain.values():
            counter[label,] = 0

    def _add(self, label: str, before: _Told, now: _Told, tell: Tell) -> None:
        def more(name: str) -> int:
            return max(0, now.counters.get(name, 0) - before.counters.get(name, 0))

        prompt, own, loaded = (
            more(name) for name in ("prompt_tokens", "own_cache_tokens", "loaded_tokens")
        )
        fetched = min(more("fetched_tokens"), loaded)
        self.tokens[label, TokenSource.COMPUTED] += max(0, prompt - own - loaded)
        self.tokens[label, TokenSource.OWN_CACHE] += own
        from_disk = min(more("disk_tokens"), loaded - fetched)
        self.tokens[label, TokenSource.SAME_NODE] += loaded - fetched - from_disk
        self.tokens[label, TokenSource.OTHER_NODE] += fetched
        self.tokens[label, TokenSource.DISK] += from_disk
        for reason in MissReason:
            name = MISSED + reason
            change = now.counters.get(name, 0) - before.counters.get(name, 0)
            self._missed[label, str(reason)] += change
        for metric, name in PLAIN.items():
            self.plain[metric][label,] += more(name)
        self.lookups[label].add(now.lookups, before.lookups)
        self.reach[label].add(more(WANTED), tell.wanted_keys)
        for name in ("opened", "failed", "refused"):
            change = getattr(now.breakers, name) - getattr(before.breakers, name)
            self.breakers[name] += max(0, change)

    def missed(self) -> Counter[Label]:
        """Tokens by namespace and reason."""
        for name, count in self._missed.items():
            self._missed_at_most[name] = max(self._missed_at_most[name], count)
        return Counter(self._missed_at_most)

    def families(self) -> list[MetricFamily]:
        """All series but those of breakers."""
        reach = {(label,): each for label, each in self.reach.items()}
        return [
            numbers("raykv_cluster_prompt_tokens_total", self.tokens),
            numbers("raykv_cluster_missed_tokens_total", self.missed()),
            *(numbers(name, counts) for name, counts in self.plain.items()),
            numbers(
                "raykv_wanted_chunks_total", {at: each.num_wanted for at, each in reach.items()}
            ),
            numbers(
                "raykv_distinct_wanted_chunks",
                {at: each.num_distinct for at, each in reach.items()},
            ),
            numbers(
                "raykv_reachable_hit_ratio", {at: each.hit_ratio for at, each in reach.items()}
            ),
            histograms(
                "raykv_lookup_seconds",
                [((label,), each.data()) for label, each in self.lookups.items()],
            ),
        ]
