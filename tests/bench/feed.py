"""`feed`: how soon engines learn of other engines' stores, and the cost of that.

A chunk is stored by one engine; the time counts from the job's submission until another engine of
the node has it in what its next step reads, and until one of another node is told of it by the
scheduler actor, which is asked again and again. Beside them are as many busy nodes as said, each a
generator of the reports of a node with four engines that store 32 chunks a second each.

An engine with a model then answers prompts that it loads, while another one stores a hundred times
a second on its node: chunks that it can't use, of which it is told nothing, or such that it can.
And a million chunks are in a pool when the scheduler actor is killed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import ray

from raykv.base.errors import ClusterError
from raykv.base.ids import Key, Lookup
from raykv.client.cluster import Cluster
from raykv.cluster import join
from raykv.cluster.ask import answer, find_scheduler_actor, received
from raykv.engine.requests import RequestOptions
from raykv.lab.bench.engine import EngineProcess, own_cluster
from raykv.lab.bench.modelless import ModellessEngine
from raykv.lab.bench.named_jobs import key_of
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result
from raykv.lab.hosts.local_nodes import local_node
from raykv.lab.waiting import DEADLINE_S, wait
from raykv.protocol.framing import decode, encode
from raykv.protocol.node import ReportAnswer
from raykv.protocol.status import ClusterStatus
from tests.bench.scale import ENGINES_PER_NODE, STORED, PlayedNode
from tests.bench.serving import Bed

SPACE, OTHER_SPACE = "bench", "other"
CHUNK_BYTES = 4096
POOL_BYTES = 1 << 30
IDLE, BUSY = "idle nodes", "20 busy nodes"
BUSY_NODES = 18
"""In addition to the two that are measured."""

REPORTS_PER_S = 8
HERE, THERE = "engine of the same node", "engine of another node"
MOST_HERE_MS, MOST_THERE_MS = 5.0, 30.0

PER_S = 100
SMALL_BLOCK = 32
"""Tokens: the stores of a minute are a part of the pool."""

ALONE, UNTOLD, TOLD = "nobody stores", "stores it is not told of", "stores it is told of"
HOOKS, FIRST_TOKEN = "hooks, p99", "to the first token"
MOST_HOOKS, MOST_TTFT = 1.10, 1.03

JOB_CHUNKS = 512
KNOWS_ALL = "until it knows all"
MOST_JOIN_S = 3.0


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("feed")
    with own_cluster() as cluster:
        _measure_delays(result, cluster, options)
        cluster.down()
        _measure_join(result, cluster, options)
    _measure_cost(result, options)
    return result


# How soon


class ReadingEngine(ModellessEngine):
    """An engine that looks for chunks, as a step and a new request do."""

    def has(self, key: Key) -> bool:
        """Whether its node's listing, as far as it has arrived, has a chunk, as every step asks."""
        self.runtime.session.drain()
        return self.view.reach("", [key]) == 1

    def finds(self, key: Key) -> bool:
        """Whether a new request hears of a chunk from its node or from the scheduler actor."""
        request_id = f"request {next(self.numbers)}"
        self.view.start_request(request_id, RequestOptions())
        self.view.ask(request_id, [key])
        self.runtime.session.nudge()

        def is_answered() -> bool:
            self.runtime.session.drain()
            return self.view.lookup(request_id, key, time.monotonic()) is not Lookup.RETRY

        wait(is_answered, "the scheduler actor answers")
        found = self.view.reach(request_id, [key]) > 0
        self.view.finish_request(request_id)
        return found


