"""`copy`: what the copy between a KV cache and the pool reaches, in GB/s of bytes copied.

Between two prefaulted memfds, as a node has them, larger together than the last-level cache. Each
measurement copies one slice, and the next one copies the next slice: short ones, for other programs
on the machine change its speed by the second. RayKV plans one job and copies it some chunks at a
time, as a NodeActor does; a memcpy copies the slice as one run; torch takes one row for each page.
Contiguous blocks follow one another in the KV cache, scattered ones are shuffled all over it;
in the pool they always lie in their chunk's order.

libc's memmove streams only what is larger than most of the cache: first it is measured over all.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from statistics import median
from types import ModuleType

import numpy as np
import numpy.typing as npt
import psutil

from raykv.base.geometry import MAX_SLAB_BYTES
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.engine import HOST_SPAN_BYTES, StopSign
from raykv.copy.plan import JobPlan, Planner
from raykv.copy.rows import CPUBackend, RowCopier, Side, by_memmove
from raykv.lab.bench.named_jobs import key_of, named_job
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict, alternate, short
from raykv.memory.handles import MEMFD
from raykv.memory.region import Region
from raykv.memory.words import CancelWords
from raykv.protocol.copies import CopyJob
from raykv.protocol.worker import KVLayout, TensorLayout

LEAST_OF_MEMCPY = 0.85
"""Of the best memcpy of one thread, for pages from `BUDGET_PAGE_BYTES`."""

BUDGET_PAGE_BYTES = 64 << 10

LEAST_OF_TORCH = 1.0

KIB = 1 << 10
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
QUICK_PAGES = (4 * KIB, 64 * KIB)
SIDE_BYTES = 384 << 20
SLICE_BYTES = 48 << 20
MOST_OF_FREE_MEMORY = 4
"""Both sides together take at most one such part of it."""

BLOCKS_PER_CHUNK = 8
CHUNK_BYTES = 2 << 20
"""With fewer than `BLOCKS_PER_CHUNK` pages in it a chunk is larger."""


JOB_ID = 1
OURS, TORCH = "RayKV", "torch"
MEMMOVE, COPYTO, STREAMED = "memmove", "np.copyto", "one run of RayKV's kernel"

Indices = npt.NDArray[np.int64]
Measure = Callable[[], float]


def _clock(num_threads: int) -> Callable[[], float]:
    """A clock: one thread's own time, which leaves out what other programs take of the cores."""
    return time.thread_time if num_threads == 1 else time.perf_counter


def thread_text(num_threads: int) -> str:
    return f"{num_threads} thread{'s' if num_threads > 1 else ''}"


@dataclass(frozen=True)
class Case:
    """One kind of copy."""

    page_bytes: int
    direction: Direction
    is_scattered: bool
    num_threads: int

    @property
    def name(self) -> str:
        where = "scattered" if self.is_scattered else "contiguous"
        verb = self.direction.name.lower()
        return f"{self.page_bytes // KIB} KiB, {verb}, {where}, {thread_text(self.num_threads)}"


