"""Writes `raykv.json`, Grafana's dashboard of RayKV: `python deploy/grafana/make.py`.

The dashboard is what `ROWS` says; the metrics are those of `raykv/metrics/table.py` and vLLM's
own. Queries name `$C` where the cluster is chosen, and `$N` where cluster and namespace are.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raykv.metrics.table import METRICS

TARGET = Path(__file__).with_name("raykv.json")

COLUMNS, WIDTH, HEIGHT = 3, 8, 8
"""Panels side by side, in Grafana's grid of 24."""

CHOICES = {
    "$C": 'cluster=~"$cluster"',
    "$N": 'cluster=~"$cluster",namespace=~"$namespace"',
}

SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Query:
    """An expression of PromQL, and what its series are called."""

    text: str
    legend: str

    @property
    def expression(self) -> str:
        """As Grafana gets it."""
        text = self.text
        for name, matchers in CHOICES.items():
            text = text.replace(name, matchers)
        return text


@dataclass(frozen=True)
class Panel:
    """A chart; `unit` is one of Grafana's."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    is_stacked: bool = False


def _panel(title: str, unit: str, *queries: tuple[str, str], is_stacked: bool = False) -> Panel:
    return Panel(title, unit, tuple(Query(*query) for query in queries), is_stacked)


def _rate(name: str, by: str = "", choice: str = "$C") -> str:
    """How fast a counter rises, summed up."""
    return f"sum{f' by ({by})' if by else ''} (rate({_chosen(name, choice)}[$__rate_interval]))"


def _chosen(name: str, choice: str) -> str:
    return f"{name}{{{choice}}}" if choice else name


def _vllm(counter: str, by: str = "") -> str:
    """How fast a counter of vLLM's rises; its targets have no label for the cluster."""
    return _rate(f"vllm:{counter}_total", by, "")


def _quantile(share: str, name: str, by: str = "", choice: str = "$C") -> str:
    """Of a histogram, over all targets."""
    labels = f"le, {by}" if by else "le"
    buckets = _rate(f"{name}_bucket", labels, choice)
    return f"histogram_quantile({share}, {buckets})"


def _latency(title: str, name: str, by: str = "", choice: str = "$C") -> Panel:
    legend = f"{{{{{by}}}}} " if by else ""
    return _panel(
        title,
        "s",
        (_quantile("0.5", name, by, choice), f"{legend}median"),
        (_quantile("0.99", name, by, choice), f"{legend}99 %"),
    )


_TOKENS = "raykv_cluster_prompt_tokens_total"
_COMPUTED = f'sum (rate({_TOKENS}{{$N,source="computed"}}[$__rate_interval]))'
_ENGINES = (
    "sum by (namespace, model) (raykv_namespace_info{$N} "
    "* on (cluster, namespace) group_left () raykv_engines{$N})"
)
_PREFAULTED = (
    "sum by (instance) (raykv_pool_prefaulted_bytes{$C}) "
    "/ (sum by (instance) (raykv_pool_size_bytes{$C}) > 0)"
)

