"""Who copies which chunks: jobs of workers, landings, and what other nodes read."""

from __future__ import annotations

import pytest

from raykv.base.ids import Blocks, Direction, Refusal, Stamp
from raykv.node.pool.index import FRESH_S, OPEN_S
from raykv.node.pool.jobs import STORE_EXPIRY_S
from raykv.node.pool.records import ChunkRecord, ChunkState
from raykv.protocol.copies import Capture
from raykv.protocol.listing import Reason, Where
from tests.fixtures.node.owned_pool import (
    HISTORY,
    LIFE,
    PAGE,
    SLAB,
    WHOLE,
    A,
    B,
    OwnedPool,
    begun,
    key,
    num_open_jobs,
    stamp,
    where,
)


@pytest.mark.parametrize(
    ("life", "rank", "of"), [(2, 0, 1), (1, 0, 2), (1, -1, 1), (1, 1, 1), (1, 0, 0), (1, 7, 1)]
)
def test_engine_or_rank_that_is_not_introduced_stores_and_loads_nothing(
    pool: OwnedPool, life: int, rank: int, of: int
) -> None:
    pool.store(1)
    store, load = pool.admit(pool.storing(2), pool.loading(1), life=life, rank=rank, of=of)
    assert store.chunks == load.chunks == [Refusal.BAD_HANDLE]
    assert num_open_jobs(pool.node.index) == 0


def test_group_or_namespace_that_the_engine_does_not_have_is_refused(pool: OwnedPool) -> None:
    for odd in (pool.storing(2, namespace=B), pool.job_of(Direction.STORE, [key(3, group=5)])):
        (job,) = pool.admit(odd)
        assert job.chunks == [Refusal.BAD_HANDLE]
        assert pool.end(job).refusals == bytes([Refusal.BAD_HANDLE])


def test_slots_have_the_size_of_the_chunks_group(pool: OwnedPool) -> None:
    (job,) = pool.admit(pool.job_of(Direction.STORE, [key(1), key(1, group=1)], orders=Stamp(0, 4)))
    assert [each.slot_bytes for each in job.chunks] == [PAGE, 2 * PAGE]
    assert {each.stamp for each in job.chunks} == {Stamp(0, 4)}
    assert {each.blocks for each in job.chunks} == {WHOLE}
    pool.end(job)


def test_store_says_how_its_chunks_are_now_and_what_is_here_counts_as_stored(
    pool: OwnedPool,
) -> None:
    pool.store(1)
    (job,) = pool.admit(pool.storing(1, 2, 3))
    assert job.chunks[0] is Refusal.HERE
    result = pool.end(job, c2=Refusal.COPY_FAILED)
    there = {key(1): Where.RAM, key(2): Where.RAM, key(3): Where.NOWHERE}
    assert where(result.rows) == there
    assert (result.life, result.number) == (LIFE, pool.node.index.listing.number)
    assert (list(result.failed_chunks), result.refusals) == ([2], bytes([Refusal.COPY_FAILED]))


def test_readers_of_a_message_are_there_before_its_stores_take_room(pool: OwnedPool) -> None:
    pool.store(*range(16))
    pool.wait(100)
    pool.hello()
    # The store comes first in the message, and would take what the load is about.
    store, load = pool.admit(pool.storing(*range(20, 24)), pool.loading(*range(12, 16)))
    assert all(each.readers == 1 for each in load.chunks)
    assert all(isinstance(each, ChunkRecord) for each in store.chunks)
    assert pool.held() == [*range(8), *range(12, 16)]
    pool.end(store)
    pool.end(load)
    assert not pool.record(12).readers


def test_load_wants_its_blocks(pool: OwnedPool) -> None:
    pool.store(1, blocks=Blocks(1, 1))
    (job,) = pool.admit(pool.loading(1))
    assert job.chunks == [Refusal.PARTIAL]
    result = pool.end(job)
    (row,) = result.rows
    assert (row.where, row.blocks) == (Where.RAM, Blocks(1, 1))
    (job,) = pool.admit(pool.loading(1, blocks=Blocks(1, 1)))
    assert begun(job.chunks[0]).readers == 1
    pool.end(job)
    # It lacks blocks only while they are missing.
    (job,) = pool.admit(pool.loading(1))
    pool.store(1)
    assert job.chunks == [Refusal.PARTIAL]
    assert pool.end(job).refusals == bytes([Refusal.WRITING])


