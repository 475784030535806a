"""The KV of cached chunks as tensors: copies, never the live bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from raykv.base.errors import ClusterError
from raykv.base.extras import load
from raykv.base.ids import PART_MARK, Key, short_namespace
from raykv.client.chunks import kv_form, read_chunks
from raykv.client.scheduler import namespace_of
from raykv.inspect.sources import chunk_rows, groups_of, known_tokens
from raykv.memory.kv_form import LayerElements, layers_of, tokens_per_chunk
from raykv.protocol.reader import RAM, Chunk
from raykv.protocol.worker import GroupForm, KVForm

if TYPE_CHECKING:
    import torch

    from raykv.client.cluster import Cluster
    from raykv.protocol.status import ClusterStatus

SHORTEST_BEGINNING = 4
"""Hex digits of a key that are enough, if no other chunk's key begins so."""


@dataclass(frozen=True)
class LayerKV:
    """K and V of a layer, each [tokens, heads, head size]; K after its rotary embedding."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True)
class ChunkKV:
    """The KV of chunks that follow each other.

    `layers` has vLLM's layer names in the model's order. `tokens` are the token ids of the rows;
    None where the cluster does not know them.
    """

    namespace: str
    keys: tuple[str, ...]
    nodes: tuple[str, ...]
    layers: dict[str, LayerKV]
    dtype: str
    tokens_per_chunk: int
    tokens: list[int] | None = None

    @property
    def num_tokens(self) -> int:
        """Rows of each tensor."""
        return self.tokens_per_chunk * len(self.keys)


def kv(
    cluster: Cluster,
    keys: bytes | str | Sequence[bytes | str],
    node: str | None = None,
    namespace: str | None = None,
) -> ChunkKV:
    """Read chunks out of the pools that have them.

    Args:
        cluster: from `raykv.connect()`.
        keys: of one chunk, or of several in the order of their tokens: vLLM's offload key as bytes,
            or its hex digits, of which the first ones are enough where they are unambiguous.
        node: the beginning of the id of the node to read from; None: any that has them.
        namespace: the beginning of the chunks' namespace; None: the one that has them.

    Raises:
        ClusterError: a chunk is not there, can't be read, or has no K and V: the sentence says
            which and why.
    """
    wanted = [keys] if isinstance(keys, bytes | str) else list(keys)
    if not wanted:
        raise ClusterError("no keys were given: name at least one chunk")
    places = _places(cluster, [_hex(key) for key in wanted], node, namespace)
    form, group = _readable_form(cluster, places)
    parts = [list(layers_of(form, places[0].group, data)) for data in _bytes(places, form)]
    return ChunkKV(
        namespace=places[0].namespace,
        keys=tuple(place.key.hex() for place in places),
        nodes=tuple(place.node_id for place in places),
        layers=dict(_tensors(parts, group.dtype)),
        dtype=group.dtype,
        tokens_per_chunk=tokens_per_chunk(form, group),
        tokens=known_tokens(cluster, places[0].namespace, [Key(place.key) for place in places]),
    )


def bytes_per_chunk(cluster: Cluster, namespace: str | None = None) -> int:
    """Bytes that a chunk of tokens takes in pools, with what is stored of windows and states.

    Their number is counted in the pools of the cluster. If nothing is stored yet, or the model has
    windows or states alone, they count as if all were stored.

    Args:
        cluster: from `raykv.connect()`.
        namespace: the beginning of one; None: the only one that has engines or chunks.

    Raises:
        ClusterError: no engine of the namespace has reported it since the NodeActors started, or
            not exactly one namespace matches.
    """
    known = cluster.status()
    meant = namespace_of(known, namespace or "")
    form = kv_form(meant, [node.node_id for node in known.nodes])
    if not form.groups:
        raise ClusterError(_unknown(meant))
    whole = _whole_group(known, meant)
    if whole is None:
        return sum(form.slot_bytes.values())
    counts = Counter(int(row["group"]) for row in chunk_rows(cluster, meant, None))
    if not counts[whole]:
        return sum(form.slot_bytes.values())
    num_bytes = sum(counts[group] * size for group, size in form.slot_bytes.items())
    return round(num_bytes / counts[whole])


def _whole_group(known: ClusterStatus, namespace: str) -> int | None:
    """The first KV group that needs whole prefixes, which traces have the chunks of; None: there is
    none, or no other.
    """
    groups = groups_of(known, namespace)
    whole = [each.group for each in groups if each.window is None]
    return whole[0] if whole and len(whole) < len(groups) else None


def _unknown(namespace: str) -> str:
    if PART_MARK in namespace:
        return (
            f"namespace {short_namespace(namespace)} is a part of an engine that has several "
            "places: how KV lies in its chunks is not known"
        )
    return (
        f"no engine has reported how KV lies in chunks of namespace {namespace[:12]}: one of "
        "that model must attach after the NodeActor of its node has started"
    )


def _hex(key: bytes | str) -> str:
    digits = key.hex() if isinstance(key, bytes) else key.strip().lower()
    if len(digits) < SHORTEST_BEGINNING or set(digits) - set("0123456789abcdef"):
        raise ClusterError(
            f"invalid key {key!r}: give bytes, or at least {SHORTEST_BEGINNING} hex digits of it"
        )
    return digits


def _places(
    cluster: Cluster, beginnings: list[str], node: str | None, namespace: str | None
) -> list[Chunk]:
    """Where each chunk is, all in one namespace and KV group.

    Raises:
        ClusterError: a chunk is nowhere, or its name is ambiguous.
    """
    length = min(map(len, beginnings))
    found: dict[str, list[Chunk]] = {begin: [] for begin in beginnings}
    heads = {begin[:length] for begin in beginnings}
    for place in cluster.chunks(namespace=namespace, node=node, tier=RAM):
        digits = place.key.hex()
        if digits[:length] in heads:
            for begin in filter(digits.startswith, found):
                found[begin].append(place)
    return _chosen(found, node)


def _chosen(found: dict[str, list[Chunk]], node: str | None) -> list[Chunk]:
    """One place of each chunk, on as few nodes as can be."""
    for begin, places in found.items():
        if not places:
            where = "on no node" if node is None else f"not on a node {node!r}"
            raise ClusterError(f"chunk {begin} is {where}: never stored, or evicted")
        names = {(place.namespace, place.key) for place in places}
        if len(names) > 1:
            raise ClusterError(
                f"{len(names)} chunks have keys that begin with {begin} (other KV groups or "
                "namespaces): give all digits, and the namespace"
            )
    first = next(iter(found.values()))[0]
    chosen = []
    for begin, places in found.items():
        if (places[0].namespace, places[0].group) != (first.namespace, first.group):
            raise ClusterError(f"chunk {begin} is of another namespace or KV group than the first")
        near = [place for place in places if place.node_id == first.node_id]
        chosen.append((near or places)[0])
    return chosen


def _readable_form(cluster: Cluster, places: Sequence[Chunk]) -> tuple[KVForm, GroupForm]:
    namespace, group_id = places[0].namespace, places[0].group
    form = kv_form(namespace, [place.node_id for place in places])
    if not form.groups:
        # Those that have the chunks may only have fetched them.
        form = kv_form(namespace, [node.node_id for node in cluster.status().nodes])
    group = form.groups.get(group_id)
    if group is None:
        raise ClusterError(_unknown(namespace))
    if group.refusal:
        raise ClusterError(f"chunks of this model can't be read as K and V: {group.refusal}")
    return form, group


def _bytes(places: Sequence[Chunk], form: KVForm) -> Iterator[Any]:
    """The bytes of each chunk, in order."""
    namespace, slot_bytes = places[0].namespace, form.slot_bytes[places[0].group]
    for node_id, same in groupby(places, key=lambda place: place.node_id):
        keys = [Key(place.key) for place in same]
        yield from read_chunks(node_id, namespace, keys, slot_bytes, form.blocks_per_chunk)


def _tensors(parts: list[list[LayerElements]], dtype: str) -> Iterator[tuple[str, LayerKV]]:
    """Layers by name, the chunks' tokens one after the other."""
    torch = load("torch", "raykv.inspect.kv")
    kind = getattr(torch, dtype)

    def joined(columns: list[Any]) -> Any:
        return torch.from_numpy(np.concatenate(columns)).view(kind)

    for layer in zip(*parts, strict=True):
        keys = joined([part.keys for part in layer])
        yield layer[0].layer, LayerKV(keys, joined([part.values for part in layer]))
