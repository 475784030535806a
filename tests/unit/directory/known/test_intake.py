"""The directory reads the nodes' listings, over a wire that loses, repeats and delays."""

from __future__ import annotations

import random

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Key, Namespace, NodeId, Stamp, in_group
from raykv.directory.known.holdings import HeldAt, Holdings
from raykv.directory.known.intake import Intake, MovedChunk
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import OfferedChunk, PoolIndex, StorePart
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord
from raykv.protocol.listing import ALL_READ, ListingPart, Position, Reason, Where

PAGE = 4096
NODES = [NodeId("one"), NodeId("two")]
SPACE = Namespace("n")
KEYS = [in_group(Key(bytes([number]) * 8), 0) for number in range(12)]


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
        found = self.index.begin_store(part, chunk, self.now, self.now + 30)
        if isinstance(found, ChunkRecord):
            self.index.end_store(found, 0, ok=True)
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
        intake = Intake(holdings := Holdings())
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
                    intake = Intake(holdings := Holdings())
                case 7 | 8 | 9:
                    part = node.index.part_after(intake.position(node_id), source.randrange(1, 5))
                    on_their_way.append((node_id, part))
                case _ if on_their_way:
                    at = source.randrange(len(on_their_way))
                    intake.take(*on_their_way[at])
                    if source.randrange(2):
                        del on_their_way[at]
            holdings.check()
        for node_id, node in nodes.items():
            for _ in range(40):
                intake.take(node_id, node.index.part_after(intake.position(node_id), 3))
            assert node.is_read(intake.position(node_id)), seed
        expected = [
            {HeldAt(name, Where.RAM) for name, node in nodes.items() if node.index.find(SPACE, key)}
            for key in KEYS
        ]
        assert [set(held) for held in holdings.ask(SPACE, KEYS)] == expected, seed


@pytest.fixture
def intake() -> Intake:
    return Intake(Holdings())


def test_changes_are_told_as_what_was_and_what_is(intake: Intake) -> None:
    node = Node(1)
    node.store(KEYS[0])
    first = intake.take(NODES[0], node.index.part_after(Position(), 9))
    assert not first.begins
    assert first.moved == [MovedChunk(SPACE, KEYS[0], Where.NOWHERE, Where.RAM, Reason.STORED)]
    node.drop(KEYS[0])
    node.store(KEYS[1])
    part = node.index.part_after(intake.position(NODES[0]), 9)
    assert intake.take(NODES[0], part).moved == [
        MovedChunk(SPACE, KEYS[0], Where.RAM, Where.NOWHERE, Reason.DAMAGED),
        MovedChunk(SPACE, KEYS[1], Where.NOWHERE, Where.RAM, Reason.STORED),
    ]
    assert not intake.take(NODES[0], part).moved


def test_new_life_is_a_node_that_was_lost_and_an_old_one_says_nothing(intake: Intake) -> None:
    old, new = Node(1), Node(2)
    old.store(KEYS[0])
    late = old.index.part_after(Position(), 9)
    intake.take(NODES[0], late)
    new.store(KEYS[1])
    taken = intake.take(NODES[0], new.index.part_after(intake.position(NODES[0]), 9))
    assert taken.begins
    assert taken.moved == [MovedChunk(SPACE, KEYS[1], Where.NOWHERE, Where.RAM, Reason.STORED)]
    assert not intake.take(NODES[0], late).moved
    assert intake.lose(NODES[0])
    assert not intake.lose(NODES[0])
