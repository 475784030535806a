"""One node's part of the flat table; see `raykv.directory.table.protocol.NodeTable`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, EngineId, Generation, Key, Namespace, Slot
from raykv.directory.table.flat import batches, kernels, lists, order
from raykv.directory.table.flat.arrays import Array
from raykv.directory.table.flat.layout import (
    BASE,
    CLAIMED,
    CLASS,
    FREE,
    GENERATION,
    GONE,
    HEAD,
    HELD,
    KEY,
    LEASED,
    NAME,
    NODE,
    NONE,
    OWNER,
    PIN,
    RELEASED,
    SLAB_CLASS,
    SLOT,
    SLOT_BYTES,
    SPARE,
    STATE,
    TICKS_PER_S,
    USED,
)
from raykv.directory.table.flat.rows import Rows, tick_of, until_tick
from raykv.directory.table.protocol import (
    MAX_OWNERS,
    Changes,
    Held,
    Lease,
    Name,
    Stretch,
    TableChunk,
    Uses,
)
from raykv.directory.table.worth import NUM_QUEUES

WALK = 4096
"""Rows of a list that are looked at in one go."""


class FlatNodeTable:
    """See `raykv.directory.table.protocol.NodeTable`.

    Args:
        rows: those of all nodes.
        number: the node's, among them.
        geometry: of its pool.
    """

    def __init__(self, rows: Rows, number: int, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self.number = number
        self._rows = rows
        self._classes: dict[int, int] = {}
        # Classes by slot size and tenant, of those that are set apart.
        self._parts: dict[tuple[int, int], int] = {}
        self._apart: set[int] = set()
        # Whether a chunk has ever had an owner.
        self._has_owners = False
        self._pages = geometry.slab_bytes // SLOT_ALIGNMENT
        self._slabs: Array = np.full((geometry.num_slabs, 3), -1, np.int64)
        # Engines by their number in leases.
        self._engines: list[EngineId] = []

    def close(self) -> None:
        """The node is gone."""
        rows = self._rows
        every = self._all_classes()
        for of_class in every:
            for state in (RELEASED, SPARE):
                for part in self._walks(of_class, state):
                    self._forget(part)
        self._forget(self._held())
        for base, _, stride in self._slabs.tolist():
            if base >= 0:
                rows.give_block(base, self._pages // stride)
        for size, owner in self._parts:
            rows.end_part(self._classes[size], owner)
        for of_class in every:
            rows.give_class(of_class)
        rows.counts[self.number] = -1

    def _forget(self, gone: Array) -> None:
        batches.forget_all(self._rows.arrays, gone)

    def _class_of(self, slot_bytes: int) -> int:
        found = self._classes.get(slot_bytes)
        if found is None:
            found = self._classes[slot_bytes] = self._rows.new_class(self.number, slot_bytes)
            for owner in self._apart:
                self._parts[slot_bytes, owner] = self._rows.new_part(found, owner)
        return found

    def _order_of(self, slot_bytes: int, owner: int) -> int:
        """The class whose chunks `evict` drops."""
        whole = self._class_of(slot_bytes)
        return self._parts.get((slot_bytes, owner), whole) if owner else whole

    def _all_classes(self) -> list[int]:
        """Those of tenants too, which are behind the others of their slot size."""
        found = []
        for size, whole in self._classes.items():
            found += [whole, *(self._parts[size, owner] for owner in sorted(self._apart))]
        return found

    def _row(self, slot: int, slot_bytes: int | None = None) -> int:
        """The row of a slot, or -1; of a slot size if it is named."""
        row = int(batches.row_at(self._slabs, self._pages, slot))
        if row >= 0 and slot_bytes is not None and slot_bytes != self._size_of(row):
            return -1
        return row

    def _size_of(self, row: int) -> int:
        rows = self._rows
        return int(rows.classes[rows.rows[row, CLASS], SLOT_BYTES])

    def _move(self, row: int, state: int) -> None:
        lists.move(self._rows.rows, self._rows.lists, row, state)

    def _walks(self, of_class: int, state: int) -> Iterator[Array]:
        """Rows of a list, piece by piece; a piece may be taken out of it."""
        rows = self._rows
        row = int(rows.lists[rows.list_of(of_class, state), HEAD])
        while row != NONE:
            out = np.empty(WALK + 1, np.int64)
            count = lists.walk(rows.rows, row, out)
            row = NONE if count <= WALK else int(out[WALK])
            yield out[: min(count, WALK)]

    # Slabs

    def give_slab(self, slab: int, slot_bytes: int, lowest: Generation) -> None:
        assert slot_bytes % SLOT_ALIGNMENT == 0, slot_bytes
        rows = self._rows
        of_class = self._class_of(slot_bytes)
        count = self.geometry.slots_per_slab(slot_bytes)
        base = rows.take_block(count) if count else 0
        stride = slot_bytes // SLOT_ALIGNMENT
        self._slabs[slab] = (base, of_class, stride)
        lists.fill_slab(
            rows.arrays,
            base,
            count,
            of_class,
            slab * self._pages,
            stride,
            lowest,
        )

    def take_slab(self, slab: int, slot_bytes: int) -> Generation:
        rows = self._rows
        assert self._slabs[slab, SLAB_CLASS] == self._classes[slot_bytes], (slab, slot_bytes)
        block = self._block(slab)
        assert (rows.rows[block, STATE] == FREE).all(), slab
        for row in range(block.start, block.stop):
            self._move(row, GONE)
        highest = Generation(int(rows.words[block, GENERATION].max()))
        rows.give_block(block.start, block.stop - block.start)
        self._slabs[slab] = -1
        return highest

    def _block(self, slab: int) -> slice:
        """The rows of a slab that has a slot size."""
        base, _, stride = self._slabs[slab].tolist()
        return slice(base, base + self._pages // stride)

    # Free slots

    def num_free(self, slot_bytes: int) -> int:
        return self._rows.count(self._class_of(slot_bytes), FREE)

    def lowest(self, slot: Slot, slot_bytes: int) -> Generation | None:
        row = self._row(slot, slot_bytes)
        if row < 0 or self._rows.rows[row, STATE] != FREE:
            return None
        return Generation(int(self._rows.words[row, GENERATION]))

    def claim(self, slot: Slot, slot_bytes: int) -> None:
        row = self._row(slot, slot_bytes)
        assert self._rows.rows[row, STATE] == FREE, slot
        self._move(row, CLAIMED)
        self._rows.rows[row, OWNER] = 0

    def unclaim(self, slot: Slot, slot_bytes: int, lowest: Generation) -> None:
        self._free(slot, CLAIMED, lowest)

    def _free(self, slot: Slot, state: int, lowest: Generation) -> None:
        row = self._row(slot)
        assert self._rows.rows[row, STATE] == state, (slot, state)
        self._rows.words[row, GENERATION] = lowest
        self._move(row, FREE)

    # Leases

    @property
    def num_leases(self) -> int:
        return sum(self._rows.count(of_class, LEASED) for of_class in self._classes.values())

    def lend(
        self, slot_bytes: int, count: int, engine_id: EngineId, group: int, first: Generation
    ) -> list[Slot]:
        rows = self._rows
        of_class, engine = self._class_of(slot_bytes), self._engine_number(engine_id)
        out = np.empty(max(count, 0), np.int64)
        count = batches.lend(rows.arrays, of_class, engine, group, first, out)
        slots: list[Slot] = rows.rows[out[:count], SLOT].tolist()
        return slots

    def _engine_number(self, engine_id: EngineId) -> int:
        if engine_id not in self._engines:
            if not self.num_leases:
                self._engines.clear()
            self._engines.append(engine_id)
        return self._engines.index(engine_id)

    def lend_at(self, slot: Slot, lease: Lease) -> None:
        rows, row = self._rows, self._row(slot, lease.slot_bytes)
        assert rows.rows[row, STATE] == CLAIMED, slot
        self._move(row, LEASED)
        rows.rows[row, NAME] = self._engine_number(lease.engine_id)
        rows.rows[row, KEY] = lease.group
        rows.words[row, GENERATION] = lease.generation

    def lease_of(self, slot: Slot) -> Lease | None:
        row = self._row(slot)
        if row < 0 or self._rows.rows[row, STATE] != LEASED:
            return None
        return self._lease(row)

    def _lease(self, row: int) -> Lease:
        values = self._rows.rows[row]
        return Lease(
            engine_id=self._engines[int(values[NAME])],
            group=int(values[KEY]),
            generation=Generation(int(self._rows.words[row, GENERATION])),
            slot_bytes=self._size_of(row),
        )

    def is_leased_at(self, slot: Slot, generation: int) -> bool:
        rows, row = self._rows, self._row(slot)
        is_leased = row >= 0 and rows.rows[row, STATE] == LEASED
        return bool(is_leased and rows.words[row, GENERATION] == generation)

    def leases(self) -> dict[Slot, Lease]:
        return {
            Slot(int(self._rows.rows[row, SLOT])): self._lease(row)
            for of_class in self._classes.values()
            for part in self._walks(of_class, LEASED)
            for row in part.tolist()
        }

    def end_lease(self, slot: Slot, lowest: Generation) -> None:
        self._free(slot, LEASED, lowest)

    # Chunks

    def find(self, namespace: Namespace, key: Key) -> TableChunk | None:
        row = self._find(namespace, key)
        return None if row < 0 else self._chunk(row)

    def _find(self, namespace: Namespace, key: Key) -> int:
        rows = self._rows
        batch = rows.batch(namespace, [key])
        name = int(batch.names[0])
        return int(kernels.find(rows.arrays, batch.keys, 0, name, self.number))

    def _chunk(self, row: int) -> TableChunk:
        rows = self._rows
        slot, generation = int(rows.rows[row, SLOT]), int(rows.words[row, GENERATION])
        return TableChunk(Slot(slot), Generation(generation), self._size_of(row))

    def store(
        self, came: Changes, slot_bytes: Sequence[int], cleared: Generation, *, from_free: bool
    ) -> list[int]:
        rows = self._rows
        batch = rows.batch(came.namespace, came.keys)
        columns = (batch.names, came.slots, came.generations, slot_bytes, batch.names)
        table = np.array(columns, np.int64)
        count = batches.store(
            rows.room_for_chunks(len(came)),
            self._slabs,
            self._pages,
            batch.keys,
            table,
            cleared,
            from_free,
        )
        others: list[int] = table[4, :count].tolist()
        return others

    def hold(self, name: Name, chunk: TableChunk) -> None:
        namespace, key = name
        rows = self._rows
        batch = rows.batch(namespace, [key])
        row = self._row(chunk.slot, chunk.slot_bytes)
        assert rows.rows[row, STATE] in (CLAIMED, LEASED), chunk
        kernels.hold(
            rows.room_for_chunks(1),
            row,
            batch.keys,
            0,
            int(batch.names[0]),
            chunk.generation,
            0,
        )

    def drop(self, namespace: Namespace, key: Key) -> TableChunk | None:
        row = self._find(namespace, key)
        if row < 0:
            return None
        chunk = self._chunk(row)
        self._drop(np.array([row], np.int64))
        return chunk

    def _drop(self, gone: Array) -> None:
        batches.drop(self._rows.arrays, gone)

    def evict(self, slot_bytes: int, count: int, now: float, owner: int = 0) -> list[Changes]:
        rows = self._rows
        # First, since a class that is new makes the arrays grow.
        of_class = self._order_of(slot_bytes, owner)
        arrays = rows.room_for_ghosts(count)
        out = np.empty(count, np.int64)
        count = batches.evict(arrays, of_class, tick_of(now), rows.cursors, out)
        return rows.changes(out[:count], now, with_owners=self._has_owners)

    def evict_keys(self, namespace: Namespace, keys: Sequence[bytes], now: float) -> list[Changes]:
        rows = self._rows
        batch = rows.batch(namespace, keys)
        out = np.empty(len(keys), np.int64)
        arrays = rows.room_for_ghosts(len(keys))
        columns = (batch.keys, batch.names, self.number)
        count = batches.evict_keys(arrays, *columns, tick_of(now), out)
        return rows.changes(out[:count], now, with_owners=self._has_owners)

    def candidates(self, slot_bytes: int, owner: int = 0) -> Iterator[Slot]:
        for part in self._in_order(self._order_of(slot_bytes, owner)):
            yield from self._rows.rows[part, SLOT].tolist()

    def _in_order(self, of_class: int) -> Iterator[Array]:
        """Rows of a class in eviction order, piece by piece; not valid after a change."""
        cursors, out = np.empty(order.NUM_CURSORS, np.int64), np.empty(WALK, np.int64)
        order.begin(self._rows.arrays, of_class, cursors)
        count = WALK
        while count == WALK:
            arrays = self._rows.arrays
            count = order.following(arrays, of_class, NONE, cursors, out)
            yield out[:count].copy()

    def clear(self, namespace: Namespace) -> None:
        number = self._rows.number_of(namespace)
        self._drop(self._held(namespace))
        self._rows.counts[self.number, number] = -1

    def chunks_in(self, slabs: Iterable[int]) -> list[tuple[Name, TableChunk]]:
        found: list[tuple[Name, TableChunk]] = []
        for slab in slabs:
            if 0 <= slab < len(self._slabs) and self._slabs[slab, BASE] >= 0:
                block = self._block(slab)
                rows = np.flatnonzero(self._rows.rows[block, STATE] >= RELEASED) + block.start
                names = self._names(rows)
                chunks = [self._chunk(row) for row in rows.tolist()]
                found += zip(names, chunks, strict=True)
        return found

    def _names(self, rows: Array) -> list[Name]:
        held = self._rows.held(rows)
        return [(space, Key(key)) for space, key in zip(held.namespaces, held.keys, strict=True)]

    # Tenants

    def own(self, slots: Sequence[int], generations: Sequence[int], owners: Sequence[int]) -> None:
        rows = self._rows
        self._has_owners = True
        columns, out = (
            np.array((slots, generations, owners), np.int64),
            np.empty(len(slots), np.int64),
        )
        count = batches.own(rows.arrays, self._slabs, self._pages, columns, out)
        kernels.file_again(rows.arrays, out[:count])

    def set_apart(self, owners: Collection[int]) -> None:
        rows, apart = self._rows, set(owners)
        for size, whole in self._classes.items():
            for owner in sorted(self._apart - apart):
                part = self._parts.pop((size, owner))
                rows.end_part(whole, owner)
                self._file_again(part, owner)
                rows.classes[whole, USED] = max(rows.classes[whole, USED], rows.classes[part, USED])
                rows.give_class(part)
            for owner in sorted(apart - self._apart):
                self._parts[size, owner] = rows.new_part(whole, owner)
                self._file_again(whole, owner)
        self._apart = apart

    def _file_again(self, of_class: int, owner: int) -> None:
        """The chunks that a tenant has in a class go where they belong now."""
        parts = list(self._in_order(of_class))
        found = np.concatenate(parts)
        kernels.file_again(self._rows.arrays, found[self._rows.rows[found, OWNER] == owner])

    def num_held(self, slot_bytes: int, owner: int = 0) -> int:
        of_class = self._order_of(slot_bytes, owner)
        return sum(
            self._rows.count(of_class, state) for state in range(RELEASED, HELD + NUM_QUEUES)
        )

    def can_evict(self, slot_bytes: int, now: float, owner: int = 0) -> bool:
        rows, of_class = self._rows, self._order_of(slot_bytes, owner)
        cursors, out = np.empty(order.NUM_CURSORS, np.int64), np.empty(1, np.int64)
        order.begin(rows.arrays, of_class, cursors)
        return bool(order.following(rows.arrays, of_class, tick_of(now), cursors, out))

    def owned_bytes(self) -> dict[int, int]:
        pages = np.zeros(MAX_OWNERS, np.int64)
        batches.count_owned(self._rows.rows, self._slabs, self._pages, pages)
        owned = np.flatnonzero(pages)
        return dict(zip(owned.tolist(), (pages[owned] * SLOT_ALIGNMENT).tolist(), strict=True))

    # Use

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        rows = self._rows
        batch = rows.batch(namespace, keys)
        batches.touch(rows.arrays, batch.keys, batch.names, self.number)

    def release(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        rows = self._rows
        batch = rows.batch(namespace, keys)
        arrays = rows.room_for_ghosts(len(keys))
        batches.release(arrays, batch.keys, batch.names, self.number)

    def pin(self, namespace: Namespace, keys: Sequence[bytes], until: float) -> None:
        rows = self._rows
        batch = rows.batch(namespace, keys)
        batches.pin(rows.arrays, batch.keys, batch.names, self.number, until_tick(until))

    def protect(self, namespace: Namespace, keys: Sequence[bytes], until: float) -> None:
        rows = self._rows
        batch = rows.batch(namespace, keys)
        batches.protect(rows.arrays, batch.keys, batch.names, self.number, until_tick(until))

    def pinned_slabs(self, now: float) -> set[int]:
        places = self._held()
        pinned = places[self._rows.rows[places, PIN] > tick_of(now)]
        return set((self._rows.rows[pinned, SLOT] // self._pages).tolist())

    def forget_pins(self, now: float) -> None:
        """See `NodeTable.forget_pins`: they are no burden here."""

    def use(self, slot_bytes: int, now: float) -> None:
        of_class, tick = self._class_of(slot_bytes), until_tick(now)
        self._rows.classes[of_class, USED] = max(int(self._rows.classes[of_class, USED]), tick)

    def used_at(self, slot_bytes: int) -> float:
        of_size = [self._class_of(slot_bytes)]
        of_size += [part for (size, _), part in self._parts.items() if size == slot_bytes]
        return int(self._rows.classes[of_size, USED].max()) / TICKS_PER_S

    # Listing

    def sizes(self) -> dict[Namespace, int]:
        return self._rows.sizes(self.number)

    def holds_any(self, namespace: Namespace) -> bool:
        number = self._rows.number_of(namespace)
        return bool(self._rows.counts[self.number, number] > 0)

    def places(self, namespace: Namespace | None = None) -> Any:
        """See `NodeTable.places`: here they are row numbers."""
        return self._held(namespace).astype(np.uint32)

    def _held(self, namespace: Namespace | None = None) -> Array:
        """Rows of all chunks, or of those of a namespace."""
        number = -1 if namespace is None else self._rows.number_of(namespace)
        out = np.empty(sum(max(size, 0) for size in self.sizes().values()), np.int64)
        count = batches.scan(self._rows.rows, self._slabs, self._pages, number, out)
        return out[:count]

    def held_at(self, places: Any, namespace: Namespace | None = None) -> Held:
        rows = self._rows
        places = np.asarray(places, np.int64)
        is_held = rows.rows[places, STATE] >= RELEASED
        # A block of rows may have gone to another node.
        is_held &= rows.classes[rows.rows[places, CLASS], NODE] == self.number
        if namespace is not None:
            is_held &= rows.is_of(places, namespace)
        return rows.held(places[is_held])

    def places_from(self, first: Slot, most: int, namespace: Namespace | None = None) -> Stretch:
        number_of_slab, rest = divmod(first, self._pages)
        with_size = np.flatnonzero(self._slabs[number_of_slab:, BASE] >= 0)
        if not len(with_size):
            return Stretch([], 0, None)
        slab = number_of_slab + int(with_size[0])
        base, _, stride = self._slabs[slab].tolist()
        length = self._pages // stride
        start = 0 if slab > number_of_slab else min(-(-rest // stride), length)
        end = min(start + most, length)
        rows = np.flatnonzero(self._rows.rows[base + start : base + end, STATE] >= RELEASED)
        rows += base + start
        if namespace is not None:
            rows = rows[self._rows.is_of(rows, namespace)]
        following = slab * self._pages + end * stride if end < length else (slab + 1) * self._pages
        is_last = following >= len(self._slabs) * self._pages
        return Stretch(rows, end - start, None if is_last else Slot(following))

    def uses_at(self, places: Any) -> Uses:
        return self._rows.uses(np.asarray(places, np.int64))

    def spares(self) -> list[Name]:
        walks = [
            self._walks(of_class, state)
            for of_class in self._all_classes()
            for state in (RELEASED, SPARE)
        ]
        places = [part[self._rows.is_shared(part)] for parts in walks for part in parts]
        return [name for part in places for name in self._names(part)]

    def check(self) -> None:
        rows = self._rows
        assert self._parts.keys() == {(s, o) for s in self._classes for o in self._apart}
        for size, of_class in self._classes.items():
            slabs = np.flatnonzero(self._slabs[:, SLAB_CLASS] == of_class)
            blocks = [self._block(slab) for slab in slabs.tolist()]
            own = {row for block in blocks for row in range(block.start, block.stop)}
            listed = self._listed(of_class, FREE)
            for owner in self._apart:
                part = self._listed(self._parts[size, owner], RELEASED)
                assert all(rows.rows[row, OWNER] == owner for row in part), (size, owner)
                listed += part
            assert len(set(listed)) == len(listed), size
            claimed = {row for row in own if rows.rows[row, STATE] == CLAIMED}
            assert set(listed) | claimed == own, size
            slots = [self._row(int(rows.rows[row, SLOT])) for row in listed]
            assert slots == listed, size
            whole = [row for row in listed if rows.rows[row, CLASS] == of_class]
            held = [row for row in whole if rows.rows[row, STATE] >= RELEASED]
            assert not self._apart.intersection(rows.rows[held, OWNER].tolist()), size
        counts = {name: len(self.places(name)) for name in self.sizes()}
        assert counts == self.sizes(), counts

    def _listed(self, of_class: int, first_state: int) -> list[int]:
        """All rows of a class, in states from one on."""
        listed: list[int] = []
        for state in range(first_state, HELD + NUM_QUEUES):
            rows = [row for part in self._walks(of_class, state) for row in part.tolist()]
            assert len(rows) == self._rows.count(of_class, state), (of_class, state)
            assert all(self._rows.rows[row, STATE] == state for row in rows), (of_class, state)
            assert all(self._rows.rows[row, CLASS] == of_class for row in rows), (of_class, state)
            listed += rows
        return listed
