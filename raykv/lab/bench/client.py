"""`client`: vLLM's own client with vLLM alone, with its native offloading, and with RayKV.

`vllm bench sweep serve` starts the servers one after the other and plays `vllm bench serve` against
each: prefixes that come again, larger together than the servers' KV memory (`prefix_repetition`),
prompts of which no two are alike (`random`), and with `--trace` a trace in its own rhythm
(`timed_trace`). Each repeat has prompts of its own, the same for all servers. On vLLM's CPU build
lengths and KV memory are a fraction of those on a GPU, and there is no native offloading. A trace
is played in whole conversations; those with too long a request are left out.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from raykv.base.errors import ClusterError, SettingError
from raykv.base.extras import require
from raykv.inspect.trace_files import read_timed_prompts
from raykv.lab.bench.engine import all_cores_but_one, own_cluster
from raykv.lab.bench.report import Options, Result
from raykv.serve.models import SMALL_MODEL, find_model
from raykv.vllm import command as vllm_command

SUBJECTS = {"plain": "vLLM alone", "native": "native offloading", "raykv": "RayKV"}
"""By the names of `--system`."""

PREFIX_REPETITION, RANDOM, TIMED_TRACE, WARM_UP = (
    "prefix_repetition",
    "random",
    "timed_trace",
    "warm-up",
)
REUSED = (PREFIX_REPETITION, TIMED_TRACE)

MEAN, MEDIAN, P99, GAP = "TTFT mean, ms", "median, ms", "p99, ms", "between tokens, ms"
COLUMNS = {
    MEAN: "mean_ttft_ms",
    MEDIAN: "median_ttft_ms",
    P99: "p99_ttft_ms",
    GAP: "mean_itl_ms",
    "output tokens/s": "output_throughput",
    "failed": "failed",
}
"""By unit, what vLLM's client calls it."""

MOST_OF_PLAIN, MOST_OF_NATIVE = 1.02, 1.0
BLOCK = 128
SERVED = "model"

START_S, RUN_S, LAG = 300.0, 180.0, 10.0
"""Deadlines of a server's start, and of a client: this long beyond ten times its load's duration,
since slow servers lag behind."""

TRACED_TOKENS = 512
"""Of a chunk in the published traces."""

COMMON = 0.1
"""A chunk that more than this share of the requests begin with belongs to no conversation."""

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a load and of the servers' KV memory.

    `divisor` divides lengths and memory; `rate` is in requests per second.
    """

    divisor: int
    kv_blocks: int
    num_requests: int
    rate: float

    @property
    def lengths(self) -> tuple[int, int, int]:
        """Tokens of a prefix, of the rest of a prompt, and of an answer."""
        return 12_288 // self.divisor, 2048 // self.divisor, 512 // self.divisor

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest request, with its answer."""
        return 131_072 // self.divisor

    @property
    def pool_bytes(self) -> int:
        """RAM for offloaded KV."""
        return (64 << 30) // self.divisor


