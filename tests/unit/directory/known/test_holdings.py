"""Which nodes have which chunk: what each said last, and what sweeping may not change."""

from __future__ import annotations

import random

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NO_BLOCKS, Key, Namespace, NodeId, Stamp, in_group
from raykv.directory.known.holdings import HeldAt, Holdings, MovedChunks
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord, OfferedChunk, StorePart
from raykv.protocol.listing import ALL_READ, ListedRow, ListingPart, Position, Reason, Where
from tests.fixtures.directory.reporting import listed, sizes
from tests.fixtures.node.owned_pool import end_store

A, B = Namespace("a"), Namespace("b")
ONE, TWO = NodeId("one"), NodeId("two")
K, L = Key(b"k"), Key(b"l")


def put(holdings: Holdings, node_id: NodeId, namespace: Namespace, key: Key, where: Where) -> Where:
    """A node says where it has a chunk; returns where it was there before."""
    row = ListedRow(namespace, key, where, NO_BLOCKS, Reason.STORED)
    moved = listed(holdings, node_id, row)
    return moved[0].before if moved else where


@pytest.fixture
def holdings() -> Holdings:
    return Holdings()


def test_key_is_where_nodes_say(holdings: Holdings) -> None:
    assert put(holdings, ONE, A, K, Where.RAM) is Where.NOWHERE
    assert put(holdings, TWO, A, K, Where.RAM | Where.DISK) is Where.NOWHERE
    assert holdings.ask(A, [K, L]) == [
        (HeldAt(ONE, Where.RAM), HeldAt(TWO, Where.RAM | Where.DISK)),
        (),
    ]
    assert holdings.ask(B, [K]) == [()]
    assert put(holdings, TWO, A, K, Where.DISK) is Where.RAM | Where.DISK
    assert put(holdings, ONE, A, K, Where.NOWHERE) is Where.RAM
    assert put(holdings, ONE, A, K, Where.NOWHERE) is Where.NOWHERE
    assert holdings.ask(A, [K]) == [(HeldAt(TWO, Where.DISK),)]
    assert put(holdings, TWO, A, K, Where.NOWHERE) is Where.DISK
    assert sizes(holdings) == {}
    holdings.check()


def test_node_that_is_gone_has_nothing_at_once_and_comes_back_with_nothing(
    holdings: Holdings,
) -> None:
    put(holdings, ONE, A, K, Where.RAM)
    put(holdings, TWO, A, K, Where.RAM)
    put(holdings, ONE, A, L, Where.RAM)
    holdings.lose(ONE)
    assert holdings.ask(A, [K, L]) == [(HeldAt(TWO, Where.RAM),), ()]
    assert holdings.ask(A, [K, L]) == [(HeldAt(TWO, Where.RAM),), ()]
    put(holdings, ONE, A, L, Where.RAM)
    while holdings.sweep(1):
        holdings.check()
    assert holdings.ask(A, [K, L]) == [(HeldAt(TWO, Where.RAM),), (HeldAt(ONE, Where.RAM),)]


def test_keys_that_are_nowhere_are_swept_in_pieces(holdings: Holdings) -> None:
    for number in range(100):
        put(holdings, ONE, A, Key(bytes([number])), Where.RAM)
    put(holdings, TWO, B, K, Where.RAM)
    holdings.lose(ONE)
    assert sizes(holdings) == {A: 100, B: 1}
    steps = 1
    while holdings.sweep(10):
        steps += 1
    assert steps > 10
    assert sizes(holdings) == {B: 1}
    holdings.check()


@pytest.mark.parametrize("seed", range(5))
def test_holdings_are_those_of_a_plain_dictionary(seed: int) -> None:
    rng, holdings = random.Random(seed), Holdings()
    nodes = [NodeId(str(number)) for number in range(4)]
    truth: dict[tuple[Namespace, Key], dict[NodeId, Where]] = {}
    there: set[NodeId] = set()
    for step in range(3000):
        node = rng.choice(nodes)
        name = rng.choice([A, B]), Key(bytes([rng.randrange(30)]))
        if node not in there:
            listed(holdings, node)
            there.add(node)
        elif rng.random() < 0.02:
            holdings.lose(node)
            there.remove(node)
            for held in truth.values():
                held.pop(node, None)
        else:
            where = Where(rng.randrange(4))
            before = truth.setdefault(name, {}).pop(node, Where.NOWHERE)
            assert put(holdings, node, *name, where) is before
            if where:
                truth[name][node] = where
        if rng.random() < 0.3:
            holdings.sweep(5)
        (found,) = holdings.ask(name[0], [name[1]])
        assert {each.node_id: each.where for each in found} == truth.get(name, {})
        if step % 50 == 0:
            holdings.check()
    while holdings.sweep(100):
        pass
    assert sum(sizes(holdings).values()) == sum(bool(held) for held in truth.values())


