"""Ray's own LLM applications with RayKV, as `serve run` and Ray Data start them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from raykv.client.cluster import Cluster
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from tests.fixtures.processes import freeze
from tests.fixtures.ray_llm import (
    ALWAYS_FETCH,
    CHUNKS,
    ENGINE,
    TEXT,
    asked,
    running,
    talking_model,
    tried_here,
)
from tests.fixtures.waiting import wait_for_chunks

pytest.importorskip("pyarrow", reason="the extra llm is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(400)]


@dataclass(frozen=True)
class Application:
    """A running application of one replica, the node that Serve has put it on, and its process."""

    port: int
    node_id: str
    pid: int


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    cluster.down()
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def application(second: LocalNode, model: Path) -> Iterator[Application]:
    def change(args: dict[str, Any]) -> None:
        args["llm_configs"] = [tried_here(args["llm_configs"][0], model, second.node_id)]

    with running("ray-llm.yaml", change) as (port, deployments):
        (replica,) = deployments["LLMServer:tiny"]["replicas"]
        yield Application(port, replica["node_id"], replica["pid"])


def test_engine_uses_the_pool_of_its_replicas_node(
    application: Application, cluster: Cluster, second: LocalNode
) -> None:
    assert application.node_id == second.node_id
    # Both nodes have one address: by itself an engine would take either.
    assert [each.node_id for each in cluster.status().engines] == [second.node_id]


def test_batch_workers_load_what_the_replica_computed(
    application: Application, cluster: Cluster, model: Path
) -> None:
    import openai

    from deploy.batch.ask_documents import ask

    url = f"http://127.0.0.1:{application.port}/v1"
    chat = [
        {"role": "system", "content": TEXT},
        {"role": "user", "content": "Who is in want of a wife?"},
    ]
    with openai.OpenAI(base_url=url, api_key="none") as client:
        answer = client.chat.completions.create(model="tiny", messages=chat, max_tokens=8)
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    assert answer.usage.prompt_tokens_details is not None
    sources = answer.usage.prompt_tokens_details.model_dump()["raykv_sources"]
    assert sources["computed"] == sum(sources.values()) == answer.usage.prompt_tokens
    (first,) = asked(cluster, "", 1)
    assert first.node_id == application.node_id
    assert first.record.loaded == first.record.own == 0
    wait_for_chunks(cluster, CHUNKS)

    before = cluster.status().nodes
    rows = ask(
        str(model),
        {"novel": TEXT},
        ["Who lives in Netherfield?", "Is it a truth?"],
        settings={"pool_bytes": "128MiB", **ALWAYS_FETCH},
        engine_kwargs=ENGINE,
        resources={"CPU": 0.25},
    )
    assert [row["document"] for row in rows] == ["novel"] * 2
    # The worker ends with its last row, and what it would tell of its requests with it.
    chunk_bytes = sum(node.bytes_stored for node in before) // sum(node.chunks for node in before)
    loaded = [sum(node.bytes_loaded for node in some) for some in (before, cluster.status().nodes)]
    assert loaded[1] - loaded[0] >= CHUNKS * chunk_bytes


def test_engine_ends_with_its_killed_replica(application: Application) -> None:
    """Also where no raylet is left to end it. The last one here: its successor is not awaited."""
    replica = psutil.Process(application.pid)
    children = replica.children(recursive=True)
    engines = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    assert engines, children
    raylet = replica.parent()
    assert raylet is not None
    assert raylet.name() == "raylet"
    freeze(raylet.pid)
    try:
        replica.kill()
        _, left = psutil.wait_procs(engines, timeout=10)
        assert not left
    finally:
        raylet.resume()
