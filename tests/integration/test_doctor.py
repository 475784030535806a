"""The doctor in a real cluster: nothing to say of a healthy one, and planted faults found."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from typer.testing import CliRunner

import raykv
import raykv.engine.runtime
import raykv.node.actor
from raykv.base.deadlines import SELDOM_S
from raykv.base.errors import ClusterError, SettingError
from raykv.base.ids import SLOT_ALIGNMENT
from raykv.base.settings import Settings
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.cluster import ask, names
from raykv.engine.runtime import EngineRuntime, new_life
from raykv.engine.view import EngineView
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from raykv.node.launch import node_actor
from raykv.protocol.engine import EngineHello
from raykv.protocol.findings import Finding, MemoryLimit, Severity
from raykv.protocol.framing import PROTOCOL_VERSION, encode
from raykv.protocol.node import NodeDescription
from tests.fixtures.one_node import actors_of_one_node
from tests.fixtures.played_engine import PlayedEngine
from tests.fixtures.played_node import PlayedNode
from tests.fixtures.processes import freeze
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration

POOL_BYTES = 64 << 20
TOO_MUCH = 1 << 50
TRAITS = {"hash_algorithm": "sha256", "hash_seed": "abc"}


@pytest.fixture
def head(cluster: Cluster) -> Iterator[str]:
    """Both actors, new for each test; the node's id."""
    with actors_of_one_node(cluster, POOL_BYTES) as node_id:
        yield node_id


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    """One more Ray node on this host."""
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@contextmanager
def attached(
    engine_id: str, node_id: str, traits: dict[str, str], namespace: str = "ns"
) -> Iterator[None]:
    """An engine is there meanwhile; the node has introduced it."""
    made = PlayedEngine(
        node_id, engine_id, namespace, SLOT_ALIGNMENT, num_blocks=None, traits=traits
    )
    try:
        wait_until(lambda: engine_id in known(), 10.0, "the node introduces its engine")
        yield
    finally:
        made.end()


def known() -> set[str]:
    return {each.engine_id for each in raykv.connect().status().engines}


def wrong(findings: Sequence[Finding]) -> list[Finding]:
    return [each for each in findings if each.severity is not Severity.OK]


def failures(cluster: Cluster, check: str) -> list[str]:
    found = cluster.doctor()
    return [each.what for each in found if (each.check, each.severity) == (check, Severity.FAIL)]