def _measure_delays(result: Result, cluster: Cluster, options: Options) -> None:
    address = cluster.address
    with ExitStack() as stack:
        other = stack.enter_context(local_node(address))
        own = join.resolve_node_id("")

        def engine(node_id: str) -> ReadingEngine:
            made = ReadingEngine(address, node_id, SPACE, CHUNK_BYTES, POOL_BYTES)
            stack.callback(made.stop)
            return made

        storing, here, there = engine(own).with_worker(), engine(own), engine(other)
        numbers = iter(range(1 << 60))
        for case in (IDLE, BUSY):
            with _busy(address, 0 if case == IDLE else BUSY_NODES):
                for subject, reader in ((HERE, here), (THERE, there)):
                    is_here = subject == HERE
                    times = [
                        _delay_ms(storing, reader, key_of(next(numbers)), is_here=is_here)
                        for _ in range(options.repeats_or(200))
                    ]
                    result.add(case, subject, "ms", *times)
    for case in (IDLE, BUSY):
        for subject, most in ((HERE, MOST_HERE_MS), (THERE, MOST_THERE_MS)):
            budget = f"{case}: an {subject} knows a chunk within {most:.0f} ms"
            result.at_most(most, result.row(case, subject).median, budget)


def _delay_ms(storing: ModellessEngine, reader: ReadingEngine, key: Key, *, is_here: bool) -> float:
    """From a job's submission until a reader knows its chunk."""
    time.sleep(0.02)
    began = time.perf_counter()
    storing.submit([key])
    wait(lambda: reader.has(key) if is_here else reader.finds(key), "the reader knows the chunk")
    took_s = time.perf_counter() - began
    wait(lambda: bool(storing.ended()), "the store ends")
    return took_s * 1e3


@contextmanager
def _busy(address: str, count: int) -> Iterator[None]:
    """Let this many more nodes report."""
    if not count:
        yield
        return
    actor = ray.remote(num_cpus=0)(_BusyNodes).remote(count)
    try:
        ray.get(actor.start.remote(), timeout=DEADLINE_S)
        yield
        ray.get(actor.check.remote(), timeout=DEADLINE_S)
    finally:
        ray.kill(actor)


