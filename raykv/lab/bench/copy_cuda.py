"""`copy --device cuda`: what the copy between a GPU's KV cache and the page-locked pool reaches.

Each case copies all pages of one size, shuffled in the KV cache and one after the other in the
pool, beside one `cudaMemcpyAsync` of as many bytes between the same two. RayKV does it some chunks
at a time, as a NodeActor does, the next ones on their way before the end of those is awaited; also
chunk by chunk, and in one call, which shows what those ends cost. Small pages are copied both ways
too, whichever is usual. Then what a step costs the worker's thread (the record of
its event), what a submission costs a copy thread, and how much longer products of matrices in
another process take beside copies. Whole jobs, as a NodeActor carries them out, are in
`copy_jobs`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
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
from raykv.copy.cuda.batches import CUT_BYTES, ChooseRoute, Route, cut, direct, usual_route
from raykv.copy.cuda.driver import CopyDriver, CUDADriver, SourceOrder
from raykv.copy.cuda.lane import Device, Place
from raykv.copy.engine import SPAN_BYTES, StopSign
from raykv.copy.plan import CopyRuns
from raykv.lab.bench import copy_jobs
from raykv.lab.bench.copy_jobs import BIG
from raykv.lab.bench.matrices import MatrixProcess
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Verdict, alternate, short
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.cuda.driver import CUDAError

KIB, MIB = 1 << 10, 1 << 20
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB, 4096 * KIB)
COUNTS = (100, 1000, 10_000, 100_000)
QUICK_PAGES, QUICK_COUNTS = (4 * KIB, 64 * KIB), (10, 100)
CHUNK_BYTES = 2 * MIB
COPIES_S = 600.0
SIDE_BYTES, LEAST_SIDE_BYTES = 2048 * MIB, 16 * MIB
MOST_OF_FREE_MEMORY = 4
"""The pool takes at most one such part of it."""

GATHERED_UP_TO = 64 * KIB
LEAST_LARGE, LARGE_PAGE = 0.90, 64 * KIB
LEAST_SMALL, SMALL_PAGE = 0.60, 16 * KIB
JUDGED_FROM_BYTES = 16 * MIB
"""A copy of less is over before it has reached its speed, whatever copies it."""

MOST_WORKER_US = 100.0
MOST_SLOWER = 1.02
SUBMITTED = 1000

OURS = "RayKV"
BY_CHUNK, IN_ONE_CALL = "RayKV, chunk by chunk", "RayKV, in one call"
ALONE = "alone"
ROUTES = {Route.BATCH: "one by one", Route.GATHER: "gathered"}
WORKER, SUBMISSION = "worker's thread, one step", f"a copy thread, {SUBMITTED:,} pages of 16 KiB"
MATRICES = "product of matrices"


@dataclass(frozen=True)
class DeviceCase:
    """So many pages of one size, one way."""

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


class Work(Protocol):
    """What a model computes beside the copies."""

    def __call__(self) -> float:
        """Do some of it, and wait for it; milliseconds."""


def cases(options: Options, side_bytes: int) -> Iterator[DeviceCase]:
    """All that fit into memory."""
    pages, counts = (QUICK_PAGES, QUICK_COUNTS) if options.quick else (PAGES, COUNTS)
    for page, count, direction in product(pages, counts, Direction):
        if page * count <= side_bytes:
            yield DeviceCase(page, count, direction)


class MeasuredDriver(CopyDriver, Protocol):
    """What the benchmark asks of a device besides: its model, and memory to copy to."""

    name: str

    def allocate_host(self, num_bytes: int) -> int:
        """Page-locked memory of the host."""

    def free_host(self, address: int) -> None:
        """Give back what `allocate_host` gave."""


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
    """A KV cache on a device and a page-locked pool of the same size, and what copies between.

    `backend` chooses the usual route of each batch; `by_route` has one that takes always the same.
    """

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

            def device(choose: ChooseRoute) -> Device:
                made = Device(driver, on_lost=_give_up, choose=choose)
                stack.callback(made.close)
                return made

            self.device = device(usual_route)
            self.backend = CUDABackend(self.device, place)
            self.by_route = {
                route: CUDABackend(device(partial(_always, route)), place) for route in Route
            }
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

    def ours(self, case: DeviceCase, runs: CopyRuns, route: Route | None = None) -> float:
        """GB/s with a call for some chunks each, as a NodeActor does. None: the usual routes."""
        backend = self.by_route[route] if route else self.backend
        at_once = max(1, SPAN_BYTES // case.page_bytes)

        def copy() -> None:
            starts = range(0, case.num_pages, at_once)
            parts = (runs.some(slice(first, first + at_once)) for first in starts)
            with closing(backend.copy_each(case.direction, parts, StopSign())) as answers:
                assert all(answers), "it was not cancelled"

        return self._speed(case, copy)

    def in_one_call(self, case: DeviceCase, runs: CopyRuns) -> float:
        """GB/s of all pages in one call."""
        return self._speed(case, partial(self._copy, case, runs))

    def by_chunk(self, case: DeviceCase, runs: CopyRuns) -> float:
        """GB/s with a call for each chunk."""
        in_chunk = max(1, CHUNK_BYTES // case.page_bytes)

        def copy() -> None:
            for first in range(0, case.num_pages, in_chunk):
                self._copy(case, runs.some(slice(first, first + in_chunk)))

        return self._speed(case, copy)

    def big(self, case: copy_jobs.Amount, pool: int | None = None) -> float:
        """GB/s of one copy of as many bytes, with this pool or another one at an address."""
        pool = self.pool if pool is None else pool
        sides = (pool, self.kv) if case.direction is Direction.STORE else (self.kv, pool)

        def copy() -> None:
            self.driver.copy_one(self.stream, *sides, case.num_bytes)
            self.finish()

        return self._speed(case, copy)

    def finish(self) -> None:
        """Wait for the benchmark's own stream."""
        self.driver.record(self.event, self.stream)
        while not self.driver.is_done(self.event):
            time.sleep(0)

    def worker_us(self) -> float:
        """What a step costs vLLM's thread on top of a step without a GPU, in microseconds."""
        began = time.perf_counter()
        self.driver.record(self.event, self.stream)
        took = time.perf_counter() - began
        self.finish()
        return took * 1e6

    def submission_us(self) -> float:
        """What the submission of a batch costs a copy thread, in microseconds."""
        page = min(SMALL_PAGE, self.num_bytes // SUBMITTED // KIB * KIB)
        runs = self.runs(DeviceCase(page, SUBMITTED, Direction.STORE))
        copies = direct(cut(runs, CUT_BYTES), Direction.STORE, self.kv, self.pool)
        began = time.perf_counter()
        self.driver.copy_batch(self.stream, copies, SourceOrder.STREAM)
        took = time.perf_counter() - began
        self.finish()
        return took * 1e6

    @contextmanager
    def copying(self, direction: Direction, page_bytes: int) -> Iterator[None]:
        """All pages, again and again, by another thread."""
        case = DeviceCase(page_bytes, self.num_bytes // page_bytes, direction)
        runs, is_over = self.runs(case), threading.Event()

        def copy() -> None:
            while not is_over.is_set():
                self._copy(case, runs)

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join(COPIES_S)

    def _copy(self, case: DeviceCase, runs: CopyRuns) -> None:
        with closing(self.backend.copy_each(case.direction, [runs], StopSign())) as answers:
            assert all(answers), "it was not cancelled"

    @staticmethod
    def _speed(case: copy_jobs.Amount, copy: Callable[[], object]) -> float:
        began = time.perf_counter()
        copy()
        return case.num_bytes / (time.perf_counter() - began) / 1e9


def _as_much_as_there_is(
    allocate: Callable[[int], int], num_bytes: int, least: int = LEAST_SIDE_BYTES
) -> tuple[int, int]:
    """Bytes, and where they are."""
    while True:
        try:
            return num_bytes, allocate(num_bytes)
        except CUDAError:
            if num_bytes // 2 < least:
                raise
            num_bytes //= 2


def _always(route: Route, direction: Direction, rows: CopyRuns) -> Route:
    """A `ChooseRoute` that measures one route."""
    return route


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
        raise SettingError(f"--device cuda can't be measured here: {error}") from error
    # As a NodeActor's copy threads do.
    sleep_precisely()
    with ExitStack() as stack:
        sides = DeviceSides(driver, side_bytes(options))
        stack.callback(sides.close)
        work = stack.enter_context(MatrixProcess()) if has_torch_for_cuda() else None
        return measure(sides, options, work, copy_jobs.page_locking())


def side_bytes(options: Options) -> int:
    """Bytes of KV cache and pool, each, if there is as much."""
    if options.quick:
        return LEAST_SIDE_BYTES
    room: int = psutil.virtual_memory().available // MOST_OF_FREE_MEMORY
    return max(LEAST_SIDE_BYTES, min(SIDE_BYTES, room) // MIB * MIB)


def measure(
    sides: DeviceSides, options: Options, work: Work | None, lock: copy_jobs.Lock
) -> Result:
    """All cases on a device, and the verdicts; `lock` page-locks what jobs copy to and from."""
    result = Result("copy", f"{BENCHMARKS['copy'].summary}, on a {sides.name}")
    all_cases = list(cases(options, sides.num_bytes))
    for case in all_cases:
        subjects = _subjects(sides, case)
        result.rows += alternate(case.name, "GB/s", subjects, options.repeats_or(11))
        options.keep(result)
    costs = {WORKER: sides.worker_us, SUBMISSION: sides.submission_us}
    for name, cost in costs.items():
        result.rows += alternate(name, "µs", {OURS: cost}, options.repeats_or(101), 3)
    if work is not None:
        result.rows += alternate(MATRICES, "ms", _beside(sides, work), options.repeats_or(21))
    _judge(result, all_cases, has_work=work is not None)
    options.keep(result)
    copy_jobs.measure(sides, options, lock, result)
    result.notes.append(
        f"KV cache and pool have {sides.num_bytes // MIB:,} MiB each; larger cases are left out."
    )
    return result


def _subjects(sides: DeviceSides, case: DeviceCase) -> dict[str, Callable[[], float]]:
    runs = sides.runs(case)
    subjects: dict[str, Callable[[], float]] = {
        OURS: partial(sides.ours, case, runs),
        BY_CHUNK: partial(sides.by_chunk, case, runs),
        IN_ONE_CALL: partial(sides.in_one_call, case, runs),
        BIG: partial(sides.big, case),
    }
    if case.page_bytes <= GATHERED_UP_TO and sides.driver.mover is not None:
        for route, name in ROUTES.items():
            subjects[name] = partial(sides.ours, case, runs, route)
    return subjects


def _beside(sides: DeviceSides, work: Work) -> dict[str, Callable[[], float]]:
    def beside(direction: Direction, page_bytes: int) -> float:
        with sides.copying(direction, page_bytes):
            return work()

    return {
        ALONE: work,
        "beside stores of 64 KiB": partial(beside, Direction.STORE, LARGE_PAGE),
        "beside loads of 64 KiB": partial(beside, Direction.LOAD, LARGE_PAGE),
        "beside loads of 4 KiB": partial(beside, Direction.LOAD, min(PAGES)),
    }


def _judge(result: Result, all_cases: list[DeviceCase], *, has_work: bool) -> None:
    large = [case for case in all_cases if case.page_bytes >= LARGE_PAGE]
    small = [case for case in all_cases if case.page_bytes == SMALL_PAGE]
    text = "at least {} of one large copy, pages {}, 16 MiB and more together"
    _judge_speed(result, large, text.format(LEAST_LARGE, "from 64 KiB"), LEAST_LARGE)
    _judge_speed(result, small, text.format(LEAST_SMALL, "of 16 KiB"), LEAST_SMALL)
    worker = result.row(WORKER, OURS).median
    budget = "under 100 µs a step on the worker's thread, the record of its event"
    result.verdicts.append(Verdict(budget, worker, MOST_WORKER_US))
    if not has_work:
        result.notes.append("There is no torch for CUDA here to multiply matrices with.")
        return
    rows = [row for row in result.rows if row.case == MATRICES]
    alone = next(row for row in rows if row.subject == ALONE)
    slowest = max(row.ratio_to(alone) for row in rows)
    budget = "a product of matrices takes at most 1.02 times as long beside copies"
    result.verdicts.append(Verdict(budget, slowest, MOST_SLOWER))


def _judge_speed(result: Result, some: list[DeviceCase], budget: str, limit: float) -> None:
    """Judge the page size that is worst, each by the median of its cases."""
    by_page: dict[int, list[float]] = {}
    for case in some:
        if case.num_bytes >= JUDGED_FROM_BYTES:
            ours, big = (result.row(case.name, name) for name in (OURS, BIG))
            by_page.setdefault(case.page_bytes, []).append(ours.ratio_to(big))
    if not by_page:
        result.notes.append(f"Not judged, for want of such a case: {budget}.")
        return
    least = min(median(ratios) for ratios in by_page.values())
    result.verdicts.append(Verdict(budget, least, limit, is_most=False))
    worst = min(by_page, key=lambda page: median(by_page[page]))
    result.notes.append(f"The least is {short(least)}, with pages of {worst // KIB} KiB.")


def has_torch_for_cuda() -> bool:
    """Whether matrices can be multiplied on the GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
