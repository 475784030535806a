"""Hidden states of a real vLLM engine, beside those of transformers on the same prompt."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

import raykv
from raykv.base.errors import HiddenStatesError
from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from tests.fixtures.truth_of_states import STATES_TOLERANCE, hidden_states_by_transformers
from tests.fixtures.waiting import wait_until, wait_until_stored

pytestmark = pytest.mark.e2e

BLOCK = 32
LAYERS = [1, 2, 3]
BATCH_TOKENS = 256
"""Of a step: longer prompts are computed in parts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def engine(
    cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, folder: Path
) -> Iterator[EngineProcess]:
    cluster.down()
    process = EngineProcess(
        tiny_model,
        tmp_path_factory.mktemp("engine") / "log",
        None,
        multiprocess=True,
        connector=states_connector(cluster.address, folder),
        speculative_config=speculative(),
        max_num_batched_tokens=BATCH_TOKENS,
    )
    yield process
    process.stop()


def states_connector(address: str, folder: Path, **settings: Any) -> dict[str, Any]:
    return {
        "kv_connector": "RayKVHiddenStatesConnector",
        "kv_connector_extra_config": {
            "ray_address": address,
            "pool_bytes": "256MiB",
            "hidden_states_path": str(folder),
            "durable_stores": True,
            **settings,
        },
    }


def speculative() -> dict[str, Any]:
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    return {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }


def assert_states(found: Any, model: Path, tokens: list[int]) -> None:
    wanted = hidden_states_by_transformers(model, tokens, LAYERS)
    assert found["token_ids"].tolist() == tokens
    states = found["hidden_states"]
    assert states.shape == wanted.shape
    worst = (states - wanted).abs().max() / wanted.abs().max()
    assert float(worst) < STATES_TOLERANCE


def generate(engine: EngineProcess, prompts: list[list[int]], **options: Any) -> list[Any]:
    outputs: list[Any] = engine.call("generate", prompts=prompts, **options)
    return outputs


@pytest.mark.versions
def test_states_equal_those_of_transformers_in_the_file_and_by_reference(
    engine: EngineProcess, tiny_model: Path, folder: Path
) -> None:
    tokens = prompt(1, 3 * BATCH_TOKENS + 17)
    (output,) = generate(engine, [tokens])
    told = output["transfer"]
    path = Path(told["hidden_states_path"])
    assert path.parent == folder
    assert_states(raykv.load_hidden_states(str(path), 30.0), tiny_model, tokens)
    by_id = ray.get(raykv.hidden_states(output["id"]), timeout=30)
    assert_states(by_id, tiny_model, tokens)
    node_id, request_id = told["hidden_states_node"], told["hidden_states_request"]
    by_node = ray.get(raykv.hidden_states(request_id, node_id=node_id), timeout=30)
    assert_states(by_node, tiny_model, tokens)
    raykv.cleanup_hidden_states(str(path))
    assert [each.name for each in folder.iterdir()] == []


@pytest.mark.support("hidden states", models=["llama"])
@pytest.mark.versions
def test_states_are_complete_after_prefix_hit_and_after_load_from_the_cache(
    engine: EngineProcess, cluster: Cluster, tiny_model: Path
) -> None:
    tokens = prompt(2, 2 * BATCH_TOKENS + 5)
    (computed,) = generate(engine, [tokens])
    (own_hit,) = generate(engine, [tokens])
    assert own_hit["cached"] >= 2 * BATCH_TOKENS - BLOCK
    wait_until_stored(cluster)
    engine.reset()
    before = engine.call("counters").get("vllm:external_prefix_cache_hits", 0.0)
    (loaded,) = generate(engine, [tokens])
    assert engine.call("counters")["vllm:external_prefix_cache_hits"] > before
    assert loaded["cached"] >= 2 * BATCH_TOKENS - BLOCK
    assert computed["tokens"] == own_hit["tokens"] == loaded["tokens"]
    for output in (computed, own_hit, loaded):
        found = raykv.load_hidden_states(output["transfer"]["hidden_states_path"], 30.0)
        assert_states(found, tiny_model, tokens)


