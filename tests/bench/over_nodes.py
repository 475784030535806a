"""`over_nodes`: an engine with ranks on two nodes, compared with one that has them on one node.

Both have two ranks of tensor parallelism, each a Ray actor, and take turns with the same prompts.
All Ray nodes are on this host, so that the links between ranks are the same: what differs are two
places, with two NodeActors, in place of one. CPU is that of the whole machine, for one prompt.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from raykv.lab.hosts.local_nodes import local_node
from tests.bench.serving import BLOCK, Bed
from tests.fixtures.engine_child import ADDRESS, RESOURCES
from tests.house import CHILDREN

LENGTHS = (1024, 4096)
POOL_BYTES = 512 << 20
ONE, TWO = "ranks on one node", "ranks on two nodes"
FIRST, LOADED, CPU = "computed and stored", "loaded", "loaded, CPU of the machine"

MOST_RATIO = 1.25
"""Ratio of the times to the first token of loaded prompts, two places to one."""


def run(options: Options) -> Result:
    """See the module's docstring."""
    lengths = (2 * BLOCK,) if options.quick else LENGTHS
    result = Result("over_nodes")
    with Bed(quick=True, max_tokens=max(lengths) + BLOCK, pool_bytes=POOL_BYTES) as bed:
        for name in ("one", "two"):
            bed.with_it(local_node(bed.cluster.address, resources={name: 3}))
        os.environ[ADDRESS] = bed.cluster.address
        # Ranks that wait leave the cores to others.
        os.environ["PYTHONPATH"] = f"{CHILDREN / 'patient'}:{Path.cwd()}"
        engines = {ONE: _engine(bed, "one,one"), TWO: _engine(bed, "one,two")}
        bed.wait_for_pools()
        for engine in engines.values():
            engine.tokens([prompt(1, 2 * BLOCK)], max_tokens=1)
        for length in lengths:
            _measure(result, bed, engines, length, options.repeats_or(7))
    for length in lengths:
        case = f"{length} tokens, {LOADED}"
        slower = result.ratio(case, TWO, ONE)
        result.at_most(MOST_RATIO, slower, f"{case}: at most {MOST_RATIO} x one node")
    return result


def _engine(bed: Bed, ranks_at: str) -> EngineProcess:
    os.environ[RESOURCES] = ranks_at
    return bed.raykv(settings={"node_id": ""}, ranks_in_ray_actors=True, tensor_parallel_size=2)


def _measure(
    result: Result, bed: Bed, engines: dict[str, EngineProcess], length: int, repeats: int
) -> None:
    for number in range(repeats):
        tokens = prompt(1000 * length + number, length)
        for name, engine in engines.items():
            first = engine.first_token(tokens)
            result.add(f"{length} tokens, {FIRST}", name, "s", first.seconds)
        bed.settle()
        for name, engine in engines.items():
            engine.reset()
            before_s = _cpu_s()
            loaded = engine.first_token(tokens)
            cpu_s = _cpu_s() - before_s
            assert loaded.cached >= length - BLOCK, loaded
            result.add(f"{length} tokens, {LOADED}", name, "s", loaded.seconds)
            result.add(f"{length} tokens, {CPU}", name, "s", cpu_s)


def _cpu_s() -> float:
    """Seconds that all processors of the machine have been busy."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)
