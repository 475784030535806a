"""A RayCluster of deploy/, as near to a container as it goes without one.

The Dockerfile's steps are carried out in a root of their own; a head and a worker of the rendered
overlay run its commands there, as its user, with networks of their own; probes are asked from
outside, as a kubelet asks them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fixtures import image as images
from tests.fixtures import pods, tiny_tokenizer
from tests.fixtures.image import Image
from tests.fixtures.kubelet import HEAD_NAME, RayPod
from tests.fixtures.processes import freeze
from tests.fixtures.waiting import wait_until

OBJECTION = pods.objection() or images.objection()
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(bool(OBJECTION), reason=OBJECTION),
]

OVERLAY = "cpu-trial"
MODEL = "/models/tiny"
# The image has no tests: what it needs of them comes along.
MAKE_MODEL = f"""{Path(tiny_tokenizer.__file__).read_text()}
from raykv.lab.demo.tiny_llama import tiny_llama
write_tiny_tokenizer(tiny_llama(Path({MODEL!r}), vocab_size=VOCAB_SIZE))
"""
PROMPT = "Happy families are all alike; every unhappy family is unhappy in its own way. " * 10
KUBERAYS_PROBE = (
    "wget --tries 1 -T 2 -q -O- http://localhost:52365/api/local_raylet_healthz | grep success && "
    "wget --tries 1 -T 10 -q -O- http://localhost:8265/api/gcs_healthz | grep success"
)
START_S = 600.0


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with images.built(tmp_path_factory.mktemp("image") / "built", EXTRA="cpu") as made:
        yield made


@dataclass
class RunningCluster:
    """Head and worker, and what a kubelet heard while the worker began."""

    head: RayPod
    worker: RayPod
    heard: list[tuple[bool, bool]] = field(default_factory=list)

    def ask(self) -> tuple[bool, bool]:
        """Whether liveness and readiness of the worker pass; containers that end begin again."""
        self.head.keep()
        self.worker.keep()
        now = self.worker.passes("livenessProbe"), self.worker.passes("readinessProbe")
        if self.heard[-1:] != [now]:
            self.heard.append(now)
        return now

    def wait_for(self, liveness: bool, readiness: bool) -> None:
        wait_until(
            lambda: self.ask() == (liveness, readiness),
            START_S,
            f"the probes say {liveness, readiness}, after {self.heard}",
        )

    def number(self, metric: str, label: str) -> float:
        """A number with a label, as Prometheus has it of the engine's node."""
        said = self.worker.outside.run("curl", "--silent", f"http://{self.worker.pod.address}:9464")
        lines = [line for line in said.splitlines() if line.startswith(f"{metric}{{")]
        return sum(float(line.split()[-1]) for line in lines if label in line)


