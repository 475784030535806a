"""A real engine that computes each layer of a loaded prompt as soon as its KV is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.bench.engine import EngineProcess
from raykv.bench.prompts import prompt
from raykv.client import Cluster
from tests.processes import freeze
from tests.waiting import wait_until, wait_until_quiet

pytestmark = pytest.mark.e2e

BLOCK = 32
LOAD_DEADLINE_S = 1.0
RECOVERY_DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def engine(
    cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    cluster.down()
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": "256MiB",
        "layerwise_loads": True,
        "load_deadline_s": LOAD_DEADLINE_S,
        "flush_deadline_s": LOAD_DEADLINE_S,
        "cancel_grace_s": 0.5,
    }
    log = tmp_path_factory.mktemp("engine") / "log"
    process = EngineProcess(
        tiny_model,
        log,
        settings,
        multiprocess=True,
        max_num_batched_tokens=512,
        async_scheduling=False,
    )
    yield process
    process.stop()


def hits(engine: EngineProcess) -> float:
    counters: dict[str, Any] = engine.call("counters")
    return float(counters.get("vllm:external_prefix_cache_hits", 0.0))


def store(engine: EngineProcess, cluster: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    """Have `prompts` stored, vLLM's own cache emptied; returns the tokens of vLLM's own hits."""
    engine.tokens(prompts)
    reference = engine.tokens(prompts)
    stored = lambda: cluster.status().nodes[0].bytes_stored  # noqa: E731
    wait_until_quiet(stored, 20.0, "stores come to an end")
    engine.reset()
    return reference


@pytest.mark.parametrize("length", [8 * BLOCK, 8 * BLOCK + 1, 1300])
def test_prompt_that_is_loaded_layer_by_layer_gives_tokens_of_prefix_hit(
    engine: EngineProcess, cluster: Cluster, length: int
) -> None:
    tokens = [prompt(2000 + length, length)]
    reference = store(engine, cluster, tokens)
    before = hits(engine)
    (output,) = engine.call("generate", prompts=tokens)
    assert output["tokens"] == reference[0]
    assert output["cached"] >= length // BLOCK * BLOCK - BLOCK
    assert hits(engine) > before
    # What was loaded is vLLM's own now.
    assert engine.tokens(tokens) == reference


def test_prompts_that_share_a_beginning_are_loaded_beside_others_that_are_computed(
    engine: EngineProcess, cluster: Cluster
) -> None:
    shared = prompt(3000, 6 * BLOCK)
    stored = [shared + prompt(3001 + i, 3 * BLOCK + i) for i in range(4)]
    reference = store(engine, cluster, stored)
    fresh = [prompt(3100 + i, 90 + 40 * i) for i in range(3)]
    found = engine.tokens([stored[0], fresh[0], *stored[1:], *fresh[1:]])
    assert [found[0], *found[2:5]] == reference
    engine.reset()
    assert engine.tokens(fresh) == [found[1], *found[5:]]


def loads_again(engine: EngineProcess, tokens: list[int], expected: list[int]) -> bool:
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    before = hits(engine)
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    return hits(engine) > before


@pytest.mark.parametrize("harm", ["freeze", "kill"])
def test_request_computes_what_does_not_arrive(
    engine: EngineProcess, cluster: Cluster, harm: str
) -> None:
    prompts = [prompt(4000 + len(harm) + i, 1200 + 40 * i) for i in range(2)]
    reference = store(engine, cluster, prompts)
    pid = cluster.status().nodes[0].pid
    if harm == "freeze":
        freeze(pid)
    else:
        os.kill(pid, signal.SIGKILL)
    assert engine.tokens(prompts) == reference
    wait_until(
        lambda: loads_again(engine, prompts[0], reference[0]),
        RECOVERY_DEADLINE_S,
        "offloading works again",
    )


def test_chunk_that_is_not_there_any_more_is_computed(
    engine: EngineProcess, cluster: Cluster
) -> None:
    prompts = [prompt(5000 + i, 700) for i in range(3)]
    reference = store(engine, cluster, prompts)
    # The NodeActor discards them at once; the engine may still believe in them.
    cluster.clear()
    assert engine.tokens(prompts) == reference
    engine.reset()
    assert engine.tokens(prompts) == reference
