"""`gpu`: RayKV on a GPU beside vLLM's native offloading and vLLM alone, all in one run.

Engines of the shape of Llama 8B in bfloat16, with random weights: how long a step takes does not
depend on them. All else is vLLM's default: CUDA graphs, asynchronous scheduling, its choice of
model runner. One engine is there at a time, and each is started once. All get the same prompts:

1. time to the first token of prompts that are known, by their length;
2. requests that share nothing, with long prompts and with long answers, while all of it is stored;
3. documents, larger together than the engine's KV memory, that are asked about again;
4. the time per output token with nothing beside, and while known prompts, or new ones, arrive at
   a steady pace; with the percentiles of the time from token to token.

What there is, is kept at the end of each part. `--quick` tries all of it with a tiny model, also on
a CPU, where `raykv.lab.bench.in_process` stands in for the native offloading, which needs a GPU.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import quantiles
from typing import Any

from raykv.base.errors import SettingError
from raykv.lab.bench.busy import BusyGPU, nvidia_smi
from raykv.lab.bench.copy_cuda import has_torch_for_cuda
from raykv.lab.bench.engine import EngineError, EngineProcess
from raykv.lab.bench.gpu_report import (
    ALONE,
    BESIDE,
    BY_LAYER,
    DECODE,
    NATIVE,
    NEW,
    P50,
    P99,
    PER_TOKEN,
    PLAIN,
    PREFILL,
    RAYKV,
    REUSE,
    START,
    busy_case,
    first_time,
    gap_case,
    judge,
    length_case,
    remarks,
)
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row
from raykv.lab.bench.serving import BLOCK, PREFIX_HIT, RECOMPUTE, Bed, in_process_connector

SYSTEMS = {"raykv": RAYKV, "native": NATIVE, "plain": PLAIN, "layerwise": BY_LAYER}
"""By the names of `--system`, in the order in which they are measured."""

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
ON_GPU: dict[str, Any] = {
    "dtype": "bfloat16",
    "load_format": "dummy",
    "hf_overrides": LLAMA_8B,
    "enforce_eager": False,
    # vLLM's own choice.
    "block_size": None,
    # 82,000 tokens: the longest prompt, and less than all documents.
    "kv_cache_memory_bytes": 10 << 30,
    # Only how much must be free at the start.
    "gpu_memory_utilization": 0.5,
    "start_deadline_s": 420.0,
}
LOADS = 4
"""Of each prompt: what is loaded takes less time, and varies more, than what is computed."""

STORE_STEPS = 3
"""vLLM begins stores with the engine's next step, and hears of their end in a later one. A short
request makes each."""

SHORT = 15
"""Tokens of such a request: less than a block."""

LOCK_DEADLINE_S, LOCK_POLL_S = 60.0, 0.1
SHARED = "/dev/shm"
"""Where vLLM's native offloading has its pool."""

ERRORS = re.compile(r"\b\w*(?:Error|Exception): .+")
MOST_ERRORS = 2
TOLD_OF_ERROR = 300
"""Characters, from its end."""

# Of the seeds of prompts, so that none of two parts begin alike.
STEPS, WARM, UNSHARED, DOCUMENTS, QUESTIONS, DECODES = (n * 10**9 for n in range(1, 7))


@dataclass(frozen=True)
class Requests:
    """Requests that are made together."""

    num_requests: int
    prompt_tokens: int
    answer_tokens: int

    def prompts(self, seeds: Iterator[int]) -> list[list[int]]:
        """Prompts, made of the next seeds."""
        return [prompt(next(seeds), self.prompt_tokens) for _ in range(self.num_requests)]


@dataclass(frozen=True)
class Amounts:
    """How much is measured. `num_beside` documents arrive, one each `pace_s`, beside `decodes`;
    `new_beside` likewise. Before each of the requests that follow a store there is a pause.
    """

    lengths: tuple[int, ...]
    pool_bytes: int
    prefill: Requests
    decode: Requests
    documents: Requests
    num_beside: int
    pace_s: float
    decodes: Requests
    new_beside: Requests
    pause_s: float = 0.15
    warm_deadline_s: float = 60.0

    @property
    def max_tokens(self) -> int:
        """The longest context."""
        return max(*self.lengths, self.documents.prompt_tokens) + 2 * BLOCK


