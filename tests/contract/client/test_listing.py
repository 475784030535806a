"""Both tables of chunks list what they hold alike: by slots, in stretches, with its uses."""

from __future__ import annotations

import random

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    NO_GENERATION,
    SLOT_ALIGNMENT,
    EngineId,
    Generation,
    Namespace,
    NodeId,
    Slot,
)
from raykv.directory.table.protocol import Changes, ChunkTable, NodeTable, Uses
from tests.fixtures.directory import tables
from tests.fixtures.keys import numbered_key as key

PAGE = SLOT_ALIGNMENT
SLAB_SLOTS = 16
SLABS = 6
SIZES = (PAGE, 3 * PAGE)
GEOMETRY = PoolGeometry(SLABS * SLAB_SLOTS * PAGE, SLAB_SLOTS * PAGE)
TICK_S = 1 / 16
SPACE, OTHER = Namespace("model"), Namespace("other")


@pytest.fixture(params=tables.TABLES)
def table(request: pytest.FixtureRequest) -> ChunkTable:
    return tables.open_table(request.param, "worth")


def fill(
    node: NodeTable, numbers: list[int], size: int = PAGE, space: Namespace = SPACE
) -> list[int]:
    """Store chunks; returns their slots."""
    first = Generation(1)
    slots = node.lend(size, len(numbers), EngineId("e"), 0, first)
    assert len(slots) == len(numbers)
    generations = [first + number for number in range(len(slots))]
    came = Changes(True, space, [key(number) for number in numbers], slots, generations)
    assert node.store(came, [size] * len(slots), NO_GENERATION, from_free=False) == []
    return [int(slot) for slot in slots]


def listed(node: NodeTable, most: int, space: Namespace | None = None) -> list[bytes]:
    """Keys of a whole listing; no stretch is longer than allowed."""
    found: list[bytes] = []
    first: Slot | None = Slot(0)
    while first is not None:
        stretch = node.places_from(first, most, space)
        places = list(stretch.places)
        assert len(places) <= stretch.length <= most
        if places:
            found += node.held_at(places).keys
        assert stretch.following is None or stretch.following > first
        first = stretch.following
    return found


def uses(node: NodeTable, number: int, space: Namespace = SPACE) -> Uses:
    chunk = node.find(space, key(number))
    assert chunk is not None
    (place,) = node.places_from(chunk.slot, 1).places
    return node.uses_at([place])


@pytest.mark.parametrize("most", [1, 3, 5, 1000])
def test_listing_has_every_chunk_once_in_order_of_slots(table: ChunkTable, most: int) -> None:
    node = table.add_node(NodeId("n"), GEOMETRY)
    # The slab in the middle has no slot size, the last slab has larger slots.
    for slab, size in ((0, PAGE), (1, PAGE), (3, PAGE), (5, 3 * PAGE)):
        node.give_slab(slab, size, NO_GENERATION)
    rng = random.Random(most)
    slots = dict(zip(fill(node, list(range(40))), range(40), strict=True))
    slots |= dict(zip(fill(node, [100, 101], 3 * PAGE, OTHER), [100, 101], strict=True))
    for number in rng.sample(range(40), 15):
        chunk = node.drop(SPACE, key(number))
        assert chunk is not None
        del slots[chunk.slot]
    everything = [key(slots[slot]) for slot in sorted(slots)]
    assert listed(node, most) == everything
    assert listed(node, most, SPACE) == everything[:-2]
    assert listed(node, most, OTHER) == everything[-2:]
    assert listed(node, most, Namespace("nobody's")) == []


def test_listing_of_pool_without_chunks_ends(table: ChunkTable) -> None:
    node = table.add_node(NodeId("n"), GEOMETRY)
    assert listed(node, 4) == []
    node.give_slab(SLABS - 1, PAGE, NO_GENERATION)
    assert listed(node, 4) == []


