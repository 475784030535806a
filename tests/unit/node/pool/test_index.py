"""Which chunks a node has, and who may touch which bytes now.

What is right whatever happens in which order, `tests/stateful/test_pool_machine.py` looks for; here
are the cases that have names.
"""

from __future__ import annotations

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import ALL_BLOCKS, Key, Namespace, Refusal, Stamp
from raykv.base.shares import Share
from raykv.node.pool.claims import Owner, OwnerKind
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import FRESH_S, MAX_OPEN_JOBS, PoolIndex
from raykv.node.pool.listing import Listing
from raykv.node.pool.places import MOST_SIZES, Places
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing, StorePart
from raykv.node.pool.room import IDLE_S, NOBODY
from raykv.node.pool.shelf import DiskChunk
from raykv.protocol.listing import ALL_READ, Position, Reason, Where
from tests.fixtures.node.bare_index import ONE, BareIndex
from tests.fixtures.node.owned_pool import PAGE, SLAB, A, begun, end_store, key, num_open_jobs


class Pool(BareIndex):
    def in_slab(self, index: int) -> list[ChunkRecord]:
        return self.index.places.records_in(index)

    def held(self) -> list[int]:
        return [number for number in range(100) if self.index.find(A, key(number))]


@pytest.fixture
def pool() -> Pool:
    return Pool()


def full(num_slabs: int, idle_s: float = 10) -> Pool:
    """Of chunks of a page, for a while."""
    pool = Pool(num_slabs)
    pool.store(*map(key, range(num_slabs * SLAB)))
    pool.now += idle_s
    return pool


def test_end_of_a_void_store_does_not_count_for_the_next_one_of_that_name(pool: Pool) -> None:
    first, second = StorePart(1, 1, 0, 2), StorePart(1, 1, 1, 2)
    record = begun(pool.offer(key(1), first))
    pool.index.end_job(StorePart(1, 1, 1, 2))
    assert record.state is ChunkState.VOID
    other = begun(pool.offer(key(1), StorePart(2, 1, 0, 2)))
    assert other.slot != record.slot
    assert end_store(pool.index, record, 0, ok=True) is ChunkState.VOID
    assert end_store(pool.index, other, 0, ok=True) is ChunkState.WRITING
    assert pool.offer(key(1), second) is Refusal.POISONED
    pool.index.check()


def test_behind_a_chunk_without_room_none_of_its_group_is_stored(pool: Pool) -> None:
    pool.store(*map(key, range(4)))
    readers = [begun(pool.load(key(number))) for number in range(4)]
    pool.now += 100
    part = StorePart(1, 99)
    assert pool.offer(key(10), part) is Refusal.NO_ROOM
    for each in readers:
        pool.index.end_load(each)
    assert pool.offer(key(11), part) is Refusal.NO_ROOM
    begun(pool.offer(key(12, group=1), part))


@pytest.mark.parametrize("most", [0, 1])
def test_reader_of_a_namespace_that_is_not_here_has_read_all_at_once(most: int) -> None:
    pool = Pool(64)
    pool.store(*map(key, range(64)))
    other = Namespace("b")
    part = pool.index.part_after(Position(), most, {other})
    assert part.end == Position(1, pool.index.listing.number, ALL_READ)
    assert not part.rows.keys
    # One that has come in the middle of it as well; what comes is a change.
    record = begun(pool.offer(key(1), StorePart(1, 99), namespace=other))
    assert pool.index.part_after(Position(), 1, {other}).end.place != ALL_READ
    (row,) = pool.index.part_after(part.end, 1, {other}).rows
    assert (row.key, row.where) == (key(1), Where.COMING)
    end_store(pool.index, record, 0, ok=False)
    assert pool.index.part_after(Position(), 1, {other}).end.place == ALL_READ
    pool.index.shelf.add("file", PAGE, other, [DiskChunk(key(1), Stamp(1, 1), 0, PAGE, 0)])
    assert pool.index.part_after(Position(), 1, {other}).end.place != ALL_READ


