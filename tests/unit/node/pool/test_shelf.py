"""What the node's listing says of its disk, and what is written there."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from raykv.base.ids import (
    ALL_BLOCKS,
    NO_BLOCKS,
    Blocks,
    Key,
    Namespace,
    Refusal,
    Stamp,
    in_group,
)
from raykv.base.shares import Share
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.node.pool.shelf import RESERVED_PART, DiskChunk, Shelf, ShelvedChunk
from raykv.protocol.listing import ALL_READ, ListedRow, Reason, Where
from tests.fixtures.node.bare_index import BareIndex
from tests.fixtures.node.listing_reader import ListingReader
from tests.fixtures.node.owned_pool import PAGE, SLAB, A, B, begun

STAMP = Stamp(1, 1)
NUM_SLOTS = 64


class Pool(BareIndex):
    """Its chunks were stored long ago."""

    def __init__(self, num_slots: int = NUM_SLOTS, **more: Any) -> None:
        super().__init__(num_slots // SLAB, **more)
        self.shelf = self.index.shelf

    def stored(self, name: str, **more: Any) -> ChunkRecord:
        assert self.store(key(name), **more) == [Refusal.NONE]
        return self.ready(key(name))

    def fill(self, count: int = NUM_SLOTS) -> list[ChunkRecord]:
        """The first one goes first."""
        return [self.stored(f"{number}") for number in range(count)]

    def put(self, record: ChunkRecord) -> None:
        """It is on the disk as it is in RAM."""
        self.shelve(record.key, record.blocks, record.stamp)

    def shelve(self, key: Key, blocks: Blocks = ALL_BLOCKS, stamp: Stamp = STAMP) -> None:
        chunk = DiskChunk(key, stamp, 0, PAGE, 0, blocks)
        self.shelf.add(f"{self.shelf.num_files}", PAGE, A, [chunk])

    def take(self, most: int = 1000) -> list[ChunkRecord]:
        """What is to be written, once it is copied."""
        records = self.shelf.next_to_write(most)
        for record in records:
            assert record.readers == 1
            self.index.end_load(record)
        return records

    def row(self, name: str) -> ListedRow:
        (found,) = self.index.rows(A, [key(name)])
        return found


def key(name: str) -> Key:
    return in_group(Key(name.encode() + bytes(4)), 0)


@pytest.fixture
def pool() -> Pool:
    return Pool()


# What the listing says


def test_chunk_on_the_disk_is_a_second_place_in_its_row(pool: Pool) -> None:
    record = pool.stored("a", blocks=Blocks(2, 4))
    pool.shelve(key("a"))
    assert pool.row("a")[2:4] == (Where.RAM | Where.DISK, Blocks(2, 4))
    pool.index.drop(record, Reason.EVICTED)
    assert pool.row("a")[2:4] == (Where.DISK, ALL_BLOCKS)
    pool.shelf.remove(A, key("a"), Reason.EVICTED)
    assert pool.row("a")[2:4] == (Where.NOWHERE, NO_BLOCKS)
    pool.index.check()


def test_every_change_is_numbered_and_what_changes_nothing_is_none(pool: Pool) -> None:
    record = pool.stored("a")
    number = pool.index.listing.number
    pool.put(record)
    pool.put(record)
    assert pool.index.listing.number == number + 1
    pool.shelve(key("a"), Blocks(1, 2), STAMP)
    pool.shelve(key("a"), Blocks(1, 2), Stamp(1, 2))
    assert pool.index.listing.number == number + 3
    pool.shelf.remove(A, key("b"), Reason.EVICTED)
    pool.shelf.remove(B, key("a"), Reason.EVICTED)
    assert pool.index.listing.number == number + 3
    pool.shelf.remove(A, key("a"), Reason.DAMAGED)
    assert pool.index.listing.number == number + 4
    changes, _ = pool.index.listing.since(number, 10) or ([], 0)
    assert [each.reason for each in changes] == [Reason.DAMAGED]


@pytest.mark.parametrize("seed", range(40))
def test_reader_knows_in_the_end_where_each_chunk_is(seed: int) -> None:
    source, pool, reader = random.Random(seed), Pool(8), ListingReader()
    names = [f"{number}" for number in range(12)]
    for _ in range(150):
        name = source.choice(names)
        record = pool.index.find(A, key(name))
        match source.randrange(5):
            case 0 if record is None:
                pool.stored(name)
            case 1 if record is not None:
                pool.put(record)
            case 2 if record is not None:
                pool.index.drop(record, Reason.EVICTED)
            case 3:
                pool.shelf.remove(A, key(name), Reason.EVICTED)
            case 4:
                reader.take(pool.index.part_after(reader.position, source.randrange(1, 4)))
        pool.index.check()
    for _ in range(200):
        reader.take(pool.index.part_after(reader.position, 3))
    truth = {row.key: row.where for row in pool.index.rows(A, map(key, names)) if row.where}
    assert {each: where for (_, each), where in reader.believed.items() if where} == truth


def test_page_meets_each_chunk_that_stays_once(pool: Pool) -> None:
    for name in "abcdef":
        pool.shelve(key(name))
    first, place = pool.shelf.page(0, 3)
    assert [each.key for each in first] == [key(name) for name in "abc"]
    pool.shelf.remove(A, key("b"), Reason.EVICTED)
    pool.shelve(key("new"))
    second, end = pool.shelf.page(place, 10)
    assert [each.key for each in second] == [key(name) for name in "def"]
    assert end == ALL_READ


# What is written


def test_nothing_is_written_while_there_is_room_for_as_much_as_the_reserve() -> None:
    pool = Pool()
    pool.fill(NUM_SLOTS - NUM_SLOTS // RESERVED_PART)
    assert pool.take() == []
    pool = Pool()
    records = pool.fill(NUM_SLOTS - 3)
    assert pool.take() == records[: NUM_SLOTS // RESERVED_PART]


def test_what_goes_next_is_written_and_has_a_reader_until_it_is_copied(pool: Pool) -> None:
    records = pool.fill()
    found = pool.shelf.next_to_write(3)
    assert found == records[:3]
    assert [each.readers for each in found] == [1, 1, 1]
    assert pool.take() == records[3 : NUM_SLOTS // RESERVED_PART]
    assert pool.take() == []
    for record in found:
        pool.index.end_load(record)
    pool.index.check()


def test_what_goes_along_with_what_goes_next_is_written_with_it() -> None:
    pool = Pool(companions=lambda _, keys: [in_group(key, 1) for key in keys])
    records = pool.fill(NUM_SLOTS - 1)
    window = in_group(records[0].key, 1)
    assert pool.store(window) == [Refusal.NONE]
    found = pool.shelf.next_to_write(2)
    assert found == [*records[:2], pool.ready(window)], "it would go last by itself"
    assert pool.take() == records[2 : NUM_SLOTS // RESERVED_PART]


def test_reserve_is_refilled_as_chunks_go(pool: Pool) -> None:
    records = pool.fill()
    first = pool.take()
    for record in first:
        assert pool.shelf.end_write(record, is_written=True)
        pool.put(record)
    assert pool.take() == []
    for number, record in enumerate(first[:2]):
        pool.index.drop(record, Reason.EVICTED)
        pool.stored(f"new {number}")
    following = len(first)
    assert pool.take() == records[following : following + 2]


@pytest.mark.parametrize("standing", [Standing.SPARE, Standing.PINNED])
def test_what_another_node_has_or_never_goes_is_not_written(pool: Pool, standing: Standing) -> None:
    records = pool.fill()
    for record in records[:4]:
        pool.index.room.order_of(record).stand(record, standing)
    found = pool.take()
    assert found
    assert not set(found) & set(records[:4])


def test_disk_that_is_full_takes_what_was_found_only(pool: Pool) -> None:
    records = pool.fill()
    pool.shelf.is_full = True
    assert pool.take() == []
    for record in records[1:3]:
        record.hits = 1
    pool.stored("new")
    assert records[0].state is ChunkState.VOID
    assert pool.take() == records[1:3]


def test_what_is_released_is_written_before_all_others(pool: Pool) -> None:
    records = pool.fill()
    for record in records[10:13]:
        pool.index.stand(record, Standing.RELEASED)
    assert pool.take()[:3] == records[10:13]


def test_what_goes_next_since_others_were_found_is_written(pool: Pool) -> None:
    """Nothing in the listing has changed."""
    records = pool.fill()
    count = len(pool.take())
    assert pool.take() == []
    pool.index.touch(records[:3], 200.0)
    assert pool.take() == records[count : count + 3]
    assert pool.take() == []
    pool.index.stand(records[-1], Standing.RELEASED)
    assert pool.take() == [records[-1]]


@pytest.mark.parametrize(
    ("blocks", "stamp", "is_clean"),
    [
        (ALL_BLOCKS, STAMP, True),
        (ALL_BLOCKS, Stamp(1, 9), True),
        (Blocks(2, 2), STAMP, False),
        (ALL_BLOCKS, Stamp(1, 0), False),
    ],
    ids=["as it is", "later", "narrower", "older"],
)
def test_chunk_is_written_unless_the_disk_has_it_as_wide_and_as_new(
    pool: Pool, blocks: Blocks, stamp: Stamp, is_clean: bool
) -> None:
    first = pool.fill()[0]
    pool.shelve(first.key, blocks, stamp)
    assert (first in pool.take()) is not is_clean


def test_chunk_is_not_written_twice_in_one_stay(pool: Pool) -> None:
    """The disk has given it up for others: it would write it for ever."""
    first = pool.fill()[0]
    for record in pool.take():
        pool.shelf.end_write(record, is_written=True)
    pool.put(first)
    pool.shelf.remove(A, first.key, Reason.EVICTED)
    assert pool.take() == []
    pool.index.drop(first, Reason.EVICTED)
    again = pool.stored("0")
    assert not again.is_written


def test_what_could_not_be_written_is_tried_again_and_what_is_refused_is_not(pool: Pool) -> None:
    records = pool.fill()
    found = pool.take()
    for record in found[:2]:
        assert not pool.shelf.end_write(record, is_written=False)
    for record in found[2:]:
        pool.shelf.refuse(record)
    assert pool.take() == records[:2]


def test_copy_counts_if_the_chunk_is_still_there_or_was_evicted(pool: Pool) -> None:
    pool.fill()
    ready, evicted, moved, cleared, damaged, replaced, *_ = pool.take()
    pool.index.drop(evicted, Reason.EVICTED)
    pool.index.drop(moved, Reason.MOVED)
    pool.index.drop(cleared, Reason.CLEARED)
    pool.index.drop(damaged, Reason.DAMAGED)
    number = replaced.key[:1].decode()
    newer = pool.stored(number, stamp=2)
    assert (replaced.state, newer.state) == (ChunkState.VOID, ChunkState.READY)
    counts = [
        pool.shelf.end_write(each, is_written=True)
        for each in (ready, evicted, moved, cleared, damaged, replaced)
    ]
    assert counts == [True, True, True, False, False, False]


def test_copy_of_what_was_cleared_after_it_was_evicted_does_not_count(pool: Pool) -> None:
    pool.fill()
    first, *_ = pool.take()
    pool.index.drop(first, Reason.EVICTED)
    pool.index.drop_void(pool.index.floors.take({A: 5}))
    assert not pool.shelf.end_write(first, is_written=True)


def test_everything_is_written_once_when_that_is_asked_for(pool: Pool) -> None:
    records = pool.fill(20)
    pool.index.room.order_of(records[3]).stand(records[3], Standing.SPARE)
    pool.put(records[5])
    found: list[ChunkRecord] = []
    place = 0
    while place != ALL_READ:
        some, place = pool.shelf.write_all(place, 6)
        assert len(some) <= 6
        found += some
    assert set(found) == set(records) - {records[5]}
    assert all(record.readers == 1 for record in found)
    # Nothing is written twice, and until it is written it is not on the disk.
    assert pool.shelf.write_all(0, 100) == ([], ALL_READ)
    assert len(pool.shelf.unwritten(0, 100)[0]) == 19
    for record in found:
        pool.index.end_load(record)
        pool.shelf.end_write(record, is_written=False)
    assert len(pool.shelf.unwritten(0, 100)[0]) == 19


def test_each_order_has_its_part_of_the_reserve() -> None:
    pool = Pool(256)
    small = [pool.stored(f"small {number}") for number in range(128)]
    large = [pool.stored(f"large {number}", pages=2) for number in range(64)]
    found = pool.take()
    assert len(set(found) & set(small)) == 128 // RESERVED_PART
    assert len(set(found) & set(large)) == 64 // RESERVED_PART


def test_chunk_that_is_stored_anew_does_not_count_as_another_ones_write(pool: Pool) -> None:
    pool.fill()
    first, *_ = pool.take()
    pool.index.drop(first, Reason.CLEARED)
    pool.stored("0")
    assert not pool.shelf.end_write(first, is_written=True)
    begun(pool.load(key("0")))


# Files


def chunk(name: str, number: int = 1, blocks: Blocks = ALL_BLOCKS) -> DiskChunk:
    return DiskChunk(Key(name.encode()), Stamp(1, number), 0, PAGE, 7, blocks)


def disk_of(most_bytes: int = 100) -> Shelf:
    shelf = Pool().shelf
    shelf.most_bytes = most_bytes
    return shelf


def found(disk: Shelf, name: bytes, namespace: Namespace = A) -> ShelvedChunk | None:
    return disk.find(namespace, Key(name))


def test_oldest_file_goes_first_unless_it_was_read() -> None:
    disk = disk_of()
    for name in "xyz":
        disk.add(name, 30, A, [chunk(name)])
    disk.was_read("x")
    assert disk.give_way(30) == ["y"]
    assert found(disk, b"y") is None
    disk.add("w", 30, A, [chunk("w")])
    # Its second chance is over.
    assert disk.give_way(60) == ["z", "x"]
    disk.check()


def test_file_of_whoever_is_furthest_above_its_share_goes_first() -> None:
    disk = disk_of()
    disk.shares = {"quiet": Share(0.5), "": Share(0.0)}
    for name in ("q1", "q2"):
        disk.add(name, 20, A, [chunk(name)], "quiet")
    for name in ("n1", "n2", "n3"):
        disk.add(name, 20, A, [chunk(name)], "unknown")
    assert disk.give_way(20) == ["n1"]
    disk.add("q3", 20, A, [chunk("q3")], "quiet")
    # The one that writes is above its guarantee now, and the others are further.
    assert disk.give_way(20, "quiet") == ["n2"]
    disk.add("q4", 20, A, [chunk("q4")], "quiet")
    assert disk.give_way(20, "quiet") == ["q1"]
    assert disk.tenant_bytes == {"quiet": 60, "unknown": 20}
    disk.check()


def test_tenant_at_its_greatest_share_gives_up_its_own_file_while_there_is_room() -> None:
    disk = disk_of()
    disk.shares = {"noisy": Share(0.0, 0.4)}
    for name, tenant in (("n1", "noisy"), ("o1", ""), ("n2", "noisy")):
        disk.add(name, 20, A, [chunk(name)], tenant)
    disk.was_read("n1")
    assert disk.give_way(20, "noisy") == ["n2"], "the other one has a second chance"
    disk.add("n3", 20, A, [chunk("n3")], "noisy")
    assert disk.give_way(20, "noisy") == ["n1"], "its second chance is over"
    assert disk.give_way(20) == []
    assert not disk.is_full
    assert disk.can_hold(50)
    assert not disk.can_hold(50, "noisy")


def test_disk_that_has_become_smaller_lets_files_go_for_nothing_new() -> None:
    disk = disk_of()
    for name in "xyz":
        disk.add(name, 30, A, [chunk(name)])
    disk.most_bytes = 60
    assert disk.give_way(0) == ["x"]
    disk.check()


def test_nothing_is_full_before_a_file_had_to_go() -> None:
    disk = disk_of()
    disk.add("x", 100, A, [chunk("x")])
    assert not disk.is_full
    assert disk.give_way(1) == ["x"]
    assert disk.is_full
    assert not disk.can_hold(101)


def test_later_file_with_a_chunk_has_it() -> None:
    disk = disk_of()
    disk.add("x", 10, A, [chunk("k", 5, Blocks(0, 1))])
    disk.add("y", 10, A, [chunk("k", 5)])
    kept = found(disk, b"k")
    assert kept is not None
    assert (kept.file.name, kept.chunk.blocks) == ("y", ALL_BLOCKS)
    assert disk.take_empty() == ["x"]
    assert disk.used_bytes == 10
    disk.check()


def test_chunks_that_are_void_are_forgotten() -> None:
    pool = Pool()
    disk, floors = pool.shelf, pool.floors
    disk.add("x", 10, A, [chunk("old", 3), chunk("new", 4)])
    disk.add("y", 10, B, [chunk("old", 3)])
    floors.take({A: 4})
    disk.clear()
    assert found(disk, b"old") is None
    assert found(disk, b"new") is not None
    assert found(disk, b"old", B) is not None
    assert disk.take_empty() == []
    floors.begin(2)
    floors.take({B: 1})
    disk.clear()
    assert disk.take_empty() == ["y"]


def test_listing_says_what_came_and_why_it_went() -> None:
    pool = Pool()
    disk, listing = pool.shelf, pool.index.listing
    disk.add("x", 10, A, [chunk("damaged"), chunk("evicted"), chunk("cleared"), chunk("other")])
    assert {row.where for row in pool.index.rows(A, [Key(b"evicted"), Key(b"other")])} == {
        Where.DISK
    }
    number = listing.number
    kept = found(disk, b"damaged")
    assert kept is not None
    # What is not that very copy stays.
    disk.damaged(A, chunk("damaged"))
    disk.damaged(B, kept.chunk)
    assert found(disk, b"damaged") is kept
    disk.damaged(A, kept.chunk)
    pool.floors.take({A: 2})
    disk.add("y", 10, A, [chunk("evicted", 2), chunk("other", 2)])
    disk.clear()
    disk.drop_file("y")
    changes, _ = listing.since(number, 100) or ([], 0)
    assert {each.record.key: each.reason for each in changes} == {
        b"damaged": Reason.DAMAGED,
        b"cleared": Reason.CLEARED,
        b"evicted": Reason.EVICTED,
        b"other": Reason.EVICTED,
    }
    assert len(pool.shelf) == 0


class Filling(RuleBasedStateMachine):
    """Files come and go in any order. The model is names, and their files."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool()
        self.disk = self.pool.shelf
        self.disk.most_bytes = 60
        self.floor = 1
        self.model: dict[bytes, tuple[str, int]] = {}
        self.files = 0

    @rule(names=st.sets(st.sampled_from("abcdef"), min_size=1), number=st.integers(0, 3))
    def write(self, names: set[str], number: int) -> None:
        number += self.floor
        gone = self.disk.give_way(20)
        self.model = {key: at for key, at in self.model.items() if at[0] not in gone}
        self.files += 1
        name = f"{self.files}"
        self.model |= {each.encode(): (name, number) for each in names}
        self.disk.add(name, 20, A, [chunk(each, number) for each in sorted(names)])

    @rule(rise=st.integers(1, 3))
    def clear(self, rise: int) -> None:
        self.floor += rise
        self.pool.floors.take({A: self.floor})
        self.model = {key: at for key, at in self.model.items() if at[1] >= self.floor}
        self.disk.clear()

    @rule()
    def delete_empty(self) -> None:
        used = {name for name, _ in self.model.values()}
        assert not used & set(self.disk.take_empty())

    @rule(key=st.sampled_from("abcdef"), is_damaged=st.booleans())
    def read(self, key: str, is_damaged: bool) -> None:
        kept = found(self.disk, key.encode())
        if kept is None:
            return
        if is_damaged:
            del self.model[key.encode()]
            self.disk.damaged(A, kept.chunk)
        else:
            self.disk.was_read(kept.file.name)

    @invariant()
    def holds(self) -> None:
        self.disk.check()
        assert len(self.disk) == len(self.model)
        for name, (file, number) in self.model.items():
            kept = found(self.disk, name)
            assert kept is not None
            assert (kept.file.name, kept.chunk.stamp) == (file, (1, number))


Filling.TestCase.settings = settings(max_examples=150, deadline=None)
test_shelf_has_what_is_on_the_disk = Filling.TestCase
