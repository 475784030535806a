"""How busy a GPU is, as nvidia-smi samples it: the share of time in which some kernel runs.

That share says nothing of how much of the GPU a kernel takes; copies by the GPU's own copy engines
do not count.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from statistics import fmean

SAMPLES_MS = 100
END_S = 10.0
"""A command that was killed has ended long before."""


def nvidia_smi() -> list[str]:
    """The command that writes how busy the first visible GPU is, again and again."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    return ["nvidia-smi", f"--id={first}", *query, f"--loop-ms={SAMPLES_MS}"]


class BusyGPU:
    """Samples until it is closed. Where there is no such command, there are no samples."""

    def __init__(self, command: Sequence[str]) -> None:
        """`command` writes a line with per cent for each sample; other lines are left out."""
        self._samples: list[tuple[float, float]] = []
        self._process: subprocess.Popen[str] | None = None
        try:
            self._process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        except OSError:
            return
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                self._samples.append((time.monotonic(), float(line)))
            except ValueError:
                continue

    @property
    def has_samples(self) -> bool:
        """Whether there has been any."""
        return bool(self._samples)

    def between(self, began: float, ended: float) -> float | None:
        """Per cent, the mean of the samples between two times of `time.monotonic`; None: there is
        none.
        """
        some = [share for at, share in list(self._samples) if began <= at <= ended]
        return fmean(some) if some else None

    def close(self) -> None:
        """End it."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(END_S)
        self._thread.join(END_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
