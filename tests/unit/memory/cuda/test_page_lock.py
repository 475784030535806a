"""A pool that is page-locked piece by piece: the order of things, and what goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT
from raykv.memory.cuda import page_lock
from raykv.memory.cuda.driver import CUDAError
from raykv.memory.cuda.page_lock import MOST_PIECE_BYTES, TARGET_PIECES, PoolLocker, lock_pieces
from raykv.memory.pool import Pool
from tests.fixtures.cuda.memory import GPU, FakeCuda
from tests.fixtures.waiting import wait_until

GIB = 1 << 30
SLAB = 16 * SLOT_ALIGNMENT
GEOMETRY = PoolGeometry(6 * SLAB + SLOT_ALIGNMENT, SLAB)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """Pinned two slabs at a time."""
    monkeypatch.setattr(page_lock, "LEAST_PIECE_BYTES", 2 * SLAB)
    made = Pool(GEOMETRY, "")
    yield made
    made.stop()
    made._region.close()


def offsets(cuda: FakeCuda, pool: Pool) -> dict[int, int]:
    return {address - pool.address: size for address, size in cuda.registered.items()}


def test_piece_is_locked_once_its_pages_were_touched(pool: Pool) -> None:
    cuda = FakeCuda()
    locker = PoolLocker(cuda, GPU, pool, GEOMETRY)
    pool.prefaulted_bytes = 4 * SLAB - 1
    locker.start()
    wait_until(lambda: locker.locked_bytes > 0, 5.0, "the first piece is locked")
    assert offsets(cuda, pool) == {0: 2 * SLAB}
    assert locker.locked_bytes == 2 * SLAB
    pool.prefaulted_bytes = GEOMETRY.pool_bytes
    wait_until(lambda: locker.locked_bytes == 6 * SLAB, 5.0, "all slabs are locked")
    assert offsets(cuda, pool) == {0: 2 * SLAB, 2 * SLAB: 2 * SLAB, 4 * SLAB: 2 * SLAB}
    locker.stop(5.0)
    assert (cuda.registered, locker.locked_bytes) == ({}, 0)


def test_rest_stays_pageable_with_one_warning_when_cuda_refuses(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = FakeCuda()
    cuda.fail_at = 2
    locker = PoolLocker(cuda, GPU, pool, GEOMETRY)
    pool.prefaulted_bytes = GEOMETRY.pool_bytes
    locker.start()
    wait_until(lambda: not locker._thread.is_alive(), 5.0, "it gives up")
    assert cuda.calls == ["register_host"] * 2
    assert locker.locked_bytes == 2 * SLAB
    (record,) = caplog.records
    assert f"{4 * SLAB} of the pool's {6 * SLAB} bytes can't be page-locked" in record.getMessage()
    assert "register_host was refused" in record.getMessage()
    locker.stop(5.0)
    assert cuda.registered == {}


def test_end_comes_in_time_before_the_pool_is_prefaulted(pool: Pool) -> None:
    cuda = FakeCuda()
    locker = PoolLocker(cuda, GPU, pool, GEOMETRY)
    locker.start()
    locker.stop(5.0)
    assert not locker._thread.is_alive()
    assert cuda.calls == []


def test_all_stays_pinned_when_cuda_does_not_come_back(pool: Pool) -> None:
    """The process is about to end; unpinning while CUDA pins could take for ever too."""
    gate = threading.Event()

    class Stuck(FakeCuda):
        def register_host(self, device: str, address: int, num_bytes: int) -> None:
            super().register_host(device, address, num_bytes)
            if len(self.registered) == 2:
                gate.wait(10.0)

    cuda = Stuck()
    locker = PoolLocker(cuda, GPU, pool, GEOMETRY)
    pool.prefaulted_bytes = GEOMETRY.pool_bytes
    locker.start()
    wait_until(lambda: len(cuda.registered) == 2, 5.0, "it is stuck")
    locker.stop(0.05)
    assert "unregister_host" not in cuda.calls
    gate.set()
    locker.stop(5.0)
    assert cuda.registered == {}


def test_refused_unpinning_does_not_keep_the_rest_pinned(
    pool: Pool, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn(FakeCuda):
        def unregister_host(self, device: str, address: int) -> None:
            if address == pool.address:
                raise CUDAError("no")
            super().unregister_host(device, address)

    cuda = Stubborn()
    locker = PoolLocker(cuda, GPU, pool, GEOMETRY)
    pool.prefaulted_bytes = GEOMETRY.pool_bytes
    locker.start()
    wait_until(lambda: locker.locked_bytes == 6 * SLAB, 5.0, "all slabs are locked")
    locker.stop(5.0)
    assert offsets(cuda, pool) == {0: 2 * SLAB}
    assert "a part of the pool stays page-locked: no" in caplog.text


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
    assert pieces[0].base == 0
    assert all(a.end == b.base for a, b in pairwise(pieces))
    assert pieces[-1].end == geometry.num_slabs * geometry.slab_bytes
    assert all(piece.num_bytes <= MOST_PIECE_BYTES for piece in pieces)
    assert len(pieces) <= 2 * TARGET_PIECES
    slab = data.draw(st.integers(0, geometry.num_slabs - 1))
    for slot in (geometry.slots_of(slab, slot_bytes) or [])[:3]:
        start, end = slot * SLOT_ALIGNMENT, slot * SLOT_ALIGNMENT + slot_bytes
        assert any(piece.base <= start and end <= piece.end for piece in pieces)


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
