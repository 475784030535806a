"""GPUs by their UUIDs: each is opened once."""

from __future__ import annotations

import pytest

from raykv.copy.cuda import driver
from raykv.copy.cuda.backend import CUDABackend, backend
from raykv.copy.cuda.lane import Device
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.cuda.copies import FakeDriver
from tests.fixtures.cuda.memory import UUID


def device_of(uuid: str) -> Device:
    made = backend(uuid, 0, 0, None)
    assert isinstance(made, CUDABackend)
    return made.device


def test_device_is_opened_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened = []

    def open_device(uuid: str) -> FakeDriver:
        opened.append(uuid)
        if len(opened) == 1:
            raise CUDAError("not yet")
        return FakeDriver()

    monkeypatch.setattr(driver, "CUDADriver", open_device)
    with pytest.raises(CUDAError, match="not yet"):
        device_of(UUID)
    first = device_of(UUID)
    assert device_of(UUID) is first
    assert device_of(UUID.replace("3f", "4f")) is not first
    assert len(opened) == 3
