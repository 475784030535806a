"""Back end for KV caches in CPU memory: both sides are mapped here, and copied without the GIL."""

from __future__ import annotations

from raykv.base.ids import Direction
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import CopyRuns
from raykv.copy.rows import RowCopier, Side


class CPUBackend(CopyBackend):
    """Copies between two mappings of this process."""

    def __init__(self, kv_address: int, pool_address: int, rows: RowCopier) -> None:
        self._kv = kv_address
        self._pool = pool_address
        self._rows = rows

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: StopSign
    ) -> bool:
        kv, pool = Side(self._kv, runs.kv), Side(self._pool, runs.pool)
        to, source = (pool, kv) if direction is Direction.STORE else (kv, pool)
        return self._rows.copy(to, source, runs.size, range(first, last), stop)
