"""Back end over two bytearrays: what the contract means, in its simplest form."""

from __future__ import annotations

from raykv.base.ids import Direction
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import CopyRuns


class ReferenceBackend(CopyBackend):
    """Copies between two bytearrays, byte range by byte range."""

    def __init__(self, kv: bytearray, pool: bytearray) -> None:
        self.kv = kv
        self.pool = pool

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: StopSign
    ) -> bool:
        """See `CopyBackend.copy`."""
        for row in range(first, last):
            if stop():
                return False
            kv, pool, size = int(runs.kv[row]), int(runs.pool[row]), int(runs.size[row])
            if direction is Direction.STORE:
                self.pool[pool : pool + size] = self.kv[kv : kv + size]
            else:
                self.kv[kv : kv + size] = self.pool[pool : pool + size]
        return True