def test_page_has_each_name_once_with_all_that_is_known_of_it() -> None:
    pool = Pool(4)
    pool.store(key(0))
    pool.store(key(1), blocks=ONE)
    pool.store(key(2))
    shelved = [DiskChunk(key(number), Stamp(1, 1), 0, PAGE, 0) for number in (2, 3)]
    pool.index.shelf.add("file", 2 * PAGE, A, shelved)
    part = StorePart(1, 99)
    begun(pool.offer(key(1), part))
    begun(pool.offer(key(4), part))
    # The disk's chunks come behind those in RAM: the one that is in both comes with either.
    first = pool.index.part_after(Position(), 100)
    second = pool.index.part_after(first.end, 100)
    assert sorted((row.key, row.where) for row in first.rows) == [
        (key(0), Where.RAM),
        (key(1), Where.RAM | Where.COMING),
        (key(2), Where.RAM | Where.DISK),
        (key(4), Where.COMING),
    ]
    assert sorted((row.key, row.where) for row in second.rows) == [
        (key(2), Where.RAM | Where.DISK),
        (key(3), Where.DISK),
    ]


@pytest.mark.parametrize(("holder", "second"), [("1", 4), (NOBODY, 2)], ids=["own", "of_others"])
def test_what_goes_of_a_tenant_above_its_guarantee_goes_for_its_quota(
    pool: Pool, holder: str, second: int
) -> None:
    """Those without a share of their own have one together."""
    pool.index.share({holder: Share(0.25)})
    pool.store(*map(key, range(4)), tenant="1")
    pool.store(key(4), tenant="2")
    pool.index.share({holder: Share(1.0)})
    pool.store(key(5), tenant="2")
    changes = pool.index.listing.since(0, 100)
    assert changes is not None
    gone = {each.record.key: each.reason for each in changes[0]}
    assert (gone[key(3)], gone[key(second)]) == (Reason.QUOTA, Reason.EVICTED)
    # Both are remembered.
    pool.store(key(3), tenant="1")
    assert pool.ready(key(3)).hits == 1


def test_first_verdict_holds_for_all_ranks_of_a_job(pool: Pool) -> None:
    a0, a1 = StorePart(1, 1, 0, 2), StorePart(1, 1, 1, 2)
    b0, b1 = StorePart(2, 1, 0, 2), StorePart(2, 1, 1, 2)
    record = begun(pool.offer(key(1), a0))
    assert pool.offer(key(1), b0) is Refusal.WRITING
    # The second rank of A gives up: the store is void at once, and B's second rank opens no other.
    pool.index.end_job(StorePart(1, 1, 1, 2))
    assert record.state is ChunkState.VOID
    assert pool.offer(key(1), b1) is Refusal.WRITING
    assert pool.offer(key(1), a1) is Refusal.POISONED
    end_store(pool.index, record, 0, ok=True)
    for job, rank in ((1, 0), (2, 0), (2, 1)):
        pool.index.end_job(StorePart(job, 1, rank, 2))
    assert begun(pool.offer(key(1), StorePart(2, 2, 0, 2))).state is ChunkState.WRITING


def test_rank_that_ends_a_job_first_makes_void_what_others_would_store(pool: Pool) -> None:
    first, second = StorePart(1, 1, 0, 2), StorePart(1, 1, 1, 2)
    pool.index.end_job(first)
    assert pool.offer(key(1), second) is Refusal.POISONED
    pool.index.end_job(second)
    # The same with a rank that has stored less.
    first, second = StorePart(1, 2, 0, 2), StorePart(1, 2, 1, 2)
    for part in (first, second):
        end_store(pool.index, begun(pool.offer(key(1), part)), part.rank, ok=True)
    pool.index.end_job(first)
    assert pool.offer(key(2), second) is Refusal.POISONED
    assert pool.offer(key(3), first) is Refusal.POISONED
    pool.index.end_job(second)
    assert pool.held() == [1]


