"""What the scheduler actor measures, and all that it has to show to Prometheus.

It learns of messages after the block manager has taken them (`synced`, `called`, `read_events`),
and of evictions when they happen (`evicted`); it follows the event log by itself (`follow`), and
looks at nodes and engines when it is asked. Nothing is counted per chunk in Python: events come as
columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from raykv.base.ids import EngineId, EventKind, NodeId, TokenSource
from raykv.directory.log import EventLog
from raykv.directory.members import Engine, Node
from raykv.directory.meter.engines import EngineTally
from raykv.metrics.breakers import breaker_families
from raykv.metrics.histogram import Histogram
from raykv.metrics.table import (
    AGE_BOUNDS,
    LATENCY_BOUNDS,
    OTHER,
    NamespaceLabels,
    histograms,
    number,
    numbers,
)
from raykv.protocol.engine import SyncReply, SyncRequest
from raykv.protocol.events import EventPage
from raykv.protocol.measures import MetricFamily
from raykv.protocol.reader import DISK, RAM

CALLS = ("attach", "sync", "report", "events")

LAG_WINDOW_S = 60.0
"""How long a slow reader of events is remembered: at least so long, at most twice."""

MAX_MODEL_LABEL = 80
"""Characters of a model's name."""

MAX_MODELS = 64
"""Series with models' names."""


@dataclass(frozen=True)
class MeteredTenant:
    """What is counted of a tenant; `tokens` of prompts, by `TokenSource`."""

    name: str
    pool_bytes: int
    disk_bytes: int
    num_evicted: int
    tokens: Mapping[str, int]


class _Slowest:
    """The largest value of the last minute or two."""

    def __init__(self) -> None:
        self._now = self._before = 0
        self._ends_at = float("-inf")

    def see(self, value: int, now: float) -> None:
        self._turn(now)
        self._now = max(self._now, value)

    def value(self, now: float) -> int:
        self._turn(now)
        return max(self._now, self._before)

    def _turn(self, now: float) -> None:
        if now < self._ends_at:
            return
        is_next = now < self._ends_at + LAG_WINDOW_S
        self._before, self._now = self._now if is_next else 0, 0
        self._ends_at = now + LAG_WINDOW_S


