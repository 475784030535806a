"""The chunks of a node, for people: row by row, what is known of one, and what pins hold.

A listing goes through the pool's slots, and then through what is on the disk. Nothing is kept for
its reader: a place says where it goes on. Each call looks at a bounded number of chunks, so that
the lock of the pool's owner is held for a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from operator import attrgetter

from raykv.base.ids import Blocks, Key, Namespace, family_of, group_of
from raykv.node.pool import claims, records, shelf
from raykv.node.pool.owner import NodePool
from raykv.protocol import columns, operator, reader
from raykv.protocol.listing import ALL_READ, Reason, Where

STRETCH = 1024
"""Slots, or chunks on the disk, that are looked at in one go."""

ANYWHERE = Where.RAM | Where.DISK
"""At hand: to join flags takes a microsecond."""

Stay = records.ChunkRecord | shelf.ShelvedChunk

_TIERS = {"": ANYWHERE, reader.RAM: Where.RAM, reader.DISK: Where.DISK}


class PoolCatalog:
    """See the module's docstring. Callers hold the lock of the pool's owner.

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
        ends there. It looks at up to `most` places, at most `STRETCH`. Ages are those at `now`.
        """
        where, disk = _TIERS[query.tier], self._index.disk_place
        name = Namespace(query.namespace), Key(query.key)
        chunks: Sequence[Stay]
        if query.namespace and self._find(*name, ANYWHERE) is not None:
            # No other key of its namespace begins so.
            chunk, following = self._find(*name, where), ALL_READ
            chunks = [] if chunk is None else [chunk]
        else:
            place = place if where & Where.RAM else max(place, disk)
            chunks, following = self._index.page(place, min(most, STRETCH))
            if following >= disk and not where & Where.DISK:
                following = ALL_READ
        rows = [
            self._row(each, now, where)
            for each in chunks
            if _is_asked_for(each, query) and self._find(each.namespace, each.key, where) is each
        ]
        return rows, following

    def _find(self, namespace: Namespace, key: Key, where: Where) -> Stay | None:
        """What stands for a chunk that is there: its record, if it is in the pool too."""
        record = self._index.find(namespace, key) if where & Where.RAM else None
        if record is None and where & Where.DISK:
            return self._shelf.find(namespace, key)
        return record

    def _row(self, chunk: Stay, now: float, where: Where) -> reader.ListedChunk:
        name = chunk.namespace, chunk.key
        if isinstance(chunk, shelf.ShelvedChunk):
            return reader.ListedChunk(*name, Where.DISK, chunk.chunk.num_bytes)
        is_shelved = bool(where & Where.DISK) and self._shelf.find(*name) is not None
        came_at = max(self._began_at, chunk.came_at)
        return reader.ListedChunk(
            *name,
            ANYWHERE if is_shelved else Where.RAM,
            chunk.slot_bytes,
            max(0.0, now - came_at),
            max(0.0, now - max(came_at, chunk.found_at)),
            chunk.hits,
            self._owner.tenant(chunk.tenant),
        )

    def kept(self, names: Iterable[claims.Name], standing: records.Standing) -> operator.PinHere:
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
                with_pinned or record.standing is not records.Standing.PINNED
            ):
                self._index.drop(record, Reason.MOVED)
                dropped += 1
            else:
                kept += 1
        return operator.Released(dropped, kept, absent)


def _is_asked_for(chunk: Stay, query: reader.ChunkQuery) -> bool:
    """Whether a chunk is among those of a query, wherever it is."""
    return (
        query.namespace in ("", chunk.namespace, family_of(chunk.namespace))
        and chunk.key.startswith(query.key)
        and query.group in (None, group_of(chunk.key))
    )


def first_ones(
    rows: Sequence[reader.ListedChunk], order: str, limit: int
) -> list[reader.ListedChunk]:
    """The first rows in an order, one of `reader.ORDERS`."""
    return nlargest(limit, rows, key=attrgetter(reader.ORDERS[order]))
