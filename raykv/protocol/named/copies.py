"""Copies of chunks by their names: a worker's jobs, and what comes from other nodes."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import Direction, Stamp
from raykv.protocol.columns import MAX_NUMBER, MAX_ROWS, Keys, Numbers, Source
from raykv.protocol.listing import ListedRows
from raykv.protocol.named.captures import Capture
from raykv.protocol.named.columns import Count, Named, Seconds, Text, check_column
from raykv.protocol.named.place import NOTHING_ORDERED


class NamedJob(msgspec.Struct, frozen=True, array_like=True):
    """One store or load of one rank. Columns have one entry per chunk, except `block_ids`.

    `num_blocks[c]` of the flat `block_ids` belong to chunk c; the first of them is the chunk's
    block number `first_block[c]`. A store has the number of the orders that the engine knew when
    it offered the chunks, and whose they are. `by_layer`: all chunks layer by layer, and the worker
    learns of each layer that is there.

    With `capture` it is a store of one chunk in name only, whose key tells the KV group: its blocks
    go to the NodeActor's own memory.
    """

    job_id: Count
    direction: Annotated[int, msgspec.Meta(ge=0, le=1)]
    namespace: Named
    keys: Keys
    num_blocks: Numbers
    first_block: Numbers
    block_ids: Numbers = Numbers()
    orders: Stamp = NOTHING_ORDERED
    tenant: Text = ""
    by_layer: bool = False
    capture: Capture | None = None

    def __post_init__(self) -> None:
        check_column(self.keys, self.num_blocks, self.first_block, most=MAX_ROWS)
        counts = [*self.num_blocks, *self.first_block]
        if min(counts, default=0) < 0 or max(counts, default=0) > MAX_NUMBER >> 1:
            raise ValueError("blocks that no chunk has")
        if not 0 <= min(self.orders) <= max(self.orders) <= MAX_NUMBER:
            raise ValueError(f"orders of number {self.orders}")
        is_one = len(self.keys) == 1 and self.direction == Direction.STORE
        if self.capture is not None and not is_one:
            raise ValueError("a capture that is not one store")


class NamedResult(msgspec.Struct, frozen=True, array_like=True):
    """How a job, or a fetch, ended: a `Refusal` per chunk that failed, by its number in the job.

    `rows` say how each chunk of it was at `number` of the listing of that `life`.
    """

    job_id: int
    life: int
    number: int
    rows: ListedRows = ListedRows()
    failed_chunks: Numbers = Numbers()
    refusals: bytes = b""
    num_bytes: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if len(self.failed_chunks) != len(self.refusals):
            raise ValueError("failed chunks without a reason")


class FetchOrderNamed(msgspec.Struct, frozen=True):
    """Have chunks of other nodes copied into this one's pool.

    Args:
        version: of the protocol.
        number: of this order, for its result.
        life: of the EngineCore that asks.
        namespace: of the chunks.
        keys: from heads of prompts to tails.
        slot_bytes: of each chunk.
        sources: of all chunks.
        key_index: a row for each source of a chunk, the one to be tried first before the others.
        source_index: points into `sources`.
        tenant: whose request wants them.
        deadline_s: from now on.
        with_checksums: whether what arrives is checked.
        series: of several orders that belong together: what they bring stays until a while after
            the last one.
    """

    version: int
    number: Count
    life: Count
    namespace: Named
    keys: Keys
    slot_bytes: Numbers
    sources: Annotated[list[Source], msgspec.Meta(max_length=MAX_ROWS)] = []
    key_index: Numbers = Numbers()
    source_index: Numbers = Numbers()
    tenant: Text = ""
    deadline_s: Seconds = 10.0
    with_checksums: bool = True
    series: Text = ""

    def __post_init__(self) -> None:
        check_column(self.keys, self.slot_bytes)
        if len(self.key_index) != len(self.source_index):
            raise ValueError("rows of different lengths")
        if not all(0 <= at < len(self.keys) for at in self.key_index):
            raise ValueError("a source of no chunk")
        if not all(0 <= at < len(self.sources) for at in self.source_index):
            raise ValueError("a source that is not there")


class ReadNamed(msgspec.Struct, frozen=True):
    """Read chunks out of a node's pool or disk, for another node."""

    version: int
    namespace: Named
    keys: Keys
    slot_bytes: Numbers
    with_checksums: bool = True
    from_disk: bool = False

    def __post_init__(self) -> None:
        check_column(self.keys, self.slot_bytes)


class ReadNamedReply(msgspec.Struct, frozen=True):
    """A `Refusal` per chunk; of those that are not refused the bytes come back to back, in order.

    `rows` say how each chunk is, at `number` of the listing of that `life`. Of those that came:
    `checksums` (XXH3, 64 bit), if they were wanted, and the stamps that they were stored under.
    """

    life: int
    number: int
    refusals: bytes
    rows: ListedRows = ListedRows()
    checksums: list[int] = []
    histories: Numbers = Numbers()
    stamps: Numbers = Numbers()
