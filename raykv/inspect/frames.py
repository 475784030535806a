"""pandas frames of what is in the cache, and of what happens to it.

A frame has the columns of its table below in that order, also when it is empty. What is not known
is missing (`NA`). Ids and keys are texts; keys are hex digits.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raykv.base import errors, extras
from raykv.inspect import sources

if TYPE_CHECKING:
    import pandas as pd

    from raykv.client.cluster import Cluster

TEXT, WHOLE, REAL, TRUTH, THING = "string", "Int64", "Float64", "boolean", "object"


def pandas() -> Any:
    """The module, imported when it is needed.

    Raises:
        SettingError: it is not installed.
    """
    return extras.load("pandas", "raykv.inspect")


@dataclass(frozen=True)
class Column:
    """A column of a frame; `dtype` is pandas' name, `meaning` has the unit."""

    name: str
    dtype: str
    meaning: str


_NODE = Column("node_id", TEXT, "Ray's id of the node")
_NAMESPACE = Column("namespace", TEXT, "engines of one namespace share chunks")
_MODEL = Column("model", TEXT, "as vLLM names it")
_TIME = Column("time_s", REAL, "seconds since the Unix epoch, when a recorder heard of it")

_MOVED = (
    Column("bytes_stored", WHOLE, "bytes from engines into the pool since the NodeActor's start"),
    Column("bytes_loaded", WHOLE, "bytes from the pool into engines"),
    Column("bytes_fetched", WHOLE, "bytes that came from other nodes"),
    Column("bytes_sent", WHOLE, "bytes that other nodes fetched"),
)

TABLES: dict[str, tuple[Column, ...]] = {
    "chunks": (
        Column("key", TEXT, "vLLM's offload key: the block hash, then the KV group index"),
        Column("group", WHOLE, "vLLM's KV group index"),
        _NAMESPACE,
        _MODEL,
        _NODE,
        Column("bytes", WHOLE, "bytes that it takes in the pool"),
        Column("age_s", REAL, "seconds since it came to the node"),
        Column("idle_s", REAL, "seconds since it was used, or came"),
        Column("hits", WHOLE, "how often it was used on that node"),
        Column("is_replicated", TRUTH, "whether another node has it too"),
        Column("tenant", TEXT, "whose it is"),
    ),
    "nodes": (
        _NODE,
        Column("hostname", TEXT, "of the node"),
        Column("pool_bytes", WHOLE, "bytes of RAM that it lends"),
        Column("prefaulted_bytes", WHOLE, "bytes of the pool whose pages are there already"),
        Column("used_bytes", WHOLE, "bytes of the pool that chunks take"),
        Column("chunks", WHOLE, "chunks in the pool"),
        *_MOVED,
        Column("chunks_refused", WHOLE, "chunks of copy jobs that were refused"),
        Column("quarantined", WHOLE, "damaged chunks that were set aside"),
        Column("num_workers", WHOLE, "attached workers: one per rank of an engine"),
        Column("age_s", REAL, "seconds since it last reported"),
    ),
    "namespaces": (
        _NAMESPACE,
        _MODEL,
        Column("engines", WHOLE, "attached engines"),
        Column("nodes", WHOLE, "nodes that have chunks of it"),
        Column("chunks", WHOLE, "chunks on all nodes, replicas counted each"),
        Column("bytes", WHOLE, "bytes that they take in pools"),
    ),
    "requests": (
        Column("request_id", TEXT, "vLLM's, which begins as the API's does"),
        Column("age_s", REAL, "seconds since its node heard that it has ended"),
        _NAMESPACE,
        _MODEL,
        _NODE,
        Column("engine_id", TEXT, "vLLM's"),
        Column("prompt_tokens", WHOLE, "tokens: own cache, loaded and computed together"),
        Column("own_cache_tokens", WHOLE, "tokens that were in vLLM's own cache"),
        Column("loaded_tokens", WHOLE, "tokens that RayKV loaded"),
        Column("computed_tokens", WHOLE, "tokens that were computed"),
        Column("missed", THING, "computed tokens by the reason for it: a dictionary"),
        Column("main_reason", TEXT, "the reason of most of them"),
        Column("missing_key", TEXT, "key of the chunk that decided over those behind it"),
        Column("chunks", THING, "beginnings of its chunks' keys, in order: a tuple"),
        Column("chunk_tokens", WHOLE, "tokens of a chunk"),
        Column("tenant", TEXT, "whose it was; nothing if it named no tenant"),
    ),
    "events": (
        Column("life", WHOLE, "of the scheduler actor"),
        Column("seq", WHOLE, "place in that life"),
        _TIME,
        Column("event", TEXT, "BlockStored, BlockRemoved, NodeJoined, NodeLost, CacheCleared, …"),
        _NODE,
        _NAMESPACE,
        Column("key", TEXT, "of the chunk"),
        Column("group", WHOLE, "vLLM's KV group index"),
        Column("node_life", WHOLE, "of the node's listing"),
        Column("number", WHOLE, "of that listing, by which it has the event"),
        Column("history", WHOLE, "of the orders that cleared"),
        Column("floor", WHOLE, "their number there: what was stored under an earlier one is void"),
        Column("missed", WHOLE, "events before this one that are no longer kept"),
    ),
    "transfers": (_TIME, _NODE, *_MOVED),
}


