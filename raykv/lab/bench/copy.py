"""`copy`: copies between a KV cache and the pool, in GB/s of one thread.

Both are prefaulted memfds, as on a node, larger together than the last-level cache. Each
measurement copies the next slice. Slices are small, since other programs change the machine's speed
by the second. RayKV plans one job and copies it some chunks at a time, as a NodeActor does; a
memcpy copies the slice as one run. Blocks are scattered in the KV cache and contiguous in the pool.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median

import numpy as np
import psutil

from raykv.base.geometry import MAX_SLAB_BYTES
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.engine import HOST_SPAN_BYTES, StopSign
from raykv.copy.plan import Planner
from raykv.copy.rows import CPUBackend, RowCopier, Side, by_memmove
from raykv.lab.bench.named_jobs import key_of, named_job
from raykv.lab.bench.report import Options, Result, alternate, short
from raykv.memory.handles import MEMFD
from raykv.memory.region import Region
from raykv.memory.words import CancelWords
from raykv.protocol.worker import KVLayout, TensorLayout

LEAST_OF_MEMCPY = 0.85
"""Share of the best memcpy of one thread, for pages from `BUDGET_PAGE_BYTES`."""

BUDGET_PAGE_BYTES = 64 << 10

KIB = 1 << 10
PAGES = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB)
QUICK_PAGES = (4 * KIB, 64 * KIB)
SIDE_BYTES = 384 << 20
SLICE_BYTES = 48 << 20
MOST_OF_FREE_MEMORY = 4
"""Both sides together take at most this fraction, a fourth."""

BLOCKS_PER_CHUNK = 8
CHUNK_BYTES = 2 << 20
"""With fewer than `BLOCKS_PER_CHUNK` pages in it a chunk is larger."""

JOB_ID = 1
OURS, MEMMOVE, STREAMED = "RayKV", "memmove", "one run of RayKV's kernel"


@dataclass(frozen=True)
class Case:
    """One kind of copy."""

    page_bytes: int
    direction: Direction

    @property
    def name(self) -> str:
        return f"{self.page_bytes // KIB} KiB, {self.direction.name.lower()}"


class Sides:
    """A KV cache and a pool of the same size, and plain copies between them."""

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
        for side in (self.kv, self.pool):
            side.prefault(lambda _done: True)
            np.ctypeslib.as_array(side.array())[:] = 1

    def close(self) -> None:
        for region in (self.kv, self.pool, self.words.region):
            region.close()

    def speed(self, copy: Callable[[int], object]) -> float:
        """Return the GB/s of a call that copies the slice of a number."""
        number = self._next_slice
        self._next_slice = (number + 1) % self.num_slices
        # The thread's own time leaves out what other programs take of the cores.
        started = time.thread_time()
        copy(number)
        return self.slice_bytes / (time.thread_time() - started) / 1e9

    def memcpys(self) -> dict[str, Callable[[], float]]:
        """Return measurements of copies of a slice as one run, in GB/s."""

        def streamed(number: int) -> None:
            where, size = np.array([number * self.slice_bytes]), np.array([self.slice_bytes])
            pool, kv = Side(self.pool.address, where), Side(self.kv.address, where)
            self.rows.copy(pool, kv, size, self.stop)

        def moved(number: int) -> None:
            first = number * self.slice_bytes
            ctypes.memmove(self.pool.address + first, self.kv.address + first, self.slice_bytes)

        ways = {MEMMOVE: moved}
        if self.rows.copy is not by_memmove:
            ways[STREAMED] = streamed
        return {name: partial(self.speed, way) for name, way in ways.items()}


class PagedCopy:
    """Copies of all pages of one size between two sides."""

    def __init__(self, sides: Sides, case: Case) -> None:
        self._sides = sides
        self._case = case
        page = case.page_bytes
        num_layers = max(1, CHUNK_BYTES // (BLOCKS_PER_CHUNK * page))
        self._num_chunks = sides.slice_bytes // (num_layers * BLOCKS_PER_CHUNK * page)
        assert self._num_chunks > 0, (sides.slice_bytes, page)
        num_blocks = self._num_chunks * BLOCKS_PER_CHUNK * sides.num_slices
        starts = [layer * num_blocks * page for layer in range(num_layers)]
        tensors = [TensorLayout(start, num_blocks, page, page) for start in starts]
        layers = [list(range(num_layers))]
        layout = KVLayout(MEMFD, sides.num_bytes, BLOCKS_PER_CHUNK, tensors, [0], layers)
        self._planner = Planner(layout, 0)
        self._slot_pages = num_layers * BLOCKS_PER_CHUNK * page // SLOT_ALIGNMENT
        self._backend = CPUBackend(sides.kv.address, sides.pool.address, sides.rows)
        keys = [key_of(at) for at in range(self._num_chunks)]
        blocks = np.random.default_rng(page).permutation(num_blocks).reshape(sides.num_slices, -1)
        self._jobs = [named_job(JOB_ID, case.direction, keys, some.tolist()) for some in blocks]

    def ours(self) -> float:
        """Return the GB/s of RayKV, planning included."""
        return self._sides.speed(self._plan_and_copy)

    def _plan_and_copy(self, number: int) -> None:
        """Copy some chunks with each call, as a NodeActor does."""
        first_slot = number * self._num_chunks * self._slot_pages
        plan = self._planner.plan(self._jobs[number])
        at_once = max(1, HOST_SPAN_BYTES // plan.bytes_of(0))
        for begin in range(0, self._num_chunks, at_once):
            chunks = range(begin, min(self._num_chunks, begin + at_once))
            slots = [Slot(first_slot + at * self._slot_pages) for at in chunks]
            rows = plan.runs(chunks, slots, MAX_SLAB_BYTES)
            done = self._backend.copy(self._case.direction, rows, self._sides.stop)
            assert done, "it was not cancelled"


def run(options: Options) -> Result:
    """See the module's docstring."""
    rows = RowCopier()
    rows.load()
    num_bytes = _side_bytes(options)
    sides = Sides(num_bytes, min(num_bytes, SLICE_BYTES), rows)
    result = Result("copy")
    try:
        for case in cases(options):
            subjects = {OURS: PagedCopy(sides, case).ours, **sides.memcpys()}
            result.rows += alternate(case.name, "GB/s", subjects, options.repeats_or(25))
    finally:
        sides.close()
    judge(result)
    return result