class ClusterMeter:
    """See the module's docstring.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        engines: the same of engines.
        log: the event log.
        tenants: all tenants that have quotas, and those that have none.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        engines: Mapping[EngineId, Engine],
        log: EventLog,
        tenants: Callable[[], Sequence[MeteredTenant]] = tuple,
    ) -> None:
        self._nodes = nodes
        self._engines = engines
        self._log = log
        self._tenants = tenants
        self._labels = NamespaceLabels()
        self._tally = EngineTally()
        self._followed = log.last_seq
        self._ages = Histogram(AGE_BOUNDS)
        self._events: Counter[EventKind] = Counter()
        self._calls = {call: Histogram(LATENCY_BOUNDS) for call in CALLS}
        self._lag = _Slowest()
        self._gaps = 0
        self._granted = 0

    # What happens

    def called(self, call: str, seconds: float) -> None:
        """A call was answered; what it has changed is taken in."""
        self._calls[call].observe(seconds)
        self.follow()

    def synced(self, request: SyncRequest, reply: SyncReply) -> None:
        """An engine has reported its numbers, and was answered; repetitions change nothing."""
        engine = self._engines.get(EngineId(request.engine_id))
        if engine is None or reply.attach:
            return
        if self._tally.take(self._labels[engine.namespace], request):
            self._granted += len(reply.granted.slots)

    def read_events(self, after: int, page: EventPage, now: float) -> None:
        """A reader was given a page of events."""
        self._gaps += page.is_gap
        self._lag.see(max(0, page.last_seq - max(0, after)), now)

    def evicted(self, ages: Sequence[float]) -> None:
        """Chunks were given up for lack of room, so long after they came."""
        self._ages.observe_many(np.asarray(ages, np.float64))

    def follow(self) -> None:
        """Take in what happened to the directory since the last call."""
        if self._followed == self._log.last_seq:
            return
        for run in self._log.runs(self._followed):
            self._events[run.kind] += len(run)
        self._followed = self._log.last_seq

    # Looking

    def targets(self) -> list[str]:
        """Where the NodeActors show their metrics, in order."""
        found = {node.stats.metrics_address for node in self._nodes.values()}
        return sorted(found - {""})

    def families(self, now: float, *, is_paused: bool) -> list[MetricFamily]:
        """All series."""
        tally = self._tally
        oldest = max((now - node.last_report for node in self._nodes.values()), default=0.0)
        calls = [((call,), each.data()) for call, each in self._calls.items()]
        kinds = {(kind.name.lower(),): self._events[kind] for kind in EventKind}
        return [
            number("raykv_nodes", len(self._nodes)),
            number("raykv_paused", is_paused),
            *self._engine_families(),
            *self._directory_families(),
            numbers("raykv_cluster_prompt_tokens_total", tally.tokens),
            numbers("raykv_cluster_missed_tokens_total", tally.missed()),
            *(numbers(name, counts) for name, counts in tally.plain.items()),
            *self._reach_families(),
            *self._tenant_families(),
            number("raykv_granted_leases_total", self._granted),
            histograms("raykv_removed_chunk_age_seconds", [((), self._ages.data())]),
            numbers("raykv_events_total", kinds),
            number("raykv_event_reader_lag_events", self._lag.value(now)),
            number("raykv_event_gaps_total", self._gaps),
            number("raykv_oldest_node_report_age_seconds", max(0.0, oldest)),
            histograms("raykv_lookup_seconds", tally.lookup_rows()),
            histograms("raykv_call_seconds", calls),
            *breaker_families(
                "engine",
                [engine.breakers for engine in self._engines.values()],
                tally.breaker_totals(),
            ),
        ]

    def _engine_families(self) -> list[MetricFamily]:
        engines: Counter[tuple[str, ...]] = Counter()
        models: dict[tuple[str, ...], float] = {}
        for engine in self._engines.values():
            label = self._labels[engine.namespace]
            engines[label,] += 1
            if label != OTHER:
                models[label, _text(engine.model)] = 1
        return [
            numbers("raykv_engines", engines),
            numbers("raykv_namespace_info", dict(islice(models.items(), MAX_MODELS))),
        ]

    def _directory_families(self) -> list[MetricFamily]:
        chunks: Counter[tuple[str, ...]] = Counter(
            {(self._labels[engine.namespace],): 0 for engine in self._engines.values()}
        )
        slots: Counter[tuple[str, ...]] = Counter({("held",): 0, ("leased",): 0, ("free",): 0})
        for node in self._nodes.values():
            sizes = node.book.table.sizes()
            for namespace, count in sizes.items():
                chunks[self._labels[namespace],] += count
            slots["held",] += sum(sizes.values())
            slots["leased",] += node.book.table.num_leases
            slots["free",] += node.book.num_free
        return [
            numbers("raykv_directory_chunks", chunks),
            numbers("raykv_directory_slots", slots),
        ]

    def _tenant_families(self) -> list[MetricFamily]:
        num_bytes: dict[tuple[str, ...], float] = {}
        evicted: dict[tuple[str, ...], float] = {}
        tokens: dict[tuple[str, ...], float] = {}
        for each in self._tenants():
            num_bytes[each.name, RAM] = each.pool_bytes
            num_bytes[each.name, DISK] = each.disk_bytes
            evicted[each.name,] = each.num_evicted
            tokens |= {(each.name, source): each.tokens.get(source, 0) for source in TokenSource}
        return [
            numbers("raykv_tenant_bytes", num_bytes),
            numbers("raykv_tenant_evicted_chunks_total", evicted),
            numbers("raykv_tenant_prompt_tokens_total", tokens),
        ]

    def _reach_families(self) -> list[MetricFamily]:
        reach = {(label,): each for label, each in self._tally.reach.items()}
        return [
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
        ]


def _text(name: str) -> str:
    """A label's value out of what somebody has sent."""
    shown = name[-MAX_MODEL_LABEL:]
    return "".join(letter if letter.isprintable() else "?" for letter in shown)