ROWS: dict[str, tuple[Panel, ...]] = {
    "Tokens": (
        _panel(
            "Prompt tokens by source",
            "short",
            (_rate(_TOKENS, "source", "$N"), "{{source}}"),
            is_stacked=True,
        ),
        _panel(
            "Share that was not computed",
            "percentunit",
            (f"1 - {_COMPUTED} / {_rate(_TOKENS, choice='$N')}", "tokens not computed"),
            (
                "max by (namespace) (raykv_reachable_hit_ratio{$N})",
                "an endless pool, {{namespace}}",
            ),
        ),
        _panel(
            "Computed tokens by reason",
            "short",
            (_rate("raykv_cluster_missed_tokens_total", "reason", "$N") + " > 0", "{{reason}}"),
            is_stacked=True,
        ),
        _panel(
            "Chunks that prompts want",
            "short",
            (
                _rate("raykv_wanted_chunks_total", "namespace", "$N"),
                "wanted a second, {{namespace}}",
            ),
            ("max by (namespace) (raykv_distinct_wanted_chunks{$N})", "different, {{namespace}}"),
        ),
        _panel(
            "Nodes and engines",
            "short",
            ("sum (raykv_nodes{$C})", "nodes"),
            (
                _ENGINES,
                "engines of {{model}}",
            ),
            ("max (raykv_paused{$C})", "paused"),
        ),
        _panel(
            "Versions",
            "short",
            ("count by (version, actor) (raykv_build_info{$C})", "{{actor}} {{version}}"),
        ),
    ),
    "Pool": (
        _panel(
            "Pool by state",
            "bytes",
            ("sum by (state) (raykv_pool_bytes{$C})", "{{state}}"),
            ("sum (raykv_pool_size_bytes{$C})", "size"),
            is_stacked=True,
        ),
        _panel(
            "Pool by namespace",
            "bytes",
            ('sum by (namespace) (raykv_pool_bytes{$N,state="ready"})', "{{namespace}}"),
            is_stacked=True,
        ),
        _panel(
            "Prefaulted",
            "percentunit",
            (
                _PREFAULTED,
                "{{instance}}",
            ),
        ),
        _panel(
            "Chunks in the directory",
            "short",
            ("sum by (namespace) (raykv_directory_chunks{$N})", "{{namespace}}"),
        ),
        _panel(
            "Slots",
            "short",
            ("sum by (state) (raykv_directory_slots{$C})", "{{state}}"),
            (_rate("raykv_granted_leases_total"), "leases granted a second"),
        ),
        _panel(
            "Sessions of requests",
            "short",
            ("sum by (stage) (raykv_sessions{$C})", "{{stage}}"),
            (_rate("raykv_session_chunks_released_total"), "chunks released a second"),
        ),
        _panel(
            "Tenants' bytes",
            "bytes",
            ("sum by (tenant, tier) (raykv_tenant_bytes{$C})", "{{tenant}}, {{tier}}"),
        ),
        _panel(
            "Tenants' prompt tokens",
            "short",
            (_rate("raykv_tenant_prompt_tokens_total", "tenant, source"), "{{tenant}}, {{source}}"),
            (
                _rate("raykv_tenant_evicted_chunks_total", "tenant"),
                "{{tenant}}: chunks evicted a second by its quota",
            ),
        ),
        _panel(
            "Age of evicted chunks",
            "s",
            (_quantile("0.1", "raykv_removed_chunk_age_seconds"), "10 %"),
            (_quantile("0.5", "raykv_removed_chunk_age_seconds"), "median"),
        ),
    ),
    "Copies": (
        _panel(
            "Bytes copied",
            "Bps",
            (_rate("raykv_copied_bytes_total", "direction"), "{{direction}}"),
        ),
        _latency("Copy jobs", "raykv_copy_seconds", "direction"),
        _latency("Waiting for a copy thread", "raykv_queue_seconds", "direction"),
        _panel(
            "Chunks copied",
            "short",
            (_rate("raykv_copied_chunks_total", "direction"), "{{direction}}"),
        ),
        _panel(
            "Chunks refused",
            "short",
            (_rate("raykv_refused_chunks_total", "reason") + " > 0", "{{reason}}"),
            (_rate("raykv_cancelled_jobs_total"), "cancelled jobs"),
            is_stacked=True,
        ),
        _panel(
            "Queue and workers",
            "short",
            ("sum (raykv_queued_jobs{$C})", "queued jobs"),
            ("sum (raykv_attached_workers{$C})", "workers"),
            (_rate("raykv_failed_threads_total"), "failed threads, a second"),
        ),
    ),
    "Between nodes": (
        _panel(
            "Bytes between nodes",
            "Bps",
            (_rate("raykv_fetched_bytes_total"), "fetched"),
            (_rate("raykv_sent_bytes_total"), "sent"),
        ),
        _latency("Fetches", "raykv_fetch_seconds"),
        _latency("Reads for other nodes", "raykv_read_seconds"),
        _panel(
            "Chunks fetched, or not",
            "short",
            (_rate("raykv_fetched_chunks_total"), "fetched"),
            (_rate("raykv_failed_fetches_total"), "failed"),
            (_rate("raykv_declined_fetches_total", choice="$N"), "computed since that is faster"),
        ),
        _latency("Lookups at the scheduler actor", "raykv_lookup_seconds", choice="$N"),
        _latency("Scheduler actor, by call", "raykv_call_seconds", "call"),
    ),
    "Disks": (
        _panel(
            "Disk tiers",
            "bytes",
            ("sum (raykv_disk_used_bytes{$C})", "used"),
            ("sum (raykv_disk_limit_bytes{$C})", "limit"),
        ),
        _panel(
            "Bytes to and from disks",
            "Bps",
            (_rate("raykv_disk_moved_bytes_total", "direction"), "{{direction}}"),
        ),
        _panel(
            "Chunks on disks",
            "short",
            ("sum (raykv_disk_chunks{$C})", "chunks"),
            (_rate("raykv_disk_evicted_files_total"), "files given up a second"),
        ),
        _panel(
            "Disk troubles",
            "short",
            (_rate("raykv_disk_failed_writes_total"), "failed writes a second"),
            (_rate("raykv_disk_damaged_total", "kind"), "damaged {{kind}}s a second"),
        ),
    ),
    "Hidden states": (
        _panel("In memory", "bytes", ("sum (raykv_hidden_states_bytes{$C})", "states")),
        _panel(
            "Copied out of KV caches",
            "Bps",
            (_rate("raykv_hidden_states_copied_bytes_total"), "copied"),
        ),
        _panel(
            "Requests and files",
            "short",
            (_rate("raykv_hidden_states_requests_total", "outcome"), "requests: {{outcome}}"),
            (_rate("raykv_hidden_states_files_total", "outcome"), "files: {{outcome}}"),
        ),
    ),
    "Health": (
        _panel(
            "Open breakers",
            "short",
            (
                "sum by (owner, peer, state) (raykv_open_breakers{$C}) > 0",
                "{{owner}}: {{peer}} {{state}}",
            ),
            (_rate("raykv_breaker_openings_total", "owner"), "{{owner}}: openings a second"),
        ),
        _panel(
            "Calls that failed, or were not made",
            "short",
            (_rate("raykv_breaker_failures_total", "owner"), "{{owner}}: failed"),
            (_rate("raykv_breaker_refusals_total", "owner"), "{{owner}}: not made"),
        ),
        _panel(
            "Waits and leases",
            "short",
            (_rate("raykv_timed_out_waits_total", choice="$N"), "waits given up"),
            (_rate("raykv_stores_without_lease_total", choice="$N"), "stores without a lease"),
        ),
        _panel(
            "Quarantined chunks",
            "short",
            ("sum by (instance) (raykv_quarantined_chunks_total{$C})", "{{instance}}"),
        ),
        _panel(
            "Events",
            "short",
            (_rate("raykv_events_total", "kind"), "{{kind}}"),
            ("max (raykv_event_reader_lag_events{$C})", "slowest reader is behind"),
            (_rate("raykv_event_gaps_total"), "gaps a second"),
        ),
        _panel(
            "What the directory does not know yet",
            "short",
            ("sum by (instance) (raykv_unreported_chunks{$C})", "chunks of {{instance}}"),
            ("max (raykv_oldest_node_report_age_seconds{$C})", "oldest report, seconds"),
        ),
    ),
    "vLLM's own metrics": (
        _panel(
            "Hits beyond vLLM's own cache",
            "percentunit",
            (
                f"{_vllm('external_prefix_cache_hits')} / {_vllm('external_prefix_cache_queries')}",
                "hits",
            ),
        ),
        _panel(
            "Cached prompt tokens by source",
            "short",
            (_vllm("prompt_tokens_cached_by_source", "source"), "{{source}}"),
            is_stacked=True,
        ),
        _panel(
            "Prompt tokens of ended requests",
            "short",
            (_rate("raykv_prompt_tokens_total", "source", ""), "{{source}}"),
            (_rate("raykv_missed_tokens_total", "reason", "") + " > 0", "computed: {{reason}}"),
        ),
        _panel(
            "Bytes offloaded",
            "Bps",
            (_vllm("kv_offload_store_bytes"), "store"),
            (_vllm("kv_offload_load_bytes"), "load"),
        ),
        _panel(
            "Lookups on vLLM's scheduler thread",
            "s",
            (
                _quantile("0.99", "vllm:kv_offload_lookup_sync_delay_seconds", choice=""),
                "one call, 99 %",
            ),
            (
                _quantile("0.99", "vllm:kv_offload_lookup_async_delay_seconds", choice=""),
                "deferred, 99 %",
            ),
        ),
        _latency("Time to first token", "vllm:time_to_first_token_seconds", choice=""),
    ),
}


