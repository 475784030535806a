"""Ray's own LLM applications on this machine, as `serve run` starts their YAML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from raykv.client.cluster import Cluster
from raykv.lab.bench.ports import free_port
from raykv.lab.bench.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer
from raykv.protocol.miss_types import Explanation
from tests.waiting import wait_until

FOLDER = Path(__file__).parents[1] / "deploy" / "serve"
START_DEADLINE_S = 240.0
ALWAYS_FETCH = {
    "fetch_bytes_per_s": 1e15,
    "prefill_tokens_per_s": 1.0,
    "fetch_deadline_s": 20.0,
    "query_deadline_s": 10.0,
}
"""However fast this small model computes, and however busy the machine is."""

BLOCK = 32
ENGINE = {
    "block_size": BLOCK,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 2048,
}
TEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune. " * 8
CHUNKS = len(TEXT) // BLOCK
"""Of the text alone: the tokenizer makes a token of each byte."""


def talking_model(folder: Path) -> Path:
    """A tiny model and its tokenizer."""
    from raykv.serve.models import tiny_llama

    return write_tiny_tokenizer(tiny_llama(folder, vocab_size=VOCAB_SIZE))


@contextmanager
def running(file: str, change: Callable[[dict[str, Any]], None]) -> Iterator[tuple[int, Any]]:
    """The port of the application of that file, and what Serve tells of its deployments.

    `change` makes of its arguments what this machine can serve.
    """
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    port = free_port()
    config = yaml.safe_load((FOLDER / file).read_text())
    config["proxy_location"] = "HeadOnly"
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    args = config["applications"][0]["args"]
    args["raykv"] = {"pool_bytes": "128MiB", **ALWAYS_FETCH}
    args["ingress_deployment_config"] = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    change(args)
    client = serve_start(http_options=config["http_options"], proxy_location="HeadOnly")
    client.deploy_apps(ServeDeploySchema.model_validate(config))

    def is_running() -> bool:
        state = serve.status().applications["llm"]
        assert state.status != "DEPLOY_FAILED", state
        return state.status == "RUNNING"

    try:
        wait_until(is_running, START_DEADLINE_S, "the replicas run")
        yield port, client.get_serve_details()["applications"]["llm"]["deployments"]
    finally:
        serve.shutdown()


def tried_here(llm: dict[str, Any], model: Path, node_id: str) -> dict[str, Any]:
    """An `LLMConfig` of a tiny model in one replica on that node."""
    here = {name: each for name, each in llm.items() if name != "accelerator_type"}
    kept = {k: v for k, v in llm["deployment_config"].items() if k != "autoscaling_config"}
    environment = {**llm["runtime_env"]["env_vars"], "HF_HUB_OFFLINE": "1"}
    return {
        **here,
        "model_loading_config": {"model_id": "tiny", "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "placement_group_config": {"bundles": [{"CPU": 0.5}]},
        "deployment_config": {
            **kept,
            "num_replicas": 1,
            "placement_group_bundle_label_selector": [{"ray.io/node-id": node_id}],
        },
        "runtime_env": {"env_vars": {**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}},
        "engine_kwargs": dict(ENGINE),
    }


def asked(cluster: Cluster, after: int, number: int) -> list[Explanation]:
    """What became of the tokens of the requests behind one, as soon as there are `number`."""
    found: list[Explanation] = []

    def are_told() -> bool:
        found[:] = cluster.requests(after).found
        return len(found) >= number

    wait_until(are_told, 20.0, f"{number} requests are told")
    return found
