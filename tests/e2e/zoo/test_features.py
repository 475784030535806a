"""Features that not every kind of model can have: they work, or are refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import raykv
from raykv.client.cluster import Cluster
from raykv.cluster import join
from raykv.lab.bench.engine import EngineError
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from tests.e2e.zoo.conftest import StartZoo
from tests.fixtures.truth_of_states import hidden_states_by_transformers
from tests.fixtures.waiting import wait_until
from tests.fixtures.zoo import kinds
from tests.fixtures.zoo_engine import BLOCK, ZooEngine

pytestmark = pytest.mark.e2e

LENGTH = 6 * BLOCK + 20

STATES_TOLERANCE = 1e-3
"""Of the largest number: experts add up in another order than transformers does."""

LAYERWISE = {"layerwise_loads": True}

NOT_BY_LAYER = {
    "gemma3": "this model has 6 KV groups",
    "qwen3-next": "this model has 4 KV groups",
    "mistral": "this model's KV is of the kind SlidingWindowSpec",
    "deepseek": "this model's KV is of the kind MLAAttentionSpec",
}

CANONICAL = {"canonical_layout": True}


def refusal(start_zoo: StartZoo, tmp_path: Path, name: str, **more: object) -> str:
    """What an engine that does not start has printed."""
    log = tmp_path / "log"
    with pytest.raises(EngineError):
        start_zoo(name, log=log, **more)
    return log.read_text(errors="replace")


def check_loads(engine: ZooEngine, tokens: list[int]) -> None:
    """What was stored is loaded, and gives what vLLM's own cache gives."""
    engine.ask(tokens)
    if not engine.model.is_steady:
        engine.settle()
    (expected,) = engine.ask(tokens)
    engine.settle()
    (found,) = engine.ask(tokens)
    engine.check_same(found, expected)
    assert found["cached"] >= 4 * BLOCK
    engine.process.reset()


@pytest.mark.support("layer-wise")
@pytest.mark.parametrize("name", kinds(["llama", "qwen3-moe"]))
def test_layers_are_computed_as_they_come(name: str, start_zoo: StartZoo) -> None:
    check_loads(start_zoo(name, raykv=LAYERWISE, async_scheduling=False), prompt(1, LENGTH))


@pytest.mark.parametrize("name", kinds(NOT_BY_LAYER))
def test_layers_that_can_not_wait_are_refused(
    name: str, start_zoo: StartZoo, tmp_path: Path
) -> None:
    said = refusal(start_zoo, tmp_path, name, raykv=LAYERWISE, async_scheduling=False)
    assert (
        f"RayKV stops the start of the engine: layerwise_loads can't be had: {NOT_BY_LAYER[name]}"
        in said
    )


@pytest.mark.support("canonical layout")
@pytest.mark.parametrize("name", kinds(["llama", "mistral", "gemma3", "gpt-oss", "qwen3-moe"]))
def test_engine_of_two_ranks_loads_what_one_rank_stored(name: str, start_zoo: StartZoo) -> None:
    one = start_zoo(name, raykv=CANONICAL)
    tokens = prompt(2, LENGTH)
    check_loads(one, tokens)
    (expected,) = one.ask(tokens)
    two = start_zoo(
        name,
        anew=False,
        raykv=CANONICAL,
        tensor_parallel_size=2,
        multiprocess=True,
        cores="0|1",
    )
    (first, second) = one.cluster.status().engines
    assert first.namespace == second.namespace

    def loads() -> bool:
        two.process.reset()
        (found,) = two.ask(tokens)
        two.check_same(found, expected)
        return found["cached"] >= 4 * BLOCK

    # Its two ranks leave the NodeActor little of two cores: a load may take longer than it may.
    wait_until(loads, 120.0, "it loads")


@pytest.mark.parametrize("name", kinds(["llama4", "qwen3-next"]))
def test_local_chunks_and_states_have_no_canonical_layout(
    name: str, start_zoo: StartZoo, tmp_path: Path
) -> None:
    """vLLM certifies none for them."""
    said = refusal(start_zoo, tmp_path, name, raykv=CANONICAL)
    assert "RayKV stops the start of the engine: canonical_layout=true can't be had" in said


@pytest.mark.support("hidden states")
@pytest.mark.parametrize("name", kinds(["mistral", "gpt-oss", "qwen3-moe"]))
def test_hidden_states_come_with_what_is_loaded(
    name: str, start_zoo: StartZoo, tmp_path: Path
) -> None:
    """Of Gemma vLLM extracts none, and beside recurrent states it needs Triton for it."""
    layers = [1, 2]
    engine = start_zoo(
        name,
        raykv={"hidden_states_path": str(tmp_path), "durable_stores": True},
        connector="RayKVHiddenStatesConnector",
        multiprocess=True,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
    )
    tokens = prompt(3, LENGTH)
    wanted = hidden_states_by_transformers(engine.folder, tokens, layers)
    cached = []
    for _ in range(2):
        (output,) = engine.process.call("generate", prompts=[tokens])
        cached.append(output["cached"])
        found = raykv.load_hidden_states(output["transfer"]["hidden_states_path"], 30.0)
        worst = (found["hidden_states"].float() - wanted).abs().max() / wanted.abs().max()
        assert float(worst) < STATES_TOLERANCE
        engine.settle()
    assert cached[0] == 0
    assert cached[1] >= 4 * BLOCK


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.mark.support("prefetch")
@pytest.mark.parametrize("name", kinds(["llama", "gemma3", "gpt-oss", "qwen3-next"]))
def test_prefetch_brings_all_that_a_prompt_needs(
    name: str, cluster: Cluster, second: LocalNode, start_zoo: StartZoo
) -> None:
    nodes = (join.resolve_node_id(""), second.node_id)
    engine = start_zoo(name, raykv={"node_id": nodes[0]})
    other = start_zoo(name, anew=False, raykv={"node_id": nodes[1]}, cores="1")
    engine.ask(prompt(5, 100))
    check_loads(engine, tokens := prompt(4, LENGTH))
    most = cluster.lookup(tokens=tokens).cached_tokens
    keys = cluster.lookup(tokens=tokens[: most + 1]).keys
    brought = cluster.prefetch(keys, nodes[1])
    assert (brought.came + brought.there, brought.nowhere) == (len(keys), 0)

    def fetched() -> int:
        return sum(node.bytes_fetched for node in cluster.status().nodes)

    before = fetched()
    told = {each.node_id: each.tokens for each in cluster.lookup(tokens=tokens).nodes}
    assert told == dict.fromkeys(nodes, most)
    (expected,) = engine.ask(tokens)
    (found,) = other.ask(tokens)
    other.check_same(found, expected)
    assert (found["cached"], fetched()) == (most, before)
