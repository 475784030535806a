"""vLLM's engines with RayKV on a GPU, in each way in which vLLM runs them there.

`make test-gpu` runs them. Each has a dry run on CPUs, by the same words: what is not there, such as
graphs, is left out by vLLM or by the platform, and the rest of the test is the same.

Answers are compared with those behind vLLM's own prefix hits of the same length, prompt by prompt:
then both are computed by the same kernels from the same numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raykv.lab.bench.prompts import prompt
from tests.fixtures.as_on_gpu import AS_ON_CPU, AS_ON_GPU, Ways
from tests.fixtures.platforms import BLOCK, Platform
from tests.fixtures.zoo import ZOO, build
from tests.fixtures.zoo_engine import ZooEngine
from tests.gpu.conftest import Start, started

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster

LAYERWISE = {"layerwise_loads": True}

CAPTURED = [1, 2, 4, 8, 16, 32]
"""Numbers of tokens that have a graph: decoding, and what is computed behind a load."""


def some_prompts(seed: int) -> list[list[int]]:
    """Of 3 and 37 chunks, and a rest that is computed behind them."""
    return [prompt(seed, 3 * BLOCK + 5), prompt(seed + 1, 37 * BLOCK + 17)]


def graphs(mode: str | None) -> dict[str, Any]:
    """Arguments of an engine with CUDA graphs; None: without."""
    if mode is None:
        return {"enforce_eager": True}
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": CAPTURED}
    return {"enforce_eager": False, "compilation_config": compilation}


@pytest.mark.parametrize("numbers", ["exact", "usual"])
def test_engines_on_one_device_load_what_the_other_one_stored(
    platform: Platform, start: Start, numbers: str
) -> None:
    config = getattr(platform, numbers)
    one, other = start(**config, multiprocess=True), start(**config)
    for number, (source, to) in enumerate([(one, other), (other, one)]):
        prompts = some_prompts(100 + 10 * number)
        expected = source.own_hits(prompts)
        source.store(prompts)
        to.check_loads(prompts, expected)
    assert one.process.call("running")["device"] == platform.name


MODES = ["FULL_AND_PIECEWISE", "PIECEWISE", "FULL"]

RUNS = [
    (AS_ON_GPU, "FULL_AND_PIECEWISE"),
    (Ways(is_second=True), "FULL_AND_PIECEWISE"),
    (AS_ON_GPU, "PIECEWISE"),
    (AS_ON_GPU, None),
    *((Ways(is_async), mode) for mode in MODES for is_async in (True, False)),
]
"""How it steps, and the CUDA graphs (None: none)."""


def graphs_in(platform: Platform, mode: str | None) -> dict[str, Any]:
    """`graphs`, where there are some; one mode stands for all of them in dry runs."""
    if platform.has_graphs:
        return graphs(mode)
    if mode != MODES[0]:
        pytest.skip("without graphs this is the run with other graphs once more")
    return graphs(None)


@pytest.mark.parametrize(("ways", "mode"), RUNS, ids=str)
def test_loads_give_the_tokens_of_prefix_hits_with_graphs_and_either_runner(
    platform: Platform, start: Start, ways: Ways, mode: str | None
) -> None:
    engine = start(**platform.exact, **graphs_in(platform, mode), ways=ways)
    if platform.has_graphs:
        assert engine.process.call("running")["graphs"] == (mode or "NONE")
    engine.check(some_prompts(200))


def test_loads_give_the_tokens_of_prefix_hits_as_users_start_engines(
    platform: Platform, start: Start
) -> None:
    """With vLLM's own choice of back end, runner, graphs and scheduling, in its own processes."""
    config = {"enforce_eager": False} if platform.has_graphs else {"ways": AS_ON_GPU}
    engine = start(**platform.usual, **config, multiprocess=True)
    engine.check(some_prompts(300))


@pytest.mark.parametrize("handover", ["ipc", "staged"])
def test_kv_cache_is_handed_over_as_the_setting_says(
    platform: Platform, start: Start, handover: str
) -> None:
    """Staging memory has room for 16 chunks: longer prompts are loaded in parts."""
    raykv = {"kv_handover": handover, "staging_bytes": 16 * platform.block_bytes}
    engine = start(**platform.exact, raykv=raykv)
    said = engine.process.log_text
    assert ("is copied through" in said) == (handover == "staged")
    assert (platform.mapped in said) or handover == "staged"
    engine.check(some_prompts(400))


def test_engine_that_slept_loads_what_it_stored_before_and_stores_again(
    platform: Platform, start: Start
) -> None:
    engine = start(**platform.exact, **platform.sleepy, multiprocess=True)
    is_staged = "is copied through" in engine.process.log_text
    assert is_staged == bool(platform.sleepy)
    known, new = some_prompts(500), some_prompts(510)
    expected = engine.own_hits(known)
    engine.store(known)
    for _ in range(2):
        assert engine.process.call("rest", level=1)
        engine.check_loads(known, expected)
    engine.check(new)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_hybrid_model_loads_what_it_stored(
    cluster: Cluster, platform: Platform, tmp_path: Path, name: str
) -> None:
    """Sliding windows beside full attention, in float32, and recurrent states, in bfloat16: vLLM's
    kernels of these know nothing else, and their answers are compared by their probabilities.
    """
    cluster.down()
    model = build(name, tmp_path / "model")
    config = {**platform.exact, "block_size": BLOCK, **ZOO[name].engine}
    process = started(cluster, platform, model, tmp_path / "log", **config).process
    try:
        engine = ZooEngine(name, model, cluster, process, config)
        for length in (20 * BLOCK + 21, 31 * BLOCK + 21):
            before = cluster.status().nodes[0].bytes_loaded
            assert engine.check_load(prompt(700 + length, length)) >= length - 6 * BLOCK
            assert cluster.status().nodes[0].bytes_loaded > before
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("ways", "mode"),
    [
        (AS_ON_GPU, "FULL_AND_PIECEWISE"),
        (Ways(is_async=True), "FULL_AND_PIECEWISE"),
        (AS_ON_CPU, "PIECEWISE"),
    ],
    ids=str,
)
def test_layers_are_computed_as_they_are_loaded_between_graphs(
    platform: Platform, start: Start, ways: Ways, mode: str
) -> None:
    """vLLM's graphs of decoding alone stay, where the mode has such."""
    engine = start(**platform.exact, **graphs_in(platform, mode), ways=ways, raykv=LAYERWISE)
    if platform.has_graphs:
        assert engine.process.call("running")["graphs"] == mode
    engine.check(some_prompts(600))
    longer = [[*tokens, *prompt(620, 2 * BLOCK)] for tokens in some_prompts(600)]
    engine.check(longer)
    assert "did not wait for their KV" not in engine.process.log_text
