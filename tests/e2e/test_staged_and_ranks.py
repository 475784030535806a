"""Real engines whose KV cache can't be mapped, and whose KV is spread over two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from raykv import inspect
from raykv.bench.engine import EngineProcess
from raykv.bench.prompts import prompt
from raykv.client import Cluster
from tests.truth_of_kv import assert_as_transformers_computes
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32


def check_loads(engine: EngineProcess, cluster: Cluster, prompts: list[list[int]]) -> None:
    """Store, drop vLLM's cache, load; tokens are those of vLLM's own prefix hit."""
    engine.tokens(prompts)
    reference = engine.tokens(prompts)
    seen = [-1]

    def unchanged() -> bool:
        # None while a machine that is busy has kept the NodeActor from reporting.
        before, seen[0] = seen[0], sum(node.bytes_stored for node in cluster.status().nodes)
        return before == seen[0] > 0

    wait_until(unchanged, 20.0, "stores come to an end")
    engine.reset()
    outputs = engine.call("generate", prompts=prompts)
    assert [output["tokens"] for output in outputs] == reference
    expected = [len(tokens) // BLOCK * BLOCK for tokens in prompts]
    assert [output["cached"] for output in outputs] == expected
    assert cluster.status().nodes[0].bytes_loaded > 0


def test_staged_engine_loads_what_it_stored(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """Staging memory for 16 blocks, so that loads of 31 blocks are made in parts."""
    cluster.down()
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": "128MiB",
        "kv_handover": "staged",
        "staging_bytes": "4MiB",
    }
    engine = EngineProcess(tiny_model, tmp_path / "log", settings)
    try:
        check_loads(engine, cluster, [prompt(70 + i, 1000) for i in range(2)])
    finally:
        engine.stop()


def test_two_ranks_load_what_they_stored(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    cluster.down()
    settings = {"ray_address": cluster.address, "pool_bytes": "128MiB"}
    engine = EngineProcess(
        tiny_model,
        tmp_path / "log",
        settings,
        multiprocess=True,
        cores="0|1",
        tensor_parallel_size=2,
    )
    try:
        check_loads(engine, cluster, [prompt(80 + i, 200 + BLOCK * i) for i in range(2)])
        assert cluster.status().nodes[0].num_workers == 2
        known = inspect.requests(cluster)
        names = known[known["prompt_tokens"] == 200].iloc[0]["chunks"][: 200 // BLOCK]
        # Each rank has one of the two KV heads.
        assert_as_transformers_computes(inspect.kv(cluster, names), tiny_model, prompt(80, 200))
    finally:
        engine.stop()
