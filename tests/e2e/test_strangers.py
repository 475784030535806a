"""Every port of a whole cluster, tried from a host that is no member: what answers, and with what.

A head with its dashboard, RayKV's actors, events, `raykv serve` and an application of Ray Serve.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.listeners import LISTENERS, Answer, At
from tests.fixtures.listeners import Found, rows_of
from tests.fixtures.pods import PodNetwork, objection, pod_network
from tests.fixtures.waiting import wait_until
from tests.house import CHILDREN, ROOT

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(objection()), reason=objection()),
]

BIN = Path(sys.executable).parent
START_S = 600.0
API_PORT = 8001
EXPECTED = {
    Answer.TOKEN: {"grpc UNAUTHENTICATED", "grpc UNAUTHENTICATED UNIMPLEMENTED"},
    Answer.UNAUTHORIZED: {"http 401 "},
    Answer.METRICS: {"http 200 ", "http 200 raykv"},
    Answer.API: {"http 200 raykv vllm"},
    Answer.EVENTS: {"zmq"},
    Answer.GLOO: {"silence"},
}
"""What tests/children/stranger.py says."""

MODEL = """
from pathlib import Path
from tests.fixtures.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from raykv.lab.demo.tiny_llama import tiny_llama
write_tiny_tokenizer(tiny_llama(Path("/tmp/tiny"), vocab_size=VOCAB_SIZE))
"""
LIST = """
import json, psutil
from tests.fixtures.listeners import listeners
print(json.dumps(listeners(psutil.pids())))
"""
APPLICATION = """
proxy_location: HeadOnly
http_options: {host: 127.0.0.1, port: 8000}
applications:
  - name: raykv
    route_prefix: /
    import_path: raykv.serve:build_app
    args:
      model: /tmp/tiny
      engine_args:
        {max_model_len: 1024, dtype: float32, block_size: 32, enforce_eager: true,
         kv_cache_memory_bytes: 33554432}
      raykv: {pool_bytes: 64MiB}
      deployment: {num_replicas: 1, ray_actor_options: {num_cpus: 0.1}}
"""


class Member:
    """The pod in which all of it runs."""

    def __init__(self, network: PodNetwork, folder: Path) -> None:
        self.outside = network.outside
        self.pod = network.pod("member")
        self.folder = folder
        self.environment = {
            **os.environ,
            "HOME": "/tmp/home",
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "token",
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0",
        }

    def run(self, *command: str) -> str:
        program = str(BIN / command[0])
        return self.pod.run(program, *command[1:], environment=self.environment, timeout_s=START_S)

    def start(self, log: str, *command: str) -> subprocess.Popen[bytes]:
        program = str(BIN / command[0])
        return self.pod.start(
            program, *command[1:], log=self.folder / log, environment=self.environment
        )

    def serves(self, port: int) -> bool:
        url = f"http://127.0.0.1:{port}/v1/models"
        return "tiny" in self.pod.run("curl", "--silent", "--max-time", "5", url, code=None)

    def begin(self) -> None:
        """Start all that listens anywhere."""
        self.run("ray", "get-auth-token", "--generate")
        head = ["ray", "start", "--head", f"--node-ip-address={self.pod.address}"]
        limits = ["--num-cpus=2", "--object-store-memory=100000000", "--disable-usage-stats"]
        self.run(*head, *limits)
        self.run("raykv", "up", "--pool-bytes", "64MiB")
        self.run("raykv", "publish", "start", "tcp://*:5557", "--replay", "tcp://*:5558")
        self.run("python", "-c", MODEL)
        flags = ["--pool-bytes", "64MiB", "--dtype", "float32", "--enforce-eager"]
        flags += ["--block-size", "32", "--max-model-len", "1024", "--port", str(API_PORT)]
        self.start("serve.log", "raykv", "serve", "/tmp/tiny", *flags)
        wait_until(lambda: self.serves(API_PORT), START_S, "`raykv serve` answers")
        self.pod.run("sh", "-c", 'echo "$1" >/tmp/app.yaml', "-", APPLICATION)
        self.start("app.log", "serve", "run", "/tmp/app.yaml")
        wait_until(lambda: self.serves(8000), START_S, "the application answers")


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Member]:
    with pod_network() as network:
        begun = Member(network, tmp_path_factory.mktemp("member"))
        begun.begin()
        yield begun


@pytest.fixture(scope="module")
def found(member: Member) -> list[Found]:
    rows = json.loads(member.run("python", "-c", LIST))
    return [Found(role, At(at), port, pid) for role, at, port, pid in rows]


@pytest.fixture(scope="module")
def answers(found: list[Found], member: Member) -> dict[int, str]:
    """What a stranger gets, by port."""
    assert found
    program = (sys.executable, str(CHILDREN / "stranger.py"), member.pod.address)
    said = json.loads(member.outside.run(*program, timeout_s=START_S))
    return {int(port): answer for port, answer in said.items()}


def test_every_socket_is_in_the_table_and_the_table_has_no_other(found: list[Found]) -> None:
    rows = {each: rows_of(each, on_loopback=False) for each in found}
    unknown = [each for each in found if not rows[each]]
    assert not unknown, f"bind them to loopback, or explain them in deploy/listeners.py: {unknown}"
    seen = {row for several in rows.values() for row in several}
    assert [row for row in LISTENERS if row not in seen] == []


def test_stranger_gets_what_the_table_says(found: list[Found], answers: dict[int, str]) -> None:
    wide = {each.port: each for each in found if each.at in (At.ALL, At.NODE)}
    assert set(answers) == set(wide), "by what the processes say, and by what can be connected to"
    wrong = {
        each: answers[port]
        for port, each in wide.items()
        if not any(
            answers[port] in EXPECTED[row.answer] for row in rows_of(each, on_loopback=False)
        )
    }
    assert wrong == {}


def test_stranger_gets_the_health_of_a_node_and_nothing_else_of_ray(member: Member) -> None:
    """So a kubelet needs no token."""

    def status(path: str) -> str:
        url = f"http://{member.pod.address}:52365{path}"
        command = ("curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}", url)
        return member.outside.run(*command)

    assert status("/api/healthz") == "200"
    assert status("/api/job_agent/jobs/") == "401"
