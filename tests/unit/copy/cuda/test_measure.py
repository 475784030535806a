"""The calibration of a GPU, with one that is played: what it measures, keeps and gives back."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from raykv.copy.cuda.calibration import Table
from raykv.copy.cuda.driver import CopyDriver
from raykv.copy.cuda.lane import Device
from raykv.copy.cuda.measure import calibrate_in_background, measure
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.cuda.copies import FakeDriver


def quick(driver: CopyDriver) -> Table:
    return measure(driver, pages=(8, 64), counts=(2, 5))


def test_calibration_measures_both_ways_and_gives_everything_back() -> None:
    driver = FakeDriver()
    table = quick(driver)
    kinds = {(point.direction, point.page_bytes, point.num_runs) for point in table.points}
    assert len(kinds) == len(table.points) == 8
    assert all(min(point.batch_rate, point.gather_rate) > 0 for point in table.points)
    assert driver.calls_of("move_pages")
    assert driver.num_allocations == 0
    assert not driver.streams
    assert driver.num_pending == 0


@pytest.mark.parametrize("name", ["allocate", "copy_batch", "move_pages", "record"])
def test_calibration_that_fails_gives_everything_back(name: str) -> None:
    driver = FakeDriver()
    for number in range(3):
        driver.fail_at[name, 1 + number] = "cudaErrorMemoryAllocation"
    if name == "allocate":
        with pytest.raises(CUDAError):
            quick(driver)
    else:
        with pytest.raises(CUDAError, match="cudaErrorMemoryAllocation"):
            quick(driver)
    assert driver.num_allocations == 0
    assert not driver.streams


def test_calibration_is_measured_once_and_kept(tmp_path: Path) -> None:
    device = Device(FakeDriver())
    usual = device.table
    thread = calibrate_in_background(device, tmp_path, quick)
    assert thread is not None
    thread.join(60)
    assert len(device.table.points) == 8
    assert usual.points == ()
    again = Device(FakeDriver())
    assert calibrate_in_background(again, tmp_path, quick) is None
    assert again.table == device.table


def test_device_that_cant_be_calibrated_keeps_the_usual_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = Device(FakeDriver())
    usual = device.table

    def fail(_: CopyDriver) -> Table:
        raise CUDAError("no memory")

    with caplog.at_level(logging.WARNING):
        thread = calibrate_in_background(device, tmp_path, fail)
        assert thread is not None
        thread.join(60)
    assert device.table is usual
    assert "Fake GPU was not calibrated: no memory" in caplog.text
    assert not list(tmp_path.iterdir())


def test_device_whose_mover_fails_is_not_calibrated(tmp_path: Path) -> None:
    driver = FakeDriver()
    driver.is_mover_good = False
    device = Device(driver)
    thread = calibrate_in_background(device, tmp_path, quick)
    assert thread is not None
    thread.join(60)
    assert device.table.points == ()
    assert not list(tmp_path.iterdir())


def test_device_where_nothing_moves_pages_is_not_calibrated(tmp_path: Path) -> None:
    assert calibrate_in_background(Device(FakeDriver(mover=None)), tmp_path, quick) is None
    assert not list(tmp_path.iterdir())