def test_load_says_of_chunks_that_failed_how_they_are(pool: OwnedPool) -> None:
    pool.store(1, 2, 3)
    (job,) = pool.admit(pool.loading(1, 2, 3, 4))
    assert pool.store(3, orders=Stamp(0, 1)) == [Refusal.NONE]
    for found in (job.chunks[0], job.chunks[2]):
        pool.node.index.drop(begun(found), Reason.DAMAGED)
    # What was damaged is not the chunk that has taken the place of it.
    result = pool.end(job, c0=Refusal.CORRUPT, c2=Refusal.CORRUPT)
    assert where(result.rows) == {key(1): Where.NOWHERE, key(3): Where.RAM, key(4): Where.NOWHERE}
    assert list(result.failed_chunks) == [0, 2, 3]
    assert result.refusals == bytes([Refusal.CORRUPT, Refusal.CORRUPT, Refusal.NOT_HERE])
    assert pool.held() == [2, 3]
    changes = pool.node.index.listing.since(0, 99)
    assert changes is not None
    assert changes[0][-1].reason is Reason.DAMAGED


def test_chunk_is_there_once_all_ranks_have_stored_it() -> None:
    pool = OwnedPool()
    pool.hello(num_ranks=2)
    message = pool.storing(1)
    (first,) = pool.admit(message, rank=0, of=2)
    (second,) = pool.admit(message, rank=1, of=2)
    assert first.chunks == second.chunks
    assert where(pool.end(first).rows) == {key(1): Where.COMING}
    result = pool.end(second)
    assert where(result.rows) == {key(1): Where.RAM}
    assert not result.failed_chunks


def test_rank_whose_part_came_to_nothing_is_told_so() -> None:
    pool = OwnedPool()
    pool.hello(num_ranks=2)
    message = pool.storing(1)
    (first,) = pool.admit(message, rank=0, of=2)
    (second,) = pool.admit(message, rank=1, of=2)
    pool.end(first, c0=Refusal.CANCELLED)
    assert pool.end(second).refusals == bytes([Refusal.POISONED])
    (again,) = pool.admit(pool.storing(2), rank=0, of=2)
    pool.order(1, floors={"": 1})
    assert pool.end(again).refusals == bytes([Refusal.CLEARED])


def test_parts_that_do_not_come_make_a_chunk_void_and_its_job_is_closed() -> None:
    pool = OwnedPool()
    pool.hello(num_ranks=2)
    (job,) = pool.admit(pool.storing(1), rank=0, of=2)
    pool.node.jobs.end_chunks(job, (0,), ok=True)
    pool.wait(STORE_EXPIRY_S - 1)
    assert pool.state(1) == {key(1): Where.COMING}
    pool.hello(num_ranks=2)
    pool.wait(1)
    assert pool.state(1) == {key(1): Where.NOWHERE}
    assert num_open_jobs(pool.node.index) == 1
    for _ in range(4):
        pool.hello(num_ranks=2)
        pool.wait(OPEN_S / 3)
    assert num_open_jobs(pool.node.index) == 0
    # The late rank's part does not begin it anew.
    pool.node.jobs.end_job(job, 0, 0.0)
    assert num_open_jobs(pool.node.index) == 0


def test_job_that_comes_again_is_copied_once(pool: OwnedPool) -> None:
    message = pool.storing(1, 2)
    (job,) = pool.admit(message)
    (again,) = pool.admit(message)
    assert again.chunks == [Refusal.WRITING] * 2
    pool.end(again)
    assert begun(job.chunks[0]).state is ChunkState.WRITING
    assert not pool.end(job).failed_chunks
    (late,) = pool.admit(message)
    assert late.chunks == [Refusal.POISONED] * 2
    pool.end(late)
    pool.end(job)
    assert num_open_jobs(pool.node.index) == 0
    assert pool.held() == [1, 2]


def test_jobs_without_chunks_end_like_others(pool: OwnedPool) -> None:
    capture = Capture("r", bytes(8), 1, 1, "float32", 1, [1, 1, 1], 1, 1.0)
    for message in (pool.storing(), pool.loading(), pool.storing(1, capture=capture)):
        (job,) = pool.admit(message)
        assert job.chunks == [Refusal.NONE] * len(message.keys)
        result = pool.end(job)
        assert (result.job_id, len(result.rows.keys)) == (message.job_id, 0)
        assert not result.failed_chunks
    assert not list(pool.node.index.places)
    assert num_open_jobs(pool.node.index) == 0


