"""Benchmarks of the design that need neither Ray nor an engine run; numbers are not tested."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from raykv.lab.bench.report import Options
from tests.bench import copy_cuda, copy_jobs
from tests.bench.__main__ import HERE
from tests.bench.copy_cuda import DeviceSides, cases, measure
from tests.fixtures.cuda.copies import FakeDriver

QUICK = Options(quick=True, repeats=1)
MIB = 1 << 20


@pytest.mark.parametrize("name", ["pool", "scale", "directory", "routing_simulation"])
def test_benchmark_has_rows_and_says_what_it_found(name: str) -> None:
    result = HERE[name].run(QUICK)
    assert result.rows
    assert result.verdicts or result.notes
    assert all(row.values for row in result.rows)
    assert result.summary


def locking(driver: FakeDriver) -> copy_jobs.Lock:
    """Memory of this process, as if it were page-locked."""

    def lock(address: int, num_bytes: int) -> Callable[[], None]:
        driver.register(address, num_bytes)
        return driver.run_all

    return lock


def test_copies_and_whole_jobs_of_a_gpu_are_measured_on_a_fake_one() -> None:
    driver = FakeDriver()
    sides = DeviceSides(driver, 16 * MIB)
    result = measure(sides, QUICK)
    copy_jobs.measure(sides, QUICK, locking(driver), result)
    sides.close()
    names = {case.name for case in cases(QUICK, 16 * MIB)}
    jobs = {
        case.name for shape in copy_jobs.SHAPES for case in copy_jobs.cases(QUICK, shape, 16 * MIB)
    }
    assert {row.case for row in result.rows} == names | jobs
    assert {row.subject for row in result.rows} == {
        copy_cuda.OURS,
        copy_jobs.BIG,
        copy_jobs.WHOLE,
        copy_jobs.BY_LAYER,
    }
    assert all(row.median > 0 for row in result.rows)
    assert driver.num_allocations == 0
