"""Ray's own application of a prefill and a decode engine, each on a node of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from tests.fixtures.ray_llm import BLOCK, CHUNKS, TEXT, asked, running, talking_model, tried_here

pytest.importorskip("pyarrow", reason="the extra llm is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(400)]

CHAT = [{"role": "system", "content": TEXT}, {"role": "user", "content": "Who is in want?"}]


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """For the prefill engine, and for the decode engine."""
    import ray

    cluster.down()
    (head,) = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    second: LocalNode = add_local_node(cluster.address)
    yield second.node_id, head
    second.stop()


@pytest.fixture(scope="module")
def port(nodes: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    model = talking_model(tmp_path_factory.mktemp("model") / "tiny")

    def change(args: dict[str, Any]) -> None:
        for name, node in zip(("prefill_config", "decode_config"), nodes, strict=True):
            args[name] = tried_here(args[name], model, node)

    with running("ray-llm-disaggregated.yaml", change) as (port, _):
        yield port


def test_decode_engine_loads_what_the_prefill_engine_computed(
    port: int, nodes: tuple[str, str], cluster: Cluster
) -> None:
    import openai

    prefill, decode = nodes
    before = cluster.requests().last
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
        answer = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=8)
    assert answer.usage is not None
    assert 1 < answer.usage.completion_tokens <= 8
    told = {each.node_id: each.record for each in asked(cluster, before, 2)}
    assert set(told) == {prefill, decode}
    assert told[prefill].loaded == told[prefill].own == 0
    assert told[decode].own == 0
    # All but the prompt's last incomplete chunk.
    assert told[decode].loaded == told[decode].prompt // BLOCK * BLOCK >= CHUNKS * BLOCK
    # Nobody tells of the first engine, or where it is.
    assert "kv_transfer_params" not in answer.model_dump() or not answer.kv_transfer_params
