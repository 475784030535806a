"""`raykv demo`, `bench` and `chaos` are ended from outside while Ray and engines run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from raykv.client.cluster import Cluster
from raykv.cluster.names import RAY_NAMESPACE
from raykv.lab.warden import MARK
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(300)]

STARTS_S = 120.0
ENDS_S = 40.0
"""In order: engines, the second node, Ray. By force it takes a second."""

RAYKV = str(Path(sys.executable).with_name("raykv"))
DEMO = ("demo", "--tiny", "--nodes", "2")
NODE_ACTOR = "NodeActor"


@contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that is never waited for in vain."""
    command = subprocess.Popen(
        [RAYKV, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield command
    finally:
        command.kill()
        command.wait(ENDS_S)


class Newcomers:
    """What has begun to run on this host since, and was not begun by others who ran before.

    A command that is killed leaves children without a parent: these count. What other tests
    start beside this one has an ancestor that ran before, and is left out even when it loses it.
    """

    def __init__(self) -> None:
        this = psutil.Process()
        self._left_out = set(psutil.process_iter())
        self._others = self._left_out - {this, *this.parents()}

    def titles(self) -> list[str]:
        found = []
        for process in set(psutil.process_iter()) - self._left_out:
            with contextlib.suppress(psutil.Error):
                if not self._others.isdisjoint(process.parents()):
                    self._others.add(process)
                    self._left_out.add(process)
                elif process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
        return found


@pytest.mark.parametrize(
    ("arguments", "signum"),
    [
        (DEMO, signal.SIGTERM),
        (DEMO, signal.SIGKILL),
        (("chaos", "--minutes", "5"), signal.SIGKILL),
        (("bench", "gpu", "--quick"), signal.SIGKILL),
        (("bench", "gpu", "--quick"), signal.SIGHUP),
    ],
)
def test_ended_command_leaves_no_process(
    arguments: tuple[str, ...], signum: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    assert MARK not in os.environ
    monkeypatch.setenv("RAY_ADDRESS", "local")
    new = Newcomers().titles

    with running(*arguments) as command:
        wait_until(lambda: any(NODE_ACTOR in each for each in new()), STARTS_S, "a NodeActor runs")
        command.send_signal(signum)
        wait_until(lambda: not new(), ENDS_S, "all that was started has ended")


def test_killed_demo_takes_its_actors_out_of_a_cluster_that_stays(cluster: Cluster) -> None:
    pytest.importorskip("vllm")
    import ray

    def actors() -> list[str]:
        named = ray.util.list_named_actors(all_namespaces=True)
        return [each["name"] for each in named if each["namespace"] == RAY_NAMESPACE]

    cluster.down()
    with running("demo", "--tiny", "--address", cluster.address) as command:
        wait_until(lambda: len(actors()) == 2, STARTS_S, "the actors are there")
        command.kill()
        wait_until(lambda: not actors(), ENDS_S, "the actors are gone again")
