"""Chunks of weights that nobody has any more: they go first, until somebody has such weights."""

from __future__ import annotations

import pytest

import raykv.directory.leavings
from raykv.base.ids import Epoch, Namespace, NodeId
from raykv.directory.manager import BlockManager
from raykv.protocol.columns import Keys
from tests.fixtures.directory.desk import Desk
from tests.fixtures.directory.tables import open_table

pytestmark = pytest.mark.usefixtures("table")


@pytest.fixture
def desk() -> Desk:
    """A node with room for twelve chunks, and an engine there."""
    desk = Desk(BlockManager(Epoch(1)), slots=12)
    desk.report("n")
    desk.attach("engine", "n", "old")
    return desk


def held(desk: Desk, namespace: str) -> str:
    """Letters of the chunks of a namespace, in order."""
    table = desk.manager._nodes[NodeId("n")].book.table
    space = Namespace(namespace)
    return "".join(sorted(key.decode() for key in table.held_at(table.places(space), space).keys))


def fill(desk: Desk, letters: str, namespace: str) -> None:
    for letter in letters:
        desk.store("n", letter, "engine", namespace)
        desk.now += 1


def test_chunks_of_weights_that_were_left_go_first_the_least_recently_used_before_others(
    desk: Desk,
) -> None:
    fill(desk, "abcd", "old")
    fill(desk, "xy", "old")
    desk.sync("engine", touched=Keys.of([b"a"]))
    desk.attach("engine", "n", "new")
    fill(desk, "pqrstu", "new")
    assert (held(desk, "old"), held(desk, "new")) == ("abcdxy", "pqrstu")
    fill(desk, "vw", "new")
    assert (held(desk, "old"), held(desk, "new")) == ("adxy", "pqrstuvw")


def test_chunks_are_ordinary_again_when_an_engine_gets_its_old_weights_back(desk: Desk) -> None:
    fill(desk, "abcdef", "old")
    desk.attach("engine", "n", "new")
    fill(desk, "pqrstu", "new")
    desk.attach("engine", "n", "old")
    fill(desk, "gh", "old")
    assert (held(desk, "old"), held(desk, "new")) == ("abcdefgh", "rstu")


def test_chunks_stay_ordinary_while_another_engine_has_their_weights(desk: Desk) -> None:
    fill(desk, "abcdef", "old")
    desk.attach("second", "n", "old")
    desk.attach("engine", "n", "new")
    fill(desk, "pqrstu", "new")
    desk.sync("second", touched=Keys.of([b"a", b"b", b"c", b"d", b"e", b"f"]))
    fill(desk, "vw", "new")
    assert (held(desk, "old"), held(desk, "new")) == ("abcdef", "rstuvw")
    desk.attach("second", "n", "new")
    fill(desk, "z", "new")
    assert held(desk, "old") == "bcdef"


def test_engine_that_ends_leaves_its_chunks_as_they_are(desk: Desk) -> None:
    fill(desk, "abcdef", "old")
    desk.manager.detach_engine(next(iter(desk.manager._engines)))
    desk.attach("engine", "n", "new")
    fill(desk, "pqrstu", "new")
    fill(desk, "v", "new")
    assert (held(desk, "old"), held(desk, "new")) == ("bcdef", "pqrstuv")


def test_chunk_that_comes_after_its_weights_were_left_goes_first_too(desk: Desk) -> None:
    lease = desk.lease("engine", "a")
    desk.attach("second", "n", "new")
    desk.attach("engine", "n", "new")
    desk.arrive("n", lease, "old")
    fill(desk, "pqrstuvwxyz", "new")
    assert held(desk, "old") == "a"
    fill(desk, "0", "new")
    assert held(desk, "old") == ""
    assert len(held(desk, "new")) == 12


def test_very_many_chunks_are_put_into_order_piece_by_piece(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.leavings, "PIECE", 2)
    fill(desk, "abcdef", "old")
    desk.attach("engine", "n", "new")
    assert len(desk.manager.leavings._tasks) == 1
    desk.sync("engine")
    desk.manager.expire(desk.now)
    assert not desk.manager.leavings._tasks
    fill(desk, "pqrstuv", "new")
    assert (held(desk, "old"), held(desk, "new")) == ("bcdef", "pqrstuv")


def test_order_survives_a_change_of_the_table(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.leavings, "PIECE", 2)
    fill(desk, "abcdef", "old")
    desk.attach("engine", "n", "new")
    book = desk.manager._nodes[NodeId("n")].book
    if type(book.table).__name__ == "DictNodeTable":
        desk.manager.change_table(open_table("flat"), desk.now)
    for _ in range(6):
        desk.manager.expire(desk.now)
    assert not desk.manager.leavings._tasks
    fill(desk, "pqrstuv", "new")
    assert (held(desk, "old"), held(desk, "new")) == ("bcdef", "pqrstuv")


def test_node_that_goes_takes_what_was_to_be_ordered_there_along(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.leavings, "PIECE", 2)
    fill(desk, "abcdef", "old")
    desk.attach("engine", "n", "new")
    desk.epochs["n"] = 8
    desk.report("n")
    desk.manager.expire(desk.now)
    assert not desk.manager.leavings._tasks
