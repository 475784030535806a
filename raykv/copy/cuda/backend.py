"""Back end for KV caches in a GPU's memory, and the devices of a process; `lane.py` copies."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterable
from contextlib import closing

from raykv.base.ids import Direction
from raykv.copy.cuda import batches, driver, lane
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import CopyRuns

logger = logging.getLogger("raykv.copy")


class CUDABackend(CopyBackend):
    """Copies between one worker's KV cache and the pool."""

    def __init__(self, device: lane.Device, place: lane.Place) -> None:
        self._device = device
        self._place = place

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: StopSign
    ) -> bool:
        """See `CopyBackend.copy`; the stop sign is looked at before every batch.

        Raises:
            CUDAError: the device refused; nothing is on its way.
        """
        rows = batches.rows_of(runs, first, last, self._device.limits.cut_bytes)
        if not len(rows):
            return True
        with closing(self._device.copy_each(direction, [rows], self._place, stop)) as answers:
            return all(answers)

    def copy_each(
        self, direction: Direction, parts: Iterable[CopyRuns], stop: StopSign
    ) -> Generator[bool]:
        """See `CopyBackend.copy_each`.

        Raises:
            CUDAError: the device refused; nothing is on its way.
        """
        most = self._device.limits.cut_bytes
        rows = (batches.rows_of(runs, 0, len(runs.size), most) for runs in parts)
        return self._device.copy_each(direction, rows, self._place, stop)


class OpenDevices:
    """The devices of this process by UUID; each is opened once."""

    def __init__(self, open_device: Callable[[str], lane.Device]) -> None:
        self._open = open_device
        self._devices: dict[str, lane.Device] = {}
        self._lock = threading.Lock()

    def get(self, device_uuid: str) -> lane.Device:
        """The device; opened, if it is the first time.

        Raises:
            CUDAError: it can't be.
        """
        uuid = driver.plain_uuid(device_uuid)
        with self._lock:
            if uuid not in self._devices:
                self._devices[uuid] = self._open(uuid)
            return self._devices[uuid]


_devices = OpenDevices(lambda device_uuid: lane.Device(driver.CUDADriver(device_uuid)))


def backend(
    device_uuid: str, kv_address: int, pool_address: int, compute_event: int | None
) -> CopyBackend:
    """The back end for one worker's KV cache.

    The first call for a device creates a CUDA context in this process, which takes a second and a
    few hundred MiB of the GPU's memory.

    Args:
        device_uuid: the GPU that has the KV cache, as torch or nvidia-smi write it.
        kv_address: where offset 0 of the KV cache is in this process, on the device.
        pool_address: where the pool begins. It may be page-locked in pieces that divide no slab.
        compute_event: an event of this process, opened from the worker's, which the worker records
            on its compute stream before it submits a store *or a load*; None: do not wait.

    Raises:
        CUDAError: CUDA can't be used, or this process does not see the device.
    """
    place = lane.Place(kv_address, pool_address, compute_event)
    return CUDABackend(_devices.get(device_uuid), place)
