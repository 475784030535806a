"""What tests do to processes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def freeze(pid: int, deadline_s: float = 10.0) -> None:
    """Stop a process; it is when this returns. A signal alone takes effect a bit later."""
    os.kill(pid, signal.SIGSTOP)
    give_up_at = time.monotonic() + deadline_s
    while not _is_stopped(pid):
        assert time.monotonic() < give_up_at, f"process {pid} does not stop"
        time.sleep(0.001)


def _is_stopped(pid: int) -> bool:
    """Whether no thread of it runs."""
    states = [
        path.read_text().rpartition(")")[2].split()[0]
        for path in Path(f"/proc/{pid}/task").glob("*/stat")
    ]
    return all(state in "tT" for state in states)
