"""Every metric of RayKV's actors: name, kind, labels, buckets and what it means.

Names follow Prometheus' conventions: base units, `_total` for counters, no label with unbounded
values. What vLLM serves for its engines is in `raykv/vllm/misses.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from raykv.protocol.measures import HistogramData, MetricFamily, MetricRow

LATENCY_BOUNDS = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)
"""From a call over a socket to the longest deadline of a store."""

AGE_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 43200.0, 86400.0, 604800.0)
"""From "hardly stored" to a week."""

LOOKUPS = "lookup"
"""Name of the engines' histogram behind `raykv_lookup_seconds`."""

Labels = TypeVar("Labels", bound=tuple[str, ...])

MOST = 32
"""Namespaces in the metrics of one actor: models that share a cluster are a few."""

SHORT = 12
"""Characters of a namespace that people see."""

OTHER = "other"


class MetricKind(StrEnum):
    """Prometheus' types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """One metric; `bounds` are those of a histogram's buckets."""

    name: str
    kind: MetricKind
    text: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.COUNTER, text, labels)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.GAUGE, text, labels)


def _latency(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, MetricKind.HISTOGRAM, text, labels, LATENCY_BOUNDS)


BUILD = _gauge(
    "raykv_build_info", "RayKV's version, and which actor this is; always 1.", "version", "actor"
)

BREAKERS = (
    _gauge(
        "raykv_open_breakers",
        "Peers that are left alone because they failed, at most 16 of an actor or engine, by whose "
        "breaker it is, what kind of peer, and whether it is on trial (half_open).",
        "owner",
        "peer",
        "state",
    ),
    _counter("raykv_breaker_openings_total", "Closed breakers that opened.", "owner"),
    _counter("raykv_breaker_failures_total", "Calls of a peer that failed.", "owner"),
    _counter(
        "raykv_breaker_refusals_total",
        "Calls that were not made since a breaker was open.",
        "owner",
    ),
)

NODE = (
    _gauge(
        "raykv_pool_bytes",
        "Bytes of this node's pool: of chunks that can be loaded (ready), of chunks that are being "
        "stored or fetched (writing), and the rest (empty). The sum is the pool.",
        "state",
        "namespace",
    ),
    _gauge("raykv_pool_size_bytes", "RAM that this node lends; 0 while it has no pool."),
    _gauge("raykv_pool_prefaulted_bytes", "Bytes of the pool that the system has given already."),
    _counter(
        "raykv_copied_bytes_total",
        "Bytes copied between engines and this pool: stored into it, or loaded out of it.",
        "direction",
    ),
    _counter(
        "raykv_copied_chunks_total", "Chunks of those copies; each rank's part counts.", "direction"
    ),
    _counter("raykv_fetched_bytes_total", "Bytes that came from other nodes."),
    _counter("raykv_fetched_chunks_total", "Chunks that came from other nodes."),
    _counter("raykv_failed_fetches_total", "Chunks that a fetch from other nodes did not bring."),
    _counter("raykv_sent_bytes_total", "Bytes that went to other nodes."),
    _counter(
        "raykv_refused_chunks_total",
        "Chunks of copy jobs that were refused, by reason; an engine computes those tokens.",
        "reason",
    ),
    _counter("raykv_cancelled_jobs_total", "Copy jobs that an engine has given up."),
    _counter("raykv_failed_threads_total", "Threads that failed, or that could not be started."),
    _counter(
        "raykv_quarantined_chunks_total",
        "Chunks set aside because their bytes had changed, and journals that were invalid.",
    ),
    _gauge("raykv_disk_limit_bytes", "What this node's disk tier may take; 0 without one."),
    _gauge("raykv_disk_used_bytes", "What its files take."),
    _gauge("raykv_disk_chunks", "Chunks that can be brought back from it."),
    _counter(
        "raykv_disk_moved_bytes_total",
        "Bytes of chunks that were written to the disk tier, or read from it.",
        "direction",
    ),
    _counter("raykv_disk_evicted_files_total", "Files of it that were evicted for others."),
    _counter("raykv_disk_failed_writes_total", "Attempts to write that failed."),
    _counter(
        "raykv_disk_damaged_total",
        "Files that were invalid, and chunks whose bytes had changed; none of them is served.",
        "kind",
    ),
    _gauge("raykv_hidden_states_bytes", "Hidden states of requests in this node's memory."),
    _counter(
        "raykv_hidden_states_requests_total",
        "Requests whose hidden states were copied out of the KV cache, or could not be.",
        "outcome",
    ),
    _counter("raykv_hidden_states_copied_bytes_total", "Bytes of KV pages copied for that."),
    _counter(
        "raykv_hidden_states_files_total",
        "Files of hidden states that were written, or could not be.",
        "outcome",
    ),
    _gauge("raykv_queued_jobs", "Copy jobs that wait for a copy thread."),
    _gauge("raykv_attached_workers", "Worker processes of engines that are attached to this node."),
    _gauge(
        "raykv_unreported_chunks",
        "Chunks that are here but not yet reported to the scheduler actor.",
    ),
    _latency("raykv_queue_seconds", "How long copy jobs waited for a copy thread.", "direction"),
    _latency("raykv_copy_seconds", "How long copy jobs took once they ran.", "direction"),
    _latency("raykv_fetch_seconds", "How long this node took for a fetch from other nodes."),
    _latency("raykv_read_seconds", "How long this node took to hand chunks to another node."),
    _counter(
        "raykv_cluster_prompt_tokens_total",
        "Prompt tokens of ended requests of this node's engines by where their KV came from: "
        "computed, vLLM's own cache, this node's pool, another node's, a disk. The sum is all "
        "prompt tokens. The same tokens as in raykv_prompt_tokens_total of the engines.",
        "namespace",
        "source",
    ),
    _counter(
        "raykv_cluster_missed_tokens_total",
        "Prompt tokens of ended requests of this node's engines that were computed, by the reason "
        "why they were not loaded. The same tokens as in raykv_missed_tokens_total of the engines.",
        "namespace",
        "reason",
    ),
    _counter(
        "raykv_wanted_chunks_total",
        "Chunks that prompts consist of, counted each time that a request at this node wants them.",
        "namespace",
    ),
    _gauge(
        "raykv_distinct_wanted_chunks",
        "How many different chunks these were; an estimate (standard error 0.8 %).",
        "namespace",
    ),
    _gauge(
        "raykv_reachable_hit_ratio",
        "Share of the wanted chunks that an endless pool of this node would have hit, as far as "
        "this actor remembers: 1 - distinct / wanted.",
        "namespace",
    ),
    _counter(
        "raykv_stores_without_room_total", "Chunks that found no room in the pool.", "namespace"
    ),
    _counter(
        "raykv_declined_fetches_total",
        "Chunks of other nodes that were computed because that was measured to be faster.",
        "namespace",
    ),
    _counter("raykv_timed_out_waits_total", "Lookups that gave up waiting.", "namespace"),
    _gauge(
        "raykv_tenant_bytes",
        "Bytes of a tenant's chunks in the pool (ram) and of its files on the disk (disk); only "
        "if tenants have quotas; tenants without one count together (others).",
        "tenant",
        "tier",
    ),
    _counter(
        "raykv_tenant_evicted_chunks_total",
        "Chunks of a tenant with a quota that were evicted because it had more than its share.",
        "tenant",
    ),
    _counter(
        "raykv_tenant_prompt_tokens_total",
        "Prompt tokens of ended requests by tenant and by where their KV came from, as in "
        "raykv_cluster_prompt_tokens_total, as long as tenants have quotas.",
        "tenant",
        "source",
    ),
    Metric(
        "raykv_removed_chunk_age_seconds",
        MetricKind.HISTOGRAM,
        "Age of chunks when they were evicted, since they came into this pool or, if older, since "
        "this actor's start. Chunks that left for another reason do not count.",
        (),
        AGE_BOUNDS,
    ),
    _gauge("raykv_sessions", "Sessions of requests that this node knows.", "stage"),
    _counter(
        "raykv_session_chunks_released_total",
        "Chunks that became the next to be evicted, because their session ended or expired.",
    ),
    _latency(
        "raykv_lookup_seconds",
        "How long engines waited for the scheduler actor to say which nodes have chunks.",
        "namespace",
    ),
)

