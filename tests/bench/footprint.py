"""`footprint`: memory, CPU, threads and descriptors of each of RayKV's processes.

Beside a Ray actor that does nothing, since each actor is one. Memory is what a process takes of
the machine (the proportional set size of its own and of file pages): shared libraries count in
part, the pool and the engine's KV do not. CPU is in per cent of one core. An engine is all its
processes, idle after its first token, with RayKV less without it. Per million chunks: the
directory, the index of a NodeActor, the view of an engine; each in a process of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from raykv.cluster.ask import detached, find_node_actor, find_scheduler_actor
from raykv.directory.actor import scheduler_actor
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from tests.bench import directory, pool
from tests.bench.serving import BLOCK, Bed
from tests.bench.viewed import ViewedNode
from tests.fixtures.keys import random_key

BARE, SCHEDULER, NODE, ENGINE = "bare Ray actor", "scheduler actor", "NodeActor", "engine"
IDLE, LOAD, CHUNKS = "idle", "under load", "a million chunks"
POOL_BYTES = 1 << 30
MILLION = 1_000_000
PROMPT_BLOCKS = 8
KV_BLOCKS = 32
"""Few, since the KV of an engine with RayKV is shared memory, which is not counted."""

MOST_SCHEDULER_MB = 30.0
MOST_NODE_MB = 60.0
"""Of memory, beyond that of a bare Ray actor."""

MOST_ENGINE_MB = 80.0
MOST_IDLE_CPU = 1.0
"""Per cent of a core, of both actors together, beyond that of two bare ones."""

MOST_START_S = 0.3
"""From its creation to its first answer, beyond a bare Ray actor."""

MOST_CHUNK_MB = 1000.0
"""Of memory for a million chunks in all processes of one node and one engine."""


@dataclass(frozen=True)
class Footprint:
    """Usage of some processes: memory in bytes, CPU seconds so far, threads, descriptors."""

    num_bytes: int
    cpu_s: float
    num_threads: int
    num_files: int


def taken(pids: Sequence[int]) -> Footprint:
    """By all these processes."""
    processes = [psutil.Process(pid) for pid in pids]
    times = [process.cpu_times() for process in processes]
    return Footprint(
        sum(pool.own_bytes(pid) for pid in pids),
        sum(each.user + each.system for each in times),
        sum(process.num_threads() for process in processes),
        sum(process.num_fds() for process in processes),
    )


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("footprint")
    with Bed(quick=True, max_tokens=PROMPT_BLOCKS * BLOCK * 2, pool_bytes=POOL_BYTES) as bed:
        _measure_start(result, bed, options)
        actors = _start_actors(bed)
        pids = {name: [_pid_of(actor)] for name, actor in actors.items()}
        bed.wait_for_pools()
        _measure(result, IDLE, pids, options, lambda: time.sleep(2.0 if options.quick else 20.0))
        engine = bed.raykv(num_gpu_blocks_override=KV_BLOCKS)
        number = iter(range(1, MILLION))

        def play() -> None:
            """Half of the prompts are new, the other half are loaded."""
            for _ in range(2 if options.quick else 20):
                words = prompt(next(number), PROMPT_BLOCKS * BLOCK)
                for _ in range(2):
                    engine.tokens([words], max_tokens=1)
                    engine.reset()

        play()
        _measure(result, LOAD, pids, options, play)
        with_raykv = _engines_bytes(engine)
        engine.stop()
        plain = bed.plain(num_gpu_blocks_override=KV_BLOCKS)
        for at in range(2):
            plain.tokens([prompt(at, PROMPT_BLOCKS * BLOCK)], max_tokens=1)
        more = (with_raykv - _engines_bytes(plain)) / 1e6
        result.add(IDLE, ENGINE, "MB more", more)
    _measure_chunks(result, options)
    _judge(result)
    return result


def _measure_start(result: Result, bed: Bed, options: Options) -> None:
    """From an actor's creation to its first answer; each gets a process of its own."""
    address = bed.cluster.address
    environment = {"RAY_worker_niceness": "0"}
    for number in range(options.repeats_or(9)):
        began = time.monotonic()
        bare = detached(ray.remote(_Bare), f"bare {number}", environment).remote()
        _pid_of(bare)
        answered = time.monotonic()
        ray.get(scheduler_actor(address).ping.remote(), timeout=60.0)
        result.add("start", BARE, "s", answered - began)
        result.add("start", SCHEDULER, "s", time.monotonic() - answered)
        ray.kill(bare)
        bed.cluster.down()


