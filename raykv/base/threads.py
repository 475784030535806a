"""Threads that do not die silently: every thread of RayKV is one of these.

                 body returns
      start ──► RUNNING ─────────► ended
                 │   ▲ after a pause
                 │   │
            body raises ── too often: END_PROCESS ──► the process ends, with a sentence
                 └─────── GIVE_UP ──► ended, logged

A failure is counted and logged with its traceback, once until the thread has run well for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum, auto
from typing import NoReturn, TypeVar

from raykv.base import deadlines
from raykv.base.errors import ThreadError

logger = logging.getLogger("raykv.threads")

# A thread that has run this long has recovered from its last failure.
THREAD_WELL_S = 60.0

T = TypeVar("T")

PR_SET_TIMERSLACK = 29
"""Of `prctl(2)`, in nanoseconds."""

MAX_FAILURES = 5
"""Failures in a row of an actor's thread that never ran well: then another process is tried."""

_counting = threading.Lock()
_num_failed = 0


class OnFailure(Enum):
    """What happens when a thread's body raises."""

    END_PROCESS = auto()
    """An actor's: it is run again; if that fails too, again and again, Ray starts another actor."""
    RUN_AGAIN = auto()
    """An engine's, or a person's: it is run again for as long as the process lives."""
    GIVE_UP = auto()
    """Its work is done once, and every wait for it has a deadline."""


def end_process(why: str) -> NoReturn:
    """End this process now, whatever its other threads do; Ray, or vLLM, sees that it is gone."""
    logger.critical("this process ends itself: %s", why)
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(1)


def sleep_precisely() -> None:
    """Have this thread's sleeps end when they should: Linux lets each last up to 50 µs longer, so
    that a core may sleep on. Elsewhere, or refused, nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def num_failed() -> int:
    """How often threads of this process have failed, or could not be started."""
    return _num_failed


class SupervisedThread:
    """A daemon thread that runs `body` until that returns. Any thread may call the methods.

    A body that has raised is called anew, so that it must find its own way on from what it keeps.

    Args:
        name: as `ps -T` and tracebacks show it.
        body: what it does.
        on_failure: what happens when that raises.
    """

    def __init__(self, name: str, body: Callable[[], object], on_failure: OnFailure) -> None:
        self._name = name
        self._body = body
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self._revive_at = 0.0

    def start(self) -> None:
        """Begin; once.

        Raises:
            ThreadError: the system gives this process no more threads.
        """
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            _count()
            raise ThreadError(
                f"the thread {self._name} can't be started ({error}): raise the limit of processes "
                "(`ulimit -u`, pids.max of the container), or end some"
            ) from error
        self._thread = thread

    def revive(self) -> bool:
        """Begin if `start` failed or was not called; True if it lives. Tried with pauses."""
        if self._thread is None and time.monotonic() >= self._revive_at:
            self._revive_at = time.monotonic() + deadlines.AGAIN_S
            try:
                self.start()
            except ThreadError as error:
                logger.warning("%s", error)
        return self.is_alive()

    def is_alive(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread is not None and self._thread.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait at most this long for its end; one that has not begun has ended."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        pause_s, longest_s = deadlines.RETRY_PAUSES_S
        num_failures = 0
        while True:
            began = time.monotonic()
            try:
                self._body()
                return
            except BaseException as error:
                _count()
                if time.monotonic() - began >= THREAD_WELL_S:
                    num_failures, pause_s = 0, deadlines.RETRY_PAUSES_S[0]
                num_failures += 1
                self._say(error, num_failures)
                if self._on_failure is OnFailure.GIVE_UP:
                    return
                if self._on_failure is OnFailure.END_PROCESS and num_failures >= MAX_FAILURES:
                    end_process(
                        f"its thread {self._name} has failed {num_failures} times, the last time "
                        f"with {type(error).__name__}: {error}"
                    )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _say(self, error: BaseException, num_failures: int) -> None:
        then = "ends" if self._on_failure is OnFailure.GIVE_UP else "begins anew"
        if num_failures == 1:
            logger.error(
                "the thread %s failed and %s (said once)", self._name, then, exc_info=error
            )
        else:
            logger.debug("the thread %s failed again: %s", self._name, error)


def start_thread(
    name: str, body: Callable[[], object], on_failure: OnFailure = OnFailure.GIVE_UP
) -> SupervisedThread:
    """A thread that has begun.

    Raises:
        ThreadError: the system gives this process no more threads.
    """
    thread = SupervisedThread(name, body, on_failure)
    thread.start()
    return thread


def _count() -> None:
    global _num_failed
    with _counting:
        _num_failed += 1


def begun(call: Callable[[], T]) -> Future[T]:
    """What `call` will return or raise, in a thread of its own.

    Raises:
        ThreadError: there is no thread to make it in.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    start_thread("raykv-call", run)
    return future


def within(deadline_s: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises.

    Raises:
        ThreadError: there is no thread to make it in.
        TimeoutError: it took longer than `deadline_s`; it goes on, and its result is lost.
    """
    return begun(call).result(deadline_s)
