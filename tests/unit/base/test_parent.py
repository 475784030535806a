"""A process that is told to ends with its parent, however the parent ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil
import pytest

from raykv.base.parent import end_with_parent

CHILD = """
import os, sys, time
from raykv.base.parent import end_with_parent
parent = os.getppid()
if sys.argv[1] == "told":
    assert end_with_parent(parent)
else:
    assert not end_with_parent(parent + 1)
print(os.getpid(), flush=True)
time.sleep(60)
"""
PARENT = """
import subprocess, sys, threading, time
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
starter = threading.Thread(target=subprocess.Popen, args=[command])
starter.start()
starter.join()
time.sleep(60)
"""
"""The thread that starts the child ends at once; that is not the parent's end."""

QUIET_S = 0.2
"""In which a signal that was sent has come."""


@pytest.mark.parametrize(("word", "ends"), [("told", True), ("not", False)])
def test_child_ends_with_its_killed_parent_only_if_told(word: str, ends: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, word], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    try:
        _, alive = psutil.wait_procs([child], timeout=QUIET_S)
        assert alive
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
        _, alive = psutil.wait_procs([child], timeout=10 if ends else QUIET_S)
        assert not alive if ends else alive
    finally:
        parent.stdout.close()
        if child.is_running():
            child.kill()


def test_process_of_another_parent_is_left_alone() -> None:
    assert not end_with_parent(1 if psutil.Process().ppid() != 1 else 2)
