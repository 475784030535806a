"""From the rows of a copy to batches that a device is given: cut, bounded, routed, staged. Pure.

1. No copy goes on over the end of a slab, although both sides may: CUDA refuses a copy that touches
   two pieces of memory which were page-locked one by one. The pool's pieces divide no slab.
2. A batch has a bounded number of bytes and of runs: what is on its way when a copy is stopped is
   at most some batches. (Batches of more than 50,000 runs were seen to hang a driver.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum, auto

import numpy as np

from raykv.base.ids import Direction
from raykv.copy.cuda.driver import Copies
from raykv.copy.cuda.pages import WORD_BYTES
from raykv.copy.plan import Column, CopyRuns, merged

CUT_BYTES = 32 << 20
"""A larger run is cut at such multiples of the pool's offset."""

# Loads of smaller pages are scattered by a kernel if a batch has this many runs: what vLLM found
# for an H100. Stores are not: they were as fast by DMA. `python -m tests.bench copy_cuda` measures
# both routes.
GATHER_BELOW_BYTES = 28 << 10
GATHER_FROM_RUNS = 16


class Route(Enum):
    """A way that a batch of runs takes."""

    BATCH = auto()
    """Each run is copied by itself (DMA)."""
    GATHER = auto()
    """A kernel moves the runs from or to a buffer of the device, which is copied in one piece."""


ChooseRoute = Callable[[Direction, CopyRuns], Route]


def usual_route(direction: Direction, rows: CopyRuns) -> Route:
    """Choose the route by the mean size and the number of the runs, of which there is one."""
    is_small = rows.num_bytes < GATHER_BELOW_BYTES * len(rows) and len(rows) >= GATHER_FROM_RUNS
    return Route.GATHER if is_small and direction is Direction.LOAD else Route.BATCH


def has_words(rows: CopyRuns) -> bool:
    """Whether the KV cache's side is made of whole 64-bit words, which kernels move."""
    return not bool(np.bitwise_or.reduce(rows.kv | rows.size) % WORD_BYTES)


def cut(rows: CopyRuns, cut_bytes: int) -> CopyRuns:
    """Cut the rows where the pool's offset is a multiple of `cut_bytes`."""
    first = rows.pool // cut_bytes
    last = (rows.pool + rows.size - 1) // cut_bytes
    if (first == last).all():
        return rows
    counts = last - first + 1
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    whole = rows.some(np.repeat(np.arange(len(rows)), counts))
    edge = (np.repeat(first, counts) + within) * cut_bytes
    begin = np.maximum(edge, whole.pool)
    end = np.minimum(edge + cut_bytes, whole.pool + whole.size)
    return CopyRuns(whole.kv + begin - whole.pool, begin, end - begin, rows.slab_bytes)


def batches(rows: CopyRuns, most_bytes: int, most_runs: int) -> Iterator[CopyRuns]:
    """The rows in order, in batches within both bounds; a row that is larger has its own."""
    if 0 < len(rows) <= most_runs and rows.num_bytes <= most_bytes:
        yield rows
        return
    ends = rows.size.cumsum()
    start, done = 0, 0
    while start < len(rows):
        stop = int(ends.searchsorted(done + most_bytes, side="right"))
        stop = max(start + 1, min(stop, start + most_runs))
        yield rows.some(slice(start, stop))
        start, done = stop, int(ends[stop - 1])


def direct(rows: CopyRuns, direction: Direction, kv_address: int, pool_address: int) -> Copies:
    """Copies between a KV cache and the pool, at these addresses."""
    kv, pool = _at(kv_address, rows.kv), _at(pool_address, rows.pool)
    to, source = (pool, kv) if direction is Direction.STORE else (kv, pool)
    return Copies(to, source, _at(0, rows.size))


@dataclass(frozen=True)
class Staged:
    """The two steps of a copy through a buffer of the device.

    `pages` are between KV cache and buffer, within the device; `blocks` between buffer and pool.
    A store does the pages first, a load the blocks.
    """

    pages: Copies
    blocks: Copies


def staged(
    rows: CopyRuns, direction: Direction, kv_address: int, pool_address: int, buffer: int
) -> Staged:
    """The rows one behind the other in the buffer; neighbours in a slot make one block there."""
    place = np.cumsum(rows.size) - rows.size
    pages = direct(replace(rows, pool=place), direction, kv_address, buffer)
    packed = merged(replace(rows, kv=place))
    return Staged(pages, direct(packed, direction, buffer, pool_address))


def _at(address: int, offsets: Column) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return offsets.view(np.uint64) + np.uint64(address)
