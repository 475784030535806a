"""GPUs as a NodeActor sees them: opened for a worker, and the pool page-locked for their copies.

CUDA is loaded when the first worker comes whose KV cache is on a GPU, not before: its context takes
some hundred MiB of that GPU. The pool is page-locked from then on.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from raykv.base.geometry import PoolGeometry
from raykv.copy.cuda.backend import backend
from raykv.copy.engine import CopyBackend
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.cuda.kv import DeviceKV
from raykv.memory.cuda.page_lock import PoolLocker
from raykv.memory.pool import Pool

logger = logging.getLogger("raykv.node")

VISIBLE = "CUDA_VISIBLE_DEVICES"

MakeBackend = Callable[[str, int, int, int | None], CopyBackend]
"""(device, address of the KV cache, address of the pool, event to wait for)."""


def see_all_gpus() -> None:
    """Have CUDA show this process every GPU of its container, whatever Ray has set.

    A NodeActor serves all GPUs of its node. To be called before CUDA starts, which reads the
    variable once. Parts of a GPU (MIG) are visible only by name, so their names stay.
    """
    if not os.environ.get(VISIBLE, "").startswith("MIG"):
        os.environ.pop(VISIBLE, None)


class Devices:
    """A NodeActor's use of GPUs. Any thread may call."""

    def __init__(
        self,
        load: Callable[[], cuda_driver.MemoryDriver] = cuda_driver.load,
        make_backend: MakeBackend = backend,
    ) -> None:
        self._load = load
        self._make_backend = make_backend
        self._lock = threading.Lock()
        self._driver: cuda_driver.MemoryDriver | None = None
        self._locker: PoolLocker | None = None
        self._is_closed = False

    @property
    def locked_bytes(self) -> int:
        """Bytes of the pool that are page-locked, from its start."""
        return 0 if self._locker is None else self._locker.locked_bytes

    def driver(self) -> cuda_driver.MemoryDriver:
        """CUDA in this process.

        Raises:
            CUDAError: it can't be used here; the next call tries again.
        """
        with self._lock:
            if self._driver is None:
                self._driver = self._load()
            return self._driver

    def backend(self, kv: DeviceKV, pool_address: int) -> CopyBackend:
        """What copies between a KV cache and the pool; one per worker."""
        return self._make_backend(kv.device, kv.address, pool_address, kv.compute_event)

    def lock_pool(self, device: str, pool: Pool, geometry: PoolGeometry) -> None:
        """Begin to page-lock the pool, unless that was begun before; returns at once."""
        driver = self.driver()
        with self._lock:
            if self._locker is not None or self._is_closed:
                return
            locker = PoolLocker(driver, device, pool, geometry)
            locker.start()
            self._locker = locker

    def close(self, timeout_s: float) -> None:
        """Unlock the pool; no copy may run any more."""
        with self._lock:
            self._is_closed = True
            locker = self._locker
        if locker is not None:
            locker.stop(timeout_s)