def _start_actors(bed: Bed) -> dict[str, Any]:
    """A bare actor, and those of RayKV, with a pool."""
    bed.cluster.up(pool_bytes=POOL_BYTES)
    (node,) = bed.cluster.status().nodes
    bare = ray.remote(num_cpus=0)(_Bare).remote()
    return {BARE: bare, SCHEDULER: find_scheduler_actor(), NODE: find_node_actor(node.node_id)}


class _Bare:
    """An actor that does nothing."""


def _pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=60.0)
    return pid


def _measure(
    result: Result,
    case: str,
    pids: dict[str, list[int]],
    options: Options,
    work: Callable[[], object],
) -> None:
    """Measure the usage of each subject during `work`."""
    for _ in range(options.repeats_or(3)):
        before = {name: taken(some) for name, some in pids.items()}
        began = time.monotonic()
        work()
        seconds = time.monotonic() - began
        for name, some in pids.items():
            after = taken(some)
            share = 100 * (after.cpu_s - before[name].cpu_s) / seconds
            result.add(f"{case}, memory", name, "MB", after.num_bytes / 1e6)
            result.add(f"{case}, CPU", name, "% of a core", share)
            result.add(f"{case}, threads", name, "", after.num_threads)
            result.add(f"{case}, descriptors", name, "", after.num_files)


def _engines_bytes(engine: EngineProcess) -> int:
    """Of all processes of an engine."""
    main = psutil.Process(engine.pid)
    return taken([main.pid, *(child.pid for child in main.children(recursive=True))]).num_bytes


# Per chunk


def index_bytes(count: int) -> int:
    """Measure the memory of a NodeActor's index of this many chunks."""
    return round(pool.chunk_bytes(count) * count)


def view_bytes(count: int) -> int:
    """Measure the memory of an engine's view of this many chunks."""
    before = pool.own_bytes(os.getpid())
    node = ViewedNode()
    node.store(random_key(number) for number in range(count))
    assert node.view.num_ready == count, node.view.num_ready
    return pool.own_bytes(os.getpid()) - before


def _measure_chunks(result: Result, options: Options) -> None:
    count = 10_000 if options.quick else MILLION
    case = CHUNKS if count == MILLION else f"{count} chunks"
    measured = pool.alone(directory.load, count, 1)["memory"][directory.CORE]
    result.add(case, SCHEDULER, "MB", *(each * count / 1e6 for each in measured))
    for name, measure in ((NODE, index_bytes), (ENGINE, view_bytes)):
        result.add(case, name, "MB", pool.alone(measure, count) / 1e6)


def _judge(result: Result) -> None:
    def more(name: str, what: str = "memory") -> float:
        case = f"{IDLE}, {what}"
        return result.row(case, name).median - result.row(case, BARE).median

    start_s = result.row("start", SCHEDULER).median - result.row("start", BARE).median
    cpu = more(SCHEDULER, "CPU") + more(NODE, "CPU")
    chunks = [row.median for row in result.rows if row.case.endswith("chunks")]
    budget = f"the scheduler actor: at most {MOST_SCHEDULER_MB:.0f} MB beyond a bare actor"
    result.at_most(MOST_SCHEDULER_MB, more(SCHEDULER), budget)
    budget = f"the scheduler actor answers at most {MOST_START_S:g} s later"
    result.at_most(MOST_START_S, start_s, budget)
    result.at_most(MOST_NODE_MB, more(NODE), "a NodeActor: at most 60 MB beyond a bare actor")
    engine_mb = result.row(IDLE, ENGINE).median
    result.at_most(MOST_ENGINE_MB, engine_mb, "an engine: at most 80 MB more")
    budget = "both actors idle: at most 1 % of a core beyond bare ones"
    result.at_most(MOST_IDLE_CPU, cpu, budget)
    result.at_most(MOST_CHUNK_MB, sum(chunks), "a million chunks: at most 1,000 MB on a node")
