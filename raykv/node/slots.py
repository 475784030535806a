"""The slot table: what is at each place of one node's pool, and who may touch it now.

         begin_store            finish_store (all ranks)         begin_load / finish_load
  EMPTY ────────────► WRITING ───────────────────────────► READY ◄──────────► READY, readers > 0
    ▲                    │ finish_store(ok=False), expire      │
    └────────────────────┴─────────────────────────────────────┘ begin_store (higher generation),
                                                                  discard_namespace
Invariants:
1. A slot's generation never falls. A store moves it up; only further ranks of the same store may
   name the generation that the slot already has.
2. READY means that every local rank has stored its part at the slot's generation.
3. A slot with readers is never written; a slot being written has no readers.
4. All slots in a slab have the slab's slot size, and no generation in a slab is above the slab's.
5. A key is read only under the namespace, the key and the generation that it was stored with.
6. No chunk is READY that was cleared.
7. A slot's checksum is that of its bytes at its generation; one that is not proven was restored
   and has not been compared with the bytes yet.
7. A READY chunk has the blocks that all of its ranks have stored, the same ones. Only those are
   loaded; who takes the whole slot elsewhere takes along which they are (`blocks_of`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from raykv.base.clearings import Clearings
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    MAX_GENERATION,
    NO_BLOCKS,
    NO_GENERATION,
    Blocks,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Refusal,
    Seal,
    Slot,
)

MAX_FAILED = 10_000
"""Failed stores that are remembered until `take_failed`; the oldest go first."""


class SlotState(Enum):
    """See the diagram in the module's docstring."""

    EMPTY = "empty"
    WRITING = "writing"
    READY = "ready"


class Admission(Enum):
    """What a store may do now. `WAIT`: ask again when a reader or a writer has finished."""

    GO = "go"
    WAIT = "wait"
    REFUSED = "refused"


@dataclass(frozen=True)
class StoreAnswer:
    """Answer to `begin_store`; `refusal` says why when it is refused."""

    admission: Admission
    refusal: Refusal = Refusal.NONE


@dataclass(frozen=True)
class FailedStore:
    """A store that has overwritten what was there and has not become a chunk."""

    slot: Slot
    generation: Generation
    slot_bytes: int


@dataclass(slots=True)
class _SlotRecord:
    """One slot: `writers` are the ranks that copy now, `stored` those that have copied `blocks`.

    Both are sets of bits, a rank each: there may be millions of slots.
    """

    generation: Generation = NO_GENERATION
    state: SlotState = SlotState.EMPTY
    namespace: Namespace = Namespace("")
    key: Key = Key(b"")
    readers: int = 0
    num_ranks: int = 1
    writers: int = 0
    stored: int = 0
    poisoned: bool = False
    expires_at: float = 0.0
    checksum: int | None = None
    blocks: Blocks = ALL_BLOCKS

    @property
    def is_busy(self) -> bool:
        return self.readers > 0 or self.writers != 0


@dataclass(slots=True)
class _Slab:
    """`floor`: the highest generation that the slab had under another slot size."""

    slot_bytes: int
    floor: Generation = NO_GENERATION
    generation: Generation = NO_GENERATION
    records: dict[Slot, _SlotRecord] = field(default_factory=dict)


