"""Computations behind the plots: numbers in, frames out; nothing here asks a cluster."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from raykv.base.errors import SettingError
from raykv.inspect.frames import REAL, TEXT, WHOLE, pandas
from raykv.inspect.hits import prefix_hits, unlimited_hits
from raykv.inspect.orders import DEFAULT_POLICY, POLICIES
from raykv.inspect.traces import Trace, prompts_of

if TYPE_CHECKING:
    import pandas as pd

NUM_SIZES = 8
"""How many pools are simulated unless sizes are given."""

UNLIMITED = "unlimited"
"""Stands in place of a policy's name for a pool in which everything has room."""

Numbers = npt.NDArray[np.int64]
Chunk = tuple[str, str]
"""Namespace and key."""


# Sizes


def sizing(
    trace: Trace,
    chunk_bytes: int,
    pool_bytes: Sequence[int] | None = None,
    policies: Sequence[str] = (DEFAULT_POLICY,),
) -> pd.DataFrame:
    """What pools of other sizes would have found of a trace: a row for each size and policy.

    The trace is replayed through one pool that begins empty, so the first use of a chunk is a miss
    at any size. Hits in vLLM's own cache are not taken out: these are hits of the pool alone. Of
    models with windows or states they are the most that there can be: as if prompts never parted
    where none is stored.

    Args:
        trace: which chunks were asked for.
        chunk_bytes: of a chunk with its share of windows and states, as `bytes_per_chunk` has it.
        pool_bytes: sizes to try; None: some, up to where everything has room.
        policies: node (the one that pools have), lru.

    Returns:
        Columns pool_bytes, policy, hit_rate (of the prompts' chunks, 0 to 1) and hit_tokens; the
        last row is "unlimited", the largest pool that makes sense.

    Raises:
        SettingError: a policy is unknown, or a size has no room for a chunk.
    """
    unknown = [name for name in policies if name not in POLICIES]
    if unknown:
        raise SettingError(f"unknown eviction policy {unknown[0]!r}: use {' or '.join(POLICIES)}")
    most = max(1, trace.num_distinct)
    sizes = _sizes(most, chunk_bytes) if pool_bytes is None else list(pool_bytes)
    if chunk_bytes < 1 or min(sizes, default=chunk_bytes) < chunk_bytes:
        raise SettingError(f"a pool of {min(sizes)} bytes has no room for a chunk of {chunk_bytes}")
    rows = []
    for size in sizes:
        for name in policies:
            hits = prefix_hits(trace.requests, POLICIES[name](), size // chunk_bytes)
            rows.append(_size_row(trace, size, name, hits))
    rows.append(_size_row(trace, most * chunk_bytes, UNLIMITED, unlimited_hits(trace.requests)))
    return pandas().DataFrame(rows, columns=["pool_bytes", "policy", "hit_rate", "hit_tokens"])


def _sizes(most: int, chunk_bytes: int) -> list[int]:
    """Sizes of pools from a small share of the chunks to all, growing by a constant factor."""
    counts = np.geomspace(max(1, most // 64), most, NUM_SIZES).round().astype(int)
    return [int(count) * chunk_bytes for count in dict.fromkeys(counts.tolist())]


def _size_row(trace: Trace, size: int, policy: str, hits: Iterable[int]) -> dict[str, Any]:
    found = sum(map(min, hits, trace.num_asked))
    return {
        "pool_bytes": size,
        "policy": policy,
        "hit_rate": found / max(1, trace.num_lookups),
        "hit_tokens": found * trace.chunk_tokens,
    }


# Reuse


def stack_distances(uses: Sequence[int]) -> Numbers:
    """For each use, the number of other chunks used since the same chunk's last use; -1: it is the
    first.

    An LRU pool finds a chunk if it has room for more chunks than that. (R. L. Mattson and others,
    1970.)
    """
    last: dict[int, int] = {}
    # The place of the last use of each chunk, rising.
    places: list[int] = []
    distances = []
    for place, chunk in enumerate(uses):
        if chunk in last:
            at = bisect_left(places, last[chunk])
            distances.append(len(places) - at - 1)
            del places[at]
        else:
            distances.append(-1)
        places.append(place)
        last[chunk] = place
    return np.array(distances, np.int64)


def reuse_distances(trace: Trace, chunk_bytes: int = 0) -> pd.DataFrame:
    """How far apart the uses of a chunk are: a row for each distance that occurs.

    Returns:
        Columns distance_chunks (different chunks used in between), distance_bytes, uses, and
        share: of all uses of chunks, those at this distance or nearer, 0 to 1. The rest are first
        uses.
    """
    uses = [chunk for prompt in prompts_of(trace) for chunk in prompt]
    distances = stack_distances(uses)
    values, counts = np.unique(distances[distances >= 0], return_counts=True)
    return pandas().DataFrame(
        {
            "distance_chunks": values,
            "distance_bytes": values * chunk_bytes,
            "uses": counts,
            "share": np.cumsum(counts) / max(1, len(uses)),
        }
    )


def prefix_tree(trace: Trace) -> pd.DataFrame:
    """How often each chunk was asked for, and what it follows: a row for each chunk.

    Returns:
        Columns chunk (its number in the trace), parent (NA: the head of a prompt), depth (0: a
        head), uses and tokens. Parents come before their children.
    """
    first: dict[int, tuple[int, int | None, int]] = {}
    uses: Counter[int] = Counter()
    for prompt in prompts_of(trace):
        uses.update(prompt)
        for depth, (parent, chunk) in enumerate(zip([None, *prompt], prompt, strict=False)):
            first.setdefault(chunk, (chunk, parent, depth))
    rows = [(*place, uses[chunk], trace.chunk_tokens) for chunk, place in first.items()]
    return _table(rows, dict.fromkeys(["chunk", "parent", "depth", "uses", "tokens"], WHOLE))


# Events


def occupancy(events: pd.DataFrame, start: pd.DataFrame | None = None) -> pd.DataFrame:
    """How many chunks each node has after each event that changes that.

    Args:
        events: from `events` or a `Recorder`, from the beginning of a life on, or
        start: the chunks that were there before the first of them, from `chunks` or a `Recorder`.

    Returns:
        Columns life, seq, time_s, node_id and chunks.
    """
    held: dict[str, set[Chunk]] = {}
    if start is not None:
        names = ["node_id", "namespace", "key"]
        for node, namespace, key in start[names].itertuples(index=False):
            held.setdefault(node, set()).add((namespace, key))
    rows = []
    for event in _rows(events):
        place = (event["life"], event["seq"], event["time_s"])
        rows += [(*place, node, len(held[node])) for node in _apply(held, event)]
    types = {"life": WHOLE, "seq": WHOLE, "time_s": REAL, "node_id": TEXT, "chunks": WHOLE}
    return _table(rows, types)


def _rows(events: pd.DataFrame) -> Iterator[Mapping[str, Any]]:
    wanted = ["life", "seq", "time_s", "event", "node_id", "namespace", "key"]
    for values in events[wanted].itertuples(index=False):
        yield dict(zip(wanted, values, strict=True))


def _apply(held: dict[str, set[Chunk]], event: Mapping[str, Any]) -> Iterable[str]:
    """Apply an event; returns the nodes that it changes. Chunks that a clear makes void go by their
    nodes' own events.
    """
    node, name = event["node_id"], (event["namespace"], event["key"])
    match event["event"]:
        case "BlockStored":
            held.setdefault(node, set()).add(name)
        case "BlockRemoved":
            if name not in held.setdefault(node, set()):
                return ()
            held[node].remove(name)
        case "NodeJoined":
            held.setdefault(node, set())
        case "NodeLost":
            held[node] = set()
        case "LifeBegan":
            held.update({each: set() for each in held})
            return list(held)
        case _:
            return ()
    return (node,)


def ages_at_eviction(events: pd.DataFrame) -> pd.DataFrame:
    """How old chunks were when they were given up, one by one; the youngest first.

    Chunks that were there before the first event, and those that went with a node or when the
    cache was cleared, are left out.

    Returns:
        Columns node_id, namespace, key, age_s (missing without a recorder's times), age_events
        (events in between) and share: of all rows, those up to this one, 0 to 1.
    """
    stored: dict[tuple[str, Chunk], Mapping[str, Any]] = {}
    rows = []
    for event in _rows(events):
        name = (event["node_id"], (event["namespace"], event["key"]))
        if event["event"] == "LifeBegan":
            stored.clear()
        elif event["event"] == "CacheCleared":
            # Its chunks go by events of their nodes, like others.
            of = event["namespace"]
            stored = {name: each for name, each in stored.items() if of not in ("", name[1][0])}
        elif event["event"] == "BlockStored":
            stored[name] = event
        elif event["event"] == "BlockRemoved" and name in stored:
            began = stored.pop(name)
            node, (namespace, key) = name
            age_s, age = event["time_s"] - began["time_s"], event["seq"] - began["seq"]
            rows.append((node, namespace, key, age_s, age))
    types = {"node_id": TEXT, "namespace": TEXT, "key": TEXT, "age_s": REAL, "age_events": WHOLE}
    found = _table(rows, types).sort_values(["age_s", "age_events"], ignore_index=True)
    found["share"] = (np.arange(len(found)) + 1) / max(1, len(found))
    return found


def transfer_rates(transfers: pd.DataFrame) -> pd.DataFrame:
    """Bytes per second between two samples of a node, out of a `Recorder`'s transfers.

    A NodeActor that has restarted counts from zero again; the samples around that are left out.

    Returns:
        The columns of transfers, with bytes per second in those of bytes.
    """
    moved = [name for name in transfers.columns if name.startswith("bytes_")]
    ordered = transfers.sort_values(["node_id", "time_s"], ignore_index=True)
    steps = ordered.groupby("node_id")[[*moved, "time_s"]].diff()
    rates = ordered.assign(**{name: steps[name] / steps["time_s"] for name in moved})
    is_step = (steps["time_s"] > 0) & (steps[moved] >= 0).all(axis=1)
    return rates[is_step.fillna(value=False)].reset_index(drop=True)


def _table(rows: Sequence[Sequence[Any]], types: Mapping[str, str]) -> Any:
    return pandas().DataFrame(rows, columns=list(types)).astype(dict(types))
