"""Whole jobs in the benchmark of a GPU's copies: what is copied, and the verdict, on a fake one."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from raykv.base.ids import Direction
from raykv.lab.bench import copy_jobs
from raykv.lab.bench.copy_cuda import DeviceSides
from raykv.lab.bench.copy_jobs import (
    BIG,
    BY_LAYER,
    SHAPES,
    WHOLE,
    JobCase,
    JobSides,
    Shape,
    cases,
    measure,
)
from raykv.lab.bench.report import Options, Result, Row
from tests.fixtures.cuda.copies import FakeDriver
from tests.fixtures.cuda.locking import locking

KIB, MIB = 1 << 10, 1 << 20
QUICK = Options(quick=True, repeats=1)
SHAPE = Shape(64 * KIB, 4)


@pytest.fixture
def sides() -> Iterator[DeviceSides]:
    made = DeviceSides(FakeDriver(), 16 * MIB)
    yield made
    made.close()


@pytest.fixture
def jobs(sides: DeviceSides) -> Iterator[JobSides]:
    made = JobSides(sides, SHAPE, 4 * MIB, locking(sides))
    yield made
    made.close()


def test_jobs_have_25_to_100_mib_and_both_directions() -> None:
    for shape in SHAPES:
        some = list(cases(Options(), shape, 1 << 40))
        assert {case.direction for case in some} == set(Direction)
        sizes = sorted({case.num_bytes for case in some})
        assert 25 * MIB <= sizes[0] <= 28 * MIB
        assert sizes[-1] == 100 * MIB
        assert all(case.is_judged for case in some)
        assert len({case.name for case in some}) == len(some)
    assert not list(cases(Options(), SHAPES[0], 16 * MIB))


def test_quick_run_measures_jobs_and_judges_none(sides: DeviceSides) -> None:
    result = Result("copy", "")
    measure(sides, QUICK, locking(sides), result)
    for shape in SHAPES:
        for case in cases(QUICK, shape, sides.num_bytes):
            subjects = {row.subject for row in result.rows if row.case == case.name}
            ways = {WHOLE, BIG} if case.direction is Direction.STORE else {WHOLE, BY_LAYER, BIG}
            assert subjects == ways
    assert all(row.median > 0 for row in result.rows)
    assert not result.verdicts
    assert any("Not judged" in note for note in result.notes)


@pytest.mark.parametrize("way", [JobSides.whole, JobSides.by_layer])
def test_job_moves_every_byte_there_and_back(sides: DeviceSides, way: object) -> None:
    jobs = JobSides(sides, SHAPE, 4 * MIB, locking(sides))
    kv = (ctypes.c_ubyte * sides.num_bytes).from_address(sides.kv)
    pattern = bytes(range(256)) * (sides.num_bytes // 256)
    ctypes.memmove(sides.kv, pattern, sides.num_bytes)
    assert jobs.whole(JobCase(SHAPE, 16, Direction.STORE)) > 0
    ctypes.memset(sides.kv, 0, sides.num_bytes)
    assert callable(way)
    assert way(jobs, JobCase(SHAPE, 16, Direction.LOAD)) > 0
    # The blocks of the store have come back, and no other.
    assert sum(1 for page in range(0, sides.num_bytes, 64 * KIB) if kv[page + 1]) == 16 * 4
    jobs.close()


def test_load_of_more_than_was_stored_is_stored_first(jobs: JobSides) -> None:
    assert jobs.by_layer(JobCase(SHAPE, 2, Direction.LOAD)) > 0
    assert jobs.whole(JobCase(SHAPE, 16, Direction.LOAD)) > 0
    assert jobs.big(JobCase(SHAPE, 16, Direction.LOAD)) > 0


STORE = JobCase(SHAPES[0], 13, Direction.STORE)
LOAD = JobCase(SHAPES[0], 50, Direction.LOAD)


def judged(store: float, load: float, by_layer: float) -> Result:
    result = Result("copy", "")
    result.rows = [
        Row(STORE.name, WHOLE, "GB/s", (10 * store,)),
        Row(STORE.name, BIG, "GB/s", (10.0,)),
        Row(LOAD.name, WHOLE, "GB/s", (20 * load,)),
        Row(LOAD.name, BY_LAYER, "GB/s", (20 * by_layer,)),
        Row(LOAD.name, BIG, "GB/s", (20.0,)),
    ]
    copy_jobs.judge(result, [STORE, LOAD])
    return result


@pytest.mark.parametrize(
    ("store", "load", "is_met"), [(0.85, 0.9, True), (0.84, 0.9, False), (0.9, 0.84, False)]
)
def test_slowest_job_is_judged(store: float, load: float, is_met: bool) -> None:
    result = judged(store, load, 0.5)
    (verdict,) = result.verdicts
    assert verdict.is_met is is_met
    assert verdict.measured == pytest.approx(min(store, load))
    assert any(f"By layer the slowest has 0.5: {LOAD.name}" in note for note in result.notes)
