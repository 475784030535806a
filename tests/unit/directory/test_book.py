"""What a pool's book says of chunks that it gives up."""

from __future__ import annotations

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import EngineId, Generation, Key, Namespace, NodeId
from raykv.directory.book import PoolBook
from raykv.directory.table.protocol import Changes, TableChunk
from raykv.protocol.descriptions import parse_groups
from tests.fixtures.directory.desk import PAGE
from tests.fixtures.directory.tables import TABLES, open_table

MODEL = Namespace("model")


class Book(PoolBook):
    """Of one slab with four pages: `a` came at 10 s, `b` at 30 s, then `a` was used."""

    def __init__(self, kind: str) -> None:
        table = open_table(kind)
        super().__init__(table.add_node(NodeId("n"), PoolGeometry(4 * PAGE, 4 * PAGE)), self.note)
        self.gone: list[Changes] = []
        for key, now in ((b"a", 10.0), (b"b", 30.0)):
            table.set_clock(now)
            self.make_room(PAGE, 1, now)
            (slot,) = self.table.lend(PAGE, 1, EngineId("engine"), 0, Generation(1))
            self.hold((MODEL, Key(key)), TableChunk(slot, Generation(1), PAGE))
        self.table.touch(MODEL, [b"a"])

    def note(self, changes: Changes) -> None:
        self.gone += [] if changes.stored else [changes]


@pytest.fixture(params=TABLES)
def book(request: pytest.FixtureRequest) -> Book:
    return Book(request.param)


def test_evicted_chunks_say_how_often_they_were_used_and_how_old_they_are(book: Book) -> None:
    book.make_room(PAGE, 4, 40.0)
    (gone,) = book.gone
    assert (gone.keys, gone.hits, gone.ages) == ([b"b", b"a"], [0, 1], [10.0, 30.0])


def test_chunks_of_a_slab_that_moves_say_it_too(book: Book) -> None:
    book.make_room(2 * PAGE, 1, 200.0)
    (gone,) = book.gone
    assert sorted(zip(gone.keys, gone.hits, gone.ages, strict=True)) == [
        (b"a", 1, 190.0),
        (b"b", 0, 170.0),
    ]
    book.check()


def test_chunk_is_not_younger_than_new_when_clocks_differ(book: Book) -> None:
    book.make_room(PAGE, 3, 29.0)
    assert [gone.ages for gone in book.gone] == [[0.0]]


def test_dropped_chunks_have_no_age(book: Book) -> None:
    book.drop(MODEL, Key(b"a"))
    (gone,) = book.gone
    assert (gone.hits, gone.ages) == ((), ())


class Mixed(PoolBook):
    """Three chunks of a prompt in a group of full attention, 0, and in two with windows, 1 and 2.

    The policy gives them up in the order of their numbers, the groups of each one after another.
    """

    def __init__(self, kind: str) -> None:
        table = open_table(kind)
        groups = parse_groups("0:16 1:16/2 2:16/2")
        super().__init__(
            table.add_node(NodeId("n"), PoolGeometry(16 * PAGE, 16 * PAGE)),
            lambda _: None,
            groups_of=lambda _: groups,
        )
        self.make_room(PAGE, 9, 0.0)
        slots = self.table.lend(PAGE, 9, EngineId("engine"), 0, Generation(1))
        for at, slot in enumerate(slots):
            name = self.key(at // 3, at % 3)
            self.hold((MODEL, name), TableChunk(slot, Generation(at + 1), PAGE))

    @staticmethod
    def key(number: int, group: int) -> Key:
        return Key(b"chunk %d" % number + group.to_bytes(4, "big"))

    @property
    def held(self) -> set[tuple[int, int]]:
        every = {(number, group) for number in range(3) for group in range(3)}
        return {each for each in every if self.find(MODEL, self.key(*each))}


@pytest.fixture(params=TABLES)
def mixed(request: pytest.FixtureRequest) -> Mixed:
    return Mixed(request.param)


def test_chunk_of_full_attention_takes_the_windows_that_end_with_it_along(mixed: Mixed) -> None:
    mixed.make_room(PAGE, 8, 0.0)
    assert mixed.held == {(number, group) for number in (1, 2) for group in range(3)}
    mixed.check()


def test_window_takes_the_other_windows_along_and_leaves_full_attention(mixed: Mixed) -> None:
    mixed.table.touch(MODEL, [mixed.key(0, 0)])
    mixed.make_room(PAGE, 8, 0.0)
    assert not {(0, 1), (0, 2)} & mixed.held
    assert (0, 0) in mixed.held
    mixed.check()


def test_companions_that_are_pinned_stay(mixed: Mixed) -> None:
    mixed.table.pin(MODEL, [mixed.key(0, 2)], 10.0)
    mixed.make_room(PAGE, 8, 5.0)
    assert {number for number, group in mixed.held if group == 2} == {0, 1, 2}
    assert not {(0, 0), (0, 1)} & mixed.held


def test_no_more_is_evicted_than_what_makes_room(mixed: Mixed) -> None:
    mixed.make_room(PAGE, 13, 0.0)
    assert len(mixed.held) == 3
