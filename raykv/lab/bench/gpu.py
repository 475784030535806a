"""`gpu`: RayKV on a GPU, compared with vLLM's native offloading and vLLM alone in one run.

The engines have the shape of Llama 8B in bfloat16, with random weights: the duration of a step does
not depend on them. Everything else is vLLM's default: CUDA graphs, asynchronous scheduling, the
model runner. Engines run one after the other, and all get the same prompts:

1. time to the first token of prompts that are cached, by their length;
2. requests that share nothing, with long prompts and with long answers, while all KV is stored;
3. repeated questions about documents that are larger together than the engine's KV memory.

The rows so far are kept at the end of each part. `--quick` uses a tiny model, also on a CPU, but
without the native offloading, which needs a GPU.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from raykv.base.errors import SettingError
from raykv.base.extras import require
from raykv.lab.bench.engine import (
    EngineError,
    EngineProcess,
    own_cluster,
    settle,
    wait_for_pools,
)
from raykv.lab.bench.prompts import prompt
from raykv.lab.bench.report import Options, Result, Verdict
from raykv.lab.demo.tiny_llama import tiny_llama

PLAIN, NATIVE = "vLLM alone", "vLLM's native offloading"
RAYKV, BY_LAYER = "RayKV", "RayKV, layerwise_loads"
SYSTEMS = {"raykv": RAYKV, "native": NATIVE, "plain": PLAIN, "layerwise": BY_LAYER}
"""By the names of `--system`, in the order in which they are measured."""

RECOMPUTE, PREFIX_HIT = "computed", "vLLM's own prefix hit"
START = "engine's start"
PREFILL, DECODE = "nothing is reused, long prompts", "nothing is reused, long answers"
REUSE = "documents are reused"
MOST_OF_NATIVE, LEAST_OF_NATIVE, LEAST_OF_PLAIN = 1.0, 1.0, 0.98

BLOCK = 128
"""Tokens; a multiple of vLLM's own blocks."""

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
"""Per prompt: loads are shorter than computations, and vary more."""

STORE_STEPS, PAUSE_S = 3, 0.15
"""vLLM begins stores in the engine's next step, and sees that they ended in a later one. A short
request makes each step, after a pause."""

SHORT = 15
"""Tokens of such a request: less than a block."""

WARM_S = 60.0
ERRORS = re.compile(r"\b\w*(?:Error|Exception): .+")
MOST_ERRORS, ERROR_CHARACTERS = 2, 300

# Of the seeds of prompts, so that no two parts begin alike.
STEPS, WARM, UNSHARED, DOCUMENTS, QUESTIONS = (n * 10**9 for n in range(1, 6))


@dataclass(frozen=True)
class Requests:
    """A batch of requests."""

    num_requests: int
    prompt_tokens: int
    answer_tokens: int

    def prompts(self, seeds: Iterator[int]) -> list[list[int]]:
        """Draw prompts with the next seeds."""
        return [prompt(next(seeds), self.prompt_tokens) for _ in range(self.num_requests)]


@dataclass(frozen=True)
class Amounts:
    """Sizes of the measurements."""

    lengths: tuple[int, ...]
    pool_bytes: int
    prefill: Requests
    decode: Requests
    documents: Requests

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest context."""
        return max(*self.lengths, self.documents.prompt_tokens) + 2 * BLOCK


FULL = Amounts(
    (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    pool_bytes=24 << 30,
    prefill=Requests(32, 2048, 8),
    decode=Requests(64, 512, 256),
    documents=Requests(16, 8192, 16),
)
QUICK = Amounts(
    (2 * BLOCK,),
    pool_bytes=256 << 20,
    prefill=Requests(3, 2 * BLOCK, 4),
    decode=Requests(3, BLOCK, 16),
    documents=Requests(3, 2 * BLOCK, 4),
)


def run(options: Options) -> Result:
    """See the module's docstring.

    Raises:
        SettingError: there is no GPU that torch could use, no vLLM, or no such system.
    """
    is_on_gpu = has_torch_for_cuda()
    if not is_on_gpu and not options.quick:
        raise SettingError("torch sees no GPU here; `raykv bench gpu --quick` tries it on a CPU")
    require("raykv bench gpu", "vllm")
    asked = options.systems_of("gpu", SYSTEMS)
    if not is_on_gpu and not options.systems:
        asked.remove("native")
    result = Result("gpu")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-bench-")))
        starts = Starts(stack, folder, QUICK if options.quick else FULL, is_on_gpu)
        measuring = Measuring(options, starts.amounts, result)
        for name in asked:
            settle_stores = partial(settle, starts.cluster)
            measuring.subject(SYSTEMS[name], partial(starts.start, name), settle_stores)
            options.keep_logs(folder)
    return result


def has_torch_for_cuda() -> bool:
    """Whether torch is installed and can use a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def card_name() -> str:
    """The name of the GPU that torch would use; empty if there is none."""
    if not has_torch_for_cuda():
        return ""
    import torch

    return str(torch.cuda.get_device_name())


