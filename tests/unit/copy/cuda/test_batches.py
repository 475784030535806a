"""Rows become few, bounded batches that copy the same bytes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import Direction
from raykv.copy.cuda.batches import (
    Route,
    batches,
    cut,
    has_words,
    staged,
    usual_route,
)
from raykv.copy.plan import CopyRuns, merged

STORE, LOAD = Direction.STORE, Direction.LOAD
KIB = 1 << 10


def rows(*each: tuple[int, int, int]) -> CopyRuns:
    """Of one chunk."""
    kv, pool, size = np.array(each, np.int64).reshape(-1, 3).T
    return CopyRuns(kv, pool, size)


def tuples(some: CopyRuns) -> list[tuple[int, int, int]]:
    return list(zip(some.kv.tolist(), some.pool.tolist(), some.size.tolist(), strict=True))


def bytes_of(some: CopyRuns) -> list[tuple[int, int]]:
    """Every byte that is copied: its place in the KV cache and in the pool."""
    return [(kv + i, pool + i) for kv, pool, size in tuples(some) for i in range(size)]


some_rows = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60), st.integers(1, 20)), max_size=12
).map(lambda each: rows(*each))


@st.composite
def blocks(draw: st.DrawFn) -> CopyRuns:
    """Pages of some blocks, as a planner makes them: many neighbours."""
    page = draw(st.sampled_from([1, 8, 24]))
    numbers = draw(st.lists(st.integers(0, 30), max_size=12, unique=True))
    return rows(*((number * page, place * page, page) for place, number in enumerate(numbers)))


@given(st.one_of(some_rows, blocks()))
def test_merged_rows_copy_the_same_bytes_and_have_no_neighbours(some: CopyRuns) -> None:
    few = merged(some)
    assert bytes_of(few) == bytes_of(some)
    for (kv, pool, size), (next_kv, next_pool, _) in pairwise(tuples(few)):
        assert (kv + size, pool + size) != (next_kv, next_pool)


@pytest.mark.parametrize(
    ("start", "slab_bytes", "sizes"),
    [(0, 64, [64, 64, 9]), (0, 128, [128, 9]), (64, 128, [64, 73]), (0, 256, [137])],
)
def test_neighbours_of_two_slabs_stay_apart(start: int, slab_bytes: int, sizes: list[int]) -> None:
    """They may lie in two pieces of page-locked memory."""
    places = np.array([0, 64, 128])
    runs = CopyRuns(places, places + start, np.array([64, 64, 9]), slab_bytes)
    assert tuples(cut(runs, 1 << 20)) == tuples(runs)
    assert merged(runs).size.tolist() == sizes
    assert staged(runs, STORE, 1000, 2000, 3000).blocks.size.tolist() == sizes
    assert tuples(runs.some(slice(1, 2))) == [(64, start + 64, 64)]
    assert tuples(runs.some(slice(1, 1))) == []


@given(st.one_of(some_rows, blocks()), st.integers(1, 30))
def test_cut_rows_copy_the_same_bytes_and_cross_no_edge(some: CopyRuns, cut_bytes: int) -> None:
    pieces = cut(some, cut_bytes)
    assert bytes_of(pieces) == bytes_of(some)
    for _, pool, size in tuples(pieces):
        assert size > 0
        assert pool // cut_bytes == (pool + size - 1) // cut_bytes


@given(st.one_of(some_rows, blocks()), st.integers(1, 60), st.integers(1, 5))
def test_batches_are_all_rows_in_order_and_within_the_bounds(
    some: CopyRuns, most_bytes: int, most_runs: int
) -> None:
    made = list(batches(some, most_bytes, most_runs))
    assert [row for batch in made for row in tuples(batch)] == tuples(some)
    for batch in made:
        assert 1 <= len(batch) <= most_runs
        assert batch.num_bytes <= most_bytes or len(batch) == 1


@given(blocks(), st.integers(1, 60), st.integers(1, 5))
def test_batches_are_as_few_as_the_bounds_allow(
    some: CopyRuns, most_bytes: int, most_runs: int
) -> None:
    made = list(batches(some, most_bytes, most_runs))
    for batch, after in pairwise(made):
        one_more = batch.num_bytes + int(after.size[0])
        assert len(batch) == most_runs or one_more > most_bytes


@pytest.mark.parametrize("direction", Direction)
def test_staged_pages_make_one_block_where_they_are_neighbours_in_the_pool(
    direction: Direction,
) -> None:
    some = rows((80, 0, 8), (0, 8, 16), (40, 24, 8), (64, 100, 8))
    steps = staged(some, direction, 1000, 2000, 3000)
    kv, buffer = [1080, 1000, 1040, 1064], [3000, 3008, 3024, 3032]
    pool, blocks = [2000, 2100], [3000, 3032]
    pages = (buffer, kv) if direction is STORE else (kv, buffer)
    assert (steps.pages.to.tolist(), steps.pages.source.tolist()) == pages
    assert steps.pages.size.tolist() == [8, 16, 8, 8]
    there = (pool, blocks) if direction is STORE else (blocks, pool)
    assert (steps.blocks.to.tolist(), steps.blocks.source.tolist()) == there
    assert steps.blocks.size.tolist() == [32, 8]


@pytest.mark.parametrize(
    ("row", "expected"),
    [((8, 1, 16), True), ((4, 8, 16), False), ((8, 8, 12), False), ((0, 3, 8), True)],
)
def test_rows_have_words_where_a_kernel_can_move_them(
    row: tuple[int, int, int], expected: bool
) -> None:
    assert has_words(rows(row, (0, 0, 8))) is expected


@pytest.mark.parametrize(
    ("direction", "page_bytes", "num_runs", "route"),
    [
        (LOAD, 28 * KIB, 1000, Route.BATCH),
        (LOAD, 28 * KIB - 1, 16, Route.GATHER),
        (LOAD, 28 * KIB - 1, 15, Route.BATCH),
        (STORE, 4 * KIB, 1000, Route.BATCH),
    ],
)
def test_loads_of_many_small_pages_are_scattered_by_a_kernel(
    direction: Direction, page_bytes: int, num_runs: int, route: Route
) -> None:
    assert usual_route(direction, rows(*[(0, 0, page_bytes)] * num_runs)) is route
