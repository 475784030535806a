"""`ttft --device cuda`: time to the first token of long prompts on a GPU.

Random weights of the shape of Llama 8B in bfloat16: how long a step takes does not depend on them.
Both engines have vLLM's first model runner and no asynchronous scheduling, which `layerwise_loads`
asks for, so that they differ in nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raykv.base.errors import SettingError
from raykv.lab.bench.copy_cuda import has_torch_for_cuda
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.lab.bench.serving import BLOCK, PREFIX_HIT, RAYKV, RECOMPUTE, Bed

BY_LAYER = "RayKV, layerwise_loads"
LENGTHS = (2048, 8192, 32768)
QUICK_LENGTHS = (2 * BLOCK,)
POOL_BYTES = 16 << 30
"""The longest prompt has 4 GiB."""

QUICK_POOL_BYTES = 256 << 20
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "hf_overrides": LLAMA_8B,
    "block_size": 16,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.45,
}


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: there is no GPU that torch could use.
    """
    if not has_torch_for_cuda():
        raise SettingError("--device cuda can't be measured here: torch sees no GPU")
    return measure(options, {} if options.quick else ON_GPU)


def measure(options: Options, config: dict[str, Any]) -> Result:
    """All rows, of engines with the arguments `config`."""
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    pool_bytes = QUICK_POOL_BYTES if options.quick else POOL_BYTES
    config = {**config, "async_scheduling": False}
    result = Result("ttft", f"{BENCHMARKS['ttft'].summary}, on a GPU")
    with (
        _first_model_runner(),
        Bed(quick=True, max_tokens=max(lengths) + BLOCK, pool_bytes=pool_bytes) as bed,
    ):
        # One by one: each measures how much of the GPU's memory is free.
        whole = bed.raykv(**config)
        by_layer = bed.raykv(settings={"layerwise_loads": True}, **config)
        bed.wait_for_pools()
        for engine in (whole, by_layer):
            engine.tokens([prompt(1, 2 * BLOCK)], max_tokens=1)
        for length in lengths:
            result.rows += _rows(bed, whole, by_layer, length, options.repeats_or(3))
            case = f"{length} tokens"
            ratio = result.row(case, RAYKV).ratio_to(result.row(case, PREFIX_HIT))
            budget = f"{case}: faster than vLLM's own prefix hit"
            result.verdicts.append(Verdict(budget, ratio, 1.0))
    return result


@contextmanager
def _first_model_runner() -> Iterator[None]:
    name = "VLLM_USE_V2_MODEL_RUNNER"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _rows(
    bed: Bed, whole: EngineProcess, by_layer: EngineProcess, length: int, repeats: int
) -> list[Row]:
    values: dict[str, list[float]] = {}

    def note(name: str, engine: EngineProcess, tokens: list[int], *, is_cached: bool) -> None:
        (output,) = engine.call("generate", prompts=[tokens], max_tokens=1)
        assert is_cached == (output["cached"] >= length - BLOCK), output
        values.setdefault(name, []).append(float(output["ttft_s"]))

    for number in range(repeats):
        tokens = prompt(1000 * length + number, length)
        note(RECOMPUTE, whole, tokens, is_cached=False)
        note(PREFIX_HIT, whole, tokens, is_cached=True)
        bed.settle()
        whole.reset()
        note(RAYKV, whole, tokens, is_cached=True)
        note(BY_LAYER, by_layer, tokens, is_cached=True)
        for engine in (whole, by_layer):
            engine.reset()
    return [Row(f"{length} tokens", name, "s", tuple(some)) for name, some in values.items()]