class Starts:
    """Starts engines in a Ray cluster of their own."""

    def __init__(self, stack: ExitStack, folder: Path, amounts: Amounts, is_on_gpu: bool) -> None:
        self._folder = folder
        self.amounts = amounts
        self._is_on_gpu = is_on_gpu
        self._config: dict[str, Any] = {
            "multiprocess": True,
            "max_model_len": amounts.max_tokens,
            "block_size": BLOCK,
            **(ON_GPU if amounts is FULL else {}),
        }
        self._model = tiny_llama(folder / "model", max_position=amounts.max_tokens + BLOCK)
        self.cluster = stack.enter_context(own_cluster())

    def start(self, system: str) -> EngineProcess:
        """Start an engine; with RayKV, wait for its pool, which is page-locked on a GPU."""
        raykv, config = None, dict(self._config)
        if system == "native":
            config["connector"] = {
                "kv_connector": "OffloadingConnector",
                "kv_connector_extra_config": {"cpu_bytes_to_use": self.amounts.pool_bytes},
            }
        elif system != "plain":
            raykv = {
                "ray_address": self.cluster.address,
                "pool_bytes": str(self.amounts.pool_bytes),
                "layerwise_loads": system == "layerwise",
                # By default stores cease where nothing is reused, and it is their cost that counts.
                "stop_unused_stores": False,
            }
        engine = EngineProcess(self._model, self._folder / f"engine-{system}.log", raykv, **config)
        if raykv is not None:
            wait_for_pools(self.cluster, "locked_bytes" if self._is_on_gpu else "prefaulted_bytes")
        return engine


def reason_of(error: EngineError) -> str:
    """Say why an engine failed: by the last errors in its log, or else by the log's end."""
    found = dict.fromkeys(match[0].strip() for match in ERRORS.finditer(str(error)))
    said = [each for each in found if "See root cause above" not in each]
    return " | ".join(said[-MOST_ERRORS:]) or str(error)[-ERROR_CHARACTERS:]


