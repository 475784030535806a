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
import os
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raykv.base.errors import HandleError
from raykv.base.extras import with_extra
from raykv.protocol.worker import CUDA_HANDLE_BYTES

ATTRIBUTE_CALL, ATTRIBUTE_SINCE = b"cuPointerGetAttribute", 12000
"""The driver's own name, and the version of CUDA whose form of the call is meant."""


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

    def _word(self, name: str, address: int) -> int:
        """An attribute of 64 bits; `cuda.bindings` (13.3) refuses those of mappings."""
        which = int(getattr(self._cuda.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"))
        entry, _ = self._call("cuGetProcAddress", ATTRIBUTE_CALL, ATTRIBUTE_SINCE, 0)
        call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64)
        word = ctypes.c_uint64(0)
        error = call(int(entry))(ctypes.addressof(word), which, address)
        if error:
            raise CUDAError(f"{name} of memory of CUDA was refused: error {error}")
        return word.value

    def devices(self) -> list[str]:
        """UUIDs of the GPUs that this process sees."""
        return list(self._uuids)

    # The worker's side; addresses are those of this process.

    def device_of(self, address: int) -> str:
        """UUID of the GPU that memory lies on."""
        return self._uuids[int(self._attribute("DEVICE_ORDINAL", address))]

    def is_ipc_capable(self, address: int) -> bool:
        """Whether `export_memory` can hand the memory over, and not `export_fd` only."""
        return bool(self._attribute("IS_LEGACY_CUDA_IPC_CAPABLE", address))

    def extent(self, address: int) -> Extent:
        """The allocation, or for mapped memory the one mapping, that an address lies in."""
        self._enter(self.device_of(address))
        if self.is_ipc_capable(address):
            return self._allocation(address)
        size = self._word("MAPPING_SIZE", address)
        return Extent(self._word("MAPPING_BASE_ADDR", address), size)

    def _allocation(self, address: int) -> Extent:
        base, size = self._call("cuMemGetAddressRange", self._cuda.CUdeviceptr(address))
        return Extent(int(base), int(size))

    def export_memory(self, base: int) -> bytes:
        """A handle of the whole allocation that begins there, for another process."""
        self._enter(self.device_of(base))
        return _raw(self._call("cuIpcGetMemHandle", self._cuda.CUdeviceptr(base)))

    def export_fd(self, base: int) -> int:
        """A descriptor of the mapping that begins there; the caller closes it.

        Memory that was not made to be shared has none.
        """
        self._enter(self.device_of(base))
        kind = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = self._call("cuMemRetainAllocationHandle", base)
        try:
            fd = int(self._call("cuMemExportToShareableHandle", handle, kind, 0))
            # A program that is started later would hold the memory for ever.
            os.set_inheritable(fd, False)
            return fd
        finally:
            self._call("cuMemRelease", handle)

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

    def map_fds(self, device: str, fds: list[int], sizes: list[int]) -> int:
        """Map the memory of descriptors back to back; they may be closed afterwards."""
        self._enter(device)
        kind = self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        total, mapped = sum(sizes), 0
        base = int(self._call("cuMemAddressReserve", total, 0, 0, 0))
        try:
            for position, (fd, size) in enumerate(zip(fds, sizes, strict=True)):
                handle = self._call("cuMemImportFromShareableHandle", fd, kind)
                try:
                    self._call("cuMemMap", base + sum(sizes[:position]), size, 0, handle, 0)
                finally:
                    # What is mapped stays until it is unmapped.
                    self._call("cuMemRelease", handle)
                mapped += 1
            self._call("cuMemSetAccess", base, total, [self._access(device)], 1)
        except CUDAError:
            with suppress(CUDAError):
                self._unmap(base, sizes[:mapped], total)
            raise
        return base

    def _access(self, device: str) -> Any:
        wanted = self._cuda.CUmemAccessDesc()
        location = self._cuda.CUmemLocation()
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._uuids.index(device)
        wanted.location = location
        wanted.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return wanted

    def _unmap(self, base: int, sizes: list[int], reserved: int) -> None:
        start = base
        for size in sizes:
            self._call("cuMemUnmap", start, size)
            start += size
        self._call("cuMemAddressFree", base, reserved)

    def unmap_fds(self, device: str, address: int, sizes: list[int]) -> None:
        """Undo `map_fds`."""
        self._enter(device)
        self._unmap(address, sizes, sum(sizes))

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
