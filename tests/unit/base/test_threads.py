"""Threads: those that fail go on, or their process ends; all are ours; calls get deadlines."""

from __future__ import annotations

import ast
import ctypes
import re
import subprocess
import sys
import threading
import time

import pytest

from raykv.base import threads
from tests import house
from tests.house import ROOT, tree_of

LEFT_OUT = ("raykv/lab/", "raykv/serve/models.py", "raykv/base/threads.py")
SOURCES = [path for path in house.SOURCES if not str(path.relative_to(ROOT)).startswith(LEFT_OUT)]
STARTERS = {
    "Thread",
    "Timer",
    "ThreadPoolExecutor",
    "ProcessPoolExecutor",
    "start_new_thread",
    "ensure_future",
    "create_task",
    "run_coroutine_threadsafe",
}
WATCHED = re.compile(r"# watched: \w")
TIMES_S = 10.0


def starts(source: str, tree: ast.Module) -> list[str]:
    """Threads and tasks that nobody supervises.

    Who opens a pool in a `with` statement waits for the ends of all that it does; elsewhere
    `# watched: who notices that it has failed` stands in or above the call.
    """
    lines, found = ["", *source.splitlines()], []
    awaited = {
        id(item.context_expr)
        for node in ast.walk(tree)
        if isinstance(node, ast.With)
        for item in node.items
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or id(node) in awaited:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name not in STARTERS:
            continue
        if not any(map(WATCHED.search, lines[node.lineno - 1 : node.lineno + 1])):
            found.append(f"line {node.lineno}: {name} dies silently; see raykv.base.threads")
    return found


def test_every_thread_is_supervised() -> None:
    assert len(SOURCES) > 50
    found = {str(path): starts(path.read_text(), tree_of(path)) for path in SOURCES}
    assert not {path: sentences for path, sentences in found.items() if sentences}


@pytest.mark.parametrize(
    "source",
    [
        "threading.Thread(target=run).start()",
        "Thread(target=run)",
        "threading.Timer(1, run)",
        "pool = ThreadPoolExecutor(2)",
        "_thread.start_new_thread(run, ())",
        "asyncio.create_task(run())",
        "def f():\n    def g():\n        threading.Thread(target=run)",
    ],
)
def test_thread_that_nobody_supervises_is_found(source: str) -> None:
    assert len(starts(source, ast.parse(source))) == 1
    watched = "# watched: by a test\n" + source.splitlines()[-1].strip()
    assert not starts(watched, ast.parse(watched))


class Failing:
    """Raises so many times, then ends."""

    def __init__(self, num_failures: int, error: BaseException) -> None:
        self.left = num_failures
        self.error = error
        self.has_ended = threading.Event()

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            raise self.error
        self.has_ended.set()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.RETRY_PAUSES_S", (0.001, 0.01))


@pytest.mark.parametrize("error", [ValueError("a bug"), SystemExit(3), MemoryError()])
@pytest.mark.parametrize("on_failure", [threads.OnFailure.RUN_AGAIN, threads.OnFailure.END_PROCESS])
def test_thread_goes_on_after_failures_that_are_counted_and_said_once(
    on_failure: threads.OnFailure, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    body, before = Failing(threads.MAX_FAILURES - 1, error), threads.num_failed()
    thread = threads.start_thread("raykv-test", body, on_failure)
    assert body.has_ended.wait(TIMES_S)
    thread.join(TIMES_S)
    assert not thread.is_alive()
    assert threads.num_failed() - before == threads.MAX_FAILURES - 1
    assert caplog.text.count("the thread raykv-test failed and begins anew") == 1
    assert type(error).__name__ in caplog.text


def test_thread_of_an_engine_goes_on_for_as_long_as_it_fails() -> None:
    body = Failing(4 * threads.MAX_FAILURES, ValueError("a bug"))
    threads.start_thread("raykv-test", body, threads.OnFailure.RUN_AGAIN)
    assert body.has_ended.wait(TIMES_S)


def test_thread_that_works_once_ends_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    body = Failing(1, ValueError("a bug"))
    thread = threads.start_thread("raykv-test", body)
    thread.join(TIMES_S)
    assert not thread.is_alive()
    assert not body.has_ended.is_set()
    assert "the thread raykv-test failed and ends" in caplog.text


def test_thread_that_ran_well_for_a_while_counts_its_failures_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else an actor would end after some failures in a year."""
    monkeypatch.setattr(threads, "THREAD_WELL_S", 0.0)
    body = Failing(3 * threads.MAX_FAILURES, ValueError("a bug"))
    threads.start_thread("raykv-test", body, threads.OnFailure.END_PROCESS)
    assert body.has_ended.wait(TIMES_S)


ENDLESS = """
import time
from raykv.base.threads import OnFailure, start_thread

def fail():
    raise ValueError("a bug")

start_thread("raykv-test", fail, OnFailure.END_PROCESS)
time.sleep(60)
"""


def test_process_of_an_actor_ends_when_its_thread_fails_again_and_again() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDLESS], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    expected = (
        f"thread raykv-test has failed {threads.MAX_FAILURES} times, the last time with ValueError"
    )
    assert expected in ended.stderr
    assert ended.stderr.count("Traceback") == 1


LIMITED = """
import os, resource
from raykv.base.errors import ThreadError
from raykv.base.threads import OnFailure, SupervisedThread, num_failed

if os.getuid() == 0:  # who is not limited
    os.setuid(65534)
_, hard = resource.getrlimit(resource.RLIMIT_NPROC)
resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
thread = SupervisedThread("raykv-test", lambda: print("it ran", flush=True), OnFailure.RUN_AGAIN)
try:
    thread.start()
except ThreadError as error:
    print(error)
assert not thread.revive() and not thread.is_alive()
assert num_failed() == 2
thread.join(0)
resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))
assert not thread.revive()  # not before a pause
import raykv.base.deadlines
raykv.base.deadlines.AGAIN_S = 0
thread._revive_at = 0
thread.revive()
thread.join(10)
"""


def test_thread_that_the_system_does_not_give_is_an_error_and_comes_once_there_is_one() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended.stderr
    said, ran = ended.stdout.splitlines()
    assert "can't start new thread" in said
    assert "ulimit -u" in said
    assert ran == "it ran"


def test_thread_that_was_never_started_is_none_that_lives() -> None:
    thread = threads.SupervisedThread("raykv-test", lambda: None, threads.OnFailure.GIVE_UP)
    assert not thread.is_alive()
    thread.join(0)


LONG_S = 10.0


def test_what_the_call_returns_or_raises_is_passed_on() -> None:
    assert threads.within(LONG_S, lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        threads.within(LONG_S, lambda: 1 // 0)


def test_call_that_takes_too_long_is_left() -> None:
    hanging = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        threads.within(0.1, lambda: hanging.wait(LONG_S))
    assert time.monotonic() - started < LONG_S / 2
    hanging.set()


PR_GET_TIMERSLACK = 30


def test_sleeps_of_a_thread_that_asks_for_it_are_not_made_longer() -> None:
    """Linux says by how many nanoseconds it may."""

    def slack() -> int:
        return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    before, found = slack(), list[int]()
    if before <= 1:
        pytest.skip("this kernel has no timer slack")

    def ask() -> None:
        threads.sleep_precisely()
        found.append(slack())

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join(10.0)
    assert found == [1]
    assert slack() == before