FULL = Amounts(
    lengths=(1024, 2048, 4096, 8192, 16384, 32768, 65536),
    pool_bytes=24 << 30,
    prefill=Requests(32, 2048, 8),
    decode=Requests(64, 512, 256),
    documents=Requests(16, 8192, 16),
    num_beside=6,
    pace_s=0.1,
    decodes=Requests(8, 512, 128),
    new_beside=Requests(8, 2048, 1),
)
QUICK = Amounts(
    lengths=(2 * BLOCK,),
    pool_bytes=256 << 20,
    prefill=Requests(3, 2 * BLOCK, 4),
    decode=Requests(3, BLOCK, 16),
    documents=Requests(3, 2 * BLOCK, 4),
    num_beside=2,
    pace_s=0.01,
    decodes=Requests(2, BLOCK, 32),
    new_beside=Requests(2, 2 * BLOCK, 1),
)


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: there is no GPU that torch could use, or no such system.
    """
    is_on_gpu = has_torch_for_cuda()
    if not is_on_gpu and not options.quick:
        raise SettingError(
            "gpu can't be measured here: torch sees no GPU; --quick tries it on a CPU"
        )
    unknown = set(options.client.systems) - set(SYSTEMS)
    if unknown:
        names = ", ".join(SYSTEMS)
        raise SettingError(f"--system {', '.join(sorted(unknown))}: `gpu` has {names}")
    amounts = QUICK if options.quick else FULL
    result = Result("gpu", BENCHMARKS["gpu"].summary)
    with (
        Bed(quick=True, max_tokens=amounts.max_tokens, pool_bytes=amounts.pool_bytes) as bed,
        closing(BusyGPU(nvidia_smi())) as busy,
    ):
        bed.start_cluster()
        measuring = Measuring(options, amounts, result, busy)
        starts = Starts(bed, {} if options.quick else ON_GPU, is_on_gpu, measuring.notes)
        for name, start in starts.all().items():
            if not options.client.systems or name in map(SYSTEMS.get, options.client.systems):
                measuring.subject(name, start, starts.settle)
                _keep_logs(bed.folder, options.client.logs)
    return result


def _keep_logs(folder: Path, to: Path | None) -> None:
    """Copy what engines have written, where the user wants it; they are numbered as they began."""
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        for log in folder.glob("*.log"):
            shutil.copy(log, to / f"engine-{log.name}")


class Starts:
    """Starts engines, of each subject one.

    Args:
        bed: what they run on.
        config: arguments of `vllm.LLM` of all of them.
        is_on_gpu: else another spec stands in for vLLM's native offloading.
        notes: get sentences about it.
    """

    def __init__(self, bed: Bed, config: dict[str, Any], is_on_gpu: bool, notes: list[str]) -> None:
        self._bed = bed
        self._config = {"multiprocess": True, **config}
        self._is_on_gpu = is_on_gpu
        self._notes = notes

    def all(self) -> dict[str, Callable[[], EngineProcess]]:
        """By subject, in the order in which they are measured."""
        return {
            RAYKV: partial(self._raykv, {}),
            NATIVE: self._native,
            PLAIN: partial(self._bed.plain, **self._config),
            BY_LAYER: partial(self._raykv, {"layerwise_loads": True}),
        }

    def settle(self) -> None:
        """Wait until RayKV's stores are known."""
        self._bed.settle()

    def _raykv(self, settings: dict[str, Any]) -> EngineProcess:
        # By default stores cease where nothing is reused, and it is their cost that is measured.
        settings = {"stop_unused_stores": False, **settings}
        engine = self._bed.raykv(settings=settings, **self._config)
        self._bed.wait_for_pools()
        if self._is_on_gpu:
            self._wait_for_locks()
        return engine

    def _native(self) -> EngineProcess:
        if self._is_on_gpu:
            num_bytes = min(self._bed.pool_bytes, int(0.9 * shutil.disk_usage(SHARED).free))
            if num_bytes < self._bed.pool_bytes:
                self._notes.append(
                    f"{NATIVE} has a pool of {num_bytes / 2**30:.1f} GiB, not of "
                    f"{self._bed.pool_bytes / 2**30:.1f}: {SHARED} has no more room."
                )
            connector = {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": num_bytes},
            }
        else:
            connector = in_process_connector(self._bed.pool_bytes)
            self._notes.append(
                f"In place of {NATIVE}, which can't run on a CPU, is raykv.lab.bench.in_process."
            )
        return self._bed.other(connector, **self._config)

    def _wait_for_locks(self) -> None:
        """Wait until the pool is page-locked, or a deadline: copies are slower before."""
        give_up_at = time.monotonic() + LOCK_DEADLINE_S
        while True:
            nodes = self._bed.cluster.status().nodes
            locked, size = (
                sum(getattr(node, name) for node in nodes)
                for name in ("locked_bytes", "pool_bytes")
            )
            if locked > 0.95 * size:
                return
            if time.monotonic() > give_up_at:
                self._notes.append(
                    f"Only {locked / 2**30:.1f} of the pool's {size / 2**30:.1f} GiB were "
                    "page-locked when RayKV was measured."
                )
                return
            time.sleep(LOCK_POLL_S)


