"""Writes `raykv.json`, Grafana's dashboard of RayKV: `python deploy/grafana/make.py`.

The dashboard is what `STATS`, `OPEN` and `COLLAPSED` say; the metrics are those of
`raykv/metrics/table.py` and vLLM's own. Queries name `$C` where the cluster is chosen, and `$N`
where cluster and namespace are. Units follow from the metrics' names.
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

STAT_WIDTH, STAT_HEIGHT = 4, 4
"""Of the numbers in the first row."""

PLAIN = (
    "tokens",
    "chunks",
    "files",
    "jobs",
    "threads",
    "stores",
    "requests",
    "events",
    "gaps",
    "writes",
    "openings",
)
NOUNS = {
    **dict(zip(PLAIN, PLAIN, strict=True)),
    "fetches": "chunks",
    "waits": "lookups",
    "failures": "calls",
    "refusals": "calls",
}
"""What counters count, by a word of their names."""

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

    @property
    def unit(self) -> str:
        """One of Grafana's."""
        if "histogram_quantile" in self.text:
            return "s"
        if " / " in self.text:
            return "percentunit"
        name = metrics_in(self.text)[0]
        if "rate(" in self.text:
            words = name.removesuffix("_total").split("_")
            noun = next((NOUNS[word] for word in words if word in NOUNS), "")
            return "Bps" if "bytes" in words else f"count:{noun}/s" if noun else "cps"
        units = {"bytes": "bytes", "seconds": "s", "ratio": "percentunit"}
        return units.get(name.rpartition("_")[2], "short")


@dataclass(frozen=True)
class Panel:
    """A chart, or in the first row a number; `colors` are Grafana's, from a value on."""

    title: str
    queries: tuple[Query, ...]
    is_stacked: bool = False
    colors: tuple[tuple[str, float | None], ...] = ()


def _panel(title: str, *queries: tuple[str, str], is_stacked: bool = False) -> Panel:
    return Panel(title, tuple(Query(*query) for query in queries), is_stacked)


def _stat(title: str, *queries: tuple[str, str], **colors: float | None) -> Panel:
    made = tuple(Query(*query) for query in queries)
    return Panel(title, made, colors=(*colors.items(),) or (("text", None),))


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

_NOT_COMPUTED = f"1 - {_COMPUTED} / {_rate(_TOKENS, choice='$N')}"
_LOADED = f'sum (rate({_TOKENS}{{$N,source=~"same_node|other_node|disk"}}[$__rate_interval]))'
_LOADS = 'sum by (le) (rate(raykv_copy_seconds_bucket{$C,direction="load"}[$__rate_interval]))'

STATS = (
    # Without prompts there is no share, and without loads no time: no data, not NaN.
    _stat("Prompt tokens not computed", (f"{_NOT_COMPUTED} >= 0", "")),
    _stat("Prompt tokens loaded", (_LOADED, "")),
    _stat(
        "Pools in use",
        ('sum (raykv_pool_bytes{$C,state!="empty"}) / (sum (raykv_pool_size_bytes{$C}) > 0)', ""),
    ),
    _stat(
        "Nodes and engines",
        ("sum (raykv_nodes{$C})", "nodes"),
        ("sum (raykv_engines{$C})", "engines"),
        red=None,
        green=1,
    ),
    _stat(
        "Refused or failed",
        (f"{_rate('raykv_refused_chunks_total')} + {_rate('raykv_failed_fetches_total')}", ""),
        green=None,
        red=0.001,
    ),
    _stat("Time to load, 99 %", (f"histogram_quantile(0.99, {_LOADS}) >= 0", "")),
)
"""What an operator looks at first."""