ON_GPU = Sizes(1, 1536, 40, 4.0)
ON_CPU = Sizes(32, 48, 40, 0.5)
QUICK = Sizes(64, 18, 8, 8.0)


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: an option is invalid; nothing was started.
        ClusterError: a server did not start, or a client failed.
    """
    require("raykv bench client", "vllm", "pandas")
    is_cpu = vllm_command.is_cpu_build()
    systems = systems_here(options, is_cpu=is_cpu)
    sizes = QUICK if options.quick else ON_CPU if is_cpu else ON_GPU
    traced = [] if options.trace is None else played(options.trace, sizes, options.repeats_or(3))
    model = find_model(options.model or SMALL_MODEL).path
    repeats = options.repeats_or(3)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-bench-")))
        plays = loads(folder, sizes, repeats, traced)
        # Before the sweep, which kills all that its servers have started.
        cluster = stack.enter_context(own_cluster())
        cluster.up(pool_bytes=sizes.pool_bytes)
        servers = {name: server(name, cluster.address, sizes) for name in systems}
        command = sweep(folder, model, sizes, servers, plays, is_cpu=is_cpu)
        # A conversation is played whole, however many requests it has.
        most = max([ON_CPU.num_requests, *map(len, traced)])
        deadline_s = len(servers) * (START_S + len(plays) * (RUN_S + LAG * 2 * most / sizes.rate))
        variables = environment(model, is_cpu=is_cpu)
        run_sweep(command, variables, folder / "sweep.log", deadline_s, options)
        return summed(folder, systems, list(dict.fromkeys(_load(name) for name in plays)), repeats)


def systems_here(options: Options, *, is_cpu: bool) -> list[str]:
    """The systems that the user names; all that can run here if there are none.

    Raises:
        SettingError: there is no such system.
    """
    if is_cpu and "native" in options.systems:
        raise SettingError("--system native: vLLM's native offloading needs a GPU")
    systems = options.systems_of("client", SUBJECTS)
    return [name for name in systems if not (is_cpu and name == "native")]


def server(name: str, address: str, sizes: Sizes) -> dict[str, Any]:
    """Return the flags of `vllm serve` for a system."""
    if name == "native":
        gib = sizes.pool_bytes / (1 << 30)
        return {"kv-offloading-backend": "native", "kv-offloading-size": gib}
    if name == "raykv":
        settings = {"ray_address": address, "pool_bytes": sizes.pool_bytes}
        connector = {"kv_connector": "RayKVConnector", "kv_role": "kv_both"}
        return {"kv-transfer-config": {**connector, "kv_connector_extra_config": settings}}
    return {}


def played(trace: str, sizes: Sizes, repeats: int) -> list[Rows]:
    """Choose the requests of a trace that each repeat plays.

    Raises:
        SettingError: it can't be read, or has only requests that are too long.
    """
    rows = read_timed_prompts(trace)
    # As long as they may be before they are divided.
    most_tokens = sizes.max_tokens * sizes.divisor
    parts: list[Rows] = [
        scaled(
            whole_conversations(rows, sizes.num_requests, most_tokens, repeat),
            sizes.divisor,
            sizes.rate,
            repeat,
        )
        for repeat in range(repeats)
    ]
    if not all(parts):
        raise SettingError(
            f"--trace {trace}: no conversation in it has only requests of at most "
            f"{most_tokens:,} tokens"
        )
    return parts


def whole_conversations(
    rows: Rows, num_requests: int, most_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Draw conversations until they have `num_requests`; return their requests in order of time.

    Conversations with a request of more than `most_tokens` are left out.
    """
    counts = Counter(row["hash_ids"][0] for row in rows if row["hash_ids"])
    common = {name for name, count in counts.items() if count > COMMON * len(rows)}
    conversations: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        own = (name for name in row["hash_ids"] if name not in common)
        conversations.setdefault(next(own, ("alone", number)), []).append(row)
    fitting = [
        some
        for some in conversations.values()
        if all(row["input_length"] + row["output_length"] <= most_tokens for row in some)
    ]
    Random(seed).shuffle(fitting)
    picked: list[dict[str, Any]] = []
    for some in fitting:
        if len(picked) >= num_requests:
            break
        picked += some
    return sorted(picked, key=lambda row: row["timestamp"])


