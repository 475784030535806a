"""Chunks go together in spans: the same bytes, in few runs, and none over a slab's edge."""

from __future__ import annotations

from itertools import pairwise
from typing import NoReturn

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import Direction
from raykv.copy.cuda.backend import CUDABackend
from raykv.copy.cuda.batches import batches, rows_of
from raykv.copy.cuda.calibration import Route, always
from raykv.copy.cuda.lane import Device, Limits, Place
from raykv.copy.engine import StopSign
from raykv.copy.plan import CopyRuns
from raykv.copy.spans import SPAN_BYTES, Span, spans
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.cuda.copies import FakeDriver

SLAB = 64
PAGE = 8
SLOT = 2 * PAGE

Row = tuple[int, int, int]


def runs_of(*chunks: list[Row]) -> CopyRuns:
    rows = np.array([row for chunk in chunks for row in chunk], np.int64).reshape(-1, 3)
    ends = np.cumsum([len(chunk) for chunk in chunks]).astype(np.int64)
    kv, pool, size = rows.T.copy()
    return CopyRuns(kv, pool, size, ends)


def rows(runs: CopyRuns) -> list[Row]:
    return list(zip(runs.kv.tolist(), runs.pool.tolist(), runs.size.tolist(), strict=True))


def bytes_of(some: list[Row]) -> list[tuple[int, int]]:
    return [(kv + i, pool + i) for kv, pool, size in some for i in range(size)]


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[list[Row]], list[int]]:
    """Chunks of one or two runs in slots of one size, and which of them are to be copied."""
    slots = draw(st.lists(st.integers(0, 30), unique=True, max_size=8))
    if draw(st.booleans()):
        slots.sort()
    chunks = []
    for slot in slots:
        block = draw(st.sampled_from([slot, slot, draw(st.integers(0, 30))]))
        whole = (block * SLOT, slot * SLOT, SLOT)
        halves = [(block * SLOT, slot * SLOT, PAGE), (999 - slot, slot * SLOT + PAGE, PAGE)]
        chunks.append(draw(st.sampled_from([[whole], halves])))
    kept = [number for number in range(len(slots)) if draw(st.integers(0, 3))]
    return chunks, kept


@given(plan=plans(), most_bytes=st.sampled_from([1, SLOT, 3 * SLOT, 1000]))
def test_spans_copy_the_wanted_chunks_in_order(
    plan: tuple[list[list[Row]], list[int]], most_bytes: int
) -> None:
    chunks, kept = plan
    made = list(spans(runs_of(*chunks), kept, SLAB, most_bytes))
    assert [chunk for span in made for chunk in span.chunks] == kept
    for span in made:
        theirs = [row for chunk in span.chunks for row in chunks[chunk]]
        assert bytes_of(rows(span.runs)) == bytes_of(theirs)
        assert span.chunk_bytes == [SLOT] * len(span.chunks)
        assert len(span.chunks) == 1 or sum(span.chunk_bytes) <= most_bytes
    for span, after in pairwise(made):
        assert sum(span.chunk_bytes) + after.chunk_bytes[0] > most_bytes


@given(plan=plans())
def test_runs_of_a_span_have_no_neighbours_and_cross_no_edge(
    plan: tuple[list[list[Row]], list[int]],
) -> None:
    chunks, kept = plan
    for span in spans(runs_of(*chunks), kept, SLAB, 1000):
        found = rows(span.runs)
        for _, pool, size in found:
            assert pool // SLAB == (pool + size - 1) // SLAB
        for (kv, pool, size), (next_kv, next_pool, _) in pairwise(found):
            is_edge = next_pool % SLAB == 0
            assert is_edge or (kv + size, pool + size) != (next_kv, next_pool)
        ends = span.runs.chunk_ends.tolist()
        slabs = [pool // SLAB for _, pool, _ in found]
        edges = [i for i, (a, b) in enumerate(pairwise(slabs), start=1) if a != b]
        assert ends == [*edges, len(found)]


def one(runs: CopyRuns, chunks: list[int]) -> Span:
    (span,) = spans(runs, chunks, SLAB, 1000)
    return span


NEIGHBOURS = runs_of(*([(number * SLOT, number * SLOT, SLOT)] for number in range(6)))


def test_neighbouring_chunks_make_one_run_for_each_slab() -> None:
    assert rows(one(NEIGHBOURS, [0, 1, 2, 3, 4, 5]).runs) == [(0, 0, SLAB), (SLAB, SLAB, 2 * SLOT)]


def test_chunk_that_is_left_out_parts_its_neighbours() -> None:
    found = one(NEIGHBOURS, [0, 1, 3])
    assert rows(found.runs) == [(0, 0, 2 * SLOT), (3 * SLOT, 3 * SLOT, SLOT)]


def test_no_chunk_needs_no_span() -> None:
    assert list(spans(NEIGHBOURS, [], SLAB, 1000)) == []
    assert list(spans(runs_of(), [], SLAB, 1000)) == []


def test_chunk_that_is_larger_than_a_span_has_its_own() -> None:
    runs = runs_of([(0, 0, 8)], [(8, 8, 40)], [(48, 48, 8)], [(56, 56, 8)])
    made = list(spans(runs, [0, 1, 2, 3], SLAB, 16))
    assert [span.chunks for span in made] == [[0], [1], [2, 3]]


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("direction", Direction)
def test_device_gets_one_copy_for_neighbouring_chunks_of_a_slab(
    direction: Direction, route: Route
) -> None:
    """Each slab is pinned for itself here, so that a copy over its edge would be refused."""
    driver = FakeDriver()
    kv, pool = (np.random.default_rng(7).integers(0, 256, 8 * SLOT, np.uint8) for _ in "kp")
    driver.register(kv.ctypes.data, kv.nbytes)
    for slab in range(2):
        driver.register(pool.ctypes.data + slab * SLAB, SLAB)
    device = Device(driver, Limits(), never_lost, always(route))
    backend = CUDABackend(device, Place(kv.ctypes.data, pool.ctypes.data, None))
    before = (kv if direction is Direction.STORE else pool).copy()
    for span in spans(NEIGHBOURS, range(6), SLAB, 1000):
        assert backend.copy(direction, span.runs, 0, len(span.runs.size), StopSign())
    (batch,) = driver.calls_of("copy_batch")
    assert (batch.num_copies, batch.num_bytes) == (2, 6 * SLOT)
    assert np.array_equal(kv[: 6 * SLOT], before[: 6 * SLOT])
    assert np.array_equal(pool[: 6 * SLOT], before[: 6 * SLOT])


def never_lost(error: CUDAError) -> NoReturn:
    raise AssertionError(error)


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 3 << 20, 2 << 20])
def test_span_of_a_device_is_gathered_at_once(chunk_bytes: int) -> None:
    """Layers whose pages lie apart."""
    size = np.full(64 * 32, chunk_bytes // 32, np.int64)
    kv = np.arange(len(size)) * chunk_bytes * 2
    runs = CopyRuns(kv, np.cumsum(size) - size, size, np.arange(32, len(size) + 1, 32))
    limits = Limits()
    for span in spans(runs, range(64), 256 << 20, SPAN_BYTES):
        cut = rows_of(span.runs, 0, len(span.runs.size), limits.cut_bytes)
        assert len(list(batches(cut, limits.staging_bytes, limits.gather_runs))) == 1
        assert span.chunks[-1] == 63 or sum(span.chunk_bytes) > SPAN_BYTES - chunk_bytes
