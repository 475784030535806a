"""Look into a running cache: pandas frames, KV as tensors, plots, what-if.

    import raykv, raykv.inspect

    with raykv.connect() as cluster:
        print(raykv.inspect.nodes(cluster))
        print(raykv.inspect.requests(cluster).tail())

Needs the extra `inspect` (pandas, matplotlib); tensors need torch. Nothing here changes
the cache: chunks are copied out, and engines are not asked.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.inspect.curves import (
        ages_at_eviction,
        occupancy,
        prefix_tree,
        reuse_distances,
        sizing,
        transfer_rates,
    )
    from raykv.inspect.frames import (
        chunks,
        columns,
        events,
        namespaces,
        nodes,
        requests,
        transfers,
    )
    from raykv.inspect.plots import (
        plot_ages_at_eviction,
        plot_heat_map,
        plot_occupancy,
        plot_prefix_tree,
        plot_reuse_distances,
        plot_sizing,
        plot_sources,
        plot_transfers,
    )
    from raykv.inspect.recorder import Recorder
    from raykv.inspect.tensors import ChunkKV, LayerKV, bytes_per_chunk, kv
    from raykv.inspect.traces import Trace, read_trace, trace

_MODULES = {
    "curves": "ages_at_eviction occupancy prefix_tree reuse_distances sizing transfer_rates",
    "frames": "chunks columns events namespaces nodes requests transfers",
    "plots": "plot_ages_at_eviction plot_heat_map plot_occupancy plot_prefix_tree "
    "plot_reuse_distances plot_sizing plot_sources plot_transfers",
    "recorder": "Recorder",
    "tensors": "ChunkKV LayerKV bytes_per_chunk kv",
    "traces": "Trace read_trace trace",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

__all__ = [
    "ChunkKV",
    "LayerKV",
    "Recorder",
    "Trace",
    "ages_at_eviction",
    "bytes_per_chunk",
    "chunks",
    "columns",
    "events",
    "kv",
    "namespaces",
    "nodes",
    "occupancy",
    "plot_ages_at_eviction",
    "plot_heat_map",
    "plot_occupancy",
    "plot_prefix_tree",
    "plot_reuse_distances",
    "plot_sizing",
    "plot_sources",
    "plot_transfers",
    "prefix_tree",
    "read_trace",
    "requests",
    "reuse_distances",
    "sizing",
    "trace",
    "transfer_rates",
    "transfers",
]


def __getattr__(name: str) -> Any:
    """Import a part, and with it Ray, pandas or matplotlib, only when it is asked for."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"raykv.inspect.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'raykv.inspect' has no attribute {name!r}")
