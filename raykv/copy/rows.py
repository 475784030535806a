"""How the rows of a copy between two mappings are carried out: by a kernel, until then by memmove.

numba compiles the kernel: pages of 64 KiB are copied at twice the speed of a memmove each, and
nobody needs a C compiler to install RayKV.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from raykv.copy.engine import StopSign
from raykv.copy.plan import Column

logger = logging.getLogger("raykv.copy")

NUM_TRIAL_WORDS = 10_000


class Side(NamedTuple):
    """Where the runs of a copy are on one side: offsets from an address."""

    address: int
    offsets: Column


CopyRows = Callable[[Side, Side, Column, range, StopSign], bool]
"""(to, source, sizes, rows, stop): carry out these rows; see `CopyBackend.copy`."""


def by_memmove(to: Side, source: Side, sizes: Column, rows: range, stop: StopSign) -> bool:
    """One memmove a row."""
    some = slice(rows.start, rows.stop)
    targets = (to.offsets[some] + to.address).tolist()
    sources = (source.offsets[some] + source.address).tolist()
    move = ctypes.memmove
    for target, where, size in zip(targets, sources, sizes[some].tolist(), strict=True):
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

    def by_kernel(to: Side, source: Side, sizes: Column, rows: range, stop: StopSign) -> bool:
        first, last = rows.start, rows.stop
        return copy_rows(
            to.address, to.offsets, source.address, source.offsets, sizes, first, last, stop.rows
        )

    _try(by_kernel)
    return by_kernel


def _try(copy: CopyRows) -> None:
    """See that a kernel copies some bytes before it is trusted with KV caches."""
    source = np.arange(NUM_TRIAL_WORDS)
    to = np.zeros_like(source)
    start, size = np.zeros(1, np.int64), np.array([source.nbytes], np.int64)
    sides = Side(to.ctypes.data, start), Side(source.ctypes.data, start)
    if not copy(*sides, size, range(1), StopSign()) or not np.array_equal(to, source):
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
