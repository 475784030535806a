"""The slot table against a naive model that keeps every store ever begun, and bytes that can mix.

The model has its own idea of who may go, which it finds by looking through all stores. And it has
the pool's memory, half page by half page: writers write and readers read one cell at a time, all
of them interleaved, so that a store or a load that is admitted wrongly meets wrong bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    EVERY_NAMESPACE,
    NO_BLOCKS,
    Blocks,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Refusal,
    Slot,
)
from raykv.node.slots import Admission, SlotState, SlotTable

PAGE = 4096
SLAB = 4
NUM_PAGES = 8
RANKS = (1, 2)

NUMBERS = {
    ALL_BLOCKS: "0123…",
    NO_BLOCKS: "",
    Blocks(0, 1): "0",
    Blocks(1, 1): "1",
    Blocks(0, 2): "01",
    Blocks(1, 2): "12",
    Blocks(0, 4): "0123",
}
"""The blocks that a store or a load may be about, one by one."""

SOME_BLOCKS = st.sampled_from([*[ALL_BLOCKS] * 4, Blocks(0, 2), Blocks(1, 2), Blocks(1, 1)])
"""What is stored."""

ANY_BLOCKS = st.sampled_from(list(NUMBERS))
"""What is loaded."""


@dataclass(eq=False)
class Store:
    """One store: `done` has the bytes of each rank that has finished."""

    namespace: str
    key: bytes
    slot: int
    generation: int
    pages: int
    num_ranks: int
    expires_at: float
    era: int
    writing: dict[int, Write] = field(default_factory=dict)
    done: dict[int, str] = field(default_factory=dict)
    numbers: str = ""
    is_failed: bool = False
    is_dead: bool = False

    @property
    def is_ready(self) -> bool:
        return not self.is_dead and not self.is_failed and len(self.done) == self.num_ranks

    @property
    def name(self) -> ChunkName:
        return ChunkName(
            Namespace(self.namespace),
            Key(self.key),
            Slot(self.slot),
            Generation(self.generation),
            self.pages * PAGE,
        )

    def cells(self, rank: int) -> list[int]:
        """Where a rank's part is: each page has two cells, each rank an equal share of them."""
        count = 2 * self.pages // self.num_ranks
        return [2 * self.slot + rank * count + i for i in range(count)]

    def fail(self) -> None:
        self.is_failed = True
        self.bury_if_idle()

    def bury_if_idle(self) -> None:
        if self.is_failed and not self.writing:
            self.is_dead = True


@dataclass(eq=False)
class Write:
    """A rank that copies; `left` are the cells that it has not written yet."""

    store: Store
    rank: int
    text: str
    left: list[int]


@dataclass(eq=False)
class Read:
    """A load that copies; `left` are cells that it has not read yet, with what must be there."""

    store: Store
    left: list[tuple[int, str]]


class SlotTableMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.table = SlotTable(PoolGeometry(NUM_PAGES * PAGE, SLAB * PAGE))
        self.now = 0.0
        self.stores: list[Store] = []
        self.reads: list[Read] = []
        self.cleared: dict[str, int] = {}
        self.memory: dict[int, str] = {}
        self.texts = 0
        self.eras = [0] * (NUM_PAGES // SLAB)

    # What the model knows

    def floor_of(self, namespace: str) -> int:
        return max(self.cleared.get(namespace, 0), self.cleared.get(EVERY_NAMESPACE, 0))

    def of_slab(self, slab: int) -> list[Store]:
        return [store for store in self.stores if store.slot // SLAB == slab]

    def size_of_slab(self, slab: int) -> int | None:
        stores = self.of_slab(slab)
        return stores[-1].pages if stores else None

    def at(self, slot: int) -> Store | None:
        """The last store at a place since its slab has the size that it has."""
        found = None
        for store in self.of_slab(slot // SLAB) if 0 <= slot < NUM_PAGES else []:
            if store.slot == slot and store.era == self.eras[slot // SLAB]:
                found = store
        return found

    def is_busy(self, store: Store) -> bool:
        return bool(store.writing) or any(read.store is store for read in self.reads)

    @property
    def writes(self) -> list[Write]:
        return [write for store in self.stores for write in store.writing.values()]

    @property
    def highest(self) -> int:
        return max((store.generation for store in self.stores), default=0)

    def verdict(self, new: Store, rank: int) -> tuple[Admission, Refusal]:
        """What the table must answer to the first or a further rank of a store."""
        slab = new.slot // SLAB
        inside = range(SLAB - new.pages + 1)
        if not 0 <= new.slot < NUM_PAGES or new.slot % SLAB not in inside[:: new.pages]:
            return Admission.REFUSED, Refusal.BAD_HANDLE
        if new.generation <= self.floor_of(new.namespace):
            return Admission.REFUSED, Refusal.CLEARED
        stores = self.of_slab(slab)
        if self.size_of_slab(slab) not in (None, new.pages):
            if any(new.generation <= store.generation for store in stores):
                return Admission.REFUSED, Refusal.STALE
            is_busy = any(map(self.is_busy, stores))
            return (Admission.WAIT if is_busy else Admission.GO), Refusal.NONE
        before = [store for store in stores if store.era != self.eras[slab]]
        if any(new.generation <= store.generation for store in before):
            return Admission.REFUSED, Refusal.STALE
        there = self.at(new.slot)
        if there is None:
            return Admission.GO, Refusal.NONE
        if new.generation > there.generation:
            busy = [store for store in stores if store.slot == new.slot and self.is_busy(store)]
            return (Admission.WAIT if busy else Admission.GO), Refusal.NONE
        return self.verdict_on_rank(new, rank, there)

    def verdict_on_rank(self, new: Store, rank: int, there: Store) -> tuple[Admission, Refusal]:
        is_same = (new.namespace, new.key, new.generation, new.num_ranks) == (
            there.namespace,
            there.key,
            there.generation,
            there.num_ranks,
        )
        is_over = there.is_dead or there.is_ready
        if not is_same or is_over or rank in there.writing or rank in there.done:
            return Admission.REFUSED, Refusal.STALE
        if there.is_failed:
            return Admission.REFUSED, Refusal.POISONED
        return Admission.GO, Refusal.NONE

    # Stores

    def ask_to_store(self, new: Store, rank: int) -> None:
        expected = self.verdict(new, rank)
        answer = self.table.begin_store(new.name, rank, new.num_ranks, new.expires_at)
        assert (answer.admission, answer.refusal) == expected
        if answer.admission is Admission.GO:
            self.let_in(new, rank)

    def let_in(self, new: Store, rank: int) -> None:
        there = self.at(new.slot)
        if there is None or there.generation != new.generation:
            self.replace(new)
            there = new
        self.texts += 1
        text = f"{there.namespace} {there.key!r} {there.generation} {rank} {self.texts}"
        there.writing[rank] = Write(there, rank, text, there.cells(rank))

    def replace(self, new: Store) -> None:
        slab = new.slot // SLAB
        if self.size_of_slab(slab) not in (None, new.pages):
            self.eras[slab] += 1
            for store in self.of_slab(slab):
                store.is_dead = True
        there = self.at(new.slot)
        if there is not None:
            there.is_dead = True
        touched = set(range(new.slot, new.slot + new.pages))
        for store in self.stores:
            if touched & set(range(store.slot, store.slot + store.pages)):
                assert store.generation < new.generation, "a slot's generation fell"
        new.era = self.eras[slab]
        self.stores.append(new)

    @rule(
        namespace=st.sampled_from(["x", "y"]),
        key=st.sampled_from([b"a", b"b"]),
        slot=st.integers(0, NUM_PAGES - 1),
        pages=st.sampled_from([1, 1, 2]),
        newer=st.integers(-1, 2),
        num_ranks=st.sampled_from(RANKS),
        lasts=st.integers(0, 4),
        rank=st.integers(0, 1),
    )
    def store_somewhere(
        self,
        namespace: str,
        key: bytes,
        slot: int,
        pages: int,
        newer: int,
        num_ranks: int,
        lasts: int,
        rank: int,
    ) -> None:
        generation = max(1, self.highest + newer)
        slot -= slot % SLAB % pages
        expires_at = self.now + lasts
        new = Store(namespace, key, slot, generation, pages, num_ranks, expires_at, era=-1)
        self.ask_to_store(new, rank % num_ranks)

    @rule(
        slot=st.integers(-2, NUM_PAGES + 1),
        pages=st.integers(1, SLAB + 1),
        newer=st.integers(-4, 1),
    )
    def store_at_an_odd_place_or_with_an_odd_generation(
        self, slot: int, pages: int, newer: int
    ) -> None:
        generation = max(1, self.highest + newer)
        self.ask_to_store(Store("x", b"a", slot, generation, pages, 1, self.now + 1, era=-1), 0)

    @precondition(lambda self: any(self.eras))
    @rule(data=st.data(), number=st.integers(0, SLAB - 1))
    def store_late_into_a_slab_that_has_another_slot_size_by_now(
        self, data: st.DataObject, number: int
    ) -> None:
        slab = data.draw(st.sampled_from([i for i, era in enumerate(self.eras) if era]))
        pages = self.size_of_slab(slab) or 1
        earlier = [store for store in self.of_slab(slab) if store.era != self.eras[slab]]
        generation = data.draw(st.sampled_from(earlier)).generation
        slot = slab * SLAB + number - number % pages
        self.ask_to_store(Store("x", b"a", slot, generation, pages, 1, self.now + 1, era=-1), 0)

    @precondition(lambda self: self.stores)
    @rule(
        data=st.data(),
        rank=st.integers(0, 1),
        key=st.sampled_from([None, None, None, None, b"a"]),
        namespace=st.sampled_from([None, None, None, None, "x"]),
        newer=st.sampled_from([0, 0, 0, 1]),
    )
    def store_by_another_rank(
        self,
        data: st.DataObject,
        rank: int,
        key: bytes | None,
        namespace: str | None,
        newer: int,
    ) -> None:
        old = data.draw(st.sampled_from(self.stores[-4:]))
        new = Store(
            namespace or old.namespace,
            key or old.key,
            old.slot,
            old.generation + newer,
            old.pages,
            old.num_ranks,
            self.now + 3,
            era=-1,
        )
        self.ask_to_store(new, rank % old.num_ranks)

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def write_a_cell(self, data: st.DataObject) -> None:
        write = data.draw(st.sampled_from(self.writes))
        if write.left:
            self.write(write, write.left.pop())

    def write(self, write: Write, cell: int) -> None:
        for read in self.reads:
            assert cell not in [where for where, _ in read.left], "written while it is read"
        for other in self.writes:
            assert other is write or cell not in other.store.cells(other.rank), "two writers"
        self.memory[cell] = write.text

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), ok=st.sampled_from([True, True, True, False]), blocks=SOME_BLOCKS)
    def finish_a_store(self, data: st.DataObject, ok: bool, blocks: Blocks) -> None:
        write = data.draw(st.sampled_from(self.writes))
        for cell in write.left if ok else []:
            self.write(write, cell)
        store = write.store
        del store.writing[write.rank]
        if ok and (not store.done or store.numbers == NUMBERS[blocks]):
            store.done[write.rank] = write.text
            store.numbers = NUMBERS[blocks]
        else:
            store.is_failed = True
        store.bury_if_idle()
        state = self.table.finish_store(
            Slot(store.slot), Generation(store.generation), write.rank, ok, blocks
        )
        assert state is self.state_of(store)

    # Loads

    def ask_to_load(self, name: ChunkName, wanted: Blocks) -> None:
        there = self.at(name.slot)
        is_there = (
            there is not None
            and not there.is_dead
            and (there.namespace, there.key) == (name.namespace, name.key)
            and there.generation == name.generation
            and there.pages * PAGE == name.slot_bytes
        )
        refusal = self.table.begin_load(name, wanted)
        if there is None or not is_there:
            assert refusal is Refusal.STALE
        elif not there.is_ready:
            assert refusal is Refusal.WRITING
        elif not set(NUMBERS[wanted]) <= set(there.numbers):
            assert refusal is Refusal.PARTIAL
        else:
            assert refusal is Refusal.NONE
            cells = [
                (cell, text) for rank, text in there.done.items() for cell in there.cells(rank)
            ]
            self.reads.append(Read(there, cells))

    @precondition(lambda self: self.stores)
    @rule(data=st.data(), wanted=ANY_BLOCKS)
    def load_what_was_stored_once(self, data: st.DataObject, wanted: Blocks) -> None:
        self.ask_to_load(data.draw(st.sampled_from(self.stores[-6:])).name, wanted)

    @precondition(lambda self: any(store.is_ready for store in self.stores))
    @rule(data=st.data(), wanted=ANY_BLOCKS)
    def load_what_is_ready(self, data: st.DataObject, wanted: Blocks) -> None:
        ready = [store for store in self.stores if store.is_ready]
        self.ask_to_load(data.draw(st.sampled_from(ready)).name, wanted)

    @precondition(lambda self: self.stores)
    @rule(
        data=st.data(),
        namespace=st.sampled_from(["x", "y"]),
        key=st.sampled_from([b"a", b"b"]),
        newer=st.integers(-1, 1),
    )
    def load_something_else(
        self, data: st.DataObject, namespace: str, key: bytes, newer: int
    ) -> None:
        store = data.draw(st.sampled_from(self.stores[-4:]))
        generation = Generation(store.generation + newer)
        slot = Slot(store.slot)
        name = ChunkName(Namespace(namespace), Key(key), slot, generation, PAGE)
        self.ask_to_load(name, NO_BLOCKS)

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def read_a_cell(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.reads))
        if read.left:
            self.read(*read.left.pop())

    def read(self, cell: int, text: str) -> None:
        assert self.memory[cell] == text, "a load has read what was not stored under its name"

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def finish_a_load(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.reads))
        for cell, text in read.left:
            self.read(cell, text)
        self.reads.remove(read)
        self.table.finish_load(Slot(read.store.slot), Generation(read.store.generation))

    # Time and namespaces

    @rule(passes=st.integers(0, 3))
    def expire(self, passes: int) -> None:
        self.now += passes
        late = [
            store
            for store in self.stores
            if not store.is_dead and not store.is_ready and not store.is_failed
            if self.now >= store.expires_at
        ]
        for store in late:
            store.fail()
        assert self.table.expire(self.now) == len(late)

    @rule(
        namespace=st.sampled_from(["x", "x", "y", "y", EVERY_NAMESPACE]), older=st.integers(-1, 4)
    )
    def discard_namespace(self, namespace: str, older: int) -> None:
        up_to = self.highest - older
        ready = 0
        if up_to > self.floor_of(namespace):
            self.cleared[namespace] = up_to
            for store in self.stores:
                is_meant = namespace in (EVERY_NAMESPACE, store.namespace)
                if not is_meant or store.generation > up_to or store.is_dead:
                    continue
                ready += store.is_ready
                if store.is_ready:
                    store.is_dead = True
                else:
                    store.fail()
        assert self.table.discard_namespace(Namespace(namespace), Generation(up_to)) == ready

    # What always holds

    def state_of(self, store: Store | None) -> SlotState:
        if store is None or store.is_dead:
            return SlotState.EMPTY
        return SlotState.READY if store.is_ready else SlotState.WRITING

    @invariant()
    def table_is_consistent(self) -> None:
        self.table.check()

    @invariant()
    def table_agrees_with_the_model(self) -> None:
        for slot in range(NUM_PAGES):
            there = self.at(slot)
            assert self.table.state_of(Slot(slot)) is self.state_of(there)
            assert self.table.generation_of(Slot(slot)) == (there.generation if there else 0)
            readers = sum(read.store is there for read in self.reads)
            assert self.table.readers_of(Slot(slot)) == readers
        ready = [store for store in self.stores if store.is_ready]
        assert {store.name for store in ready} == set(self.table.inventory())
        for store in ready:
            assert NUMBERS[self.table.blocks_of(store.name)] == store.numbers
        assert self.table.num_ready == len(ready)
        assert self.table.used_bytes == sum(store.pages for store in ready) * PAGE
        assert self.table.highest_generation == self.highest
        every = self.cleared.get(EVERY_NAMESPACE, 0)
        assert self.table.cleared == {
            name: floor
            for name, floor in self.cleared.items()
            if name == EVERY_NAMESPACE or floor > every
        }


SlotTableMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None
)
test_slot_table_admits_what_the_model_admits_and_never_mixes_bytes = SlotTableMachine.TestCase
