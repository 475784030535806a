"""The real driver as far as it goes without a GPU: what it is given is checked, failures named."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raykv.base.errors import RayKVError
from raykv.copy.cuda.driver import Copies, CUDADriver, checked
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.cuda.memory import UUID


def column(*numbers: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.array(numbers, np.uint64)


@pytest.mark.parametrize(
    "columns",
    [
        (column(1), column(1), column(1, 2)),
        (column(), column(), column()),
        (column(0), column(1), column(1)),
        (column(1), column(0), column(1)),
        (column(1), column(1), column(0)),
        (column(1).astype(np.int64), column(1), column(1)),
        (column(1).reshape(1, 1), column(1).reshape(1, 1), column(1).reshape(1, 1)),
        (column(1, 2, 3)[::2], column(1, 2), column(1, 2)),
    ],
)
def test_copies_that_cuda_would_misread_are_refused(columns: tuple[Any, Any, Any]) -> None:
    with pytest.raises(AssertionError):
        Copies(*columns)


SUCCESS, BAD = SimpleNamespace(name="cudaSuccess"), SimpleNamespace(name="cudaErrorInvalidValue")


@pytest.mark.parametrize(
    ("returned", "value"), [((SUCCESS,), ()), ((SUCCESS, 7), 7), ((SUCCESS, 1, 2), (1, 2))]
)
def test_result_of_a_call_comes_without_its_error(returned: Any, value: Any) -> None:
    runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=SUCCESS), cudaCall=lambda *_: returned
    )
    assert checked(runtime, "cudaCall", 1) == value


def test_failure_names_the_call_and_the_error() -> None:
    runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=SUCCESS), cudaCall=lambda: (BAD, None)
    )
    with pytest.raises(CUDAError, match="cudaCall failed: cudaErrorInvalidValue; see "):
        checked(runtime, "cudaCall")
    assert issubclass(CUDAError, RayKVError)


def test_gpu_is_found_by_its_uuid() -> None:
    uuids = [uuid.uuid4() for _ in range(2)]
    found = [SimpleNamespace(uuid=SimpleNamespace(bytes=each.bytes)) for each in uuids]
    driver = CUDADriver.__new__(CUDADriver)
    driver._runtime = SimpleNamespace(
        cudaError_t=SimpleNamespace(cudaSuccess=SUCCESS),
        cudaGetDeviceCount=lambda: (SUCCESS, len(found)),
        cudaGetDeviceProperties=lambda number: (SUCCESS, found[number]),
    )
    assert [driver._find(str(each)) for each in uuids] == [0, 1]
    with pytest.raises(CUDAError, match=f"sees no GPU {UUID}, only {uuids[0]}, {uuids[1]}:"):
        driver._find(UUID)


def test_machine_without_this_gpu_is_told_in_one_sentence() -> None:
    """Whatever is missing: the package, CUDA's driver, or the device."""
    with pytest.raises(CUDAError, match=r"^[^\n]*(CUDA|cuda)[^\n]*$"):
        CUDADriver(UUID)
