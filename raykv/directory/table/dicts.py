"""The table of slots and chunks in plain Python: dicts, and any eviction policy."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from operator import itemgetter

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NO_GENERATION, EngineId, Generation, Key, Namespace, NodeId, Slot
from raykv.directory.table.policies import LRU, POLICIES, EvictionPolicy
from raykv.directory.table.protocol import (
    Changes,
    Found,
    Held,
    Lease,
    Name,
    NodeTable,
    Stretch,
    TableChunk,
    Uses,
)
from raykv.directory.table.records import Clock, Records
from raykv.protocol.columns import numbered

_Nodes = tuple[NodeId, ...]


@dataclass(slots=True)
class _Queues:
    """Chunks in eviction order: of one tenant, or of all that are not set apart.

    `released` has chunks that go first, `spares` all that another node has too, by their last use,
    and `policy` those that are in neither. For the policy, a chunk that becomes a spare or is
    released is evicted, so that it may remember its uses.
    """

    policy: EvictionPolicy[tuple[str, bytes]]
    released: LRU[tuple[str, bytes]] = field(default_factory=LRU)
    spares: LRU[tuple[str, bytes]] = field(default_factory=LRU)

    def forget(self, name: Name) -> None:
        self.policy.remove(name)
        self.spares.remove(name)
        self.released.remove(name)

    def evict(self, name: Name) -> None:
        """The chunk is given up for lack of room; `forget` has nothing left to do."""
        self.policy.evicted(name)
        self.spares.evicted(name)
        self.released.evicted(name)

    def give_up_first(self, name: Name) -> None:
        """The chunk is released."""
        self.policy.evicted(name)
        self.released.add(name)

    def touch(self, name: Name, together: int) -> None:
        self.policy.touch(name, together)
        self.spares.touch(name)
        if name in self.released:
            self.released.remove(name)
            if name not in self.spares:
                self.policy.add(name, together)

    def set_spare(self, name: Name, is_spare: bool) -> None:
        if is_spare:
            self.policy.evicted(name)
            self.spares.add(name)
        else:
            self.spares.remove(name)
            if name not in self.released:
                self.policy.add(name)

    def candidates(self) -> Iterator[tuple[str, bytes]]:
        spares = (name for name in self.spares.candidates() if name not in self.released)
        return chain(self.released.candidates(), spares, self.policy.candidates())

    def __len__(self) -> int:
        alone = sum(name not in self.spares for name in self.released.candidates())
        return len(self.policy) + len(self.spares) + alone


@dataclass(slots=True)
class _SlotClass:
    """All slots of one size; `free` has the longest free slot first, each with the lowest
    generation that may still be stored there. `queues` by tenant; 0: of all that are not set apart.
    """

    queues: dict[int, _Queues]
    free: OrderedDict[Slot, Generation] = field(default_factory=OrderedDict)
    claimed: set[Slot] = field(default_factory=set)
    used_at: float = 0.0

    def set_free(self, slot: Slot, lowest: Generation) -> None:
        assert slot not in self.free, slot
        self.free[slot] = lowest

    def of(self, owner: int) -> _Queues:
        """Where the chunks of a tenant are."""
        return self.queues[owner if owner in self.queues else 0]


class DictTable:
    """A `ChunkTable` of dictionaries; `eviction_policy` is a name in `POLICIES`."""

    def __init__(self, eviction_policy: str) -> None:
        self._make_policy = POLICIES[eviction_policy]
        self._nodes: dict[NodeId, DictNodeTable] = {}
        self._index = ReplicaIndex()
        # Of the last question, and the ranks that follow from it.
        self._ranked: tuple[NodeId, ...] = ()
        self._ranks: dict[NodeId, int] = {}
        self._clock = Clock()

    def set_clock(self, now: float) -> None:
        self._clock.now = now

    def add_node(self, node_id: NodeId, geometry: PoolGeometry) -> DictNodeTable:
        assert node_id not in self._nodes, node_id

        def moved(name: Name, came: bool) -> None:
            self._moved(node_id, name, came=came)

        made = self._nodes[node_id] = DictNodeTable(geometry, self._make_policy, moved, self._clock)
        return made

    def remove_node(self, node_id: NodeId) -> None:
        """See `ChunkTable.remove_node`; the chunks that others have too go in eviction order."""
        lost = self._nodes.pop(node_id)
        spares = lost.spares()
        for name in spares:
            self._moved(node_id, name, came=False)
        for name in set(lost.names()).difference(spares):
            self._index.remove(name, node_id)

    def _moved(self, node_id: NodeId, name: Name, *, came: bool) -> None:
        """A chunk came to a node, or went: those who hold it alone, or no longer, are to know."""
        if came:
            holders = self._index.add(name, node_id)
            affected = holders if len(holders) == 2 else holders[-1:]
        else:
            holders = self._index.remove(name, node_id)
            affected = holders if len(holders) == 1 else ()
        for holder in affected:
            self._nodes[holder].set_spare(name, len(holders) > 1)

    def ask(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        ranked: tuple[NodeId, ...],
        first: Sequence[NodeId],
        most: int,
        until: float | None,
    ) -> Found:
        if ranked is not self._ranked:
            self._ranked = ranked
            self._ranks = {node_id: rank for rank, node_id in enumerate(ranked)}
        ranks = ChainMap(
            {node_id: at - len(first) for at, node_id in enumerate(first)}, self._ranks
        )
        key_index: list[int] = []
        rows: list[NodeId] = []
        slots: list[int] = []
        generations: list[int] = []
        missing: list[int] = []
        for position, key in enumerate(keys):
            holders = sorted(self._index.nodes((namespace, Key(key))), key=ranks.__getitem__)
            for node_id in holders[:most]:
                node = self._nodes[node_id]
                if until is not None:
                    node.pin(namespace, [key], until)
                chunk = node.held(namespace, Key(key))
                key_index.append(position)
                rows.append(node_id)
                slots.append(chunk.slot)
                generations.append(chunk.generation)
            if not holders:
                missing.append(position)
        nodes: list[NodeId] = []
        node_index = numbered(nodes, rows)
        return Found(nodes, key_index, node_index, slots, generations, missing)

    def check(self) -> None:
        for node in self._nodes.values():
            node.check()
        indexed = {
            (name, node_id) for name in self._index.names() for node_id in self._index.nodes(name)
        }
        held = {(name, node_id) for node_id, node in self._nodes.items() for name in node.names()}
        assert indexed == held, indexed ^ held
        for node in self._nodes.values():
            shared = {name for name in node.names() if len(self._index.nodes(name)) > 1}
            assert set(node.spares()) == shared, shared


class DictNodeTable:
    """See `raykv.directory.table.protocol.NodeTable`.

    Args:
        geometry: of the node's pool.
        make_policy: an empty one.
        moved: called with each chunk that comes (True) or goes.
        clock: that of all nodes.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        make_policy: Callable[[], EvictionPolicy[tuple[str, bytes]]],
        moved: Callable[[Name, bool], None],
        clock: Clock | None = None,
    ) -> None:
        self.geometry = geometry
        self._make_policy = make_policy
        self._moved = moved
        self._classes: dict[int, _SlotClass] = {}
        self._leases: dict[Slot, Lease] = {}
        self._chunks: dict[Namespace, dict[Key, TableChunk]] = {}
        self._pinned: dict[Name, float] = {}
        self._records = Records(geometry, clock or Clock())
        # Of leases that have an owner.
        self._lease_owners: dict[Slot, int] = {}
        self._apart: set[int] = set()
        # Whether a chunk has ever had an owner.
        self._has_owners = False

    def _class_of(self, slot_bytes: int) -> _SlotClass:
        found = self._classes.get(slot_bytes)
        if found is None:
            queues = {owner: _Queues(self._make_policy()) for owner in (0, *self._apart)}
            found = self._classes[slot_bytes] = _SlotClass(queues)
        return found

    def _queues_of(self, name: Name) -> _Queues:
        """Where a chunk that is held is."""
        chunk = self._chunks[name[0]][name[1]]
        return self._class_of(chunk.slot_bytes).of(self._records.of(name).owner)

    # Slabs

    def give_slab(self, slab: int, slot_bytes: int, lowest: Generation) -> None:
        slot_class = self._class_of(slot_bytes)
        for slot in self.geometry.slots_of(slab, slot_bytes):
            slot_class.set_free(slot, lowest)

    def take_slab(self, slab: int, slot_bytes: int) -> Generation:
        free = self._class_of(slot_bytes).free
        return max(free.pop(slot) for slot in self.geometry.slots_of(slab, slot_bytes))

    # Free slots

    def num_free(self, slot_bytes: int) -> int:
        return len(self._class_of(slot_bytes).free)

    def lowest(self, slot: Slot, slot_bytes: int) -> Generation | None:
        return self._class_of(slot_bytes).free.get(slot)

    def claim(self, slot: Slot, slot_bytes: int) -> None:
        slot_class = self._class_of(slot_bytes)
        del slot_class.free[slot]
        slot_class.claimed.add(slot)

    def unclaim(self, slot: Slot, slot_bytes: int, lowest: Generation) -> None:
        slot_class = self._class_of(slot_bytes)
        slot_class.claimed.remove(slot)
        slot_class.set_free(slot, lowest)

    # Leases

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def lend(
        self, slot_bytes: int, count: int, engine_id: EngineId, group: int, first: Generation
    ) -> list[Slot]:
        free = self._class_of(slot_bytes).free
        slots = [free.popitem(last=False)[0] for _ in range(min(count, len(free)))]
        for number, slot in enumerate(slots):
            generation = Generation(first + number)
            self._leases[slot] = Lease(engine_id, group, generation, slot_bytes)
        return slots

    def lend_at(self, slot: Slot, lease: Lease) -> None:
        self._class_of(lease.slot_bytes).claimed.remove(slot)
        self._leases[slot] = lease

    def lease_of(self, slot: Slot) -> Lease | None:
        return self._leases.get(slot)

    def is_leased_at(self, slot: Slot, generation: int) -> bool:
        lease = self._leases.get(slot)
        return lease is not None and lease.generation == generation

    def leases(self) -> dict[Slot, Lease]:
        return dict(self._leases)

    def end_lease(self, slot: Slot, lowest: Generation) -> None:
        lease = self._leases.pop(slot)
        self._lease_owners.pop(slot, None)
        self._class_of(lease.slot_bytes).set_free(slot, lowest)

    # Chunks

    def find(self, namespace: Namespace, key: Key) -> TableChunk | None:
        return self._chunks.get(namespace, {}).get(key)

    def store(
        self, came: Changes, slot_bytes: Sequence[int], cleared: Generation, *, from_free: bool
    ) -> list[int]:
        held = self._chunks.get(came.namespace, {})
        others = []
        rows = zip(came.keys, came.slots, came.generations, slot_bytes, strict=True)
        for number, (key, place, generation, size) in enumerate(rows):
            slot = Slot(place)
            lease = self._leases.get(slot)
            if lease is not None:
                fits = (lease.generation, lease.slot_bytes) == (generation, size)
            else:
                fits = from_free and slot in self._class_of(size).free
            if not fits or generation <= cleared or key in held:
                others.append(number)
                continue
            if lease is None:
                self.claim(slot, size)
            chunk = TableChunk(slot, Generation(generation), size)
            self._hold((came.namespace, Key(key)), chunk, len(came), is_tail=number == 0)
            held = self._chunks[came.namespace]
        return others

    def hold(self, name: Name, chunk: TableChunk) -> None:
        self._hold(name, chunk)

    def _hold(
        self, name: Name, chunk: TableChunk, together: int = 0, *, is_tail: bool = False
    ) -> None:
        namespace, key = name
        slot_class = self._class_of(chunk.slot_bytes)
        if self._leases.pop(chunk.slot, None) is None:
            slot_class.claimed.remove(chunk.slot)
        chunks = self._chunks.setdefault(namespace, {})
        assert key not in chunks, name
        chunks[key] = chunk
        owner = self._lease_owners.pop(chunk.slot, 0)
        self._records.came(name, chunk.slot, owner)
        slot_class.of(owner).policy.add(name, together, is_tail=is_tail)
        self._moved(name, True)

    def drop(self, namespace: Namespace, key: Key) -> TableChunk | None:
        chunk = self._chunks.get(namespace, {}).get(key)
        if chunk is None:
            return None
        name = (namespace, key)
        self._queues_of(name).forget(name)
        del self._chunks[namespace][key]
        self._pinned.pop(name, None)
        self._records.went(name)
        slot_class = self._class_of(chunk.slot_bytes)
        slot_class.set_free(chunk.slot, Generation(chunk.generation + 1))
        self._moved(name, False)
        return chunk

    def held(self, namespace: Namespace, key: Key) -> TableChunk:
        """A chunk that is held."""
        return self._chunks[namespace][key]

    def set_spare(self, name: Name, is_spare: bool) -> None:
        """Whether another node has the chunk too; for the table of all nodes."""
        queues = self._queues_of(name)
        if is_spare != (name in queues.spares):
            queues.set_spare(name, is_spare)

    def evict(self, slot_bytes: int, count: int, now: float, owner: int = 0) -> list[Changes]:
        victims: list[Name] = []
        for namespace, key in self._class_of(slot_bytes).of(owner).candidates():
            if len(victims) == count:
                break
            name = (Namespace(namespace), Key(key))
            if self._pinned.get(name, now) <= now:
                victims.append(name)
        return self._evict(victims, now)

    def evict_keys(self, namespace: Namespace, keys: Sequence[bytes], now: float) -> list[Changes]:
        held = self._chunks.get(namespace, {})
        names = [(namespace, Key(key)) for key in dict.fromkeys(keys) if key in held]
        return self._evict([name for name in names if self._pinned.get(name, now) <= now], now)

    def _evict(self, victims: Sequence[Name], now: float) -> list[Changes]:
        gone: list[Changes] = []
        for namespace, names in groupby(victims, key=itemgetter(0)):
            keys = [key for _, key in names]
            records = [self._records.of((namespace, key)) for key in keys]
            hits = [record.hits for record in records]
            ages = [max(0.0, now - record.stored_at) for record in records]
            owners = [record.owner for record in records] if self._has_owners else []
            for key in keys:
                self._queues_of((namespace, key)).evict((namespace, key))
            dropped = [self.drop(namespace, key) for key in keys]
            slots = [chunk.slot for chunk in dropped if chunk is not None]
            generations = [chunk.generation for chunk in dropped if chunk is not None]
            columns = keys, slots, generations
            gone.append(Changes(False, namespace, *columns, False, hits, ages, owners))
        return gone

    def candidates(self, slot_bytes: int, owner: int = 0) -> Iterator[Slot]:
        for namespace, key in self._class_of(slot_bytes).of(owner).candidates():
            yield self._chunks[Namespace(namespace)][Key(key)].slot

    def clear(self, namespace: Namespace) -> None:
        for key in list(self._chunks.get(namespace, {})):
            self.drop(namespace, key)
        self._chunks.pop(namespace, None)

    def chunks_in(self, slabs: Iterable[int]) -> list[tuple[Name, TableChunk]]:
        return [(name, self.held(*name)) for name in self._records.in_slabs(slabs)]

    # Tenants

    def own(self, slots: Sequence[int], generations: Sequence[int], owners: Sequence[int]) -> None:
        self._has_owners = True
        names = self._records.by_slot(slots)
        for place, generation, owner in zip(slots, generations, owners, strict=True):
            slot = Slot(place)
            name = names.get(slot)
            if self.is_leased_at(slot, generation):
                self._lease_owners.setdefault(slot, owner)
            elif name is not None and self.held(*name).generation == generation:
                self._give_to(name, owner)

    def _give_to(self, name: Name, owner: int) -> None:
        """A chunk belongs to a tenant if it was nobody's."""
        record = self._records.of(name)
        if record.owner:
            return
        before = self._queues_of(name)
        record.owner = owner
        self._file_again(name, before)

    def _file_again(self, name: Name, before: _Queues) -> None:
        """A chunk leaves its queues for those of its owner, where it is new."""
        queues = self._queues_of(name)
        if queues is before:
            return
        is_spare, is_released = name in before.spares, name in before.released
        before.forget(name)
        if is_spare:
            queues.spares.add(name)
        if is_released:
            queues.released.add(name)
        if not is_spare and not is_released:
            queues.policy.add(name)

    def set_apart(self, owners: Collection[int]) -> None:
        apart = set(owners)
        for slot_class in self._classes.values():
            for owner in sorted(self._apart - apart):
                ended = slot_class.queues.pop(owner)
                self._file_all_again(ended, owner)
            for owner in sorted(apart - self._apart):
                slot_class.queues[owner] = _Queues(self._make_policy())
                self._file_all_again(slot_class.queues[0], owner)
        self._apart = apart

    def _file_all_again(self, before: _Queues, owner: int) -> None:
        """The chunks that a tenant has in some queues go where they belong now."""
        names = [(Namespace(space), Key(key)) for space, key in before.candidates()]
        for name in names:
            if self._records.of(name).owner == owner:
                self._file_again(name, before)

    def num_held(self, slot_bytes: int, owner: int = 0) -> int:
        return len(self._class_of(slot_bytes).of(owner))

    def can_evict(self, slot_bytes: int, now: float, owner: int = 0) -> bool:
        names = self._class_of(slot_bytes).of(owner).candidates()
        keys = ((Namespace(space), Key(key)) for space, key in names)
        return any(name not in self._pinned or self._pinned[name] <= now for name in keys)

    def owned_bytes(self) -> dict[int, int]:
        owned: Counter[int] = Counter()
        for name, owner in self._records.owned():
            owned[owner] += self.held(*name).slot_bytes
        return dict(owned)

    # Use

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        for key in keys:
            chunk = self.find(namespace, Key(key))
            if chunk is not None:
                self._queues_of((namespace, Key(key))).touch((namespace, Key(key)), len(keys))
                self._records.used((namespace, Key(key)))

    def release(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        for key in keys:
            chunk = self.find(namespace, Key(key))
            if chunk is not None:
                self._queues_of((namespace, Key(key))).give_up_first((namespace, Key(key)))

    def pin(self, namespace: Namespace, keys: Sequence[bytes], until: float) -> None:
        for key in keys:
            if self.find(namespace, Key(key)) is not None:
                self.pinned(namespace, Key(key), until)

    def pinned(self, namespace: Namespace, key: Key, until: float) -> TableChunk:
        """A chunk that is held, and pinned now."""
        chunk = self._chunks[namespace][key]
        self._pinned[namespace, key] = max(until, self._pinned.get((namespace, key), until))
        self.use(chunk.slot_bytes, until)
        return chunk

    def protect(self, namespace: Namespace, keys: Sequence[bytes], until: float) -> None:
        for key in keys:
            if self.find(namespace, Key(key)) is not None:
                self._pinned[namespace, Key(key)] = until

    def pinned_slabs(self, now: float) -> set[int]:
        names = [name for name, until in self._pinned.items() if until > now]
        return {self.geometry.slab_of(self._chunks[space][key].slot) for space, key in names}

    def forget_pins(self, now: float) -> None:
        self._pinned = {name: until for name, until in self._pinned.items() if until > now}

    def use(self, slot_bytes: int, now: float) -> None:
        slot_class = self._class_of(slot_bytes)
        slot_class.used_at = max(slot_class.used_at, now)

    def used_at(self, slot_bytes: int) -> float:
        return self._class_of(slot_bytes).used_at

    # Listing

    def sizes(self) -> dict[Namespace, int]:
        return {name: len(chunks) for name, chunks in self._chunks.items()}

    def holds_any(self, namespace: Namespace) -> bool:
        return bool(self._chunks.get(namespace))

    def names(self) -> list[Name]:
        """All chunks."""
        return [(name, key) for name, chunks in self._chunks.items() for key in chunks]

    def places(self, namespace: Namespace | None = None) -> Sequence[Name]:
        """See `NodeTable.places`: here they are names."""
        if namespace is None:
            return self.names()
        return [(namespace, key) for key in self._chunks.get(namespace, {})]

    def held_at(self, places: Sequence[Name], namespace: Namespace | None = None) -> Held:
        assert namespace is None or all(name[0] == namespace for name in places), namespace
        found = [(name, self.find(*name)) for name in places]
        chunks = [(name, chunk) for name, chunk in found if chunk is not None]
        return Held(
            namespaces=[name[0] for name, _ in chunks],
            keys=[name[1] for name, _ in chunks],
            slots=[chunk.slot for _, chunk in chunks],
            generations=[chunk.generation for _, chunk in chunks],
            slot_bytes=[chunk.slot_bytes for _, chunk in chunks],
        )

    def places_from(self, first: Slot, most: int, namespace: Namespace | None = None) -> Stretch:
        return self._records.stretch(first, most, namespace)

    def uses_at(self, places: Sequence[Name]) -> Uses:
        chunks = [self.held(*name) for name in places]
        records = [self._records.of(name) for name in places]
        return Uses(
            slot_bytes=[chunk.slot_bytes for chunk in chunks],
            stored_at=[record.stored_at for record in records],
            used_at=[record.used_at for record in records],
            hits=[record.hits for record in records],
            is_spare=[name in self._queues_of(name).spares for name in places],
            owners=[record.owner for record in records],
        )

    def spares(self) -> list[Name]:
        """See `NodeTable.spares`: in eviction order."""
        return [
            (Namespace(namespace), Key(key))
            for slot_class in self._classes.values()
            for owner in sorted(slot_class.queues)
            for namespace, key in slot_class.queues[owner].candidates()
            if (namespace, key) in slot_class.queues[owner].spares
        ]

    def pour_into(self, table: NodeTable) -> None:
        """Give an empty table, whose slabs have their slot sizes already, all that is in this one.

        Chunks go by their last use, which is all that the other one learns of their past.
        """
        table.set_apart(self._apart)
        for size, slot_class in self._classes.items():
            assert not slot_class.claimed, slot_class.claimed
            for slot, lowest in slot_class.free.items():
                table.claim(slot, size)
                table.unclaim(slot, size, lowest)
            table.use(size, slot_class.used_at)
        for slot, lease in self._leases.items():
            table.claim(slot, lease.slot_bytes)
            table.lend_at(slot, lease)
        if self._lease_owners:
            generations = [self._leases[slot].generation for slot in self._lease_owners]
            table.own([*self._lease_owners], generations, [*self._lease_owners.values()])
        names = sorted(self.names(), key=lambda name: self._records.of(name).used_at)
        for namespace, group in groupby(names, key=itemgetter(0)):
            held = self.held_at(list(group))
            came = Changes(True, namespace, held.keys, held.slots, held.generations)
            others = table.store(came, held.slot_bytes, NO_GENERATION, from_free=True)
            assert not others, others
            self._tell_owners(table, held)
        for slot_class in self._classes.values():
            for owner in sorted(slot_class.queues):
                gone = slot_class.queues[owner].released.candidates()
                for space, released in groupby(gone, key=itemgetter(0)):
                    table.release(Namespace(space), [key for _, key in released])
        for (namespace, key), until in self._pinned.items():
            table.protect(namespace, [key], until)

    def _tell_owners(self, table: NodeTable, held: Held) -> None:
        names = zip(held.namespaces, held.keys, strict=True)
        owners = [self._records.of((space, Key(key))).owner for space, key in names]
        rows = [row for row, owner in enumerate(owners) if owner]
        if rows:
            slots = [held.slots[row] for row in rows]
            generations = [held.generations[row] for row in rows]
            table.own(slots, generations, [owners[row] for row in rows])

    def check(self) -> None:
        for size, slot_class in self._classes.items():
            assert slot_class.queues.keys() == {0, *self._apart}, (size, self._apart)
            leased = [slot for slot, lease in self._leases.items() if lease.slot_bytes == size]
            held = [
                (chunk.slot, (namespace, key))
                for namespace, chunks in self._chunks.items()
                for key, chunk in chunks.items()
                if chunk.slot_bytes == size
            ]
            states = [*slot_class.free, *slot_class.claimed, *leased, *(slot for slot, _ in held)]
            assert len(set(states)) == len(states), (size, states)
            names = [name for each in slot_class.queues.values() for name in each.candidates()]
            for queues in slot_class.queues.values():
                there = [(Namespace(space), Key(key)) for space, key in queues.candidates()]
                assert len(there) == len(queues), (size, there)
                assert all(self._queues_of(name) is queues for name in there), (size, there)
            assert len(names) == len(held), (size, len(names), len(held))
            assert set(names) == {name for _, name in held}, size
        assert self._lease_owners.keys() <= self._leases.keys(), self._lease_owners
        assert set(self._pinned) <= set(self.names()), self._pinned
        self._records.check({name: self.held(*name).slot for name in self.names()})


class ReplicaIndex:
    """Which nodes have a chunk: the directory's index over the books of all nodes.

    Invariant: a node is listed under a name exactly as long as its book holds the chunk.
    Most chunks have one replica: a tuple of one costs less than a set.
    """

    def __init__(self) -> None:
        self._nodes: dict[Namespace, dict[Key, _Nodes]] = {}

    def nodes(self, name: Name) -> _Nodes:
        """The nodes that have the chunk, the one that got it first first."""
        namespace, key = name
        return self._nodes.get(namespace, {}).get(key, ())

    def add(self, name: Name, node_id: NodeId) -> _Nodes:
        """The chunk came to a node; returns all that have it now."""
        namespace, key = name
        keys = self._nodes.setdefault(namespace, {})
        known = keys.get(key, ())
        if node_id not in known:
            keys[key] = known = (*known, node_id)
        return known

    def remove(self, name: Name, node_id: NodeId) -> _Nodes:
        """The chunk went from a node; returns those that still have it."""
        namespace, key = name
        keys = self._nodes.get(namespace, {})
        left = tuple(node for node in keys.get(key, ()) if node != node_id)
        if left:
            keys[key] = left
        elif keys.pop(key, None) is not None and not keys:
            del self._nodes[namespace]
        return left

    def names(self) -> list[Name]:
        """All chunks that are anywhere; for tests."""
        return [(namespace, key) for namespace, keys in self._nodes.items() for key in keys]
