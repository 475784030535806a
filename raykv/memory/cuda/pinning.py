"""A pool that is pinned for GPUs, piece by piece, while copies already run.

A piece is pinned once all of its pages have been touched. Copies to and from what is not pinned
work too, slower: CUDA takes them through memory of its own. When CUDA refuses a piece the rest of
the pool stays as it is, and a warning says so.
"""

from __future__ import annotations

import logging
import threading

from raykv.base.deadlines import NODE_PIN_LOOK_S
from raykv.base.geometry import PoolGeometry
from raykv.base.threads import OnFailure, SupervisedThread
from raykv.memory.cuda.driver import CUDAError, MemoryDriver
from raykv.memory.placing import pin_pieces
from raykv.memory.pool import Pool

logger = logging.getLogger("raykv.node")


class PoolPinner:
    """Pins one pool in a thread of its own."""

    def __init__(
        self, driver: MemoryDriver, device: str, pool: Pool, geometry: PoolGeometry
    ) -> None:
        """Nothing happens before `start`.

        Args:
            driver: CUDA in this process.
            device: the GPU whose context the memory is pinned under; it is so for all.
            pool: its memory is being prefaulted by somebody else.
            geometry: how the pool is cut into slabs.
        """
        self._driver = driver
        self._device = device
        self._pool = pool
        self._pieces = pin_pieces(geometry)
        self._pinned: list[int] = []
        self._stopped = threading.Event()
        self._thread = SupervisedThread("raykv-pin", self._run, OnFailure.GIVE_UP)
        self.pinned_bytes = 0

    def start(self) -> None:
        """Begin; once."""
        self._thread.start()

    def _run(self) -> None:
        for piece in self._pieces:
            while self._pool.prefaulted_bytes < piece.end:
                if self._stopped.wait(NODE_PIN_LOOK_S):
                    return
            if self._stopped.is_set():
                return
            address = self._pool.address + piece.offset
            try:
                self._driver.register_host(self._device, address, piece.num_bytes)
            except CUDAError as error:
                logger.warning(
                    "%d of the pool's %d bytes can't be pinned, so copies between them and a GPU "
                    "are slower: %s",
                    self._pieces[-1].end - self.pinned_bytes,
                    self._pieces[-1].end,
                    error,
                )
                return
            self._pinned.append(address)
            self.pinned_bytes = piece.end

    def stop(self, timeout_s: float) -> None:
        """Unpin what is pinned; no copy may run any more.

        A thread that is in the middle of pinning is waited for so long; if it takes longer, all
        stays pinned until the process ends.
        """
        self._stopped.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return
        while self._pinned:
            try:
                self._driver.unregister_host(self._device, self._pinned.pop())
            except CUDAError as error:
                logger.warning("a part of the pool stays pinned: %s", error)
        self.pinned_bytes = 0
