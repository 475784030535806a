"""`hidden_states`: states per second, from the request to the file that has been read.

A batch of prompts goes to an engine that extracts hidden states, and the files of all of them are
read, as a trainer would. Beside RayKV, which stores the KV of these prompts as well, RayKV without
that, vLLM's example connector, and the engine without a connector, which has no states to show. The
model is tiny: a real one computes so long that nothing else shows.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.node.states.file import cleanup_hidden_states, load_hidden_states
from tests.bench import example_states
from tests.bench.serving import BLOCK, Bed

RAYKV, STATES_ONLY = "RayKV", "RayKV, KV not stored"
EXAMPLE, NONE = "ExampleHiddenStatesConnector", "no connector"
CASE = "prompts of 1,024 tokens"

LAYERS = [1, 2, 3]
TOKEN_BYTES = len(LAYERS) * 256 * 4
"""Of the tiny model's states, in float32."""

READERS = 4
LEAST_SHARE = 1.0

NO_KV = {"raykv_load": False, "raykv_store": False}


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("hidden_states")
    length, count = (2 * BLOCK, 4) if options.quick else (8 * BLOCK, 48)
    pool_bytes = (256 << 20) if options.quick else (2 << 30)
    seeds = iter(range(30_000, 90_000))
    values: dict[str, list[float]] = {}
    with Bed(quick=True, max_tokens=length + BLOCK, pool_bytes=pool_bytes) as bed:
        bed.start_cluster()
        subjects = _subjects(bed)
        bed.wait_for_pools()
        for _ in range(options.repeats_or(5) + 1):
            for name, (engine, params) in subjects.items():
                prompts = [prompt(next(seeds), length) for _ in range(count)]
                values.setdefault(name, []).append(_mb_per_s(engine, prompts, params))
                engine.reset()
    for name, some in values.items():
        # The first round has the model's first steps in it.
        result.rows.append(Row(CASE, name, "MB/s", tuple(some[1:])))
    for name in (RAYKV, STATES_ONLY):
        ratio = result.row(CASE, name).ratio_to(result.row(CASE, EXAMPLE))
        budget = f"{name}: at least as many states as the example connector"
        result.verdicts.append(Verdict(budget, ratio, LEAST_SHARE, is_most=False))
    result.notes.append(
        "MB of states per second, until all files are read; without a connector as if there were "
        "some. The engine computes on one core, writers, readers and copies share the other one."
    )
    return result


def _subjects(bed: Bed) -> dict[str, tuple[EngineProcess, dict[str, bool]]]:
    layers = {"eagle_aux_hidden_state_layer_ids": LAYERS}
    extract = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": layers},
    }
    folder = str(bed.folder / "states")
    ours = {
        "kv_connector": "RayKVHiddenStatesConnector",
        "kv_connector_extra_config": {
            "ray_address": bed.cluster.address,
            "pool_bytes": str(bed.pool_bytes),
            "hidden_states_path": folder,
        },
    }
    raykv = bed.other(ours, speculative_config=extract, multiprocess=True)
    theirs = bed.other(
        example_states.connector(folder), speculative_config=extract, multiprocess=True
    )
    plain = bed.plain(speculative_config=extract, multiprocess=True)
    return {
        RAYKV: (raykv, {}),
        STATES_ONLY: (raykv, NO_KV),
        EXAMPLE: (theirs, {}),
        NONE: (plain, {}),
    }


def _mb_per_s(engine: EngineProcess, prompts: list[list[int]], params: dict[str, bool]) -> float:
    began = time.perf_counter()
    outputs: list[Any] = engine.call(
        "generate", prompts=prompts, max_tokens=1, params=params or None
    )
    transfers = [output["transfer"] or {} for output in outputs]
    paths = [each["hidden_states_path"] for each in transfers if "hidden_states_path" in each]
    with ThreadPoolExecutor(READERS) as threads:
        sizes = list(threads.map(_read, paths))
    took_s = time.perf_counter() - began
    for path in paths:
        cleanup_hidden_states(path)
    num_tokens = sum(len(each) for each in prompts)
    assert not sizes or sum(sizes) == num_tokens * TOKEN_BYTES, (sizes, num_tokens)
    return num_tokens * TOKEN_BYTES / took_s / 1e6


def _read(path: str) -> int:
    states = load_hidden_states(path)["hidden_states"]
    return int(states.numel() * states.element_size())