def run_doctor() -> tuple[int, list[dict[str, str]]]:
    result = CliRunner().invoke(app, ["doctor", "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.output)


class OldNodeActor:
    """A NodeActor of a RayKV with another protocol."""

    def describe(self) -> bytes:
        return encode(
            NodeDescription("9.9", "node", 1, "socket", 1, 1, 1, 1, 1, version=PROTOCOL_VERSION + 1)
        )


def test_healthy_cluster_has_nothing_wrong(head: str, cluster: Cluster) -> None:
    with attached("one", head, TRAITS), attached("two", head, TRAITS):
        assert wrong(cluster.doctor()) == []
        code, lines = run_doctor()
    assert code == 0
    assert {line["severity"] for line in lines} == {"ok"}
    text = CliRunner().invoke(app, ["doctor"], catch_exceptions=False)
    assert text.exit_code == 0
    assert "the scheduler actor answers" in text.output


def test_engine_with_another_hash_seed_is_found(head: str, cluster: Cluster) -> None:
    other = {**TRAITS, "hash_seed": "xyz"}
    with attached("one", head, TRAITS), attached("two", head, other, namespace="other"):
        (what,) = failures(cluster, "hashes")
        assert "hash_seed differs" in what
        assert "xyz: engine two" in what
        code, _ = run_doctor()
    assert code == 1


def test_node_actor_of_another_version_is_found_and_left_alone(
    head: str, second: LocalNode, cluster: Cluster
) -> None:
    actor = (
        ray.remote(OldNodeActor)
        .options(
            name=names.node_actor(second.node_id),
            namespace=names.RAY_NAMESPACE,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(second.node_id, soft=False),
        )
        .remote()
    )
    ray.get(actor.describe.remote(), timeout=60.0)
    (what,) = failures(cluster, "versions")
    assert "9.9" in what
    assert second.node_id[:12] in what
    assert f"protocol {PROTOCOL_VERSION + 1}" in what
    assert ask.find_node_actor(second.node_id) is not None
    ray.kill(actor)


def test_engine_on_a_node_without_node_actor_is_found(
    head: str, second: LocalNode, cluster: Cluster
) -> None:
    lost = PlayedNode(second.node_id, 8)
    lost.attach("ns")
    # Its last words; the NodeActor is gone, and nobody has made another one.
    lost.report()
    found = failures(cluster, "placement")
    name = f"engine {second.node_id[:12]}"
    assert any(name in what for what in found), found
    assert any("no NodeActor" in what for what in found), found


def test_pool_that_no_limit_allows_is_refused_and_found(
    head: str, second: LocalNode, cluster: Cluster
) -> None:
    node_actor(cluster.address, second.node_id, TOO_MUCH, 1 << 20, "")
    actor = ask.find_node_actor(second.node_id)
    pid = ask.describe(actor, 60.0).pid
    (what,) = failures(cluster, "memory")
    assert f"pool_bytes={TOO_MUCH}" in what
    assert "would fit" in what
    refused = cluster.status().refused
    assert list(refused) == [second.node_id]
    assert "gives no pool" in CliRunner().invoke(app, ["status"]).output
    # It lives on: no storm of restarts.
    time.sleep(SELDOM_S + 1.0)
    assert ask.describe(actor, 10.0).pid == pid
    ask.end_node_actor(second.node_id)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    freeze(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_frozen_scheduler_actor_is_found_within_seconds(
    head: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray._private.state import actors

    (pid,) = [
        entry["Pid"]
        for entry in actors().values()
        if entry["Name"] == names.SCHEDULER and entry["State"] == "ALIVE"
    ]
    with frozen(pid):
        began = time.monotonic()
        (what,) = failures(cluster, "scheduler")
        assert "does not answer" in what
        assert "no answer within" in what
        assert time.monotonic() - began < 30.0
        monkeypatch.setattr("raykv.base.deadlines.CLIENT_S", 0.5)
        for switch in (cluster.pause, cluster.resume):
            with pytest.raises(ClusterError, match="scheduler actor does not answer"):
                switch()
    wait_until(lambda: wrong(cluster.doctor()) == [], 20.0, "all is well again")


def test_start_of_engine_stops_when_its_node_refuses_the_pool(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.down()
    # The engine's own control group would allow it; that of the node's actors does not.
    generous = MemoryLimit(1 << 60, 1 << 60, "another control group")
    monkeypatch.setattr(raykv.engine.runtime, "memory_limit", lambda: generous)
    sizes = {0: SLOT_ALIGNMENT}
    hello = EngineHello("engine", new_life(), "ns", "tiny", slot_bytes=sizes)
    runtime = EngineRuntime(
        Settings(pool_bytes=TOO_MUCH), EngineView(Settings(request_deadline_s=50.0)), hello
    )
    with pytest.raises(SettingError, match=rf"gives no pool: pool_bytes={TOO_MUCH} .*would fit"):
        runtime.start()
    wait_until(lambda: ask.find_node_actor(runtime.node_id) is None, 20.0, "its NodeActor is gone")
    # The next engine, with a size that fits, starts.
    small = EngineRuntime(
        Settings(pool_bytes=POOL_BYTES), EngineView(Settings(request_deadline_s=50.0)), hello
    )
    small.start()
    assert small.node is not None
    assert small.node.pool_bytes == POOL_BYTES
    small.stop()
    cluster.down()
