"""The index over all nodes' books: which of them have a chunk."""

from __future__ import annotations

from raykv.base.ids import Namespace, NodeId
from raykv.directory.table.dicts import ReplicaIndex
from tests.fixtures.directory.desk import name

ONE, TWO, THREE = NodeId("one"), NodeId("two"), NodeId("three")
MODEL, SECOND = Namespace("model"), Namespace("second")


def index_of(**letters: str) -> ReplicaIndex:
    """A node has a chunk of the model for each of its letters."""
    index = ReplicaIndex()
    for node, some in letters.items():
        for letter in some:
            index.add(name(letter), NodeId(node))
    return index


def test_nobody_has_a_chunk_at_first() -> None:
    index = ReplicaIndex()
    assert index.nodes(name("a")) == ()
    assert index.names() == []


def test_nodes_are_in_the_order_in_which_they_got_the_chunk() -> None:
    index = ReplicaIndex()
    assert index.add(name("a"), TWO) == (TWO,)
    assert index.add(name("a"), ONE) == (TWO, ONE)
    assert index.add(name("a"), THREE) == (TWO, ONE, THREE)
    assert index.nodes(name("a")) == (TWO, ONE, THREE)


def test_node_that_has_the_chunk_already_keeps_its_place() -> None:
    index = index_of(one="a", two="a")
    assert index.add(name("a"), ONE) == (ONE, TWO)
    assert index.nodes(name("a")) == (ONE, TWO)


def test_chunk_is_looked_for_in_its_own_namespace() -> None:
    index = index_of(one="a")
    index.add(name("a", SECOND), TWO)
    assert index.nodes(name("a")) == (ONE,)
    assert index.nodes(name("a", SECOND)) == (TWO,)
    assert index.remove(name("a", SECOND), TWO) == ()
    assert index.nodes(name("a")) == (ONE,)


def test_node_that_lost_the_chunk_is_no_longer_listed_and_the_others_are() -> None:
    index = index_of(one="ab", two="a", three="a")
    assert index.remove(name("a"), TWO) == (ONE, THREE)
    assert index.nodes(name("a")) == (ONE, THREE)
    assert index.nodes(name("b")) == (ONE,)


def test_chunk_is_unknown_once_the_last_node_has_lost_it() -> None:
    index = index_of(one="ab")
    assert index.remove(name("a"), ONE) == ()
    assert index.names() == [name("b")]
    assert index.remove(name("b"), ONE) == ()
    assert index.names() == []
    assert index.add(name("b"), TWO) == (TWO,)


def test_loss_of_what_a_node_did_not_have_changes_nothing() -> None:
    index = index_of(one="a")
    assert index.remove(name("a"), TWO) == (ONE,)
    assert index.remove(name("b"), ONE) == ()
    assert index.remove(name("a", SECOND), ONE) == ()
    assert index.names() == [name("a")]
    assert index.nodes(name("a")) == (ONE,)
