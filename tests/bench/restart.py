"""`restart`: what a pool adds to an engine's start, new or there already, whatever its size.

From the engine's launch to its first token. The pool's memory is handed out while it is filled in
the background, so its size should not be felt.
"""

from __future__ import annotations

import time
from statistics import median

from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from tests.bench.serving import BLOCK, Bed

NONE, NEW, THERE = "without RayKV", "new pool", "pool that is there"
MOST_ADDED_S = 1.0
POOL_BYTES = 8 << 30


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("restart")
    pool_bytes = (128 << 20) if options.quick else POOL_BYTES
    case = f"pool of {pool_bytes >> 20} MiB"
    with Bed(quick=True, max_tokens=1024, pool_bytes=pool_bytes) as bed:
        bed.cluster.down()
        for _ in range(options.repeats_or(3)):
            result.add(case, NONE, "s", _start(bed, with_raykv=False))
            result.add(case, NEW, "s", _start(bed, with_raykv=True))
            result.add(case, "touched by then", "MiB", _prefaulted(bed))
            result.add(case, THERE, "s", _start(bed, with_raykv=True))
            bed.cluster.down()
    pairs = zip(result.row(case, NEW).values, result.row(case, NONE).values, strict=True)
    added_s = median(new - none for new, none in pairs)
    result.at_most(MOST_ADDED_S, added_s, "the pool adds at most 1 s to the start")
    result.notes.append("Ray runs already; the engine is the tiny random model.")
    return result


def _start(bed: Bed, *, with_raykv: bool) -> float:
    began = time.monotonic()
    engine = bed.raykv() if with_raykv else bed.plain()
    engine.tokens([prompt(1, BLOCK)], max_tokens=1)
    took_s = time.monotonic() - began
    engine.stop()
    return took_s


def _prefaulted(bed: Bed) -> float:
    """MiB of the pool that were touched when the first token came."""
    return sum(node.prefaulted_bytes for node in bed.cluster.status().nodes) / (1 << 20)