class Measuring:
    """Measures one subject after the other.

    Args:
        options: the user's; `keep` is called at the end of each part.
        amounts: sizes.
        result: gets all rows, notes and verdicts.
    """

    def __init__(self, options: Options, amounts: Amounts, result: Result) -> None:
        self._options = options
        self._amounts = amounts
        self._result = result
        self._num_steps = 0

    def subject(
        self, name: str, start: Callable[[], EngineProcess], settle: Callable[[], None]
    ) -> None:
        """Start an engine, measure it and end it; note a failure."""
        doing = "start"
        try:
            with ExitStack() as stack:
                engine = start()
                stack.callback(engine.stop)
                known = partial(self._known, engine, settle if name in (RAYKV, BY_LAYER) else None)
                self._begin(name, engine)
                for part, measure in self._parts(name):
                    doing = part
                    measure(name, engine, known)
                    self._end_part()
        except EngineError as error:
            self._note(f"{name}, {doing}: failed: {reason_of(error)}")
        self._end_part()

    def _parts(self, name: str) -> Iterator[tuple[str, Callable[..., None]]]:
        yield "time to first token", self._first_tokens
        if name != BY_LAYER:
            yield "nothing is reused", self._unshared
            yield "documents", self._documents

    def _end_part(self) -> None:
        self._result.verdicts = judged(self._result, self._amounts.lengths)
        self._options.keep(self._result)

    def _note(self, text: str) -> None:
        if text not in self._result.notes:
            self._result.notes.append(text)

    def _begin(self, name: str, engine: EngineProcess) -> None:
        """Note the engine's configuration, and wait until it loads a prompt.

        RayKV stores nothing before it has identified the weights.
        """
        self._result.add(START, name, "s", engine.start_s)
        settings = engine.call("running")
        self._note(f"{name}: {', '.join(f'{key}={value}' for key, value in settings.items())}.")
        give_up_at = time.monotonic() + WARM_S
        for seed in count(WARM):
            tokens = prompt(seed, 2 * BLOCK)
            engine.first_token(tokens)
            self._known(engine, None)
            if name != PLAIN:
                engine.reset()
            if engine.first_token(tokens).cached >= BLOCK:
                break
            if time.monotonic() > give_up_at:
                self._note(f"{name}: loads nothing {WARM_S:.0f} s after its start.")
                break
        engine.reset()

    def _known(self, engine: EngineProcess, settle: Callable[[], None] | None) -> None:
        """Let the connector store everything that was computed so far."""
        for _ in range(STORE_STEPS):
            time.sleep(PAUSE_S)
            self._num_steps += 1
            engine.tokens([prompt(STEPS + self._num_steps, SHORT)], max_tokens=1)
        if settle is not None:
            settle()

    def _check(self, what: str, cached: float, least: int) -> None:
        """Note it if fewer tokens came out of a cache than should have."""
        if cached < least:
            self._note(f"{what}: only {cached:.0f} tokens came out of a cache.")

    # Parts

    def _first_tokens(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        cold = RECOMPUTE if name == PLAIN else first_time(name)
        warm = PREFIX_HIT if name == PLAIN else name
        for length in self._amounts.lengths:
            case = length_case(length)
            for number in range(self._options.repeats_or(2)):
                tokens = prompt(1000 * length + number, length)
                self._result.add(case, cold, "s", engine.first_token(tokens).seconds)
                if name != PLAIN:
                    known()
                for _ in range(LOADS):
                    if name != PLAIN:
                        engine.reset()
                    found = engine.first_token(tokens)
                    self._result.add(case, warm, "s", found.seconds)
                    self._check(f"{warm}, {case}", found.cached, length - BLOCK)
                engine.reset()
            self._end_part()

    def _unshared(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        seeds = count(UNSHARED)
        for number in range(1 + self._options.repeats_or(4)):
            for case, load in ((PREFILL, self._amounts.prefill), (DECODE, self._amounts.decode)):
                prompts = load.prompts(seeds)
                found = engine.call("timed", batches=[prompts], max_tokens=load.answer_tokens)
                unit, amount = "requests/s", load.num_requests
                if case == DECODE:
                    unit, amount = "output tokens/s", amount * load.answer_tokens
                if number:
                    self._result.add(case, name, unit, amount / found["seconds"])
        known()

    def _documents(self, name: str, engine: EngineProcess, known: Callable[[], None]) -> None:
        load = self._amounts.documents
        documents = load.prompts(count(DOCUMENTS))
        engine.call("timed", batches=[[document] for document in documents])
        known()
        for number in range(self._options.repeats_or(3)):
            engine.reset()
            seeds = count(QUESTIONS + number * load.num_requests)
            prompts = [document + prompt(next(seeds), SHORT) for document in documents]
            found = engine.call("timed", batches=[prompts], max_tokens=load.answer_tokens)
            self._result.add(REUSE, name, "requests/s", load.num_requests / found["seconds"])
            if name != PLAIN:
                least = load.num_requests * (load.prompt_tokens - BLOCK)
                self._check(f"{name}, {REUSE}", found["cached"], least)
            known()


def length_case(length: int) -> str:
    """The case of a prompt of this many tokens."""
    return f"{length:,} tokens"


def first_time(subject: str) -> str:
    """The subject of a prompt that is in no cache, in an engine with a connector."""
    return f"{subject}, first time (stores)"


def judged(result: Result, lengths: tuple[int, ...]) -> list[Verdict]:
    """Judge the measurements so far; some engines may not have started."""
    rows = {(row.case, row.subject): row for row in result.rows}
    verdicts = []

    def judge(case: str, subject: str, other: str, limit: float, *, is_most: bool) -> None:
        ours, theirs = rows.get((case, subject)), rows.get((case, other))
        if ours and theirs and len(ours.values) == len(theirs.values):
            word = "most" if is_most else "least"
            budget = f"{case}: {subject}: at {word} {limit:g} x the {ours.unit} of {other}"
            verdicts.append(Verdict(budget, ours.ratio_to(theirs), limit, is_most))

    for subject in (RAYKV, BY_LAYER):
        for length in lengths:
            judge(length_case(length), subject, NATIVE, MOST_OF_NATIVE, is_most=True)
    for case in (PREFILL, DECODE):
        judge(case, RAYKV, PLAIN, LEAST_OF_PLAIN, is_most=False)
    judge(REUSE, RAYKV, NATIVE, LEAST_OF_NATIVE, is_most=False)
    return verdicts
