"""Between nodes: what is offered for a read, and whether a read or its answer can be meant."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raykv.base.ids import Refusal
from raykv.protocol.columns import (
    MAX_NUMBER,
    REFUSALS,
    Numbers,
    check_numbers,
    check_rows,
    require,
)
from raykv.protocol.named.copies import ReadNamed, ReadNamedReply


class Offer(msgspec.Struct, frozen=True):
    """Answer to a `ReadNamed` of a node that takes the bytes out of the pool itself.

    Chunks that `reply` does not refuse stay as they are, at `addresses` in the memory of the
    NodeActor, until offer `number` is ended or has become too old. A node whose offer is ended in
    time has read what was offered.
    """

    number: int
    reply: ReadNamedReply
    addresses: Numbers = Numbers()


def check_read(request: ReadNamed, slab_bytes: int) -> None:
    """A read out of a pool that is cut into slabs.

    Raises:
        MessageError: it is invalid.
    """
    check_rows("chunks", request.keys, request.slot_bytes)
    check_numbers("slot sizes", request.slot_bytes, 1, slab_bytes)


def check_read_reply(
    reply: ReadNamedReply, num_bytes: int, slot_bytes: Sequence[int], *, with_checksums: bool = True
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
    check_rows("chunks that came", sent, reply.histories, reply.stamps)
    for column in (reply.histories, reply.stamps):
        check_numbers("numbers of orders", column, 0, MAX_NUMBER)
