"""GPUs by their UUIDs: each is opened once."""

from __future__ import annotations

import pytest

from raykv.copy.cuda.backend import OpenDevices
from raykv.copy.cuda.lane import Device
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.cuda.copies import FakeDriver
from tests.fixtures.cuda.memory import UUID


def test_device_is_opened_once_however_its_uuid_is_written() -> None:
    opened = []

    def open_device(uuid: str) -> Device:
        opened.append(uuid)
        if len(opened) == 1:
            raise CUDAError("not yet")
        return Device(FakeDriver())

    devices = OpenDevices(open_device)
    with pytest.raises(CUDAError, match="not yet"):
        devices.get(UUID)
    first = devices.get(UUID)
    for same in (UUID, UUID[4:], UUID[4:].upper(), UUID[4:].replace("-", "")):
        assert devices.get(same) is first
    assert devices.get(UUID.replace("3f", "4f")) is not first
    assert len(opened) == 3


@pytest.mark.parametrize("uuid", ["", "GPU-", "0", UUID + "0", UUID.replace("3", "x")])
def test_text_that_is_no_uuid_is_refused(uuid: str) -> None:
    devices = OpenDevices(lambda _: Device(FakeDriver()))
    with pytest.raises(CUDAError, match="no UUID of a GPU"):
        devices.get(uuid)
