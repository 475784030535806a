"""An engine whose ranks are on two hosts: EngineCore reaches the far NodeActor through Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raykv.lab.bench.prompts import prompt
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.lab.hosts.cluster import COMMAND, HostEngine, raylet_of
from raykv.lab.hosts.network import Host, networked
from raykv.serve.arguments import to_flags
from tests.fixtures.engine_child import ADDRESS, MEETING, RESOURCES
from tests.fixtures.forked_engine import import_ahead
from tests.fixtures.hosts.cluster import HostCluster
from tests.fixtures.hosts.world import BACK_S, LENGTH
from tests.fixtures.waiting import wait_until

POOL = "256MiB"
MEETING_PORT = 29511
RANKS = {"tensor_parallel_size": 2}
# vLLM's CPU worker makes the buffers between stages only when it warms the model up.
STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}

pytestmark = [pytest.mark.hosts, pytest.mark.extended, pytest.mark.timeout(900)]


@dataclass
class OverHosts:
    """Two hosts, and one engine on both."""

    cluster: HostCluster
    near: Host
    far: Host
    engine: HostEngine
    how: dict[str, Any]
    num_asked: int = 0

    def answer(self, tokens: list[int]) -> tuple[list[int], int]:
        """The tokens of an answer, and how many of the prompt's came out of RayKV."""
        (output,) = self.engine.call("generate", prompts=[tokens])
        self.engine.reset()
        return output["tokens"], int(output["cached"])

    def loads_again(self) -> bool:
        """Whether a new prompt is loaded the second time; its answer is the same in any case."""
        self.num_asked += 1
        tokens = prompt(2000 + self.num_asked, LENGTH)
        reference, cached = self.answer(tokens)
        assert cached == 0
        time.sleep(0.5)
        again, cached = self.answer(tokens)
        assert again == reference
        return cached == LENGTH

    def nodes(self, name: str) -> dict[str, Any]:
        """What the status of the NodeActors has by that name, by host."""
        status = self.cluster.raykv(self.near, "status")
        return {each["hostname"]: each[name] for each in status["nodes"]}


@contextmanager
def ranks_in_ray_actors(cluster: HostCluster, near: Host, far: Host) -> Iterator[dict[str, Any]]:
    """As with vLLM's Ray executors."""
    cluster.variables |= {
        ADDRESS: cluster.address,
        RESOURCES: f"node:{near.address},node:{far.address}",
        MEETING: near.address,
    }
    yield {"ranks_in_ray_actors": True, **RANKS}


@contextmanager
def ranks_of_two_commands(
    cluster: HostCluster, near: Host, far: Host, sizes: Mapping[str, Any] = RANKS
) -> Iterator[dict[str, Any]]:
    """As with `--nnodes`: the far rank belongs to a command of the user's there."""
    both = {
        "nnodes": 2,
        "master_addr": near.address,
        "master_port": MEETING_PORT,
        "distributed_executor_backend": "mp",
        "enforce_eager": True,
        **sizes,
    }
    flags = {**both, "node_rank": 1, "max_model_len": 4096, "block_size": 32, "dtype": "float32"}
    command = [sys.executable, "-c", COMMAND, "serve", str(cluster.network.folder / "model")]
    command += ["--address", cluster.address, "--pool-bytes", POOL, "--headless"]
    command += to_flags(flags)
    with Path(far.disk, "serve.log").open("ab") as log:
        served = subprocess.Popen(
            far.spaces.entering(*command),
            stdout=log,
            stderr=log,
            env={**os.environ, **cluster.variables, "VLLM_CPU_OMP_THREADS_BIND": "1"},
        )
    try:
        yield both
    finally:
        served.terminate()
        served.wait(60.0)


def stages_of_two_commands(
    cluster: HostCluster, near: Host, far: Host
) -> AbstractContextManager[dict[str, Any]]:
    """Each has a pipeline stage."""
    return ranks_of_two_commands(cluster, near, far, STAGES)


@pytest.fixture(
    scope="module", params=[ranks_in_ray_actors, ranks_of_two_commands, stages_of_two_commands]
)
def over(request: pytest.FixtureRequest) -> Iterator[OverHosts]:
    import_ahead()
    with networked() as network, ExitStack() as stack:
        model = tiny_llama(network.folder / "model")
        near, far = network.host("a"), network.host("b")
        cluster = HostCluster(network, near)
        cluster.variables["GLOO_SOCKET_IFNAME"] = "eth0"
        stack.callback(cluster.end)
        cluster.start(near, far)
        how = stack.enter_context(request.param(cluster, near, far))
        engine = cluster.engine(
            near,
            model,
            near.disk / "engine.log",
            {"pool_bytes": POOL},
            cores="0",
            **how,
        )
        stack.callback(engine.stop)
        yield OverHosts(cluster, near, far, engine, how)


def test_prompt_is_loaded_on_both_hosts(over: OverHosts) -> None:
    wait_until(over.loads_again, BACK_S, "both hosts load")
    nodes = over.cluster.raykv(over.near, "status")["nodes"]
    loaded = [each["bytes_loaded"] for each in nodes]
    assert len(loaded) == 2
    assert len({*loaded}) == 1, "each host its half"


def test_engine_goes_on_when_the_far_nodeactor_has_died(over: OverHosts) -> None:
    wait_until(over.loads_again, BACK_S, "both hosts load")
    before = over.nodes("pid")
    over.far.spaces.run("kill", "-9", str(before["b"]))
    assert not over.loads_again(), "one part can't be stored"
    wait_until(over.loads_again, BACK_S, "both load again")
    after = over.nodes("pid")
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]


def test_engine_goes_on_at_the_next_ray_node_of_the_far_host(over: OverHosts) -> None:
    if "ranks_in_ray_actors" in over.how:
        pytest.skip("such a rank ends with its Ray node, and the engine with it")
    wait_until(over.loads_again, BACK_S, "both hosts load")
    before, raylet = over.nodes("node_id"), raylet_of(over.far)
    os.kill(raylet, signal.SIGKILL)
    wait_until(lambda: raylet_of(over.far) not in (0, raylet), BACK_S, "Ray begins again there")

    def is_at_the_next() -> bool:
        has_loaded = over.loads_again()
        return has_loaded and over.nodes("node_id").get("b") not in (None, before["b"])

    wait_until(is_at_the_next, BACK_S, "both load again")
    assert over.nodes("node_id")["a"] == before["a"]


def test_engine_goes_on_when_the_link_was_cut_for_a_while(over: OverHosts) -> None:
    said = "no line to the NodeActor"
    before = over.engine.log_text.count(said)
    with over.cluster.network.unplugged(over.far):
        time.sleep(10.0)
        wait_until(lambda: over.engine.log_text.count(said) > before, BACK_S, "the line is lost")
    wait_until(over.loads_again, BACK_S, "both hosts load")