CLUSTER = (
    _gauge("raykv_nodes", "Nodes whose NodeActors report."),
    _gauge("raykv_engines", "Engines that are attached.", "namespace"),
    _gauge(
        "raykv_namespace_info",
        "Namespaces that engines serve now, and the model's name; always 1.",
        "namespace",
        "model",
    ),
    _gauge("raykv_paused", "1 while the cache is switched off with `raykv pause`."),
    _gauge(
        "raykv_directory_chunks",
        "Chunks that nodes have, in pools (ram) and on disks (disk); each node's copy counts.",
        "namespace",
        "tier",
    ),
    _gauge("raykv_known_sessions", "Sessions of requests whose nodes the scheduler actor knows."),
    _gauge(
        "raykv_orders_number",
        "Number of the latest document of operators' orders; 0 before the first.",
    ),
    _gauge(
        "raykv_report_pause_seconds",
        "Pause of nodes between two reports; the busier the scheduler actor, the longer it is.",
    ),
    _counter("raykv_events_total", "Events of the cluster's event log.", "kind"),
    _gauge(
        "raykv_event_reader_lag_events",
        "How many events behind the newest the slowest reader of the last minute was.",
    ),
    _counter(
        "raykv_event_gaps_total", "Times that a reader asked for events that are not kept any more."
    ),
    _gauge("raykv_oldest_node_report_age_seconds", "Age of the oldest of the nodes' last reports."),
    _latency("raykv_call_seconds", "How long the scheduler actor took to answer a call.", "call"),
)

METRICS = {metric.name: metric for metric in (BUILD, *BREAKERS, *NODE, *CLUSTER)}


def numbers(name: str, values: Mapping[Labels, float]) -> MetricFamily:
    """A counter's or a gauge's series, by the values of its labels."""
    metric = METRICS[name]
    assert metric.kind is not MetricKind.HISTOGRAM, name
    assert all(len(labels) == len(metric.labels) for labels in values), name
    rows = [MetricRow([*labels], float(value)) for labels, value in values.items()]
    return MetricFamily(name, rows)


def number(name: str, value: float) -> MetricFamily:
    """The only series of a metric without labels."""
    return numbers(name, {(): value})


def histograms(name: str, values: Iterable[tuple[tuple[str, ...], HistogramData]]) -> MetricFamily:
    """A histogram's series, by the values of its labels."""
    metric = METRICS[name]
    assert metric.kind is MetricKind.HISTOGRAM, name
    rows = [MetricRow([*labels], histogram=data) for labels, data in values]
    assert all(len(row.labels) == len(metric.labels) for row in rows), name
    assert all(len(row.histogram.counts) == len(metric.bounds) + 1 for row in rows), name
    return MetricFamily(name, rows)


def printable(name: str) -> str:
    """A label's value out of text from outside."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)


class NamespaceLabels:
    """A namespace keeps its label for ever; the memory for them is bounded."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def __getitem__(self, namespace: str) -> str:
        known = self._known.get(namespace)
        if known is not None:
            return known
        if len(self._known) >= MOST:
            return OTHER
        # A digest, unless a message says otherwise: then it must not become anything odd.
        short = self._known[namespace] = printable(namespace[:SHORT])
        return short
