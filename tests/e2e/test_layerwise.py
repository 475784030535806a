"""A real engine that computes each layer of a loaded prompt as soon as its KV is there."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from tests.fixtures.as_on_gpu import AS_ON_CPU, Ways, engine_in, every_way
from tests.fixtures.processes import freeze, signal_after
from tests.fixtures.waiting import wait_until, wait_until_it_stores, wait_until_stored

pytestmark = pytest.mark.e2e

BLOCK = 32
LEFT_TO_COMPUTE = 2
STEP_DEADLINE_S = 1.0
RECOVERY_DEADLINE_S = 60.0


def start(
    cluster: Cluster,
    model: Path,
    folder: Path,
    settings: dict[str, Any],
    ways: Ways = AS_ON_CPU,
    **config: Any,
) -> EngineProcess:
    """No more than 512 tokens in a step: longer prompts are computed in several."""
    cluster.down()
    return engine_in(
        ways,
        model,
        folder / "log",
        {
            "ray_address": cluster.address,
            "pool_bytes": "256MiB",
            "layerwise_loads": True,
            "step_deadline_s": STEP_DEADLINE_S,
            **settings,
        },
        multiprocess=True,
        max_num_batched_tokens=512,
        **config,
    )


@pytest.fixture(scope="module", params=every_way, ids=str)
def engine(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("engine")
    process = start(cluster, tiny_model, folder, {}, request.param)
    wait_until_it_stores(process, cluster)
    yield process
    process.stop()


def store(engine: EngineProcess, cluster: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    """Have `prompts` stored, vLLM's own cache emptied; returns the tokens of vLLM's own hits."""
    engine.tokens(prompts)
    reference = engine.tokens(prompts)
    wait_until_stored(cluster)
    engine.reset()
    return reference


def check_whole_hits(engine: EngineProcess, cluster: Cluster, lengths: list[int]) -> None:
    """Prompts that the pool has, of which none waits for another one."""
    prompts = [prompt(2000 + length, length) for length in lengths]
    reference = store(engine, cluster, prompts)
    outputs = engine.call("generate", prompts=prompts)
    assert [output["tokens"] for output in outputs] == reference
    whole = [min(length // BLOCK * BLOCK, length - LEFT_TO_COMPUTE) for length in lengths]
    assert [output["cached"] for output in outputs] == whole
    # What was loaded is vLLM's own now.
    assert engine.tokens(prompts) == reference


@pytest.mark.support("layer-wise", models=["llama"])
@pytest.mark.versions
def test_prompts_that_are_loaded_give_the_tokens_of_prefix_hits(
    engine: EngineProcess, cluster: Cluster
) -> None:
    check_whole_hits(engine, cluster, [8 * BLOCK, 8 * BLOCK + 1, 1300])


def test_tail_that_is_computed_behind_a_load_is_stored_and_loaded_as_well(
    engine: EngineProcess, cluster: Cluster
) -> None:
    prefix = prompt(3000, 10 * BLOCK)
    longer = [prefix + prompt(3001 + i, length) for i, length in enumerate([150, 1100])]
    reference = engine.tokens(longer)
    engine.reset(connector=True)
    wait_until_it_stores(engine, cluster)
    store(engine, cluster, [prefix])
    for tokens, expected in zip(longer, reference, strict=True):
        (output,) = engine.call("generate", prompts=[tokens])
        assert (output["tokens"], output["cached"]) == (expected, len(prefix))
        wait_until_stored(cluster)
        engine.reset()
    outputs = engine.call("generate", prompts=longer)
    assert [output["tokens"] for output in outputs] == reference
    # The second one shares the first one's load.
    assert [output["cached"] for output in outputs] == [
        len(tokens) // BLOCK * BLOCK for tokens in longer
    ]


def test_prompts_that_share_a_beginning_are_loaded_beside_others_that_are_computed(
    engine: EngineProcess, cluster: Cluster
) -> None:
    shared = prompt(4000, 6 * BLOCK)
    stored = [shared + prompt(4001 + i, 3 * BLOCK + i) for i in range(4)]
    reference = store(engine, cluster, stored)
    fresh = [prompt(4100 + i, 90 + 40 * i) for i in range(3)]
    found = engine.tokens([stored[0], fresh[0], *stored, *fresh[1:]])
    assert [found[0], *found[2:6]] == [reference[0], *reference]
    engine.reset()
    assert engine.tokens(fresh) == [found[1], *found[6:]]


def loads_again(engine: EngineProcess, tokens: list[int], expected: list[int]) -> bool:
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    (output,) = engine.call("generate", prompts=[tokens])
    assert output["tokens"] == expected
    engine.reset()
    return bool(output["cached"])


def check_after_harm(engine: EngineProcess, found: list[list[int]], prompts: Any) -> None:
    """Later hits too: nothing of the failed loads is left in vLLM's own cache."""
    assert engine.tokens(prompts) == found
    engine.reset()


@pytest.mark.versions
@pytest.mark.parametrize(
    "harm", ["freeze", "kill", pytest.param("kill in the middle", marks=pytest.mark.extended)]
)
def test_requests_compute_what_does_not_arrive_and_so_does_who_shares_it(
    engine: EngineProcess, cluster: Cluster, harm: str
) -> None:
    shared = prompt(5000 + len(harm), 1200)
    prompts = [shared, shared + prompt(5001, 200), shared, shared[:600]]
    reference = store(engine, cluster, prompts)
    node = psutil.Process(cluster.status().nodes[0].pid)
    said = len(engine.log_text)
    if harm == "freeze":
        freeze(node.pid)
    elif harm == "kill":
        node.kill()
    engine.begin("generate", prompts=prompts)
    ended_by_us = harm == "kill"
    if harm == "kill in the middle":
        with suppress(ProcessLookupError):
            signal_after(node.pid, signal.SIGKILL, 0.01)
            ended_by_us = True
    assert [output["tokens"] for output in engine.finish()] == reference
    node.wait(RECOVERY_DEADLINE_S)
    # Otherwise its worker has: a load took too long, and nobody else may write into its blocks.
    assert ended_by_us or "no line to the NodeActor" in engine.log_text[said:]
    check_after_harm(engine, reference, prompts)
    wait_until(
        lambda: loads_again(engine, prompts[0], reference[0]),
        RECOVERY_DEADLINE_S,
        "offloading works again",
    )


def test_chunks_that_are_not_there_any_more_are_computed(
    engine: EngineProcess, cluster: Cluster
) -> None:
    prompts = [prompt(6000 + i, 700) for i in range(3)]
    reference = store(engine, cluster, prompts)
    # The NodeActor discards them at once; the engine may still believe in them.
    cluster.clear()
    assert engine.tokens([*prompts, prompts[0]]) == [*reference, reference[0]]
    check_after_harm(engine, reference, prompts)


@pytest.mark.extended
def test_prompts_are_loaded_through_staging_memory_too(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    """For 16 blocks: loads are made in parts, and all layers come together."""
    staged = {"kv_handover": "staged", "staging_bytes": "4MiB", "step_deadline_s": 5.0}
    engine = start(cluster, tiny_model, tmp_path, staged)
    try:
        check_whole_hits(engine, cluster, [8 * BLOCK, 1000])
    finally:
        engine.stop()
