"""A process that must not outlive the one that has started it."""

from __future__ import annotations

import os
import select
import signal
from functools import partial

from raykv.base.threads import OnFailure, start_thread


def end_with_parent(pid: int, signum: signal.Signals = signal.SIGKILL) -> bool:
    """Let this process get `signum` when its parent has ended, however that ended.

    A thread waits for it. The kernel could send a signal by itself (PR_SET_PDEATHSIG), but does so
    already when the *thread* has ended that started this process.

    Returns:
        False: `pid` is not the parent, or not any more, and nothing will be sent.
    """
    if os.getppid() != pid:
        return False
    pidfd = os.pidfd_open(pid)
    if os.getppid() != pid:
        os.close(pidfd)
        return False
    start_thread("raykv-parent", partial(_end_after, pidfd, signum), OnFailure.RUN_AGAIN)
    return True


def _end_after(pidfd: int, signum: signal.Signals) -> None:
    select.select([pidfd], [], [])  # bounded: a daemon thread, until the parent has ended
    os.kill(os.getpid(), signum)
