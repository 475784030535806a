"""Copies of chunks and of hidden states: a worker's jobs, and what nodes read of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import msgspec

from raykv.base.ids import Direction, Refusal, Stamp
from raykv.protocol import columns, framing, listing, wire

STATE_WIDTHS = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a number of each type that hidden states may have."""

MOST_ROW_BYTES = 36
"""Of a chunk in a result, besides its key: four numbers of 8 bytes, and four of one."""

MOST_RESULT_BYTES = wire.MAX_FRAME_BYTES - (64 << 10)
"""Of the chunks of a result: the rest of its frame is for the namespace and what is said once."""


class Capture(msgspec.Struct, frozen=True, array_like=True):
    """Have a request's hidden states copied out of its KV blocks, and kept by the NodeActor.

    It goes with a job whose blocks hold the states, in the layer of that place in their KV
    group: vLLM may have put it together with the model's own layers. A block has `block_tokens`
    tokens; `strides` are the elements from one token of a block to the next, from one state to the
    next, and from one number of a state to the next. `token_ids` are int64, little endian: as many
    tokens are wanted, from the request's beginning. `path`: the file that they become, none if
    empty; `has_lock`: its lock comes along as a descriptor. `most_bytes` of states are kept on this
    node, for `ttl_s` each.
    """

    request_id: str
    token_ids: bytes
    num_states: int
    hidden_size: int
    dtype: str
    block_tokens: int
    strides: list[int]
    most_bytes: int
    ttl_s: float
    layer: int = 0
    path: str = ""
    has_lock: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that are wanted."""
        return len(self.token_ids) // 8


def capture_objection(capture: Capture, num_blocks: int, page_bytes: int) -> str:
    """Why a capture is invalid, in a few words; empty if it is valid.

    Args:
        capture: what a worker asks for.
        num_blocks: KV blocks that hold the states.
        page_bytes: of one of them.
    """
    width = STATE_WIDTHS.get(capture.dtype)
    if width is None:
        return f"states of {capture.dtype[:40]!r}"
    sizes = (capture.block_tokens, capture.num_states, capture.hidden_size)
    if min(sizes) < 1 or len(capture.strides) != len(sizes) or min(capture.strides) < 1:
        return f"states of {sizes} with strides {capture.strides[:9]}"
    steps = zip(sizes, capture.strides, strict=True)
    if (sum((size - 1) * stride for size, stride in steps) + 1) * width > page_bytes:
        return f"states of {sizes} with strides {capture.strides} in a page of {page_bytes} bytes"
    num_tokens = capture.num_tokens
    if len(capture.token_ids) % 8 or not 0 < num_tokens <= num_blocks * capture.block_tokens:
        return f"{num_tokens} tokens in {num_blocks} blocks of {capture.block_tokens}"
    if not capture.request_id or max(len(capture.request_id), len(capture.path)) > columns.MAX_NAME:
        return "a name or path that is empty or too long"
    if capture.most_bytes < 0 or not (capture.ttl_s > 0 and math.isfinite(capture.ttl_s)):
        return f"states that are kept for {capture.ttl_s} s"
    return ""


class CopyJob(msgspec.Struct, frozen=True, array_like=True):
    """One store or load of one rank. Columns have one entry per chunk, except `block_ids`.

    `num_blocks[c]` of the flat `block_ids` belong to chunk c; the first of them is the chunk's
    block number `first_block[c]`. A store has the number of the orders that the engine knew when
    it offered the chunks, and whose they are. `by_layer`: all chunks layer by layer, and the worker
    learns of each layer that is there.

    With `capture` it is a store of one chunk in name only, whose key tells the KV group: its blocks
    go to the NodeActor's own memory.
    """

    job_id: columns.Count
    direction: Annotated[int, msgspec.Meta(ge=0, le=1)]
    namespace: columns.Named
    keys: columns.Keys
    num_blocks: columns.Numbers
    first_block: columns.Numbers
    block_ids: columns.Numbers = columns.Numbers()
    orders: Stamp = Stamp(0, 0)
    tenant: columns.Text = ""
    by_layer: bool = False
    capture: Capture | None = None

    def __post_init__(self) -> None:
        columns.check_column(self.keys, self.num_blocks, self.first_block, most=columns.MAX_ROWS)
        for column in (self.num_blocks, self.first_block):
            columns.check_numbers("blocks of chunks", column, 0, columns.MAX_NUMBER >> 1)
        columns.check_stamps(self.orders)
        result_bytes = len(self.keys.raw) + MOST_ROW_BYTES * len(self.keys)
        columns.require(result_bytes <= MOST_RESULT_BYTES, f"{len(self.keys)} chunks in one job")
        is_store = (len(self.keys), self.direction) == (1, Direction.STORE)
        columns.require(self.capture is None or is_store, "a capture that is not one store")


class CopyResult(msgspec.Struct, frozen=True, array_like=True):
    """How a job, or a fetch, ended: a `Refusal` per chunk that failed, by its number in the job.

    `rows` say how each chunk of it was at `number` of the listing of that `life`.
    """

    job_id: int
    life: int
    number: int
    rows: listing.ListedRows = listing.ListedRows()
    failed_chunks: columns.Numbers = columns.Numbers()
    refusals: bytes = b""
    num_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        columns.check_rows("failed chunks with a reason", self.failed_chunks, self.refusals)


class Fetch(framing.Versioned, frozen=True, tag="fetch"):
    """Have chunks of other nodes copied into this one's pool.

    Args:
        version: of the protocol.
        number: of this order, for its result.
        life: of the EngineCore that asks.
        namespace: of the chunks.
        keys: from heads of prompts to tails.
        slot_bytes: of each chunk.
        sources: of the chunks.
        tenant: whose request wants them.
        deadline_s: from now on.
        series: of several orders that belong together: what they bring stays until a while after
            the last one.
    """

    number: columns.Count
    life: columns.Count
    namespace: columns.Named
    keys: columns.Keys
    slot_bytes: columns.Numbers
    sources: columns.SourceRows = columns.SourceRows()
    tenant: columns.Text = ""
    deadline_s: columns.Seconds = 10.0
    series: columns.Text = ""

    def __post_init__(self) -> None:
        columns.check_column(self.keys, self.slot_bytes)
        columns.check_numbers("numbers of chunks", self.sources.key_index, 0, len(self.keys) - 1)


class Read(framing.Versioned, frozen=True):
    """Read chunks out of a node's pool or disk, for another node."""

    namespace: columns.Named
    keys: columns.Keys
    slot_bytes: columns.Numbers
    from_disk: bool = False

    def __post_init__(self) -> None:
        columns.check_column(self.keys, self.slot_bytes)