def test_no_job_is_left_of_engines_that_are_gone(pool: Pool) -> None:
    for life in range(1, MAX_OPEN_JOBS // 8):
        pool.index.end_line(life, 0, 2)
        assert pool.offer(key(1), StorePart(life, 1, 1, 2)) is Refusal.POISONED
        pool.index.end_line(life, 1, 2)
        assert num_open_jobs(pool.index) == 0
    pool.index.end_line(1, 0, 2)
    pool.index.begin_line(1, 0)
    assert begun(pool.offer(key(1), StorePart(1, 2, 1, 2))).state is ChunkState.WRITING


def test_end_of_stores_that_fails_on_its_way_leaves_no_writer(pool: Pool) -> None:
    part = StorePart(1, 1)
    records = [begun(pool.offer(key(number), part)) for number in (1, 2, 3)]
    with pytest.raises(ValueError, match="shorter"):
        pool.index.end_stores(records, 0, ok=True, blocks=[ALL_BLOCKS])
    assert not any(record.writers for record in records)
    pool.index.expire(pool.now + 30)
    assert [record.state for record in records] == [ChunkState.VOID] * 3
    assert not list(pool.index.places)


def test_open_jobs_of_an_engine_are_bounded(pool: Pool) -> None:
    for number in range(MAX_OPEN_JOBS):
        pool.offer(key(1), StorePart(1, number))
    assert pool.offer(key(2), StorePart(1, MAX_OPEN_JOBS)) is Refusal.QUEUE_FULL
    assert begun(pool.offer(key(2), StorePart(2, 1))).state is ChunkState.WRITING


def test_prompt_that_is_longer_than_the_pool_keeps_its_head(pool: Pool) -> None:
    pool.store(*map(key, range(10, 14)))
    for number in (10, 11):
        pool.index.end_load(begun(pool.load(key(number))))
    refusals = pool.store(*map(key, range(6)))
    # What was found just now stays, and behind the first gap nothing is stored.
    assert refusals == [Refusal.NONE, Refusal.NONE, *[Refusal.NO_ROOM] * 4]
    assert pool.held() == [0, 1, 10, 11]
    pool.now += FRESH_S
    assert pool.store(*map(key, range(20, 24))) == [Refusal.NONE] * 4


def test_what_a_job_was_told_is_here_does_not_go_for_its_tail(pool: Pool) -> None:
    pool.store(key(0))
    pool.store(*map(key, range(10, 13)))
    pool.now += 100
    assert pool.store(key(0), key(1)) == [Refusal.HERE, Refusal.NONE]
    assert pool.held() == [0, 1, 10, 11]


def test_chunk_that_is_replaced_was_found_as_lately_as_before(pool: Pool) -> None:
    pool.store(key(0))
    pool.index.end_load(begun(pool.load(key(0))))
    assert pool.store(key(0), stamp=2) == [Refusal.NONE]
    pool.store(*map(key, range(10, 14)))
    assert 0 in pool.held()


def test_as_much_goes_as_a_job_has_chunks() -> None:
    pool = Pool(1024)
    for first in range(0, 4096, 1024):
        pool.store(*map(key, range(first, first + 1024)))
    part = StorePart(1, 999)
    chunks = [ChunkRecord(A, key(number), PAGE, Stamp(1, 1)) for number in range(5000, 5500)]
    found = pool.index.begin_stores(part, chunks, pool.now, pool.now + 30)
    assert all(isinstance(each, ChunkRecord) for each in found)
    assert pool.index.num_ready == 4096 - 500
    pool.index.check()


def test_slot_sizes_of_a_pool_are_bounded() -> None:
    pool = Pool()
    index = PoolIndex(PoolGeometry(300 * 512 * PAGE, 512 * PAGE), Listing(1), Floors(1))
    for pages in range(1, 400):
        chunk = ChunkRecord(A, key(pages), pages * PAGE, Stamp(1, 1))
        index.begin_stores(StorePart(1, pages), [chunk], pool.now, pool.now + 30)[0]
        index.expire(pool.now)
    assert len(index.places.classes()) == MOST_SIZES
    index.check()


def test_size_whose_chunks_are_gone_leaves_its_last_slab_to_others(pool: Pool) -> None:
    pool.store(*map(key, range(4)))
    pool.now += IDLE_S + 1
    assert pool.store(key(9), pages=2) == [Refusal.NONE]
    pool = Pool()
    pool.store(key(1))
    pool.index.drop(pool.ready(key(1)), Reason.DAMAGED)
    pool.now += IDLE_S + 1
    assert pool.store(key(9), pages=2) == [Refusal.NONE]


@pytest.mark.parametrize(
    ("standing", "refusal", "num_left"),
    [(Standing.KEPT, Refusal.NONE, 6), (Standing.PINNED, Refusal.NO_ROOM, 8)],
)
def test_kept_chunks_in_every_slab_do_not_refuse_another_slot_size(
    standing: Standing, refusal: Refusal, num_left: int
) -> None:
    pool = full(2)
    kept = [(A, record.key) for slab in (0, 1) for record in pool.in_slab(slab)[:1]]
    owner = Owner(OwnerKind.OPERATOR, "pin")
    pool.index.claims.claim(owner, kept, standing, pool.now + 50)
    assert pool.store(key(20), key(21), key(22), pages=2) == [refusal] * 2 + [Refusal.NO_ROOM]
    assert len(pool.held()) == num_left


def test_slab_changes_its_slot_size_without_a_look_at_all_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = full(1024)
    looks = 0

    def count(places: Places, index: int) -> list[ChunkRecord]:
        nonlocal looks
        looks += 1
        return records_in(places, index)

    records_in = Places.records_in
    part = StorePart(1, 99)
    with monkeypatch.context() as patches:
        patches.setattr(Places, "records_in", count)
        for number in range(20):
            begun(pool.offer(key(5000 + number), part, pages=2))
    assert pool.index.places.classes() == {PAGE: 1014, 2 * PAGE: 10}
    assert looks < 200
    # The head of the prompt stays.
    assert pool.held() == list(range(100))


def test_all_slabs_are_looked_at_once_in_a_while_if_those_that_go_first_may_not() -> None:
    pool = full(64)
    last = {record.key for record in pool.in_slab(0)}
    for record in list(pool.index.places):
        if record.key not in last:
            pool.index.hold(record)
    assert pool.store(key(300), pages=2) == [Refusal.NONE]


@pytest.mark.parametrize(("idle_s", "num_slabs"), [(10, 2), (IDLE_S + 1, 3)])
def test_slot_size_gets_its_part_of_the_slabs_and_all_but_one_of_one_that_nobody_wants(
    idle_s: float, num_slabs: int
) -> None:
    pool = full(4, idle_s)
    for number in range(20, 32):
        assert pool.store(key(number), pages=2) == [Refusal.NONE]
    assert pool.index.places.classes() == {PAGE: 4 - num_slabs, 2 * PAGE: num_slabs}
    assert pool.held()[: 4 * (4 - num_slabs)] == list(range(4 * (4 - num_slabs)))


def test_nobody_goes_below_its_guarantee_while_others_have_more() -> None:
    pool = Pool(2)
    pool.store(*map(key, range(4)), tenant="1")
    pool.store(*map(key, range(10, 14)), tenant="2")
    pool.index.share({"1": Share(guaranteed=0.5)})
    pool.index.check()
    for number in range(20, 30):
        pool.store(key(number), tenant="2")
    assert pool.held()[:4] == [0, 1, 2, 3]
    pool.index.share({})
    for number in range(30, 40):
        pool.store(key(number), tenant="2")
    assert pool.held()[0] >= 30


def test_tenant_that_stores_gives_up_its_own_rather_than_what_another_is_guaranteed() -> None:
    pool = Pool(4)
    pool.index.share({"1": Share(guaranteed=0.5), "2": Share(guaranteed=0.5)})
    pool.store(*map(key, range(8)), tenant="1")
    pool.store(*map(key, range(10, 18)), tenant="2")
    pool.now += 100
    records = [begun(pool.offer(key(20 + at), StorePart(1, 99), tenant="2")) for at in range(8)]
    assert len(records) == 8
    assert pool.held() == list(range(8))


def test_slab_that_changes_its_size_takes_nobody_below_its_guarantee() -> None:
    pool = Pool(4)
    pool.index.share({"1": Share(guaranteed=0.5)})
    pool.store(*map(key, range(8)), tenant="1")
    pool.store(*map(key, range(10, 18)))
    pool.now += 100
    assert pool.store(key(30), pages=2) == [Refusal.NONE]
    assert pool.held()[:8] == list(range(8))


def test_reader_comes_to_the_end_while_changes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Listing.__init__, "__defaults__", (256,))
    pool = Pool(500)
    pool.store(*map(key, range(2000)))
    position, parts = Position(), []
    there: dict[Key, Where] = {}
    while position.place != ALL_READ or position.number != pool.index.listing.number:
        part = pool.index.part_after(position, 64)
        parts.append(part)
        assert part.follows(position)
        there |= {row.key: row.where for row in part.rows}
        position = part.end
        if position.place != ALL_READ:
            pool.now += 10
            # 20 come, and as many go.
            pool.store(*(key(2000 + 20 * len(parts) + each) for each in range(20)))
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert len(parts) <= 2000 // 64 + 3
    ready = {each.key for each in pool.index.places if each.state is ChunkState.READY}
    assert {each for each, where in there.items() if where is Where.RAM} == ready
