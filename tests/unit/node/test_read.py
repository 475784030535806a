"""Buffers are used again once nobody can see them any more."""

from __future__ import annotations

from raykv.node.read import BUFFER_BYTES, MAX_KEPT, Scratch


def test_buffer_is_used_again_when_the_last_slice_is_gone() -> None:
    scratch = Scratch()
    array = scratch.take(100)
    address = array.ctypes.data
    array[:] = 7
    part = array[10:20]
    del array
    assert len(scratch._kept) == 0
    other = scratch.take(100)
    assert other.ctypes.data != address
    assert part.tolist() == [7] * 10
    del part
    assert len(scratch._kept) == 1
    assert scratch.take(BUFFER_BYTES).ctypes.data == address


def test_large_and_empty_arrays_are_not_kept() -> None:
    scratch = Scratch()
    for size in (0, BUFFER_BYTES + 1):
        assert len(scratch.take(size)) == size
    assert len(scratch._kept) == 0


def test_no_more_buffers_are_kept_than_allowed() -> None:
    scratch = Scratch()
    arrays = [scratch.take(10) for _ in range(MAX_KEPT + 3)]
    assert len({array.ctypes.data for array in arrays}) == MAX_KEPT + 3
    arrays.clear()
    assert len(scratch._kept) == MAX_KEPT
