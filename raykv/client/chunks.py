"""What people who look into the cache ask NodeActors: how KV lies in chunks, and their bytes.

A node reads them as for another node: by name, with a checksum. Nothing here sees live bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import ray
import xxhash

from raykv.base.errors import ClusterError
from raykv.base.ids import Blocks, Key, Namespace, NodeId, Refusal, Stamp
from raykv.cluster import ask
from raykv.memory.kv_form import objection
from raykv.node import peers, read
from raykv.node.disk.chunk_file import ChunkBytes
from raykv.protocol import columns, copies, worker
from raykv.protocol.framing import PROTOCOL_VERSION, encode, receive

# For chunks of at most 64 MiB that a person looks at: from another node at 3 MB/s, or behind four
# fetches that run there.
CHUNK_READ_S = 30.0


MAX_READ_BYTES = 64 << 20
"""Bytes of chunks in one read, unless one alone is larger."""


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk is: what a NodeActor has to be asked for."""

    namespace: Namespace
    key: Key
    node_id: NodeId


def kv_form(namespace: Namespace, node_ids: Iterable[str]) -> worker.KVForm:
    """How KV lies in the chunks of a namespace; without groups if none of the nodes knows it.

    A node knows it when an engine of the namespace has attached there since its NodeActor began.
    One that does not answer in time is left out.
    """
    found, _ = ask.ask_nodes(
        worker.KVForm, lambda _, actor: actor.kv_form.remote(namespace), set(node_ids)
    )
    known = (form for form in found.values() if form.groups and not objection(form))
    return next(known, worker.KVForm())


def read_chunks(
    places: Sequence[ChunkPlace], slot_bytes: int, num_blocks: int = 1
) -> Iterator[peers.Bytes]:
    """The bytes of each chunk; all are of one node and one namespace, and of so many blocks.

    Raises:
        ClusterError: the NodeActor does not answer, or a chunk is not there any more, or in part.
    """
    at_once = max(1, MAX_READ_BYTES // slot_bytes)
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        sizes = dict.fromkeys((place.key for place in some), slot_bytes)
        came, refused = read_from(some[0].node_id, some[0].namespace, sizes)
        for place in some:
            if place.key in refused:
                raise ClusterError(
                    f"chunk {place.key.hex()} can't be read on node {place.node_id[:12]}: "
                    f"{refused[place.key].name.lower()}; it may have been evicted meanwhile, try "
                    "again"
                )
            chunk = came[place.key]
            if not chunk.blocks.has(Blocks(0, num_blocks)):
                raise ClusterError(
                    f"chunk {place.key.hex()} was stored in part: only {chunk.blocks.length} of "
                    f"its blocks, from number {chunk.blocks.first} on, have KV"
                )
            yield chunk.data


def read_from(
    node_id: str, namespace: str, sizes: Mapping[Key, int], *, from_disk: bool = False
) -> tuple[dict[Key, ChunkBytes], dict[Key, Refusal]]:
    """What a node has of chunks, in its pool or on its disk, and why it does not give the others.

    Args:
        node_id: Ray's.
        namespace: of the chunks.
        sizes: of all bytes of each, by key.
        from_disk: not from the pool.

    Raises:
        ClusterError: the NodeActor does not answer, or what came is damaged.
    """
    actor = ask.ask_ray(ask.find_node_actor, node_id)
    if actor is None:
        raise ClusterError(f"node {node_id[:12]} has no NodeActor any more")
    keys, slot_bytes = columns.Keys.of(sizes), columns.Numbers.of(sizes.values())
    request = copies.Read(PROTOCOL_VERSION, namespace, keys, slot_bytes, from_disk=from_disk)
    with ask.answering(ask.NODE_ACTOR):
        raw, data = ray.get(actor.read.remote(encode(request)), timeout=CHUNK_READ_S)
        reply = receive(raw, copies.ReadReply, ask.NODE_ACTOR, ask.HERE)
        copies.check_read_reply(reply, len(data), list(sizes.values()))
        blocks = read.blocks_in(reply)
        came: dict[Key, ChunkBytes] = {}
        sealed = zip(reply.checksums, map(Stamp, reply.histories, reply.stamps), strict=True)
        left = np.asarray(data)
        for (key, size), refusal in zip(sizes.items(), reply.refusals, strict=True):
            if refusal != Refusal.NONE:
                continue
            checksum, stamp = next(sealed)
            chunk, left = left[:size].copy(), left[size:]
            if xxhash.xxh3_64_intdigest(chunk.data) != checksum:
                raise ClusterError(f"chunk {key.hex()} was damaged on its way; try again")
            came[key] = ChunkBytes(key, stamp, checksum, chunk, blocks[key])
    refused = zip(sizes, map(Refusal, reply.refusals), strict=True)
    return came, {key: refusal for key, refusal in refused if refusal != Refusal.NONE}
