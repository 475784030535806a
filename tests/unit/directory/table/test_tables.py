"""The tables of slots and chunks: the flat one does what that of dicts does, however it grows."""

from __future__ import annotations

import logging
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    NO_GENERATION,
    SLOT_ALIGNMENT,
    EngineId,
    Generation,
    Key,
    Namespace,
    NodeId,
    Slot,
)
from raykv.directory.table.choose import fast_table
from raykv.directory.table.dicts import DictNodeTable, DictTable
from raykv.directory.table.duel import BY_WORTH
from raykv.directory.table.flat import cache
from raykv.directory.table.policies import POLICIES
from raykv.directory.table.protocol import Changes, Found, NodeTable
from raykv.directory.table.worth import Worth
from tests.fixtures.directory import tables

PAGE = SLOT_ALIGNMENT
SLAB_SLOTS = 64
SIZES = (PAGE, 2 * PAGE)
NODES = (NodeId("one"), NodeId("two"), NodeId("three"))
SPACES = (Namespace("model"), Namespace("second"))
ENGINE = EngineId("engine")
OWNERS = (1, 2, 7, 255)


def key(number: int) -> Key:
    """Short ones and long ones, and some that differ by zeros at their end only."""
    lengths = (1, 2, 8, 20, 36, 40)
    return Key(number.to_bytes(4, "little").rstrip(b"\0").ljust(lengths[number % 6], b"\0"))


