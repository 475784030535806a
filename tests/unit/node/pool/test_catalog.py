"""The chunks of a node, row by row, for people."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

import pytest

from raykv.base.ids import Blocks, Key, Stamp, part_of
from raykv.node.pool.catalog import PoolCatalog, first_ones
from raykv.node.pool.shelf import DiskChunk
from raykv.protocol.listing import ALL_READ, Reason, Where
from raykv.protocol.operator import Released
from raykv.protocol.reader import ChunkQuery, ListedChunk
from tests.fixtures.node.owned_pool import PAGE, WHOLE, A, B, OwnedPool, begun, key, numbers, pin

RAM, DISK = Where.RAM, Where.DISK


class Shown:
    """A pool whose chunks are listed, with a disk."""

    def __init__(self, num_slabs: int = 4) -> None:
        self.pool = OwnedPool(num_slabs)
        self.pool.hello()
        self.shelf = self.pool.node.index.shelf
        self.catalog = PoolCatalog(self.pool.node, self.pool.now)

    def shelve(self, *chunks: int) -> None:
        for chunk in chunks:
            shelved = DiskChunk(key(chunk), Stamp(0, 0), 0, PAGE, 0, Blocks(0, 2))
            self.shelf.add(f"{self.shelf.num_files}", PAGE, A, [shelved])

    def pages(self, query: ChunkQuery, most: int = 3) -> Iterator[list[ListedChunk]]:
        """A walk with as small stretches as it takes."""
        place = 0
        while place != ALL_READ:
            rows, place = self.catalog.stretch(query, place, self.pool.now, most)
            yield rows

    def row(self, number: int) -> ListedChunk | None:
        query = asked(namespace=A, key=key(number))
        rows, _ = self.catalog.stretch(query, 0, self.pool.now)
        return rows[0] if rows else None

    def listed(self, **wanted: object) -> list[tuple[int, Where]]:
        rows = [row for page in self.pages(asked(**wanted)) for row in page]
        return [
            (number, Where(row.where))
            for number, row in zip(numbers([row.key for row in rows]), rows, strict=True)
        ]


def asked(**wanted: object) -> ChunkQuery:
    return ChunkQuery(**wanted)  # type: ignore[arg-type]


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_chunk_in_the_pool_and_on_the_disk_is_one_row(shown: Shown) -> None:
    shown.pool.store(1, 2, 3)
    shown.shelve(3, 4)
    assert sorted(shown.listed()) == [(1, RAM), (2, RAM), (3, RAM | DISK), (4, DISK)]
    assert sorted(shown.listed(tier="ram")) == [(1, RAM), (2, RAM), (3, RAM)]
    assert sorted(shown.listed(tier="disk")) == [(3, DISK), (4, DISK)]


def test_chunk_that_is_being_stored_is_not_listed(shown: Shown) -> None:
    shown.pool.admit(shown.pool.storing(7))
    shown.pool.store(8)
    assert shown.listed() == [(8, RAM)]


def test_chunk_that_stays_is_listed_once_whatever_comes_and_goes_between_pages(
    shown: Shown,
) -> None:
    shown.pool.store(*range(12))
    shown.shelve(*range(20, 26))
    found: list[ListedChunk] = []
    for turn, page in enumerate(shown.pages(asked(), most=2)):
        assert len(page) <= 2
        found += page
        record = shown.pool.node.index.find(A, key(turn))
        if record is not None and turn < 4:
            shown.pool.node.index.drop(record, Reason.EVICTED)
            shown.pool.store(30 + turn)
        shown.shelf.remove(A, key(20 + turn), Reason.EVICTED)
    listed = numbers([row.key for row in found])
    assert [listed.count(number) for number in range(4, 12)] == [1] * 8
    assert len(set(listed)) == len(listed)


def test_only_what_is_asked_for_is_listed(shown: Shown) -> None:
    shown.pool.store(1, 2)
    shown.pool.end(shown.pool.admit(shown.pool.job_of(0, [key(1, 1)]))[0])  # type: ignore[arg-type]
    shown.shelve(3)
    assert len(shown.listed(group=1)) == 1
    assert sorted(shown.listed(group=0)) == [(1, RAM), (2, RAM), (3, DISK)]
    assert sorted(shown.listed(key=key(1)[:4])) == [(1, RAM), (1, RAM)]
    assert shown.listed(namespace=B) == []
    assert sorted(shown.listed(namespace=A, group=0)) == [(1, RAM), (2, RAM), (3, DISK)]


def test_parts_of_a_namespace_are_listed_with_it(shown: Shown) -> None:
    part = part_of(B, "0.1.a")
    landed = begun(shown.pool.land(7, namespace=part))
    shown.pool.node.landings.landed(landed, ok=True)
    assert shown.listed(namespace=B) == shown.listed(namespace=part) == [(7, RAM)]


def test_whole_key_of_a_namespace_is_found_without_a_walk(shown: Shown) -> None:
    shown.pool.store(*range(10))
    shown.shelve(9, 11)
    for number, where in ((9, RAM | DISK), (11, DISK)):
        (row,), end = shown.catalog.stretch(asked(namespace=A, key=key(number)), 0, 0.0, most=1)
        assert (row.key, row.where, end) == (key(number), where, ALL_READ)
    assert shown.catalog.stretch(asked(namespace=A, key=key(11), tier="ram"), 0, 0.0)[0] == []


def test_row_says_what_became_of_a_chunk(shown: Shown) -> None:
    shown.pool.tell()
    shown.pool.now = 107.0
    shown.pool.store(1, blocks=Blocks(1, 1), tenant="lisa")
    shown.pool.now = 120.0
    shown.pool.found(1)
    shown.pool.now = 125.0
    row = shown.row(1)
    assert row is not None
    assert (row.age_s, row.idle_s, row.hits) == (18.0, 5.0, 1)
    assert (row.num_bytes, row.tenant) == (PAGE, "lisa")
    assert shown.row(2) is None


def test_chunk_that_nobody_has_found_is_idle_since_it_came_if_that_is_known(shown: Shown) -> None:
    shown.pool.store(1, 2)
    shown.shelve(3)
    shown.pool.now += 5.0
    # This life has begun 5 s ago, too.
    shown.pool.record(2).came_at = -inf
    shown.pool.store(4)
    shown.pool.now += 2.0
    rows = [row for number in (1, 2, 3, 4) if (row := shown.row(number)) is not None]
    assert [(row.age_s, row.idle_s) for row in rows] == [(7, 7), (7, 7), (0, 0), (2, 2)]
    assert [row.num_bytes for row in rows] == [PAGE] * 4


def test_place_beyond_all_ends_the_listing(shown: Shown) -> None:
    shown.pool.store(1)
    shown.shelve(2)
    disk = shown.pool.node.index.disk_place
    assert shown.catalog.stretch(asked(), disk - 1, 0.0) == ([], disk)
    assert shown.catalog.stretch(asked(), 1 << 80, 0.0) == ([], ALL_READ)


def test_first_ones_are_those_with_most_of_it() -> None:
    rows = [
        ListedChunk(A, Key(b"1"), RAM, 1, age_s=9.0, idle_s=1.0, hits=2),
        ListedChunk(A, Key(b"2"), RAM, 5, age_s=8.0, idle_s=7.0, hits=0),
        ListedChunk(A, Key(b"3"), RAM, 3, age_s=6.0, idle_s=6.0, hits=7),
        ListedChunk(A, Key(b"4"), DISK, 0),
    ]
    first = {
        order: [row.key.decode() for row in first_ones(rows, order, 2)]
        for order in ("age", "idle", "hits", "size")
    }
    assert first == {
        "age": ["1", "2"],
        "idle": ["2", "3"],
        "hits": ["3", "1"],
        "size": ["2", "3"],
    }


def test_copies_are_given_up_but_for_those_that_are_pinned(shown: Shown) -> None:
    shown.pool.store(1, 2, 3)
    shown.shelve(2)
    shown.pool.order(1, pins={"p": pin(b"d")})
    shown.pool.node.orders.pin_keys(b"d", A, [key(1)])
    reader = begun(shown.pool.node.begin_read(A, [key(2)], [PAGE], shown.pool.now)[0])
    chunks = {key(number): WHOLE for number in (1, 2, 3, 4)}
    gone = shown.catalog.drop(A, chunks)
    assert gone == Released(dropped=2, kept=1, absent=1)
    assert sorted(shown.listed()) == [(1, RAM), (2, DISK)]
    shown.pool.node.index.end_load(reader)
    shown.pool.node.check()
    changes = shown.pool.node.index.listing.since(0, 100)
    assert changes is not None
    assert [each.reason for each in changes[0]].count(Reason.MOVED) == 2
    assert shown.catalog.drop(A, chunks, with_pinned=True) == Released(1, 0, 3)


def test_copy_that_is_wider_than_the_one_elsewhere_is_not_given_up(shown: Shown) -> None:
    shown.pool.store(1, 2)
    narrow = {key(1): Blocks(1, 1), key(2): Blocks(0, 5)}
    assert shown.catalog.drop(A, narrow) == Released(dropped=1, kept=1)
    assert shown.listed() == [(1, RAM)]
