"""Back end for KV caches in CPU memory: both sides are mapped here, and copied without the GIL.

Rows are copied by a kernel, and by memmove until it is loaded. numba compiles it: pages of 64 KiB
are copied at 1.6 times the speed of a memmove each, pages of 4 KiB at 4 times (numpy's fastest way
has 0.7 of the kernel's speed, and needs pages that lie at multiples of their size). numba takes
80 to 120 MB of the process, so it is loaded for KV caches in CPU memory only. Nobody needs a C
compiler to install RayKV.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple

import numpy as np

from raykv.base.ids import Direction
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import Column, CopyRuns

logger = logging.getLogger("raykv.copy")

NUM_TRIAL_WORDS = 10_000


class Side(NamedTuple):
    """Where the runs of a copy are on one side: offsets from an address."""

    address: int
    offsets: Column


CopyRows = Callable[[Side, Side, Column, StopSign], bool]
"""(to, source, sizes, stop): copy all rows; False: it was stopped."""


def by_memmove(to: Side, source: Side, sizes: Column, stop: StopSign) -> bool:
    """One memmove a row."""
    targets = (to.offsets + to.address).tolist()
    sources = (source.offsets + source.address).tolist()
    move = ctypes.memmove
    for target, where, size in zip(targets, sources, sizes.tolist(), strict=True):
        if stop():
            return False
        move(target, where, size)
    return True


def kernel() -> CopyRows:
    """The compiled kernel; the first call in a process takes about a second.

    Raises:
        Exception: numba is not there, can't compile or is switched off, or what it compiled does
            not copy; it has many ways to say so.
    """
    from raykv.copy.kernel import copy_rows

    def by_kernel(to: Side, source: Side, sizes: Column, stop: StopSign) -> bool:
        return copy_rows(to.address, to.offsets, source.address, source.offsets, sizes, stop.rows)

    _try(by_kernel)
    return by_kernel


def _try(copy: CopyRows) -> None:
    """See that a kernel copies some bytes before it is trusted with KV caches."""
    source = np.arange(NUM_TRIAL_WORDS)
    to = np.zeros_like(source)
    start, size = np.zeros(1, np.int64), np.array([source.nbytes], np.int64)
    sides = Side(to.ctypes.data, start), Side(source.ctypes.data, start)
    if not copy(*sides, size, StopSign()) or not np.array_equal(to, source):
        raise RuntimeError("a trial did not copy what it should")


class RowCopier:
    """The best way to copy rows that this process has; better once `load` is through."""

    def __init__(self) -> None:
        self.copy: CopyRows = by_memmove

    def load(self) -> None:
        """Load the kernel; without one it stays as it is, and a warning says so.

        Never in a process of vLLM: see `raykv.copy.kernel`.
        """
        try:
            self.copy = kernel()
        except Exception as error:
            logger.warning(
                "copies take up to twice as long, because their kernel can't be used (%s: %s): "
                "install the version of numba that RayKV asks for",
                type(error).__name__,
                error,
            )


class CPUBackend(CopyBackend):
    """Copies between two mappings of this process."""

    def __init__(self, kv_address: int, pool_address: int, rows: RowCopier) -> None:
        self._kv = kv_address
        self._pool = pool_address
        self._rows = rows

    def copy(self, direction: Direction, runs: CopyRuns, stop: StopSign) -> bool:
        """Copy one part; False: it was stopped."""
        kv, pool = Side(self._kv, runs.kv), Side(self._pool, runs.pool)
        to, source = (pool, kv) if direction is Direction.STORE else (kv, pool)
        return self._rows.copy(to, source, runs.size, stop)

    def copy_each(
        self, direction: Direction, parts: Iterable[CopyRuns], stop: StopSign
    ) -> Generator[bool]:
        """See `CopyBackend.copy_each`."""
        for runs in parts:
            done = self.copy(direction, runs, stop)
            yield done
            if not done:
                return
