"""The real driver over stand-ins for `cuda.bindings`: errors, contexts, and what is undone."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import uuid
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.memory.cuda.driver import CUDAError, Extent, MemoryDriver, load

GPUS = [uuid.UUID(int=n + 1) for n in range(2)]
UUIDS = [str(each) for each in GPUS]


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Handle:
    """64 bytes that are had by address only, as those of `cuda.bindings` are."""

    def __init__(self) -> None:
        self.raw = ctypes.create_string_buffer(64)

    def getPtr(self) -> int:  # noqa: N802
        return ctypes.addressof(self.raw)


class Bindings:
    """`cuda.bindings.driver`: records calls, answers what `answers` says, refuses what it must."""

    CUresult = Result
    CUipcMemHandle = CUipcEventHandle = Handle
    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.refused_at: dict[str, int] = {}
        self.answers: dict[str, Any] = {
            "cuDeviceGetCount": 2,
            "cuIpcOpenMemHandle": 0x5000,
        }

    def __getattr__(self, name: str) -> Any:
        if name == "cuDeviceGetUuid_v2":
            raise AttributeError(name)
        if name.startswith("cu"):
            return lambda *arguments: self.call(name, arguments)
        if name in ("CUdeviceptr", "CUevent", "CUstream"):
            return int
        return Constants(name)

    def call(self, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        self.calls.append((name, arguments))
        if name in self.refused_at:
            self.refused_at[name] -= 1
            if self.refused_at[name] < 0:
                return (Result.CUDA_ERROR_OUT_OF_MEMORY,)
        if name == "cuDeviceGet":
            return Result.CUDA_SUCCESS, arguments[0]
        if name == "cuDeviceGetUuid":
            return Result.CUDA_SUCCESS, SimpleNamespace(bytes=GPUS[arguments[0]].bytes)
        if name == "cuMemGetAddressRange":
            return Result.CUDA_SUCCESS, 0x5000, 0x1000
        if name == "cuDevicePrimaryCtxRetain":
            return Result.CUDA_SUCCESS, f"context {arguments[0]}"
        if name in ("cuIpcGetMemHandle", "cuIpcGetEventHandle"):
            made = Handle()
            made.raw.raw = bytes(range(64))
            return Result.CUDA_SUCCESS, made
        if name in self.answers:
            return Result.CUDA_SUCCESS, self.answers[name]
        return (Result.CUDA_SUCCESS,)

    def named(self, *names: str) -> list[tuple[str, tuple[Any, ...]]]:
        return [call for call in self.calls if call[0] in names]


class Constants:
    """An enumeration whose members have some number."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> int:
        return 1 + len(name)


@pytest.fixture
def cuda() -> Bindings:
    return Bindings()


def test_devices_are_known_by_their_uuids(cuda: Bindings) -> None:
    assert MemoryDriver(cuda).devices() == UUIDS


def test_refused_call_is_named_with_cudas_error(cuda: Bindings) -> None:
    driver = MemoryDriver(cuda)
    cuda.refused_at["cuMemHostRegister"] = 0
    with pytest.raises(CUDAError, match=r"cuMemHostRegister.*refused: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.register_host(UUIDS[0], 4096, 4096)


def test_cuda_that_does_not_start_is_refused(cuda: Bindings) -> None:
    cuda.refused_at["cuInit"] = 0
    with pytest.raises(CUDAError, match="cuInit"):
        MemoryDriver(cuda)


def test_every_call_enters_its_devices_context_which_is_taken_once(cuda: Bindings) -> None:
    driver = MemoryDriver(cuda)
    for device in (UUIDS[1], UUIDS[0], UUIDS[1]):
        driver.register_host(device, 4096, 4096)
    assert [arguments for _, arguments in cuda.named("cuDevicePrimaryCtxRetain")] == [(1,), (0,)]
    entered = [arguments[0] for _, arguments in cuda.named("cuCtxSetCurrent")]
    assert entered == ["context 1", "context 0", "context 1"]


def test_gpu_that_this_process_does_not_see_is_named_with_those_that_it_sees(
    cuda: Bindings,
) -> None:
    driver = MemoryDriver(cuda)
    with pytest.raises(CUDAError, match=f"does not see GPU other, only .*{UUIDS[0]}"):
        driver.open_memory("other", bytes(64))


def test_handles_cross_as_bytes(cuda: Bindings) -> None:
    driver = MemoryDriver(cuda)
    cuda.answers["cuPointerGetAttribute"] = 1
    assert driver.export_memory(0x5000) == bytes(range(64))
    assert driver.export_event(5) == bytes(range(64))
    raw = os.urandom(64)
    assert driver.open_memory(UUIDS[0], raw) == Extent(0x5000, 0x1000)
    (_, (handle, _)) = cuda.named("cuIpcOpenMemHandle")[0]
    assert handle.raw.raw == raw


def test_opened_memory_is_closed_when_its_size_can_not_be_had(cuda: Bindings) -> None:
    driver = MemoryDriver(cuda)
    cuda.refused_at["cuMemGetAddressRange"] = 0
    with pytest.raises(CUDAError, match="cuMemGetAddressRange"):
        driver.open_memory(UUIDS[0], bytes(64))
    assert cuda.named("cuIpcCloseMemHandle") == [("cuIpcCloseMemHandle", (0x5000,))]


def test_machine_without_cuda_is_told_what_to_install() -> None:
    """In a process of its own: CUDA must not start in this one, even where it could."""
    code = (
        "import sys; sys.modules['cuda'] = None\n"
        "from raykv.memory.cuda.driver import load\n"
        "from raykv.memory.cuda.driver import CUDAError\n"
        "try:\n    load()\nexcept CUDAError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert "CUDA can't be used in this process" in done.stdout
    assert (
        "needs NVIDIA's driver and cuda-bindings there; install RayKV with its extra cuda"
        in done.stdout
    )


def test_driver_is_not_loaded_by_importing_it() -> None:
    assert callable(load)
    assert "cuda.bindings.driver" not in sys.modules
