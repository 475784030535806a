"""What is in memory: of which chunk, and since when, each block of a pool and of a KV cache is.

So whoever copies from a wrong place, or at a wrong time, gets wrong bytes, and an engine that loads
them notices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raykv.base.ids import Blocks, Key, Namespace, Stamp
from raykv.node.pool.records import ChunkRecord

BLOCKS = 4
"""Of a chunk."""

NO_ORDERS = Stamp(0, 0)


@dataclass(frozen=True, slots=True)
class BlockBytes:
    """A rank's part of a block of a chunk, under the orders that its engine knew, and in the step
    of the world in which it was offered. Damaged ones have another checksum.
    """

    namespace: Namespace
    key: Key
    block: int
    rank: int
    stamp: Stamp = NO_ORDERS
    made_at: int = 0
    is_damaged: bool = False

    def is_of(self, namespace: Namespace, key: Key, block: int, rank: int) -> bool:
        """Whether it is what has that name."""
        mine = self.namespace, self.key, self.block, self.rank
        return mine == (namespace, key, block, rank)


Content = dict[tuple[int, int], BlockBytes | None]
"""Of a chunk, by rank and block; None is rubbish."""


def blocks_of(blocks: Blocks) -> range:
    """Their numbers in the chunk."""
    return range(blocks.first, blocks.first + blocks.length)


@dataclass(eq=False)
class _Page:
    """What a rank has of a page: one record's blocks, until another record's are written."""

    record: ChunkRecord
    blocks: dict[int, BlockBytes | None] = field(default_factory=dict)


class PoolBytes:
    """The memory of a pool: a slot has one page or more, and each page a part for each rank."""

    def __init__(self) -> None:
        self._pages: dict[tuple[int, int], _Page] = {}

    def write(self, record: ChunkRecord, rank: int, block: int, content: BlockBytes | None) -> None:
        """A block is written, where it has its place in the slot of a record."""
        place = _page_of(record, block), rank
        page = self._pages.get(place)
        if page is None or page.record is not record:
            page = self._pages[place] = _Page(record)
        page.blocks[block] = content

    def read(self, record: ChunkRecord, rank: int, block: int) -> BlockBytes | None:
        """What is there, whoever has written it."""
        page = self._pages.get((_page_of(record, block), rank))
        return page.blocks.get(block) if page else None

    def damage(self, record: ChunkRecord, ranks: range) -> None:
        """A record's first block is not what was written."""
        at = record.blocks.first
        for rank in ranks:
            wrong = BlockBytes(record.namespace, record.key, at, rank, is_damaged=True)
            self.write(record, rank, at, wrong)


def _page_of(record: ChunkRecord, block: int) -> int:
    pages = record.slot_bytes // 4096
    return record.slot + block * pages // BLOCKS


class KVCache:
    """The blocks of an engine's ranks: those that no request has are free."""

    def __init__(self, num_ranks: int, num_blocks: int) -> None:
        self._free = list(range(num_blocks))
        self._blocks: list[list[BlockBytes | None]] = [
            [None] * num_blocks for _ in range(num_ranks)
        ]

    @property
    def num_free(self) -> int:
        """Blocks that a request may have."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Blocks for a request, with rubbish in them."""
        taken, self._free = self._free[:count], self._free[count:]
        for rank in self._blocks:
            for block in taken:
                rank[block] = None
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """A request has ended, and so have the copies of its blocks."""
        self._free.extend(blocks)

    def write(self, rank: int, block: int, content: BlockBytes | None) -> None:
        self._blocks[rank][block] = content

    def read(self, rank: int, block: int) -> BlockBytes | None:
        return self._blocks[rank][block]
