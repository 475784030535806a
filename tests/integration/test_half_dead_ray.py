"""Commands say who does not answer, soon, when a part of Ray or of RayKV hangs or is dead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from raykv.cluster.join import raylets, stop_started
from raykv.cluster.processes import argument, command_lines, group_of, is_raylet
from tests.fixtures.waiting import wait_until
from tests.integration.test_local_ray import ADDRESS

# Bounds of seconds hold on a machine that has nothing else to do.
pytestmark = [pytest.mark.integration, pytest.mark.extended]

BOUND_S = 10.0
"""For a whole command, once Python has imported it."""

COMMAND = """
import sys, time
import ray, raykv.client.cluster, raykv.doctor.gather
from raykv.cli import main
sys.argv[0] = "raykv"
print("imported", flush=True)
began = time.monotonic()
try:
    main()
finally:
    print("took", time.monotonic() - began, flush=True)
"""


@dataclass
class Own:
    """A local Ray with RayKV's actors."""

    address: str

    def begin(self, *arguments: str) -> subprocess.Popen[str]:
        command = subprocess.Popen(
            [sys.executable, "-c", COMMAND, *arguments],
            env={**os.environ, "RAY_ADDRESS": self.address or "local"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert command.stdout is not None
        assert command.stdout.readline().strip() == "imported"
        return command

    def raykv(self, *arguments: str, code: int = 0, bound_s: float = BOUND_S) -> str:
        """What a command says; it keeps its bound."""
        command = self.begin(*arguments)
        out, errors = command.communicate(timeout=120)
        assert command.returncode == code, out + errors
        out, _, took = out.rpartition("took ")
        assert float(took) < bound_s, (arguments, took)
        return out + errors

    def process(self, part: str) -> psutil.Process:
        (raylet,) = (
            process
            for process, arguments in command_lines()
            if is_raylet(arguments) and argument(arguments, "gcs-address") == self.address
        )
        group = group_of(raylet.pid)
        heads = {process for process, _ in command_lines() if group_of(process.pid) == group}
        (found,) = (
            process
            for process in heads | set(raylet.children(recursive=True))
            if Path((process.cmdline() or [""])[0]).name == part
        )
        return found

    @contextmanager
    def frozen(self, part: str) -> Iterator[None]:
        process = self.process(part)
        process.suspend()
        wait_until(lambda: process.status() == psutil.STATUS_STOPPED, 5.0, "it is stopped")
        try:
            yield
        finally:
            # What was cleaned up meanwhile is gone.
            with suppress(psutil.NoSuchProcess):
                process.resume()


@pytest.fixture(scope="module")
def own() -> Iterator[Own]:
    made = Own("")
    (made.address,) = ADDRESS.findall(made.raykv("up", "--pool-bytes", "64MiB", bound_s=120.0))
    yield made
    stop_started(made.address)


def test_frozen_node_actor_is_named_by_status_and_doctor(own: Own) -> None:
    with own.frozen("ray::NodeActor"):
        assert "its NodeActor does not answer (no answer within" in own.raykv("status")
        assert "does not answer" in own.raykv("doctor", code=1)
        assert '"silent"' in own.raykv("status", "--json")


def test_frozen_scheduler_actor_is_named(own: Own) -> None:
    with own.frozen("ray::SchedulerActor"):
        for words in (["status"], ["events"], ["chunk", "ls"]):
            assert "the scheduler actor does not answer" in own.raykv(*words, code=2)
        assert "the scheduler actor does not answer" in own.raykv("doctor", code=1)


def test_frozen_head_is_named_and_ctrl_c_ends_the_command(own: Own) -> None:
    with own.frozen("gcs_server"):
        for command in ("status", "doctor"):
            said = own.raykv(command, code=2)
            assert "gcs_server" in said, said
            assert "is stopped" in said, said
        waiting = own.begin("status")
        began = time.monotonic()
        waiting.send_signal(signal.SIGINT)
        waiting.communicate(timeout=60)
        assert time.monotonic() - began < 4.0
    assert "running" in own.raykv("status")


def test_dead_head_with_a_frozen_raylet_is_cleaned_up(own: Own) -> None:
    with own.frozen("raylet"):
        assert "the raylet of this host" in own.raykv("status", code=2)
        own.process("gcs_server").kill()
        own.raykv("status", code=2)
        said = own.raykv("down", "--with-ray", bound_s=30.0)
        assert f"stopped the Ray cluster at {own.address}" in said
    assert own.address not in {each.address for each in raylets()}
