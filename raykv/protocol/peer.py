"""Between nodes: fetches that an engine asks for, and reads of another node's chunks."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raykv.base.ids import Blocks, Refusal
from raykv.protocol.columns import (
    REFUSALS,
    Handles,
    LostReplicas,
    Replicas,
    check_lost,
    check_numbers,
    check_places,
    check_rows,
    require,
)


class FetchRequest(msgspec.Struct, frozen=True):
    """Have chunks of other nodes copied into leased slots of this one.

    `handles` are the chunks and their leases here, `slot_bytes` their sizes. The source rows are
    columns like those of `Replicas`; the first row of a chunk is tried first.
    """

    version: int
    namespace: str
    node_epoch: int
    handles: Handles
    slot_bytes: list[int]
    sources: Replicas
    deadline_s: float
    with_checksums: bool = True


class FetchResult(msgspec.Struct, frozen=True):
    """How a fetch ended: a `Refusal` per chunk, and where it is now if it is `NONE`.

    That is another slot than the one asked for when someone else had begun to fetch it there.
    `lost` names what sources said they do not have.
    """

    node_epoch: int
    refusals: list[int]
    slots: list[int]
    generations: list[int]
    num_bytes: int = 0
    seconds: float = 0.0
    lost: LostReplicas = LostReplicas()


def check_fetched(result: FetchResult, num_chunks: int) -> None:
    """How a fetch of so many chunks has ended.

    Raises:
        MessageError: it is invalid.
    """
    check_rows("fetched chunks", range(num_chunks), result.refusals, result.slots)
    check_places("fetched chunks", result.slots, result.generations)
    require(REFUSALS.issuperset(result.refusals), f"refusals {set(result.refusals)}")
    require(result.num_bytes >= 0 and result.seconds >= 0, f"{result.num_bytes} bytes fetched")
    check_lost(result.lost)


class ReadRequest(msgspec.Struct, frozen=True):
    """Read chunks out of a NodeActor's pool, or from its disk, for another NodeActor."""

    version: int
    namespace: str
    node_epoch: int
    handles: Handles
    slot_bytes: list[int]
    with_checksums: bool = True
    from_disk: bool = False


def check_read(request: ReadRequest, slab_bytes: int) -> None:
    """A read out of a pool that is cut into slabs.

    Raises:
        MessageError: it is invalid.
    """
    handles = request.handles
    check_rows("chunks", handles.keys, handles.slots, handles.generations, request.slot_bytes)
    check_numbers("slot sizes", request.slot_bytes, 1, slab_bytes)


class Offer(msgspec.Struct, frozen=True):
    """Answer to a `ReadRequest` of a node that takes the bytes out of the pool itself.

    Chunks that `reply` does not refuse stay as they are, where they are, until offer `number` is
    ended or has become too old. A node whose offer is ended in time has read what was offered.
    """

    number: int
    reply: ReadReply


class ReadReply(msgspec.Struct, frozen=True):
    """A `Refusal` per chunk, and the checksums (XXH3, 64 bit) of those that follow as bytes.

    The bytes of all chunks that were not refused come with it, back to back, in order. `partial`
    has those of which only some blocks were stored, by their numbers in the question: the other
    blocks are zero, and are not to be loaded.
    """

    node_epoch: int
    refusals: list[int]
    checksums: list[int] = []
    partial: dict[int, Blocks] = {}


def check_read_reply(
    reply: ReadReply, num_bytes: int, slot_bytes: Sequence[int], *, with_checksums: bool = True
) -> None:
    """The answer to a read of chunks of those sizes, with which so many bytes came.

    Raises:
        MessageError: it is invalid.
    """
    check_rows("read chunks", slot_bytes, reply.refusals)
    require(REFUSALS.issuperset(reply.refusals), f"refusals {set(reply.refusals)}")
    rows = zip(slot_bytes, reply.refusals, strict=True)
    sent = [size for size, refusal in rows if refusal == Refusal.NONE]
    require(num_bytes == sum(sent), f"{num_bytes} bytes of chunks that have {sum(sent)}")
    num_checksums = len(sent) if with_checksums else 0
    require(len(reply.checksums) == num_checksums, f"{len(reply.checksums)} checksums")
    check_numbers("numbers of partial chunks", reply.partial, 0, len(slot_bytes) - 1)
    for blocks in reply.partial.values():
        require(blocks.is_sound, f"a chunk with {blocks.length} blocks from {blocks.first} on")
