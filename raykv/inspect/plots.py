"""Plots: each takes a frame, draws on axes and returns them. Nothing is shown or saved here.

Where a frame has nothing to draw, the axes say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from raykv.base.extras import load
from raykv.inspect.curves import UNLIMITED
from raykv.inspect.frames import pandas

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

SHORT_ID = 8
"""Characters of an id in a plot."""

MAX_BARS = 20_000
"""Bars of a prefix tree; those of the rarest chunks are left out."""

FEW_BARS = 300
"""Up to this many have lines between them."""

MIB, GIB = 1 << 20, 1 << 30
FAR = 4
"""Times the largest size of a curve: a pool beyond that would squeeze the curve."""

MOVED = ("bytes_stored", "bytes_loaded", "bytes_fetched")
SOURCES = {
    "own_cache_tokens": "in vLLM's own cache",
    "loaded_tokens": "loaded by RayKV",
    "computed_tokens": "computed",
}


def pyplot() -> Any:
    """matplotlib's, with the back end that is set.

    Raises:
        SettingError: it is not installed.
    """
    return load("matplotlib.pyplot", "raykv.inspect")


def plot_occupancy(occupancy: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Chunks on each node over time, or over events where there are no times."""
    ax = _axes(ax)
    if not len(occupancy):
        return _nothing_yet(ax, "no chunk has come or gone")
    has_times = bool(occupancy["time_s"].notna().any())
    start = occupancy["time_s"].min() if has_times else 0
    for node, rows in occupancy.groupby("node_id"):
        at = rows["time_s"] - start if has_times else rows["seq"]
        ax.step(_floats(at), _floats(rows["chunks"]), where="post", label=node[:SHORT_ID])
    ax.set(
        xlabel="seconds" if has_times else "events", ylabel="chunks", title="chunks on each node"
    )
    return _with_legend(ax)


