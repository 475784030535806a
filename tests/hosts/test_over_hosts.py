"""An engine whose ranks are on two hosts: EngineCore reaches the far NodeActor through Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from raykv.lab.bench.prompts import prompt
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.lab.hosts.cluster import HostEngine
from raykv.lab.hosts.network import Host, networked
from tests.fixtures.forked_engine import import_ahead
from tests.fixtures.hosts.cluster import HostCluster
from tests.fixtures.hosts.world import BACK_S, LENGTH
from tests.fixtures.ray_executor import ADDRESS, MEETING, RESOURCES
from tests.fixtures.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.extended, pytest.mark.timeout(900)]


@dataclass
class OverHosts:
    """Two hosts, and one engine on both."""

    cluster: HostCluster
    near: Host
    far: Host
    engine: HostEngine
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

    def pids(self) -> dict[str, int]:
        """Of the NodeActors, by host."""
        status = self.cluster.raykv(self.near, "status")
        return {each["hostname"]: each["pid"] for each in status["nodes"]}


@pytest.fixture(scope="module")
def over() -> Iterator[OverHosts]:
    import_ahead()
    with networked() as network:
        model = tiny_llama(network.folder / "model")
        near, far = network.host("a"), network.host("b")
        cluster = HostCluster(network, near)
        cluster.variables |= {
            ADDRESS: cluster.address,
            RESOURCES: f"node:{near.address},node:{far.address}",
            MEETING: near.address,
            "GLOO_SOCKET_IFNAME": "eth0",
        }
        engine = None
        try:
            cluster.start(near, far)
            engine = cluster.engine(
                near,
                model,
                near.disk / "engine.log",
                {"pool_bytes": "256MiB"},
                cores="0",
                ranks_in_ray_actors=True,
                tensor_parallel_size=2,
            )
            yield OverHosts(cluster, near, far, engine)
        finally:
            if engine is not None:
                engine.stop()
            cluster.end()


def test_prompt_is_loaded_on_both_hosts(over: OverHosts) -> None:
    wait_until(over.loads_again, BACK_S, "both hosts load")
    nodes = over.cluster.raykv(over.near, "status")["nodes"]
    loaded = [each["bytes_loaded"] for each in nodes]
    assert len(loaded) == 2
    assert len({*loaded}) == 1, "each host its half"


def test_engine_goes_on_when_the_far_nodeactor_has_died(over: OverHosts) -> None:
    wait_until(over.loads_again, BACK_S, "both hosts load")
    before = over.pids()
    over.far.spaces.run("kill", "-9", str(before["b"]))
    assert not over.loads_again(), "one part can't be stored"
    wait_until(over.loads_again, BACK_S, "both load again")
    after = over.pids()
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]


def test_engine_goes_on_when_the_link_was_cut_for_a_while(over: OverHosts) -> None:
    said = "no line to the NodeActor"
    before = over.engine.log_text.count(said)
    with over.cluster.network.unplugged(over.far):
        time.sleep(10.0)
        wait_until(lambda: over.engine.log_text.count(said) > before, BACK_S, "the line is lost")
    wait_until(over.loads_again, BACK_S, "both hosts load")