class ReadReply(msgspec.Struct, frozen=True):
    """A `Refusal` per chunk; the bytes of all others come back to back, in order.

    `rows` say how each chunk is, at `number` of the listing of that `life`. Of those that came:
    their `checksums` (XXH3, 64 bit) and the stamps that they were stored under.
    """

    life: int
    number: int
    refusals: bytes
    rows: listing.ListedRows = listing.ListedRows()
    checksums: list[int] = []
    histories: columns.Numbers = columns.Numbers()
    stamps: columns.Numbers = columns.Numbers()


class Offer(msgspec.Struct, frozen=True):
    """Answer to a `Read` of a node that takes the bytes out of the pool itself.

    Chunks that `reply` does not refuse stay as they are, at `addresses` in the memory of the
    NodeActor, until offer `number` is ended or has become too old. A node whose offer is ended in
    time has read what was offered.
    """

    number: int
    reply: ReadReply
    addresses: columns.Numbers = columns.Numbers()


def check_read_reply(reply: ReadReply, num_bytes: int, slot_bytes: Sequence[int]) -> None:
    """The answer to a read of chunks of those sizes, with which `num_bytes` bytes came.

    Raises:
        MessageError: it is invalid.
    """
    columns.check_rows("read chunks", slot_bytes, reply.refusals)
    columns.require(columns.REFUSALS.issuperset(reply.refusals), f"refusals {set(reply.refusals)}")
    rows = zip(slot_bytes, reply.refusals, strict=True)
    sent = [size for size, refusal in rows if refusal == Refusal.NONE]
    columns.require(num_bytes == sum(sent), f"{num_bytes} bytes of chunks that have {sum(sent)}")
    columns.require(len(reply.checksums) == len(sent), f"{len(reply.checksums)} checksums")
    columns.check_rows("chunks that came", sent, reply.histories, reply.stamps)
    for column in (reply.histories, reply.stamps):
        columns.check_numbers("numbers of orders", column, 0, columns.MAX_NUMBER)