class SlotTable:
    """The only authority on the bytes of one node's pool.

    Threads must take turns: in a NodeActor `PoolKeeper` has its copy threads, fetches and readers
    do so, each call under one lock.
    """

    def __init__(self, geometry: PoolGeometry) -> None:
        self.geometry = geometry
        self._slabs: dict[int, _Slab] = {}
        self._clearings = Clearings()
        # Slots in WRITING, so that `expire` need not look at the others.
        self._writing: set[Slot] = set()
        # READY slots whose checksums are not proven.
        self._unproven: set[Slot] = set()
        self._failed: deque[FailedStore] = deque(maxlen=MAX_FAILED)
        self.highest_generation = NO_GENERATION
        self.num_ready = 0
        self.used_bytes = 0
        self._ready_bytes: Counter[Namespace] = Counter()

    # Stores

    def begin_store(
        self, name: ChunkName, rank: int, num_ranks: int, expires_at: float
    ) -> StoreAnswer:
        """Let `rank` write its part of the chunk. Only `GO` changes the table.

        The first rank of a new generation discards what the slot held. A store whose other ranks
        have not come by `expires_at` is poisoned by `expire`.
        """
        assert 0 <= rank < num_ranks, (rank, num_ranks)
        if not self.geometry.is_place(name.slot, name.slot_bytes) or not name.is_sound:
            return StoreAnswer(Admission.REFUSED, Refusal.BAD_HANDLE)
        if self._clearings.cover(name.namespace, name.generation):
            return StoreAnswer(Admission.REFUSED, Refusal.CLEARED)
        slab = self._slabs.get(self.geometry.slab_of(name.slot))
        if slab is not None and slab.slot_bytes != name.slot_bytes:
            return self._begin_in_other_class(slab, name, rank, num_ranks, expires_at)
        if slab is not None and name.generation <= slab.floor:
            return StoreAnswer(Admission.REFUSED, Refusal.STALE)
        record = self._record(name.slot)
        if record is None or name.generation > record.generation:
            if record is not None and record.is_busy:
                return StoreAnswer(Admission.WAIT)
            self._start(name, rank, num_ranks, expires_at)
            return StoreAnswer(Admission.GO)
        return self._join(record, name, rank, num_ranks)

    def _begin_in_other_class(
        self, slab: _Slab, name: ChunkName, rank: int, num_ranks: int, expires_at: float
    ) -> StoreAnswer:
        """Give the slab to another slot size, once nothing in it is being touched."""
        if name.generation <= slab.generation:
            return StoreAnswer(Admission.REFUSED, Refusal.STALE)
        if any(record.is_busy for record in slab.records.values()):
            return StoreAnswer(Admission.WAIT)
        for slot in list(slab.records):
            self._empty(slot, slab)
        index = self.geometry.slab_of(name.slot)
        self._slabs[index] = _Slab(name.slot_bytes, slab.generation, slab.generation)
        self._start(name, rank, num_ranks, expires_at)
        return StoreAnswer(Admission.GO)

    def _join(self, record: _SlotRecord, name: ChunkName, rank: int, num_ranks: int) -> StoreAnswer:
        """Another rank of the store that the slot is at."""
        same = (
            record.generation == name.generation
            and record.namespace == name.namespace
            and record.key == name.key
            and record.num_ranks == num_ranks
        )
        if not same or record.state is not SlotState.WRITING:
            return StoreAnswer(Admission.REFUSED, Refusal.STALE)
        if (record.writers | record.stored) >> rank & 1:
            return StoreAnswer(Admission.REFUSED, Refusal.STALE)
        if record.poisoned:
            return StoreAnswer(Admission.REFUSED, Refusal.POISONED)
        record.writers |= 1 << rank
        return StoreAnswer(Admission.GO)

    def _start(self, name: ChunkName, rank: int, num_ranks: int, expires_at: float) -> None:
        index = self.geometry.slab_of(name.slot)
        slab = self._slabs.setdefault(index, _Slab(name.slot_bytes))
        if name.slot in slab.records:
            self._empty(name.slot, slab)
        slab.records[name.slot] = _SlotRecord(
            generation=name.generation,
            state=SlotState.WRITING,
            namespace=name.namespace,
            key=name.key,
            num_ranks=num_ranks,
            writers=1 << rank,
            expires_at=expires_at,
        )
        slab.generation = max(slab.generation, name.generation)
        self.highest_generation = max(self.highest_generation, name.generation)
        self._writing.add(name.slot)

    def finish_store(
        self,
        slot: Slot,
        generation: Generation,
        rank: int,
        ok: bool,
        blocks: Blocks = ALL_BLOCKS,
    ) -> SlotState:
        """`rank` has stopped writing `blocks`. Returns READY when its part was the last one.

        Ranks that have written other blocks than the ones before poison the store. The slot cannot
        have moved on meanwhile (invariant 3: a store waits for writers).
        """
        assert blocks.is_sound, blocks
        record = self._record(slot)
        assert record is not None, slot
        assert record.generation == generation, (slot, generation, record)
        assert record.writers >> rank & 1, (slot, rank, record)
        record.writers ^= 1 << rank
        if ok and (not record.stored or record.blocks == blocks):
            record.stored |= 1 << rank
            record.blocks = blocks
        else:
            record.poisoned = True
        if record.poisoned:
            return self._drop_if_idle(slot, record)
        if record.stored.bit_count() == record.num_ranks:
            self._make_ready(slot, record)
        return record.state

    def _drop_if_idle(self, slot: Slot, record: _SlotRecord) -> SlotState:
        if not record.writers:
            slab = self._slabs[self.geometry.slab_of(slot)]
            self._empty(slot, slab)
            self._failed.append(FailedStore(slot, record.generation, slab.slot_bytes))
        return record.state

    def _make_ready(self, slot: Slot, record: _SlotRecord) -> None:
        self._writing.discard(slot)
        if self._clearings.cover(record.namespace, record.generation):
            self._drop_if_idle(slot, record)
            return
        record.state = SlotState.READY
        slot_bytes = self._slabs[self.geometry.slab_of(slot)].slot_bytes
        self.num_ready += 1
        self.used_bytes += slot_bytes
        self._ready_bytes[record.namespace] += slot_bytes

    def expire(self, now: float) -> int:
        """Poison stores whose other ranks did not come in time; returns how many.

        A rank that is still copying keeps the slot until it has finished.
        """
        late = [slot for slot in self._writing if self._is_late(slot, now)]
        for slot in late:
            record = self._record(slot)
            assert record is not None, slot
            record.poisoned = True
            self._drop_if_idle(slot, record)
        return len(late)

    def _is_late(self, slot: Slot, now: float) -> bool:
        record = self._record(slot)
        return record is not None and not record.poisoned and now >= record.expires_at

    # Loads

    def begin_load(self, name: ChunkName, wanted: Blocks = NO_BLOCKS) -> Refusal:
        """Register a reader; `NONE` means go. The slot is not written until `finish_load`.

        Args:
            name: the chunk.
            wanted: the blocks that will be read. None of them: the reader takes the whole slot, and
                along with it which blocks are there.
        """
        record = self._record(name.slot)
        if record is None or record.generation != name.generation:
            return Refusal.STALE
        if self._slabs[self.geometry.slab_of(name.slot)].slot_bytes != name.slot_bytes:
            return Refusal.STALE
        if record.namespace != name.namespace or record.key != name.key:
            return Refusal.STALE
        if record.state is not SlotState.READY:
            return Refusal.WRITING if record.state is SlotState.WRITING else Refusal.STALE
        if not record.blocks.has(wanted):
            return Refusal.PARTIAL
        record.readers += 1
        return Refusal.NONE

    def finish_load(self, slot: Slot, generation: Generation) -> None:
        """A reader that `begin_load` let in is done."""
        record = self._record(slot)
        assert record is not None, slot
        assert record.generation == generation, (slot, generation, record)
        assert record.readers > 0, (slot, record)
        record.readers -= 1
        if record.readers == 0 and record.state is SlotState.EMPTY:
            record.key = Key(b"")

    # Whole namespaces

    def discard_namespace(self, namespace: Namespace, up_to: Generation) -> int:
        """Discard the namespace's chunks of generations up to `up_to`; returns how many.

        `EVERY_NAMESPACE`: those of all. Later stores and loads of such generations are refused.
        Readers finish undisturbed.
        """
        if not self._clearings.take({namespace: up_to}):
            return 0
        discarded = 0
        for slab in self._slabs.values():
            for slot, record in slab.records.items():
                if not self._clearings.cover(record.namespace, record.generation):
                    continue
                if record.state is SlotState.READY:
                    self._empty(slot, slab)
                    discarded += 1
                elif record.state is SlotState.WRITING:
                    record.poisoned = True
                    self._drop_if_idle(slot, record)
        return discarded

    @property
    def cleared(self) -> dict[str, int]:
        """The generation up to which each namespace was cleared."""
        return self._clearings.told

    # Looking

    def _record(self, slot: Slot) -> _SlotRecord | None:
        slab = self._slabs.get(self.geometry.slab_of(slot))
        return None if slab is None else slab.records.get(slot)

    def _empty(self, slot: Slot, slab: _Slab) -> None:
        """Forget a slot's chunk but keep its generation and its readers."""
        record = slab.records[slot]
        if record.state is SlotState.READY:
            self.num_ready -= 1
            self.used_bytes -= slab.slot_bytes
            self._ready_bytes[record.namespace] -= slab.slot_bytes
            if not self._ready_bytes[record.namespace]:
                del self._ready_bytes[record.namespace]
        self._writing.discard(slot)
        self._unproven.discard(slot)
        record.state = SlotState.EMPTY
        record.checksum = None

    def ready_at(self, slot: Slot, generation: Generation) -> ChunkName | None:
        """The READY chunk in a slot, if the slot is still at that generation."""
        record = self._record(slot)
        if record is None or record.state is not SlotState.READY or record.generation != generation:
            return None
        slot_bytes = self._slabs[self.geometry.slab_of(slot)].slot_bytes
        return ChunkName(record.namespace, record.key, slot, generation, slot_bytes)

    def state_of(self, slot: Slot) -> SlotState:
        """EMPTY also for places that were never used."""
        record = self._record(slot)
        return SlotState.EMPTY if record is None else record.state

    def generation_of(self, slot: Slot) -> Generation:
        """The slot's last generation; `NO_GENERATION` if it was never used."""
        record = self._record(slot)
        return NO_GENERATION if record is None else record.generation

    def readers_of(self, slot: Slot) -> int:
        """Loads that read the slot now."""
        record = self._record(slot)
        return 0 if record is None else record.readers

    def contents(self) -> dict[tuple[SlotState, Namespace], int]:
        """Bytes of READY and WRITING slots by namespace."""
        found = Counter({(SlotState.READY, name): n for name, n in self._ready_bytes.items()})
        for slot in self._writing:
            slab = self._slabs[self.geometry.slab_of(slot)]
            found[SlotState.WRITING, slab.records[slot].namespace] += slab.slot_bytes
        return found

    def inventory(self) -> Iterator[ChunkName]:
        """Every READY chunk, in no particular order."""
        for slab in self._slabs.values():
            for slot, record in slab.records.items():
                if record.state is SlotState.READY:
                    yield ChunkName(
                        record.namespace, record.key, slot, record.generation, slab.slot_bytes
                    )

    def is_ready(self, name: ChunkName) -> bool:
        """Whether a chunk is where its name says."""
        record = self._record(name.slot)
        return (
            record is not None
            and record.state is SlotState.READY
            and record.generation == name.generation
        )

    def take_failed(self, most: int) -> list[FailedStore]:
        """Stores that have failed since the last call, `most` at a time."""
        return [self._failed.popleft() for _ in range(min(most, len(self._failed)))]

    def restore(self, name: ChunkName, checksum: int, blocks: Blocks = ALL_BLOCKS) -> bool:
        """Take back a chunk that outlived the NodeActor's last life (a file-backed pool).

        Its checksum is not proven. False if it can't be there; then nothing has changed.
        """
        if not blocks.is_sound:
            return False
        answer = self.begin_store(name, rank=0, num_ranks=1, expires_at=0.0)
        if answer.admission is not Admission.GO:
            return False
        self.finish_store(name.slot, name.generation, 0, ok=True, blocks=blocks)
        is_there = self.seal(name, checksum)
        assert is_there, name
        self._unproven.add(name.slot)
        return True

    # Checksums

    @property
    def num_unproven(self) -> int:
        """READY chunks whose restored checksums have not been compared yet."""
        return len(self._unproven)

    def _ready_record(self, name: ChunkName) -> _SlotRecord | None:
        return self._record(name.slot) if self.is_ready(name) else None

    def blocks_of(self, name: ChunkName) -> Blocks:
        """The blocks of a READY chunk that were stored; none if it is not there any more."""
        record = self._ready_record(name)
        return NO_BLOCKS if record is None else record.blocks

    def seal(self, name: ChunkName, checksum: int) -> bool:
        """Remember the checksum of a READY chunk; False if it is not there any more."""
        record = self._ready_record(name)
        if record is not None:
            record.checksum = checksum
        return record is not None

    def seal_of(self, name: ChunkName) -> Seal | None:
        """None for a chunk that has no checksum yet, or is not there."""
        record = self._ready_record(name)
        if record is None or record.checksum is None:
            return None
        return Seal(record.checksum, name.slot not in self._unproven, record.blocks)

    def prove(self, name: ChunkName) -> None:
        """A chunk's bytes are those of its checksum."""
        if self.is_ready(name):
            self._unproven.discard(name.slot)

    def quarantine(self, name: ChunkName) -> bool:
        """Discard a READY chunk whose bytes are damaged; False if it is not there any more.

        For others it is as if a store at the next generation had failed there. Readers finish; the
        slot is written again with a higher generation.
        """
        if not self.is_ready(name):
            return False
        self._empty(name.slot, self._slabs[self.geometry.slab_of(name.slot)])
        later = Generation(min(name.generation + 1, MAX_GENERATION))
        self._failed.append(FailedStore(name.slot, later, name.slot_bytes))
        return True

    def check(self) -> None:
        """Assert the invariants over the whole table; for tests and idle moments."""
        ready = 0
        used = 0
        for slab in self._slabs.values():
            for slot, record in slab.records.items():
                assert record.generation <= slab.generation, (slot, record)
                assert not (record.readers and record.writers), (slot, record)
                assert record.state is SlotState.WRITING or not record.writers, (slot, record)
                assert (slot in self._writing) == (record.state is SlotState.WRITING), slot
                assert record.checksum is None or record.state is SlotState.READY, (slot, record)
                assert slot not in self._unproven or record.checksum is not None, (slot, record)
                if record.state is SlotState.READY:
                    assert not self._clearings.cover(record.namespace, record.generation), slot
                    ready += 1
                    used += slab.slot_bytes
                    assert record.stored.bit_count() == record.num_ranks, (slot, record)
        assert ready == self.num_ready, (ready, self.num_ready)
        assert used == self.used_bytes, (used, self.used_bytes)
        assert used == self._ready_bytes.total(), (used, self._ready_bytes)
        assert min(self._ready_bytes.values(), default=1) > 0, self._ready_bytes
