"""The chunks of a node, for people: row by row, what is known of one, and what pins hold.

A listing goes through the pool's slots, and then through what is on the disk. Nothing is kept for
its reader: a cursor says where it goes on. Each call looks at a bounded number of chunks, so that
the lock of the pool's owner is held for a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import nsmallest
from math import inf
from typing import NamedTuple

from raykv.base.errors import MessageError
from raykv.base.ids import Blocks, Key, Namespace, group_of
from raykv.node.pool.claims import Name
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.node.pool.room import NOBODY
from raykv.node.pool.shelf import Shelf, ShelvedChunk
from raykv.protocol.listing import ALL_READ, Reason, Where

STRETCH = 1024
"""Slots, or chunks on the disk, that are looked at in one go."""

ANYWHERE = Where.RAM | Where.DISK
"""At hand: to join flags takes a microsecond."""

MOST_DIGITS = 24
"""Of a cursor."""


class Cursor(NamedTuple):
    """Where a listing goes on: in the pool or on the disk."""

    is_disk: bool = False
    place: int = 0

    def __str__(self) -> str:
        return f"{'disk' if self.is_disk else 'ram'} {self.place}"

    @staticmethod
    def of(text: str) -> Cursor:
        """The cursor that was given out as that text; empty: the beginning.

        Raises:
            MessageError: nobody has given out such a text.
        """
        if not text:
            return Cursor()
        tier, _, place = text.partition(" ")
        is_place = place.isascii() and place.isdecimal() and len(place) <= MOST_DIGITS
        if tier not in ("ram", "disk") or not is_place:
            raise MessageError(f"invalid message: a cursor {text[:MOST_DIGITS]!r}")
        return Cursor(tier == "disk", int(place))


class Wanted(NamedTuple):
    """Which chunks are listed; empty, or None: all. `key` is the beginning of keys."""

    namespace: str = ""
    key: bytes = b""
    group: int | None = None
    where: Where = ANYWHERE

    def has(self, chunk: ChunkRecord | ShelvedChunk) -> bool:
        """Whether a chunk is among them, wherever it is."""
        return (
            self.namespace in ("", chunk.namespace)
            and chunk.key.startswith(self.key)
            and self.group in (None, group_of(chunk.key))
        )


class ChunkRow(NamedTuple):
    """A chunk at this node.

    `came_at`: when its store began, or the NodeActor if that was later; None of one that is on the
    disk only. `found_at`: when it was found last, or came.
    """

    namespace: Namespace
    key: Key
    where: Where
    num_bytes: int
    blocks: Blocks
    came_at: float | None = None
    found_at: float | None = None
    hits: int = 0
    standing: Standing = Standing.NORMAL
    owner: int = NOBODY


class HeldChunks(NamedTuple):
    """Of some names, by their numbers, the chunks that are kept or pinned here, and those that only
    wait for that; bytes of the former.
    """

    kept: list[int]
    waiting: list[int]
    num_bytes: int = 0


class DroppedChunks(NamedTuple):
    """What became of chunks that were to be given up; `kept` ones are pinned, or have more blocks
    than those elsewhere.
    """

    dropped: int = 0
    kept: int = 0
    absent: int = 0


class PoolCatalog:
    """See the module's docstring. Whoever calls holds the lock of the pool's owner.

    Args:
        index: of the pool.
        shelf: what is on the disk.
        began_at: when the NodeActor did.
    """

    def __init__(self, index: PoolIndex, shelf: Shelf, began_at: float) -> None:
        self._index = index
        self._shelf = shelf
        self._began_at = began_at

    def stretch(
        self, wanted: Wanted, cursor: Cursor, most: int = STRETCH
    ) -> tuple[list[ChunkRow], Cursor | None]:
        """Those of the next places that are wanted, and where to go on; None: the listing ends
        there. So many places are looked at, `STRETCH` at most.
        """
        most = min(most, STRETCH)
        if wanted.namespace and self._is_name(wanted):
            found = self.row(Namespace(wanted.namespace), Key(wanted.key), wanted.where)
            return [] if found is None else [found], None
        if cursor.is_disk or not wanted.where & Where.RAM:
            return self._on_disk(wanted, cursor.place if cursor.is_disk else 0, most)
        records, place = self._index.places.records_from(cursor.place, most)
        has_disk = bool(wanted.where & Where.DISK)
        rows = [
            self._in_pool(each, has_disk=has_disk)
            for each in records
            if each.state is ChunkState.READY and wanted.has(each)
        ]
        if place != ALL_READ:
            return rows, Cursor(place=place)
        return rows, Cursor(is_disk=True) if has_disk else None

    def _is_name(self, wanted: Wanted) -> bool:
        """Whether its key is one that is here: no other one of its namespace begins so."""
        name = Namespace(wanted.namespace), Key(wanted.key)
        is_here = self._index.find(*name) is not None or self._shelf.find(*name) is not None
        return is_here and wanted.group in (None, group_of(name[1]))

    def _on_disk(
        self, wanted: Wanted, place: int, most: int
    ) -> tuple[list[ChunkRow], Cursor | None]:
        """Those that are not in the pool, unless only the disk is asked for."""
        chunks, following = self._shelf.page(place, most)
        is_all = not wanted.where & Where.RAM
        rows = [
            self._shelved(each)
            for each in chunks
            if wanted.has(each) and (is_all or self._index.find(each.namespace, each.key) is None)
        ]
        return rows, None if following == ALL_READ else Cursor(True, following)

    def row(self, namespace: Namespace, key: Key, where: Where = ANYWHERE) -> ChunkRow | None:
        """One chunk, as far as it is there."""
        record = self._index.find(namespace, key)
        if record is not None and where & Where.RAM:
            return self._in_pool(record, has_disk=bool(where & Where.DISK))
        shelved = self._shelf.find(namespace, key)
        return self._shelved(shelved) if shelved is not None and where & Where.DISK else None

    def _in_pool(self, record: ChunkRecord, *, has_disk: bool) -> ChunkRow:
        is_shelved = has_disk and self._shelf.find(record.namespace, record.key) is not None
        came_at = max(self._began_at, record.came_at)
        return ChunkRow(
            record.namespace,
            record.key,
            ANYWHERE if is_shelved else Where.RAM,
            record.slot_bytes,
            record.blocks,
            came_at,
            max(came_at, record.found_at),
            record.hits,
            record.standing,
            record.owner,
        )

    def _shelved(self, chunk: ShelvedChunk) -> ChunkRow:
        return ChunkRow(chunk.namespace, chunk.key, Where.DISK, chunk.slot_bytes, chunk.blocks)

    def kept(self, names: Iterable[Name], standing: Standing) -> HeldChunks:
        """Which chunks of these stand so here, or higher."""
        kept, waiting, num_bytes = [], [], 0
        for at, name in enumerate(names):
            record = self._index.find(*name)
            if record is None:
                continue
            if record.standing >= standing:
                kept.append(at)
                num_bytes += record.slot_bytes
            else:
                waiting.append(at)
        return HeldChunks(kept, waiting, num_bytes)

    def drop(
        self, namespace: Namespace, chunks: Mapping[Key, Blocks], *, with_pinned: bool = False
    ) -> DroppedChunks:
        """Give up copies in the pool of what is elsewhere with these blocks, those that are pinned
        only `with_pinned`; what is on the disk stays.
        """
        dropped = kept = absent = 0
        for key, blocks in chunks.items():
            record = self._index.find(namespace, key)
            if record is None:
                absent += 1
            elif blocks.has(record.blocks) and (
                with_pinned or record.standing is not Standing.PINNED
            ):
                self._index.drop(record, Reason.MOVED)
                dropped += 1
            else:
                kept += 1
        return DroppedChunks(dropped, kept, absent)


def first_ones(rows: Sequence[ChunkRow], order: str, limit: int) -> list[ChunkRow]:
    """The first rows in an order: by age, idle, hits or size, what has most of it first."""
    return nsmallest(limit, rows, key=_RANKS[order])


_RANKS: Mapping[str, Callable[[ChunkRow], float]] = {
    "age": lambda row: inf if row.came_at is None else row.came_at,
    "idle": lambda row: inf if row.found_at is None else row.found_at,
    "hits": lambda row: -row.hits,
    "size": lambda row: -row.num_bytes,
}
