"""The directory's book of one node's pool: which slot is free, leased or held, and by what.

            grant                     hold
   free ────────────► leased ───────────────► held
     ▲                   │ end_lease            │
     └───────────────────┴──────────────────────┘ drop, eviction

Chunks that another node has too (`set_spare`) are given up first, in the order of their last use,
then the others as the policy says. For the policy, a chunk that becomes a spare is
evicted, so that it may remember how often it was used. A slot size gets slabs from others up to its
fair share, and all there are from one that lies idle.

Invariants:
1. Per slot size: free + leased + held slots are all slots of the slabs of that size.
2. A slot is leased to one engine at most, and a leased slot holds no chunk.
3. The eviction policies hold exactly the chunks that the book holds, each in one of the two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from raykv.core.geometry import PoolGeometry
from raykv.core.policy import LRU, POLICIES, EvictionPolicy
from raykv.types import NO_GENERATION, EngineId, Generation, Key, Namespace, Slot

Name = tuple[Namespace, Key]
"""What a chunk is called in the whole cluster."""


IDLE_S = 60.0
"""Chunks of a slot size that nobody has stored or loaded for so long must make room for others."""


@dataclass(frozen=True)
class Chunk:
    """A replica that the directory believes in."""

    slot: Slot
    generation: Generation
    slot_bytes: int


@dataclass(frozen=True)
class Lease:
    """A free slot granted to an engine."""

    engine_id: EngineId
    group: int
    generation: Generation
    slot_bytes: int


@dataclass(frozen=True)
class Change:
    """A chunk that came (`stored`) or went: one line of an engine's mirror."""

    stored: bool
    key: Key
    slot: Slot
    generation: Generation


@dataclass(slots=True)
class _SlotClass:
    """All slabs of one slot size; `free` has the longest free slot first, each with the lowest
    generation that may still be stored there.

    `spares` orders the chunks that another node has too, `policy` all others.
    """

    slot_bytes: int
    policy: EvictionPolicy[tuple[str, bytes]]
    spares: LRU[tuple[str, bytes]]
    slabs: set[int] = field(default_factory=set)
    free: OrderedDict[Slot, Generation] = field(default_factory=OrderedDict)
    # When slots were last asked for, or chunks pinned for a load.
    used_at: float = 0.0

    def release(self, slot: Slot, lowest: Generation) -> None:
        assert slot not in self.free, slot
        self.free[slot] = lowest

    def forget(self, name: Name) -> None:
        self.policy.remove(name)
        self.spares.remove(name)

    def evict(self, name: Name) -> None:
        """The chunk is given up for lack of room; `forget` has nothing left to do."""
        self.policy.evicted(name)
        self.spares.evicted(name)

    def candidates(self) -> Iterator[tuple[str, bytes]]:
        """The first to give up first; not valid after a change."""
        return chain(self.spares.candidates(), self.policy.candidates())


