"""What the scheduler actor knows of every slot and chunk, behind one protocol: columns in, columns
out.

             lend, lend_at               store, hold
    free ─────────────────► leased ─────────────────────► held
     │ ▲                       │ end_lease                  │
     │ └───────────────────────┴────────────────────────────┘ drop, evict, clear
     └─► claimed (by `claim`) ─► leased, held, or free again (`unclaim`)

`dicts.py` is the table in plain Python. `flat/` has one of flat arrays, which
takes a fifth of the memory and a tenth of the time; only the scheduler actor loads it. What is in
which order when several chunks come or go at once (those of a node, of a slab) is each table's own.

Invariants:
1. A slot of a slab that has a slot size is in exactly one of the states.
2. Held chunks are in their class's eviction order: released ones first, then spares. A spare is a
   chunk that another node holds too.
3. A pin ends with the replica.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import EngineId, Generation, Key, Namespace, NodeId, Slot

Name = tuple[Namespace, Key]
"""What a chunk is called in the whole cluster."""

MAX_OWNERS = 256
"""Tenants by number."""

NOBODY = 0
"""The number of all who are no tenant in particular."""


@dataclass(frozen=True, slots=True)
class TableChunk:
    """A replica that the directory believes in."""

    slot: Slot
    generation: Generation
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A free slot granted to an engine."""

    engine_id: EngineId
    group: int
    generation: Generation
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Columns of chunks of one namespace that came to a node (`stored`), or went, in order.

    All receivers share the lists: nobody changes them. `replaced`: they went since
    others of the same keys are about to come. Of chunks that were evicted, and of no others: how
    often each was used since it came (`hits`), and seconds since then (`ages`), as far as the
    table knows; the tenants that they belonged to (`owners`; none: nobody's), and whether they went
    since their tenant had more than its share (`over_quota`).
    """

    stored: bool
    namespace: Namespace
    keys: Sequence[bytes]
    slots: Sequence[int]
    generations: Sequence[int]
    replaced: bool = False
    hits: Sequence[int] = ()
    ages: Sequence[float] = ()
    owners: Sequence[int] = ()
    over_quota: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def reversed(self) -> Changes:
        """The last one first, without `hits` and `ages`."""
        columns = self.keys[::-1], self.slots[::-1], self.generations[::-1]
        return Changes(self.stored, self.namespace, *columns, self.replaced)

    def at(self, positions: Sequence[int]) -> Changes:
        """The changes in those rows."""
        keys = list(self.keys)
        return Changes(
            self.stored,
            self.namespace,
            [keys[at] for at in positions],
            [self.slots[at] for at in positions],
            [self.generations[at] for at in positions],
            self.replaced,
        )


@dataclass(frozen=True, slots=True)
class Found:
    """Replicas of keys, a row each, the best source of a key first.

    `node_index` points into `nodes`. `missing` lists the keys that nobody has.
    """

    nodes: list[NodeId]
    key_index: Sequence[int]
    node_index: Sequence[int]
    slots: Sequence[int]
    generations: Sequence[int]
    missing: list[int]


@dataclass(frozen=True, slots=True)
class Held:
    """Columns of chunks that are held."""

    namespaces: list[Namespace]
    keys: Sequence[bytes]
    slots: list[int]
    generations: list[int]
    slot_bytes: list[int]

    def __len__(self) -> int:
        return len(self.keys)


@dataclass(frozen=True, slots=True)
class Uses:
    """Columns of what became of chunks that are held.

    Times are those of `ChunkTable.set_clock`: when the chunk came to the node, as far as this table
    knows, and when it was used last. `hits` are its uses since it came. `is_spare`: another node
    has it too. `owners`: the tenants that they belong to.
    """

    slot_bytes: list[int]
    stored_at: list[float]
    used_at: list[float]
    hits: list[int]
    is_spare: list[bool]
    owners: list[int]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Places of the chunks in a stretch of `length` slots, in order, and the slot at which to go
    on; None: there are no more slots.
    """

    places: Any
    length: int
    following: Slot | None


class NodeTable(Protocol):
    """One node's part of a table."""

    geometry: PoolGeometry

    # Slabs

    def give_slab(self, slab: int, slot_bytes: int, lowest: Generation) -> None:
        """Cut a slab into slots; they are free, behind those that are free already.

        Nothing older than `lowest` may be stored there.
        """

    def take_slab(self, slab: int, slot_bytes: int) -> Generation:
        """A slab of free slots has no slot size any more; the highest of their lowest ones."""

    # Free slots

    def num_free(self, slot_bytes: int) -> int:
        """Free slots of that size."""

    def lowest(self, slot: Slot, slot_bytes: int) -> Generation | None:
        """The lowest generation that may be stored in a slot; None if it is not a free one."""

    def claim(self, slot: Slot, slot_bytes: int) -> None:
        """A certain free slot is free no longer."""

    def unclaim(self, slot: Slot, slot_bytes: int, lowest: Generation) -> None:
        """A claimed slot is free."""

    # Leases

    @property
    def num_leases(self) -> int:
        """Leased slots."""

    def lend(
        self, slot_bytes: int, count: int, engine_id: EngineId, group: int, first: Generation
    ) -> list[Slot]:
        """Lease the slots that have been free longest, at generations from `first` on."""

    def lend_at(self, slot: Slot, lease: Lease) -> None:
        """Lease a claimed slot."""

    def lease_of(self, slot: Slot) -> Lease | None:
        """The lease of a slot."""

    def is_leased_at(self, slot: Slot, generation: int) -> bool:
        """Whether a slot is leased at exactly that generation."""

    def leases(self) -> dict[Slot, Lease]:
        """All of them; a copy."""

    def end_lease(self, slot: Slot, lowest: Generation) -> None:
        """A leased slot is free, for generations from `lowest` on."""

    # Chunks

    def find(self, namespace: Namespace, key: Key) -> TableChunk | None:
        """The chunk of that name, if it is held."""

    def store(
        self, came: Changes, slot_bytes: Sequence[int], cleared: Generation, *, from_free: bool
    ) -> list[int]:
        """Hold those chunks that are plain: leased at exactly their generation and slot size,
        later than `cleared`, of keys that are not held. Returns the positions of the others.

        They count as used in this order, so the tail of a prefix is to be named first.
        With `from_free` it may be in a free slot too, whose lowest generation does not matter.
        """

    def hold(self, name: Name, chunk: TableChunk) -> None:
        """Hold a chunk in a slot that is claimed or leased; its name is not held."""

    def drop(self, namespace: Namespace, key: Key) -> TableChunk | None:
        """Forget a chunk and free its slot for later generations; None if it is not held."""

    def evict(self, slot_bytes: int, count: int, now: float, owner: int = 0) -> list[Changes]:
        """Drop up to `count` chunks in eviction order, but none that is pinned after `now`: of a
        tenant that is set apart, or (0) of all others.
        """

    def evict_keys(self, namespace: Namespace, keys: Sequence[bytes], now: float) -> list[Changes]:
        """Drop those of these chunks that are held and not pinned after `now`."""

    def candidates(self, slot_bytes: int, owner: int = 0) -> Iterator[Slot]:
        """Slots in eviction order, as in `evict`; not valid after a change."""

    def clear(self, namespace: Namespace) -> None:
        """Drop all chunks of a namespace."""

    def chunks_in(self, slabs: Iterable[int]) -> list[tuple[Name, TableChunk]]:
        """What is held in some slabs."""

    # Tenants

    def own(self, slots: Sequence[int], generations: Sequence[int], owners: Sequence[int]) -> None:
        """Chunks that are held, and what is being stored at leases, belong to tenants from now on,
        by number; what has an owner, or is there at another generation, stays as it is.
        """

    def set_apart(self, owners: Collection[int]) -> None:
        """Chunks of these tenants have an eviction order for each of them, all others are in one.

        Chunks that change the order come into the other one as if they were new, those first that
        would be evicted first.
        """

    def num_held(self, slot_bytes: int, owner: int = 0) -> int:
        """Chunks that `evict` could drop if nothing was pinned."""

    def can_evict(self, slot_bytes: int, now: float, owner: int = 0) -> bool:
        """Whether `evict` would drop anything at that time."""

    def owned_bytes(self) -> dict[int, int]:
        """Bytes of chunks by tenant, of those that have any; takes as long as there are chunks."""

    # Use

    def touch(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Chunks were used, in this order; nothing for those that are not held."""

    def release(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Nobody will miss these chunks: they are the next to be evicted, after those that were
        released before, in this order, so the tail of a prefix is to be named first.

        A chunk that is touched is an ordinary one again, with its past. Nothing happens to those
        that are not held; a pin protects a released chunk as any other.
        """

    def pin(self, namespace: Namespace, keys: Sequence[bytes], until: float) -> None:
        """Do not evict chunks before `until`, and count their size as used until then.

        A pin that runs longer already stays as it is.
        """

    def protect(self, namespace: Namespace, keys: Sequence[bytes], until: float) -> None:
        """Do not evict chunks before `until`, whatever pinned them until when before.

        It says nothing about when their size is used.
        """

    def pinned_slabs(self, now: float) -> set[int]:
        """The slabs that have a chunk which is pinned after `now`."""

    def forget_pins(self, now: float) -> None:
        """Drop pins that have run out."""

    def use(self, slot_bytes: int, now: float) -> None:
        """Slots of that size are wanted."""

    def used_at(self, slot_bytes: int) -> float:
        """When slots of that size were last wanted, or chunks pinned until; 0.0: never."""

    # Listing

    def sizes(self) -> dict[Namespace, int]:
        """Chunks by namespace."""

    def holds_any(self, namespace: Namespace) -> bool:
        """Whether there is a chunk of the namespace."""

    def places(self, namespace: Namespace | None = None) -> Sequence[Any]:
        """What `held_at` reads all chunks from, or those of a namespace, one each, now or later."""

    def held_at(self, places: Sequence[Any], namespace: Namespace | None = None) -> Held:
        """What is held at places now, in their order; of one namespace if it is named.

        A chunk that has come to the node since the places were listed may be there too.
        """

    def places_from(self, first: Slot, most: int, namespace: Namespace | None = None) -> Stretch:
        """Places of the chunks in slots from `first` on, of at most `most` slots of one slab; of
        one namespace if it is named.

        A walk that goes on at `following` until it is None meets each chunk that stays in its slot
        exactly once, whatever comes and goes meanwhile.
        """

    def uses_at(self, places: Sequence[Any]) -> Uses:
        """What became of the chunks at places; all are held."""

    def spares(self) -> list[Name]:
        """All spares, in no order."""

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""


class ChunkTable(Protocol):
    """All nodes' chunks, and which node has which."""

    def add_node(self, node_id: NodeId, geometry: PoolGeometry) -> NodeTable:
        """A node with an empty pool; there is none of that id."""

    def remove_node(self, node_id: NodeId) -> None:
        """A node is gone with all that it held; its table is not used again."""

    def ask(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        ranked: tuple[NodeId, ...],
        first: Sequence[NodeId],
        most: int,
        until: float | None,
    ) -> Found:
        """Where chunks are, at most `most` replicas of each; they are pinned `until` then, or not
        at all if that is None.

        `ranked` has all nodes, the best source first; the same object is the same order. Those in
        `first` go before all others.
        """

    def set_clock(self, now: float) -> None:
        """Set the time at which chunks come or are used from now on."""

    def check(self) -> None:
        """Assert the invariants over all nodes; for tests and idle moments."""