def test_chunks_of_an_answered_request_are_in_the_pool(
    engine: EngineProcess, cluster: Cluster
) -> None:
    before = cluster.status().nodes[0].bytes_stored
    prompts = [prompt(600 + i, 5 * BLOCK) for i in range(3)]
    outputs = generate(engine, prompts, max_tokens=BLOCK + 2)
    stored = cluster.status().nodes[0].bytes_stored - before
    assert all(len(output["tokens"]) == BLOCK + 2 for output in outputs)
    chunk_bytes = BLOCK * (4 * 2 * 128 + len(LAYERS) * 256) * 4
    assert stored == len(prompts) * 6 * chunk_bytes


def test_states_of_generated_tokens_come_where_they_are_asked_for(
    engine: EngineProcess, tiny_model: Path
) -> None:
    tokens = prompt(3, 2 * BLOCK)
    asked = {"include_output_tokens": True}
    (output,) = generate(engine, [tokens], max_tokens=BLOCK + 3, params=asked)
    found = raykv.load_hidden_states(output["transfer"]["hidden_states_path"], 30.0)
    assert_states(found, tiny_model, tokens + output["tokens"][:-1])


def test_states_of_many_requests_are_not_mixed_up(engine: EngineProcess, tiny_model: Path) -> None:
    prompts = [prompt(100 + i, 40 + 61 * i) for i in range(4)]
    for tokens, output in zip(prompts, generate(engine, prompts), strict=True):
        found = raykv.load_hidden_states(output["transfer"]["hidden_states_path"], 30.0)
        assert_states(found, tiny_model, tokens)


def test_path_that_a_client_names_is_ignored(
    engine: EngineProcess, folder: Path, tmp_path: Path
) -> None:
    wish = tmp_path / "mine.safetensors"
    params = {"hidden_states_path": str(wish)}
    (output,) = generate(engine, [prompt(4, 50)], params=params)
    assert Path(output["transfer"]["hidden_states_path"]).parent == folder
    raykv.load_hidden_states(output["transfer"]["hidden_states_path"], 30.0)
    assert not wish.exists()


def test_request_nobody_knows_is_an_error_that_says_why(cluster: Cluster) -> None:
    with pytest.raises(HiddenStatesError, match="no node knows"):
        cluster.hidden_states("cmpl-unknown", timeout_s=0.2)
    node_id = cluster.status().nodes[0].node_id
    with pytest.raises(HiddenStatesError, match="no hidden states of request"):
        ray.get(cluster.hidden_states("cmpl-unknown", node_id=node_id, timeout_s=0.2), timeout=30)
    with pytest.raises(HiddenStatesError, match="is gone"):
        cluster.hidden_states("cmpl-unknown", node_id="f" * 56)


@pytest.mark.extended
def test_no_request_fails_without_the_node_actor_and_readers_are_told(
    engine: EngineProcess, cluster: Cluster, tiny_model: Path
) -> None:
    tokens = prompt(5, 3 * BLOCK)
    (before,) = generate(engine, [tokens])
    assert ray.get(raykv.hidden_states(before["id"]), timeout=30).shape[0] == len(tokens)
    os.kill(cluster.status().nodes[0].pid, signal.SIGKILL)
    (during,) = generate(engine, [tokens])
    assert during["tokens"] == before["tokens"]
    with pytest.raises(HiddenStatesError):
        raykv.load_hidden_states(during["transfer"]["hidden_states_path"], 30.0)

    def is_back() -> bool:
        (output,) = generate(engine, [tokens])
        try:
            path = output["transfer"]["hidden_states_path"]
            found = raykv.load_hidden_states(path, 30.0)
        except HiddenStatesError:
            return False
        assert_states(found, tiny_model, tokens)
        return True

    wait_until(is_back, 60.0, "states are captured again")