@pytest.fixture(scope="module")
def cluster(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    folder = tmp_path_factory.mktemp("pods")
    changes = {"MODEL": MODEL, "HF_HUB_OFFLINE": "1"}
    with pods.pod_network() as network:
        head = RayPod(network, image, OVERLAY, "head", folder / "head")
        worker = RayPod(network, image, OVERLAY, "engines", folder / "worker", changes)
        worker.execute("python", "-c", MAKE_MODEL)
        made = RunningCluster(head, worker)
        made.ask()
        head.start()
        # The operator's init container asks so.
        asks = f"ray health-check --address {HEAD_NAME}:6379 && echo healthy || true"

        def is_up() -> bool:
            head.keep()
            return "healthy" in worker.execute("sh", "-c", asks)

        wait_until(is_up, START_S, f"workers find the head; see {folder}")
        worker.start()
        made.wait_for(liveness=True, readiness=True)
        yield made


def test_image_has_the_commands_of_the_manifests_and_no_privileges(image: Image) -> None:
    assert "doctor" in image.run(*image.command).stdout
    assert image.run("id", "-u", "-n").stdout == "ray\n"
    for command in ("raykv-node", "raykv", "ray", "serve", "curl", "wget"):
        image.run("sh", "-c", f"command -v {command}")
    refused = image.run("raykv", "doctor", code=2)
    assert "no Ray cluster runs on this host" in refused.stderr
    assert image.run("sh", "-c", "touch /usr/local/bin/x || echo refused").stdout == "refused\n"
    image.run("touch", "/models/x", "/home/ray/x")


def test_image_has_nothing_of_this_machines_python(image: Image) -> None:
    paths = image.run(
        "python", "-c", "import sys; print(*filter(None, sys.path), sep='\\n')"
    ).stdout
    stdlib = ("/usr/lib/python311.zip", "/usr/lib/python3.11", "/usr/lib/python3.11/lib-dynload")
    assert set(paths.split()) == {*stdlib, "/usr/local/lib/python3.11/site-packages"}


def test_kuberays_own_probe_of_the_head_passes(cluster: RunningCluster) -> None:
    assert cluster.head.execute("bash", "-c", KUBERAYS_PROBE).count("success") == 2


def test_worker_is_alive_before_its_engine_and_ready_with_it(cluster: RunningCluster) -> None:
    assert cluster.heard[:3] == [(False, False), (True, False), (True, True)]
    assert cluster.worker.passes("startupProbe")
    assert "readinessProbe" not in cluster.head.container


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_command_of_the_page_works_in_the_head(cluster: RunningCluster, command: str) -> None:
    assert cluster.head.execute("raykv", command)


def test_engine_that_is_killed_is_not_ready_and_loads_from_the_pool_afterwards(
    cluster: RunningCluster,
) -> None:
    worker = cluster.worker
    first = worker.complete(PROMPT)["choices"][0]["text"]
    actors = worker.pod.processes("ray::NodeActor")
    tokens = "raykv_cluster_prompt_tokens_total", 'source="same_node"'
    before = cluster.number(*tokens)
    stored = lambda: cluster.number("raykv_copied_chunks_total", "store") > 0  # noqa: E731
    wait_until(stored, 20.0, "the prompt is stored")
    (engine,) = worker.pod.processes("VLLM::EngineCore")
    engine.kill()
    cluster.wait_for(liveness=True, readiness=False)
    cluster.wait_for(liveness=True, readiness=True)
    assert "the engine ended with status" in worker.log
    assert worker.complete(PROMPT)["choices"][0]["text"] == first
    wait_until(lambda: cluster.number(*tokens) - before >= 512, 20.0, "tokens were loaded")
    assert worker.pod.processes("ray::NodeActor") == actors


def test_liveness_fails_when_ray_has_given_the_node_up_until_it_is_started_again(
    cluster: RunningCluster,
) -> None:
    """A node that hangs is noticed by Ray's head, after a minute; its health says so then. Its
    raylet ends when it goes on.
    """
    worker = cluster.worker
    assert worker.process is not None
    (raylet,) = worker.pod.processes("raylet")
    freeze(raylet.pid)
    try:
        wait_until(lambda: not worker.passes("livenessProbe"), START_S, "liveness fails")
    finally:
        os.kill(raylet.pid, signal.SIGCONT)
    wait_until(lambda: "Ray ended with status" in worker.log, START_S, "its raylet ends")
    cluster.wait_for(liveness=True, readiness=True)
    assert worker.process.poll() is None
    assert worker.complete(PROMPT)["usage"]["completion_tokens"] == 8


def test_container_ends_in_its_time_and_the_next_one_serves(cluster: RunningCluster) -> None:
    worker = cluster.worker
    assert worker.stop() == 0, worker.log[-3000:]
    assert worker.pod.processes("") == []
    assert not worker.passes("livenessProbe")
    cluster.wait_for(liveness=True, readiness=True)
    assert worker.complete(PROMPT)["usage"]["completion_tokens"] == 8
