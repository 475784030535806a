"""Real engines whose KV cache can't be mapped, and whose KV is spread over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raykv import inspect
from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.node.states.file import load_hidden_states
from raykv.serve.plan import plan
from tests.fixtures.told import told_after
from tests.fixtures.truth_of_kv import assert_as_transformers_computes
from tests.fixtures.truth_of_states import STATES_TOLERANCE, hidden_states_by_transformers
from tests.fixtures.waiting import wait_for_chunks
from tests.house import CHILDREN

pytestmark = pytest.mark.e2e

BLOCK = 32
PATIENT = CHILDREN / "patient"


@pytest.fixture(autouse=True)
def patient_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that leave the machine's two cores to others while they wait."""
    monkeypatch.setenv("PYTHONPATH", str(PATIENT))


def whole_chunks(prompts: list[list[int]]) -> list[int]:
    """How many each prompt has."""
    return [len(tokens) // BLOCK for tokens in prompts]


def check_loads(engine: EngineProcess, cluster: Cluster, prompts: list[list[int]]) -> None:
    """Store, drop vLLM's cache, load; tokens are those of vLLM's own prefix hit."""
    assert "patient: waits without yielding" in engine.log_text
    engine.tokens(prompts)
    reference = engine.tokens(prompts)
    wait_for_chunks(cluster, sum(whole_chunks(prompts)))
    engine.reset()
    before = cluster.requests().last
    outputs = engine.call("generate", prompts=prompts)
    assert [output["tokens"] for output in outputs] == reference
    expected = [number * BLOCK for number in whole_chunks(prompts)]
    assert [output["cached"] for output in outputs] == expected, told_after(cluster, before)
    assert cluster.status().nodes[0].bytes_loaded > 0


@pytest.mark.extended
@pytest.mark.support("canonical layout", models=["llama"])
def test_engines_of_one_and_two_ranks_load_what_either_stored(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """By canonical pages; the first one staged, through memory for 16 blocks.

    Loads of 31 blocks are made in parts there. The second one loads layer by layer.
    """
    cluster.down()
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": "128MiB",
        "canonical_layout": True,
    }
    staged = {"kv_handover": "staged", "staging_bytes": "4MiB"}
    one = EngineProcess(tiny_model, tmp_path / "one", {**settings, **staged})
    engines = [one]
    try:
        # Of one length less than a block apart: the last one is told apart by it.
        prompts = [prompt(70, 1008), prompt(71, 1000)]
        check_loads(one, cluster, prompts)
        two = EngineProcess(
            tiny_model,
            tmp_path / "two",
            {**settings, "layerwise_loads": True},
            multiprocess=True,
            cores="0|1",
            tensor_parallel_size=2,
            async_scheduling=False,
        )
        engines.append(two)
        check_comes_from(cluster, one, two, prompts)
        # Another salt makes other chunks of the same tokens.
        two.tokens(prompts, salt="two")
        wait_for_chunks(cluster, 2 * sum(whole_chunks(prompts)))
        check_comes_from(cluster, two, one, prompts, salt="two")
        known = inspect.requests(cluster)
        names = known[known["prompt_tokens"] == 1000].iloc[-1]["chunks"][: 1000 // BLOCK]
        assert_as_transformers_computes(inspect.kv(cluster, names), tiny_model, prompts[-1])
    finally:
        for engine in engines:
            engine.stop()


def check_comes_from(
    cluster: Cluster,
    source: EngineProcess,
    to: EngineProcess,
    prompts: list[list[int]],
    **arguments: Any,
) -> None:
    """One engine loads what another one has stored, and says what that one says."""
    before = cluster.requests().last
    outputs = to.call("generate", prompts=prompts, **arguments)
    expected = [number * BLOCK for number in whole_chunks(prompts)]
    assert [output["cached"] for output in outputs] == expected, told_after(cluster, before)
    assert [output["tokens"] for output in outputs] == source.tokens(prompts, **arguments)


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
        arguments = {"block_size": BLOCK, "dtype": "float32", "tensor_parallel_size": 2}
        planned = plan(str(tiny_model), {}, arguments).shape.slot_bytes
        assert {each.num_bytes for each in cluster.chunks()} == {planned}
    finally:
        engine.stop()


@pytest.mark.extended
def test_hidden_states_of_two_ranks_are_captured_once(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    cluster.down()
    layers = [1, 3]
    hidden = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": "128MiB",
        "hidden_states_path": str(tmp_path / "states"),
    }
    engine = EngineProcess(
        tiny_model,
        tmp_path / "log",
        None,
        multiprocess=True,
        cores="0|1",
        tensor_parallel_size=2,
        connector={
            "kv_connector": "RayKVHiddenStatesConnector",
            "kv_connector_extra_config": settings,
        },
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": hidden,
        },
    )
    try:
        prompts = [prompt(90 + i, 200 + BLOCK * i) for i in range(2)]
        outputs = engine.call("generate", prompts=prompts)
        states = [
            load_hidden_states(output["transfer"]["hidden_states_path"], 30.0) for output in outputs
        ]
        for tokens, each in zip(prompts, states, strict=True):
            wanted = hidden_states_by_transformers(tiny_model, tokens, layers)
            assert each["token_ids"].tolist() == tokens
            worst = (each["hidden_states"] - wanted).abs().max() / wanted.abs().max()
            assert float(worst) < STATES_TOLERANCE
        # All requests have ended for vLLM too: nothing waits for the other rank.
        assert engine.tokens(prompts) == [output["tokens"] for output in outputs]
    finally:
        engine.stop()
