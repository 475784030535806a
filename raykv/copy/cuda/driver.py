"""The calls of CUDA that a copy needs, behind a protocol: the real ones, or a fake one in tests.

Streams and events are CUDA's handles, as numbers. Every call may be made by any thread. The real
driver goes through `cuda.bindings`, which is imported when the first device is opened: RayKV
installs and runs without it.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from raykv.base.ids import Direction
from raykv.copy.cuda.pages import mover_of
from raykv.memory.cuda.driver import CUDAError

Addresses = npt.NDArray[np.uint64]


class MoverError(CUDAError):
    """What moves pages within the device can't, and nothing was submitted; the device is well."""


class SourceOrder(IntEnum):
    """When a batch may read its sources; the numbers are those of `CUmemcpySrcAccessOrder`."""

    STREAM = 1
    """After what the stream was given before: needed for a KV cache that is being computed."""
    ANY = 3
    """At once: for sources that are not written meanwhile."""


@dataclass(frozen=True)
class Copies:
    """Copies that may be carried out in any order, one row each: absolute addresses and bytes.

    Nothing that one of them writes is read or written by another one.
    """

    to: Addresses
    source: Addresses
    size: Addresses

    def __post_init__(self) -> None:
        for column in (self.to, self.source, self.size):
            assert column.dtype == np.uint64, column.dtype
            assert column.ndim == 1, column.shape
            assert column.flags.c_contiguous, "CUDA reads the columns as arrays"
            assert len(column) == len(self.size), "columns of different lengths"
            assert len(column), "a batch without a copy is refused by CUDA"
            assert np.count_nonzero(column) == len(column), "a null address, or a copy of no byte"


