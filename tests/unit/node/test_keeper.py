"""A node's pool behind one lock: stores wait for readers, and what is READY is reported once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from raykv.node.slots import SlotState

import raykv.node.keeper
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    NO_GENERATION,
    SLOT_ALIGNMENT,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Refusal,
    Slot,
)
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper, inventory_of
from raykv.protocol.node import FailedStores, Inventory
from tests.fixtures.keys import chunk

PAGE = SLOT_ALIGNMENT
GEOMETRY = PoolGeometry(16 * PAGE, 4 * PAGE)
MODEL = Namespace("model")
NONE = Refusal.NONE
LONG_S = 10.0
"""Longer than anything in these tests takes."""


@pytest.fixture
def keeper() -> Iterator[PoolKeeper]:
    """The table's invariants hold when a test is over."""
    made = PoolKeeper(GEOMETRY, "")
    yield made
    made.table.check()
    made.pool._region.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as made:
        yield made


def begin(keeper: PoolKeeper, name: ChunkName, wait_s: float = 0.0) -> Refusal:
    return keeper.begin_store(name, 0, 1, wait_s, LONG_S)


def store(keeper: PoolKeeper, *names: ChunkName) -> None:
    for name in names:
        assert begin(keeper, name) is NONE
        assert keeper.end_store(name, 0, ok=True) is SlotState.READY


def make_checksums(keeper: PoolKeeper) -> None:
    """As a NodeActor does it when it has nothing else to do."""
    integrity = Integrity(keeper)
    while integrity.work(lambda: False):
        pass


def can_load(keeper: PoolKeeper, name: ChunkName) -> bool:
    refusal = keeper.begin_load(name)
    if refusal is NONE:
        keeper.end_load(name)
    return refusal is NONE


def assert_waits(call: Future[Refusal]) -> None:
    with pytest.raises(TimeoutError):
        call.result(0.1)


# Stores and readers


def test_store_into_a_free_slot_begins_at_once(keeper: PoolKeeper) -> None:
    assert begin(keeper, chunk(1)) is NONE
    assert keeper.begin_load(chunk(1)) is Refusal.WRITING
    assert keeper.end_store(chunk(1), 0, ok=True) is SlotState.READY
    assert can_load(keeper, chunk(1))


