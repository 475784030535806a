"""`copy_cuda`: GB/s of copies between a GPU's KV cache and the page-locked pool.

Each case copies all pages of one size, shuffled in the KV cache and one after the other in the
pool, some chunks at a time, as a NodeActor does, beside one `cudaMemcpyAsync` of as many bytes
between the same two. Then whole jobs: see `copy_jobs`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import NoReturn, Protocol

import numpy as np
import psutil

from raykv.base.errors import SettingError
from raykv.base.ids import Direction
from raykv.base.threads import sleep_precisely
from raykv.copy.cuda.backend import CUDABackend
from raykv.copy.cuda.driver import CopyDriver, CUDADriver
from raykv.copy.cuda.lane import Device, Place
from raykv.copy.engine import SPAN_BYTES, StopSign
from raykv.copy.plan import CopyRuns
from raykv.lab.bench.report import Options, Result, alternate, short
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.cuda.driver import CUDAError
from tests.bench import copy_jobs
from tests.bench.copy_jobs import BIG, JobCase

KIB, MIB = 1 << 10, 1 << 20
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
COUNTS = (100, 1000, 10_000, 100_000)
QUICK_PAGES, QUICK_COUNTS = (4 * KIB, 64 * KIB), (10, 100)
SIDE_BYTES, LEAST_SIDE_BYTES = 2048 * MIB, 16 * MIB
MOST_OF_FREE_MEMORY = 4
"""The pool takes at most one such part of it."""

LEAST_LARGE, LARGE_PAGE = 0.90, 64 * KIB
LEAST_SMALL, SMALL_PAGE = 0.60, 16 * KIB
JUDGED_FROM_BYTES = 16 * MIB
"""A copy of less is over before it has reached its speed, whatever copies it."""

OURS = "RayKV"


@dataclass(frozen=True)
class DeviceCase:
    """Pages of one size, one way."""

    page_bytes: int
    num_pages: int
    direction: Direction

    @property
    def name(self) -> str:
        verb = self.direction.name.lower()
        return f"{verb}, {self.num_pages:,} pages of {self.page_bytes // KIB} KiB"

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_pages


def cases(options: Options, side_bytes: int) -> Iterator[DeviceCase]:
    """All that fit into memory."""
    pages, counts = (QUICK_PAGES, QUICK_COUNTS) if options.quick else (PAGES, COUNTS)
    for page, count, direction in product(pages, counts, Direction):
        if page * count <= side_bytes:
            yield DeviceCase(page, count, direction)


class MeasuredDriver(CopyDriver, Protocol):
    """A driver with the device's name, and with memory to copy to."""

    name: str

    def allocate_host(self, num_bytes: int) -> int:
        """Page-locked memory of the host."""

    def free_host(self, address: int) -> None:
        """Free memory of `allocate_host`."""


class MeasuredGPU(CUDADriver):
    """See `MeasuredDriver`."""

    def __init__(self, device_uuid: str) -> None:
        super().__init__(device_uuid)
        name = self._call("cudaGetDeviceProperties", self._device).name
        self.name = name.split(b"\0")[0].decode() if isinstance(name, bytes) else str(name)

    def allocate_host(self, num_bytes: int) -> int:
        return int(self._call("cudaMallocHost", num_bytes))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)