class _BusyNodes:
    """An actor that plays nodes, all from one thread."""

    def __init__(self, count: int) -> None:
        self._nodes = [PlayedNode(number) for number in range(count)]
        self._first = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Until the actor ends; returns when all have reported once."""
        self._thread.start()
        if not self._first.wait(DEADLINE_S):
            raise TimeoutError("the scheduler actor takes no reports")

    def check(self) -> None:
        """Raise unless they report still."""
        if not self._thread.is_alive():
            raise RuntimeError("the busy nodes report no more")

    def _run(self) -> None:
        scheduler: Any = find_scheduler_actor()
        num_rows = ENGINES_PER_NODE * STORED // REPORTS_PER_S
        pause_s = 1 / REPORTS_PER_S / len(self._nodes)
        due = time.monotonic()
        numbers = iter(range(1 << 60))
        while True:
            for node in self._nodes:
                came = [key_of(1 << 61 | next(numbers)) for _ in range(num_rows)]
                raw = scheduler.report.remote(encode(node.next_report(came)))
                decode(ray.get(raw, timeout=DEADLINE_S), ReportAnswer)
                due += pause_s
                time.sleep(max(0.0, due - time.monotonic()))
            self._first.set()


# What it costs


def _measure_cost(result: Result, options: Options) -> None:
    num_tokens, count = (256, 4) if options.quick else (1024, 30)
    with Bed(quick=True, max_tokens=num_tokens + 64, pool_bytes=POOL_BYTES) as bed:
        engine = bed.raykv(block_size=SMALL_BLOCK, watch_hooks=True)
        bed.wait_for_pools()
        prompts = [prompt(100 + number, num_tokens) for number in range(count)]
        engine.tokens(prompts, max_tokens=4)
        num_chunks = count * num_tokens // SMALL_BLOCK
        wait(lambda: _chunks() >= num_chunks, "the prompts are stored", 0.05)
        (space,) = bed.cluster.status().spaces
        chunk_bytes = (space.num_bytes or 0) // space.chunks
        with ExitStack() as stack:
            storing = {UNTOLD: OTHER_SPACE, TOLD: space.namespace}
            own = join.resolve_node_id("")
            stores = {}
            for name, namespace in storing.items():
                made = ModellessEngine(bed.cluster.address, own, namespace, chunk_bytes, POOL_BYTES)
                stack.callback(made.stop)
                stores[name] = made.with_worker()
            _turn(engine, prompts)
            for number in range(options.repeats_or(9)):
                names = (ALONE, UNTOLD, TOLD)
                for name in names[number % 3 :] + names[: number % 3]:
                    with _storing(stores.get(name)):
                        hooks_us, ttft_ms = _turn(engine, prompts)
                    result.add(HOOKS, name, "µs", hooks_us)
                    result.add(FIRST_TOKEN, name, "ms", ttft_ms)
    for case, most in ((HOOKS, MOST_HOOKS), (FIRST_TOKEN, MOST_TTFT)):
        budget = f"{case}: at most {most:.2f} times as long for {PER_S} wakes a second"
        result.at_most(most, result.ratio(case, TOLD, UNTOLD), budget)


def _chunks() -> int:
    """Count the chunks that the scheduler actor knows; ask no NodeActor."""
    return sum(node.chunks for node in _status().nodes)


def _status() -> ClusterStatus:
    told = answer(find_scheduler_actor(), "status", timeout_s=DEADLINE_S)
    return received(ClusterStatus, told)


def _turn(engine: EngineProcess, prompts: list[list[int]]) -> tuple[float, float]:
    """p99 of all calls of hooks in µs, and the median time to the first token in ms."""
    engine.call("hook_times")
    times = []
    for tokens in prompts:
        engine.reset()
        (output,) = engine.call("generate", prompts=[tokens], max_tokens=8)
        assert output["cached"] >= len(tokens) - SMALL_BLOCK, output
        times.append(float(output["ttft_s"]))
    measured = engine.call("hook_times")["seconds"]
    hooks = sorted(seconds for some in measured.values() for seconds in some)
    return hooks[int(0.99 * len(hooks))] * 1e6, median(times) * 1e3


@contextmanager
def _storing(engine: ModellessEngine | None) -> Iterator[None]:
    """An engine stores a new chunk `PER_S` times a second."""
    if engine is None:
        yield
        return
    done = threading.Event()

    def store() -> None:
        due = time.monotonic()
        while not done.is_set():
            engine.submit([key_of(time.monotonic_ns())])
            engine.ended()
            due += 1 / PER_S
            done.wait(max(0.0, due - time.monotonic()))

    with ThreadPoolExecutor(1) as threads:
        storing = threads.submit(store)
        try:
            yield
        finally:
            done.set()
            storing.result(DEADLINE_S)


# A million chunks


def _measure_join(result: Result, cluster: Cluster, options: Options) -> None:
    count = 20_480 if options.quick else 1 << 20
    pool_bytes = count * CHUNK_BYTES * 5 // 4
    own = join.resolve_node_id("")
    case = f"{count:,} chunks, the scheduler actor was killed"
    engine = ModellessEngine(cluster.address, own, SPACE, CHUNK_BYTES, pool_bytes)
    try:
        engine.with_worker()
        for first in range(0, count, JOB_CHUNKS):
            engine.store([key_of(number) for number in range(first, first + JOB_CHUNKS)])
        _wait_for_all(count)
        for _ in range(options.repeats_or(3)):
            life, began = _status().life, time.monotonic()
            ray.kill(find_scheduler_actor(), no_restart=False)
            _wait_for_successor(life)
            answered = time.monotonic()
            _wait_for_all(count)
            result.add(case, "to its first answer", "s", answered - began)
            result.add(case, KNOWS_ALL, "s", time.monotonic() - answered)
    finally:
        engine.stop()
    budget = f"a million chunks are known {MOST_JOIN_S:.0f} s after its first answer"
    result.at_most(MOST_JOIN_S, result.row(case, KNOWS_ALL).median, budget)


def _wait_for_successor(life: int) -> None:
    """Until a scheduler actor of another life answers."""

    def has_answer() -> bool:
        try:
            return _status().life != life
        except (ClusterError, AttributeError):
            # There is none, or it does not answer.
            return False

    wait(has_answer, "the scheduler actor answers", 0.01)


def _wait_for_all(count: int) -> None:
    wait(lambda: _chunks() == count, f"{count} chunks are known", 0.05)