class Sides:
    """A KV cache and a pool of the same size, and how to copy all of one to the other."""

    def __init__(self, num_bytes: int, slice_bytes: int, rows: RowCopier) -> None:
        self.num_bytes = num_bytes
        self.kv = Region.anonymous(num_bytes, "bench-kv")
        self.pool = Region.anonymous(num_bytes, "bench-pool")
        self.rows = rows
        self.words = CancelWords.create()
        self.stop = StopSign([self.words.word(JOB_ID), self.words.word(JOB_ID + 1)])
        self.slice_bytes = slice_bytes
        self.num_slices = num_bytes // self.slice_bytes
        self._next_slice = 0
        self._threads = ThreadPoolExecutor(2)
        for side in (self.kv, self.pool):
            side.prefault(lambda _done: True)
            np.ctypeslib.as_array(side.array())[:] = 1

    def close(self) -> None:
        self._threads.shutdown()
        for region in (self.kv, self.pool, self.words.region):
            region.close()

    def speed(self, copy: Callable[[int], object], num_threads: int) -> float:
        """GB/s of a call that copies the slice whose number it gets."""
        clock = _clock(num_threads)
        number = self._next_slice
        self._next_slice = (number + 1) % self.num_slices
        started = clock()
        copy(number)
        return self.slice_bytes / (clock() - started) / 1e9

    def share(self, copy: Callable[[int, int], object], count: int, num_threads: int) -> None:
        """Copy `count` things, each thread its share [first, last)."""
        if num_threads == 1:
            copy(0, count)
            return
        bounds = [count * i // num_threads for i in range(num_threads + 1)]
        list(self._threads.map(lambda share: copy(*share), pairwise(bounds)))

    def big_copies(self) -> dict[str, Callable[[int, int], object]]:
        """Ways to copy the bytes [first, last) as one run."""
        to, source = (np.ctypeslib.as_array(side.array()) for side in (self.pool, self.kv))

        def streamed(first: int, last: int) -> None:
            where, size = np.array([first]), np.array([last - first])
            pool, kv = Side(self.pool.address, where), Side(self.kv.address, where)
            self.rows.copy(pool, kv, size, self.stop)

        ways: dict[str, Callable[[int, int], object]] = {
            MEMMOVE: lambda first, last: ctypes.memmove(
                self.pool.address + first, self.kv.address + first, last - first
            ),
            COPYTO: lambda first, last: np.copyto(to[first:last], source[first:last]),
        }
        if self.rows.copy is not by_memmove:
            ways[STREAMED] = streamed
        return ways

    def whole(self, copy: Callable[[int, int], object], num_threads: int) -> float:
        """GB/s of one of `big_copies` over all bytes."""
        clock = _clock(num_threads)
        started = clock()
        self.share(copy, self.num_bytes, num_threads)
        return self.num_bytes / (clock() - started) / 1e9

    def sliced(self, copy: Callable[[int, int], object], num_threads: int) -> float:
        """GB/s of one of `big_copies` over a slice."""

        def copy_slice(number: int) -> None:
            start = number * self.slice_bytes
            self.share(
                lambda first, last: copy(start + first, start + last), self.slice_bytes, num_threads
            )

        return self.speed(copy_slice, num_threads)


class PagedCopy:
    """All pages of one size, contiguous or scattered, between two sides."""

    def __init__(self, sides: Sides, case: Case) -> None:
        self._sides = sides
        self._case = case
        page = case.page_bytes
        num_layers = max(1, CHUNK_BYTES // (BLOCKS_PER_CHUNK * page))
        self._num_chunks = sides.slice_bytes // (num_layers * BLOCKS_PER_CHUNK * page)
        assert self._num_chunks > 0, (sides.slice_bytes, page)
        num_blocks = self._num_chunks * BLOCKS_PER_CHUNK * sides.num_slices
        blocks = np.arange(num_blocks)
        if case.is_scattered:
            blocks = np.random.default_rng(page).permutation(num_blocks)
        self._blocks: Indices = blocks.reshape(sides.num_slices, -1)
        self._layers: Indices = np.arange(num_layers) * num_blocks
        tensors = [TensorLayout(int(at) * page, num_blocks, page, page) for at in self._layers]
        layout = KVLayout(
            MEMFD, sides.num_bytes, BLOCKS_PER_CHUNK, tensors, [0], [list(range(num_layers))]
        )
        self._planner = Planner(layout, 0)
        self._slot_pages = num_layers * BLOCKS_PER_CHUNK * page // SLOT_ALIGNMENT
        self._backend = CPUBackend(sides.kv.address, sides.pool.address, sides.rows)
        self._jobs = [self._make_job(number) for number in range(sides.num_slices)]

    def _make_job(self, number: int) -> CopyJob:
        keys = [key_of(at) for at in range(self._num_chunks)]
        return named_job(JOB_ID, self._case.direction, keys, self._blocks[number].tolist())

    def ours(self) -> float:
        """RayKV, planning and all."""
        return self._sides.speed(self._plan_and_copy, self._case.num_threads)

    def _plan_and_copy(self, number: int) -> None:
        first_slot = number * self._num_chunks * self._slot_pages
        copy = partial(self._copy_chunks, self._planner.plan(self._jobs[number]), first_slot)
        self._sides.share(copy, self._num_chunks, self._case.num_threads)

    def _copy_chunks(self, plan: JobPlan, first_slot: int, first: int, last: int) -> None:
        """As the NodeActor does: one call for some chunks."""
        at_once = max(1, HOST_SPAN_BYTES // plan.bytes_of(0))
        for begin in range(first, last, at_once):
            chunks = range(begin, min(last, begin + at_once))
            slots = [Slot(first_slot + at * self._slot_pages) for at in chunks]
            rows = plan.runs(chunks, slots, MAX_SLAB_BYTES)
            done = self._backend.copy(self._case.direction, rows, self._sides.stop)
            assert done, "it was not cancelled"

    def torch(self, torch: ModuleType) -> Measure:
        """torch over the same pages in the same order, as rows of 64-bit numbers.

        Of bytes it is slower still.
        """
        chunks = self._blocks.reshape(-1, self._num_chunks, 1, BLOCKS_PER_CHUNK)
        rows = torch.from_numpy(
            (chunks + self._layers[:, None]).reshape(self._sides.num_slices, -1)
        )
        page_words = self._case.page_bytes // 8
        kv, pool = (
            torch.frombuffer(side.array(), dtype=torch.int64)
            for side in (self._sides.kv, self._sides.pool)
        )
        kv, pool = kv.view(-1, page_words), pool.view(len(rows), -1, page_words)

        def copy(number: int) -> None:
            if self._case.direction is Direction.STORE:
                torch.index_select(kv, 0, rows[number], out=pool[number])
            else:
                kv.index_copy_(0, rows[number], pool[number])

        def measure() -> float:
            torch.set_num_threads(self._case.num_threads)
            return self._sides.speed(copy, self._case.num_threads)

        return measure


def run(options: Options) -> Result:
    """See the module's docstring, and that of `raykv.lab.bench.copy_cuda`.

    Raises:
        SettingError: there is no such device here.
    """
    if options.is_on_gpu:
        from raykv.lab.bench.copy_cuda import run as run_on_gpu

        return run_on_gpu(options)
    rows = RowCopier()
    rows.load()
    num_bytes = _side_bytes(options)
    sides = Sides(num_bytes, min(num_bytes, SLICE_BYTES), rows)
    torch = _torch()
    num_threads = torch.get_num_threads() if torch else 0
    result = Result("copy", BENCHMARKS["copy"].summary)
    try:
        for threads in (1, 2):
            big = {
                name: partial(sides.whole, copy, threads)
                for name, copy in sides.big_copies().items()
            }
            name = f"{sides.num_bytes >> 20} MiB at once, {thread_text(threads)}"
            result.rows += alternate(name, "GB/s", big, options.repeats_or(11))
        for case in cases(options):
            subjects = _subjects(case, sides, torch)
            result.rows += alternate(case.name, "GB/s", subjects, options.repeats_or(25))
    finally:
        sides.close()
        if torch:
            torch.set_num_threads(num_threads)
    _judge(result, options)
    return result


def _side_bytes(options: Options) -> int:
    if options.quick:
        return BLOCKS_PER_CHUNK * max(PAGES)
    room: int = psutil.virtual_memory().available // MOST_OF_FREE_MEMORY // 2
    return max(SLICE_BYTES, min(SIDE_BYTES, room) // SLICE_BYTES * SLICE_BYTES)


def _torch() -> ModuleType | None:
    """The module, where vLLM has brought it along."""
    try:
        import torch
    except ImportError:
        return None
    module: ModuleType = torch
    return module


def cases(options: Options) -> Iterator[Case]:
    """All kinds of copies; few when it is to be quick."""
    pages = QUICK_PAGES if options.quick else PAGES
    for page, scattered, threads in product(pages, (False, True), (1, 2)):
        for direction in (Direction.STORE, Direction.LOAD):
            yield Case(page, direction, scattered, threads)


def _subjects(case: Case, sides: Sides, torch: ModuleType | None) -> dict[str, Measure]:
    paged = PagedCopy(sides, case)
    subjects: dict[str, Measure] = {OURS: paged.ours}
    for name, copy in sides.big_copies().items():
        if name != COPYTO:  # as fast as memmove
            subjects[name] = partial(sides.sliced, copy, case.num_threads)
    if torch:
        subjects[TORCH] = paged.torch(torch)
    return subjects


def _judge(result: Result, options: Options) -> None:
    of_memcpy, of_torch = [], []
    by_name = {(row.case, row.subject): row for row in result.rows}
    for case in cases(options):
        ours = by_name[case.name, OURS]
        if case.num_threads == 1 and case.page_bytes >= BUDGET_PAGE_BYTES:
            ways = [by_name.get((case.name, name)) for name in (MEMMOVE, STREAMED)]
            best = max(filter(None, ways), key=lambda row: row.median)
            of_memcpy.append((case.page_bytes, ours, best))
        if (case.name, TORCH) in by_name:
            of_torch.append((case.page_bytes, ours, by_name[case.name, TORCH]))
    text = f"at least {LEAST_OF_MEMCPY} of the best memcpy of one thread, pages from 64 KiB"
    _judge_least(result, text, of_memcpy, LEAST_OF_MEMCPY)
    if of_torch:
        _judge_least(result, "never below torch, at no page size", of_torch, LEAST_OF_TORCH)
    else:
        result.notes.append("There is no torch here to compare with.")


def _judge_least(
    result: Result, budget: str, pairs: list[tuple[int, Row, Row]], limit: float
) -> None:
    """Judge the page size that is worst; its ratio is the median of its cases'."""
    by_page: dict[int, list[float]] = {}
    for page, ours, other in pairs:
        by_page.setdefault(page, []).append(ours.ratio_to(other))
    least = min(median(ratios) for ratios in by_page.values())
    result.verdicts.append(Verdict(budget, least, limit, is_most=False))
    ratio, name, of = min((ours.ratio_to(it), ours.case, it.subject) for _, ours, it in pairs)
    result.notes.append(f"The least of a single case is {short(ratio)} of {of}: {name}.")
