"""Calls without a deadline of their own get one."""

from __future__ import annotations

import threading
import time

import pytest

from raykv.base.threads import within

LONG_S = 10.0


def test_what_the_call_returns_or_raises_is_passed_on() -> None:
    assert within(LONG_S, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        within(LONG_S, lambda: 1 // 0)


def test_call_that_takes_too_long_is_left() -> None:
    hanging = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        within(0.1, lambda: hanging.wait(LONG_S))
    assert time.monotonic() - started < LONG_S / 2
    hanging.set()
