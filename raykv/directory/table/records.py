"""What became of the chunks of one node, and in which slab each is: a part of the table of dicts.

Invariant: exactly the chunks that the node holds have a record, and are listed in their slab.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Namespace, Slot
from raykv.directory.table.protocol import Name, Stretch


@dataclass(slots=True)
class Clock:
    """The present time, for all nodes."""

    now: float = 0.0


@dataclass(slots=True)
class Record:
    """A chunk since it came."""

    slot: Slot
    stored_at: float
    used_at: float
    hits: int = 0
    owner: int = 0


class Records:
    """The records of one node, whose pool has that geometry; all nodes share the clock."""

    def __init__(self, geometry: PoolGeometry, clock: Clock) -> None:
        self._geometry = geometry
        self._clock = clock
        self._records: dict[Name, Record] = {}
        self._slabs: dict[int, set[Name]] = {}

    def came(self, name: Name, slot: Slot, owner: int = 0) -> None:
        """A chunk is held from now on."""
        now = self._clock.now
        self._records[name] = Record(slot, now, now, owner=owner)
        self._slabs.setdefault(self._geometry.slab_of(slot), set()).add(name)

    def went(self, name: Name) -> None:
        """A chunk is held no longer."""
        record = self._records.pop(name)
        self._slabs[self._geometry.slab_of(record.slot)].remove(name)

    def used(self, name: Name) -> None:
        """A chunk that is held was used."""
        record = self._records[name]
        record.used_at = self._clock.now
        record.hits += 1

    def of(self, name: Name) -> Record:
        """The record of a chunk that is held."""
        return self._records[name]

    def by_slot(self, slots: Iterable[int]) -> dict[Slot, Name]:
        """What is in some slots, and others near them."""
        slabs = {self._geometry.slab_of(Slot(slot)) for slot in slots}
        return {self._records[name].slot: name for name in self.in_slabs(slabs)}

    def owned(self) -> Iterator[tuple[Name, int]]:
        """All chunks and their owners."""
        return ((name, record.owner) for name, record in self._records.items())

    def in_slabs(self, slabs: Iterable[int]) -> list[Name]:
        """All chunks in some slabs."""
        return [name for slab in set(slabs) for name in self._slabs.get(slab, ())]

    def stretch(self, first: Slot, most: int, namespace: Namespace | None) -> Stretch:
        slabs = range(self._geometry.slab_of(first), self._geometry.num_slabs)
        slab = next((slab for slab in slabs if self._slabs.get(slab)), None)
        if slab is None:
            return Stretch([], 0, None)
        there = sorted((self._records[name].slot, name) for name in self._slabs[slab])
        rest = [(slot, name) for slot, name in there if slot >= first]
        places = [name for _, name in rest[:most] if namespace in (None, name[0])]
        if len(rest) > most:
            return Stretch(places, most, rest[most][0])
        if slab + 1 == self._geometry.num_slabs:
            return Stretch(places, len(rest), None)
        following = Slot((slab + 1) * self._geometry.slab_bytes // SLOT_ALIGNMENT)
        return Stretch(places, len(rest), following)

    def check(self, held: dict[Name, Slot]) -> None:
        """Assert the invariant, given all chunks that the node holds."""
        assert {name: record.slot for name, record in self._records.items()} == held
        listed = [(name, slab) for slab, names in self._slabs.items() for name in names]
        slabs = {name: self._geometry.slab_of(slot) for name, slot in held.items()}
        assert sorted(listed) == sorted(slabs.items()), (listed, slabs)