OPEN: dict[str, tuple[Panel, ...]] = {
    "Tokens": (
        _panel(
            "Prompt tokens by source",
            (_rate(_TOKENS, "source", "$N"), "{{source}}"),
            is_stacked=True,
        ),
        _panel(
            "Share that was not computed",
            (_NOT_COMPUTED, "tokens not computed"),
            (
                "max by (namespace) (raykv_reachable_hit_ratio{$N})",
                "an endless pool of one node, {{namespace}}",
            ),
        ),
        _panel(
            "Computed tokens by reason",
            (_rate("raykv_cluster_missed_tokens_total", "reason", "$N") + " > 0", "{{reason}}"),
            is_stacked=True,
        ),
        _panel(
            "Chunks that prompts want",
            (
                _rate("raykv_wanted_chunks_total", "namespace", "$N"),
                "wanted, {{namespace}}",
            ),
            (
                "max by (namespace) (raykv_distinct_wanted_chunks{$N})",
                "different, at one node, {{namespace}}",
            ),
        ),
        _panel(
            "Nodes and engines",
            ("sum (raykv_nodes{$C})", "nodes"),
            (
                _ENGINES,
                "engines of {{model}}",
            ),
            ("max (raykv_paused{$C})", "paused"),
            ("max (raykv_orders_number{$C})", "number of the latest orders"),
        ),
        _panel(
            "Versions",
            ("count by (version, actor) (raykv_build_info{$C})", "{{actor}} {{version}}"),
        ),
    ),
    "Pool": (
        _panel(
            "Pool by state",
            ("sum by (state) (raykv_pool_bytes{$C})", "{{state}}"),
            ("sum (raykv_pool_size_bytes{$C})", "size"),
            is_stacked=True,
        ),
        _panel(
            "Pool by namespace",
            ('sum by (namespace) (raykv_pool_bytes{$N,state="ready"})', "{{namespace}}"),
            is_stacked=True,
        ),
        _panel(
            "Prefaulted",
            (
                _PREFAULTED,
                "{{instance}}",
            ),
        ),
        _panel(
            "Chunks in the directory",
            ("sum by (namespace, tier) (raykv_directory_chunks{$N})", "{{namespace}}, {{tier}}"),
        ),
        _panel(
            "Room that was not found",
            (_rate("raykv_stores_without_room_total", "namespace", "$N"), "{{namespace}}"),
        ),
        _panel(
            "Age of evicted chunks",
            (_quantile("0.1", "raykv_removed_chunk_age_seconds"), "10 %"),
            (_quantile("0.5", "raykv_removed_chunk_age_seconds"), "median"),
        ),
    ),
    "Copies": (
        _panel(
            "Bytes copied",
            (_rate("raykv_copied_bytes_total", "direction"), "{{direction}}"),
        ),
        _latency("Copy jobs", "raykv_copy_seconds", "direction"),
        _latency("Waiting for a copy thread", "raykv_queue_seconds", "direction"),
        _panel(
            "Chunks copied",
            (_rate("raykv_copied_chunks_total", "direction"), "{{direction}}"),
        ),
        _panel(
            "Chunks refused",
            (_rate("raykv_refused_chunks_total", "reason") + " > 0", "{{reason}}"),
            (_rate("raykv_cancelled_jobs_total"), "cancelled jobs"),
            is_stacked=True,
        ),
        _panel(
            "Queue and workers",
            ("sum (raykv_queued_jobs{$C})", "queued jobs"),
            ("sum (raykv_attached_workers{$C})", "workers"),
            (_rate("raykv_failed_threads_total"), "failed threads"),
        ),
    ),
    "Scheduler actor": (
        _latency("Lookups at the scheduler actor", "raykv_lookup_seconds", choice="$N"),
        _latency("Scheduler actor, by call", "raykv_call_seconds", "call"),
        _panel(
            "Waits and pauses",
            (_rate("raykv_timed_out_waits_total", choice="$N"), "waits given up"),
            ("max (raykv_report_pause_seconds{$C})", "pause between reports"),
        ),
    ),
    "Health": (
        _panel(
            "Open breakers",
            (
                "sum by (owner, peer, state) (raykv_open_breakers{$C}) > 0",
                "{{owner}}: {{peer}} {{state}}",
            ),
            (_rate("raykv_breaker_openings_total", "owner"), "{{owner}}: openings"),
        ),
        _panel(
            "Calls that failed, or were not made",
            (_rate("raykv_breaker_failures_total", "owner"), "{{owner}}: failed"),
            (_rate("raykv_breaker_refusals_total", "owner"), "{{owner}}: not made"),
        ),
        _panel(
            "Quarantined chunks",
            ("sum by (instance) (raykv_quarantined_chunks_total{$C})", "{{instance}}"),
        ),
        _panel(
            "Events",
            (_rate("raykv_events_total", "kind"), "{{kind}}"),
            ("max (raykv_event_reader_lag_events{$C})", "slowest reader is behind"),
            (_rate("raykv_event_gaps_total"), "gaps"),
        ),
        _panel(
            "What the directory does not know yet",
            ("sum by (instance) (raykv_unreported_chunks{$C})", "chunks of {{instance}}"),
            ("max (raykv_oldest_node_report_age_seconds{$C})", "oldest report"),
        ),
    ),
    "vLLM's own metrics": (
        _panel(
            "Hits beyond vLLM's own cache",
            (
                f"{_vllm('external_prefix_cache_hits')} / {_vllm('external_prefix_cache_queries')}",
                "hits",
            ),
        ),
        _panel(
            "Cached prompt tokens by source",
            (_vllm("prompt_tokens_cached_by_source", "source"), "{{source}}"),
            is_stacked=True,
        ),
        _panel(
            "Prompt tokens of ended requests",
            (_rate("raykv_prompt_tokens_total", "source", ""), "{{source}}"),
            (_rate("raykv_missed_tokens_total", "reason", "") + " > 0", "computed: {{reason}}"),
        ),
        _panel(
            "Bytes offloaded",
            (_vllm("kv_offload_store_bytes"), "store"),
            (_vllm("kv_offload_load_bytes"), "load"),
        ),
        _panel(
            "Lookups on vLLM's scheduler thread",
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

COLLAPSED: dict[str, tuple[Panel, ...]] = {
    "Between nodes": (
        _panel(
            "Bytes between nodes",
            (_rate("raykv_fetched_bytes_total"), "fetched"),
            (_rate("raykv_sent_bytes_total"), "sent"),
        ),
        _latency("Fetches", "raykv_fetch_seconds"),
        _latency("Reads for other nodes", "raykv_read_seconds"),
        _panel(
            "Chunks fetched, or not",
            (_rate("raykv_fetched_chunks_total"), "fetched"),
            (_rate("raykv_failed_fetches_total"), "failed"),
            (_rate("raykv_declined_fetches_total", choice="$N"), "computed since that is faster"),
        ),
    ),
    "Disks": (
        _panel(
            "Disk tiers",
            ("sum (raykv_disk_used_bytes{$C})", "used"),
            ("sum (raykv_disk_limit_bytes{$C})", "limit"),
        ),
        _panel(
            "Bytes to and from disks",
            (_rate("raykv_disk_moved_bytes_total", "direction"), "{{direction}}"),
        ),
        _panel(
            "Chunks on disks",
            ("sum (raykv_disk_chunks{$C})", "chunks"),
            (_rate("raykv_disk_evicted_files_total"), "files given up"),
        ),
        _panel(
            "Disk troubles",
            (_rate("raykv_disk_failed_writes_total"), "failed writes"),
            (_rate("raykv_disk_damaged_total", "kind"), "damaged {{kind}}s"),
        ),
    ),
    "Tenants and sessions": (
        _panel(
            "Tenants' bytes",
            ("sum by (tenant, tier) (raykv_tenant_bytes{$C})", "{{tenant}}, {{tier}}"),
        ),
        _panel(
            "Tenants' prompt tokens",
            (_rate("raykv_tenant_prompt_tokens_total", "tenant, source"), "{{tenant}}, {{source}}"),
            (
                _rate("raykv_tenant_evicted_chunks_total", "tenant"),
                "{{tenant}}: chunks evicted by its quota",
            ),
        ),
        _panel(
            "Sessions of requests",
            ("sum by (stage) (raykv_sessions{$C})", "{{stage}}"),
            ("sum (raykv_known_sessions{$C})", "known to the scheduler actor"),
            (_rate("raykv_session_chunks_released_total"), "chunks released"),
        ),
    ),
    "Hidden states": (
        _panel("In memory", ("sum (raykv_hidden_states_bytes{$C})", "states")),
        _panel(
            "Copied out of KV caches",
            (_rate("raykv_hidden_states_copied_bytes_total"), "copied"),
        ),
        _panel(
            "Requests and files",
            (_rate("raykv_hidden_states_requests_total", "outcome"), "requests: {{outcome}}"),
            (_rate("raykv_hidden_states_files_total", "outcome"), "files: {{outcome}}"),
        ),
    ),
}
"""Rows of what is zero on one node with the default settings."""


def metrics_in(expression: str) -> list[str]:
    """Names of the series that a query reads, in order."""
    return re.findall(r"\b(?:raykv_|vllm:)\w+", expression)


def expressions() -> list[str]:
    """All queries of all panels, with Grafana's own variables in them."""
    rows = (STATS, *OPEN.values(), *COLLAPSED.values())
    panels = [panel for row in rows for panel in row]
    return [query.expression for panel in panels for query in panel.queries]


def _meaning(panel: Panel) -> str:
    """The help texts of RayKV's metrics in a panel."""
    names = [name for query in panel.queries for name in metrics_in(query.expression)]
    plain = [name.removesuffix("_bucket") for name in dict.fromkeys(names)]
    return "\n\n".join(f"{name}: {METRICS[name].text}" for name in plain if name in METRICS)


def _targets(panel: Panel) -> list[dict[str, Any]]:
    return [
        {
            "refId": chr(ord("A") + position),
            "datasource": SOURCE,
            "editorMode": "code",
            "expr": query.expression,
            "legendFormat": query.legend,
            "range": True,
        }
        for position, query in enumerate(panel.queries)
    ]


def _other_units(panel: Panel) -> list[dict[str, Any]]:
    """Queries in another unit than the first have their axis on the right."""
    return [
        {
            "matcher": {"id": "byFrameRefID", "options": chr(ord("A") + position)},
            "properties": [
                {"id": "unit", "value": query.unit},
                {"id": "custom.axisPlacement", "value": "right"},
            ],
        }
        for position, query in enumerate(panel.queries)
        if query.unit != panel.queries[0].unit
    ]


def _made(panel: Panel, number: int, place: tuple[int, int, int, int]) -> dict[str, Any]:
    """A panel as Grafana has it; its kind, and how it looks, are in `_chart` and `_number`."""
    unit = panel.queries[0].unit
    most = {"max": 1} if unit == "percentunit" else {}
    return {
        "id": number,
        "title": panel.title,
        "description": _meaning(panel),
        "datasource": SOURCE,
        "gridPos": dict(zip("xywh", place, strict=True)),
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, **most},
            "overrides": _other_units(panel),
        },
        "targets": _targets(panel),
    }


def _chart(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    made = _made(panel, number, (x, y, WIDTH, HEIGHT))
    made["fieldConfig"]["defaults"]["custom"] = {
        "drawStyle": "line",
        "lineWidth": 1,
        "fillOpacity": 30 if panel.is_stacked else 0,
        "showPoints": "never",
        "stacking": {"mode": "normal" if panel.is_stacked else "none", "group": "A"},
    }
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return {"type": "timeseries", **made, "options": options}


def _number(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """The newest value of each query; what it was, behind it."""
    made = _made(panel, number, (x, y, STAT_WIDTH, STAT_HEIGHT))
    steps = [{"color": color, "value": value} for color, value in panel.colors]
    made["fieldConfig"]["defaults"] |= {
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "noValue": "-",
    }
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "colorMode": "value",
        "graphMode": "area",
        "textMode": "auto" if len(panel.queries) == 1 else "value_and_name",
        "orientation": "auto",
        "justifyMode": "auto",
    }
    return {"type": "stat", **made, "options": options}


def _row(title: str, number: int, y: int, *, is_collapsed: bool = False) -> dict[str, Any]:
    return {
        "type": "row",
        "id": number,
        "title": title,
        "collapsed": is_collapsed,
        "gridPos": {"x": 0, "y": y, "w": COLUMNS * WIDTH, "h": 1},
        "panels": [],
    }


def _panels() -> list[dict[str, Any]]:
    made = [_row("At a glance", 1, 0)]
    made += [_number(each, 2 + i, i * STAT_WIDTH, 1) for i, each in enumerate(STATS)]
    number, y = len(made) + 1, 1 + STAT_HEIGHT
    for title, row in (OPEN | COLLAPSED).items():
        is_collapsed = title in COLLAPSED
        head = _row(title, number, y, is_collapsed=is_collapsed)
        charts = []
        for position, panel in enumerate(row):
            down, across = divmod(position, COLUMNS)
            place = (across * WIDTH, y + 1 + down * HEIGHT)
            charts.append(_chart(panel, number + 1 + position, *place))
        number += 1 + len(row)
        if is_collapsed:
            head["panels"] = charts
            made.append(head)
            y += 1
        else:
            made += [head, *charts]
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
