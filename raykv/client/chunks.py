"""What people who look into the cache ask NodeActors: how KV lies in chunks, and their bytes.

A node reads them as for another node: by name, with a checksum. Nothing here sees live bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import ray
import xxhash

from raykv.base import deadlines
from raykv.base.errors import ClusterError
from raykv.base.ids import Blocks, Key, Refusal, Stamp
from raykv.cluster import ask
from raykv.memory.kv_form import objection
from raykv.node import peers, read
from raykv.node.disk.chunk_file import ChunkBytes
from raykv.protocol import columns, copies, worker
from raykv.protocol.framing import encode, receive

MAX_READ_BYTES = 64 << 20
"""Bytes of chunks in one read, unless one alone is larger."""


def kv_form(namespace: str, node_ids: Iterable[str]) -> worker.KVForm:
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
    node_id: str, namespace: str, keys: Sequence[Key], slot_bytes: int, num_blocks: int = 1
) -> Iterator[peers.Bytes]:
    """The bytes of each chunk, in a node's pool; all have the same size and number of blocks.

    Raises:
        ClusterError: the NodeActor does not answer, or a chunk is not there any more, or in part.
    """
    at_once = max(1, MAX_READ_BYTES // slot_bytes)
    for first in range(0, len(keys), at_once):
        some = keys[first : first + at_once]
        came, refused = read_from(node_id, namespace, dict.fromkeys(some, slot_bytes))
        for key in some:
            if key in refused:
                raise ClusterError(
                    f"chunk {key.hex()} can't be read on node {node_id[:12]}: "
                    f"{refused[key].name.lower()}; it may have been evicted meanwhile, try again"
                )
            chunk = came[key]
            if not chunk.blocks.has(Blocks(0, num_blocks)):
                raise ClusterError(
                    f"chunk {key.hex()} was stored in part: only {chunk.blocks.length} of "
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
    request = copies.Read(namespace, keys, slot_bytes, from_disk=from_disk)
    with ask.answering(ask.NODE_ACTOR):
        raw, data = ray.get(actor.read.remote(encode(request)), timeout=deadlines.READ_S)
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