def reason_of(error: EngineError) -> str:
    """Why an engine has failed: the last errors in what it wrote, or its very end."""
    found = dict.fromkeys(match[0].strip() for match in ERRORS.finditer(str(error)))
    said = [each for each in found if "See root cause above" not in each]
    return " | ".join(said[-MOST_ERRORS:]) or str(error)[-TOLD_OF_ERROR:]


class Measuring:
    """Measures one subject after the other.

    Args:
        options: of the user; `keep` is called at the end of each part.
        amounts: how much of it.
        result: gets all that is measured.
        busy: says how busy the GPU was.
    """

    def __init__(self, options: Options, amounts: Amounts, result: Result, busy: BusyGPU) -> None:
        self._options = options
        self._amounts = amounts
        self._result = result
        self._busy = busy
        self._values: dict[tuple[str, str, str], list[float]] = {}
        self._num_steps = 0
        self.notes: list[str] = []

    def subject(
        self, name: str, start: Callable[[], EngineProcess], settle: Callable[[], None]
    ) -> None:
        """Start an engine, measure it, end it. What fails is noted."""
        doing = "start"
        try:
            with ExitStack() as stack:
                engine = start()
                stack.callback(engine.stop)
                self._begin(name, engine)
                known = partial(self._known, engine, settle if name in (RAYKV, BY_LAYER) else None)
                for part, measure in self._parts(name):
                    doing = part
                    measure(name, engine, known)
                    self._end_part()
        except EngineError as error:
            self.notes.append(f"{name}, {doing}: failed: {reason_of(error)}")
        self._end_part()

    def _parts(self, name: str) -> Iterator[tuple[str, Callable[..., None]]]:
        yield "time to first token", self._first_tokens
        if name != BY_LAYER:
            yield "nothing is reused", self._unshared
            yield "documents", self._documents
            yield "time per output token", self._beside

    def _end_part(self) -> None:
        result, lengths = self._result, self._amounts.lengths
        by_case: dict[str, list[Row]] = {}
        for names, some in self._values.items():
            row = Row(*names, tuple(some))
            by_case.setdefault(row.case, []).append(row)
        result.rows = [row for rows in by_case.values() for row in rows]
        judge(result, lengths)
        result.notes = [*self.notes, *remarks(result, lengths)]
        if not self._busy.has_samples:
            result.notes.append("nvidia-smi says nothing here of how busy the GPU was.")
        self._options.keep(result)

    def _add(self, case: str, subject: str, unit: str, value: float) -> None:
        self._values.setdefault((case, subject, unit), []).append(value)

    def _begin(self, name: str, engine: EngineProcess) -> None:
        """Note how the engine is set, and wait until it finds a prompt again: one stores nothing
        before it is known what its weights are.
        """
        self._add(START, name, "s", engine.start_s)
        settings = engine.call("running")
        told = ", ".join(f"{key}={value}" for key, value in settings.items())
        self.notes.append(f"{name}: {told}.")
        give_up_at = time.monotonic() + self._amounts.warm_deadline_s
        for seed in count(WARM):
            tokens = prompt(seed, 2 * BLOCK)
            _one(engine, tokens)
            self._known(engine, None)
            if name != PLAIN:
                _reset(engine)
            if _one(engine, tokens)["cached"] >= BLOCK:
                break
            if time.monotonic() > give_up_at:
                after_s = self._amounts.warm_deadline_s
                self.notes.append(f"{name}: loads nothing {after_s:.0f} s after its start.")
                break
        _reset(engine)

    def _known(self, engine: EngineProcess, settle: Callable[[], None] | None) -> None:
        """Have the connector's stores end, of all that was computed so far."""
        for _ in range(STORE_STEPS):
            time.sleep(self._amounts.pause_s)
            self._num_steps += 1
            engine.tokens([prompt(STEPS + self._num_steps, SHORT)], max_tokens=1)
        if settle is not None:
            settle()

    # Parts

    def _first_tokens(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        cold = RECOMPUTE if name == PLAIN else first_time(name)
        warm = PREFIX_HIT if name == PLAIN else name
        for length in self._amounts.lengths:
            case = length_case(length)
            for number in range(self._options.repeats_or(2)):
                tokens = prompt(1000 * length + number, length)
                found = _one(engine, tokens)
                if found["cached"] < BLOCK:
                    self._add(case, cold, "s", found["ttft_s"])
                if name != PLAIN:
                    known()
                for _ in range(LOADS):
                    if name != PLAIN:
                        _reset(engine)
                    found = _one(engine, tokens)
                    self._add(case, warm, "s", found["ttft_s"])
                    self._check(f"{warm}, {case}", found["cached"], length - BLOCK)
                _reset(engine)
            self._end_part()

    def _check(self, what: str, cached: float, least: int) -> None:
        """Note it if less came out of a cache than should have."""
        text = f"{what}: only {cached:.0f} tokens came out of a cache."
        if cached < least and text not in self.notes:
            self.notes.append(text)

    def _unshared(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        seeds = count(UNSHARED)
        for number in range(1 + self._options.repeats_or(4)):
            for case, load in ((PREFILL, self._amounts.prefill), (DECODE, self._amounts.decode)):
                prompts = load.prompts(seeds)
                began = time.monotonic()
                found = engine.call("timed", batches=[prompts], max_tokens=load.answer_tokens)
                if not number:
                    continue
                if case == PREFILL:
                    self._add(case, name, "requests/s", load.num_requests / found["seconds"])
                else:
                    num_tokens = load.num_requests * load.answer_tokens
                    self._add(case, name, "output tokens/s", num_tokens / found["seconds"])
                    self._add(PER_TOKEN, name, "ms", found["seconds_per_token"] * 1e3)
                share = self._busy.between(began, time.monotonic())
                if share is not None:
                    self._add(busy_case(case), name, "%", share)
        known()

    def _documents(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        load = self._amounts.documents
        documents = self._all_documents()
        engine.call("timed", batches=[[document] for document in documents])
        known()
        for number in range(self._options.repeats_or(3)):
            _reset(engine)
            questions = QUESTIONS + number * load.num_requests
            prompts = [
                document + prompt(questions + place, SHORT)
                for place, document in enumerate(documents)
            ]
            found = engine.call("timed", batches=[prompts], max_tokens=load.answer_tokens)
            self._add(REUSE, name, "requests/s", load.num_requests / found["seconds"])
            if name != PLAIN:
                least = load.num_requests * (load.prompt_tokens - BLOCK)
                self._check(f"{name}, {REUSE}", found["cached"], least)
            known()

    def _all_documents(self) -> list[list[int]]:
        return self._amounts.documents.prompts(count(DOCUMENTS))

    def _beside(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        load, pace_s = self._amounts.decodes, self._amounts.pace_s
        some = self._all_documents()[: self._amounts.num_beside]
        seeds = count(DECODES)
        for number in range(1 + self._options.repeats_or(3)):
            _reset(engine)
            if name == PLAIN:
                # So that its own cache has them.
                engine.call("timed", batches=[[document] for document in some])
            new = self._amounts.new_beside.prompts(seeds)
            for case, arrivals in ((ALONE, []), (BESIDE, some), (NEW, new)):
                prompts = load.prompts(seeds)
                found = engine.call(
                    "decode_beside",
                    prompts=prompts,
                    max_tokens=load.answer_tokens,
                    arrivals=arrivals,
                    pace_s=pace_s,
                )
                if number:
                    self._add(case, name, "ms", found["seconds_per_token"] * 1e3)
                    for percentile, gap_s in percentiles(found["gaps_s"]).items():
                        self._add(gap_case(case, percentile), name, "ms", gap_s * 1e3)
                self._check_arrivals(f"{name}, {case}", found, len(arrivals))
                if case == BESIDE:
                    least = len(some) * (self._amounts.documents.prompt_tokens - BLOCK)
                    self._check(f"{name}, {case}", found["cached"], least)
            known()

    def _check_arrivals(self, what: str, found: dict[str, Any], num_wanted: int) -> None:
        if found["num_arrived"] < num_wanted:
            self.notes.append(
                f"{what}: only {found['num_arrived']:.0f} of {num_wanted} prompts arrived before "
                "the answers' ends."
            )


def percentiles(values: list[float]) -> dict[str, float]:
    """The median and the 99th percentile."""
    ranks = quantiles(values, n=100, method="inclusive")
    return {P50: ranks[49], P99: ranks[98]}


def _one(engine: EngineProcess, tokens: list[int]) -> dict[str, Any]:
    (output,) = engine.call("generate", prompts=[tokens], max_tokens=1)
    return {"ttft_s": float(output["ttft_s"]), "cached": output["cached"] or 0}


def _reset(engine: EngineProcess) -> None:
    if not engine.call("reset"):
        raise EngineError("vLLM did not drop its prefix cache: some of its blocks are still in use")
