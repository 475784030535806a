"""What a command has started ends with it, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import psutil
import pytest

from raykv.lab.warden import MARK, ending_what_it_starts
from tests.fixtures.waiting import wait_until

ENDS_S = 10.0
"""For the warden to see it and to kill."""

ENGINE = """
import time, setproctitle
setproctitle.setproctitle("engine " * 400)
time.sleep(60)
"""
"""The long title lies where its environment was, as with vLLM's processes."""

DAEMON = f"""
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", {ENGINE!r}]).pid, flush=True)
time.sleep(60)
"""

COMMAND = f"""
import subprocess, sys
from raykv.lab.warden import ending_what_it_starts
STARTER = '''import subprocess, sys
daemon = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
print(daemon.pid, flush=True)'''
with ending_what_it_starts():
    print(subprocess.Popen([sys.executable, "-c", {ENGINE!r}]).pid, flush=True)
    subprocess.run([sys.executable, "-c", STARTER, {DAEMON!r}], check=True)
    sys.exit(int(sys.stdin.readline()))
"""


ENDS = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGHUP: 129, None: 3}
"""Exit codes by the signal that a command gets; without one it fails by itself."""


class Run:
    """A command, and what it has started: an engine, a daemon, and a child of that one."""

    def __init__(self) -> None:
        self.command = subprocess.Popen(
            [sys.executable, "-c", COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started: list[psutil.Process] = []

    def wait_until_watched(self) -> None:
        assert self.command.stdout is not None
        self.started = [psutil.Process(int(self.command.stdout.readline())) for _ in range(3)]
        wait_until(lambda: sum(map(is_titled, self.started)) == 2, ENDS_S, "engines have titles")
        wait_until(self._has_looked(), ENDS_S, "the warden has looked since then")

    def _has_looked(self) -> Callable[[], bool]:
        children = psutil.Process(self.command.pid).children()
        warden = next(each for each in children if "raykv.lab.warden" in each.cmdline())
        before = warden.num_ctx_switches().voluntary
        return lambda: warden.num_ctx_switches().voluntary > before + 2

    def end(self, signum: signal.Signals | None) -> None:
        if signum is not None:
            self.command.send_signal(signum)
        else:
            assert self.command.stdin is not None
            self.command.stdin.write("3\n")
            self.command.stdin.flush()

    def close(self) -> None:
        self.command.kill()
        self.command.communicate(timeout=ENDS_S)
        for each in self.started:
            if each.is_running():
                each.kill()


def is_titled(process: psutil.Process) -> bool:
    return Path(f"/proc/{process.pid}/cmdline").read_text().startswith("engine")


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[signal.Signals | None, Run]]:
    """All at once, since each takes seconds; each is ended in its own way."""
    with ExitStack() as stack:
        runs = {how: stack.enter_context(closing(Run())) for how in ENDS}
        for run in runs.values():
            run.wait_until_watched()
        for how, run in runs.items():
            run.end(how)
        yield runs


@pytest.mark.parametrize("how", ENDS)
def test_all_that_a_command_has_started_ends_with_it(
    runs: dict[signal.Signals | None, Run], how: signal.Signals | None
) -> None:
    assert runs[how].command.wait(ENDS_S) == ENDS[how]
    assert psutil.wait_procs(runs[how].started, timeout=ENDS_S)[1] == []


def test_environment_and_handlers_are_as_before_afterwards() -> None:
    signals = (signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(each) for each in signals]
    with ending_what_it_starts():
        assert os.environ[MARK]
        assert [signal.getsignal(each) for each in signals] != handlers
    assert MARK not in os.environ
    assert [signal.getsignal(each) for each in signals] == handlers
