"""`sleep`: from an engine's wake-up to the first token of a prompt that it knew before it slept.

An engine that sleeps gives its KV cache's memory back, and vLLM forgets all prefixes. RayKV's pools
stay. On a GPU the KV cache of an engine that can sleep is not mapped by the NodeActor but copied
through staging memory, since it gets other memory when it wakes up: what that costs is measured
here by the same handing over of memory that could be mapped. SmolLM2-135M in float32 on one core;
vLLM's CPU build gives no memory back, so that waking up itself costs nothing.
"""

from __future__ import annotations

from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result, Row, Verdict
from tests.bench.serving import BLOCK, RECOMPUTE, Bed

LENGTHS = (1024, 4096)
POOL_BYTES = 2 << 30
LOADED, STAGED = "RayKV", "RayKV, kv_handover=staged"
LEAST_SPEED_UP = 5.0
MOST_FOR_STAGING = 2.0


def run(options: Options) -> Result:
    """See the module's docstring."""
    lengths = (2 * BLOCK,) if options.quick else LENGTHS
    result = Result("sleep")
    pool_bytes = (256 << 20) if options.quick else POOL_BYTES
    with Bed(quick=options.quick, max_tokens=max(lengths) + BLOCK, pool_bytes=pool_bytes) as bed:
        bed.start_cluster()
        plain, mapped, staged = started_together(
            bed.plain,
            bed.raykv,
            lambda: bed.raykv(settings={"kv_handover": "staged"}),
        )
        engines = {RECOMPUTE: plain, LOADED: mapped, STAGED: staged}
        bed.wait_for_pools()
        for engine in engines.values():
            engine.tokens([prompt(1, 2 * BLOCK)], max_tokens=1)
        for length in lengths:
            result.rows += _measure(bed, engines, length, options.repeats_or(3), result.notes)
    for length in lengths:
        case = f"{length} tokens"
        loaded = result.row(case, LOADED)
        speed_up = result.row(case, RECOMPUTE).ratio_to(loaded)
        budget = f"{case}: at least 5 x faster than recompute"
        result.verdicts.append(Verdict(budget, speed_up, LEAST_SPEED_UP, is_most=False))
        slower = result.row(case, STAGED).ratio_to(loaded)
        budget = f"{case}: staging at most doubles the time"
        result.verdicts.append(Verdict(budget, slower, MOST_FOR_STAGING))
    return result


def _measure(
    bed: Bed, engines: dict[str, EngineProcess], length: int, repeats: int, notes: list[str]
) -> list[Row]:
    values: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(repeats):
        tokens = prompt(1000 * length + number, length)
        # vLLM leaves what a step has computed to the next one to store.
        engines[LOADED].tokens([tokens], max_tokens=2)
        bed.settle()
        for name, engine in engines.items():
            found = engine.call("wake", prompt=tokens)
            values[name].append(found["seconds"])
            if name != RECOMPUTE and found["cached"] < length - BLOCK:
                notes.append(f"{name}: only {found['cached']:.0f} of {length} tokens were loaded.")
    return [Row(f"{length} tokens", name, "s", tuple(some)) for name, some in values.items()]
