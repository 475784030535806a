"""Back end for KV caches in a GPU's memory, and the devices of a process; `lane.py` copies."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from functools import cache

from raykv.base.ids import Direction
from raykv.copy.cuda import batches, driver, lane
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import CopyRuns


class CUDABackend(CopyBackend):
    """Copies between one worker's KV cache and the pool."""

    def __init__(self, device: lane.Device, place: lane.Place) -> None:
        self.device = device
        self._place = place

    def copy_each(
        self, direction: Direction, parts: Iterable[CopyRuns], stop: StopSign
    ) -> Generator[bool]:
        """See `CopyBackend.copy_each`.

        Raises:
            CUDAError: the device refused; nothing is on its way.
        """
        most = self.device.limits.cut_bytes
        rows = (batches.cut(runs, most) for runs in parts)
        return self.device.lanes[direction].copy_each(rows, self._place, stop)


# Of this process, which opens each device once.
_opening = threading.Lock()


@cache
def _opened(device_uuid: str) -> lane.Device:
    return lane.Device(driver.CUDADriver(device_uuid))


def backend(
    device_uuid: str, kv_address: int, pool_address: int, compute_event: int | None
) -> CopyBackend:
    """The back end for one worker's KV cache.

    The first call for a device creates a CUDA context in this process, which takes a second and a
    few hundred MiB of the GPU's memory.

    Args:
        device_uuid: the GPU that has the KV cache, as `MemoryDriver` writes it.
        kv_address: where offset 0 of the KV cache is in this process, on the device.
        pool_address: where the pool begins. It may be page-locked in pieces that divide no slab.
        compute_event: an event of this process, opened from the worker's, which the worker records
            on its compute stream before it submits a store *or a load*; None: do not wait.

    Raises:
        CUDAError: CUDA can't be used, or this process does not see the device.
    """
    place = lane.Place(kv_address, pool_address, compute_event)
    with _opening:
        return CUDABackend(_opened(device_uuid), place)
