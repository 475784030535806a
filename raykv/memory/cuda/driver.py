"""CUDA's own memory management without copies, through `cuda.bindings`.

Both sides use it: the worker exports the memory that its KV cache lies in, and an event; the
NodeActor opens both, and has the pool's memory page-locked. Devices are named by UUID, because
numbers differ between processes. All calls may come from any thread.

Each device's primary context is used, the same one as torch and CUDA's
runtime use; it is taken once per device and kept until the process ends.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raykv.base.errors import HandleError
from raykv.base.extras import with_extra
from raykv.protocol.worker import CUDA_HANDLE_BYTES


class CUDAError(HandleError):
    """A call of CUDA failed, or can't be made on this machine."""


@dataclass(frozen=True)
class Extent:
    """A range of addresses."""

    base: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.base + self.num_bytes


def load() -> MemoryDriver:
    """The driver of this process.

    Raises:
        CUDAError: NVIDIA's driver or the package `cuda-bindings` is missing, or there is no GPU.
    """
    try:
        driver = importlib.import_module("cuda.bindings.driver")
        return MemoryDriver(driver)
    except (ImportError, RuntimeError) as error:
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise CUDAError(
            f"CUDA can't be used in this process ({what[0]}): it needs NVIDIA's driver and "
            f"cuda-bindings there; {with_extra('cuda')}"
        ) from error


class MemoryDriver:
    """All calls raise `CUDAError` when CUDA refuses them; then nothing has changed."""

    def __init__(self, bindings: Any) -> None:
        """Start CUDA. `bindings` is the module `cuda.bindings.driver`.

        Raises:
            CUDAError: CUDA does not start.
        """
        self._cuda = bindings
        self._lock = threading.Lock()
        self._contexts: dict[str, Any] = {}
        self._call("cuInit", 0)
        self._uuids = [self._uuid_of(n) for n in range(int(self._call("cuDeviceGetCount")))]

    def _call(self, name: str, *arguments: Any) -> Any:
        """The one result of a call, a list of several, or None."""
        code, *results = getattr(self._cuda, name)(*arguments)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise CUDAError(f"{name} of CUDA was refused: {getattr(code, 'name', code)}")
        if len(results) > 1:
            return results
        return results[0] if results else None

    def _uuid_of(self, number: int) -> str:
        # Before CUDA 13 only the second version of the call tells the parts of a GPU apart (MIG).
        has_second = getattr(self._cuda, "cuDeviceGetUuid_v2", None) is not None
        name = "cuDeviceGetUuid_v2" if has_second else "cuDeviceGetUuid"
        raw = self._call(name, self._call("cuDeviceGet", number)).bytes
        return str(uuid.UUID(bytes=bytes(raw)))

    def _enter(self, device: str) -> None:
        """Make the device's context that of the calling thread."""
        with self._lock:
            if device not in self._uuids:
                raise CUDAError(
                    f"this process does not see GPU {device}, only {self._uuids or 'none'}: let "
                    "engine and Ray node run in one container, or give both the same GPUs"
                )
            context = self._contexts.get(device)
            if context is None:
                number = self._call("cuDeviceGet", self._uuids.index(device))
                context = self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", number)
        self._call("cuCtxSetCurrent", context)

    def _attribute(self, name: str, address: int) -> Any:
        which = getattr(self._cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
        return self._call("cuPointerGetAttribute", which, self._cuda.CUdeviceptr(address))

    def devices(self) -> list[str]:
        """UUIDs of the GPUs that this process sees."""
        return list(self._uuids)

    # The worker's side; addresses are those of this process.

    def device_of(self, address: int) -> str:
        """UUID of the GPU that memory lies on."""
        return self._uuids[int(self._attribute("DEVICE_ORDINAL", address))]

    def is_ipc_capable(self, address: int) -> bool:
        """Whether `export_memory` can hand the memory over: memory that is mapped piece by piece,
        like that of expandable segments and of vLLM's sleep mode, has no handle.
        """
        return bool(self._attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address))

    def extent(self, address: int) -> Extent:
        """The allocation that an address lies in."""
        self._enter(self.device_of(address))
        return self._allocation(address)

    def _allocation(self, address: int) -> Extent:
        base, size = self._call("cuMemGetAddressRange", self._cuda.CUdeviceptr(address))
        return Extent(int(base), int(size))

    def export_memory(self, base: int) -> bytes:
        """A handle of the whole allocation that begins there, for another process."""
        self._enter(self.device_of(base))
        return _raw(self._call("cuIpcGetMemHandle", self._cuda.CUdeviceptr(base)))

    def create_event(self, device: str) -> int:
        """An event that other processes can open, not recorded yet."""
        self._enter(device)
        kinds = self._cuda.CUevent_flags
        flags = int(kinds.CU_EVENT_INTERPROCESS) | int(kinds.CU_EVENT_DISABLE_TIMING)
        return int(self._call("cuEventCreate", flags))

    def export_event(self, event: int) -> bytes:
        """A handle of an event, for another process."""
        return _raw(self._call("cuIpcGetEventHandle", self._cuda.CUevent(event)))

    def record_event(self, event: int, stream: int) -> None:
        """Have the event mean all that the stream has been given so far; does not wait."""
        self._call("cuEventRecord", self._cuda.CUevent(event), self._cuda.CUstream(stream))

    # The NodeActor's side

    def open_memory(self, device: str, handle: bytes) -> Extent:
        """Where an allocation of another process is mapped here; once for each `close_memory`."""
        self._enter(device)
        flags = int(self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        filled = _filled(self._cuda.CUipcMemHandle, handle)
        address = self._call("cuIpcOpenMemHandle", filled, flags)
        try:
            return self._allocation(int(address))
        except CUDAError:
            with suppress(CUDAError):
                self._call("cuIpcCloseMemHandle", address)
            raise

    def close_memory(self, device: str, address: int) -> None:
        """Unmap it."""
        self._enter(device)
        self._call("cuIpcCloseMemHandle", self._cuda.CUdeviceptr(address))

    def open_event(self, device: str, handle: bytes) -> int:
        """An event of another process."""
        self._enter(device)
        return int(self._call("cuIpcOpenEventHandle", _filled(self._cuda.CUipcEventHandle, handle)))

    def destroy_event(self, device: str, event: int) -> None:
        """Release an event, own or opened."""
        self._enter(device)
        self._call("cuEventDestroy", self._cuda.CUevent(event))

    def register_host(self, device: str, address: int, num_bytes: int) -> None:
        """Page-lock memory for the copies of all GPUs, under the context of this one."""
        self._enter(device)
        portable = int(self._cuda.CU_MEMHOSTREGISTER_PORTABLE)
        self._call("cuMemHostRegister", address, num_bytes, portable)

    def unregister_host(self, device: str, address: int) -> None:
        """Undo `register_host`."""
        self._enter(device)
        self._call("cuMemHostUnregister", address)


def _raw(handle: Any) -> bytes:
    """The bytes of a handle: its class gives them out by address only."""
    return ctypes.string_at(int(handle.getPtr()), CUDA_HANDLE_BYTES)


def _filled(make: Callable[[], Any], raw: bytes) -> Any:
    handle = make()
    ctypes.memmove(int(handle.getPtr()), raw, CUDA_HANDLE_BYTES)
    return handle