def test_job_whose_line_ends_leaves_nothing_behind_in_either_order(pool: OwnedPool) -> None:
    for ends_first in (True, False):
        pool.node.jobs.begin_line(1, 0, 1)
        (job,) = pool.admit(pool.storing(1), pool.loading(2))[:1]
        record = begun(job.chunks[0])
        if ends_first:
            pool.node.jobs.end_line(1, 0)
            pool.end(job, c0=Refusal.CANCELLED)
        else:
            pool.end(job, c0=Refusal.CANCELLED)
            pool.node.jobs.end_line(1, 0)
        pool.node.check()
        assert record.state is ChunkState.VOID
        assert not list(pool.node.index.places)
        assert num_open_jobs(pool.node.index) == 0


def test_line_that_comes_back_before_the_old_one_ends_is_not_ended_with_it(
    pool: OwnedPool,
) -> None:
    pool.node.jobs.begin_line(1, 0, 1)
    pool.node.jobs.begin_line(1, 0, 1)
    (job,) = pool.admit(pool.storing(1))
    pool.node.jobs.end_line(1, 0)
    assert not pool.end(job).failed_chunks
    (job,) = pool.admit(pool.storing(2))
    pool.node.jobs.end_line(1, 0)
    assert pool.end(job).refusals == bytes([Refusal.POISONED])
    assert pool.held() == [1]


@pytest.mark.parametrize(("life", "rank", "of"), [(1, 5, 2), (3, 0, 1)])
def test_lines_of_nobody_change_nothing(pool: OwnedPool, life: int, rank: int, of: int) -> None:
    record = begun(pool.land(7))
    pool.node.jobs.begin_line(life, rank, of)
    pool.node.jobs.end_line(life, rank)
    pool.node.jobs.end_line(life, rank)
    pool.node.landings.landed(record, ok=True)
    assert pool.held() == [7]


def test_dead_engine_leaves_no_store_and_its_late_ends_do_no_harm(pool: OwnedPool) -> None:
    (job,) = pool.admit(pool.storing(1, 2))
    pool.node.bye(1)
    pool.node.check()
    assert pool.state(1, 2) == {key(1): Where.NOWHERE, key(2): Where.NOWHERE}
    result = pool.end(job)
    assert result.refusals == bytes([Refusal.POISONED] * 2)
    assert num_open_jobs(pool.node.index) == 0
    assert not list(pool.node.index.places)
    pool.hello()
    assert pool.store(1) == [Refusal.NONE]


def test_stores_may_be_begun_in_pieces(pool: OwnedPool) -> None:
    (job,) = pool.node.jobs.announce(1, 0, 1, [pool.storing(1, 2, 3)], pool.now)
    assert job.chunks == [None] * 3
    pool.node.begin_chunks(job, [0, 1], pool.now)
    pool.node.jobs.end_chunks(job, [0, 1], ok=True)
    assert pool.held() == [1, 2]
    # Given up before the last one.
    result = pool.node.jobs.end_job(job, 0, 0.0)
    assert (list(result.failed_chunks), result.refusals) == ([2], bytes([Refusal.CANCELLED]))
    pool.node.begin_chunks(job, [2], pool.now)
    assert job.chunks[2] is None
    pool.node.check()


@pytest.mark.parametrize("has_loads", [False, True])
def test_loads_beside_stores_decide_whether_storing_pays(has_loads: bool) -> None:
    pool = OwnedPool(num_slabs=1024)
    pool.hello(slot_bytes={0: PAGE})
    for first in range(0, 4096, 1024):
        pool.store(*range(first, first + 1024))
        if has_loads:
            pool.tell(counters={"chunks_loaded": 7 if first < 2048 else 107})
        if has_loads and first == 2048:
            for record in pool.node.begin_read(A, list(map(key, range(100))), [PAGE] * 100, 1.0):
                pool.node.index.end_load(begun(record))
    assert (pool.changes(pool.query()).facts.store_share == 1) == has_loads


# Landings


