"""All servers and loads in turn: what `client` does."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from raykv.base.errors import SettingError
from raykv.inspect.trace_files import read_prompts
from raykv.lab.bench.client.figures import NothingAnsweredError
from raykv.lab.bench.client.server import (
    Server,
    ServerError,
    cpu_seconds,
    cpu_times,
    run_client,
    wait_until_calm,
)
from raykv.lab.bench.client.systems import (
    LMCACHE,
    NATIVE,
    PLAIN,
    RAYKV,
    SUBJECTS,
    Site,
    missing_systems,
)
from raykv.lab.bench.client.table import Played, rows, verdicts
from raykv.lab.bench.client.workloads import (
    MULTI_TURN,
    PREFIX_REPETITION,
    RANDOM,
    SCRIPT,
    SERVED,
    TIMED_TRACE,
    WORKLOADS,
    ClientLoad,
    MultiTurn,
    Sizes,
    Target,
    TimedTrace,
    log_of,
    prefix_repetition,
    random,
)
from raykv.lab.bench.completions import ModelServer
from raykv.lab.bench.ports import free_port
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import ClientOptions, Options, Result
from raykv.lab.bench.serve_routing import talking_tiny_model
from raykv.lab.bench.serving import BLOCK, Bed
from raykv.lab.bench.simulation.workload import check_row
from raykv.serve.models import SMALL_MODEL, find_model
from raykv.vllm import command as vllm_command

USUAL = Sizes(num_requests=40, rate=0.5, divisor=32, kv_blocks=48)
TINY = Sizes(num_requests=8, rate=8.0, divisor=64, kv_blocks=18)
POOL_BYTES, TINY_POOL_BYTES = 2 << 30, 256 << 20

CLIENT_S = 180.0
"""For a client's start and the last answers, beyond ten times the time that the load takes at its
own rate: servers that are too slow for it lag behind."""

LAG = 10.0

SHARED_MEMORY = Path("/dev/shm")

WARM_UP = [token % 200 for token in prompt(1, 2 * BLOCK)]
"""Token ids that the smallest model has."""


def run(options: Options) -> Result:
    """See the package's docstring.

    Raises:
        SettingError: what is asked for does not exist or lacks its file; nothing was started.
        ServerError: vLLM alone or RayKV did not start, or a client failed.
    """
    asked = options.client
    sizes = asked_sizes(asked, quick=options.quick)
    loads = chosen_workloads(asked, sizes, options.trace)
    python = asked.lmcache_python or sys.executable
    named = chosen_systems(asked)
    missing = missing_systems(named, python)
    names, notes = [name for name in named if name not in missing], list(missing.values())
    if not names:
        raise SettingError(notes[0])
    runs = _rounds(_Field(options, sizes, python), names, loads, notes)
    result = Result("client", BENCHMARKS["client"].summary, is_wide=True)
    result.rows = rows(runs)
    result.verdicts = verdicts(runs, [load.name for load in loads if load.is_reused])
    result.notes = notes
    return result


def _rounds(
    field: _Field, names: Sequence[str], loads: Sequence[ClientLoad], notes: list[str]
) -> dict[str, dict[str, list[Played]]]:
    """By load and system, one run for each repeat; a peer that fails once is left out."""
    runs: dict[str, dict[str, list[Played]]] = {
        load.name: {name: [] for name in names} for load in loads
    }
    lost: set[str] = set()
    for repeat in range(field.options.repeats_or(3)):
        for name in in_turn(names, repeat):
            if name in lost:
                continue
            try:
                found = field.play(name, loads, repeat)
            except (ServerError, NothingAnsweredError) as error:
                if name in (PLAIN, RAYKV):
                    raise
                notes.append(f"{SUBJECTS[name]} is left out: {error}")
                lost.add(name)
                continue
            for load, one in found.items():
                runs[load][name].append(one)
    return {
        load: {name: some for name, some in by_system.items() if name not in lost}
        for load, by_system in runs.items()
    }


def in_turn(names: Sequence[str], repeat: int) -> list[str]:
    """Each repeat begins with the next one."""
    first = repeat % len(names)
    return [*names[first:], *names[:first]]


def asked_sizes(asked: ClientOptions, *, quick: bool) -> Sizes:
    """What the user says, and what is usual for the rest.

    Raises:
        SettingError: the longest request does not fit into the KV memory.
    """
    usual = TINY if quick else USUAL
    sizes = Sizes(
        asked.num_requests or usual.num_requests,
        asked.rate or usual.rate,
        asked.divisor or usual.divisor,
        asked.kv_blocks or usual.kv_blocks,
    )
    # vLLM keeps one for itself.
    least = ceil(sizes.max_tokens / BLOCK) + 1
    if sizes.kv_blocks < least:
        raise SettingError(
            f"--kv-blocks {sizes.kv_blocks}: a request of {sizes.max_tokens:,} tokens needs "
            f"{least}; or divide lengths by more than --divide {sizes.divisor}"
        )
    return sizes


def chosen_systems(asked: ClientOptions) -> list[str]:
    """By name; all if none is named.

    Raises:
        SettingError: there is no such system.
    """
    return _chosen("--system", asked.systems, list(SUBJECTS)) or list(SUBJECTS)


def chosen_workloads(asked: ClientOptions, sizes: Sizes, trace: str | None) -> list[ClientLoad]:
    """By name; if none is named all whose files are given.

    Raises:
        SettingError: there is no such workload, or its file is missing.
    """
    names = _chosen("--workload", asked.workloads, list(WORKLOADS)) or [
        name
        for name, is_there in (
            (TIMED_TRACE, trace is not None),
            (PREFIX_REPETITION, True),
            (RANDOM, True),
            (MULTI_TURN, asked.multi_turn is not None),
        )
        if is_there
    ]
    return [_workload(name, asked, sizes, trace) for name in names]


def _chosen(option: str, named: Sequence[str], names: list[str]) -> list[str]:
    for name in named:
        if name not in names:
            raise SettingError(f"{option} {name}: there are {', '.join(names)}")
    return [name for name in names if name in named]


def _workload(name: str, asked: ClientOptions, sizes: Sizes, trace: str | None) -> ClientLoad:
    if name == PREFIX_REPETITION:
        return prefix_repetition(sizes)
    if name == RANDOM:
        return random(sizes)
    if name == TIMED_TRACE:
        if trace is None:
            raise SettingError("--workload timed_trace: name the trace with --trace")
        lines = read_prompts(trace)
        for place, row in lines:
            check_row(row, place)
        load = TimedTrace(sizes, [row for _, row in lines])
        if not load.part(0).rows:
            raise SettingError(f"--trace {trace}: no conversation in it is short enough")
        return load
    folder = asked.multi_turn
    if folder is None or not (folder / SCRIPT).is_file():
        raise SettingError(
            "--workload multi_turn: vLLM's multi-turn benchmark is in no package: name the folder "
            f"benchmarks/multi_turn of its sources, which has {SCRIPT}, with --multi-turn"
        )
    return MultiTurn(sizes, folder / SCRIPT)


@dataclass(frozen=True)
class _Field:
    """Where servers and clients meet."""

    options: Options
    sizes: Sizes
    python: str

    def play(self, name: str, loads: Sequence[ClientLoad], repeat: int) -> dict[str, Played]:
        """All loads against one server, from its start to its end.

        Raises:
            ServerError: the server did not start, or a client failed.
            NothingAnsweredError: a client has seen no answer.
        """
        tokens = self.sizes.max_tokens
        pool_bytes = TINY_POOL_BYTES if self.options.quick else POOL_BYTES
        with Bed(quick=True, max_tokens=tokens, pool_bytes=pool_bytes) as bed:
            model = self._model(bed)
            is_cpu = vllm_command.is_cpu_build()
            site = Site(model, free_port(), tokens, self.sizes.kv_blocks, pool_bytes, is_cpu)
            log = bed.folder / f"{repeat}-{name}.log"
            try:
                command = self._command(name, site, bed)
                server = Server(command, environment(site), site.port, log)
                try:
                    if name == RAYKV:
                        bed.wait_for_pools()
                    wait_until_calm()
                    return {load.name: self._run(load, server, site, bed, repeat) for load in loads}
                finally:
                    server.stop()
            finally:
                self._keep(bed.folder)
                # LMCache's server leaves it if it is killed.
                (SHARED_MEMORY / site.shared_memory).unlink(missing_ok=True)

    def _model(self, bed: Bed) -> str:
        """vLLM's argument for the model that the user names, or for the usual one."""
        named = self.options.client.model
        if self.options.quick and named in (None, SMALL_MODEL):
            return str(talking_tiny_model(bed.folder / "talking"))
        return find_model(named or SMALL_MODEL).path

    def _command(self, name: str, site: Site, bed: Bed) -> list[str]:
        if name == NATIVE:
            return site.native()
        if name == LMCACHE:
            return site.lmcache(self.python, (free_port(), free_port()))
        return site.raykv(bed.cluster.address) if name == RAYKV else site.alone()

    def _run(self, load: ClientLoad, server: Server, site: Site, bed: Bed, repeat: int) -> Played:
        results = bed.folder / "results"
        results.mkdir(exist_ok=True)
        # Clients with equal seeds would draw equal tokens.
        seed = repeat * len(WORKLOADS) + WORKLOADS.index(load.name)
        most_found = load.prepare(bed.folder, seed)
        ModelServer(site.port, SERVED).complete(WARM_UP, 8)
        found, spent = server.tokens_found(), cpu_times()
        run_client(
            load.command(Target(site.port, site.model), bed.folder, results, seed),
            # Of what the client draws a trace's tokens with.
            {**environment(site), "PYTHONHASHSEED": f"{seed + 1}"},
            log_of(load.name, results),
            load.seconds * LAG + CLIENT_S,
        )
        cpu_s = cpu_seconds(spent, cpu_times())
        return Played(load.figures(results), server.tokens_found() - found, cpu_s, most_found)

    def _keep(self, folder: Path) -> None:
        """Copy what servers and clients have written to where the user wants it."""
        kept = self.options.client.logs
        if kept is None:
            return
        kept.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob("*.log"), *folder.glob("results/*")):
            shutil.copy(file, kept / file.name)


def environment(site: Site) -> dict[str, str]:
    """Of servers and clients. On a CPU all servers compute with the same cores, and leave one to
    the rest: by itself, vLLM leaves one more with any connector than without.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if Path(site.model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if site.is_cpu:
        cores = sorted(os.sched_getaffinity(0))
        binding = ",".join(map(str, cores[:-1] or cores))
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)
    return variables
