"""What the frames are made of: rows out of a `Cluster`, from the best source that it has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from raykv.base.ids import Key, Namespace, NodeId, group_of, in_group
from raykv.client.chunks import ChunkPlace
from raykv.protocol import descriptions, reader
from raykv.protocol.engine import CHUNK_NAME_BYTES

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster
    from raykv.protocol import events, status

MAX_PAGES = 1024
"""Pages of requests that are read at once: more than nodes remember."""

Row = dict[str, Any]


def chunk_rows(cluster: Cluster, namespace: str | None, node: str | None) -> Iterator[Row]:
    """Chunks in pools, those of one namespace or node only if their beginnings are given.

    Where the cluster lists its chunks their ages, hits and sizes too; else what a snapshot has.
    """
    listed = getattr(cluster, "chunks", None)
    if listed is not None:
        yield from map(_listed_row, listed(namespace=namespace, node=node, tier=reader.RAM))
        return
    for row in _snapshot_rows(cluster):
        in_space = row["namespace"].startswith(namespace or "")
        if in_space and row["node_id"].startswith(node or ""):
            yield row


def _snapshot_rows(cluster: Cluster) -> Iterator[Row]:
    replay = cluster.snapshot()
    order = {node_id: at for at, node_id in enumerate(replay.nodes)}
    for node_id, space, key in sorted(replay.chunks, key=lambda place: order[place[0]]):
        yield {
            "key": key.hex(),
            "group": group_of(key),
            "namespace": space,
            "node_id": node_id,
        }


def _listed_row(chunk: Any) -> Row:
    row = msgspec.structs.asdict(chunk)
    return {**row, "key": row["key"].hex(), "bytes": row["num_bytes"]}


def chunk_places(cluster: Cluster, namespace: str | None, node: str | None) -> list[ChunkPlace]:
    """The same chunks as `chunk_rows`, for callers that read them."""
    return [
        ChunkPlace(
            namespace=Namespace(row["namespace"]),
            key=Key(bytes.fromhex(row["key"])),
            node_id=NodeId(row["node_id"]),
        )
        for row in chunk_rows(cluster, namespace, node)
    ]


def node_rows(cluster: Cluster) -> Iterator[Row]:
    """The nodes, and what has moved through each."""
    for node in cluster.status().nodes:
        yield msgspec.structs.asdict(node)


def namespace_rows(cluster: Cluster, chunks: Iterable[Row]) -> Iterator[Row]:
    """The namespaces that have chunks or engines; `chunks` are the rows of all chunks."""
    known = cluster.status()
    rows: dict[str, Row] = {}
    nodes: dict[str, set[str]] = {}
    for name in [*known.namespaces, *(engine.namespace for engine in known.engines)]:
        rows[name] = {"namespace": name, "chunks": 0, "bytes": 0, "engines": 0}
    for engine in known.engines:
        rows[engine.namespace]["engines"] += 1
        rows[engine.namespace]["model"] = engine.model
    for chunk in chunks:
        row = rows.setdefault(chunk["namespace"], {"namespace": chunk["namespace"], "chunks": 0})
        row["chunks"] += 1
        size = chunk.get("bytes")
        # One size that is not known makes the sum unknown.
        has_sum = size is not None and row.get("bytes") is not None
        row["bytes"] = row["bytes"] + size if has_sum else None
        nodes.setdefault(chunk["namespace"], set()).add(chunk["node_id"])
    for name, row in rows.items():
        yield {"engines": 0, **row, "nodes": len(nodes.get(name, ()))}


def request_rows(found: Iterable[reader.Explanation]) -> Iterator[Row]:
    """What became of the tokens of requests that have ended."""
    for each in found:
        record = each.record
        missed = dict(record.missed)
        yield {
            "request_id": record.request_id,
            "age_s": each.age_s,
            "namespace": each.namespace,
            "model": each.model,
            "node_id": each.node_id,
            "engine_id": each.engine_id,
            "prompt_tokens": record.prompt,
            "own_cache_tokens": record.own,
            "loaded_tokens": record.loaded,
            "computed_tokens": sum(missed.values()),
            "missed": missed,
            "main_reason": max(missed, key=lambda reason: missed[reason], default=None),
            "missing_key": record.missing.hex() or None,
            "chunks": chunk_names(record.chunks),
            "chunk_tokens": record.chunk_tokens,
            "tenant": record.tenant or None,
        }


def chunk_names(chunks: bytes) -> tuple[str, ...]:
    """The beginnings of the keys of a request's chunks, as hex digits."""
    step = CHUNK_NAME_BYTES
    return tuple(chunks[at : at + step].hex() for at in range(0, len(chunks), step))


def all_requests(cluster: Cluster) -> list[reader.Explanation]:
    """All requests that are remembered, the oldest first."""
    found: list[reader.Explanation] = []
    place = ""
    for _ in range(MAX_PAGES):
        page = cluster.requests(place)
        found += page.found
        place = page.following
        if place == page.last:
            break
    return found


def event_row(event: events.Event) -> Row:
    """An event of any kind; what its kind does not have is left out."""
    row = msgspec.structs.asdict(event)
    row["event"] = type(event).__name__
    if "key" in row:
        row["group"] = group_of(Key(row["key"]))
        row["key"] = row["key"].hex()
    return row


def known_tokens(cluster: Cluster, namespace: Namespace, keys: Sequence[Key]) -> list[int] | None:
    """The token ids of chunks that follow each other; None unless all are known.

    Of windows and states engines say nothing: they have the tokens of the chunks of full attention
    at the same places.
    """
    tokens_of = getattr(cluster, "tokens_of", None)
    if tokens_of is None:
        return None
    known = tokens_of(list(keys), namespace=namespace)
    if not known.keys() >= set(keys):
        keys = _described(cluster, namespace, keys)
        known = tokens_of(list(keys), namespace=namespace)
    if not known.keys() >= set(keys):
        return None
    return [token for key in keys for token in known[key].token_ids]


def _described(cluster: Cluster, namespace: Namespace, keys: Sequence[Key]) -> list[Key]:
    """The keys of the same tokens in a KV group whose chunks are described, if there is one."""
    groups = groups_of(cluster.status(), namespace)
    tokens = {each.group: each.tokens for each in groups}
    for each in groups:
        if each.window is None and all(tokens.get(group_of(key)) == each.tokens for key in keys):
            return [in_group(key, each.group) for key in keys]
    return list(keys)


def groups_of(known: status.ClusterStatus, namespace: str) -> list[descriptions.ChunkGroup]:
    """The KV groups of a namespace; none if no engine has told them."""
    for each in known.spaces:
        if each.namespace == namespace and "chunks" in each.traits:
            return descriptions.parse_groups(each.traits["chunks"])
    return []
