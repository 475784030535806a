"""How busy a GPU is: samples of a command that writes lines."""

from __future__ import annotations

import sys
import time
from contextlib import closing

import pytest

from raykv.lab.bench.busy import BusyGPU, nvidia_smi
from tests.fixtures.waiting import wait_until

LINES = "for share in ('10', '[N/A]', '30'): print(share, flush=True)\n"


def test_samples_between_two_times_are_averaged_and_others_are_left_out() -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", f"import time\n{LINES}time.sleep(60)"]
    with closing(BusyGPU(command)) as busy:
        wait_until(lambda: busy.between(began, time.monotonic()) == 20.0, 30.0, "both samples")
        assert busy.has_samples
        assert busy.between(began - 2.0, began - 1.0) is None


def test_machine_without_the_command_has_no_samples() -> None:
    with closing(BusyGPU(["there-is-no-such-command"])) as busy:
        assert not busy.has_samples
        assert busy.between(0.0, time.monotonic()) is None


@pytest.mark.parametrize(("visible", "told"), [("", "0"), ("3,1", "3"), ("GPU-ab", "GPU-ab")])
def test_first_visible_gpu_is_asked(
    visible: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert f"--id={told}" in nvidia_smi()