class CopyDriver(Protocol):
    """One device. Each call raises `CUDAError` with the call's name and CUDA's own error."""

    @property
    def mover(self) -> object | None:
        """What carries `move_pages` out; None if nothing can, or it has raised `MoverError`."""

    def make_stream(self, direction: Direction) -> int:
        """A stream that does not wait for the default one. Those of loads have a higher priority,
        which CUDA lets decide between kernels; its copy engines take no notice.
        """

    def make_event(self) -> int:
        """An event, which counts as done until it is recorded."""

    def record(self, event: int, stream: int) -> None:
        """The event is done when all that the stream was given up to now is."""

    def wait_event(self, stream: int, event: int) -> None:
        """What the stream is given from now on waits for the event's last record up to now."""

    def is_done(self, event: int) -> bool:
        """Whether its last record is. An error of anything that the device ran may come here."""

    def copy_batch(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        """Submit copies between device and host. If it raises, some may have been submitted."""

    def copy_one(self, stream: int, to: int, source: int, size: int) -> None:
        """Submit one copy between device and host."""

    def move_pages(self, stream: int, copies: Copies) -> None:
        """Submit copies within the device, of multiples of `WORD_BYTES` at such addresses.

        Raises:
            MoverError: it must not be called again.
        """

    def allocate(self, num_bytes: int) -> int:
        """Memory of the device."""

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; waits for the device."""

    def drop_stream(self, stream: int) -> None:
        """The stream is not used any more."""

    def drop_event(self, event: int) -> None:
        """The event is not used any more."""


BATCH_CALL = b"cuMemcpyBatchAsync"
BATCH_SINCE = 12080
"""The CUDA version whose form of the call is used, with a place for the index of what failed. Newer
drivers still have it."""

BatchCall = Callable[..., int]


class CUDADriver:
    """A real device."""

    def __init__(self, device_uuid: str) -> None:
        """Open a device of this process by its UUID, as `MemoryDriver` writes it.

        Raises:
            CUDAError: CUDA can't be used here, or this process sees no such device.
        """
        self._runtime = _runtime()
        self._device = self._find(device_uuid)
        self._priorities = self._call("cudaDeviceGetStreamPriorityRange")
        self._batch = _batch_call()
        self._attributes = {order: _attributes(order) for order in SourceOrder}
        self._first = ctypes.c_size_t(0)
        self.mover = mover_of(self._device)

    def make_stream(self, direction: Direction) -> int:
        least, greatest = self._priorities
        priority = greatest if direction is Direction.LOAD else least
        flags = self._runtime.cudaStreamNonBlocking
        return int(self._call("cudaStreamCreateWithPriority", flags, priority))

    def make_event(self) -> int:
        flags = self._runtime.cudaEventDisableTiming
        return int(self._call("cudaEventCreateWithFlags", flags))

    def record(self, event: int, stream: int) -> None:
        self._call("cudaEventRecord", event, stream)

    def wait_event(self, stream: int, event: int) -> None:
        self._call("cudaStreamWaitEvent", stream, event, 0)

    def is_done(self, event: int) -> bool:
        self._use()
        (error,) = self._runtime.cudaEventQuery(event)
        if error == self._runtime.cudaError_t.cudaErrorNotReady:
            return False
        if error != self._runtime.cudaError_t.cudaSuccess:
            raise _failure("cudaEventQuery", error)
        return True

    def copy_batch(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        """See `CopyDriver.copy_batch`; one call a copy with drivers older than CUDA 12.8.

        `cuda.bindings` takes lists and builds its arrays from them: 2 µs a copy, as long as the
        copy itself. So its entry point is called with our own arrays.
        """
        if self._batch is None:
            for row in zip(*(each.tolist() for each in _columns(copies)), strict=True):
                self.copy_one(stream, *row)
            return
        self._use()
        failed = ctypes.c_size_t(0)
        error = self._batch(
            *(each.ctypes.data for each in _columns(copies)),
            len(copies.size),
            self._attributes[order].getPtr(),
            ctypes.addressof(self._first),
            1,
            ctypes.addressof(failed),
            stream,
        )
        if error:
            raise CUDAError(
                f"cuMemcpyBatchAsync of {len(copies.size)} copies failed: "
                f"{_driver_error(error)}; the copies are given up"
            )

    def copy_one(self, stream: int, to: int, source: int, size: int) -> None:
        assert to > 0, to
        assert source > 0, source
        assert size > 0, size
        kind = self._runtime.cudaMemcpyKind.cudaMemcpyDefault
        self._call("cudaMemcpyAsync", to, source, size, kind, stream)

    def move_pages(self, stream: int, copies: Copies) -> None:
        mover = self.mover
        if mover is None:
            # The other direction's thread has just found out.
            raise MoverError("nothing here moves pages within the device")
        try:
            mover.move(stream, copies.to, copies.source, copies.size)
        except Exception as error:
            # Triton and torch have many ways to say so: no C compiler is the usual one.
            self.mover = None
            raise MoverError(f"a launch of Triton's kernel failed: {error}") from error

    def allocate(self, num_bytes: int) -> int:
        assert num_bytes > 0, num_bytes
        return int(self._call("cudaMalloc", num_bytes))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def drop_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def drop_event(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def _find(self, device_uuid: str) -> int:
        """The device's number."""
        seen: list[str] = []
        for number in range(checked(self._runtime, "cudaGetDeviceCount")):
            found = checked(self._runtime, "cudaGetDeviceProperties", number)
            seen.append(str(uuid.UUID(bytes=bytes(found.uuid.bytes))))
            if seen[-1] == device_uuid:
                return number
        raise CUDAError(
            f"this process sees no GPU {device_uuid}, only {', '.join(seen) or 'none'}: "
            "see CUDA_VISIBLE_DEVICES"
        )

    def _use(self) -> None:
        """CUDA's current device is the thread's, and other code may have changed it."""
        checked(self._runtime, "cudaSetDevice", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """The results of a call without its error."""
        self._use()
        return checked(self._runtime, name, *arguments)


def checked(runtime: Any, name: str, *arguments: Any) -> Any:
    """What a call of the CUDA runtime returns besides its error: nothing, a value, or several.

    Raises:
        CUDAError: it failed.
    """
    error, *values = getattr(runtime, name)(*arguments)
    if error != runtime.cudaError_t.cudaSuccess:
        raise _failure(name, error)
    return values[0] if len(values) == 1 else tuple(values)


def _failure(name: str, error: Any) -> CUDAError:
    return CUDAError(f"{name} failed: {error.name}; see `nvidia-smi` and the kernel's log")


def _columns(copies: Copies) -> tuple[Addresses, Addresses, Addresses]:
    return copies.to, copies.source, copies.size


def _runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise CUDAError(
            f"CUDA can't be used without the package cuda-bindings ({error}): "
            "install it, or torch for CUDA, which brings it"
        ) from error
    return runtime


def _batch_call() -> BatchCall | None:
    """The driver's entry point; None if the driver is older than the call."""
    from cuda.bindings import driver

    error, address, _ = driver.cuGetProcAddress(BATCH_CALL, BATCH_SINCE, 0)
    if error != driver.CUresult.CUDA_SUCCESS or not address:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )
    return kind(int(address))


def _attributes(order: SourceOrder) -> Any:
    """What one batch says of all its copies; it must outlive the calls."""
    from cuda.bindings import driver

    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder(int(order))
    overlap = driver.CUmemcpyFlags.CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE
    attributes.flags = int(overlap)
    return attributes


def _driver_error(number: int) -> str:
    from cuda.bindings import driver

    try:
        return str(driver.CUresult(number).name)
    except ValueError:
        return f"error {number}"
