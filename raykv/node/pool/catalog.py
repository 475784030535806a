"""The chunks of a node, for people: row by row, what is known of one, and what pins hold.

A listing goes through the pool's slots, and then through what is on the disk. Nothing is kept for
its reader: a place says where it goes on. Each call looks at a bounded number of chunks, so that
the lock of the pool's owner is held for a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter

from raykv.base.ids import Blocks, Key, Namespace, group_of
from raykv.node.pool import claims, shelf
from raykv.node.pool.owner import NodePool
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.protocol import columns, framing, operator, reader
from raykv.protocol.listing import ALL_READ, Reason, Where

STRETCH = 1024
"""Slots, or chunks on the disk, that are looked at in one go."""

ANYWHERE = Where.RAM | Where.DISK
"""At hand: to join flags takes a microsecond."""

_TIERS = {"": ANYWHERE, reader.RAM: Where.RAM, reader.DISK: Where.DISK}


class PoolCatalog:
    """See the module's docstring. Whoever calls holds the lock of the pool's owner.

    Args:
        owner: of the pool.
        began_at: when the NodeActor did. A chunk of an earlier life came then.
    """

    def __init__(self, owner: NodePool, began_at: float) -> None:
        self._owner = owner
        self._index = owner.index
        self._shelf = owner.index.shelf
        self._began_at = began_at

    def stretch(
        self, query: reader.ChunkQuery, place: int, now: float, most: int = STRETCH
    ) -> tuple[list[reader.ListedChunk], int]:
        """Those of the next places that are asked for, and where to go on; `ALL_READ`: the listing
        ends there. So many places are looked at, `STRETCH` at most. Ages are those at `now`.
        """
        where = _TIERS[query.tier]
        name = Namespace(query.namespace), Key(query.key)
        if query.namespace and self.row(*name, now) is not None:
            # No other key of its namespace begins so.
            row = self.row(*name, now, where) if query.group in (None, group_of(name[1])) else None
            return [] if row is None else [row], ALL_READ
        disk = self._index.disk_place
        if not where & Where.RAM:
            place = max(place, disk)
        chunks, following = self._index.page(place, min(most, STRETCH))
        rows = [self._row(each, now, where) for each in chunks if _is_asked_for(each, query)]
        is_end = following >= disk and not where & Where.DISK
        return [each for each in rows if each is not None], ALL_READ if is_end else following

    def _row(
        self, chunk: ChunkRecord | shelf.ShelvedChunk, now: float, where: Where
    ) -> reader.ListedChunk | None:
        """One of a page, unless it is not asked for, or is in the pool as well and listed there."""
        if isinstance(chunk, ChunkRecord):
            if chunk.state is not ChunkState.READY or not where & Where.RAM:
                return None
            return self._in_pool(chunk, now, has_disk=bool(where & Where.DISK))
        is_alone = not where & Where.RAM or self._index.find(chunk.namespace, chunk.key) is None
        return _shelved(chunk) if is_alone and where & Where.DISK else None

    def row(
        self, namespace: Namespace, key: Key, now: float, where: Where = ANYWHERE
    ) -> reader.ListedChunk | None:
        """One chunk, as far as it is there."""
        record = self._index.find(namespace, key)
        if record is not None and where & Where.RAM:
            return self._in_pool(record, now, has_disk=bool(where & Where.DISK))
        shelved = self._shelf.find(namespace, key)
        return _shelved(shelved) if shelved is not None and where & Where.DISK else None

    def _in_pool(self, record: ChunkRecord, now: float, *, has_disk: bool) -> reader.ListedChunk:
        is_shelved = has_disk and self._shelf.find(record.namespace, record.key) is not None
        came_at = max(self._began_at, record.came_at)
        return reader.ListedChunk(
            record.namespace,
            record.key,
            ANYWHERE if is_shelved else Where.RAM,
            record.slot_bytes,
            max(0.0, now - came_at),
            max(0.0, now - max(came_at, record.found_at)),
            record.hits,
            self._owner.tenant(self._owner.tenants.label(record.owner)),
        )

    def kept(self, names: Iterable[claims.Name], standing: Standing) -> operator.PinHere:
        """Which chunks of these stand so here, or higher, and which only wait for that."""
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
        return operator.PinHere(columns.Numbers.of(kept), columns.Numbers.of(waiting), num_bytes)

    def drop(
        self, namespace: Namespace, chunks: Mapping[Key, Blocks], *, with_pinned: bool = False
    ) -> operator.Released:
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
        return operator.Released(framing.PROTOCOL_VERSION, dropped, kept, absent)


def _is_asked_for(chunk: ChunkRecord | shelf.ShelvedChunk, query: reader.ChunkQuery) -> bool:
    """Whether a chunk is among those of a query, wherever it is."""
    return (
        query.namespace in ("", chunk.namespace)
        and chunk.key.startswith(query.key)
        and query.group in (None, group_of(chunk.key))
    )


def _shelved(kept: shelf.ShelvedChunk) -> reader.ListedChunk:
    return reader.ListedChunk(kept.namespace, kept.key, Where.DISK, kept.chunk.num_bytes)


def first_ones(
    rows: Sequence[reader.ListedChunk], order: str, limit: int
) -> list[reader.ListedChunk]:
    """The first rows in an order, one of `reader.ORDERS`."""
    return nlargest(limit, rows, key=attrgetter(reader.ORDERS[order]))