@dataclass
class Pair:
    """The same done to a table of each kind, and compared."""

    rng: random.Random
    policy: str
    generation: int = 0
    now: float = 0.0
    owners: bool = False
    apart: tuple[int, ...] = ()
    ranked: tuple[NodeId, ...] = NODES

    def __post_init__(self) -> None:
        self.both = [tables.open_table(kind, self.policy) for kind in tables.TABLES]
        self.nodes: dict[NodeId, list[NodeTable]] = {}
        self.slabs: dict[NodeId, list[tuple[int, Generation]]] = {}
        for node_id in NODES:
            self.add(node_id)

    def add(self, node_id: NodeId) -> None:
        geometry = PoolGeometry(40 * SLAB_SLOTS * PAGE, SLAB_SLOTS * PAGE)
        self.nodes[node_id] = [table.add_node(node_id, geometry) for table in self.both]
        for node in self.nodes[node_id]:
            node.set_apart(self.apart)
        self.slabs[node_id] = []

    def lose(self) -> None:
        node_id = self.rng.choice(NODES)
        for table in self.both:
            table.remove_node(node_id)
        self.add(node_id)

    def grow(self) -> None:
        node_id = self.rng.choice(NODES)
        slabs, size = self.slabs[node_id], self.rng.choice(SIZES)
        if len(slabs) < 40:
            for node in self.nodes[node_id]:
                node.give_slab(len(slabs), size, Generation(self.generation))
            slabs.append((size, Generation(self.generation)))

    def change(self) -> None:
        """The flat table is a new one, which learns all from the one of dicts."""
        self.both[1] = tables.open_table("flat", self.policy)
        for node_id, nodes in self.nodes.items():
            old, new = nodes[0], self.both[1].add_node(node_id, nodes[0].geometry)
            assert isinstance(old, DictNodeTable)
            for slab, (size, lowest) in enumerate(self.slabs[node_id]):
                new.give_slab(slab, size, lowest)
            old.pour_into(new)
            nodes[1] = new

    def fill_free(self) -> None:
        """`fill` with what is free."""
        self.fill(may_evict=False)

    def fill(self, *, may_evict: bool = True) -> None:
        """Evict if need be, lease, store; some come at a generation that nobody has leased."""
        nodes, space = self.nodes[self.rng.choice(NODES)], self.rng.choice(SPACES)
        size, count = self.rng.choice(SIZES), self.rng.randrange(1, 60)
        if not may_evict:
            count = min(count, nodes[0].num_free(size))
        missing = max(0, count - nodes[0].num_free(size))
        owner = self.rng.choice((0, *self.apart))
        gone = [node.evict(size, missing, self.now, owner) for node in nodes]
        assert gone[0] == gone[1]
        first = Generation(self.generation + 1)
        self.generation += count + 1
        slots = [node.lend(size, count, ENGINE, 0, first) for node in nodes]
        assert slots[0] == slots[1]
        self.own(nodes, slots[0], first)
        keys = [key(self.rng.randrange(4000)) for _ in slots[0]]
        wrong = self.rng.randrange(count + 10)
        generations = [first + number + (number == wrong) for number in range(len(keys))]
        came = Changes(True, space, keys, slots[0], generations)
        others = [
            node.store(came, [size] * len(keys), NO_GENERATION, from_free=False) for node in nodes
        ]
        assert others[0] == others[1]
        for node in nodes:
            for number in others[0]:
                node.end_lease(slots[0][number], Generation(first + number))

    def own(self, nodes: list[NodeTable], slots: list[Slot], first: int) -> None:
        """Some of what is to be stored at new leases has an owner, if anything has."""
        if self.owners and slots:
            chosen = [number for number in range(len(slots)) if self.rng.random() < 0.6]
            owners = [self.rng.choice(OWNERS) for _ in chosen]
            generations = [first + number for number in chosen]
            for node in nodes:
                node.own([slots[number] for number in chosen], generations, owners)

    def own_held(self) -> None:
        """Chunks that are there get owners, where they have none and are still the same."""
        nodes = self.nodes[self.rng.choice(NODES)]
        held = nodes[0].held_at(nodes[0].places())
        if not len(held):
            return
        rows = [self.rng.randrange(len(held)) for _ in range(40)]
        slots = [held.slots[row] for row in rows]
        generations = [held.generations[row] - (row % 9 == 0) for row in rows]
        owners = [self.rng.choice(OWNERS) for _ in rows]
        for node in nodes:
            node.own([*slots, 1 << 40], [*generations, 1], [*owners, 1])

    def set_apart(self) -> None:
        self.apart = tuple(self.rng.sample(OWNERS, self.rng.randrange(len(OWNERS) + 1)))
        for nodes in self.nodes.values():
            for node in nodes:
                node.set_apart(self.apart)

    def use(self) -> None:
        nodes, space = self.nodes[self.rng.choice(NODES)], self.rng.choice(SPACES)
        keys = [key(self.rng.randrange(4000)) for _ in range(50)]
        until = self.rng.choice((0, 2, 9))
        for node in nodes:
            node.touch(space, keys)
            node.release(space, keys[5:30])
            node.touch(space, keys[20:24])
            node.pin(space, keys[:5], self.now + 3)
            node.protect(space, keys[3:12], self.now + until)
        gone = [node.evict_keys(space, [*keys[8:16], keys[9]], self.now) for node in nodes]
        assert gone[0] == gone[1]

    def ask(self) -> None:
        space = self.rng.choice(SPACES)
        if self.rng.random() < 0.5:
            self.ranked = tuple(self.rng.sample(NODES, len(NODES)))
        first = self.rng.sample(NODES, self.rng.randrange(len(NODES)))
        keys = [key(self.rng.randrange(4000)) for _ in range(self.rng.randrange(1, 200))]
        found: list[Found] = [
            table.ask(space, keys, self.ranked, first, 2, self.now + 2) for table in self.both
        ]
        assert found[0] == found[1]

    def drop(self) -> None:
        nodes, space = self.nodes[self.rng.choice(NODES)], self.rng.choice(SPACES)
        for number in range(self.rng.randrange(4000), 4000, 7):
            chunks = [node.drop(space, key(number)) for node in nodes]
            assert chunks[0] == chunks[1]

    def tick(self) -> None:
        self.now += 1
        for table in self.both:
            table.set_clock(self.now)

    def compare(self, *, in_order: bool = True) -> None:
        self.tick()
        for table in self.both:
            table.check()
        for ours, flat in self.nodes.values():
            assert ours.leases() == flat.leases()
            assert sorted(ours.spares()) == sorted(flat.spares())
            assert count(ours) == count(flat)
            for size in SIZES:
                for owner in (0, *self.apart):
                    orders = [list(node.candidates(size, owner)) for node in (ours, flat)]
                    assert len(orders[0]) == len(orders[1])
                    assert orders[0] == orders[1] if in_order else set(orders[0]) == set(orders[1])
                    assert ours.num_held(size, owner) == flat.num_held(size, owner)
                    assert ours.num_held(size, owner) == len(orders[0])
                    for later in (0, 2, 20):
                        able = [
                            node.can_evict(size, self.now + later, owner) for node in (ours, flat)
                        ]
                        assert able[0] == able[1]
                assert ours.used_at(size) == flat.used_at(size)
                assert ours.num_free(size) == flat.num_free(size)
            assert ours.owned_bytes() == flat.owned_bytes()
            assert owners_of(ours) == owners_of(flat)
            assert ours.pinned_slabs(self.now) == flat.pinned_slabs(self.now)
            assert count_spares(ours) == count_spares(flat) == len(ours.spares())
            held = [node.held_at(node.places()) for node in (ours, flat)]
            rows = [
                sorted(zip(h.namespaces, h.keys, h.slots, h.generations, h.slot_bytes, strict=True))
                for h in held
            ]
            assert rows[0] == rows[1]
            assert sorted(ours.chunks_in({1, 3})) == sorted(flat.chunks_in({1, 3}))


def owners_of(node: NodeTable) -> dict[Slot, int]:
    places = node.places()
    held = node.held_at(places)
    slots = [Slot(slot) for slot in held.slots]
    return dict(zip(slots, node.uses_at(places).owners, strict=True))


