"""deploy/node.sh with stand-ins for Ray and the engine: who is started, ended, and when."""

from __future__ import annotations

import contextlib
import http.server
import os
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fixtures.waiting import wait_until
from tests.house import ROOT

SCRIPT = ROOT / "deploy" / "node.sh"
DEADLINE_S = 20.0

pytestmark = pytest.mark.skipif(
    shutil.which("curl") is None or shutil.which("bash") is None, reason="needs bash and curl"
)


class Health:
    """Answers as the Ray node does: 503 until `is_up`."""

    def __init__(self) -> None:
        self.is_up = False
        self.num_asked = 0
        health = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                health.num_asked += 1
                self.send_response(200 if health.is_up else 503)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}/api/healthz"


@pytest.fixture
def health() -> Iterator[Health]:
    found = Health()
    found.thread.start()
    yield found
    found.server.shutdown()
    found.thread.join()
    found.server.server_close()


class Node:
    """A running script. `log` has what its children said, in order."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    def said(self) -> list[str]:
        return self.log.read_text().split()

    def pid_of(self, name: str) -> int:
        return int(next(word for word in self.said() if word.startswith(name)).split(":")[1])


Start = Callable[[str, str], Node]

# Says that it lives, and that it was asked to end.
LIVES = "echo {0}:$$ >>$LOG; trap 'echo {0}-ended >>$LOG; exit 0' TERM; while :; do sleep 0.1; done"
LIVING_RAY = LIVES.format("ray")
LIVING_ENGINE = LIVES.format("engine")
SHORT_ENGINE = "echo engine:$$ >>$LOG; exit 3"


@pytest.fixture
def start(tmp_path: Path, health: Health) -> Iterator[Start]:
    """A function that starts the script, whose `sleep` takes a tenth of a second."""
    started: list[Node] = []
    quick = tmp_path / "bin" / "sleep"
    quick.parent.mkdir()
    quick.write_text(f"#!/bin/sh\nexec {shutil.which('sleep')} 0.1\n")
    quick.chmod(0o700)

    def run(ray: str, engine: str) -> Node:
        log = tmp_path / "log"
        log.touch()
        environment = {
            **os.environ,
            "PATH": f"{quick.parent}:{os.environ['PATH']}",
            "KUBERAY_GEN_RAY_START_CMD": f"bash -c {shlex.quote(ray)}",
            "NODE_HEALTH_URL": health.url,
            "LOG": str(log),
        }
        command = [str(SCRIPT), "bash", "-c", engine]
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        started.append(Node(process, log))
        return started[-1]

    yield run
    for node in started:
        # Also what a script that has ended left behind.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.process.pid, signal.SIGKILL)
        node.process.wait(DEADLINE_S)


def test_engine_is_started_when_the_ray_node_is_up(start: Start, health: Health) -> None:
    node = start(LIVING_RAY, LIVING_ENGINE)
    wait_until(lambda: health.num_asked >= 2, DEADLINE_S, "the script asks twice")
    assert [word for word in node.said() if word.startswith("engine")] == []
    health.is_up = True
    wait_until(lambda: len(node.said()) == 2, DEADLINE_S, "the engine runs")


def test_engine_that_ends_is_started_again_and_ray_stays(start: Start, health: Health) -> None:
    health.is_up = True
    node = start(LIVING_RAY, SHORT_ENGINE)
    wait_until(lambda: len(node.said()) >= 3, DEADLINE_S, "the engine was started twice")
    assert sum(word.startswith("ray") for word in node.said()) == 1
    os.kill(node.pid_of("ray"), 0)
    assert node.process.poll() is None


def test_ray_that_ends_is_started_again_and_the_engine_stays(start: Start, health: Health) -> None:
    health.is_up = True
    node = start(LIVING_RAY, LIVING_ENGINE)
    wait_until(lambda: len(node.said()) == 2, DEADLINE_S, "both run")
    died = node.pid_of("ray")
    os.kill(died, signal.SIGKILL)
    wait_until(lambda: len(node.said()) == 3, DEADLINE_S, "Ray was started again")
    (again,) = [word for word in node.said() if word.startswith("ray:") and word != f"ray:{died}"]
    assert [word for word in node.said() if word.startswith("engine")] == [
        f"engine:{node.pid_of('engine')}"
    ]
    node.process.terminate()
    assert node.process.wait(DEADLINE_S) == 0
    assert node.said()[2:] == [again, "engine-ended", "ray-ended"]


def test_engine_is_ended_at_sigterm_while_there_is_no_ray(start: Start, health: Health) -> None:
    health.is_up = True
    node = start("echo ray:$$ >>$LOG; until grep -q engine $LOG; do sleep 0.1; done", LIVING_ENGINE)
    wait_until(lambda: len(node.said()) >= 3, DEADLINE_S, "Ray ended, and was started again")
    node.process.terminate()
    assert node.process.wait(DEADLINE_S) == 0
    assert "engine-ended" in node.said()


def test_node_ends_when_ray_does_not_start(start: Start, health: Health) -> None:
    node = start("exit 5", LIVING_ENGINE)
    assert node.process.wait(DEADLINE_S) == 1
    assert node.said() == []


def test_script_refuses_to_run_without_kuberay(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "KUBERAY_GEN_RAY_START_CMD"}
    done = subprocess.run(
        [str(SCRIPT), "true"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "set by KubeRay" in done.stderr