def columns(table: str) -> pd.DataFrame:
    """What the columns of a frame mean, and their units.

    Args:
        table: chunks, nodes, namespaces, requests, events or transfers.

    Raises:
        SettingError: there is no such frame.
    """
    if table not in TABLES:
        raise errors.SettingError(f"there is no frame {table!r}: there are {', '.join(TABLES)}")
    rows = [(each.name, each.dtype, each.meaning) for each in TABLES[table]]
    return pandas().DataFrame(rows, columns=["column", "dtype", "meaning"])


def frame(table: str, rows: Iterable[sources.Row]) -> pd.DataFrame:
    """Rows as a frame with the columns and types of its table; other entries are left out."""
    pd = pandas()
    kept = list(rows)
    return pd.DataFrame(
        {
            each.name: pd.Series([row.get(each.name) for row in kept], dtype=each.dtype)
            for each in TABLES[table]
        }
    )


def chunks(
    cluster: Cluster, *, namespace: str | None = None, node: str | None = None
) -> pd.DataFrame:
    """A row for each chunk on each node; of all of them, or of those of a namespace or a node.

    Args:
        cluster: from `raykv.connect()`.
        namespace: the beginning of one.
        node: the beginning of a node's id.
    """
    return frame("chunks", sources.chunk_rows(cluster, namespace, node))


def nodes(cluster: Cluster) -> pd.DataFrame:
    """A row for each node that lends a pool."""
    return frame("nodes", sources.node_rows(cluster))


def namespaces(cluster: Cluster) -> pd.DataFrame:
    """A row for each namespace that has chunks or engines."""
    return frame("namespaces", sources.namespace_rows(cluster))


def requests(cluster: Cluster) -> pd.DataFrame:
    """A row for each of the latest requests (up to 4,096 of a node), the oldest first.

    A request is known about a second after it has ended.
    """
    pages = sources.request_pages(cluster)
    return frame("requests", (row for page in pages for row in sources.request_rows(page.found)))


def events(cluster: Cluster, since: int | tuple[int, int] = 0) -> pd.DataFrame:
    """A row for each event that is still kept; without times, which only a `Recorder` knows.

    Args:
        cluster: from `raykv.connect()`.
        since: the number of the last event that is known, or its life and number.
    """
    return frame("events", map(sources.event_row, cluster.events(since=since, follow=False)))


def transfers(cluster: Cluster) -> pd.DataFrame:
    """A row for each node with the bytes that it has moved until now; see also `Recorder`."""
    now = time.time()
    return frame("transfers", ({**row, "time_s": now} for row in sources.node_rows(cluster)))
