"""What a pool's book says of chunks that it gives up."""

from __future__ import annotations

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import EngineId, Generation, Key, Namespace, NodeId
from raykv.directory.book import PoolBook
from raykv.directory.table.protocol import Changes, TableChunk
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