def test_store_waits_for_all_readers_of_its_slot(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    store(keeper, chunk(1))
    for _ in range(2):
        assert keeper.begin_load(chunk(1)) is NONE
    storing = threads.submit(begin, keeper, chunk(2, key=b"n"), LONG_S)
    assert_waits(storing)
    keeper.end_load(chunk(1))
    assert_waits(storing)
    keeper.end_load(chunk(1))
    assert storing.result(LONG_S) is NONE
    assert not can_load(keeper, chunk(1))


def test_store_waits_for_the_writer_of_its_slot(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    assert begin(keeper, chunk(1)) is NONE
    storing = threads.submit(begin, keeper, chunk(2), LONG_S)
    assert_waits(storing)
    assert keeper.end_store(chunk(1), 0, ok=True) is SlotState.READY
    assert storing.result(LONG_S) is NONE
    assert keeper.end_store(chunk(2), 0, ok=True) is SlotState.READY


def test_store_of_another_slot_size_waits_for_the_readers_of_the_slab(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    store(keeper, chunk(1, slot=1), chunk(2, slot=4))
    assert keeper.begin_load(chunk(1, slot=1)) is NONE
    storing = threads.submit(begin, keeper, chunk(3, slot=2, pages=2), LONG_S)
    assert_waits(storing)
    keeper.end_load(chunk(1, slot=1))
    assert storing.result(LONG_S) is NONE
    assert not can_load(keeper, chunk(1, slot=1))
    assert can_load(keeper, chunk(2, slot=4))


def test_waiting_store_is_woken_by_the_last_reader(
    keeper: PoolKeeper, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.keeper, "SLOT_LOOK_S", 2 * LONG_S)
    store(keeper, chunk(1))
    assert keeper.begin_load(chunk(1)) is NONE
    storing = threads.submit(begin, keeper, chunk(2), LONG_S)
    assert_waits(storing)
    keeper.end_load(chunk(1))
    assert storing.result(LONG_S) is NONE


def test_waiting_store_is_woken_by_the_last_writer(
    keeper: PoolKeeper, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.keeper, "SLOT_LOOK_S", 2 * LONG_S)
    assert begin(keeper, chunk(1)) is NONE
    storing = threads.submit(begin, keeper, chunk(2), LONG_S)
    assert_waits(storing)
    keeper.end_store(chunk(1), 0, ok=False)
    assert storing.result(LONG_S) is NONE


def test_others_go_on_while_a_store_waits(keeper: PoolKeeper, threads: ThreadPoolExecutor) -> None:
    store(keeper, chunk(1), chunk(2, slot=1))
    assert keeper.begin_load(chunk(1)) is NONE
    storing = threads.submit(begin, keeper, chunk(3), LONG_S)
    assert_waits(storing)
    store(keeper, chunk(4, slot=1))
    assert can_load(keeper, chunk(4, slot=1))
    assert can_load(keeper, chunk(1))
    keeper.end_load(chunk(1))
    assert storing.result(LONG_S) is NONE


def test_store_gives_up_when_its_time_is_over_and_has_changed_nothing(keeper: PoolKeeper) -> None:
    store(keeper, chunk(1))
    assert keeper.begin_load(chunk(1)) is NONE
    started = time.monotonic()
    assert begin(keeper, chunk(2), 0.2) is Refusal.WRITING
    assert 0.2 <= time.monotonic() - started < LONG_S / 2
    keeper.end_load(chunk(1))
    assert can_load(keeper, chunk(1))
    assert keeper.highest_generation == 1
    store(keeper, chunk(2))


def test_store_that_is_cancelled_while_it_waits_gives_up_soon(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    store(keeper, chunk(1))
    assert keeper.begin_load(chunk(1)) is NONE
    cancelled = threading.Event()
    storing = threads.submit(
        keeper.begin_store, chunk(2), 0, 1, 2 * LONG_S, LONG_S, cancelled.is_set
    )
    assert_waits(storing)
    cancelled.set()
    assert storing.result(LONG_S) is Refusal.WRITING
    keeper.end_load(chunk(1))
    assert can_load(keeper, chunk(1))


def test_store_is_refused_when_its_namespace_is_cleared_while_it_waits(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    store(keeper, chunk(1))
    assert keeper.begin_load(chunk(1)) is NONE
    storing = threads.submit(begin, keeper, chunk(2), 2 * LONG_S)
    assert_waits(storing)
    keeper.clear({MODEL: 2})
    assert storing.result(LONG_S) is Refusal.CLEARED
    keeper.end_load(chunk(1))


def test_of_stores_that_wait_for_one_slot_the_latest_is_there_in_the_end(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    """Whoever comes first: the older one is overwritten, or refused."""
    store(keeper, chunk(1))
    assert keeper.begin_load(chunk(1)) is NONE

    def store_when_free(name: ChunkName) -> Refusal:
        refusal = begin(keeper, name, LONG_S)
        if refusal is NONE:
            keeper.end_store(name, 0, ok=True)
        return refusal

    storing = [threads.submit(store_when_free, chunk(generation)) for generation in (2, 3, 4)]
    assert_waits(storing[-1])
    keeper.end_load(chunk(1))
    answers = [each.result(LONG_S) for each in storing]
    assert answers[-1] is NONE
    assert set(answers) <= {NONE, Refusal.STALE}
    assert keeper.all_ready() == [chunk(4)]


@pytest.mark.parametrize(
    ("name", "refusal"),
    [
        (chunk(1), Refusal.STALE),
        (chunk(2), Refusal.STALE),
        (chunk(3, slot=1, pages=2), Refusal.BAD_HANDLE),
        (chunk(3, slot=16), Refusal.BAD_HANDLE),
    ],
)
def test_store_that_can_never_begin_is_refused_without_waiting(
    keeper: PoolKeeper, name: ChunkName, refusal: Refusal
) -> None:
    store(keeper, chunk(2))
    assert keeper.begin_load(chunk(2)) is NONE
    started = time.monotonic()
    assert begin(keeper, name, LONG_S) is refusal
    assert time.monotonic() - started < LONG_S / 2
    keeper.end_load(chunk(2))


def test_chunk_is_ready_when_every_rank_has_stored_its_part(keeper: PoolKeeper) -> None:
    for rank in range(3):
        assert keeper.begin_store(chunk(1), rank, 3, 0.0, LONG_S) is NONE
    for rank in (2, 0):
        assert keeper.end_store(chunk(1), rank, ok=True) is SlotState.WRITING
        assert not can_load(keeper, chunk(1))
    assert len(keeper.take_unreported(10)) == 0
    assert keeper.end_store(chunk(1), 1, ok=True) is SlotState.READY
    assert keeper.take_unreported(10).keys == [b"k"]


def test_store_that_fails_leaves_its_slot_empty_and_unreported(keeper: PoolKeeper) -> None:
    assert begin(keeper, chunk(1)) is NONE
    assert keeper.end_store(chunk(1), 0, ok=False) is SlotState.EMPTY
    assert not can_load(keeper, chunk(1))
    assert len(keeper.take_unreported(10)) == 0
    store(keeper, chunk(2))


def test_store_whose_other_ranks_do_not_come_expires(keeper: PoolKeeper) -> None:
    assert keeper.begin_store(chunk(1), 0, 2, 0.0, 5.0) is NONE
    assert keeper.end_store(chunk(1), 0, ok=True) is SlotState.WRITING
    with keeper.lock:
        assert keeper.table.expire(time.monotonic() + 4.0) == 0
        assert keeper.table.expire(time.monotonic() + 5.0) == 1
    assert keeper.begin_store(chunk(1), 1, 2, 0.0, 5.0) is Refusal.STALE


# Reports


def test_chunks_are_reported_once_in_the_order_in_which_they_became_ready(
    keeper: PoolKeeper,
) -> None:
    names = [chunk(i + 1, slot=i, key=bytes([i])) for i in range(5)]
    store(keeper, *names)
    assert keeper.take_unreported(2) == inventory_of(names[:2])
    assert keeper.take_unreported(10) == inventory_of(names[2:])
    assert keeper.take_unreported(10) == Inventory()


def test_oldest_chunks_are_not_reported_when_too_many_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.node.keeper, "MAX_UNREPORTED", 3)
    keeper = PoolKeeper(GEOMETRY, "")
    names = [chunk(i + 1, slot=i, key=bytes([i])) for i in range(5)]
    store(keeper, *names)
    assert keeper.take_unreported(10) == inventory_of(names[2:])
    assert set(keeper.all_ready()) == set(names)
    keeper.pool._region.close()


def test_chunks_of_an_inventory_are_not_reported_again(keeper: PoolKeeper) -> None:
    store(keeper, chunk(1), chunk(2, slot=1))
    assert begin(keeper, chunk(3, slot=2)) is NONE
    assert set(keeper.all_ready()) == {chunk(1), chunk(2, slot=1)}
    assert len(keeper.take_unreported(10)) == 0
    keeper.end_store(chunk(3, slot=2), 0, ok=True)
    assert keeper.take_unreported(10).generations == [3]


def test_columns_of_an_inventory_name_each_chunk_in_its_namespace() -> None:
    names = [
        chunk(5, slot=3, key=b"a", namespace="z"),
        chunk(4, slot=4, key=b"b", namespace="model", pages=2),
        chunk(6, slot=2, key=b"c", namespace="z"),
    ]
    columns = inventory_of(names)
    rows = zip(
        columns.namespace_index,
        columns.keys,
        columns.slots,
        columns.generations,
        columns.slot_bytes,
        strict=True,
    )
    assert [
        ChunkName(
            Namespace(columns.namespaces[index]), Key(key), Slot(slot), Generation(number), size
        )
        for index, key, slot, number, size in rows
    ] == names
    assert sorted(columns.namespaces) == ["model", "z"]
    assert inventory_of([]) == Inventory()


def test_highest_generation_counts_stores_that_have_begun(keeper: PoolKeeper) -> None:
    assert keeper.highest_generation == NO_GENERATION
    assert begin(keeper, chunk(7)) is NONE
    assert begin(keeper, chunk(9), 0.0) is Refusal.WRITING
    store(keeper, chunk(3, slot=1))
    assert keeper.highest_generation == 7


# Namespaces


def test_clearing_discards_a_namespace_up_to_a_generation(keeper: PoolKeeper) -> None:
    old, new = chunk(5), chunk(6, slot=1)
    foreign = chunk(4, slot=2, namespace="other")
    store(keeper, old, new, foreign)
    keeper.clear({MODEL: 5})
    assert set(keeper.all_ready()) == {new, foreign}
    assert keeper.begin_load(old) is Refusal.STALE
    assert begin(keeper, chunk(5, slot=3)) is Refusal.CLEARED
    assert keeper.cleared() == {"model": 5}
    store(keeper, chunk(7), chunk(5, slot=3, namespace="other"))


def test_clearing_of_everything_holds_for_namespaces_that_come_later(keeper: PoolKeeper) -> None:
    keeper.clear({"": 5})
    assert begin(keeper, chunk(5)) is Refusal.CLEARED
    store(keeper, chunk(6))


def test_clearing_is_never_taken_back(keeper: PoolKeeper) -> None:
    keeper.clear({MODEL: 5})
    keeper.clear({MODEL: 3, "other": 2})
    assert keeper.cleared() == {"model": 5, "other": 2}
    assert begin(keeper, chunk(5)) is Refusal.CLEARED


def test_chunk_that_is_cleared_while_it_is_written_does_not_become_ready(
    keeper: PoolKeeper,
) -> None:
    assert begin(keeper, chunk(5)) is NONE
    keeper.clear({MODEL: 5})
    assert keeper.end_store(chunk(5), 0, ok=True) is SlotState.EMPTY
    assert len(keeper.take_unreported(10)) == 0
    store(keeper, chunk(6))


def test_reader_of_a_cleared_chunk_finishes_undisturbed(
    keeper: PoolKeeper, threads: ThreadPoolExecutor
) -> None:
    store(keeper, chunk(5))
    assert keeper.begin_load(chunk(5)) is NONE
    keeper.clear({MODEL: 5})
    storing = threads.submit(begin, keeper, chunk(6), LONG_S)
    assert_waits(storing)
    keeper.end_load(chunk(5))
    assert storing.result(LONG_S) is NONE


# Pool files


def test_keeper_of_a_pool_file_finds_what_was_ready_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    first = PoolKeeper(GEOMETRY, path)
    first.recover()
    kept, overwritten = chunk(1), chunk(2, slot=1)
    discarded = chunk(3, slot=2, namespace="other")
    store(first, kept, overwritten, discarded)
    make_checksums(first)
    assert begin(first, overwritten._replace(generation=Generation(4))) is NONE
    assert begin(first, chunk(5, slot=3)) is NONE
    first.clear({"other": 3})
    again = PoolKeeper(GEOMETRY, path)
    again.recover()
    assert again.all_ready() == [kept]
    assert can_load(again, kept)
    assert begin(again, kept) is Refusal.STALE
    for each in (first, again):
        each.pool._region.close()


def test_chunks_of_an_earlier_life_are_in_the_inventory_and_need_no_report(
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "pool")
    first = PoolKeeper(GEOMETRY, path)
    first.recover()
    store(first, chunk(1))
    make_checksums(first)
    again = PoolKeeper(GEOMETRY, path)
    again.recover()
    assert len(again.take_unreported(10)) == 0
    assert again.all_ready() == [chunk(1)]
    assert again.highest_generation == 1
    for each in (first, again):
        each.pool._region.close()


def test_pages_of_an_inventory_leave_out_what_was_overwritten_meanwhile(tmp_path: Path) -> None:
    keeper = PoolKeeper(GEOMETRY, str(tmp_path / "pool"))
    keeper.recover()
    store(keeper, chunk(1), chunk(2, slot=1))
    names = keeper.all_ready()
    assert begin(keeper, chunk(3)) is NONE
    assert keeper.only_ready(names) == [chunk(2, slot=1)]
    assert keeper.end_store(chunk(3), 0, ok=False) is SlotState.EMPTY
    assert keeper.take_failed(10) == FailedStores([0], [3], [chunk(3).slot_bytes])
    assert keeper.take_failed(10) == FailedStores()
    keeper.pool._region.close()


def test_chunk_without_a_checksum_is_not_found_in_the_next_life(tmp_path: Path) -> None:
    path = str(tmp_path / "pool")
    first = PoolKeeper(GEOMETRY, path)
    first.recover()
    store(first, chunk(1))
    make_checksums(first)
    store(first, chunk(2, slot=1))
    again = PoolKeeper(GEOMETRY, path)
    again.recover()
    assert again.all_ready() == [chunk(1)]
    assert again.num_quarantined == 0
    for each in (first, again):
        each.pool._region.close()
