"""Buffers are used again once nobody can see them any more."""

from __future__ import annotations

from raykv.node.read import BUFFER_BYTES, Buffers


def test_buffer_is_used_again_when_the_last_slice_is_gone() -> None:
    prepared: list[int] = []
    buffers = Buffers(2, lambda address, _: prepared.append(address))
    array = buffers.take(100)
    assert array is not None
    array[:] = 7
    part = array[10:20]
    del array
    other = buffers.take(100)
    assert other is not None
    assert other.ctypes.data == prepared[1] != prepared[0]
    assert part.tolist() == [7] * 10
    del part
    again = buffers.take(BUFFER_BYTES)
    assert again is not None
    assert again.ctypes.data == prepared[0]
    assert len(prepared) == 2


def test_large_and_empty_arrays_are_not_lent() -> None:
    buffers = Buffers(1)
    assert [buffers.take(size) for size in (0, BUFFER_BYTES + 1)] == [None, None]


def test_no_more_buffers_are_made_than_allowed() -> None:
    buffers = Buffers(3)
    arrays = [buffers.take(10) for _ in range(4)]
    assert [array is None for array in arrays] == [False, False, False, True]
    arrays.clear()
    assert buffers.take(10) is not None