class DeviceSides:
    """A KV cache on a device, a page-locked pool of the same size, and copies between them."""

    def __init__(self, driver: MeasuredDriver, side_bytes: int) -> None:
        """Take the memory, less if the device has not as much.

        Raises:
            CUDAError: not even `LEAST_SIDE_BYTES` can be had.
        """
        self.name = driver.name
        self.driver: CopyDriver = driver
        with ExitStack() as stack:
            self.num_bytes, self.kv = _as_much_as_there_is(driver.allocate, side_bytes)
            stack.callback(driver.free, self.kv)
            self.pool = driver.allocate_host(self.num_bytes)
            stack.callback(driver.free_host, self.pool)
            place = Place(self.kv, self.pool, None)

            self.device = Device(driver, on_lost=_give_up)
            stack.callback(self.device.close)
            self.backend = CUDABackend(self.device, place)
            self.stream = driver.make_stream(Direction.STORE)
            stack.callback(driver.drop_stream, self.stream)
            self.event = driver.make_event()
            stack.callback(driver.drop_event, self.event)
            self._close = stack.pop_all().close

    def close(self) -> None:
        """Give the memory back."""
        self._close()

    def runs(self, case: DeviceCase) -> CopyRuns:
        """Pages anywhere in the KV cache, chunk by chunk in the pool."""
        order = np.random.default_rng(case.page_bytes).permutation(case.num_pages)
        size = np.full(case.num_pages, case.page_bytes, np.int64)
        kv = order.astype(np.int64) * case.page_bytes
        return CopyRuns(kv, np.cumsum(size) - size, size)

    def ours(self, case: DeviceCase, runs: CopyRuns) -> float:
        """GB/s with a call for some chunks each, as a NodeActor does."""
        at_once = max(1, SPAN_BYTES // case.page_bytes)

        def copy() -> None:
            starts = range(0, case.num_pages, at_once)
            parts = (runs.some(slice(first, first + at_once)) for first in starts)
            with closing(self.backend.copy_each(case.direction, parts, StopSign())) as answers:
                assert all(answers), "it was not cancelled"

        return self._speed(case, copy)

    def big(self, case: DeviceCase | JobCase, pool: int | None = None) -> float:
        """GB/s of one copy of as many bytes, with this pool or the one at an address."""
        pool = self.pool if pool is None else pool
        sides = (pool, self.kv) if case.direction is Direction.STORE else (self.kv, pool)

        def copy() -> None:
            self.driver.copy_one(self.stream, *sides, case.num_bytes)
            self.driver.record(self.event, self.stream)
            while not self.driver.is_done(self.event):
                time.sleep(0)

        return self._speed(case, copy)

    @staticmethod
    def _speed(case: DeviceCase | JobCase, copy: Callable[[], object]) -> float:
        began = time.perf_counter()
        copy()
        return case.num_bytes / (time.perf_counter() - began) / 1e9


def _as_much_as_there_is(allocate: Callable[[int], int], num_bytes: int) -> tuple[int, int]:
    """Bytes, and where they are."""
    while True:
        try:
            return num_bytes, allocate(num_bytes)
        except CUDAError:
            if num_bytes // 2 < LEAST_SIDE_BYTES:
                raise
            num_bytes //= 2


def _give_up(error: CUDAError) -> NoReturn:
    """The benchmark ends, and with it the process: nothing uses its memory again."""
    raise error


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: there is no GPU that this process could use.
    """
    try:
        uuids = cuda_driver.load().devices()
        if not uuids:
            raise CUDAError("this process sees no GPU: see CUDA_VISIBLE_DEVICES")
        driver = MeasuredGPU(uuids[0])
    except CUDAError as error:
        raise SettingError(f"copy_cuda can't be measured here: {error}") from error
    # As a NodeActor's copy threads do.
    sleep_precisely()
    sides = DeviceSides(driver, side_bytes(options))
    try:
        result = measure(sides, options)
        options.keep(result)
        copy_jobs.measure(sides, options, copy_jobs.page_locking(), result)
        return result
    finally:
        sides.close()


def side_bytes(options: Options) -> int:
    """Bytes of KV cache and pool, each, if there is as much."""
    if options.quick:
        return LEAST_SIDE_BYTES
    room: int = psutil.virtual_memory().available // MOST_OF_FREE_MEMORY
    return max(LEAST_SIDE_BYTES, min(SIDE_BYTES, room) // MIB * MIB)


def measure(sides: DeviceSides, options: Options) -> Result:
    """All cases on a device, and the verdicts."""
    result = Result("copy_cuda", f"GB/s between the KV cache of a {sides.name} and the pool")
    all_cases = list(cases(options, sides.num_bytes))
    for case in all_cases:
        runs = sides.runs(case)
        subjects = {OURS: partial(sides.ours, case, runs), BIG: partial(sides.big, case)}
        result.rows += alternate(case.name, "GB/s", subjects, options.repeats_or(11))
        options.keep(result)
    large = [case for case in all_cases if case.page_bytes >= LARGE_PAGE]
    small = [case for case in all_cases if case.page_bytes == SMALL_PAGE]
    text = "at least {} of one large copy, pages {}, 16 MiB and more together"
    _judge_speed(result, large, text.format(LEAST_LARGE, "from 64 KiB"), LEAST_LARGE)
    _judge_speed(result, small, text.format(LEAST_SMALL, "of 16 KiB"), LEAST_SMALL)
    result.notes.append(
        f"KV cache and pool have {sides.num_bytes // MIB:,} MiB each; larger cases are left out."
    )
    return result


def _judge_speed(result: Result, some: list[DeviceCase], budget: str, limit: float) -> None:
    """Judge the page size that is worst, each by the median of its cases."""
    by_page: dict[int, list[float]] = {}
    for case in some:
        if case.num_bytes >= JUDGED_FROM_BYTES:
            ratio = result.ratio(case.name, OURS, BIG)
            by_page.setdefault(case.page_bytes, []).append(ratio)
    if not by_page:
        result.notes.append(f"Not judged, for want of such a case: {budget}.")
        return
    least = min(median(ratios) for ratios in by_page.values())
    result.at_least(limit, least, budget)
    worst = min(by_page, key=lambda page: median(by_page[page]))
    result.notes.append(f"The least is {short(least)}, with pages of {worst // KIB} KiB.")
