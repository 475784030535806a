"""Waiting for something that another process does; always with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from raykv.base.errors import ClusterError

DEADLINE_S = 60.0

LOOK_S = 0.0002
"""Short compared with what is measured, long enough to leave the processor to others."""


def wait(
    condition: Callable[[], bool],
    what: str,
    pause_s: float = LOOK_S,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Wait until a condition holds.

    Raises:
        ClusterError: it does not within the deadline.
    """
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at:
            raise ClusterError(f"not within {deadline_s:.0f} s: {what}")
        time.sleep(pause_s)
