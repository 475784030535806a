"""`ttft`: time to the first token of a prompt that is known, by where its KV comes from.

All engines are there at once and take turns. The prompts are random tokens, a whole number of
blocks: the model's work does not depend on what they say. SmolLM2-135M in float32 on one core.
"""

from __future__ import annotations

from raykv.lab.bench.engine import started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from tests.bench.serving import (
    BLOCK,
    PREFIX_HIT,
    RAYKV,
    RECOMPUTE,
    REMOTE,
    Bed,
)

LENGTHS = (1024, 2048, 4096, 7168)
POOL_BYTES = 1 << 30
"""Size of each of the two pools: three times the longest prompt's KV. If they were larger, with
four engines running, Ray's memory monitor would end the NodeActors on a machine with 24 GB."""

FIRST = "RayKV, first time (stores)"
BY_LAYER = "RayKV, same node, layerwise_loads"

LEAST_SPEED_UP = 5.0


def run(options: Options) -> Result:
    """See the module's docstring."""
    lengths = (2 * BLOCK,) if options.quick else LENGTHS
    repeats = options.repeats_or(3)
    result = Result("ttft")
    pool_bytes = (256 << 20) if options.quick else POOL_BYTES
    with Bed(quick=options.quick, max_tokens=max(lengths) + BLOCK, pool_bytes=pool_bytes) as bed:
        engines = _Engines(bed)
        for length in lengths:
            engines.measure(result, length, repeats)
    for length in lengths:
        _judge(result, f"{length} tokens")
    result.notes.append(
        "RayKV, other node: both Ray nodes are on this host and share its cores with the engines."
    )
    return result


def _judge(result: Result, case: str) -> None:
    slower = result.ratio(case, RAYKV, PREFIX_HIT)
    result.at_most(1.0, slower, f"{case}: same node faster than vLLM's own prefix hit")
    if case == "4096 tokens":
        speed_up = result.ratio(case, RECOMPUTE, REMOTE)
        budget = f"{case}: other node at least 5 x faster than recompute"
        result.at_least(LEAST_SPEED_UP, speed_up, budget)


class _Engines:
    """One of each kind, warm."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self._plain, self._here, self._by_layer, self._there = started_together(
            bed.plain,
            bed.raykv,
            lambda: bed.raykv(settings={"layerwise_loads": True}),
            bed.raykv_elsewhere,
        )
        bed.wait_for_pools()
        warm = prompt(1, 2 * BLOCK)
        for engine in (self._plain, self._here):
            engine.tokens([warm], max_tokens=1)
        bed.settle()
        for engine in (self._by_layer, self._there):
            engine.tokens([warm], max_tokens=1)

    def measure(self, result: Result, length: int, repeats: int) -> None:
        """All rows of one length."""
        case = f"{length} tokens"
        for number in range(repeats):
            tokens = prompt(1000 * length + number, length)
            result.add(case, RECOMPUTE, "s", self._plain.first_token(tokens).seconds)
            result.add(case, PREFIX_HIT, "s", self._plain.first_token(tokens).seconds)
            self._plain.reset()
            result.add(case, FIRST, "s", self._here.first_token(tokens).seconds)
            self._bed.settle()
            self._here.reset()
            for name, engine in (
                (RAYKV, self._here),
                (BY_LAYER, self._by_layer),
                (REMOTE, self._there),
            ):
                loaded = engine.first_token(tokens)
                if loaded.cached < length - BLOCK:
                    only = f"only {loaded.cached} of {length} tokens came out of a cache"
                    result.notes.append(f"{name}: {only}.")
                result.add(case, name, "s", loaded.seconds)
                engine.reset()