def plot_heat_map(chunks: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Nodes by namespaces: MiB of chunks where sizes are known, else how many there are."""
    ax = _axes(ax)
    if not len(chunks):
        return _nothing_yet(ax, "no chunk is stored")
    has_sizes = bool(chunks["bytes"].notna().all())
    table = chunks.assign(amount=chunks["bytes"] / MIB if has_sizes else 1).pivot_table(
        index="node_id", columns="namespace", values="amount", aggfunc="sum", fill_value=0
    )
    image = ax.imshow(_floats(table), vmin=0)
    ax.set_xticks(range(table.shape[1]), [name[:SHORT_ID] for name in table.columns])
    ax.set_yticks(range(table.shape[0]), [name[:SHORT_ID] for name in table.index])
    what = "MiB" if has_sizes else "chunks"
    ax.figure.colorbar(image, ax=ax, label=what)
    ax.set(xlabel="namespace", ylabel="node", title=f"{what} by node and namespace")
    return ax


def plot_prefix_tree(tree: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Prefixes from left to right: a bar is a chunk, as high as it was asked for often.

    A chunk's children are at its right, within its height. Chunks without a known parent are heads.
    """
    ax = _axes(ax)
    if not len(tree):
        return _nothing_yet(ax, "no prompt had a whole chunk")
    rows = tree.nlargest(MAX_BARS, "uses").sort_values(["depth", "uses"], ascending=[True, False])
    tops: dict[Any, float] = {}
    top = 0.0
    bars = []
    for row in rows[["chunk", "parent", "depth", "uses"]].itertuples(index=False):
        chunk, parent, depth, uses = row
        is_head = parent is pandas().NA or parent not in tops
        begin = top if is_head else tops[parent]
        if is_head:
            top += uses
        else:
            tops[parent] += uses
        tops[chunk] = begin
        bars.append((int(depth), begin, int(uses)))
    # One collection: thousands of bars that are objects each would take half a minute.
    boxes = [
        [(left, low), (left, low + height), (left + 1, low + height), (left + 1, low)]
        for left, low, height in bars
    ]
    edges = {"linewidths": 1, "edgecolors": "white"} if len(bars) <= FEW_BARS else {"linewidths": 0}
    shades = np.log1p([height for _, _, height in bars])
    collections = pyplot().matplotlib.collections
    ax.add_collection(collections.PolyCollection(boxes, array=shades, cmap="viridis", **edges))
    ax.autoscale_view()
    ax.set(xlabel="chunk of the prompt", ylabel="uses", title="prefixes, as high as used often")
    return ax


def plot_reuse_distances(reuse: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The share of all uses of chunks that an LRU pool of each size would have held."""
    ax = _axes(ax)
    if not len(reuse):
        return _nothing_yet(ax, "no chunk was used twice")
    has_sizes = bool((reuse["distance_bytes"] > 0).any())
    unit, size = _unit(reuse["distance_bytes"].max())
    at = reuse["distance_bytes"] / size if has_sizes else reuse["distance_chunks"]
    between = f"{unit} used in between" if has_sizes else "chunks used in between"
    return _shares(ax, at, reuse["share"], between, "uses", "reuse distance")


def plot_ages_at_eviction(ages: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """The share of the chunks that were given up up to each age."""
    ax = _axes(ax)
    if not len(ages):
        return _nothing_yet(ax, "no chunk was given up")
    has_times = bool(ages["age_s"].notna().all())
    ordered = ages.sort_values("age_s" if has_times else "age_events")
    at = ordered["age_s"] if has_times else ordered["age_events"]
    age = "age in seconds" if has_times else "age in events"
    return _shares(ax, at, ages["share"], age, "evictions", "age at eviction")


def plot_sizing(
    sizing: pd.DataFrame, pool_bytes: float | None = None, ax: Axes | None = None
) -> Axes:
    """The hit rate over the size of the pool, a line for each policy.

    The axis is logarithmic where the pool is far larger than what was asked for.

    Args:
        sizing: from `sizing`.
        pool_bytes: the size that there is now, which is marked.
        ax: to draw on.
    """
    ax = _axes(ax)
    if not sizing["hit_tokens"].any():
        return _nothing_yet(ax, "no chunk was used twice")
    most_bytes = float(sizing["pool_bytes"].max())
    unit, size = _unit(most_bytes)
    for policy, rows in sizing.groupby("policy"):
        if policy == UNLIMITED:
            most = float(rows["hit_rate"].iloc[0])
            ax.axhline(most, linestyle=":", color="gray", label="everything has room")
        else:
            ordered = rows.sort_values("pool_bytes")
            ax.plot(
                _floats(ordered["pool_bytes"] / size),
                _floats(ordered["hit_rate"]),
                marker="o",
                label=policy,
            )
    if pool_bytes is not None:
        ax.axvline(pool_bytes / size, color="black", linewidth=1, label="now")
        if pool_bytes > FAR * most_bytes:
            ax.set_xscale("log")
    ax.set(
        xlabel=f"pool in {unit}",
        ylabel="hit rate",
        ylim=(0, 1),
        title="what more memory would bring",
    )
    return _with_legend(ax)


def plot_transfers(rates: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """MiB per second through each node over time, from `transfer_rates`."""
    ax = _axes(ax)
    if not rates[list(MOVED)].to_numpy(dtype=float, na_value=0.0).any():
        return _nothing_yet(ax, "nothing was copied")
    start = rates["time_s"].min()
    for node, rows in rates.groupby("node_id"):
        for name in MOVED:
            if (rows[name] > 0).any():
                label = f"{node[:SHORT_ID]} {name.removeprefix('bytes_')}"
                ax.plot(_floats(rows["time_s"] - start), _floats(rows[name] / MIB), label=label)
    ax.set(xlabel="seconds", ylabel="MiB per second", title="transfers")
    return _with_legend(ax)


def plot_sources(requests: pd.DataFrame, ax: Axes | None = None) -> Axes:
    """Where the prompt tokens of each request came from, a bar for each in their order."""
    ax = _axes(ax)
    if not len(requests):
        return _nothing_yet(ax, "no request has ended")
    bottom = np.zeros(len(requests))
    for name, label in SOURCES.items():
        height = _floats(requests[name])
        ax.bar(range(len(requests)), height, bottom=bottom, label=label)
        bottom += height
    ax.set(xlabel="request", ylabel="prompt tokens", title="where the tokens came from")
    return _with_legend(ax)


def _axes(ax: Axes | None) -> Any:
    return pyplot().subplots(layout="constrained")[1] if ax is None else ax


def _nothing_yet(ax: Any, why: str) -> Any:
    ax.set_axis_off()
    ax.text(0.5, 0.5, f"nothing yet: {why}", ha="center", va="center", transform=ax.transAxes)
    return ax


def _shares(ax: Any, at: Any, shares: Any, along: str, of: str, title: str) -> Any:
    """Shares that rise along an axis."""
    ax.step(_floats(at), _floats(shares), where="post")
    ax.set(xlabel=along, ylabel=f"share of {of}", ylim=(0, 1), title=title)
    return ax


def _unit(num_bytes: float) -> tuple[str, int]:
    """The unit for an axis that goes up to this size, and the unit's size."""
    return ("GiB", GIB) if num_bytes >= GIB else ("MiB", MIB)


def _floats(values: Any) -> Any:
    return values.to_numpy(dtype=float, na_value=np.nan)


def _with_legend(ax: Any) -> Any:
    if ax.get_legend_handles_labels()[1]:
        ax.legend()
    return ax