def test_chunk_that_stays_is_listed_once_while_others_come_and_go(table: ChunkTable) -> None:
    node = table.add_node(NodeId("n"), GEOMETRY)
    for slab in range(SLABS):
        node.give_slab(slab, PAGE, NO_GENERATION)
    fill(node, list(range(60)))
    rng, number = random.Random(1), 60
    found: list[bytes] = []
    first: Slot | None = Slot(0)
    while first is not None:
        stretch = node.places_from(first, 4)
        places = list(stretch.places)
        found += node.held_at(places).keys if places else []
        first = stretch.following
        gone = rng.randrange(30, 60)
        node.drop(SPACE, key(gone))
        fill(node, [number])
        number += 1
    assert all(found.count(key(number)) == 1 for number in range(30))
    assert len(set(found)) == len(found)


def test_uses_tell_when_a_chunk_came_and_was_used_and_how_often(table: ChunkTable) -> None:
    node = table.add_node(NodeId("n"), GEOMETRY)
    node.give_slab(0, PAGE, NO_GENERATION)
    table.set_clock(100.0)
    fill(node, [1, 2])
    table.set_clock(150.5)
    node.touch(SPACE, [key(1), key(77)])
    node.touch(SPACE, [key(1)])
    used, unused = uses(node, 1), uses(node, 2)
    assert used.stored_at == unused.stored_at == pytest.approx([100.0], abs=TICK_S)
    assert used.used_at == pytest.approx([150.5], abs=TICK_S)
    assert unused.used_at == unused.stored_at
    assert (used.hits, unused.hits) == ([2], [0])
    assert used.slot_bytes == [PAGE]
    # A slot that is used again knows nothing of what was there.
    node.drop(SPACE, key(1))
    table.set_clock(200.0)
    fill(node, [3])
    again = uses(node, 3)
    assert again.hits == [0]
    assert again.stored_at == again.used_at == pytest.approx([200.0], abs=TICK_S)


def test_class_that_is_new_has_the_time_of_the_others(table: ChunkTable) -> None:
    node = table.add_node(NodeId("n"), GEOMETRY)
    table.set_clock(50.0)
    for number in range(5):
        node.give_slab(number, PAGE * (number + 1), NO_GENERATION)
        fill(node, [number], PAGE * (number + 1))
        assert uses(node, number).stored_at == pytest.approx([50.0], abs=TICK_S)


def test_uses_survive_that_another_node_gets_the_chunk_and_loses_it(table: ChunkTable) -> None:
    one, two = (table.add_node(NodeId(name), GEOMETRY) for name in ("one", "two"))
    for node in (one, two):
        node.give_slab(0, PAGE, NO_GENERATION)
    table.set_clock(10.0)
    fill(one, [1])
    one.touch(SPACE, [key(1)])
    table.set_clock(20.0)
    fill(two, [1])
    assert uses(one, 1).is_spare == uses(two, 1).is_spare == [True]
    assert uses(one, 1).hits == [1]
    assert uses(two, 1).hits == [0]
    assert uses(two, 1).stored_at == pytest.approx([20.0], abs=TICK_S)
    two.drop(SPACE, key(1))
    assert uses(one, 1).is_spare == [False]
    assert uses(one, 1).hits == [1]
    assert uses(one, 1).stored_at == pytest.approx([10.0], abs=TICK_S)


def test_question_without_pin_pins_nothing_and_keeps_a_pin(table: ChunkTable) -> None:
    node = table.add_node(NodeId("n"), GEOMETRY)
    node.give_slab(0, PAGE, NO_GENERATION)
    fill(node, [1, 2])
    node.pin(SPACE, [key(1)], 100.0)
    used_at = node.used_at(PAGE)
    found = table.ask(SPACE, [key(1), key(2), key(3)], (NodeId("n"),), (), 1, None)
    assert found.key_index == [0, 1]
    assert found.missing == [2]
    assert node.used_at(PAGE) == used_at
    (gone,) = node.evict(PAGE, 2, 50.0)
    assert gone.keys == [key(2)]
