"""Which nodes have which chunk: what each said last, and what sweeping may not change."""

from __future__ import annotations

import random

import pytest

from raykv.base.ids import NO_BLOCKS, Key, Namespace, NodeId
from raykv.directory.known.holdings import HeldAt, Holdings, MovedChunks
from raykv.protocol.listing import (
    ALL_READ,
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)
from tests.fixtures.directory.reporting import listed, sizes

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


# Listings


def row(key: Key, where: Where, reason: Reason = Reason.STORED) -> ListedRow:
    return ListedRow(A, key, where, NO_BLOCKS, reason)


HELD = (HeldAt(ONE, Where.RAM),)
CAME = [MovedChunks(A, [K], Where.NOWHERE, Where.RAM, Reason.STORED, HELD)]


def test_changes_are_told_as_what_was_and_what_is(holdings: Holdings) -> None:
    assert listed(holdings, ONE, row(K, Where.NOWHERE), row(K, Where.RAM)) == CAME
    assert listed(holdings, ONE, row(L, Where.RAM), row(L, Where.NOWHERE)) == []
    assert listed(holdings, ONE, row(K, Where.RAM)) == []
    changes = row(K, Where.NOWHERE, Reason.DAMAGED), row(L, Where.RAM)
    assert listed(holdings, ONE, *changes) == [
        MovedChunks(A, [K], Where.RAM, Where.NOWHERE, Reason.DAMAGED, ()),
        MovedChunks(A, [L], Where.NOWHERE, Where.RAM, Reason.STORED, HELD),
    ]


def beginning(life: int, key: Key) -> ListingPart:
    """All that a node has in that life."""
    rows = ListedRows.of([row(key, Where.RAM)])
    return ListingPart(True, Position(life), Position(life, 1, ALL_READ), rows)


def test_new_life_is_a_node_that_was_lost_and_an_old_one_says_nothing(holdings: Holdings) -> None:
    assert not holdings.take(ONE, beginning(1, L)).begins
    taken = holdings.take(ONE, beginning(2, K))
    assert (taken.begins, taken.moved) == (True, CAME)
    assert not holdings.take(ONE, beginning(1, L)).moved
    assert holdings.ask(A, [K, L]) == [HELD, ()]
    assert holdings.lose(ONE)
    assert not holdings.lose(ONE)
