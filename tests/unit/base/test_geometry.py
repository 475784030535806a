"""Slots of a pool: where they can be, and that none of them meets another."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.geometry import MAX_SLAB_BYTES, TARGET_SLABS, PoolGeometry, aligned
from raykv.base.ids import SLOT_ALIGNMENT, Slot

PAGE = SLOT_ALIGNMENT

page_counts = st.integers(1, 40)


@st.composite
def pools(draw: st.DrawFn) -> PoolGeometry:
    """Small pools, also with a rest behind their last slab that is no whole page."""
    slab = draw(st.integers(1, 12)) * PAGE
    rest = draw(st.integers(0, slab - 1))
    return PoolGeometry(draw(st.integers(1, 6)) * slab + rest, slab)


@settings(deadline=None)
@given(pool=pools(), pages=page_counts)
def test_slots_of_one_size_lie_in_their_slabs_without_overlap(
    pool: PoolGeometry, pages: int
) -> None:
    size = pages * PAGE
    slots = []
    for slab in range(pool.num_slabs):
        for slot in pool.slots_of(slab, size):
            assert pool.slab_of(slot) == slab
            assert slab * pool.slab_bytes <= slot * PAGE
            assert slot * PAGE + size <= (slab + 1) * pool.slab_bytes <= pool.pool_bytes
            slots.append(slot)
    assert all(after * PAGE >= before * PAGE + size for before, after in pairwise(slots))
    assert len(slots) == pool.capacity(size)
    tried = range(-2, pool.pool_bytes // PAGE + 2)
    assert [slot for slot in tried if pool.is_place(Slot(slot), size)] == slots


@pytest.mark.parametrize("size", [0, -PAGE, 1, PAGE - 1, PAGE + 1])
def test_is_place_is_false_for_a_size_that_no_slot_has(size: int) -> None:
    assert not PoolGeometry(8 * PAGE, 4 * PAGE).is_place(Slot(0), size)


def test_slots_are_packed_from_the_start_of_each_slab() -> None:
    pool = PoolGeometry(12 * PAGE, 5 * PAGE)
    assert pool.num_slabs == 2
    assert pool.slots_of(0, 2 * PAGE) == [0, 2]
    assert pool.slots_of(1, 2 * PAGE) == [5, 7]
    assert pool.slots_of(1, 6 * PAGE) == []
    assert pool.capacity(2 * PAGE) == 4
    assert pool.capacity(6 * PAGE) == 0


@pytest.mark.parametrize(
    ("num_bytes", "expected"), [(0, 0), (1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)]
)
def test_aligned_rounds_up_to_pages(num_bytes: int, expected: int) -> None:
    assert aligned(num_bytes) == expected


def test_for_pool_cuts_small_pools_into_the_target_number_of_slabs() -> None:
    pool = PoolGeometry.for_pool(TARGET_SLABS * 10 * PAGE, largest_slot_bytes=PAGE)
    assert pool.slab_bytes == 10 * PAGE
    assert pool.num_slabs == TARGET_SLABS


def test_for_pool_never_makes_a_slab_above_the_maximum_of_slots_that_fit() -> None:
    pool = PoolGeometry.for_pool(1 << 40, largest_slot_bytes=PAGE)
    assert pool.slab_bytes == MAX_SLAB_BYTES


@pytest.mark.parametrize("slot_pages", [1, 1000, 1440, 2049, 4095, 5000])
def test_pool_for_one_slot_size_has_no_rest_but_at_its_end(slot_pages: int) -> None:
    """1,440 pages: 128 tokens of SmolLM2-135M in float32; of 182 slots 54 were lost."""
    pool = PoolGeometry.for_pool(1 << 30, slot_pages * PAGE)
    assert pool.slab_bytes % (slot_pages * PAGE) == 0
    assert pool.capacity(slot_pages * PAGE) >= 0.98 * ((1 << 30) // (slot_pages * PAGE))


@settings(deadline=None)
@given(pool_pages=st.integers(1, 3000), slot_pages=st.integers(1, 3000))
def test_for_pool_holds_the_largest_slot_when_the_pool_does(
    pool_pages: int, slot_pages: int
) -> None:
    pool = PoolGeometry.for_pool(pool_pages * PAGE, slot_pages * PAGE)
    assert pool.slab_bytes <= pool.pool_bytes
    assert (pool.capacity(slot_pages * PAGE) > 0) == (slot_pages <= pool_pages)


@pytest.mark.parametrize(
    ("pool_bytes", "slab_bytes"), [(8 * PAGE, 0), (8 * PAGE, PAGE + 1), (PAGE, 2 * PAGE)]
)
def test_geometry_is_refused_with_a_slab_that_cannot_be(pool_bytes: int, slab_bytes: int) -> None:
    with pytest.raises(AssertionError):
        PoolGeometry(pool_bytes, slab_bytes)