def scaled(rows: Rows, divisor: int, rate: float, repeat: int) -> list[dict[str, Any]]:
    """Divide the lengths of requests, stretch their times to a rate, and rename their chunks.

    Times are in seconds from 0. No other repeat has the same chunks.
    """
    times = [row["timestamp"] for row in rows]
    first = min(times, default=0)
    seconds = len(rows) / rate / max(max(times, default=0) - first, 1)
    return [
        {
            "timestamp": (row["timestamp"] - first) * seconds,
            "input_length": max(1, row["input_length"] // divisor),
            "output_length": max(1, row["output_length"] // divisor),
            "hash_ids": [f"{repeat}-{name}" for name in row["hash_ids"]],
        }
        for row in rows
    ]


def loads(
    folder: Path, sizes: Sizes, repeats: int, traced: Sequence[Rows]
) -> dict[str, dict[str, Any]]:
    """Return the flags of `vllm bench serve` by load and repeat, each with its own seed.

    Writes `traced` to the folder.
    """
    prefix, suffix, answer = sizes.lengths
    num_prefixes = -(-3 * sizes.kv_blocks * BLOCK // (2 * prefix))
    rate = {"request-rate": sizes.rate, "ignore-eos": True}
    kinds: dict[str, dict[str, Any]] = {
        PREFIX_REPETITION: {
            "num-prompts": max(2, sizes.num_requests // num_prefixes) * num_prefixes,
            "prefix-repetition-prefix-len": prefix,
            "prefix-repetition-suffix-len": suffix,
            "prefix-repetition-num-prefixes": num_prefixes,
            "prefix-repetition-output-len": answer,
            **rate,
        },
        RANDOM: {
            "num-prompts": sizes.num_requests,
            "random-input-len": prefix + suffix,
            "random-output-len": answer,
            **rate,
        },
    }
    if traced:
        kinds[TIMED_TRACE] = {
            "timed-trace-chunk-hash-size": TRACED_TOKENS // sizes.divisor,
            "timed-trace-sec-multiplier": 1,
        }
    made = {f"{WARM_UP}-0": {"dataset-name": RANDOM, "seed": 0, **kinds[RANDOM], "num-prompts": 4}}
    for repeat in range(repeats):
        for number, (name, flags) in enumerate(kinds.items()):
            seed = 1 + repeat * len(kinds) + number
            made[f"{name}-{repeat}"] = {"dataset-name": name, "seed": seed, **flags}
    for repeat, rows in enumerate(traced):
        path = folder / f"trace-{repeat}.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        of_trace = {"num-prompts": len(rows), "dataset-path": str(path)}
        made[f"{TIMED_TRACE}-{repeat}"].update(of_trace)
    return made


def _load(name: str) -> str:
    return name.rpartition("-")[0]


def sweep(
    folder: Path,
    model: str,
    sizes: Sizes,
    servers: Mapping[str, Any],
    plays: Mapping[str, Any],
    *,
    is_cpu: bool,
) -> list[str]:
    """Return the command, whose results go to the folder `runs`."""
    for name, parameters in (("servers", servers), ("loads", plays)):
        (folder / f"{name}.json").write_text(json.dumps(parameters))
    vllm = (sys.executable, "-P", "-m", vllm_command.__name__)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serve = [
        *(*vllm, "serve", model, "--host", "127.0.0.1", "--port", f"{port}"),
        *("--served-model-name", SERVED, "--max-model-len", f"{sizes.max_tokens}"),
        *("--block-size", f"{BLOCK}", "--num-gpu-blocks-override", f"{sizes.kv_blocks}"),
        *("--generation-config", "vllm"),
        *(("--dtype", "float32", "--enforce-eager") if is_cpu else ()),
    ]
    bench = [
        *(*vllm, "bench", "serve", "--backend", "vllm", "--host", "127.0.0.1"),
        *("--port", f"{port}", "--model", SERVED, "--tokenizer", model, "--temperature", "0"),
        *("--metric-percentiles", "99", "--save-detailed", "--disable-tqdm"),
    ]
    return [
        *(*vllm, "bench", "sweep", "serve", "--num-runs", "1", "--show-stdout"),
        # What a load has left in the caches is not that of the next one, whose prompts are others.
        *("--serve-cmd", shlex.join(serve), "--bench-cmd", shlex.join(bench)),
        *("--after-bench-cmd", "true", "--server-ready-timeout", f"{START_S:.0f}"),
        *("--serve-params", str(folder / "servers.json")),
        *("--bench-params", str(folder / "loads.json")),
        *("--output-dir", str(folder), "--experiment-name", "runs"),
    ]


def environment(model: str, *, is_cpu: bool) -> dict[str, str]:
    """Return the environment of servers and clients.

    On a CPU all servers use the same cores and leave one free: by default vLLM leaves one more
    with a connector than without.
    """
    variables = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        # vLLM's client draws a trace's tokens with hashes of strings.
        "PYTHONHASHSEED": "1",
    }
    if Path(model).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if is_cpu:
        variables.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", all_cores_but_one())
    return variables


def run_sweep(
    command: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    deadline_s: float,
    options: Options,
) -> None:
    """Run it to its end, and keep its log if the user wants it.

    Raises:
        ClusterError: it failed, or took too long.
    """
    try:
        with log.open("wb") as output:
            subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(variables),
                timeout=deadline_s,
                check=True,
            )
    except subprocess.SubprocessError as error:
        said = log.read_text(errors="replace")[-3000:]
        raise ClusterError(
            f"vLLM's sweep has failed ({error}); its log ends with:\n{said}"
        ) from None
    finally:
        options.keep_logs(log.parent)


def summed(folder: Path, systems: Sequence[str], names: Sequence[str], repeats: int) -> Result:
    """Read the sweep's files, and judge."""
    result = Result("client", is_wide=True)
    for load in [name for name in names if name != WARM_UP]:
        told = {
            system: [
                json.loads((folder / "runs" / place / "run=0.json").read_text())
                for repeat in range(repeats)
                for place in [f"SERVE--{system}-BENCH--{load}-{repeat}"]
            ]
            for system in systems
        }
        for system, runs in told.items():
            for unit, field in COLUMNS.items():
                result.add(load, SUBJECTS[system], unit, *(float(run[field]) for run in runs))
        if "raykv" in told:
            _judge(result, load, told)
    return result


def _judge(result: Result, load: str, told: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Compare RayKV with the other systems that were measured."""
    ours = SUBJECTS["raykv"]
    bars = [("plain", unit, MOST_OF_PLAIN) for unit in (MEAN, MEDIAN, GAP)]
    if load in REUSED:
        bars += [("native", unit, MOST_OF_NATIVE) for unit in (MEAN, MEDIAN)]
    for system, unit, limit in bars:
        if system in told:
            other = SUBJECTS[system]
            budget = f"{load}: {unit}, at most {limit:g} x {other}"
            result.at_most(limit, result.ratio(load, ours, other, unit), budget)
    failed = sum(result.row(load, ours, "failed").values)
    result.at_most(0.0, failed, f"{load}: no request fails")
    if "plain" in told:
        pairs = zip(told["raykv"], told["plain"], strict=True)
        different = sum(
            mine != theirs
            for one, other in pairs
            for mine, theirs in zip(one["generated_texts"], other["generated_texts"], strict=True)
        )
        budget = f"{load}: texts that differ from those of {SUBJECTS['plain']}"
        result.at_most(0.0, float(different), budget)
