"""Every arrow of the slot table's diagram, and that what is refused changes nothing."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    MAX_GENERATION,
    NO_BLOCKS,
    NO_GENERATION,
    SLOT_ALIGNMENT,
    Blocks,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Refusal,
    Seal,
    Slot,
)
from raykv.node.slots import Admission, FailedStore, SlotState, SlotTable, StoreAnswer

EMPTY, WRITING, READY = SlotState.EMPTY, SlotState.WRITING, SlotState.READY
GO = StoreAnswer(Admission.GO)
WAIT = StoreAnswer(Admission.WAIT)
LATER = 100.0
"""When stores of these tests expire, where nothing else is said."""


def refused(refusal: Refusal) -> StoreAnswer:
    return StoreAnswer(Admission.REFUSED, refusal)


def chunk(
    generation: int, slot: int = 0, key: bytes = b"k", namespace: str = "model", pages: int = 1
) -> ChunkName:
    return ChunkName(
        Namespace(namespace),
        Key(key),
        Slot(slot),
        Generation(generation),
        pages * SLOT_ALIGNMENT,
    )


@pytest.fixture
def table() -> Iterator[SlotTable]:
    """Two slabs of four pages. The invariants hold when a test is over."""
    made = SlotTable(PoolGeometry(8 * SLOT_ALIGNMENT, 4 * SLOT_ALIGNMENT))
    yield made
    made.check()


def begin(table: SlotTable, name: ChunkName, rank: int = 0, num_ranks: int = 1) -> StoreAnswer:
    answer = table.begin_store(name, rank, num_ranks, expires_at=LATER)
    table.check()
    return answer


def finish(table: SlotTable, name: ChunkName, rank: int = 0, ok: bool = True) -> SlotState:
    state = table.finish_store(name.slot, name.generation, rank, ok)
    table.check()
    return state


def store(table: SlotTable, name: ChunkName) -> None:
    assert begin(table, name) == GO
    assert finish(table, name) is READY


def changes(table: SlotTable, call: Callable[[], Any]) -> bool:
    """Whether the call changed anything, also if it raised."""
    before = copy.deepcopy(vars(table))
    with contextlib.suppress(AssertionError):
        call()
    return vars(table) != before


# One rank


def test_slot_is_writing_after_begin_store_on_an_empty_one(table: SlotTable) -> None:
    assert table.state_of(Slot(0)) is EMPTY
    assert begin(table, chunk(5)) == GO
    assert table.state_of(Slot(0)) is WRITING
    assert table.generation_of(Slot(0)) == 5
    assert list(table.inventory()) == []
    assert table.used_bytes == 0


def test_slot_is_ready_after_its_only_rank_has_stored(table: SlotTable) -> None:
    store(table, chunk(5))
    assert table.state_of(Slot(0)) is READY
    assert list(table.inventory()) == [chunk(5)]
    assert table.num_ready == 1
    assert table.used_bytes == SLOT_ALIGNMENT


def test_slot_is_empty_and_keeps_its_generation_after_a_failed_store(table: SlotTable) -> None:
    assert begin(table, chunk(5)) == GO
    assert finish(table, chunk(5), ok=False) is EMPTY
    assert table.generation_of(Slot(0)) == 5
    assert begin(table, chunk(5)) == refused(Refusal.STALE)
    assert begin(table, chunk(6)) == GO


def test_slot_is_overwritten_by_a_store_of_a_higher_generation(table: SlotTable) -> None:
    store(table, chunk(5, key=b"old"))
    assert begin(table, chunk(6, key=b"new")) == GO
    assert table.state_of(Slot(0)) is WRITING
    assert table.num_ready == 0
    assert finish(table, chunk(6, key=b"new")) is READY
    assert list(table.inventory()) == [chunk(6, key=b"new")]
    assert table.begin_load(chunk(5, key=b"old")) is Refusal.STALE


def test_slots_beside_a_written_one_stay_as_they_are(table: SlotTable) -> None:
    store(table, chunk(5, slot=1, key=b"beside"))
    store(table, chunk(6, slot=0))
    assert begin(table, chunk(7, slot=2)) == GO
    assert table.begin_load(chunk(5, slot=1, key=b"beside")) is Refusal.NONE


@pytest.mark.parametrize("generation", [4, 5])
@pytest.mark.parametrize("key", [b"k", b"other"])
def test_store_is_refused_and_changes_nothing_when_its_generation_is_not_new(
    table: SlotTable, generation: int, key: bytes
) -> None:
    store(table, chunk(5))
    late = chunk(generation, key=key)
    assert not changes(table, lambda: begin(table, late))
    assert begin(table, late) == refused(Refusal.STALE)


@pytest.mark.parametrize(
    "name",
    [
        chunk(5, slot=-1),
        chunk(5, slot=8),
        chunk(5, slot=1, pages=2),
        chunk(5, slot=3, pages=3),
        chunk(5, slot=0, pages=5),
        chunk(5, slot=0, pages=0),
    ],
)
def test_store_is_refused_and_changes_nothing_where_no_slot_can_be(
    table: SlotTable, name: ChunkName
) -> None:
    store(table, chunk(1))
    assert not changes(table, lambda: begin(table, name))
    assert begin(table, name) == refused(Refusal.BAD_HANDLE)


@pytest.mark.parametrize(
    ("slot", "generation", "rank"), [(1, 5, 0), (0, 4, 0), (0, 6, 0), (0, 5, 1)]
)
def test_finish_store_raises_and_changes_nothing_without_its_begin_store(
    table: SlotTable, slot: int, generation: int, rank: int
) -> None:
    assert begin(table, chunk(5), rank=0, num_ranks=2) == GO

    def wrong() -> None:
        table.finish_store(Slot(slot), Generation(generation), rank, ok=True)

    assert not changes(table, wrong)
    with pytest.raises(AssertionError):
        wrong()


def test_finish_store_raises_and_changes_nothing_the_second_time(table: SlotTable) -> None:
    store(table, chunk(5))
    assert not changes(table, lambda: finish(table, chunk(5)))
    with pytest.raises(AssertionError):
        finish(table, chunk(5))


@pytest.mark.parametrize(("rank", "num_ranks"), [(-1, 1), (1, 1), (2, 2), (0, 0)])
def test_begin_store_raises_for_a_rank_that_cannot_be(
    table: SlotTable, rank: int, num_ranks: int
) -> None:
    assert not changes(table, lambda: begin(table, chunk(5), rank, num_ranks))
    with pytest.raises(AssertionError):
        begin(table, chunk(5), rank, num_ranks)


def test_highest_generation_is_that_of_any_store_ever_begun(table: SlotTable) -> None:
    assert table.highest_generation == NO_GENERATION
    store(table, chunk(9))
    assert begin(table, chunk(3, slot=1)) == GO
    assert finish(table, chunk(3, slot=1), ok=False) is EMPTY
    assert table.highest_generation == 9


def test_restored_chunk_is_ready_at_its_generation(table: SlotTable) -> None:
    assert table.restore(chunk(7, slot=4, pages=2), checksum=9)
    assert table.seal_of(chunk(7, slot=4, pages=2)) == Seal(9, is_proven=False)
    assert table.begin_load(chunk(7, slot=4, pages=2)) is Refusal.NONE
    assert table.highest_generation == 7
    assert table.used_bytes == 2 * SLOT_ALIGNMENT


# Several ranks


def test_slot_is_ready_only_after_all_ranks_have_stored(table: SlotTable) -> None:
    for rank in (1, 2, 0):
        assert begin(table, chunk(5), rank, num_ranks=3) == GO
    assert finish(table, chunk(5), rank=2) is WRITING
    assert finish(table, chunk(5), rank=0) is WRITING
    assert table.begin_load(chunk(5)) is Refusal.WRITING
    assert finish(table, chunk(5), rank=1) is READY


def test_slot_waits_for_a_rank_that_has_not_begun_yet(table: SlotTable) -> None:
    assert begin(table, chunk(5), rank=0, num_ranks=2) == GO
    assert finish(table, chunk(5), rank=0) is WRITING
    assert begin(table, chunk(5), rank=1, num_ranks=2) == GO
    assert finish(table, chunk(5), rank=1) is READY


@pytest.mark.parametrize("has_finished", [False, True])
def test_rank_is_refused_and_changes_nothing_when_it_comes_twice(
    table: SlotTable, has_finished: bool
) -> None:
    assert begin(table, chunk(5), rank=0, num_ranks=2) == GO
    if has_finished:
        finish(table, chunk(5), rank=0)
    assert not changes(table, lambda: begin(table, chunk(5), rank=0, num_ranks=2))
    assert begin(table, chunk(5), rank=0, num_ranks=2) == refused(Refusal.STALE)


@pytest.mark.parametrize(
    ("other", "num_ranks"),
    [(chunk(5, key=b"other"), 2), (chunk(5, namespace="other"), 2), (chunk(5), 3), (chunk(4), 2)],
)
def test_rank_is_refused_and_changes_nothing_when_it_means_another_store(
    table: SlotTable, other: ChunkName, num_ranks: int
) -> None:
    assert begin(table, chunk(5), rank=0, num_ranks=2) == GO
    assert not changes(table, lambda: begin(table, other, 1, num_ranks))
    assert begin(table, other, 1, num_ranks) == refused(Refusal.STALE)


def test_rank_is_refused_when_the_store_is_over(table: SlotTable) -> None:
    for rank in (0, 1):
        begin(table, chunk(5), rank, num_ranks=2)
        finish(table, chunk(5), rank)
    assert not changes(table, lambda: begin(table, chunk(5), rank=1, num_ranks=2))
    assert begin(table, chunk(5), rank=1, num_ranks=2) == refused(Refusal.STALE)


@pytest.mark.parametrize("second_ok", [False, True])
def test_slot_is_never_ready_when_one_rank_has_failed(table: SlotTable, second_ok: bool) -> None:
    for rank in (0, 1):
        assert begin(table, chunk(5), rank, num_ranks=2) == GO
    assert finish(table, chunk(5), rank=0, ok=False) is WRITING
    assert finish(table, chunk(5), rank=1, ok=second_ok) is EMPTY
    assert list(table.inventory()) == []


def test_rank_is_refused_and_changes_nothing_when_the_store_is_poisoned(table: SlotTable) -> None:
    for rank in (0, 1):
        assert begin(table, chunk(5), rank, num_ranks=3) == GO
    finish(table, chunk(5), rank=0, ok=False)
    assert not changes(table, lambda: begin(table, chunk(5), rank=2, num_ranks=3))
    assert begin(table, chunk(5), rank=2, num_ranks=3) == refused(Refusal.POISONED)


def test_store_waits_and_changes_nothing_while_an_older_one_is_writing(table: SlotTable) -> None:
    assert begin(table, chunk(5)) == GO
    assert not changes(table, lambda: begin(table, chunk(6)))
    assert begin(table, chunk(6)) == WAIT
    finish(table, chunk(5))
    assert begin(table, chunk(6)) == GO


def test_store_goes_ahead_of_an_older_one_whose_ranks_are_missing(table: SlotTable) -> None:
    begin(table, chunk(5), rank=0, num_ranks=2)
    finish(table, chunk(5), rank=0)
    assert begin(table, chunk(6)) == GO
    assert begin(table, chunk(5), rank=1, num_ranks=2) == refused(Refusal.STALE)
    assert finish(table, chunk(6)) is READY


# Expiry


def test_store_expires_when_a_rank_does_not_come(table: SlotTable) -> None:
    begin(table, chunk(5), rank=0, num_ranks=2)
    finish(table, chunk(5), rank=0)
    assert not changes(table, lambda: table.expire(LATER - 0.1))
    assert table.expire(LATER) == 1
    assert table.state_of(Slot(0)) is EMPTY
    assert begin(table, chunk(5), rank=1, num_ranks=2) == refused(Refusal.STALE)


def test_store_that_expired_keeps_its_slot_until_its_writer_has_finished(table: SlotTable) -> None:
    begin(table, chunk(5))
    assert table.expire(LATER) == 1
    assert table.expire(LATER) == 0
    assert table.state_of(Slot(0)) is WRITING
    assert begin(table, chunk(6)) == WAIT
    assert finish(table, chunk(5)) is EMPTY
    assert begin(table, chunk(6)) == GO


def test_expire_counts_only_stores_that_are_late(table: SlotTable) -> None:
    for slot, expires_at in enumerate((1.0, 2.0, 3.0)):
        table.begin_store(chunk(5 + slot, slot=slot), 0, 1, expires_at)
    store(table, chunk(9, slot=4))
    assert table.expire(2.0) == 2
    assert finish(table, chunk(5, slot=0)) is EMPTY
    assert finish(table, chunk(6, slot=1)) is EMPTY
    assert finish(table, chunk(7, slot=2)) is READY
    assert table.begin_load(chunk(9, slot=4)) is Refusal.NONE


# Loads


@pytest.mark.parametrize(
    "wrong",
    [
        chunk(4),
        chunk(6),
        chunk(NO_GENERATION),
        chunk(5, key=b"other"),
        chunk(5, namespace="other"),
        chunk(5, slot=1),
        chunk(5, slot=4),
        chunk(5, slot=99),
        chunk(5, slot=-1),
    ],
)
def test_load_is_refused_and_changes_nothing_when_the_slot_holds_something_else(
    table: SlotTable, wrong: ChunkName
) -> None:
    store(table, chunk(5))
    assert not changes(table, lambda: table.begin_load(wrong))
    assert table.begin_load(wrong) is Refusal.STALE


def test_load_is_refused_and_changes_nothing_while_the_slot_is_written(table: SlotTable) -> None:
    begin(table, chunk(5))
    assert not changes(table, lambda: table.begin_load(chunk(5)))
    assert table.begin_load(chunk(5)) is Refusal.WRITING


def test_load_is_refused_and_changes_nothing_when_the_store_has_failed(table: SlotTable) -> None:
    begin(table, chunk(5))
    finish(table, chunk(5), ok=False)
    assert not changes(table, lambda: table.begin_load(chunk(5)))
    assert table.begin_load(chunk(5)) is Refusal.STALE


def test_store_waits_and_changes_nothing_until_the_last_reader_is_done(table: SlotTable) -> None:
    store(table, chunk(5))
    for readers in (1, 2):
        assert table.begin_load(chunk(5)) is Refusal.NONE
        assert table.readers_of(Slot(0)) == readers
    for readers in (1, 0):
        assert not changes(table, lambda: begin(table, chunk(6)))
        assert begin(table, chunk(6)) == WAIT
        table.finish_load(Slot(0), Generation(5))
        assert table.readers_of(Slot(0)) == readers
    assert table.state_of(Slot(0)) is READY
    assert begin(table, chunk(6)) == GO


@pytest.mark.parametrize(("slot", "generation"), [(0, 4), (0, 6), (1, 5), (7, 5)])
def test_finish_load_raises_and_changes_nothing_without_its_begin_load(
    table: SlotTable, slot: int, generation: int
) -> None:
    store(table, chunk(5))
    store(table, chunk(5, slot=1))
    assert table.begin_load(chunk(5)) is Refusal.NONE

    def wrong() -> None:
        table.finish_load(Slot(slot), Generation(generation))

    assert not changes(table, wrong)
    with pytest.raises(AssertionError):
        wrong()


# Whole namespaces


def test_discard_namespace_forgets_its_chunks_up_to_a_generation(table: SlotTable) -> None:
    store(table, chunk(4, slot=0))
    store(table, chunk(5, slot=1))
    store(table, chunk(6, slot=2))
    store(table, chunk(3, slot=3, namespace="other"))
    assert table.discard_namespace(Namespace("model"), Generation(5)) == 2
    table.check()
    kept = {name.slot for name in table.inventory()}
    assert kept == {2, 3}
    assert table.begin_load(chunk(5, slot=1)) is Refusal.STALE
    assert table.generation_of(Slot(1)) == 5
    assert table.cleared == {"model": 5}


@pytest.mark.parametrize("generation", [4, 5])
def test_store_is_refused_and_changes_nothing_when_its_namespace_was_cleared(
    table: SlotTable, generation: int
) -> None:
    table.discard_namespace(Namespace("model"), Generation(5))
    late = chunk(generation)
    assert not changes(table, lambda: begin(table, late))
    assert begin(table, late) == refused(Refusal.CLEARED)
    assert begin(table, chunk(generation, slot=1, namespace="other")) == GO
    assert begin(table, chunk(6)) == GO


def test_discard_namespace_changes_nothing_when_it_is_late(table: SlotTable) -> None:
    table.discard_namespace(Namespace("model"), Generation(5))
    store(table, chunk(6))
    for late in (4, 5):
        discard = partial(table.discard_namespace, Namespace("model"), Generation(late))
        assert not changes(table, discard)
        assert discard() == 0


def test_discard_namespace_lets_readers_finish(table: SlotTable) -> None:
    store(table, chunk(5))
    assert table.begin_load(chunk(5)) is Refusal.NONE
    assert table.discard_namespace(Namespace("model"), Generation(5)) == 1
    table.check()
    assert table.readers_of(Slot(0)) == 1
    assert table.begin_load(chunk(5)) is Refusal.STALE
    assert begin(table, chunk(6)) == WAIT
    table.finish_load(Slot(0), Generation(5))
    assert begin(table, chunk(6)) == GO


def test_discard_namespace_poisons_a_store_that_is_being_written(table: SlotTable) -> None:
    begin(table, chunk(5))
    assert table.discard_namespace(Namespace("model"), Generation(5)) == 0
    table.check()
    assert table.state_of(Slot(0)) is WRITING
    assert begin(table, chunk(6)) == WAIT
    assert finish(table, chunk(5)) is EMPTY


def test_discard_namespace_ends_a_store_that_only_waits_for_ranks(table: SlotTable) -> None:
    begin(table, chunk(5), rank=0, num_ranks=2)
    finish(table, chunk(5), rank=0)
    table.discard_namespace(Namespace("model"), Generation(5))
    table.check()
    assert table.state_of(Slot(0)) is EMPTY
    assert begin(table, chunk(5), rank=1, num_ranks=2) == refused(Refusal.CLEARED)


def test_discard_namespace_spares_a_store_of_a_later_generation(table: SlotTable) -> None:
    begin(table, chunk(6))
    table.discard_namespace(Namespace("model"), Generation(5))
    assert finish(table, chunk(6)) is READY


# Slabs and slot sizes


def test_slab_is_given_to_another_slot_size_with_a_generation_above_all_in_it(
    table: SlotTable,
) -> None:
    store(table, chunk(5, slot=0))
    store(table, chunk(8, slot=3))
    store(table, chunk(4, slot=4))
    store(table, chunk(9, slot=0, pages=2))
    assert {(name.slot, name.generation) for name in table.inventory()} == {(0, 9), (4, 4)}
    assert table.used_bytes == 3 * SLOT_ALIGNMENT
    assert table.begin_load(chunk(8, slot=3)) is Refusal.STALE
    assert table.begin_load(chunk(5, slot=0)) is Refusal.STALE


@pytest.mark.parametrize("generation", [7, 8])
def test_slab_keeps_its_slot_size_when_the_generation_is_not_above_all_in_it(
    table: SlotTable, generation: int
) -> None:
    store(table, chunk(5, slot=0))
    store(table, chunk(8, slot=3))
    late = chunk(generation, slot=0, pages=2)
    assert not changes(table, lambda: begin(table, late))
    assert begin(table, late) == refused(Refusal.STALE)


def test_slab_is_kept_while_anything_in_it_is_read(table: SlotTable) -> None:
    store(table, chunk(5, slot=3))
    assert table.begin_load(chunk(5, slot=3)) is Refusal.NONE
    assert not changes(table, lambda: begin(table, chunk(9, pages=2)))
    assert begin(table, chunk(9, pages=2)) == WAIT
    table.finish_load(Slot(3), Generation(5))
    assert begin(table, chunk(9, pages=2)) == GO


def test_slab_is_kept_while_anything_in_it_is_written(table: SlotTable) -> None:
    begin(table, chunk(5, slot=3))
    assert not changes(table, lambda: begin(table, chunk(9, pages=2)))
    assert begin(table, chunk(9, pages=2)) == WAIT
    finish(table, chunk(5, slot=3))
    assert begin(table, chunk(9, pages=2)) == GO


def test_slab_remembers_the_generations_of_its_former_slot_size(table: SlotTable) -> None:
    store(table, chunk(5, slot=3))
    store(table, chunk(7, slot=0, pages=2))
    late = chunk(5, slot=2, pages=2)
    assert not changes(table, lambda: begin(table, late))
    assert begin(table, late) == refused(Refusal.STALE)
    assert begin(table, chunk(6, slot=2, pages=2)) == GO


def test_slab_that_went_back_to_a_slot_size_refuses_stores_from_its_first_time(
    table: SlotTable,
) -> None:
    store(table, chunk(5, slot=3))
    store(table, chunk(7, slot=0, pages=2))
    store(table, chunk(8, slot=0))
    for late in (chunk(6, slot=3), chunk(7, slot=3)):
        assert begin(table, late) == refused(Refusal.STALE)
    assert begin(table, chunk(9, slot=3)) == GO


def test_rank_is_refused_when_the_slab_was_given_away_meanwhile(table: SlotTable) -> None:
    begin(table, chunk(5), rank=0, num_ranks=2)
    finish(table, chunk(5), rank=0)
    store(table, chunk(6, pages=2))
    assert begin(table, chunk(5), rank=1, num_ranks=2) == refused(Refusal.STALE)
    assert list(table.inventory()) == [chunk(6, pages=2)]


def test_generation_of_a_slot_never_falls_whatever_happens_to_it(table: SlotTable) -> None:
    seen = [table.generation_of(Slot(0))]

    def look() -> None:
        seen.append(table.generation_of(Slot(0)))

    store(table, chunk(5))
    look()
    begin(table, chunk(4))
    look()
    begin(table, chunk(6))
    look()
    finish(table, chunk(6), ok=False)
    look()
    begin(table, chunk(7), rank=0, num_ranks=2)
    finish(table, chunk(7), rank=0)
    table.expire(LATER)
    look()
    table.discard_namespace(Namespace("model"), Generation(7))
    look()
    begin(table, chunk(8, pages=2))
    look()
    assert seen == [0, 5, 5, 6, 6, 7, 7, 8]


def test_failed_stores_are_told_once_with_what_they_have_overwritten(table: SlotTable) -> None:
    store(table, chunk(1))
    begin(table, chunk(2))
    finish(table, chunk(2), ok=False)
    begin(table, chunk(3), rank=0, num_ranks=2)
    finish(table, chunk(3), rank=0)
    table.expire(LATER)
    size = chunk(1).slot_bytes
    assert table.take_failed(1) == [FailedStore(Slot(0), Generation(2), size)]
    assert table.take_failed(10) == [FailedStore(Slot(0), Generation(3), size)]
    assert table.take_failed(10) == []


def test_chunk_is_ready_where_its_name_says_until_it_is_overwritten(table: SlotTable) -> None:
    assert not table.is_ready(chunk(1))
    begin(table, chunk(1))
    assert not table.is_ready(chunk(1))
    finish(table, chunk(1))
    assert table.is_ready(chunk(1))
    assert not table.is_ready(chunk(2))
    begin(table, chunk(2))
    assert not table.is_ready(chunk(1))


def test_store_that_ends_after_its_namespace_was_cleared_is_told_as_failed(
    table: SlotTable,
) -> None:
    store(table, chunk(1))
    begin(table, chunk(2))
    table.discard_namespace(Namespace("model"), Generation(2))
    finish(table, chunk(2))
    told = table.take_failed(10)
    assert [(failed.slot, failed.generation) for failed in told] == [(0, 2)]


# Names that nobody was granted


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": b""},
        {"key": b"k" * 129},
        {"generation": NO_GENERATION},
        {"generation": -1},
        {"generation": MAX_GENERATION + 1},
        {"slot": -1},
        {"slot": 1 << 64},
    ],
)
def test_name_that_can_not_be_granted_is_refused(table: SlotTable, wrong: dict[str, Any]) -> None:
    name = chunk(5)._replace(**wrong)
    assert begin(table, name).refusal is Refusal.BAD_HANDLE
    assert not table.restore(name, 1)
    assert table.highest_generation == NO_GENERATION
    table.check()


# What metrics show


def test_contents_are_the_bytes_of_each_namespace_by_state(table: SlotTable) -> None:
    page = SLOT_ALIGNMENT
    model, other = Namespace("model"), Namespace("other")
    assert table.contents() == {}
    for name in (chunk(1), chunk(2, slot=1), chunk(3, slot=2, namespace="other")):
        assert table.begin_store(name, 0, 1, LATER) == GO
    assert table.contents() == {(WRITING, model): 2 * page, (WRITING, other): page}
    table.finish_store(Slot(0), Generation(1), 0, ok=True)
    table.finish_store(Slot(2), Generation(3), 0, ok=True)
    assert table.contents() == {
        (READY, model): page,
        (READY, other): page,
        (WRITING, model): page,
    }
    table.finish_store(Slot(1), Generation(2), 0, ok=False)
    table.discard_namespace(model, Generation(9))
    assert table.contents() == {(READY, other): page}
    table.quarantine(chunk(3, slot=2, namespace="other"))
    assert table.contents() == {}


# Chunks that were stored in part

PART = Blocks(2, 3)


def store_part(table: SlotTable, name: ChunkName, *blocks: Blocks) -> SlotState:
    """Each rank stores its own idea of the blocks."""
    for rank in range(len(blocks)):
        assert begin(table, name, rank, len(blocks)) == GO
    states = []
    for rank, some in enumerate(blocks):
        states.append(table.finish_store(name.slot, name.generation, rank, True, some))
        table.check()
    return states[-1]


@pytest.mark.parametrize(
    "wanted", [Blocks(2, 3), Blocks(2, 1), Blocks(4, 1), Blocks(3, 2), NO_BLOCKS]
)
def test_load_of_blocks_that_were_stored_is_admitted(table: SlotTable, wanted: Blocks) -> None:
    assert store_part(table, chunk(5), PART) is READY
    assert table.begin_load(chunk(5), wanted) is Refusal.NONE
    assert table.readers_of(Slot(0)) == 1


@pytest.mark.parametrize(
    "wanted",
    [
        Blocks(1, 1),
        Blocks(5, 1),
        Blocks(1, 4),
        Blocks(2, 4),
        Blocks(0, 6),
        Blocks(-1, 4),
        Blocks(4, -1),
        ALL_BLOCKS,
    ],
)
def test_load_of_blocks_that_were_not_stored_is_refused_and_changes_nothing(
    table: SlotTable, wanted: Blocks
) -> None:
    assert store_part(table, chunk(5), PART) is READY
    assert not changes(table, lambda: table.begin_load(chunk(5), wanted))
    assert table.begin_load(chunk(5), wanted) is Refusal.PARTIAL


def test_chunk_that_was_stored_as_a_whole_has_all_blocks(table: SlotTable) -> None:
    store(table, chunk(5))
    assert table.blocks_of(chunk(5)) == ALL_BLOCKS
    assert table.begin_load(chunk(5), ALL_BLOCKS) is Refusal.NONE


def test_blocks_of_an_earlier_chunk_say_nothing_of_the_next_one(table: SlotTable) -> None:
    assert store_part(table, chunk(5), PART) is READY
    assert table.blocks_of(chunk(5)) == PART
    store(table, chunk(6))
    assert (table.blocks_of(chunk(5)), table.blocks_of(chunk(6))) == (NO_BLOCKS, ALL_BLOCKS)


def test_ranks_that_store_the_same_blocks_make_a_chunk(table: SlotTable) -> None:
    assert store_part(table, chunk(5), PART, PART, PART) is READY
    assert table.blocks_of(chunk(5)) == PART


@pytest.mark.parametrize("other", [Blocks(2, 2), Blocks(1, 4), ALL_BLOCKS])
def test_ranks_that_store_other_blocks_make_none(table: SlotTable, other: Blocks) -> None:
    assert store_part(table, chunk(5), PART, other) is EMPTY
    assert table.take_failed(9) == [FailedStore(Slot(0), Generation(5), SLOT_ALIGNMENT)]


def test_chunk_of_an_earlier_life_has_the_blocks_that_it_had(table: SlotTable) -> None:
    assert table.restore(chunk(7), 9, PART)
    assert table.blocks_of(chunk(7)) == PART
    assert table.seal_of(chunk(7)) == Seal(9, is_proven=False, blocks=PART)
    assert table.begin_load(chunk(7), ALL_BLOCKS) is Refusal.PARTIAL


@pytest.mark.parametrize("blocks", [NO_BLOCKS, Blocks(-1, 2), Blocks(3, -1), Blocks(1, 1 << 32)])
def test_chunk_of_an_earlier_life_is_left_out_if_it_can_have_no_such_blocks(
    table: SlotTable, blocks: Blocks
) -> None:
    assert not changes(table, lambda: table.restore(chunk(7), 9, blocks))
    assert not table.restore(chunk(7), 9, blocks)