def count(node: NodeTable) -> dict[Namespace, int]:
    return {namespace: size for namespace, size in node.sizes().items() if size}


def count_spares(node: NodeTable) -> int:
    return sum(node.uses_at(node.places()).is_spare)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_flat_table_does_what_the_one_of_dicts_does(seed: int, policy: str) -> None:
    pair = Pair(random.Random(seed), policy)
    actions = [pair.fill] * 6 + [pair.grow] * 3 + [pair.use, pair.ask, pair.ask, pair.drop]
    for number in range(400):
        pair.rng.choice(actions)()
        if number % 40 == 39:
            pair.compare()
        if number in (150, 300):
            pair.lose()
    assert len(pair.nodes[NODES[0]][1].places()) > 100


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_flat_table_sets_tenants_apart_as_the_one_of_dicts_does(seed: int, policy: str) -> None:
    pair = Pair(random.Random(seed), policy, owners=True)
    actions = [pair.fill] * 9 + [pair.grow] * 3 + [pair.own_held] * 2
    actions += [pair.use, pair.ask, pair.drop, pair.set_apart]
    for number in range(400):
        pair.rng.choice(actions)()
        if number % 20 == 19:
            pair.compare()
        if number in (150, 300):
            pair.lose()
    assert len(pair.nodes[NODES[0]][0].owned_bytes()) == 1 + len(OWNERS)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_flat_table_gets_all_owners_that_the_one_of_dicts_knows(seed: int, policy: str) -> None:
    pair = Pair(random.Random(seed), policy, owners=True)
    actions = [pair.fill] * 6 + [pair.grow] * 3 + [pair.own_held, pair.use, pair.ask, pair.drop]
    for number in range(200):
        pair.rng.choice(actions)()
        if number == 100:
            pair.set_apart()
    pair.change()
    pair.compare(in_order=False)
    for _ in range(60):
        pair.rng.choice([pair.fill_free, pair.ask, pair.drop, pair.own_held])()
    pair.compare(in_order=False)


def test_both_tables_follow_worth_when_it_has_been_better() -> None:
    """Prompts that come back are small, and others that never do take most of the room."""
    rng, now = random.Random(1), 0.0
    dicts, flat = (tables.open_table(kind, "worth") for kind in tables.TABLES)
    nodes = [each.add_node(NODES[0], PoolGeometry(64 * PAGE, 64 * PAGE)) for each in (dicts, flat)]
    for node in nodes:
        node.give_slab(0, PAGE, NO_GENERATION)
    for turn in range(1500):
        size, prompt = (2, rng.randrange(12)) if turn % 2 else (8, 1000 + turn)
        keys = [Key(f"{prompt}-{part}".encode()) for part in range(size)]
        held = [key for key in keys if nodes[0].find(SPACES[0], key) is not None]
        missing = [key for key in keys if key not in held]
        for node in nodes:
            node.touch(SPACES[0], held)
        gone = [node.evict(PAGE, max(0, len(missing) - node.num_free(PAGE)), now) for node in nodes]
        assert gone[0] == gone[1], turn
        first = Generation(1 + 10 * turn)
        slots = [node.lend(PAGE, len(missing), ENGINE, 0, first) for node in nodes]
        generations = [first + number for number in range(len(missing))]
        came = Changes(True, SPACES[0], missing, slots[0], generations)
        for node in nodes:
            assert not node.store(came, [PAGE] * len(came), NO_GENERATION, from_free=False)
    assert list(nodes[0].candidates(PAGE)) == list(nodes[1].candidates(PAGE))
    assert isinstance(nodes[0], DictNodeTable)
    policy = nodes[0]._classes[PAGE].of(0).policy
    assert isinstance(policy, Worth)
    assert policy.goes_by == BY_WORTH


@pytest.fixture(params=tables.TABLES)
def node(request: pytest.FixtureRequest) -> NodeTable:
    """Two slabs, the first of four slots of one page."""
    made = tables.open_table(request.param).add_node(NODES[0], PoolGeometry(8 * PAGE, 4 * PAGE))
    made.give_slab(0, PAGE, Generation(5))
    return made


def test_slot_that_nobody_has_cut_has_no_lease_and_is_not_free(node: NodeTable) -> None:
    for place in (-1, 4, 7, 8, 1 << 40):
        assert node.lease_of(Slot(place)) is None
        assert node.lowest(Slot(place), PAGE) is None
    assert node.lowest(Slot(0), PAGE) == 5
    assert node.lowest(Slot(0), 2 * PAGE) is None


