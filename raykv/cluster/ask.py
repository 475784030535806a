"""Calls that have no deadline of their own, made in a thread that nobody waits for too long."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from raykv.base.threads import start_thread

T = TypeVar("T")


def within(deadline_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises.

    Raises:
        ThreadError: there is no thread to make it in.
        TimeoutError: it took longer than `deadline_s`; it goes on, and nobody hears of its end.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    start_thread("raykv-call", run)
    return future.result(deadline_s)
