"""A NodeActor that was killed and does not exit: its worker's jobs end all the same, safely.

It is held by a tracer at the last moment before its exit, as a process is that gets no core.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator

import pytest

import raykv.worker.link
from raykv.base.deadlines import IDLE_LOOK_S, PROMPT_S
from raykv.base.ids import Direction, Refusal
from raykv.cluster.deaths import has_halted, kill
from raykv.worker.link import LINK_EXIT_S
from tests.fixtures.node.links import SETTINGS, Node, failures
from tests.fixtures.processes import freeze
from tests.fixtures.waiting import wait_until

PTRACE_CONT, PTRACE_SEIZE = 7, 0x4206
PTRACE_O_TRACEEXIT, PTRACE_EVENT_EXIT = 0x40, 6
DEADLINE_S = (
    SETTINGS.step_deadline_s + SETTINGS.cancel_grace_s + LINK_EXIT_S + IDLE_LOOK_S + PROMPT_S
)
NOISE_S = 3.0


class Tracer:
    """Keeps a process from exiting. All calls from one thread, as ptrace wants it."""

    def __init__(self) -> None:
        self._pid = 0
        self._is_exiting = False
        self._call = ctypes.CDLL(None, use_errno=True).ptrace
        self._call.argtypes = [ctypes.c_long] * 4

    def hold(self, pid: int) -> None:
        """Freeze it, and from now on have it stop before it exits."""
        freeze(pid)
        if self._call(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXIT):
            pytest.skip(f"processes can't be traced here: {os.strerror(ctypes.get_errno())}")
        self._pid = pid

    def wait_until_it_exits(self) -> None:
        """Until it has come to its last moment; a stop before that is the freezing."""

        def is_exiting() -> bool:
            _, status = os.waitpid(self._pid, os.WNOHANG | os.WUNTRACED)
            return status >> 16 == PTRACE_EVENT_EXIT

        if not self._is_exiting:
            wait_until(is_exiting, 10.0, "the process is about to exit")
            self._is_exiting = True

    def let_go(self) -> None:
        """Have it exit."""
        pid, self._pid = self._pid, 0
        if pid:
            self._call(PTRACE_CONT, pid, 0, 0)


@pytest.fixture
def tracer(node: Node) -> Iterator[Tracer]:
    made = Tracer()
    yield made
    if made._pid:
        os.kill(node.process.pid, signal.SIGKILL)
        made.wait_until_it_exits()
        made.let_go()


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_load_ends_and_leaves_its_blocks_alone_although_the_killed_node_does_not_exit(
    node: Node, tracer: Tracer
) -> None:
    worker = node.worker()
    assert worker.store([0], [0]) == []
    before = [worker.block(number) for number in range(8)]
    tracer.hold(node.process.pid)
    job = worker.job(Direction.LOAD, [0], [3])
    began = time.monotonic()
    worker.link.submit(job)
    worker.link.wait([job.job_id])
    took_s = time.monotonic() - began
    assert failures(worker.finish(job.job_id)) == [Refusal.NODE_LOST]
    assert took_s < DEADLINE_S + NOISE_S
    assert is_there(node.process.pid), "the test is about one that has not exited"
    tracer.wait_until_it_exits()
    tracer.let_go()
    assert node.process.wait(10) == -signal.SIGKILL
    assert [worker.block(number) for number in range(8)] == before


@pytest.mark.parametrize("writer", ["a GPU", "a thread"])
def test_engine_ends_itself_where_somebody_may_still_write_for_a_node_that_does_not_exit(
    node: Node, tracer: Tracer, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    last_s = LINK_EXIT_S + 1.0
    monkeypatch.setattr(raykv.worker.link, "LINK_LAST_S", last_s)
    if writer == "a GPU":
        # The worker believes that its memory is not the kind that only threads write to.
        monkeypatch.setattr(raykv.worker.link, "MEMFD", "another kind")
    else:
        monkeypatch.setattr("raykv.cluster.deaths.has_halted", lambda _timeout_s: False)
    reasons: list[str] = []
    worker = node.worker(end_engine=reasons.append)
    assert worker.store([0], [0]) == []
    tracer.hold(node.process.pid)
    job = worker.job(Direction.LOAD, [0], [3])
    began = time.monotonic()
    worker.link.submit(job)
    wait_until(lambda: bool(reasons), DEADLINE_S + 1.0 + NOISE_S, "the engine ends")
    assert time.monotonic() - began > last_s, "until then it could have exited"
    assert "has not exited" in reasons[0]
    assert worker.link.drain() == [], "while the GPU may write nothing is reported"


def test_store_from_a_gpu_ends_although_the_killed_node_does_not_exit(
    node: Node, tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is still read goes into the memory of a NodeActor that says nothing of it any more."""
    monkeypatch.setattr(raykv.worker.link, "MEMFD", "another kind")
    worker = node.worker()
    tracer.hold(node.process.pid)
    job = worker.job(Direction.STORE, [0], [0])
    began = time.monotonic()
    worker.link.submit(job)
    assert failures(worker.finish(job.job_id)) == [Refusal.NODE_LOST]
    assert time.monotonic() - began < DEADLINE_S + NOISE_S
    assert is_there(node.process.pid)


def test_process_has_halted_once_it_is_killed_although_it_does_not_exit(
    node: Node, tracer: Tracer
) -> None:
    tracer.hold(node.process.pid)
    pidfd = os.pidfd_open(node.process.pid)
    try:
        assert kill(pidfd)
        assert has_halted(PROMPT_S)
        tracer.wait_until_it_exits()
        assert is_there(node.process.pid)
    finally:
        os.close(pidfd)


def test_process_that_is_gone_was_not_killed(node: Node) -> None:
    pidfd = os.pidfd_open(node.process.pid)
    node.end()
    try:
        assert not kill(pidfd)
    finally:
        os.close(pidfd)
