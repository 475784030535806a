"""A real engine whose rank is a Ray actor: RayKV uses the pool of the node that it is on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.client.cluster import Cluster
from raykv.cluster import join as actors
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from tests.fixtures.engine_child import ADDRESS, RESOURCES
from tests.fixtures.waiting import wait_until_stored

pytestmark = [pytest.mark.e2e, pytest.mark.extended]


@pytest.fixture
def second(cluster: Cluster) -> Iterator[LocalNode]:
    node = add_local_node(cluster.address, resources={"ranks": 1})
    yield node
    node.stop()


def test_prompt_is_loaded_on_the_node_where_ray_has_placed_the_rank(
    cluster: Cluster,
    second: LocalNode,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster.down()
    monkeypatch.setenv(ADDRESS, cluster.address)
    monkeypatch.setenv(RESOURCES, "ranks")
    settings = {"ray_address": cluster.address, "pool_bytes": "128MiB"}
    log = tmp_path / "log"
    engine = EngineProcess(tiny_model, log, settings, ranks_in_ray_actors=True)
    try:
        tokens = [prompt(1, 300)]
        engine.tokens(tokens)
        reference = engine.tokens(tokens)
        (node,) = cluster.status().nodes
        assert node.node_id == second.node_id != actors.resolve_node_id("")
        wait_until_stored(cluster)
        engine.reset()
        outputs = engine.call("generate", prompts=tokens)
        assert [output["tokens"] for output in outputs] == reference
        assert outputs[0]["cached"] == 288
        assert cluster.status().nodes[0].bytes_loaded > 0
    finally:
        engine.stop()
