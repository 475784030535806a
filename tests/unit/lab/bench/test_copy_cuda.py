"""The benchmark of a GPU's copies: its cases, ratios and verdicts, on a fake one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
from typer.testing import CliRunner

from raykv.base.errors import SettingError
from raykv.base.ids import Direction
from raykv.cli import app
from raykv.lab.bench import copy, copy_cuda, ttft
from raykv.lab.bench.copy_cuda import (
    ALONE,
    BY_CHUNK,
    COUNTS,
    IN_ONE_CALL,
    MATRICES,
    OURS,
    PAGES,
    QUICK_COUNTS,
    QUICK_PAGES,
    WORKER,
    DeviceCase,
    DeviceSides,
    cases,
    measure,
)
from raykv.lab.bench.copy_jobs import BIG
from raykv.lab.bench.matrices import MatrixProcess
from raykv.lab.bench.report import Options, Result, Row
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.cuda.copies import FakeDriver
from tests.fixtures.cuda.locking import locking

KIB, MIB = 1 << 10, 1 << 20
QUICK = Options(quick=True, repeats=1)


@pytest.fixture
def sides() -> Iterator[DeviceSides]:
    made = DeviceSides(FakeDriver(), 16 * MIB)
    yield made
    made.close()
    driver = made.driver
    assert isinstance(driver, FakeDriver)
    assert driver.num_allocations == 0
    assert not driver.streams


def test_cases_are_all_pages_and_counts_that_fit() -> None:
    every = list(cases(Options(), 1 << 50))
    assert len(every) == len(PAGES) * len(COUNTS) * 2
    assert {case.page_bytes for case in every} == set(PAGES)
    assert max(case.num_pages for case in every) == 100_000
    some = list(cases(Options(), 400 * MIB))
    assert max(case.num_bytes for case in some) <= 400 * MIB
    assert {case.name for case in some} >= {
        "store, 100 pages of 4096 KiB",
        "load, 100,000 pages of 4 KiB",
    }
    assert "load, 100,000 pages of 16 KiB" not in {case.name for case in some}
    assert len({case.name for case in every}) == len(every)


@pytest.mark.parametrize("mover", ["fake", None])
def test_quick_run_measures_every_case_and_everything_beside(mover: str | None) -> None:
    sides = DeviceSides(FakeDriver(mover=mover), 16 * MIB)
    took = iter(range(1, 1000))
    result = measure(sides, QUICK, lambda: float(next(took)), locking(sides))
    sides.close()
    names = [case.name for case in cases(QUICK, sides.num_bytes)]
    assert len(names) == len(QUICK_PAGES) * len(QUICK_COUNTS) * 2
    subjects = {OURS, BY_CHUNK, IN_ONE_CALL, BIG}
    if mover:
        subjects |= {"one by one", "gathered"}
    for name in names:
        assert {row.subject for row in result.rows if row.case == name} == subjects
    assert all(row.median > 0 for row in result.rows)
    assert {row.subject for row in result.rows if row.case == MATRICES} == {
        ALONE,
        "beside stores of 64 KiB",
        "beside loads of 64 KiB",
        "beside loads of 4 KiB",
    }
    assert "Fake GPU" in result.summary


def test_run_without_torch_says_that_no_slowdown_was_measured(sides: DeviceSides) -> None:
    result = measure(sides, QUICK, None, locking(sides))
    assert not [row for row in result.rows if row.case == MATRICES]
    assert any("no torch for CUDA" in note for note in result.notes)


@pytest.mark.parametrize("direction", Direction)
def test_all_ways_copy_every_page_once(sides: DeviceSides, direction: Direction) -> None:
    driver = sides.driver
    assert isinstance(driver, FakeDriver)
    case = DeviceCase(64 * KIB, 100, direction)
    runs = sides.runs(case)
    ways: dict[str, Callable[[], float]] = {
        OURS: lambda: sides.ours(case, runs),
        BY_CHUNK: lambda: sides.by_chunk(case, runs),
        IN_ONE_CALL: lambda: sides.in_one_call(case, runs),
        BIG: lambda: sides.big(case),
    }
    for way in ways.values():
        driver.calls.clear()
        assert way() > 0
        assert driver.num_pending == 0
        crossed = [call.num_bytes for call in driver.calls if "copy" in call.name]
        assert sum(crossed) == case.num_bytes
    assert len(runs) == 100


def result_of(rows: list[Row]) -> Result:
    made = Result("copy", "")
    made.rows = rows
    return made


def judged(ratio: float, case: DeviceCase, worker: float = 1.0, beside: float = 1.0) -> Result:
    result = result_of(
        [
            Row(case.name, OURS, "GB/s", (ratio * 10,)),
            Row(case.name, BIG, "GB/s", (10.0,)),
            Row(WORKER, OURS, "µs", (worker,)),
            Row(MATRICES, ALONE, "ms", (2.0,)),
            Row(MATRICES, "beside loads of 64 KiB", "ms", (2.0 * beside,)),
        ]
    )
    copy_cuda._judge(result, [case], has_work=True)
    return result


LARGE = DeviceCase(64 * KIB, 1000, Direction.LOAD)
SMALL = DeviceCase(16 * KIB, 1024, Direction.STORE)


@pytest.mark.parametrize(
    ("case", "ratio", "is_met"),
    [(LARGE, 0.90, True), (LARGE, 0.89, False), (SMALL, 0.6, True), (SMALL, 0.59, False)],
)
def test_speed_is_judged_against_one_large_copy(
    case: DeviceCase, ratio: float, is_met: bool
) -> None:
    result = judged(ratio, case)
    assert result.verdicts[0].is_met is is_met
    assert len(result.verdicts) == 3
    assert any("Not judged" in note for note in result.notes)


def test_case_of_few_bytes_is_not_judged() -> None:
    result = judged(0.1, DeviceCase(64 * KIB, 255, Direction.LOAD))
    assert len(result.verdicts) == 2
    assert all(verdict.is_met for verdict in result.verdicts)


@pytest.mark.parametrize(
    ("worker", "beside", "met"),
    [(100, 1.02, [True, True]), (101, 1.02, [False, True]), (100, 1.03, [True, False])],
)
def test_worker_and_slowdown_have_budgets(worker: float, beside: float, met: list[bool]) -> None:
    result = judged(1.0, LARGE, worker, beside)
    assert [verdict.is_met for verdict in result.verdicts[1:]] == met


def test_less_memory_is_taken_where_the_device_has_not_as_much() -> None:
    driver = FakeDriver()
    for number in range(2):
        driver.fail_at["allocate", number] = "cudaErrorMemoryAllocation"
    sides = DeviceSides(driver, 64 * MIB)
    assert sides.num_bytes == 16 * MIB
    sides.close()


@pytest.mark.parametrize("failing", ["allocate", "make_stream", "make_event"])
def test_device_without_room_is_refused_and_nothing_is_kept(failing: str) -> None:
    driver = FakeDriver()
    for number in range(9):
        driver.fail_at[failing, number] = "cudaErrorMemoryAllocation"
    with pytest.raises(CUDAError):
        DeviceSides(driver, 64 * MIB)
    assert driver.num_allocations == 0


@pytest.mark.parametrize("benchmark", [copy, ttft])
def test_machine_without_a_gpu_refuses_in_one_sentence(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    name = benchmark.__name__.rpartition(".")[2]
    for device, words in (("cuda", "--device cuda can't be measured here: "), ("tpu", "cpu, cuda")):
        with pytest.raises(SettingError, match=words):
            benchmark.run(Options(quick=True, device=device))
        done = CliRunner().invoke(app, ["bench", name, "--quick", "--device", device])
        assert isinstance(done.exception, SettingError)


def test_matrices_are_multiplied_by_another_process() -> None:
    pytest.importorskip("torch")
    with MatrixProcess("cpu", side=8, count=1) as work:
        assert work() > 0
        assert work() > 0
    with MatrixProcess("nowhere", side=8, count=1) as work, pytest.raises(RuntimeError):
        work()