def _side_bytes(options: Options) -> int:
    if options.quick:
        return BLOCKS_PER_CHUNK * max(PAGES)
    room: int = psutil.virtual_memory().available // MOST_OF_FREE_MEMORY // 2
    return max(SLICE_BYTES, min(SIDE_BYTES, room) // SLICE_BYTES * SLICE_BYTES)


def cases(options: Options) -> Iterator[Case]:
    """List the kinds of copies; few in a quick run."""
    pages = QUICK_PAGES if options.quick else PAGES
    for page, direction in product(pages, Direction):
        yield Case(page, direction)


def judge(result: Result) -> None:
    """Judge the page size whose copies are slowest compared with memcpy.

    Smaller pages have no budget. The ratio of a size is the median of its cases' ratios.
    """
    by_page: dict[int, list[float]] = {}
    for case in cases(Options()):
        rows = {row.subject: row for row in result.rows if row.case == case.name}
        if rows and case.page_bytes >= BUDGET_PAGE_BYTES:
            ours = rows.pop(OURS)
            best = max(rows.values(), key=lambda row: row.median)
            by_page.setdefault(case.page_bytes, []).append(ours.ratio_to(best))
    least, page = min((median(ratios), page) for page, ratios in by_page.items())
    budget = f"at least {LEAST_OF_MEMCPY} of the best memcpy of one thread, pages from 64 KiB"
    result.at_least(LEAST_OF_MEMCPY, least, budget)
    result.notes.append(f"The least is {short(least)}, with pages of {page // KIB} KiB.")
