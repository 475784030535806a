"""Canonical pages: which maps are believed, and what rows they make."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import HandleError
from raykv.base.geometry import MAX_SLAB_BYTES
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.plan import CopyRuns, Planner
from raykv.memory.canonical import MAX_ROWS, objection, shares
from raykv.memory.handles import check_layout
from raykv.protocol.copies import CopyJob
from raykv.protocol.framing import decode, encode
from raykv.protocol.worker import (
    NOT_CANONICAL,
    CanonicalPages,
    KVLayout,
    PageMap,
    TensorLayout,
)
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import named_key

STORE, LOAD = Direction.STORE, Direction.LOAD
replace = msgspec.structs.replace

# The second of two ranks, which has every second row of 16 bytes of 4 tokens.
ROWS = PageMap(
    128, own=[0], whole=[16], sizes=[16], counts=[4], own_strides=[16], whole_strides=[32]
)
LAYOUT = KVLayout(
    "memfd",
    4096,
    2,
    [TensorLayout(0, 10, 64, 64), TensorLayout(1024, 10, 80, 80)],
    [0],
    [[0, 1]],
    canonical=CanonicalPages([ROWS], [[0, 0]]),
)


def job(direction: Direction, slot: int, blocks: list[int], first: int = 0) -> tuple[CopyJob, Slot]:
    return named_job(direction, [named_key("k")], [blocks], first=[first]), Slot(slot)


def runs_of(planner: Planner, of: tuple[CopyJob, Slot]) -> CopyRuns:
    return planner.plan(of[0]).runs([0], [of[1]], MAX_SLAB_BYTES)


def test_rows_are_the_fragments_of_each_block_of_each_layer() -> None:
    runs = runs_of(Planner(LAYOUT, 1), job(LOAD, 3, [7, 2]))
    at = 3 * SLOT_ALIGNMENT
    rows = [
        (offset + token * 16, at + place + 16 + token * 32, 16)
        for offset, place in (
            *((7 * 64, 0), (2 * 64, 128)),
            *((1024 + 7 * 80, 256), (1024 + 2 * 80, 384)),
        )
        for token in range(4)
    ]
    found = zip(runs.kv.tolist(), runs.pool.tolist(), runs.size.tolist(), strict=True)
    assert list(found) == rows
    assert len(runs) == 16


def test_load_may_begin_inside_of_a_chunk() -> None:
    runs = runs_of(Planner(LAYOUT, 1), job(LOAD, 0, [4], first=1))
    assert runs.kv[[0, 4]].tolist() == [4 * 64, 1024 + 4 * 80]
    assert runs.pool[[0, 4]].tolist() == [128 + 16, 256 + 128 + 16]


def test_pages_of_one_rank_are_merged_as_ever() -> None:
    page = PageMap(64, [0], [0], [64], [1], [64], [64])
    of = replace(
        LAYOUT,
        tensors=[LAYOUT.tensors[0]],
        groups=[[0]],
        canonical=CanonicalPages([page], [[0]]),
    )
    runs = runs_of(Planner(of, 0), job(STORE, 1, [5, 6]))
    assert [column.tolist() for column in (runs.kv, runs.pool, runs.size)] == [
        *([5 * 64], [SLOT_ALIGNMENT], [128])
    ]


@pytest.mark.parametrize("some", [[0], [1], [2], [0, 2], [1, 2], [0, 1, 2]])
def test_rows_of_some_chunks_of_several_lengths_are_those_of_each(some: list[int]) -> None:
    slots = [Slot(5), Slot(9), Slot(2)]
    keys = [named_key("k")] * 3
    plan = Planner(LAYOUT, 1).plan(named_job(LOAD, keys, [[7, 2], [3], [5, 1]], first=[0, 1, 0]))
    alone = [plan.runs([chunk], [slots[chunk]], MAX_SLAB_BYTES) for chunk in some]
    together = plan.runs(some, [slots[chunk] for chunk in some], MAX_SLAB_BYTES)
    assert sorted(rows_of(together)) == sorted(row for each in alone for row in rows_of(each))


def rows_of(runs: CopyRuns) -> list[list[int]]:
    rows: list[list[int]] = np.stack([runs.kv, runs.pool, runs.size], axis=1).tolist()
    return rows


def test_large_shares_are_whole_pages_but_for_their_ends() -> None:
    pages = [PageMap(4096, [0], [0], [4096], [1], [1], [1], 2, 1) for _ in range(3)]
    assert list(shares(pages)) == [range(4096, 4096), range(2048, 4096), range(4096)]


def test_honest_maps_are_believed_and_survive_the_wire() -> None:
    check_layout(LAYOUT)
    check_layout(replace(LAYOUT, canonical=NOT_CANONICAL))
    assert decode(encode(LAYOUT), KVLayout) == LAYOUT


BIG = (1 << 63) - 1


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"page_bytes": 0}, "a canonical page of 0 bytes"),
        ({"page_bytes": 1 << 50}, "a canonical page of"),
        ({"page_bytes": 127}, "ends at 128 of 127"),
        ({"own": []}, "columns of"),
        ({"own": [0, 0]}, "columns of"),
        ({"own": [1]}, "end at 65"),
        ({"own": [-1]}, "negative or too large"),
        ({"whole": [17]}, "ends at 129 of 128"),
        ({"whole": [BIG]}, "negative or too large"),
        ({"sizes": [0]}, "empty ones"),
        ({"sizes": [17]}, "ends at 129"),
        ({"counts": [0]}, "empty ones"),
        ({"counts": [5]}, "ends at 160 of 128"),
        ({"counts": [BIG]}, "too large"),
        ({"counts": [MAX_ROWS + 1]}, "fragments"),
        ({"own_strides": [15]}, "end at 61"),
        ({"own_strides": [BIG]}, "too large"),
        ({"whole_strides": [8]}, "overlap"),
        ({"whole_strides": [0]}, "overlap"),
        (
            # As many bytes as its end says, the first of them twice.
            {
                "own": [0, 0, 32],
                "whole": [0, 16, 32],
                **dict.fromkeys(["sizes", "own_strides", "whole_strides"], [16] * 3),
                "counts": [1] * 3,
            },
            "overlap",
        ),
        ({"num_writers": 0}, "writer 0 of 0"),
        ({"num_writers": 65}, "65 writers"),
        ({"writer": 1}, "writer 1 of 1"),
        ({"writer": -1}, "writer -1 of 1"),
    ],
    ids=str,
)
def test_map_that_can_not_be_meant_is_refused(changed: dict[str, Any], text: str) -> None:
    pages = CanonicalPages([replace(ROWS, **changed)], [[0, 0]])
    with pytest.raises(HandleError, match="malformed canonical pages") as refused:
        check_layout(replace(LAYOUT, canonical=pages))
    assert text in str(refused.value)


@pytest.mark.parametrize(
    ("pages", "text"),
    [
        (CanonicalPages([ROWS], []), "of 0 groups"),
        (CanonicalPages([ROWS], [[0]]), "of 1 groups"),
        (CanonicalPages([], [[0, 0]]), "0 maps"),
        (CanonicalPages([ROWS], [[0, 1]]), "1 maps"),
        (CanonicalPages([ROWS], [[0, -1]]), "1 maps"),
        (
            CanonicalPages([PageMap(65, [0], [0], [65], [1], [65], [65])], [[0, 0]]),
            "a map of 65 bytes for a page of 64",
        ),
    ],
)
def test_maps_that_do_not_fit_to_the_groups_are_refused(pages: CanonicalPages, text: str) -> None:
    with pytest.raises(HandleError, match=text):
        check_layout(replace(LAYOUT, canonical=pages))


def test_chunk_of_too_many_fragments_is_refused() -> None:
    """That many rows would be planned for each chunk of each job."""
    page = PageMap(1024, [0], [0], [1], [1024], [1], [1])
    assert "fragments" in objection(CanonicalPages([page], [[0]]), [[0]], [1024], MAX_ROWS // 1023)
    assert objection(CanonicalPages([page], [[0]]), [[0]], [1024], MAX_ROWS // 1024) == ""


def test_rank_that_is_two_of_the_writers_of_a_group_is_refused() -> None:
    """Neither would store the middle of what both have."""
    first, second = (PageMap(2, *([0], [0], [1], [2], [1], [1]), 2, each) for each in (0, 1))
    pages = CanonicalPages([first, second], [[1, 0]])
    assert "two of the writers" in objection(pages, [[0, 1]], [64, 64], 1)
    assert objection(CanonicalPages([first], [[0, 0]]), [[0, 1]], [64, 64], 1) == ""


def test_maps_that_take_long_to_look_at_are_refused() -> None:
    page = PageMap(MAX_ROWS, *([0], [0], [1], [MAX_ROWS // 2 + 1], [1], [1]))
    assert "more than" in objection(CanonicalPages([page] * 2, [[0]]), [[0]], [MAX_ROWS], 1)
    assert "257 maps" in objection(CanonicalPages([ROWS] * 257, [[0]]), [[0]], [64], 1)


numbers = st.one_of(st.integers(0, 70), st.sampled_from([-1, 1 << 41, BIG]))
columns = st.lists(numbers, min_size=1, max_size=3)
page_maps = st.builds(
    PageMap,
    page_bytes=st.integers(0, 200),
    own=columns,
    whole=columns,
    sizes=columns,
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    own_strides=columns,
    whole_strides=columns,
    num_writers=st.integers(0, 3),
    writer=st.integers(-1, 3),
)
honest = st.builds(
    lambda row, tokens, ranks, rank, copies: PageMap(
        row * tokens * ranks,
        *([0], [row * (rank % ranks)], [row], [tokens], [row], [row * ranks]),
        num_writers=copies,
        writer=rank % copies,
    ),
    row=st.integers(1, 16),
    tokens=st.integers(1, 4),
    ranks=st.integers(1, 4),
    rank=st.integers(0, 7),
    copies=st.integers(1, 2),
)


@given(
    maps=st.lists(st.one_of(page_maps, honest), min_size=1, max_size=2),
    picked=st.lists(st.integers(0, 2), min_size=2, max_size=2),
    direction=st.sampled_from(Direction),
)
def test_what_is_believed_stays_within_page_and_chunk(
    maps: list[PageMap], picked: list[int], direction: Direction
) -> None:
    """Whatever a worker says: a copy beside the right place would be into another's memory."""
    of = replace(LAYOUT, canonical=CanonicalPages(maps, [picked]))
    try:
        check_layout(of)
    except HandleError:
        return
    planner = Planner(of, 0)
    runs = runs_of(planner, job(direction, 2, [3, 9]))
    chunk = planner.chunk_bytes(0, 1)
    begin = 2 * SLOT_ALIGNMENT
    assert runs.size.min() > 0
    assert begin <= runs.pool.min() <= (runs.pool + runs.size).max() <= begin + chunk
    order = np.argsort(runs.pool)
    assert np.all((runs.pool + runs.size)[order][:-1] <= runs.pool[order][1:])
    pages = [
        (tensor.offset + block * tensor.block_stride, tensor.page_bytes)
        for tensor in of.tensors
        for block in (3, 9)
    ]
    for kv, size in zip(runs.kv.tolist(), runs.size.tolist(), strict=True):
        assert any(at <= kv and kv + size <= at + page for at, page in pages)
