"""The directory's book of one node's pool: which slot is free, leased or held, and by what.

            lend                      hold
   free ────────────► leased ───────────────► held
     ▲                   │ end_lease            │
     └───────────────────┴──────────────────────┘ drop, eviction

The slots themselves are in a table (`table/protocol.py`); this module knows which slab has which
slot size, which reports about a slot to believe, and who is informed. Chunks that were released are
given up first, then those that another node has too, the others by the policy, and with each those
that serve no prefix any more.
A slot size gets slabs from others up to its fair share, and all there are from one that lies idle.

Invariants:
1. Per slot size: free + leased + held slots are all slots of the slabs of that size.
2. A slot is leased to one engine at most, and a leased slot holds no chunk.
3. A slab has one slot size, or none and is listed as free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from raykv.base.clearings import Clearings
from raykv.base.ids import NO_GENERATION, EngineId, Generation, Key, Namespace, Slot
from raykv.base.shares import Share
from raykv.directory.table.dicts import DictNodeTable
from raykv.directory.table.protocol import (
    NOBODY,
    Changes,
    Lease,
    Name,
    NodeTable,
    TableChunk,
)
from raykv.directory.tenants.pool import SharedPool
from raykv.prompts.prefixes import companions
from raykv.protocol.columns import Handles, Leases
from raykv.protocol.descriptions import ChunkGroup

IDLE_S = 60.0
"""Chunks of a slot size that nobody has stored or loaded for so long must make room for others."""


class PoolBook:
    """See the module's docstring.

    Args:
        table: of the node's slots, with nothing in it.
        on_changes: called with all chunks that come or go, except those that are cleared.
        give_way: has chunks of a slot size that are kept by preference be evicted all the same,
            when nothing else is left: returns how many.
        groups_of: the KV groups of a namespace, as far as they are known.
    """

    def __init__(
        self,
        table: NodeTable,
        on_changes: Callable[[Changes], None],
        give_way: Callable[[int, int], int] = lambda _slot_bytes, _count: 0,
        groups_of: Callable[[Namespace], Sequence[ChunkGroup]] = lambda _namespace: (),
    ) -> None:
        self.table: NodeTable = table
        self.geometry = table.geometry
        self._on_changes = on_changes
        self._free_slabs = list(range(self.geometry.num_slabs - 1, -1, -1))
        self._slabs: dict[int, set[int]] = {}
        # The lowest generation that may be stored in a slab after it had other slot sizes.
        self._floors: dict[int, Generation] = {}
        self._give_way = give_way
        self._groups_of = groups_of
        # None while no tenant has a quota.
        self._shared: SharedPool | None = None
        self._shares: Mapping[int, Share] = {}

    # Looking

    def find(self, namespace: Namespace, key: Key) -> TableChunk | None:
        """The chunk of that name, if it is held."""
        return self.table.find(namespace, key)

    def names(self) -> list[Name]:
        """All chunks; for tests."""
        held = self.table.held_at(self.table.places())
        return [(space, Key(key)) for space, key in zip(held.namespaces, held.keys, strict=True)]

    @property
    def num_chunks(self) -> int:
        """Chunks of all namespaces."""
        return sum(self.table.sizes().values())

    @property
    def num_free(self) -> int:
        """Free slots in slabs that have a slot size already."""
        return sum(self.table.num_free(size) for size in self._slabs)

    # Chunks

    def hold(self, name: Name, chunk: TableChunk) -> None:
        """Learn of a chunk whose slot is claimed, or was leased for it."""
        namespace, key = name
        self.drop(namespace, key, replaced=True)
        self.table.hold(name, chunk)
        self._on_changes(Changes(True, namespace, [key], [chunk.slot], [chunk.generation]))

    def store(
        self, came: Changes, slot_bytes: Sequence[int], cleared: Generation, *, from_free: bool
    ) -> list[int]:
        """Learn of all chunks that need no thought; see `NodeTable.store`."""
        # The table gives up what it is told of first: that is to be the tail of a prompt.
        tail_first = came.reversed()
        others = self.table.store(tail_first, slot_bytes[::-1], cleared, from_free=from_free)
        if others:
            others = [len(came) - 1 - number for number in reversed(others)]
            skipped = set(others)
            came = came.at([number for number in range(len(came)) if number not in skipped])
        if len(came):
            self._on_changes(came)
        return others

    def release(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Nobody will miss these chunks: they are evicted next; see `NodeTable.release`."""
        self.table.release(namespace, keys)

    def drop(self, namespace: Namespace, key: Key, *, replaced: bool = False) -> None:
        """Forget a chunk and free its slot; nothing if it is not held."""
        chunk = self.table.drop(namespace, key)
        if chunk is not None:
            slots, generations = [chunk.slot], [chunk.generation]
            self._on_changes(Changes(False, namespace, [key], slots, generations, replaced))

    def drop_all(self, namespace: Namespace, refused: Handles) -> None:
        """Forget chunks that the node does not have, where they are still believed in."""
        for key, generation in zip(refused.keys, refused.generations, strict=True):
            chunk = self.find(namespace, Key(key))
            if chunk is not None and chunk.generation == generation:
                self.drop(namespace, Key(key))

    def drop_cleared(self, cleared: Clearings) -> None:
        """Forget every chunk that is void; takes as long as there are chunks."""
        held = self.table.held_at(list(self.table.places()))
        rows = [
            row
            for row, name in enumerate(held.namespaces)
            if cleared.cover(name, held.generations[row])
        ]
        keys = list(held.keys) if rows else []
        for namespace, some in _by_namespace(held.namespaces, rows).items():
            gone = Changes(
                False,
                namespace,
                [keys[row] for row in some],
                [held.slots[row] for row in some],
                [held.generations[row] for row in some],
            )
            for key in gone.keys:
                self.table.drop(namespace, Key(key))
            self._on_changes(gone)

    def drop_overwritten(self, writes: Iterable[TableChunk]) -> None:
        """Forget what cannot be there any more because its place was given to one of `writes`.

        A place is the slot itself, and the whole slab if that has got another slot size.
        """
        slots: dict[Slot, Generation] = {}
        slabs: dict[int, TableChunk] = {}
        for chunk in sorted(writes, key=lambda chunk: chunk.generation):
            slots[chunk.slot] = chunk.generation
            slabs[self.geometry.slab_of(chunk.slot)] = chunk
        if not slots:
            return
        for name, chunk in self.table.chunks_in(slabs):
            if self._is_overwritten(chunk, slots, slabs):
                self.drop(*name)

    def _is_overwritten(
        self, chunk: TableChunk, slots: dict[Slot, Generation], slabs: dict[int, TableChunk]
    ) -> bool:
        newest = slabs.get(self.geometry.slab_of(chunk.slot))
        if newest is not None and newest.slot_bytes != chunk.slot_bytes:
            return chunk.generation < newest.generation
        return chunk.generation < slots.get(chunk.slot, NO_GENERATION)

    # Places

    def claim_place(self, chunk: TableChunk) -> bool:
        """Take a certain slot out of the free ones; False if it is not free. Its slab changes its
        slot size if nothing else is in it.
        """
        if not self.geometry.is_place(chunk.slot, chunk.slot_bytes):
            return False
        self._claim_slab(self.geometry.slab_of(chunk.slot), chunk.slot_bytes)
        if self.table.lowest(chunk.slot, chunk.slot_bytes) is None:
            return False
        self.table.claim(chunk.slot, chunk.slot_bytes)
        return True

    def claim_slabs(self, slots: Sequence[int], slot_bytes: Sequence[int]) -> None:
        """Prepare the unused slabs of many slots; the first to name a slab sets its slot size."""
        seen: set[int] = set()
        for slot, size in zip(slots, slot_bytes, strict=True):
            slab = self.geometry.slab_of(Slot(slot))
            if slab not in seen and self.geometry.is_place(Slot(slot), size):
                seen.add(slab)
                if slab in self._free_slabs:
                    self._claim_slab(slab, size)

    def _claim_slab(self, slab: int, slot_bytes: int) -> None:
        if slab in self._slabs_of(slot_bytes):
            return
        if slab in self._free_slabs:
            self._free_slabs.remove(slab)
            self._give_slab(slot_bytes, slab)
        for other in list(self._slabs):
            if other != slot_bytes and self._is_unused(other, slab):
                self._take_slab(other, slab)
                self._give_slab(slot_bytes, slab)

    def _is_unused(self, slot_bytes: int, slab: int) -> bool:
        """Whether the slab has that slot size, and all slots of it are free."""
        slots = self.geometry.slots_of(slab, slot_bytes)
        return slab in self._slabs[slot_bytes] and all(
            self.table.lowest(slot, slot_bytes) is not None for slot in slots
        )

    def adopt(self, name: Name, chunk: TableChunk) -> None:
        """Hold a chunk that was stored without a lease that we know of, if its slot is free and
        nothing newer was ever there.
        """
        if self.may_come(chunk) and self.claim_place(chunk):
            self.hold(name, chunk)

    def outlive(self, chunk: TableChunk) -> None:
        """A free slot has had a chunk that nobody needs: no earlier lease of it is valid."""
        if self.may_come(chunk) and self.claim_place(chunk):
            self.table.unclaim(chunk.slot, chunk.slot_bytes, Generation(chunk.generation + 1))

    def may_come(self, chunk: TableChunk) -> bool:
        """Whether nothing newer was in a chunk's place, nor this chunk itself."""
        lowest = self.table.lowest(chunk.slot, chunk.slot_bytes)
        return lowest is None or lowest <= chunk.generation

    def is_settled(self, chunk: TableChunk) -> bool:
        """Whether it is known that a chunk's place holds nothing older: it is leased, or free."""
        if self.table.lowest(chunk.slot, chunk.slot_bytes) is not None:
            return True
        return self.is_leased_at(chunk.slot, chunk.generation)

    # Leases

    def leases(self) -> dict[Slot, Lease]:
        """All of them; a copy."""
        return self.table.leases()

    def is_leased_to(self, engine_id: EngineId, slot: Slot) -> bool:
        """Whether the engine has a lease of the slot."""
        lease = self.table.lease_of(slot)
        return lease is not None and lease.engine_id == engine_id

    def is_leased_at(self, slot: Slot, generation: int) -> bool:
        """Whether a slot is leased at exactly that generation."""
        return self.table.is_leased_at(slot, generation)

    def lease_at(self, slot: Slot, generation: int) -> Lease | None:
        """The lease of a slot, if it is still at that generation."""
        lease = self.table.lease_of(slot)
        return lease if lease is not None and lease.generation == generation else None

    def end_lease(self, slot: Slot, lease: Lease) -> None:
        """The lease ended without a chunk: the slot is free."""
        self.table.end_lease(slot, lease.generation)

    def take_back(self, leases: Leases) -> None:
        """Leases that are given back; those that are over already don't matter."""
        for slot, generation in zip(leases.slots, leases.generations, strict=True):
            lease = self.lease_at(Slot(slot), generation)
            if lease is not None:
                self.end_lease(Slot(slot), lease)

    def end_older_lease(self, chunk: TableChunk) -> None:
        """A lease that is older than what was stored in its slot is void."""
        lease = self.table.lease_of(chunk.slot)
        if lease is not None and lease.generation < chunk.generation:
            self.end_lease(chunk.slot, lease)

    def end_leases(self, engine_id: EngineId) -> None:
        """All leases of an engine are over."""
        for slot, lease in self.leases().items():
            if lease.engine_id == engine_id:
                self.end_lease(slot, lease)

    def make_room(self, slot_bytes: int, count: int, now: float) -> None:
        """Free up to `count` slots: those of unused slabs, then by eviction."""
        self.table.use(slot_bytes, now)
        while self.table.num_free(slot_bytes) < count and self._free_slabs:
            self._give_slab(slot_bytes, self._free_slabs.pop())
        # Nobody goes below its guarantee as long as something else is left.
        for may_go_below in (True,) if self._shared is None else (False, True):
            if may_go_below and self._shared and self._shared.has_more_soon(slot_bytes, now):
                break
            self._evict(slot_bytes, count, now, may_go_below=may_go_below)
            while self.table.num_free(slot_bytes) < count and self._reclaim_slab(
                slot_bytes, now, may_go_below=may_go_below
            ):
                pass
        missing = count - self.table.num_free(slot_bytes)
        if missing > 0 and self._give_way(slot_bytes, missing):
            self._evict(slot_bytes, count, now, may_go_below=self._shared is None)

    def _evict(self, slot_bytes: int, count: int, now: float, *, may_go_below: bool = True) -> None:
        # One chunk may take those of all other KV groups along.
        most = max((len(self._groups_of(name)) for name in self.table.sizes()), default=1)
        while (missing := count - self.table.num_free(slot_bytes)) > 0:
            wanted = -(-missing // max(1, most))
            if self._shared is None:
                evicted = self.table.evict(slot_bytes, wanted, now)
            else:
                some = self._shared.evict(slot_bytes, wanted, now, may_go_below=may_go_below)
                evicted = [changes for each in some for changes in each]
            if not evicted:
                break
            for changes in evicted:
                self._gave_up(changes, now)

    def share(self, shares: Mapping[int, Share]) -> None:
        """Tenants have these shares of the pool from now on, by number; all others none."""
        self._shares = shares
        self._set_apart()

    def _set_apart(self) -> None:
        self.table.set_apart(self._shares.keys() - {NOBODY})
        self._shared = (
            SharedPool(self.table, self._shares, self._slabs.keys()) if self._shares else None
        )

    def trim(self, now: float) -> None:
        """Evict what tenants have above their greatest shares."""
        for some in () if self._shared is None else self._shared.trim(now):
            for changes in some:
                self._gave_up(changes, now)

    def _gave_up(self, changes: Changes, now: float) -> None:
        """Chunks were evicted: so are those that serve no prefix without them."""
        self._on_changes(changes)
        groups = self._groups_of(changes.namespace)
        if len(groups) > 1:
            others = companions(groups, changes.keys)
            for more in self.table.evict_keys(changes.namespace, others, now):
                self._on_changes(more)

    def move_to(self, table: NodeTable) -> None:
        """Go on with another table, an empty one of the same pool; this one is of dicts."""
        assert isinstance(self.table, DictNodeTable), self.table
        for slot_bytes, slabs in self._slabs.items():
            for slab in slabs:
                table.give_slab(slab, slot_bytes, self._floors.get(slab, NO_GENERATION))
        self.table.pour_into(table)
        self.table = table
        self._set_apart()

    # Slabs

    def _reclaim_slab(self, slot_bytes: int, now: float, *, may_go_below: bool) -> bool:
        """Move one slab here: from a class that lies idle, else from one that has more than its
        fair share while this one has less; False if there is none. No tenant goes below its
        guarantee for it, unless it may.
        """
        others = [size for size, slabs in self._slabs.items() if size != slot_bytes and slabs]
        share = self.geometry.num_slabs // (len(others) + 1)
        idle = [size for size in others if now - self.table.used_at(size) > IDLE_S]
        if not idle and (not others or len(self._slabs_of(slot_bytes)) >= share):
            return False
        donor = max(idle or others, key=lambda size: len(self._slabs[size]))
        leased = {self.geometry.slab_of(slot) for slot in self.leases()}
        movable = self._slabs[donor] - leased - self.table.pinned_slabs(now)
        if self._shared is not None and not may_go_below:
            places = {slab: self._places_in(donor, slab) for slab in movable}
            movable = {slab for slab in movable if self._shared.is_free_to_take(places[slab])}
        if not movable:
            return False
        slab = self._oldest_slab(donor, movable)
        self._evict_slab(donor, slab, now)
        self._take_slab(donor, slab)
        self._give_slab(slot_bytes, slab)
        return True

    def _oldest_slab(self, donor: int, movable: set[int]) -> int:
        """One without chunks, else that of the chunk which is the first to be given up."""
        held: set[int] = set()
        first: int | None = None
        order = self.table if self._shared is None else self._shared
        for slot in order.candidates(donor):
            slab = self.geometry.slab_of(slot)
            held.add(slab)
            if first is None and slab in movable:
                first = slab
            if first is not None and movable <= held:
                break
        empty = movable - held
        if empty:
            return min(empty)
        assert first is not None, movable
        return first

    def _places_in(self, slot_bytes: int, slab: int) -> list[Any]:
        """Places of all that a slab holds."""
        slots = self.geometry.slots_of(slab, slot_bytes)
        return list(self.table.places_from(slots[0], len(slots)).places)

    def _evict_slab(self, slot_bytes: int, slab: int, now: float) -> None:
        """Evict all that a slab holds."""
        places = self._places_in(slot_bytes, slab)
        if not places:
            return
        held, uses = self.table.held_at(places), self.table.uses_at(places)
        keys = list(held.keys)
        for namespace, rows in _by_namespace(held.namespaces, range(len(held))).items():
            gone = Changes(
                False,
                namespace,
                [keys[row] for row in rows],
                [held.slots[row] for row in rows],
                [held.generations[row] for row in rows],
                hits=[uses.hits[row] for row in rows],
                ages=[max(0.0, now - uses.stored_at[row]) for row in rows],
                owners=[uses.owners[row] for row in rows],
            )
            for key in gone.keys:
                self.table.drop(namespace, Key(key))
            self._gave_up(gone, now)

    def _take_slab(self, donor: int, slab: int) -> None:
        """Take a slab, all of whose slots are free, out of its class."""
        self._slabs[donor].remove(slab)
        highest = self.table.take_slab(slab, donor)
        self._floors[slab] = max(self._floors.get(slab, NO_GENERATION), highest)

    def _slabs_of(self, slot_bytes: int) -> set[int]:
        return self._slabs.setdefault(slot_bytes, set())

    def _give_slab(self, slot_bytes: int, slab: int) -> None:
        self._slabs_of(slot_bytes).add(slab)
        self.table.give_slab(slab, slot_bytes, self._floors.get(slab, NO_GENERATION))

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        self.table.check()
        slabs = [*self._free_slabs, *(slab for some in self._slabs.values() for slab in some)]
        assert sorted(slabs) == list(range(self.geometry.num_slabs)), slabs
        held = self.table.held_at(self.table.places())
        sizes = [*held.slot_bytes, *(lease.slot_bytes for lease in self.leases().values())]
        for size, some in self._slabs.items():
            total = len(some) * self.geometry.slots_per_slab(size)
            count = sizes.count(size) + self.table.num_free(size)
            assert count == total, (size, count, total)


def _by_namespace(
    namespaces: Sequence[Namespace], rows: Iterable[int]
) -> dict[Namespace, list[int]]:
    """Some rows, by namespace."""
    found: dict[Namespace, list[int]] = {}
    for row in rows:
        found.setdefault(namespaces[row], []).append(row)
    return found
