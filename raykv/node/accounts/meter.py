"""What a NodeActor measures of its work, and all that it has to show to Prometheus.

What is counted here is guarded by its callers' locks.
A reader sees plain numbers that may be a moment old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product

from raykv.base.ids import Direction, Refusal, TokenSource
from raykv.base.tenants import OTHERS
from raykv.metrics.histogram import Histogram
from raykv.metrics.table import LATENCY_BOUNDS, histograms, number, numbers
from raykv.node.pool.owner import NodePool
from raykv.protocol import measures, node, reader
from raykv.protocol.sessions import SessionStage

PEERS = ("scheduler", "own_node", "other_node")
"""Kinds of peers that breakers are for."""

BREAKER_STATES = ("open", "half_open")

BREAKER_SUMS = {
    "raykv_breaker_openings_total": "opened",
    "raykv_breaker_failures_total": "failed",
    "raykv_breaker_refusals_total": "refused",
}
"""Metrics that are sums of breakers since the start."""

_NAMES = {direction: direction.name.lower() for direction in Direction}


def _by_direction() -> dict[Direction, Histogram]:
    return {direction: Histogram(LATENCY_BOUNDS) for direction in Direction}


@dataclass
class NodeMeter:
    """What a NodeActor has measured since its start."""

    queue: dict[Direction, Histogram] = field(default_factory=_by_direction)
    copy: dict[Direction, Histogram] = field(default_factory=_by_direction)
    fetch: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    reading: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    refusals: Counter[Refusal] = field(default_factory=Counter)
    """Of chunks that were not copied."""

    def ran(self, direction: Direction, queued_s: float, copied_s: float) -> None:
        """A copy job has ended; `queued_s` is its time in the queue."""
        self.queue[direction].observe(queued_s)
        self.copy[direction].observe(copied_s)

    def families(self, stats: node.NodeStats, owner: NodePool) -> list[measures.MetricFamily]:
        """All series of a NodeActor that has a pool; its lock is held."""
        copied = {"store": stats.bytes_stored, "load": stats.bytes_loaded}
        chunks = {"store": stats.chunks_stored, "load": stats.chunks_loaded}
        reasons = {(each.name.lower(),): self.refusals[each] for each in Refusal if each}
        accounts = owner.accounts
        return [
            _pool(stats.pool_bytes, owner),
            number("raykv_pool_size_bytes", stats.pool_bytes),
            number("raykv_pool_prefaulted_bytes", stats.prefaulted_bytes),
            numbers("raykv_copied_bytes_total", {(name,): n for name, n in copied.items()}),
            numbers("raykv_copied_chunks_total", {(name,): n for name, n in chunks.items()}),
            number("raykv_fetched_bytes_total", stats.bytes_fetched),
            number("raykv_fetched_chunks_total", stats.chunks_fetched),
            number("raykv_failed_fetches_total", stats.fetches_failed),
            number("raykv_sent_bytes_total", stats.bytes_sent),
            numbers("raykv_refused_chunks_total", reasons),
            number("raykv_cancelled_jobs_total", stats.jobs_cancelled),
            number("raykv_failed_threads_total", stats.threads_failed),
            number("raykv_quarantined_chunks_total", stats.quarantined),
            *_disk(stats.disk),
            *_states(stats.states),
            number("raykv_queued_jobs", stats.queued_jobs),
            number("raykv_attached_workers", stats.num_workers),
            number("raykv_unreported_chunks", owner.reporting.num_unread),
            histograms("raykv_queue_seconds", _rows(self.queue)),
            histograms("raykv_copy_seconds", _rows(self.copy)),
            histograms("raykv_fetch_seconds", [((), self.fetch.data())]),
            histograms("raykv_read_seconds", [((), self.reading.data())]),
            *_breakers(stats.breakers, owner),
            *accounts.tally.families(),
            *_tenants(owner, stats.disk.tenant_bytes),
            histograms("raykv_removed_chunk_age_seconds", [((), accounts.ages.data())]),
            *_sessions(owner),
        ]


def _pool(pool_bytes: int, owner: NodePool) -> measures.MetricFamily:
    found: Counter[tuple[str, ...]] = Counter()
    for state, spaces in zip(("ready", "writing"), owner.index.contents(), strict=True):
        for namespace, num_bytes in spaces.items():
            found[state, owner.accounts.labels[namespace]] += num_bytes
    found["empty", ""] = max(0, pool_bytes - found.total())
    return numbers("raykv_pool_bytes", found)


def _breakers(own: measures.BreakerReport, owner: NodePool) -> list[measures.MetricFamily]:
    """Series of this actor's breakers and of its engines'. Labels distinguish peers by kind only,
    since nodes come and go.
    """
    reports = [("node", own), *(("engine", each.breakers) for each in owner.engines)]
    kinds = product(("node", "engine"), PEERS, BREAKER_STATES)
    found: Counter[tuple[str, ...]] = Counter(dict.fromkeys(kinds, 0))
    for whose, report in reports:
        for row in report.rows:
            state = row.state.replace("-", "_")
            is_known = state in BREAKER_STATES
            found[whose, _kind(row.peer), state if is_known else BREAKER_STATES[0]] += 1
    sums = owner.accounts.tally.breakers
    totals = [
        numbers(name, {("node",): getattr(own, counter), ("engine",): sums[counter]})
        for name, counter in BREAKER_SUMS.items()
    ]
    return [numbers("raykv_open_breakers", found), *totals]


def _kind(peer: str) -> str:
    scheduler, own_node, other_node = PEERS
    if peer.startswith(measures.OWN_NODE):
        return own_node
    return scheduler if peer == scheduler else other_node


def _tenants(owner: NodePool, on_disk: Mapping[str, int]) -> list[measures.MetricFamily]:
    """Series of tenants that have quotas, and of all others together; none without quotas."""
    shares, accounts = owner.orders.shares, owner.accounts
    names = dict.fromkeys([*(each.name for each in shares.values()), OTHERS] if shares else ())
    num_bytes: Counter[tuple[str, ...]] = Counter()
    for name in names:
        num_bytes[name, reader.RAM] = num_bytes[name, reader.DISK] = 0
    if shares:
        for whose, some in owner.index.room.used.items():
            num_bytes[owner.quota_of(whose), reader.RAM] += some
        for label, some in on_disk.items():
            num_bytes[owner.quota_of(label), reader.DISK] += some
    evicted = {(name,): accounts.num_evicted[name] for name in names}
    tokens = {(n, str(source)): accounts.tokens[n, source] for n in names for source in TokenSource}
    return [
        numbers("raykv_tenant_bytes", num_bytes),
        numbers("raykv_tenant_evicted_chunks_total", evicted),
        numbers("raykv_tenant_prompt_tokens_total", tokens),
    ]


def _sessions(owner: NodePool) -> list[measures.MetricFamily]:
    stages = Counter(session.stage for _, _, session in owner.sessions.latest())
    return [
        numbers("raykv_sessions", {(str(stage),): stages[stage] for stage in SessionStage}),
        number("raykv_session_chunks_released_total", owner.index.claims.num_released),
    ]


def _disk(disk: node.DiskStats) -> list[measures.MetricFamily]:
    moved = {("write",): disk.bytes_written, ("read",): disk.bytes_read}
    damaged = {("file",): disk.files_damaged, ("chunk",): disk.chunks_damaged}
    return [
        number("raykv_disk_limit_bytes", disk.most_bytes),
        number("raykv_disk_used_bytes", disk.used_bytes),
        number("raykv_disk_chunks", disk.num_chunks),
        numbers("raykv_disk_moved_bytes_total", moved),
        number("raykv_disk_evicted_files_total", disk.files_evicted),
        number("raykv_disk_failed_writes_total", disk.writes_failed),
        numbers("raykv_disk_damaged_total", damaged),
    ]


def _states(states: node.CaptureStats) -> list[measures.MetricFamily]:
    captured = {("captured",): states.captured, ("failed",): states.failed}
    files = {("written",): states.files_written, ("failed",): states.files_failed}
    return [
        number("raykv_hidden_states_bytes", states.num_bytes),
        numbers("raykv_hidden_states_requests_total", captured),
        number("raykv_hidden_states_copied_bytes_total", states.bytes_captured),
        numbers("raykv_hidden_states_files_total", files),
    ]


def _rows(
    found: Mapping[Direction, Histogram],
) -> Iterator[tuple[tuple[str, ...], measures.HistogramData]]:
    for direction, each in found.items():
        yield (_NAMES[direction],), each.data()
