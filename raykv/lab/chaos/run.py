"""`raykv chaos`: the bed, the faults and the verdict.

    plan (seed) ──► faults ──► Parts ───────┐
              └──► batches ──► Worked (one thread per engine) ──► ChaosReport

Everything runs on this machine, in a Ray cluster of its own that ends with the run: on one host, or
with `--hosts` on several, which are namespaces of Linux. What an engine
answers is compared with an engine that used no cache: token by token, and how certain it was.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from raykv.base.errors import ClusterError, SettingError
from raykv.base.extras import require
from raykv.base.geometry import aligned
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.chaos.engine import Worked
from raykv.lab.chaos.hosts import HostParts
from raykv.lab.chaos.parts import (
    NODE_ACTOR,
    SCHEDULER_ACTOR,
    LocalParts,
    Parts,
    actor,
    actors,
    frozen,
    kill,
    mappings,
    measured,
    shared_memory,
)
from raykv.lab.chaos.plan import BLOCK, MAX_TOKENS, Fault, FaultKind, batches, faults, prompts
from raykv.lab.chaos.report import ChaosAnswer, ChaosReport, FaultSeen, Process, show
from raykv.lab.chaos.watch import ChaosWatch
from raykv.lab.demo.tiny_llama import tiny_llama
from raykv.lab.hosts.network import objection
from raykv.lab.json_file import json_file, write_json

CHUNK_BYTES = aligned(4 * 2 * 2 * 64 * 4 * BLOCK)
"""Of the tiny model: four layers, keys and values, two heads of 64 floats of 4 bytes."""

POOL_CHUNKS = 160
"""The prompts have about 270 chunks of their own: chunks are evicted all along."""

DISK_CHUNKS = 80
"""What the pools give up, but not all of it."""

GPU_BLOCKS = 40
"""Six requests want up to 96, and one more each while they answer: some are pre-empted."""

MENDED_DEADLINE_S = 90.0
"""A NodeActor is back after 3 to 10 s on a busy machine, an engine after 10 to 30 s."""

AWAY_DEADLINE_S = 240.0
"""A host that was away for two minutes gets a new Ray node, new actors, and an engine that has to
find them."""

BATCH_DEADLINE_S = 150.0
HEADLESS_S = 75.0
"""Ray ends what has not reached its GCS for 60 s."""


@dataclass(frozen=True)
class ChaosOptions:
    """Options of `raykv chaos`."""

    seconds: float
    seed: int
    num_nodes: int = 2
    kinds: tuple[FaultKind, ...] = ()
    logs: Path | None = None
    loses_head: bool = False
    on_hosts: bool = False


def run_chaos(options: ChaosOptions, console: Console, json_path: Path | None = None) -> int:
    """Kill and freeze parts of a cluster under load, and report what happened.

    Returns:
        0, or 1 if a request failed, an answer was wrong, offloading did not come back, or
        something was left over.

    Raises:
        RayKVError: the cluster or the engines could not be started, or an option is impossible.
    """
    require("raykv chaos", "vllm")
    for kind in options.kinds:
        if kind.is_of_a_host and not options.on_hosts:
            raise SettingError(f"the fault '{named(kind)}' needs hosts: --hosts 2")
    if options.on_hosts and (reason := objection()):
        raise SettingError(f"--hosts {options.num_nodes}: {reason}")
    json_file(json_path)
    in_shm = shared_memory()
    report = ChaosReport(options.seed, options.num_nodes)
    with ExitStack() as stack:
        _Chaos(stack, options, console, report).run()
    # That of hosts ends with them.
    if not options.on_hosts:
        report.left_over += [f"/dev/shm/{name}" for name in sorted(shared_memory() - in_shm)]
    console.print(show(report))
    write_json(json_path, report.as_json())
    return report.exit_code


class _Chaos:
    """One run."""

    def __init__(
        self, stack: ExitStack, options: ChaosOptions, console: Console, report: ChaosReport
    ) -> None:
        self._options = options
        self._console = console
        self._report = report
        # Hosts have a /tmp of their own each.
        place = "/var/tmp" if options.on_hosts else None
        folder = tempfile.TemporaryDirectory(
            prefix="raykv-chaos-", dir=place, ignore_cleanup_errors=True
        )
        self._folder = Path(stack.enter_context(folder))
        self._logs = options.logs or self._folder
        self._logs.mkdir(parents=True, exist_ok=True)
        self._model = tiny_llama(self._folder / "model")
        self._is_headless = False
        self._parts: Parts
        what = "hosts" if options.on_hosts else "nodes"
        self._say(f"starting Ray on {options.num_nodes} {what}: up to a minute")
        if options.on_hosts:
            self._parts = HostParts(options.num_nodes)
        else:
            self._parts = LocalParts(options.num_nodes, self._folder)
        stack.callback(lambda: self._parts.end(is_headless=self._is_headless))
        self._engines: list[Worked] = []
        stack.callback(self._end_engines)
        self._probes = itertools.count()

    def run(self) -> None:
        """Start engines, cause the faults, and count."""
        self._say(f"starting {self._options.num_nodes} engines: a minute or two")
        self._start_engines()
        for engine in self._engines:
            engine.start()
        # As a fault that was none: all engines have to store, load and fetch.
        start = FaultSeen(-1, "start", 0, 0.0, 0.0)
        self._wait_until_mended(start)
        if not start.is_mended:
            raise ClusterError("offloading does not work, before anything was done to it")
        self._report.before = self._processes()
        began = time.monotonic()
        for fault in self._faults(began):
            self._happen(fault, began)
        self._report.seconds = time.monotonic() - began
        self._count_cluster()
        if self._options.loses_head:
            self._lose_head(began)
        self._stop_load()
        for engine in self._engines:
            self._report.add(engine.seen)

    def _say(self, line: str) -> None:
        """Print progress; a status shows on terminals only."""
        self._console.print(line, style="dim", highlight=False)

    def _faults(self, began: float) -> Iterator[Fault]:
        """Yield faults until time is up; after the last one, wait until offloading works again."""
        give_up_at = began + self._options.seconds
        options = self._options
        kinds = options.kinds or tuple(
            kind for kind in FaultKind if options.on_hosts or not kind.is_of_a_host
        )
        for fault in faults(options.seed, options.num_nodes, kinds):
            time.sleep(fault.pause_s)
            yield fault
            if time.monotonic() >= give_up_at:
                if fault.overlaps:
                    self._wait_until_mended(self._report.faults[-1])
                    self._say(self._report.faults[-1].line())
                return

    # Engines

    def _start_engines(self) -> None:
        texts = prompts(self._options.seed)
        starts = [partial(self._engine, number) for number in range(self._options.num_nodes)]
        processes = started_together(*starts)
        references = self._references(processes[0], texts)
        for number, process in enumerate(processes):
            self._engines.append(
                Worked(
                    number,
                    process,
                    starts[number],
                    texts,
                    references,
                    batches(self._options.seed, number, len(texts)),
                    partial(next, self._probes),
                )
            )

    def _engine(self, number: int) -> EngineProcess:
        settings: dict[str, Any] = {
            "pool_bytes": POOL_CHUNKS * CHUNK_BYTES,
            "disk_bytes": DISK_CHUNKS * CHUNK_BYTES,
            "disk_free_bytes": 1,
            # Even where this small model computes faster.
            "always_fetch": True,
            "stop_unused_stores": False,
        }
        return self._parts.engine(
            number,
            self._model,
            self._logs / f"engine-{number}.log",
            raykv=settings,
            cores=str(number % 2),
            num_gpu_blocks_override=GPU_BLOCKS,
            max_model_len=1024,
            block_size=BLOCK,
        )

    def _references(self, engine: EngineProcess, texts: list[list[int]]) -> list[ChaosAnswer]:
        """Return the answers of an engine that neither loads nor stores, one prompt at a time."""
        found = []
        for text in texts:
            engine.reset()
            requests = [{"prompt": text, "max_tokens": MAX_TOKENS}]
            params = {"raykv_load": False, "raykv_store": False}
            (answer,) = engine.call("serve", requests=requests, params=params)["outputs"]
            found.append(ChaosAnswer(**answer))
        engine.reset()
        return found

    # Faults

    def _happen(self, fault: Fault, began: float) -> None:
        seen = FaultSeen(
            fault.number, fault.kind, fault.node, fault.lasts_s, time.monotonic() - began
        )
        self._report.faults.append(seen)
        with self._console.status(f"fault {fault.number}: {fault.kind}, node {fault.node}"):
            try:
                self._do(fault)
            except ClusterError as error:
                seen.note = str(error)
            if not fault.overlaps:
                self._wait_until_mended(seen)
        self._say(seen.line())

    def _do(self, fault: Fault) -> None:
        engine = self._engines[fault.node]
        if fault.kind.hits_engine:
            engine.hit()
        if fault.kind is FaultKind.ENGINE_KILLED:
            engine.process.kill()
        elif fault.kind is FaultKind.RAYLET_KILLED:
            if self._parts.lose_raylet(fault.node):
                engine.restart()
        elif fault.kind.lasts:
            of_a_host = fault.kind.is_of_a_host
            wrong = self._parts.afflict(fault) if of_a_host else frozen(self._victim(fault))
            with wrong:
                time.sleep(fault.lasts_s)
        else:
            kill(self._victim(fault))

    def _victim(self, fault: Fault) -> int:
        match fault.kind:
            case FaultKind.NODE_ACTOR_KILLED | FaultKind.NODE_ACTOR_FROZEN:
                return actor(self._parts, NODE_ACTOR, fault.node)
            case FaultKind.SCHEDULER_ACTOR_KILLED | FaultKind.SCHEDULER_ACTOR_FROZEN:
                return actor(self._parts, SCHEDULER_ACTOR, *range(self._parts.num_nodes))
            case FaultKind.RAYLET_FROZEN:
                return self._parts.raylet(fault.node)
            case FaultKind.ENGINE_FROZEN:
                return self._engines[fault.node].process.pid
            case _:
                assert fault.kind is FaultKind.GCS_FROZEN, fault
                return self._parts.gcs()

    def _wait_until_mended(self, seen: FaultSeen) -> None:
        seen.waited = True
        watch = ChaosWatch(len(self._engines))
        for engine in self._engines:
            engine.watch = watch
        deadline_s = AWAY_DEADLINE_S if self._options.on_hosts else MENDED_DEADLINE_S
        give_up_at = time.monotonic() + deadline_s
        while not watch.wait(0.5) and time.monotonic() < give_up_at:
            self._check_threads()
        for engine in self._engines:
            engine.watch = None
        seen.loads_again_s, seen.fetches_again_s = watch.loads_again_s, watch.fetches_again_s

    def _check_threads(self) -> None:
        for engine in self._engines:
            if engine.error is not None:
                raise ClusterError(f"engine {engine.number}: {engine.error}") from engine.error

    # The end

    def _processes(self) -> list[Process]:
        engines = [measured("engine", engine.process.pid) for engine in self._engines]
        return [*actors(self._parts), *engines]

    def _stop_load(self) -> None:
        for engine in self._engines:
            engine.stop(BATCH_DEADLINE_S)
            if engine.is_alive():
                self._report.failed.append(f"engine {engine.number} does not come to an end")
        self._check_threads()

    def _count_cluster(self) -> None:
        report = self._report
        report.after = self._processes()
        nodes = self._parts.nodes()
        report.bytes_stored = sum(node["bytes_stored"] for node in nodes)
        report.bytes_fetched = sum(node["bytes_fetched"] for node in nodes)
        for number in range(self._parts.num_nodes):
            self._count_mappings(number)

    def _lose_head(self, began: float) -> None:
        """Kill the GCS for good, and let engines run without it."""
        seen = FaultSeen(
            len(self._report.faults), "GCS killed, for good", 0, 0.0, time.monotonic() - began
        )
        self._report.faults.append(seen)
        with self._console.status(f"no GCS for {HEADLESS_S:.0f} s"):
            kill(self._parts.gcs())
            self._is_headless = True
            time.sleep(HEADLESS_S)
        self._check_threads()

    def _count_mappings(self, number: int) -> None:
        """Report memory that a NodeActor maps more than once."""
        names = mappings(self._parts, number)
        extra = [name for name in set(names) if names.count(name) > 1]
        self._report.left_over += [
            f"node {number}: {name} is mapped more than once" for name in extra
        ]

    def _end_engines(self) -> None:
        for engine in self._engines:
            with contextlib.suppress(Exception):
                engine.process.stop()


def kinds_named(names: Sequence[str]) -> tuple[FaultKind, ...]:
    """Look up kinds of faults by name, like "node-actor-killed".

    Raises:
        SettingError: there is no such kind.
    """
    known = {named(kind): kind for kind in FaultKind}
    for name in names:
        if name not in known:
            raise SettingError(f"no fault is called {name!r}; there are {', '.join(known)}")
    return tuple(known[name] for name in names)


def named(kind: FaultKind) -> str:
    """The name of a kind on the command line."""
    return kind.name.lower().replace("_", "-")