class PoolBook:
    """See the module's docstring.

    Args:
        geometry: of the node's pool.
        eviction_policy: a name in `POLICIES`.
        on_change: told of every chunk that comes or goes.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        eviction_policy: str,
        on_change: Callable[[Namespace, Change], None],
    ) -> None:
        self.geometry = geometry
        self.leases: dict[Slot, Lease] = {}
        self._eviction_policy = eviction_policy
        self._on_change = on_change
        self._free_slabs = list(range(geometry.num_slabs - 1, -1, -1))
        self._classes: dict[int, _SlotClass] = {}
        self._chunks: dict[Namespace, dict[Key, Chunk]] = {}
        # The lowest generation that may be stored in a slab after it had other slot sizes.
        self._floors: dict[int, Generation] = {}
        # Chunks that are about to be loaded, and until when they are not evicted.
        self._pinned: dict[Name, float] = {}

    # Looking

    def find(self, namespace: Namespace, key: Key) -> Chunk | None:
        """The chunk of that name, if it is held."""
        return self._chunks.get(namespace, {}).get(key)

    def keys(self, namespace: Namespace) -> list[Key]:
        """All keys of a namespace."""
        return list(self._chunks.get(namespace, {}))

    def names(self) -> list[Name]:
        """All chunks."""
        return [(name, key) for name, chunks in self._chunks.items() for key in chunks]

    def holds_any(self, namespace: Namespace) -> bool:
        """Whether there is a chunk of the namespace."""
        return bool(self._chunks.get(namespace))

    def sizes(self) -> dict[Namespace, int]:
        """Chunks by namespace."""
        return {name: len(chunks) for name, chunks in self._chunks.items()}

    @property
    def num_chunks(self) -> int:
        """Chunks of all namespaces."""
        return sum(len(chunks) for chunks in self._chunks.values())

    @property
    def num_free(self) -> int:
        """Free slots in slabs that have a slot size already."""
        return sum(len(c.free) for c in self._classes.values())

    # Chunks

    def hold(self, name: Name, chunk: Chunk) -> None:
        """Learn of a chunk whose slot is neither free nor leased any more."""
        namespace, key = name
        self.drop(namespace, key)
        self._chunks.setdefault(namespace, {})[key] = chunk
        self._class_of(chunk.slot_bytes).policy.add(name)
        self._on_change(namespace, Change(True, key, chunk.slot, chunk.generation))

    def drop(self, namespace: Namespace, key: Key) -> None:
        """Forget a chunk and free its slot; nothing if it is not held."""
        chunk = self._chunks.get(namespace, {}).pop(key, None)
        if chunk is None:
            return
        self._class_of(chunk.slot_bytes).forget((namespace, key))
        self.release(chunk)
        self._on_change(namespace, Change(False, key, chunk.slot, chunk.generation))

    def release(self, chunk: Chunk) -> None:
        """A slot that has had a chunk, and is neither leased nor holds it any more, is free."""
        self._class_of(chunk.slot_bytes).release(chunk.slot, Generation(chunk.generation + 1))

    def set_spare(self, name: Name, is_spare: bool) -> None:
        """Whether another node has the chunk too; nothing if it is not held here."""
        chunk = self.find(*name)
        if chunk is None:
            return
        slot_class = self._class_of(chunk.slot_bytes)
        slot_class.evict(name)
        (slot_class.spares if is_spare else slot_class.policy).add(name)

    def clear(self, namespace: Namespace) -> None:
        """Forget all chunks of a namespace; nobody is told of each."""
        for key, chunk in self._chunks.pop(namespace, {}).items():
            self._class_of(chunk.slot_bytes).forget((namespace, key))
            self.release(chunk)

    def drop_where(self, condition: Callable[[Chunk], bool]) -> None:
        """Forget all chunks that meet a condition."""
        doomed = [
            (namespace, key)
            for namespace, chunks in self._chunks.items()
            for key, chunk in chunks.items()
            if condition(chunk)
        ]
        for namespace, key in doomed:
            self.drop(namespace, key)

    def drop_overwritten(self, writes: Iterable[Chunk]) -> None:
        """Forget what can't be there any more, since its place was given to one of `writes`.

        A place is the slot itself, and the whole slab if that has got another slot size.
        """
        slots: dict[Slot, Generation] = {}
        slabs: dict[int, Chunk] = {}
        for chunk in sorted(writes, key=lambda chunk: chunk.generation):
            slots[chunk.slot] = chunk.generation
            slabs[self.geometry.slab_of(chunk.slot)] = chunk
        if slots:
            self.drop_where(lambda chunk: self._is_overwritten(chunk, slots, slabs))

    def _is_overwritten(
        self, chunk: Chunk, slots: dict[Slot, Generation], slabs: dict[int, Chunk]
    ) -> bool:
        newest = slabs.get(self.geometry.slab_of(chunk.slot))
        if newest is not None and newest.slot_bytes != chunk.slot_bytes:
            return chunk.generation < newest.generation
        return chunk.generation < slots.get(chunk.slot, NO_GENERATION)

    def touch(self, name: Name) -> None:
        """The chunk was used; nothing if it is not held."""
        chunk = self.find(*name)
        if chunk is not None:
            slot_class = self._class_of(chunk.slot_bytes)
            slot_class.policy.touch(name)
            slot_class.spares.touch(name)

    def pin(self, name: Name, until: float) -> None:
        """Do not evict the chunk before `until`; nothing if it is not held."""
        chunk = self.find(*name)
        if chunk is not None:
            self._pinned[name] = until
            slot_class = self._class_of(chunk.slot_bytes)
            slot_class.used_at = max(slot_class.used_at, until)

    def forget_pins(self, now: float) -> None:
        """Drop pins that have run out."""
        self._pinned = {name: until for name, until in self._pinned.items() if until > now}

    # Leases

    def claim_place(self, chunk: Chunk) -> bool:
        """Take a certain slot out of the free ones; False if it can't be there.

        Its slab comes along if nothing else is in it.
        """
        if not self.geometry.is_place(chunk.slot, chunk.slot_bytes):
            return False
        slab = self.geometry.slab_of(chunk.slot)
        slot_class = self._class_of(chunk.slot_bytes)
        if slab in self._free_slabs:
            self._free_slabs.remove(slab)
            self._give_slab(slot_class, slab)
        for other in self._classes.values():
            if other is not slot_class and self._is_unused(other, slab):
                self._empty_slab(other, slab)
                self._give_slab(slot_class, slab)
        if slab not in slot_class.slabs or chunk.slot not in slot_class.free:
            return False
        del slot_class.free[chunk.slot]
        return True

    def _is_unused(self, slot_class: _SlotClass, slab: int) -> bool:
        """Whether the class has the slab, and all slots of it are free."""
        slots = self.geometry.slots_of(slab, slot_class.slot_bytes)
        return slab in slot_class.slabs and all(slot in slot_class.free for slot in slots)

    def adopt(self, name: Name, chunk: Chunk) -> None:
        """Hold a chunk that was stored without a lease that we know of, if its slot is free and
        nothing newer was ever there.
        """
        if self.may_come(chunk) and self.claim_place(chunk):
            self.hold(name, chunk)

    def outlive(self, chunk: Chunk) -> None:
        """A free slot has had a chunk that nobody needs: no lease from before it is good."""
        if self.may_come(chunk) and self.claim_place(chunk):
            self.release(chunk)

    def may_come(self, chunk: Chunk) -> bool:
        """Whether nothing newer was in a chunk's place, nor this chunk itself."""
        free = self._class_of(chunk.slot_bytes).free
        return free.get(chunk.slot, chunk.generation) <= chunk.generation

    def is_settled(self, chunk: Chunk) -> bool:
        """Whether it is known that a chunk's place holds nothing older: it is leased, or free."""
        if chunk.slot in self._class_of(chunk.slot_bytes).free:
            return True
        return self.lease_at(chunk.slot, chunk.generation) is not None

    def is_leased_to(self, engine_id: EngineId, slot: Slot) -> bool:
        """Whether the engine has a lease of the slot."""
        lease = self.leases.get(slot)
        return lease is not None and lease.engine_id == engine_id

    def lease_at(self, slot: Slot, generation: int) -> Lease | None:
        """The lease of a slot, if it is still at that generation."""
        lease = self.leases.get(slot)
        return lease if lease is not None and lease.generation == generation else None

    def end_lease(self, slot: Slot) -> None:
        """The lease is over without a chunk: the slot is free."""
        lease = self.leases.pop(slot)
        self._class_of(lease.slot_bytes).release(slot, lease.generation)

    def end_older_lease(self, chunk: Chunk) -> None:
        """A lease that is older than what was stored in its slot is no good to anybody."""
        lease = self.leases.get(chunk.slot)
        if lease is not None and lease.generation < chunk.generation:
            self.end_lease(chunk.slot)

    def end_leases(self, engine_id: EngineId) -> None:
        """All leases of an engine are over."""
        for slot, lease in list(self.leases.items()):
            if lease.engine_id == engine_id:
                self.end_lease(slot)

    # Slots

    def take_slots(self, slot_bytes: int, count: int, now: float) -> list[Slot]:
        """Up to `count` slots, no longer free: free ones, of unused slabs, then by eviction."""
        slot_class = self._class_of(slot_bytes)
        slot_class.used_at = max(slot_class.used_at, now)
        while len(slot_class.free) < count and self._free_slabs:
            self._give_slab(slot_class, self._free_slabs.pop())
        if len(slot_class.free) < count:
            self._evict(slot_class, count - len(slot_class.free), now)
        while len(slot_class.free) < count and self._reclaim_slab(slot_class, now):
            pass
        taken = min(count, len(slot_class.free))
        return [slot_class.free.popitem(last=False)[0] for _ in range(taken)]

    def _evict(self, slot_class: _SlotClass, count: int, now: float) -> None:
        """Give up chunks in the policy's order; those that are about to be loaded stay."""
        victims: list[Name] = []
        for namespace, key in slot_class.candidates():
            if len(victims) == count:
                break
            name = (Namespace(namespace), Key(key))
            if self._pinned.get(name, now) <= now:
                victims.append(name)
        for name in victims:
            slot_class.evict(name)
            self.drop(*name)

    def _reclaim_slab(self, slot_class: _SlotClass, now: float) -> bool:
        """Move one slab here: from a class that lies idle, else from one that has more than its
        fair share while this one has less; False if there is none.
        """
        others = [c for c in self._classes.values() if c is not slot_class and c.slabs]
        share = self.geometry.num_slabs // (len(others) + 1)
        idle = [c for c in others if now - c.used_at > IDLE_S]
        if not idle and (not others or len(slot_class.slabs) >= share):
            return False
        donor = max(idle or others, key=lambda c: len(c.slabs))
        leased = {self.geometry.slab_of(slot) for slot in self.leases}
        movable = donor.slabs - leased - self._pinned_slabs(now)
        if not movable:
            return False
        slab = self._oldest_slab(donor, movable)
        self._empty_slab(donor, slab)
        self._give_slab(slot_class, slab)
        return True

    def _oldest_slab(self, donor: _SlotClass, movable: set[int]) -> int:
        """One without chunks, else that of the chunk which is the first to be given up."""
        held: set[int] = set()
        first: int | None = None
        for namespace, key in donor.candidates():
            chunk = self.find(Namespace(namespace), Key(key))
            assert chunk is not None, (namespace, key)
            slab = self.geometry.slab_of(chunk.slot)
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

    def _pinned_slabs(self, now: float) -> set[int]:
        chunks = [self.find(*name) for name, until in self._pinned.items() if until > now]
        return {self.geometry.slab_of(chunk.slot) for chunk in chunks if chunk is not None}

    def _empty_slab(self, donor: _SlotClass, slab: int) -> None:
        """Evict all that a slab holds and take it out of its class."""
        self.drop_where(lambda chunk: self.geometry.slab_of(chunk.slot) == slab)
        donor.slabs.remove(slab)
        generations = [
            donor.free.pop(slot) for slot in self.geometry.slots_of(slab, donor.slot_bytes)
        ]
        self._floors[slab] = max([self._floors.get(slab, NO_GENERATION), *generations])

    def _class_of(self, slot_bytes: int) -> _SlotClass:
        found = self._classes.get(slot_bytes)
        if found is None:
            policy = POLICIES[self._eviction_policy]
            found = self._classes[slot_bytes] = _SlotClass(slot_bytes, policy(), LRU())
        return found

    def _give_slab(self, slot_class: _SlotClass, slab: int) -> None:
        slot_class.slabs.add(slab)
        for slot in self.geometry.slots_of(slab, slot_class.slot_bytes):
            slot_class.release(slot, self._floors.get(slab, NO_GENERATION))

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        for slot_class in self._classes.values():
            self._check_class(slot_class)

    def _check_class(self, slot_class: _SlotClass) -> None:
        size = slot_class.slot_bytes
        leased = [slot for slot, lease in self.leases.items() if lease.slot_bytes == size]
        held = [
            (chunk.slot, (namespace, key))
            for namespace, chunks in self._chunks.items()
            for key, chunk in chunks.items()
            if chunk.slot_bytes == size
        ]
        slots = [*slot_class.free, *leased, *(slot for slot, _ in held)]
        total = len(slot_class.slabs) * self.geometry.slots_per_slab(size)
        assert len(slots) == total, (size, len(slots), total)
        assert len(set(slots)) == total, (size, slots)
        names = list(slot_class.candidates())
        assert len(names) == len(held), (size, len(names), len(held))
        assert set(names) == {name for _, name in held}, size
