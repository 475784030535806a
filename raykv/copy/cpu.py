"""Back end for KV caches in CPU memory: one memmove per run, without the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from raykv.copy.plan import CopyRuns
from raykv.types import Direction


class CPUBackend:
    """Copies between two mappings of this process."""

    def __init__(self, kv_address: int, pool_address: int) -> None:
        self._kv = kv_address
        self._pool = pool_address

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: Callable[[], bool]
    ) -> bool:
        """See `CopyBackend.copy`."""
        kv = (runs.kv[first:last] + self._kv).tolist()
        pool = (runs.pool[first:last] + self._pool).tolist()
        target, source = (pool, kv) if direction is Direction.STORE else (kv, pool)
        move = ctypes.memmove
        for to, where, size in zip(target, source, runs.size[first:last].tolist(), strict=True):
            if stop():
                return False
            move(to, where, size)
        return True
