"""Which nodes have which chunk: what each said last, and what sweeping may not change."""

from __future__ import annotations

from random import Random

import pytest

from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.known.holdings import HeldAt, Holdings
from raykv.protocol.listing import Where

A, B = Namespace("a"), Namespace("b")
ONE, TWO = NodeId("one"), NodeId("two")
K, L = Key(b"k"), Key(b"l")


@pytest.fixture
def holdings() -> Holdings:
    made = Holdings()
    made.join(ONE)
    made.join(TWO)
    return made


def test_key_is_where_nodes_say(holdings: Holdings) -> None:
    assert holdings.put(ONE, A, K, Where.RAM) is Where.NOWHERE
    assert holdings.put(TWO, A, K, Where.RAM | Where.DISK) is Where.NOWHERE
    assert holdings.ask(A, [K, L]) == [
        (HeldAt(ONE, Where.RAM), HeldAt(TWO, Where.RAM | Where.DISK)),
        (),
    ]
    assert holdings.ask(B, [K]) == [()]
    assert holdings.put(TWO, A, K, Where.DISK) is Where.RAM | Where.DISK
    assert holdings.put(ONE, A, K, Where.NOWHERE) is Where.RAM
    assert holdings.put(ONE, A, K, Where.NOWHERE) is Where.NOWHERE
    assert holdings.ask(A, [K]) == [(HeldAt(TWO, Where.DISK),)]
    assert holdings.put(TWO, A, K, Where.NOWHERE) is Where.DISK
    assert holdings.sizes() == {}
    holdings.check()


def test_node_that_is_gone_has_nothing_at_once_and_comes_back_with_nothing(
    holdings: Holdings,
) -> None:
    holdings.put(ONE, A, K, Where.RAM)
    holdings.put(TWO, A, K, Where.RAM)
    holdings.put(ONE, A, L, Where.RAM)
    holdings.lose(ONE)
    assert holdings.ask(A, [K, L]) == [(HeldAt(TWO, Where.RAM),), ()]
    holdings.join(ONE)
    assert holdings.ask(A, [K, L]) == [(HeldAt(TWO, Where.RAM),), ()]
    holdings.put(ONE, A, L, Where.RAM)
    while holdings.sweep(1):
        holdings.check()
    assert holdings.ask(A, [K, L]) == [(HeldAt(TWO, Where.RAM),), (HeldAt(ONE, Where.RAM),)]


def test_keys_that_are_nowhere_are_swept_in_pieces(holdings: Holdings) -> None:
    for number in range(100):
        holdings.put(ONE, A, Key(bytes([number])), Where.RAM)
    holdings.put(TWO, B, K, Where.RAM)
    holdings.lose(ONE)
    assert holdings.sizes() == {A: 100, B: 1}
    steps = 1
    while holdings.sweep(10):
        steps += 1
    assert steps > 10
    assert holdings.sizes() == {B: 1}
    assert holdings.num_sets == 1
    holdings.check()


@pytest.mark.parametrize("seed", range(5))
def test_holdings_are_those_of_a_plain_dictionary(seed: int) -> None:
    rng, holdings = Random(seed), Holdings()
    nodes = [NodeId(str(number)) for number in range(4)]
    truth: dict[tuple[Namespace, Key], dict[NodeId, Where]] = {}
    there: set[NodeId] = set()
    for step in range(3000):
        node = rng.choice(nodes)
        name = rng.choice([A, B]), Key(bytes([rng.randrange(30)]))
        if node not in there:
            holdings.join(node)
            there.add(node)
        elif rng.random() < 0.02:
            holdings.lose(node)
            there.remove(node)
            for held in truth.values():
                held.pop(node, None)
        else:
            where = Where(rng.randrange(4))
            before = truth.setdefault(name, {}).pop(node, Where.NOWHERE)
            assert holdings.put(node, *name, where) is before
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
    assert sum(holdings.sizes().values()) == sum(bool(held) for held in truth.values())
    assert holdings.num_sets <= sum(holdings.sizes().values())
