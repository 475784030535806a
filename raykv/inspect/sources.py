"""What the frames are made of: rows out of a `Cluster`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from raykv.base.ids import Key, group_of, in_group
from raykv.protocol import descriptions, reader
from raykv.protocol.engine import CHUNK_NAME_BYTES

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster
    from raykv.protocol import events, status

MAX_PAGES = 1024
"""Pages of requests that are read at once: more than nodes remember."""

Row = dict[str, Any]


def chunk_rows(cluster: Cluster, namespace: str | None, node: str | None) -> Iterator[Row]:
    """Rows of chunks in pools; of one namespace or node only, if its beginning is given."""
    for chunk in cluster.chunks(namespace=namespace, node=node, tier=reader.RAM):
        row = msgspec.structs.asdict(chunk)
        yield {**row, "key": chunk.key.hex(), "bytes": chunk.num_bytes}


def node_rows(cluster: Cluster) -> Iterator[Row]:
    """The nodes, and what has moved through each."""
    for node in cluster.status().nodes:
        yield msgspec.structs.asdict(node)


def namespace_rows(cluster: Cluster) -> Iterator[Row]:
    """The namespaces that have chunks or engines."""
    known = cluster.status()
    models = {engine.namespace: engine.model for engine in known.engines}
    engines = Counter(engine.namespace for engine in known.engines)
    counts: Counter[str] = Counter()
    sums: Counter[str] = Counter()
    nodes: dict[str, set[str]] = defaultdict(set)
    for chunk in chunk_rows(cluster, None, None):
        name = chunk["namespace"]
        counts[name] += 1
        sums[name] += chunk["bytes"]
        nodes[name].add(chunk["node_id"])
    for name in dict.fromkeys([*known.namespaces, *models, *counts]):
        yield {
            "namespace": name,
            "model": models.get(name),
            "engines": engines[name],
            "nodes": len(nodes[name]),
            "chunks": counts[name],
            "bytes": sums[name],
        }


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


def request_pages(cluster: Cluster, place: str = "") -> Iterator[reader.EndedRequests]:
    """The requests behind a place that are remembered, the oldest first."""
    for _ in range(MAX_PAGES):
        page = cluster.requests(place)
        yield page
        place = page.following
        if place == page.last:
            return


def event_row(event: events.Event) -> Row:
    """An event of any kind; what its kind does not have is left out."""
    row = msgspec.structs.asdict(event)
    row["event"] = type(event).__name__
    if "key" in row:
        row["group"] = group_of(Key(row["key"]))
        row["key"] = row["key"].hex()
    return row


def known_tokens(cluster: Cluster, namespace: str, keys: Sequence[Key]) -> list[int] | None:
    """The token ids of chunks that follow each other; None unless all are known.

    Of windows and states engines say nothing: they have the tokens of the chunks of full attention
    at the same places.
    """
    known = cluster.tokens_of(keys, namespace=namespace)
    if not known.keys() >= set(keys):
        keys = _described(cluster, namespace, keys)
        known = cluster.tokens_of(keys, namespace=namespace)
    if not known.keys() >= set(keys):
        return None
    return [token for key in keys for token in known[key].token_ids]


def _described(cluster: Cluster, namespace: str, keys: Sequence[Key]) -> list[Key]:
    """The keys of the same tokens in a KV group whose chunks are described, if there is one."""
    groups = groups_of(cluster.status(), namespace)
    tokens = {each.group: each.tokens for each in groups}
    for each in groups:
        if each.window is None and all(tokens.get(group_of(key)) == each.tokens for key in keys):
            return [in_group(key, each.group) for key in keys]
    return list(keys)


def groups_of(known: status.ClusterStatus, namespace: str) -> list[descriptions.ChunkGroup]:
    """The KV groups of a namespace; none if no engine has reported them."""
    for each in known.spaces:
        if each.namespace == namespace and "chunks" in each.traits:
            return descriptions.parse_groups(each.traits["chunks"])
    return []