# Listings, over a wire that loses, repeats and delays

PAGE = 4096
NODES = [ONE, TWO]
SPACE = Namespace("n")
HELD = (HeldAt(ONE, Where.RAM),)
KEYS = [in_group(Key(bytes([number]) * 8), 0) for number in range(12)]


def came(key: Key) -> MovedChunks:
    """To the first node."""
    return MovedChunks(SPACE, [key], Where.NOWHERE, Where.RAM, Reason.STORED, HELD)


class Node:
    """A NodeActor's pool, one life after the other."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.index = PoolIndex(PoolGeometry(8 * PAGE, 8 * PAGE), Listing(life, most=6), Floors(1))
        self.jobs = 0
        self.now = 0.0

    def store(self, key: Key) -> None:
        self.jobs += 1
        self.now += 10.0
        part = StorePart(1, self.jobs)
        chunk = OfferedChunk(SPACE, key, PAGE, Stamp(1, 1))
        (found,) = self.index.begin_stores(part, [chunk], self.now, self.now + 30)
        if isinstance(found, ChunkRecord):
            end_store(self.index, found, 0, ok=True)
        self.index.end_job(part)

    def drop(self, key: Key) -> None:
        record = self.index.find(SPACE, key)
        if record is not None:
            self.index.drop(record, Reason.DAMAGED)

    def is_read(self, position: Position) -> bool:
        return position == Position(self.life, self.index.listing.number, ALL_READ)


def test_what_nodes_have_is_known_in_the_end_whatever_is_lost() -> None:
    for seed in range(60):
        source = random.Random(seed)
        nodes = {node_id: Node(1) for node_id in NODES}
        holdings = Holdings()
        on_their_way: list[tuple[NodeId, ListingPart]] = []
        for _ in range(source.randrange(150)):
            node_id = source.choice(NODES)
            node, key = nodes[node_id], source.choice(KEYS)
            match source.randrange(12):
                case 0 | 1 | 2 | 3:
                    node.store(key)
                case 4:
                    node.drop(key)
                case 5 if not source.randrange(4):
                    nodes[node_id] = Node(node.life + 1)
                case 6 if not source.randrange(4):
                    holdings = Holdings()
                case 7 | 8 | 9:
                    part = node.index.part_after(holdings.position(node_id), source.randrange(1, 5))
                    on_their_way.append((node_id, part))
                case _ if on_their_way:
                    at = source.randrange(len(on_their_way))
                    holdings.take(*on_their_way[at])
                    if source.randrange(2):
                        del on_their_way[at]
            holdings.check()
        for node_id, node in nodes.items():
            for _ in range(40):
                holdings.take(node_id, node.index.part_after(holdings.position(node_id), 3))
            assert node.is_read(holdings.position(node_id)), seed
        expected = [
            {HeldAt(name, Where.RAM) for name, node in nodes.items() if node.index.find(SPACE, key)}
            for key in KEYS
        ]
        assert [set(held) for held in holdings.ask(SPACE, KEYS)] == expected, seed


def test_changes_are_told_as_what_was_and_what_is(holdings: Holdings) -> None:
    node = Node(1)
    node.store(KEYS[0])
    first = holdings.take(NODES[0], node.index.part_after(Position(), 9))
    assert not first.begins
    assert first.moved == [
        MovedChunks(SPACE, [KEYS[0]], Where.NOWHERE, Where.RAM, Reason.STORED, HELD)
    ]
    node.drop(KEYS[0])
    node.store(KEYS[1])
    part = node.index.part_after(holdings.position(NODES[0]), 9)
    assert holdings.take(NODES[0], part).moved == [
        MovedChunks(SPACE, [KEYS[0]], Where.RAM, Where.NOWHERE, Reason.DAMAGED, ()),
        MovedChunks(SPACE, [KEYS[1]], Where.NOWHERE, Where.RAM, Reason.STORED, HELD),
    ]
    assert not holdings.take(NODES[0], part).moved


def test_new_life_is_a_node_that_was_lost_and_an_old_one_says_nothing(holdings: Holdings) -> None:
    old, new = Node(1), Node(2)
    old.store(KEYS[0])
    late = old.index.part_after(Position(), 9)
    holdings.take(NODES[0], late)
    new.store(KEYS[1])
    taken = holdings.take(NODES[0], new.index.part_after(holdings.position(NODES[0]), 9))
    assert taken.begins
    assert taken.moved == [
        MovedChunks(SPACE, [KEYS[1]], Where.NOWHERE, Where.RAM, Reason.STORED, HELD)
    ]
    assert not holdings.take(NODES[0], late).moved
    assert holdings.lose(NODES[0])
    assert not holdings.lose(NODES[0])
