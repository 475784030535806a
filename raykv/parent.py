"""A process that must not outlive the one that has started it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(pid: int, signum: signal.Signals = signal.SIGKILL) -> bool:
    """Let the kernel send `signum` to this process when its parent ends.

    By its parent the kernel means the thread that has started this process.

    Returns:
        False: `pid` is not the parent, or not any more, and nothing will be sent.
    """
    if os.getppid() != pid:
        return False
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)
    # It may have ended before the kernel knew.
    return os.getppid() == pid