def metrics_in(expression: str) -> list[str]:
    """Names of the series that a query reads, in order."""
    return re.findall(r"\b(?:raykv_|vllm:)\w+", expression)


def expressions() -> list[str]:
    """All queries of all panels, with Grafana's own variables in them."""
    panels = [panel for row in ROWS.values() for panel in row]
    return [query.expression for panel in panels for query in panel.queries]


def _meaning(panel: Panel) -> str:
    """The help texts of RayKV's metrics in a panel."""
    names = [name for query in panel.queries for name in metrics_in(query.expression)]
    plain = [name.removesuffix("_bucket") for name in dict.fromkeys(names)]
    return "\n\n".join(f"{name}: {METRICS[name].text}" for name in plain if name in METRICS)


def _chart(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.is_stacked else "none", "group": "A"}
    return {
        "type": "timeseries",
        "id": number,
        "title": panel.title,
        "description": _meaning(panel),
        "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": {
                    "drawStyle": "line",
                    "lineWidth": 1,
                    "fillOpacity": 30 if panel.is_stacked else 0,
                    "showPoints": "never",
                    "stacking": stacking,
                },
            },
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + position),
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": query.expression,
                "legendFormat": query.legend,
                "range": True,
            }
            for position, query in enumerate(panel.queries)
        ],
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        head = {"x": 0, "y": y, "w": COLUMNS * WIDTH, "h": 1}
        made.append(
            {
                "type": "row",
                "id": len(made) + 1,
                "title": title,
                "collapsed": False,
                "gridPos": head,
                "panels": [],
            }
        )
        for position, panel in enumerate(row):
            down, across = divmod(position, COLUMNS)
            place = (across * WIDTH, y + 1 + down * HEIGHT)
            made.append(_chart(panel, len(made) + 1, *place))
        y += 1 + HEIGHT * -(-len(row) // COLUMNS)
    return made


def _choice(name: str, label: str, query: str) -> dict[str, Any]:
    """A variable with the values of a label; all of them at first, and series without it too."""
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "definition": query,
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "hide": 0,
    }


def dashboard() -> dict[str, Any]:
    """What Grafana loads."""
    source = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "regex": "",
        "multi": False,
        "includeAll": False,
        "options": [],
        "hide": 0,
    }
    namespaces = 'label_values(raykv_cluster_prompt_tokens_total{cluster=~"$cluster"}, namespace)'
    return {
        "uid": "raykv",
        "title": "RayKV",
        "description": "The KV cache of vLLM in the RAM of a Ray cluster.",
        "tags": ["raykv", "ray", "vllm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {
            "list": [
                source,
                _choice("cluster", "Ray cluster", "label_values(raykv_nodes, cluster)"),
                _choice("namespace", "Namespace", namespaces),
            ]
        },
        "panels": _panels(),
    }


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
