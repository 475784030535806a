"""What engines report of their work, added up over engines that come and go.

Engines report numbers since their own start, again and again. What one reports first in this life
of the scheduler actor is where its counting begins: a new engine has reported zeros then, and one
that was there before this life does not add what was counted already.

Invariant: no sum ever falls, though an engine may find out later that tokens were missed for
another reason than it had reported: the new reason rises at once, and the old one stands still
until it has caught up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from raykv.base.ids import EngineId, MissReason, TokenSource
from raykv.metrics.histogram import Histogram
from raykv.metrics.reach import Reach
from raykv.metrics.table import LATENCY_BOUNDS, LOOKUPS
from raykv.protocol.engine import SyncRequest
from raykv.protocol.measures import BreakerReport, HistogramData

MAX_ENGINES = 4096
"""Engines of which the last numbers are remembered; one that was forgotten begins anew."""

MISSED = "missed_tokens_"
WANTED = "wanted_chunks"

PLAIN = {
    "raykv_stores_without_lease_total": "stores_without_lease",
    "raykv_declined_fetches_total": "fetches_declined",
    "raykv_timed_out_waits_total": "waits_timed_out",
}
"""Metrics that are one counter of the engines."""

Label = tuple[str, ...]


@dataclass(slots=True)
class _Told:
    """What an engine has reported last."""

    seq: int
    counters: dict[str, int]
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
    breakers: Counter[str] = field(default_factory=Counter)
    _missed: Counter[Label] = field(default_factory=Counter)
    _missed_at_most: Counter[Label] = field(default_factory=Counter)
    _told: dict[EngineId, _Told] = field(default_factory=dict)

    def take(self, label: str, request: SyncRequest) -> bool:
        """Take in an engine's message; False, without effect, for a repetition or one without
        numbers.
        """
        engine_id = EngineId(request.engine_id)
        if request.idle:
            return False
        before = self._told.pop(engine_id, None)
        now = _Told(
            request.seq,
            request.counters,
            request.latencies.get(LOOKUPS, HistogramData()),
            request.breakers,
        )
        # The engine that reported last is forgotten last.
        self._told[engine_id] = now if before is None or now.seq > before.seq else before
        if len(self._told) > MAX_ENGINES:
            del self._told[next(iter(self._told))]
        self._begin(label)
        if before is None:
            self.reach[label].add(0, request.wanted_keys)
        elif now.seq > before.seq:
            self._add(label, before, now, request)
        return before is None or now.seq > before.seq

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

    def _add(self, label: str, before: _Told, now: _Told, request: SyncRequest) -> None:
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
        self.reach[label].add(more(WANTED), request.wanted_keys)
        for name in ("opened", "failed", "refused"):
            change = getattr(now.breakers, name) - getattr(before.breakers, name)
            self.breakers[name] += max(0, change)

    def missed(self) -> Counter[Label]:
        """Tokens by namespace and reason."""
        for name, count in self._missed.items():
            self._missed_at_most[name] = max(self._missed_at_most[name], count)
        return Counter(self._missed_at_most)

    def lookup_rows(self) -> Iterator[tuple[Label, HistogramData]]:
        """Series of a histogram."""
        for label, each in self.lookups.items():
            yield (label,), each.data()

    def breaker_totals(self) -> BreakerReport:
        """The counters of all engines' breakers."""
        return BreakerReport(
            opened=self.breakers["opened"],
            failed=self.breakers["failed"],
            refused=self.breakers["refused"],
        )
