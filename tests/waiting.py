"""Waiting for something that another process does; always with a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], deadline_s: float, what: str) -> None:
    """Poll `condition` until it holds.

    Raises:
        AssertionError: it did not hold within `deadline_s`; the text says what was waited for.
    """
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at, f"not within {deadline_s} s: {what}"
        time.sleep(0.05)
