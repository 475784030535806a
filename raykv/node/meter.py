"""What a NodeActor measures of its work, and all that it has to show to Prometheus.

What is counted here is guarded by its callers' locks.
A reader sees plain numbers that may be a moment old.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from raykv.base.ids import Direction, Namespace, Refusal
from raykv.metrics.breakers import breaker_families
from raykv.metrics.histogram import Histogram
from raykv.metrics.table import LATENCY_BOUNDS, NamespaceLabels, histograms, number, numbers
from raykv.node.slots import SlotState
from raykv.protocol.measures import HistogramData, MetricFamily
from raykv.protocol.node import CaptureStats, DiskStats, NodeStats

_NAMES = {direction: direction.name.lower() for direction in Direction}


def _by_direction() -> dict[Direction, Histogram]:
    return {direction: Histogram(LATENCY_BOUNDS) for direction in Direction}


@dataclass(frozen=True)
class PoolContents:
    """Bytes of READY and WRITING slots by namespace, and chunks that have not been reported yet."""

    num_bytes: Mapping[tuple[SlotState, Namespace], int]
    num_unreported: int = 0


@dataclass
class NodeMeter:
    """What a NodeActor has measured since its start."""

    queue: dict[Direction, Histogram] = field(default_factory=_by_direction)
    copy: dict[Direction, Histogram] = field(default_factory=_by_direction)
    fetch: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    reading: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    refusals: Counter[Refusal] = field(default_factory=Counter)
    labels: NamespaceLabels = field(default_factory=NamespaceLabels)

    def ran(self, direction: Direction, queued_s: float, copied_s: float) -> None:
        """A copy job has ended, after so long in the queue."""
        self.queue[direction].observe(queued_s)
        self.copy[direction].observe(copied_s)

    def refused(self, refusals: Iterable[Refusal]) -> None:
        """Chunks of a job were not copied."""
        self.refusals.update(refusals)

    def families(self, stats: NodeStats, contents: PoolContents) -> list[MetricFamily]:
        """All series of a NodeActor that has a pool."""
        copied = {"store": stats.bytes_stored, "load": stats.bytes_loaded}
        chunks = {"store": stats.chunks_stored, "load": stats.chunks_loaded}
        reasons = {(each.name.lower(),): self.refusals[each] for each in Refusal if each}
        return [
            self._pool(stats.pool_bytes, contents),
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
            number("raykv_unreported_chunks", contents.num_unreported),
            histograms("raykv_queue_seconds", _rows(self.queue)),
            histograms("raykv_copy_seconds", _rows(self.copy)),
            histograms("raykv_fetch_seconds", [((), self.fetch.data())]),
            histograms("raykv_read_seconds", [((), self.reading.data())]),
            *breaker_families("node", [stats.breakers], stats.breakers),
        ]

    def _pool(self, pool_bytes: int, contents: PoolContents) -> MetricFamily:
        found: Counter[tuple[str, ...]] = Counter()
        for (state, namespace), num_bytes in contents.num_bytes.items():
            found[state.value, self.labels[namespace]] += num_bytes
        found[SlotState.EMPTY.value, ""] = max(0, pool_bytes - found.total())
        return numbers("raykv_pool_bytes", found)


def _disk(disk: DiskStats) -> list[MetricFamily]:
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


def _states(states: CaptureStats) -> list[MetricFamily]:
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
) -> Iterator[tuple[tuple[str, ...], HistogramData]]:
    for direction, each in found.items():
        yield (_NAMES[direction],), each.data()
