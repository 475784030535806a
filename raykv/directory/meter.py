"""What the scheduler actor measures of itself, and all that it has to show to Prometheus."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from raykv.base.ids import EventKind
from raykv.directory.answers import chunk_counts
from raykv.directory.known.directory import Directory
from raykv.metrics.histogram import Histogram
from raykv.metrics.table import (
    LATENCY_BOUNDS,
    OTHER,
    NamespaceLabels,
    histograms,
    number,
    numbers,
    printable,
)
from raykv.protocol import events, listing, operator, reader
from raykv.protocol.measures import MetricFamily

CALLS = ("report", "ask", "events", "order")

LAG_WINDOW_S = 60.0
"""How long a slow reader of events is remembered: at least this long, at most twice as long."""

MOST_MODEL_LETTERS = 80
"""Of a model's name in a label."""

MOST_MODELS = 64
"""Series with models' names."""

COST_WEIGHT = 0.05
"""Of the last report, in what reports are held to cost."""

TIERS = {listing.Where.RAM: reader.RAM, listing.Where.DISK: reader.DISK}


class ClusterMeter:
    """See the module's docstring."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._labels = NamespaceLabels()
        self._calls = {call: Histogram(LATENCY_BOUNDS) for call in CALLS}
        # By minute: how far the slowest reader was behind.
        self._lags: Counter[float] = Counter()
        self._gaps = 0

    def called(self, call: str, seconds: float) -> None:
        """A call was answered; the directory has nodes report as often as it can bear."""
        self._calls[call].observe(seconds)
        if call == "report":
            self._directory.cost_s += COST_WEIGHT * (seconds - self._directory.cost_s)

    def read_events(self, after: int, page: events.EventPage, now: float) -> None:
        """A reader was given a page of events."""
        self._gaps += page.is_gap
        lag, minute = page.last_seq - max(0, after), now // LAG_WINDOW_S
        lags = self._recent_lags(now)
        lags[minute] = max(lags[minute], lag)

    def _recent_lags(self, now: float) -> Counter[float]:
        """Those of this minute and the one before."""
        last = now // LAG_WINDOW_S - 1
        self._lags = Counter({at: lag for at, lag in self._lags.items() if at >= last})
        return self._lags

    def targets(self) -> list[str]:
        """Where the NodeActors show their metrics, in order."""
        members = self._directory.members.values()
        return sorted({each.report.stats.metrics_address for each in members} - {""})

    def families(self, document: operator.OrdersDocument | None, now: float) -> list[MetricFamily]:
        """All series; `document`: the orders that are in force."""
        directory = self._directory
        members = directory.members.values()
        oldest = max((now - each.heard_at for each in members), default=0.0)
        calls = [((call,), each.data()) for call, each in self._calls.items()]
        kinds = {(kind.name.lower(),): directory.events.counts[kind] for kind in EventKind}
        return [
            number("raykv_nodes", len(directory.members)),
            number("raykv_paused", document is not None and document.is_paused),
            *self._engine_families(),
            numbers("raykv_directory_chunks", self._chunks()),
            number("raykv_known_sessions", len(directory.sessions)),
            number("raykv_orders_number", document.stamp.number if document is not None else 0),
            number("raykv_report_pause_seconds", directory.pause_ms / 1000),
            numbers("raykv_events_total", kinds),
            number(
                "raykv_event_reader_lag_events", max(self._recent_lags(now).values(), default=0)
            ),
            number("raykv_event_gaps_total", self._gaps),
            number("raykv_oldest_node_report_age_seconds", max(0.0, oldest)),
            histograms("raykv_call_seconds", calls),
        ]

    def _engine_families(self) -> list[MetricFamily]:
        engines: Counter[tuple[str, ...]] = Counter()
        models: dict[tuple[str, ...], float] = {}
        for member in self._directory.members.values():
            for each in member.engines.values():
                label = self._labels[each.hello.namespace]
                # Of an engine that has several places its first one counts.
                engines[label,] += each.hello.place == 1
                if label != OTHER:
                    models[label, printable(each.hello.model[-MOST_MODEL_LETTERS:])] = 1
        return [
            numbers("raykv_engines", engines),
            numbers("raykv_namespace_info", dict(islice(models.items(), MOST_MODELS))),
        ]

    def _chunks(self) -> Counter[tuple[str, ...]]:
        members = self._directory.members.values()
        chunks: Counter[tuple[str, ...]] = Counter()
        for member in members:
            for namespace in member.namespaces:
                chunks[self._labels[namespace], reader.RAM] += 0
        for (namespace, tier), count in chunk_counts(members).items():
            chunks[self._labels[namespace], TIERS[tier]] += count
        return chunks
