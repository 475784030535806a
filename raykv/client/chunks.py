"""What people who look into the cache ask its actors: requests, and the bytes of chunks.

The source's NodeActor reads them as for another node: at a generation, with a checksum. Nothing
here sees live bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import xxhash

from raykv.base.deadlines import CHUNK_READ_S, CLIENT_S
from raykv.base.errors import ClusterError, MessageError
from raykv.base.ids import Generation, Key, Namespace, NodeId, Refusal, Slot
from raykv.cluster import ask
from raykv.memory.kv_form import objection
from raykv.node.peers import Bytes, ObjectRefTransport, PeerError
from raykv.protocol.columns import Handles, Keys, Source
from raykv.protocol.framing import PROTOCOL_VERSION, receive
from raykv.protocol.peer import ReadReply, ReadRequest, check_read_reply
from raykv.protocol.reader import RequestPage
from raykv.protocol.worker import KVForm

MAX_READ_BYTES = 64 << 20
"""Bytes of chunks in one read, unless one alone is larger."""


@dataclass(frozen=True)
class ChunkPlace:
    """Where a chunk is: what a NodeActor has to be asked for."""

    namespace: Namespace
    key: Key
    node_id: NodeId
    node_epoch: int
    slot: Slot
    generation: Generation


def kv_form(namespace: Namespace, node_ids: Iterable[str]) -> KVForm:
    """How KV lies in the chunks of a namespace; without groups if none of the nodes knows it.

    A node knows it when an engine of the namespace has attached there since its NodeActor began.
    One that does not answer in time is left out.
    """
    actors = [ask.ask_ray(ask.find_node_actor, node_id) for node_id in dict.fromkeys(node_ids)]
    asked = [actor.kv_form.remote(namespace) for actor in actors if actor is not None]
    if not asked:
        return KVForm()
    answered, _ = ray.wait(asked, num_returns=len(asked), timeout=CLIENT_S)
    for ref in answered:
        with contextlib.suppress(ClusterError), ask.answering(ask.NODE_ACTOR):
            form = receive(ray.get(ref, timeout=CLIENT_S), KVForm, ask.NODE_ACTOR, ask.HERE)
            if form.groups and not objection(form):
                return form
    return KVForm()


def read_requests(scheduler: Any, after: int) -> RequestPage:
    """The requests that have ended after the one of that number, as many as a page takes.

    Raises:
        ClusterError: the scheduler actor does not answer in time.
    """
    return ask.answer_as(RequestPage, scheduler, "requests", after, timeout_s=CLIENT_S)


def read_chunks(places: Sequence[ChunkPlace], slot_bytes: int) -> Iterator[Bytes]:
    """The bytes of each chunk's slot; all are of one node and one namespace.

    Raises:
        ClusterError: the NodeActor does not answer, or a chunk is not there any more.
    """
    transport = ObjectRefTransport()
    at_once = max(1, MAX_READ_BYTES // slot_bytes)
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        try:
            read = transport.start_read(Source(some[0].node_id), _request(some, slot_bytes))
            reply, data = read.wait(CHUNK_READ_S)
            check_read_reply(reply, data.size, [slot_bytes] * len(some))
        except (PeerError, MessageError) as error:
            raise ClusterError(f"no chunks could be read: {error}") from error
        _check(some, reply, data, slot_bytes)
        yield from np.asarray(data).reshape(len(some), slot_bytes)


def _request(places: Sequence[ChunkPlace], slot_bytes: int) -> ReadRequest:
    return ReadRequest(
        version=PROTOCOL_VERSION,
        namespace=places[0].namespace,
        node_epoch=places[0].node_epoch,
        handles=Handles(
            Keys.of([place.key for place in places]),
            [place.slot for place in places],
            [place.generation for place in places],
        ),
        slot_bytes=[slot_bytes] * len(places),
    )


def _check(places: Sequence[ChunkPlace], reply: ReadReply, data: Bytes, slot_bytes: int) -> None:
    """Refuse a valid answer that is not the bytes that were asked for, of all blocks."""
    for place, refusal in zip(places, reply.refusals, strict=True):
        if refusal:
            raise ClusterError(
                f"chunk {place.key.hex()} can't be read on node {place.node_id[:12]}: "
                f"{Refusal(refusal).name.lower()}; it may have been evicted meanwhile, try again"
            )
    for number, blocks in reply.partial.items():
        raise ClusterError(
            f"chunk {places[number].key.hex()} was stored in part: only {blocks.length} of its "
            f"blocks, from number {blocks.first} on, have KV"
        )
    chunks = np.asarray(data).reshape(len(places), slot_bytes)
    for place, chunk, checksum in zip(places, chunks, reply.checksums, strict=True):
        if xxhash.xxh3_64_intdigest(chunk.data) != checksum:
            raise ClusterError(f"chunk {place.key.hex()} was damaged on its way; try again")