def test_chunk_that_lands_is_here_with_its_stamp_and_owner_and_one_that_fails_is_not(
    pool: OwnedPool,
) -> None:
    record = begun(pool.land(1, stamp=Stamp(0, 3), blocks=Blocks(0, 1), tenant="t"))
    assert pool.state(1) == {key(1): Where.COMING}
    pool.node.landings.landed(record, ok=True)
    assert (record.stamp, record.blocks) == (Stamp(0, 3), Blocks(0, 1))
    assert pool.state(1) == {key(1): Where.RAM}
    assert pool.report().tenant_bytes == {"t": PAGE}
    pool.node.landings.landed(begun(pool.land(2)), ok=False)
    assert pool.state(2) == {key(2): Where.NOWHERE}
    assert list(pool.node.index.places) == [record]
    assert num_open_jobs(pool.node.index) == 0


def test_chunk_that_is_void_or_here_or_coming_does_not_land(pool: OwnedPool) -> None:
    pool.order(4, floors={A: 4})
    assert pool.land(1, stamp=stamp(3)) is Refusal.CLEARED
    assert pool.land(1, stamp=Stamp(HISTORY + 1, 9)) is Refusal.CLEARED
    record = begun(pool.land(1, stamp=stamp(4)))
    assert pool.land(1, stamp=stamp(4)) is Refusal.WRITING
    pool.node.landings.landed(record, ok=True)
    assert pool.land(1, stamp=stamp(4)) is Refusal.HERE
    # One that a clear would spare takes its place, and so does one with more blocks.
    record = begun(pool.land(1, stamp=stamp(5), blocks=Blocks(0, 4)))
    pool.node.landings.landed(record, ok=True)
    assert pool.record(1) is record


def test_landings_take_a_quarter_of_the_pool(pool: OwnedPool) -> None:
    landing = [begun(pool.land(number)) for number in range(SLAB)]
    assert pool.land(9) is Refusal.NO_ROOM
    assert pool.store(20) == [Refusal.NONE]
    assert pool.land(20) is Refusal.HERE
    # Its time is over, but its bytes may still be written.
    pool.wait(STORE_EXPIRY_S)
    assert landing[0].state is ChunkState.VOID
    assert pool.land(9) is Refusal.NO_ROOM
    pool.node.landings.landed(landing[0], ok=True)
    assert pool.state(0) == {key(0): Where.NOWHERE}
    pool.node.landings.landed(begun(pool.land(9)), ok=True)
    assert pool.held() == [9, 20]


def test_landing_takes_no_chunk_that_was_found_or_has_just_landed(pool: OwnedPool) -> None:
    pool.store(*range(12))
    for number in range(20, 24):
        pool.node.landings.landed(begun(pool.land(number)), ok=True)
    pool.found(*range(12))
    assert pool.land(30) is Refusal.NO_ROOM
    pool.now += FRESH_S
    assert isinstance(pool.land(30), ChunkRecord)


@pytest.mark.parametrize(
    ("slot_bytes", "refusal"),
    [
        (0, Refusal.BAD_HANDLE),
        (-PAGE, Refusal.BAD_HANDLE),
        (PAGE + 1, Refusal.BAD_HANDLE),
        ((SLAB + 1) * PAGE, Refusal.NO_ROOM),
        (1 << 62, Refusal.NO_ROOM),
    ],
)
def test_landing_of_an_odd_size_costs_nothing(
    pool: OwnedPool, slot_bytes: int, refusal: Refusal
) -> None:
    pool.store(*range(16))
    pool.now += FRESH_S
    assert pool.land(20, slot_bytes=slot_bytes) is refusal
    assert pool.held() == list(range(16))
    assert num_open_jobs(pool.node.index) == 0


def test_other_nodes_read_whole_slots_and_that_is_a_use(pool: OwnedPool) -> None:
    pool.store(1, 2, blocks=Blocks(1, 1))
    found = pool.node.begin_read(A, [key(1), key(2), key(3)], [PAGE, 2 * PAGE, PAGE], pool.now)
    record = begun(found[0])
    assert found[1:] == [Refusal.BAD_HANDLE, Refusal.NOT_HERE]
    assert (record.readers, record.found_at, record.hits) == (1, pool.now, 1)
    assert pool.record(2).readers == 0
    pool.node.index.end_load(record)
    pool.node.check()
