"""Ray's own LLM applications with RayKV, as `serve run` and Ray Data start them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from raykv.actors.local_nodes import LocalNode, add_local_node
from raykv.bench.ports import free_port
from raykv.bench.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from raykv.client import Cluster
from raykv.miss_types import Explanation
from tests.waiting import wait_until

pytest.importorskip("pyarrow", reason="raykv[llm] is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.extended, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
START_DEADLINE_S = 240.0
TEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune. " * 8
ALWAYS_FETCH = {
    "fetch_bytes_per_s": 1e15,
    "prefill_tokens_per_s": 1.0,
    "fetch_deadline_s": 20.0,
    "query_deadline_s": 10.0,
}
"""However fast this small model computes, and however busy the machine is."""


BLOCK = 32
CHUNKS = len(TEXT) // BLOCK
"""Of the text alone: the tokenizer makes a token of each byte."""

ENGINE = {
    "block_size": BLOCK,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 2048,
}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@dataclass(frozen=True)
class Application:
    """A running application of one replica, and the node that Serve has put it on."""

    port: int
    node_id: str


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from raykv.models import tiny_llama

    folder = tiny_llama(tmp_path_factory.mktemp("model") / "tiny", vocab_size=VOCAB_SIZE)
    return write_tiny_tokenizer(folder)


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    cluster.down()
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def application(cluster: Cluster, second: LocalNode, model: Path) -> Iterator[Application]:
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    port = free_port()
    config = yaml.safe_load((ROOT / "deploy" / "serve" / "ray-llm.yaml").read_text())
    config["proxy_location"] = "HeadOnly"
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    tried_here(config["applications"][0]["args"], model, second.node_id)
    client = serve_start(http_options=config["http_options"], proxy_location="HeadOnly")
    client.deploy_apps(ServeDeploySchema.model_validate(config))

    def is_running() -> bool:
        state = serve.status().applications["llm"]
        assert state.status != "DEPLOY_FAILED", state
        return state.status == "RUNNING"

    try:
        wait_until(is_running, START_DEADLINE_S, "the replica runs")
        llm = client.get_serve_details()["applications"]["llm"]
        (replica,) = llm["deployments"]["LLMServer:tiny"]["replicas"]
        yield Application(port, replica["node_id"])
    finally:
        serve.shutdown()


def tried_here(args: dict[str, Any], model: Path, node_id: str) -> None:
    """Put what this machine can serve into the YAML's arguments: one replica, on that node."""
    args["raykv"] = {"pool_bytes": "128MiB", **ALWAYS_FETCH}
    args["ingress_deployment_config"] = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    (llm,) = args["llm_configs"]
    del llm["accelerator_type"], llm["deployment_config"]["autoscaling_config"]
    llm["model_loading_config"] = {"model_id": "tiny", "model_source": str(model)}
    llm["accelerator_config"] = {"kind": "cpu"}
    llm["placement_group_config"] = {"bundles": [{"CPU": 0.5}]}
    llm["deployment_config"] |= {
        "num_replicas": 1,
        "placement_group_bundle_label_selector": [{"ray.io/node-id": node_id}],
    }
    llm["runtime_env"]["env_vars"] |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    llm["engine_kwargs"] = dict(ENGINE)


def asked(cluster: Cluster, after: int, number: int) -> list[Explanation]:
    """What became of the tokens of the requests behind one, as soon as there are `number`."""
    found: list[Explanation] = []

    def are_told() -> bool:
        found[:] = cluster.requests(after).found
        return len(found) >= number

    wait_until(are_told, 20.0, f"{number} requests are told")
    return found


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
    (first,) = asked(cluster, 0, 1)
    assert first.node_id == application.node_id
    assert first.record.loaded == first.record.own == 0
    wait_until(
        lambda: sum(node.chunks for node in cluster.status().nodes) >= CHUNKS, 20.0, "stores"
    )

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
