"""Measures both ways of a device's small pages, once per model and driver version.

In a thread beside the first copies, which take the usual way meanwhile; on lanes of its own, with
memory of its own: some tens of MiB of the device and of the host, for about a second.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from itertools import product
from pathlib import Path
from typing import NoReturn

import numpy as np

from raykv.base.ids import Direction
from raykv.base.threads import OnFailure, SupervisedThread, sleep_precisely
from raykv.copy.cuda.batches import BatchRows
from raykv.copy.cuda.calibration import (
    Point,
    Route,
    Table,
    always,
    cache_folder,
    file_of,
    load,
    save,
)
from raykv.copy.cuda.driver import CopyDriver
from raykv.copy.cuda.lane import Device, Limits, Place
from raykv.copy.engine import StopSign
from raykv.memory.cuda.driver import CUDAError

logger = logging.getLogger("raykv.copy")

KIB = 1 << 10
PAGES = (2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 28 * KIB, 64 * KIB)
COUNTS = (8, 64, 512, 2048)
MOST_BYTES = 32 << 20
"""Bytes of a point: larger ones are left out."""

PARTS = 3
REPEATS = 5
"""The best one counts: others use the device too."""


def measure(
    driver: CopyDriver,
    pages: tuple[int, ...] = PAGES,
    counts: tuple[int, ...] = COUNTS,
    clock: Callable[[], float] = time.perf_counter,
) -> Table:
    """Measure all points.

    Raises:
        CUDAError: the device has no memory left, or refuses; what was taken is given back.
    """
    shapes = [(page, count) for page, count in product(pages, counts) if page * count <= MOST_BYTES]
    num_bytes = 2 * max(page * count for page, count in shapes)
    with ExitStack() as stack:
        kv = driver.allocate(num_bytes)
        stack.callback(driver.free, kv)
        pool = driver.allocate_host(num_bytes // 2)
        stack.callback(driver.free_host, pool)
        device = Device(driver, Limits(), on_lost=_give_up)
        stack.callback(device.close)
        place = Place(kv, pool, None)
        points = []
        for direction, (page_bytes, num_runs) in product(Direction, shapes):
            rows = _every_other(page_bytes, num_runs)
            rates = {route: _rate(device, direction, rows, place, route, clock) for route in Route}
            if driver.mover is None:
                raise CUDAError("its small pages are copied one by one")
            points.append(
                Point(direction, page_bytes, num_runs, rates[Route.BATCH], rates[Route.GATHER])
            )
        return Table(tuple(points))


def calibrate_in_background(
    device: Device,
    folder: Path | None = None,
    measured: Callable[[CopyDriver], Table] = measure,
) -> SupervisedThread | None:
    """Give the device its table: the kept one, or one that is measured by a thread and then kept.

    Nothing is raised: without a table the usual way is taken.

    Args:
        device: whose table is replaced.
        folder: where tables are kept. None: in the user's cache folder.
        measured: measures a device.

    Returns:
        The thread; None: there is nothing to measure.
    """
    name, mover = device.driver.name, device.driver.mover
    if mover is None:
        return None
    try:
        path = file_of(folder or cache_folder(), name, mover)
    except RuntimeError as error:  # there is no home folder
        logger.warning("the calibration of %s can't be kept: %s", name.model, error)
        return None
    kept = load(path, name, mover)
    if kept is not None:
        device.use_table(kept)
        return None

    def run() -> None:
        sleep_precisely()
        try:
            found = measured(device.driver)
        except CUDAError as error:
            logger.warning("%s was not calibrated: %s", name.model, error)
            return
        device.use_table(found)
        save(path, name, mover, found)

    thread = SupervisedThread("raykv-cuda-calibration", run, OnFailure.GIVE_UP)
    thread.revive()
    return thread


def _give_up(error: CUDAError) -> NoReturn:
    """Only its own memory is at stake."""
    raise error


def _every_other(page_bytes: int, num_runs: int) -> BatchRows:
    """Every other page of the KV cache, in random order; in the pool one behind the other."""
    order = np.random.default_rng(page_bytes).permutation(num_runs).astype(np.int64)
    size = np.full(num_runs, page_bytes, np.int64)
    return BatchRows(2 * page_bytes * order, np.cumsum(size) - size, size, np.zeros_like(size))


def _rate(
    device: Device,
    direction: Direction,
    rows: BatchRows,
    place: Place,
    route: Route,
    clock: Callable[[], float],
) -> float:
    """Bytes per second, the best of some repeats; the first one also compiles the kernel.

    Of parts that follow each other, as those of a job do.
    """
    device.use_table(always(route))
    best = 0.0
    for _ in range(1 + REPEATS):
        began = clock()
        with closing(device.copy_each(direction, [rows] * PARTS, place, StopSign())) as answers:
            assert all(answers), "nobody has cancelled it"
        best = max(best, PARTS * rows.num_bytes / max(clock() - began, 1e-9))
    return best
