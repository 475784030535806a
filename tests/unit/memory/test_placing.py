"""Into which pieces a pool is page-locked, and where its memory is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT
from raykv.memory import placing
from raykv.memory.placing import MOST_PIECE_BYTES, HugePages, Placement, Placing, lock_pieces

GIB = 1 << 30
SLAB = 16 * SLOT_ALIGNMENT


@settings(max_examples=200, deadline=None)
@given(
    pool_bytes=st.integers(1, 2 << 40),
    slot_units=st.integers(1, 1 << 14),
    data=st.data(),
)
def test_no_slot_crosses_the_border_of_a_piece(
    pool_bytes: int, slot_units: int, data: st.DataObject
) -> None:
    slot_bytes = slot_units * SLOT_ALIGNMENT
    geometry = PoolGeometry.for_pool(max(pool_bytes, slot_bytes), slot_bytes)
    pieces = lock_pieces(geometry)
    assert pieces[0].offset == 0
    assert all(a.end == b.offset for a, b in pairwise(pieces))
    assert pieces[-1].end == geometry.num_slabs * geometry.slab_bytes
    assert all(piece.num_bytes <= MOST_PIECE_BYTES for piece in pieces)
    assert len(pieces) <= 2 * placing.TARGET_PIECES
    slab = data.draw(st.integers(0, geometry.num_slabs - 1))
    for slot in (geometry.slots_of(slab, slot_bytes) or [])[:3]:
        start, end = slot * SLOT_ALIGNMENT, slot * SLOT_ALIGNMENT + slot_bytes
        assert any(piece.offset <= start and end <= piece.end for piece in pieces)


@pytest.mark.parametrize(
    ("pool_bytes", "sizes"),
    [
        (8 * GIB, {GIB}),
        (512 * GIB, {2 * GIB}),
        (32_768 * GIB, {64 * GIB}),
    ],
)
def test_pieces_grow_with_the_pool_up_to_64_gib(pool_bytes: int, sizes: set[int]) -> None:
    pieces = lock_pieces(PoolGeometry(pool_bytes, 256 << 20))
    assert {piece.num_bytes for piece in pieces} == sizes


def test_slab_that_is_larger_than_a_piece_is_one() -> None:
    pieces = lock_pieces(PoolGeometry(300 * GIB, 100 * GIB))
    assert [piece.num_bytes for piece in pieces] == [100 * GIB] * 3


@pytest.mark.parametrize(
    ("gpus", "memory", "expected"),
    [
        ([], [0, 1], Placement(Placing.ANYWHERE)),
        ([0, 0], [0], Placement(Placing.ANYWHERE)),
        ([1, 1], [0, 1], Placement(Placing.PREFER, (1,))),
        ([1, 0, 1], [0, 1], Placement(Placing.INTERLEAVE, (0, 1))),
        ([3, 1], [0, 1, 2], Placement(Placing.PREFER, (1,))),
        ([7], [0, 1], Placement(Placing.ANYWHERE)),
    ],
)
def test_pool_is_near_the_gpus(gpus: list[int], memory: list[int], expected: Placement) -> None:
    assert placing.placement(gpus, memory) == expected


@pytest.mark.parametrize(
    ("pages", "free", "mode", "expected"),
    [
        (4, 4, "never", HugePages.RESERVED),
        (4, 3, "never", HugePages.NONE),
        (4, 3, "advise", HugePages.TRANSPARENT),
        (4.5, 9, "always", HugePages.TRANSPARENT),
        (4.5, 9, "deny", HugePages.NONE),
        (4, 0, "", HugePages.NONE),
    ],
)
def test_pages_are_the_largest_that_all_of_the_pool_can_have(
    pages: float, free: int, mode: str, expected: HugePages
) -> None:
    size = 2 << 20
    assert placing.huge_pages(int(pages * size), size, free, mode) is expected
