"""Where in a pool there is room: slabs, the slots in them, and the records that have one.

A slab holds slots of one size at a time. A slot belongs to a record from `place` to `give_back`,
whatever the index says of it meanwhile.

Invariants:
1. A slab is in the class of its slot size, or it is free; one of which no slot is taken is free,
   unless it is the last of its class.
2. The slots of a slab lie inside it, at multiples of their size, and each has one record at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Slot
from raykv.node.pool.records import ChunkRecord

MOST_SIZES = 256
"""Slot sizes in one pool at a time."""


class _CutSlab:
    """`records[i]` has the i-th slot; `free` are the others."""

    __slots__ = ("free", "records", "slot_bytes", "slots")

    def __init__(self, slots: list[Slot], slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self.records: list[ChunkRecord | None] = [None] * len(slots)
        # The lowest is the last, and taken first.
        self.free = list(range(len(slots) - 1, -1, -1))

    @property
    def is_unused(self) -> bool:
        return len(self.free) == len(self.slots)


class Places:
    """See the module's docstring."""

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self._slabs: dict[int, _CutSlab] = {}
        self._free_slabs = list(range(geometry.num_slabs - 1, -1, -1))
        # By slot size, all slabs of that class; and those of them that have a free slot, in the
        # order in which they are used up.
        self._classes: dict[int, dict[int, _CutSlab]] = {}
        self._open: dict[int, dict[int, _CutSlab]] = {}

    def place(self, record: ChunkRecord) -> bool:
        """Give a record a free slot of its size, in a slab of that class or in one that was free;
        False if there is none. The size fits into a slab.
        """
        slabs = self._open.get(record.slot_bytes)
        if not slabs:
            if not self._free_slabs:
                return False
            slabs = self._cut(self._free_slabs.pop(), record.slot_bytes)
        index, slab = next(iter(slabs.items()))
        position = slab.free.pop()
        record.slot = slab.slots[position]
        slab.records[position] = record
        if not slab.free:
            del slabs[index]
        return True

    def restore(self, records: Iterable[ChunkRecord]) -> list[ChunkRecord]:
        """Give records the slots that they say, in a pool that was not used yet; returns those that
        can't be there, or not beside an earlier one.
        """
        refused, restored = [], set[int]()
        for record in records:
            index = self.geometry.slab_of(record.slot)
            if not self.geometry.is_place(record.slot, record.slot_bytes):
                refused.append(record)
                continue
            if index not in self._slabs:
                self._free_slabs.remove(index)
                self._cut(index, record.slot_bytes)
                restored.add(index)
            slab = self._slabs[index]
            position = record.slot * SLOT_ALIGNMENT % self.geometry.slab_bytes // slab.slot_bytes
            if slab.slot_bytes != record.slot_bytes or slab.records[position] is not None:
                refused.append(record)
                continue
            slab.records[position] = record
        for index in restored:
            slab = self._slabs[index]
            slab.free = [at for at in slab.free if slab.records[at] is None]
            if not slab.free:
                del self._open[slab.slot_bytes][index]
        return refused

    def give_back(self, record: ChunkRecord) -> None:
        """The slot of a record is free."""
        index, inside = divmod(record.slot * SLOT_ALIGNMENT, self.geometry.slab_bytes)
        slab, position = self._slabs[index], inside // record.slot_bytes
        assert slab.records[position] is record, (position, record)
        slab.records[position] = None
        slab.free.append(position)
        self._open[record.slot_bytes][index] = slab
        if slab.is_unused and len(self._classes[record.slot_bytes]) > 1:
            self._uncut(index)

    def give_slab(self, index: int) -> None:
        """A slab of which no slot is taken is free, though it be the last of its class."""
        assert self._slabs[index].is_unused, index
        self._uncut(index)

    def _cut(self, index: int, slot_bytes: int) -> dict[int, _CutSlab]:
        """Have a free slab hold slots of a size; returns the open ones of its class."""
        slab = _CutSlab(self.geometry.slots_of(index, slot_bytes), slot_bytes)
        self._slabs[index] = slab
        self._classes.setdefault(slot_bytes, {})[index] = slab
        slabs = self._open.setdefault(slot_bytes, {})
        slabs[index] = slab
        return slabs

    def _uncut(self, index: int) -> None:
        size = self._slabs.pop(index).slot_bytes
        del self._classes[size][index], self._open[size][index]
        if not self._classes[size]:
            del self._classes[size], self._open[size]
        self._free_slabs.append(index)

    def takes(self, slot_bytes: int) -> bool:
        """Whether there may be slots of a size."""
        return slot_bytes in self._classes or len(self._classes) < MOST_SIZES

    # Looking

    def classes(self) -> dict[int, int]:
        """How many slabs each slot size has."""
        return {size: len(slabs) for size, slabs in self._classes.items()}

    def slabs_of(self, slot_bytes: int) -> list[int]:
        """The slabs of that class."""
        return list(self._classes.get(slot_bytes, ()))

    def records_in(self, index: int) -> list[ChunkRecord]:
        """The records that have a slot in a slab."""
        return [record for record in self._slabs[index].records if record is not None]

    def records_from(self, place: int, most: int) -> tuple[list[ChunkRecord], int]:
        """Records from a place on, in the order of their places, of at most `most` slots; and the
        place to go on at, -1 at the end.

        A walk meets each record that stays in its slot once, whatever comes and goes meanwhile.
        """
        index, position = divmod(place, 1 << 32)
        found: list[ChunkRecord] = []
        while index < self.geometry.num_slabs and most > 0:
            slab = self._slabs.get(index)
            records = [] if slab is None else slab.records[position : position + most]
            found += [each for each in records if each is not None]
            most -= len(records)
            position += len(records)
            if slab is None or position >= len(slab.records):
                index, position = index + 1, 0
        return found, (index << 32) + position if index < self.geometry.num_slabs else -1

    def __iter__(self) -> Iterator[ChunkRecord]:
        """All records that have a slot."""
        for index in list(self._slabs):
            yield from self.records_in(index)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._classes.keys() == self._open.keys()
        assert len(self._classes) <= MOST_SIZES
        cut = {index for slabs in self._classes.values() for index in slabs}
        assert cut == self._slabs.keys(), (cut, self._slabs)
        assert sorted([*cut, *self._free_slabs]) == list(range(self.geometry.num_slabs))
        for index, slab in self._slabs.items():
            taken = [at for at, record in enumerate(slab.records) if record is not None]
            assert sorted([*taken, *slab.free]) == list(range(len(slab.slots))), index
            assert (index in self._open[slab.slot_bytes]) == bool(slab.free), index
            assert not slab.is_unused or len(self._classes[slab.slot_bytes]) == 1, index
            for position in taken:
                record = slab.records[position]
                assert record is not None
                assert (record.slot, record.slot_bytes) == (slab.slots[position], slab.slot_bytes)
