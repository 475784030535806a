"""`restart`: what a pool adds to an engine's start, new or there already, whatever its size.

From the engine's launch to its first token. The pool's memory is handed out while it is filled in
the background, so its size should not be felt.
"""

from __future__ import annotations

import time

from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result, Row, Verdict
from tests.bench.serving import BLOCK, Bed

NONE, NEW, THERE = "without RayKV", "new pool", "pool that is there"
MOST_ADDED_S = 1.0
POOL_BYTES = 8 << 30


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("restart")
    pool_bytes = (128 << 20) if options.quick else POOL_BYTES
    times: dict[str, list[float]] = {NONE: [], NEW: [], THERE: []}
    resident: list[float] = []
    with Bed(quick=True, max_tokens=1024, pool_bytes=pool_bytes) as bed:
        bed.cluster.down()
        for _ in range(options.repeats_or(3)):
            times[NONE].append(_start(bed, with_raykv=False))
            times[NEW].append(_start(bed, with_raykv=True))
            resident.append(_prefaulted(bed))
            times[THERE].append(_start(bed, with_raykv=True))
            bed.cluster.down()
    case = f"pool of {pool_bytes >> 20} MiB"
    result.rows = [Row(case, name, "s", tuple(some)) for name, some in times.items()]
    result.rows.append(Row(case, "touched by then", "MiB", tuple(resident)))
    added = [new - none for new, none in zip(times[NEW], times[NONE], strict=True)]
    added.sort()
    result.verdicts = [
        Verdict("the pool adds at most 1 s to the start", added[len(added) // 2], MOST_ADDED_S)
    ]
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
