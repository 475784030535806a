"""vLLM's engines with RayKV on a GPU, in each way in which vLLM runs them there.

`make test-gpu` runs them. Each has a dry run on CPUs, by the same words: what is not there, such as
graphs, is left out by vLLM or by the place, and the rest of the test is the same.

Answers are compared with those behind vLLM's own prefix hits of the same length, prompt by prompt:
then both are computed by the same kernels from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raykv.lab.bench.prompts import prompt
from tests.fixtures.places import BLOCK, CUDA, Place
from tests.fixtures.zoo import ZOO, build
from tests.fixtures.zoo_engine import ZooEngine
from tests.gpu.conftest import Start, started

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster

V2 = "VLLM_USE_V2_MODEL_RUNNER"

CAPTURED = [1, 2, 4, 8, 16, 32]
"""Numbers of tokens that have a graph: decoding, and what is computed behind a load."""


def some_prompts(seed: int) -> list[list[int]]:
    """Of 3 and 37 chunks, and a rest that is computed behind them."""
    return [prompt(seed, 3 * BLOCK + 5), prompt(seed + 1, 37 * BLOCK + 17)]


@pytest.fixture
def use_runner(monkeypatch: pytest.MonkeyPatch, place: Place) -> Callable[[str], bool]:
    """Choose the model runner of engines, "V1" or "V2"; whether the second one is used."""

    def choose(runner: str) -> bool:
        is_second = runner == "V2" and place.has_all_of_vllm
        monkeypatch.setenv(V2, str(int(is_second)))
        return is_second

    return choose


def graphs(mode: str | None) -> dict[str, Any]:
    """Arguments of an engine with CUDA graphs; None: without."""
    if mode is None:
        return {"enforce_eager": True}
    compilation = {"cudagraph_mode": mode, "cudagraph_capture_sizes": CAPTURED}
    return {"enforce_eager": False, "compilation_config": compilation}


@pytest.mark.parametrize("numbers", ["exact", "usual"])
def test_engines_on_one_device_load_what_the_other_one_stored(
    place: Place, start: Start, numbers: str
) -> None:
    config = getattr(place, numbers)
    one, other = start(**config, multiprocess=True), start(**config)
    for number, (source, to) in enumerate([(one, other), (other, one)]):
        prompts = some_prompts(100 + 10 * number)
        expected = source.own_hits(prompts)
        source.store(prompts)
        to.check_loads(prompts, expected)
    assert one.process.call("running")["device"] == place.name


MODES = ["FULL_AND_PIECEWISE", "PIECEWISE", "FULL"]

RUNS = [
    # vLLM's CPU build has no second runner, and schedules no step ahead: there each of these is a
    # dry run with the first one.
    ("V2", "FULL_AND_PIECEWISE", "async"),
    ("V2", "FULL_AND_PIECEWISE", "sync"),
    ("V2", "PIECEWISE", "async"),
    ("V2", None, "async"),
    *(("V1", mode, scheduling) for mode in MODES for scheduling in ("async", "sync")),
]
"""The model runner, the CUDA graphs (None: none), and how steps are scheduled."""


@pytest.mark.parametrize(("runner", "mode", "scheduling"), RUNS)
def test_loads_give_the_tokens_of_prefix_hits_with_graphs_and_either_runner(
    place: Place,
    start: Start,
    use_runner: Callable[[str], bool],
    runner: str,
    mode: str | None,
    scheduling: str,
) -> None:
    is_async = scheduling == "async" and place.has_all_of_vllm
    is_second = use_runner(runner)
    if runner == "V1" and scheduling != ("async" if is_async else "sync"):
        pytest.skip("there this is the run without asynchronous scheduling once more")
    engine = start(**place.exact, **graphs(mode), async_scheduling=is_async)
    running = engine.process.call("running")
    assert (running["second_runner"], running["async_scheduling"]) == (is_second, is_async)
    if place is CUDA:
        assert running["graphs"] == (mode or "NONE")
    engine.check(some_prompts(200))


def test_loads_give_the_tokens_of_prefix_hits_as_users_start_engines(
    place: Place, start: Start
) -> None:
    """With vLLM's own choice of back end, runner, graphs and scheduling, in its own processes."""
    engine = start(**place.usual, enforce_eager=False, multiprocess=True)
    engine.check(some_prompts(300))


@pytest.mark.parametrize("handover", ["ipc", "staged"])
def test_kv_cache_is_handed_over_as_the_setting_says(
    place: Place, start: Start, handover: str
) -> None:
    """Staging memory has room for 16 chunks: longer prompts are loaded in parts."""
    raykv = {"kv_handover": handover, "staging_bytes": 16 * place.block_bytes}
    engine = start(**place.exact, raykv=raykv)
    said = engine.process.log_text
    assert ("is copied through" in said) == (handover == "staged")
    assert (place.mapped in said) or handover == "staged"
    engine.check(some_prompts(400))


def test_engine_that_slept_loads_what_it_stored_before_and_stores_again(
    place: Place, start: Start
) -> None:
    engine = start(**place.exact, **place.sleepy, multiprocess=True)
    is_staged = "is copied through" in engine.process.log_text
    assert is_staged == bool(place.sleepy)
    known, new = some_prompts(500), some_prompts(510)
    expected = engine.own_hits(known)
    engine.store(known)
    for _ in range(2):
        assert engine.process.call("rest", level=1)
        engine.check_loads(known, expected)
    engine.check(new)


@pytest.mark.parametrize("name", ["gemma3", "qwen3-next"])
def test_hybrid_model_loads_what_it_stored(
    cluster: Cluster, place: Place, tmp_path: Path, name: str
) -> None:
    """Sliding windows beside full attention, in float32, and recurrent states, in bfloat16: vLLM's
    kernels of these know nothing else, and their answers are compared by their probabilities.
    """
    cluster.down()
    model = build(name, tmp_path / "model")
    config = {**place.exact, "block_size": BLOCK, **ZOO[name].engine}
    process = started(cluster, place, model, tmp_path / "log", **config).process
    try:
        engine = ZooEngine(name, model, cluster, process, config)
        for length in (20 * BLOCK + 21, 31 * BLOCK + 21):
            before = cluster.status().nodes[0].bytes_loaded
            assert engine.check_load(prompt(700 + length, length)) >= length - 6 * BLOCK
            assert cluster.status().nodes[0].bytes_loaded > before
    finally:
        process.stop()


LAYERWISE = [pytest.param({"async_scheduling": False}, "V1", "PIECEWISE", id="sync-V1-PIECEWISE")]
"""vLLM's arguments, the runner and the graphs with which it can be had."""


@pytest.mark.parametrize(("config", "runner", "mode"), LAYERWISE)
def test_layers_are_computed_as_they_are_loaded_between_graphs(
    place: Place,
    start: Start,
    use_runner: Callable[[str], bool],
    config: dict[str, Any],
    runner: str,
    mode: str,
) -> None:
    use_runner(runner)
    engine = start(**place.exact, **graphs(mode), **config, raykv={"layerwise_loads": True})
    if place is CUDA:
        assert engine.process.call("running")["graphs"] == mode
    engine.check(some_prompts(600))
    longer = [[*tokens, *prompt(620, 2 * BLOCK)] for tokens in some_prompts(600)]
    engine.check(longer)
