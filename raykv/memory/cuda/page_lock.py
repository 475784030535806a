"""A pool that is page-locked for GPUs, piece by piece, while copies already run.

A piece is page-locked once all of its pages have been touched. Copies to and from what is not
work too, slower: CUDA takes them through memory of its own. When CUDA refuses a piece the rest of
the pool stays as it is, and a warning says so.

CUDA refuses a copy whose host side lies partly in one page-locked piece and partly outside. So:

1. Pieces begin and end where slabs do, and no slot crosses a slab (`PoolGeometry`, invariant 1).
2. No piece has more than `MOST_PIECE_BYTES`, unless one slab has.
"""

from __future__ import annotations

import logging
import threading

from raykv.base import deadlines
from raykv.base.geometry import PoolGeometry
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.memory.cuda.driver import CUDAError, Extent, MemoryDriver
from raykv.memory.pool import Pool

logger = logging.getLogger("raykv.node")

MOST_PIECE_BYTES = 64 << 30
"""NVIDIA's drivers from 580 on refuse 512 GiB and more at once; far below it is safe."""

LEAST_PIECE_BYTES = 1 << 30
"""A fraction of a second to page-lock, during which CUDA may keep copies waiting."""

TARGET_PIECES = 256


def lock_pieces(geometry: PoolGeometry) -> list[Extent]:
    """All slabs of the pool, in pieces of about equal size, lowest first; their bases are offsets
    from its beginning.
    """
    wanted = min(max(geometry.pool_bytes // TARGET_PIECES, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
    size = max(1, wanted // geometry.slab_bytes) * geometry.slab_bytes
    total = geometry.num_slabs * geometry.slab_bytes
    pieces = [Extent(offset, min(size, total - offset)) for offset in range(0, total, size)]
    assert sum(piece.num_bytes for piece in pieces) == total, pieces
    return pieces


class PoolLocker:
    """Page-locks one pool in a thread of its own."""

    def __init__(
        self, driver: MemoryDriver, device: str, pool: Pool, geometry: PoolGeometry
    ) -> None:
        """Nothing happens before `start`.

        Args:
            driver: CUDA in this process.
            device: the GPU whose context the memory is page-locked under; it is so for all.
            pool: another thread prefaults its memory.
            geometry: how the pool is cut into slabs.
        """
        self._driver = driver
        self._device = device
        self._pool = pool
        self._pieces = lock_pieces(geometry)
        self._locked: list[int] = []
        self._stopped = threading.Event()
        self._thread = SupervisedThread("raykv-page-lock", self._run, OnFailure.GIVE_UP)
        self.locked_bytes = 0

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def _run(self) -> None:
        for piece in self._pieces:
            while self._pool.prefaulted_bytes < piece.end:
                if self._stopped.wait(deadlines.LOOK_S):
                    return
            if self._stopped.is_set():
                return
            address = self._pool.address + piece.base
            try:
                self._driver.register_host(self._device, address, piece.num_bytes)
            except CUDAError as error:
                logger.warning(
                    "%d of the pool's %d bytes can't be page-locked, so copies between them and a "
                    "GPU are slower: %s",
                    self._pieces[-1].end - self.locked_bytes,
                    self._pieces[-1].end,
                    error,
                )
                return
            self._locked.append(address)
            self.locked_bytes = piece.end

    def stop(self, timeout_s: float) -> None:
        """Unlock what is page-locked; no copy may run any more.

        Waits up to `timeout_s` for a thread in the middle of a piece; if it takes longer, all stays
        page-locked until the process ends.
        """
        self._stopped.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return
        while self._locked:
            try:
                self._driver.unregister_host(self._device, self._locked.pop())
            except CUDAError as error:
                logger.warning("a part of the pool stays page-locked: %s", error)
        self.locked_bytes = 0