def test_slab_that_is_taken_and_cut_otherwise_has_other_slots(node: NodeTable) -> None:
    assert node.take_slab(0, PAGE) == 5
    node.give_slab(0, 2 * PAGE, Generation(6))
    assert (node.num_free(PAGE), node.num_free(2 * PAGE)) == (0, 2)
    assert node.lowest(Slot(2), 2 * PAGE) == 6
    assert node.lowest(Slot(1), 2 * PAGE) is None
    node.check()


def test_claimed_slot_is_leased_or_free_again(node: NodeTable) -> None:
    node.claim(Slot(1), PAGE)
    node.claim(Slot(2), PAGE)
    assert node.num_free(PAGE) == 2
    node.unclaim(Slot(1), PAGE, Generation(9))
    assert node.lowest(Slot(1), PAGE) == 9
    assert node.lend(PAGE, 9, ENGINE, 3, Generation(20)) == [0, 3, 1]
    lease = node.lease_of(Slot(3))
    assert lease is not None
    assert (lease.engine_id, lease.group, lease.generation) == (ENGINE, 3, 21)
    assert node.num_leases == 3


def test_stored_chunks_that_need_thought_are_left_out(node: NodeTable) -> None:
    slots = node.lend(PAGE, 3, ENGINE, 0, Generation(10))
    columns = [b"a", b"b", b"a", b"c"], [*slots, 3], [10, 12, 12, 13]
    came = Changes(True, SPACES[0], *columns)
    others = node.store(came, [PAGE] * 4, Generation(9), from_free=False)
    assert others == [1, 2, 3], "another generation, a key that is held, a slot that is free"
    others = node.store(came.at([3]), [PAGE], Generation(13), from_free=True)
    assert others == [0], "it was cleared"
    assert node.store(came.at([3]), [2 * PAGE], Generation(9), from_free=True) == [0]
    assert node.store(came.at([3]), [PAGE], Generation(9), from_free=True) == []
    assert node.sizes() == {SPACES[0]: 2}


def test_table_of_dicts_serves_where_numba_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "raykv.directory.table.flat.flat_table", None)
    with caplog.at_level(logging.WARNING):
        assert fast_table("lru") is None
    assert "without numba" in caplog.text


@pytest.mark.parametrize("policy", POLICIES)
def test_table_is_the_flat_one_for_every_policy(policy: str) -> None:
    assert type(fast_table(policy)).__name__ == "FlatTable"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_flat_table_gets_all_that_the_one_of_dicts_knows(seed: int, policy: str) -> None:
    pair = Pair(random.Random(seed), policy)
    actions = [pair.fill] * 6 + [pair.grow] * 3 + [pair.use, pair.ask, pair.drop]
    for number in range(200):
        pair.rng.choice(actions)()
        if number % 20 == 0:
            pair.tick()
    pair.change()
    pair.compare(in_order=False)
    # Leases and pins go on, and free slots are lent in the same order.
    for _ in range(60):
        pair.rng.choice([pair.fill_free, pair.ask, pair.drop])()
    pair.compare(in_order=False)


def test_chunks_of_a_new_table_are_given_up_in_the_order_of_the_old_one() -> None:
    old = DictTable("lru")
    node = old.add_node(NODES[0], PoolGeometry(8 * PAGE, 8 * PAGE))
    node.give_slab(0, PAGE, NO_GENERATION)
    slots = node.lend(PAGE, 8, ENGINE, 0, Generation(10))
    keys = [key(number) for number in range(8)]
    for number in (4, 2, 7, 1, 0, 3, 6, 5):
        old.set_clock(old._clock.now + 1)
        came = Changes(True, SPACES[0], [keys[number]], [slots[number]], [10 + number])
        assert not node.store(came, [PAGE], NO_GENERATION, from_free=False)
    old.set_clock(20.0)
    node.touch(SPACES[0], keys[2:4])
    node.release(SPACES[0], [keys[6], keys[1]])
    new = tables.open_table("flat").add_node(NODES[0], node.geometry)
    new.give_slab(0, PAGE, NO_GENERATION)
    node.pour_into(new)
    assert list(new.candidates(PAGE)) == list(node.candidates(PAGE))
    assert list(new.candidates(PAGE))[:2] == [slots[6], slots[1]]


def test_compiled_code_is_kept_apart_for_each_state_of_its_sources(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    first = cache.folder()
    assert first == cache.folder()
    assert first.parent == tmp_path
    other = tmp_path / "worth.py"
    other.write_text("NUM_QUEUES = 4")
    monkeypatch.setattr("raykv.directory.table.worth.__file__", str(other))
    assert cache.folder() != first


def test_compiled_code_goes_elsewhere_if_a_folder_is_not_to_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(blocked))
    monkeypatch.setattr("raykv.directory.table.flat.cache.__file__", str(blocked / "cache.py"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache.folder().parent == tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = cache.folder()
    assert made.is_dir()
    assert made != cache.folder(), "nobody else may have put anything there"
