"""Drive vLLM and Ray for `raykv demo`: a real model, long real documents, and what RayKV saves.

    run_demo ── asks ──► vLLM + RayKV ──► Ask records ──► Report ──► tables, JSON, exit code

Importing this module is light: vLLM and Ray are imported once the demo runs.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from raykv.demo.prompts import Prompt, Step, document_prompts, random_prompts, schedule
from raykv.demo.report import PHASE_TITLES, Ask, Phase, Report, TokenSources, show, show_ask
from raykv.errors import RayKVError, SettingError
from raykv.models import SMOLLM2_NAME, cache_root, smollm2, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from raykv.messages import ClusterStatus

_POLL_S = 0.05
_SETTLE_S = 0.4  # stores are over when the counts have stood still for so long
_HEARTBEAT_S = 1.2  # loads alone reach the counts with a NodeActor's next heartbeat
_STORE_TIMEOUT_S = 20.0
_RESET_TIMEOUT_S = 20.0
_SHUTDOWN_TIMEOUT_S = 15.0  # vLLM's own 5 s kill EngineCore while it waits 5 s for its workers


class EngineBusyError(RayKVError):
    """vLLM did not drop its prefix cache in time."""


class EngineStartError(RayKVError):
    """vLLM did not start; what it said is in the log file."""


class _Cluster(Protocol):
    def status(self) -> ClusterStatus: ...


@dataclass(frozen=True)
class _Setup:
    """What differs between the real model and the tiny one."""

    model: Path
    name: str
    caveat: str
    engine_options: dict[str, Any]
    sampling_options: dict[str, Any]
    make_prompts: Callable[[Any], list[Prompt]]


def run_demo(
    *,
    tiny: bool,
    json_path: Path | None,
    rounds: int = 3,
    ray_address: str | None,
    pool_bytes: str | None,
    console: Console | None,
) -> int:
    """Serve a model with RayKV, ask it questions in rounds, and print what that took.

    Starts a local Ray if there is none, and stops only what it started: a RayKV that ran in the
    cluster before keeps its actors, its pool and what the demo stored there. What the engine and
    Ray print goes to a log file that is named on the console.

    Args:
        tiny: A seeded random model and random prompts instead of the real ones; under a minute.
        json_path: Where the report is also written as JSON; its folder must exist.
        rounds: One that computes, and `rounds - 1` that load from RayKV.
        ray_address: The cluster to join; None finds or starts one.
        pool_bytes: RayKV's setting of that name; None is its default.
        console: Where to print; standard output when None.

    Returns:
        0, or 1 if any answer differed between the rounds.

    Raises:
        RayKVError: The settings, the model, the cluster or the engine are not fit for the demo.
    """
    if rounds < 2:
        raise SettingError(f"rounds={rounds}: RayKV loads from the second round on, so at least 2")
    if json_path and not json_path.parent.is_dir():
        raise SettingError(f"--json {json_path}: the folder {json_path.parent} does not exist")
    console = console or Console()
    _set_engine_environment()
    log = _log_path()
    with _child_output_in(log, console), ExitStack() as stack:
        console.print(f"The engine's and Ray's output is in {log}", style="dim", soft_wrap=True)
        with console.status("starting") as status:
            setup = (_tiny_setup if tiny else _real_setup)(stack, status.update)
            session = _start(stack, setup, ray_address, pool_bytes, status.update)
        report = session.run(rounds, console)
    console.print(show(report))
    if json_path:
        json_path.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    return report.exit_code


def _real_setup(stack: ExitStack, say: Callable[[str], None]) -> _Setup:
    del stack
    return _Setup(
        model=smollm2(progress=say),
        name=SMOLLM2_NAME,
        caveat="A model of 135 million parameters is often wrong about what it has read.",
        engine_options={"max_model_len": 8192},
        sampling_options={"max_tokens": 32},
        make_prompts=lambda llm: document_prompts(llm.get_tokenizer()),
    )


def _tiny_setup(stack: ExitStack, say: Callable[[str], None]) -> _Setup:
    del say
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-tiny-"))
    return _Setup(
        model=tiny_llama(Path(folder), vocab_size=512),
        name="random Llama, 4 layers",
        caveat="The weights are random: the answers are token ids and mean nothing.",
        engine_options={"max_model_len": 4096, "skip_tokenizer_init": True},
        sampling_options={"max_tokens": 16, "ignore_eos": True, "detokenize": False},
        make_prompts=lambda llm: random_prompts(512, seed=0),
    )


def _start(
    stack: ExitStack,
    setup: _Setup,
    ray_address: str | None,
    pool_bytes: str | None,
    say: Callable[[str], None],
) -> _Session:
    """Start cluster and engine; `stack` takes down in reverse order what was not there before."""
    from raykv.actors.cluster import ensure_cluster, find_scheduler_actor, stop_started
    from raykv.client import connect

    say("looking for a Ray cluster, or starting one")
    joined = ensure_cluster(ray_address)
    if joined.started:
        stack.callback(stop_started, joined.address)
    cluster = connect(joined.address)  # before the engine: it tells sooner what is wrong
    stack.callback(cluster.close)
    if find_scheduler_actor() is None:  # then the actors that the engine starts are the demo's
        stack.callback(cluster.down)
    say(f"starting vLLM with {setup.name}")
    try:
        llm = _engine(setup, joined.address, pool_bytes)
    except (RuntimeError, ValueError) as error:
        raise EngineStartError(f"vLLM did not start ({error}); see {_log_path()}") from error
    stack.callback(llm.llm_engine.engine_core.shutdown, timeout=_SHUTDOWN_TIMEOUT_S)
    return _Session(setup, llm, cluster)


def _engine(setup: _Setup, ray_address: str, pool_bytes: str | None) -> Any:
    from vllm import LLM

    return LLM(
        model=str(setup.model),
        dtype="float32",  # in bf16 another split of the prefill may change a token
        enforce_eager=True,
        disable_log_stats=False,  # or there is no time to first token and no counter
        seed=0,
        **_connector_options(ray_address, pool_bytes),
        **setup.engine_options,
    )


def _connector_options(ray_address: str, pool_bytes: str | None) -> dict[str, Any]:
    from vllm.config import KVTransferConfig

    extra = {"ray_address": ray_address}
    if pool_bytes is not None:
        extra["pool_bytes"] = pool_bytes
    return {
        "kv_transfer_config": KVTransferConfig(
            kv_connector="RayKVConnector", kv_role="kv_both", kv_connector_extra_config=extra
        )
    }


class _Session:
    """A running engine and its cluster, and the asks made so far."""

    def __init__(self, setup: _Setup, llm: Any, cluster: _Cluster) -> None:
        self._setup = setup
        self._llm = llm
        self._cluster = cluster
        self._asks: list[Ask] = []

    def run(self, rounds: int, console: Console) -> Report:
        """Ask everything in all rounds."""
        prompts = self._setup.make_prompts(self._llm)
        before = self._bytes()
        self._warm_up(prompts[0])
        steps = schedule(prompts, rounds)
        with _progress(console) as progress:
            task = progress.add_task("", total=len(steps))
            for step in steps:
                title = f"round {step.round}, {PHASE_TITLES[step.phase]}: {step.prompt.document}"
                progress.update(task, description=title)
                if step.phase in (Phase.NEW_QUESTION, Phase.RAYKV):
                    self._forget_prefixes()
                progress.console.print(show_ask(self._ask(step)))
                progress.advance(task)
        after = self._settled_bytes(_HEARTBEAT_S)
        return Report(
            model=self._setup.name,
            caveat=self._setup.caveat,
            rounds=rounds,
            asks=tuple(self._asks),
            bytes_stored=after["bytes_stored"] - before["bytes_stored"],
            bytes_loaded=after["bytes_loaded"] - before["bytes_loaded"],
            pool_bytes=after["pool_bytes"],
        )

    def _warm_up(self, prompt: Prompt) -> None:
        """Pay for what the engine does once, with a prompt too short to be cached."""
        self._generate(prompt.token_ids[-8:])

    def _ask(self, step: Step) -> Ask:
        prompt = step.prompt
        before = self._sources()
        output = self._generate(
            prompt.token_ids, skip_reading_prefix_cache=step.phase is Phase.RECOMPUTE
        )
        sources = self._sources().since(before)
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        ask = Ask(
            document=prompt.document,
            question=prompt.question,
            phase=step.phase,
            round=step.round,
            prompt_tokens=len(prompt.token_ids),
            sources=sources,
            ttft_s=output.metrics.first_token_latency,
            token_ids=token_ids,
            answer=completion.text.strip() or " ".join(map(str, token_ids)),
        )
        self._asks.append(ask)
        return ask

    def _generate(self, token_ids: Sequence[int], **options: Any) -> Any:
        from vllm import SamplingParams

        sampling = SamplingParams(temperature=0.0, **self._setup.sampling_options, **options)
        prompt = {"prompt_token_ids": list(token_ids)}
        return self._llm.generate(prompt, sampling, use_tqdm=False)[0]

    def _forget_prefixes(self) -> None:
        """Drop vLLM's own prefix cache, once RayKV has stored what it was given."""
        self._settled_bytes(_SETTLE_S)
        deadline = time.monotonic() + _RESET_TIMEOUT_S
        while not self._llm.reset_prefix_cache():
            if time.monotonic() > deadline:
                raise EngineBusyError(
                    f"vLLM kept its prefix cache for {_RESET_TIMEOUT_S:.0f} s: blocks are in use"
                )
            time.sleep(_POLL_S)

    def _settled_bytes(self, settle_s: float) -> dict[str, int]:
        """RayKV's counts once they have stood still for `settle_s`, or after a time-out."""
        now = time.monotonic()
        give_up_at, counts, since = now + _STORE_TIMEOUT_S, self._bytes(), now
        while now - since < settle_s and now < give_up_at:
            time.sleep(_POLL_S)
            now, latest = time.monotonic(), self._bytes()
            if latest != counts:
                counts, since = latest, now
        return counts

    def _sources(self) -> TokenSources:
        """VLLM's counters since the engine started."""
        counts: Counter[str] = Counter()
        for metric in self._llm.get_metrics():
            if metric.name == "vllm:prompt_tokens_by_source":
                counts[metric.labels["source"]] += metric.value
        return TokenSources(
            computed=counts["local_compute"],
            prefix_cache=counts["local_cache_hit"],
            raykv=counts["external_kv_transfer"],
        )

    def _bytes(self) -> dict[str, int]:
        nodes = self._cluster.status().nodes
        return {
            "bytes_stored": sum(node.bytes_stored for node in nodes),
            "bytes_loaded": sum(node.bytes_loaded for node in nodes),
            "pool_bytes": sum(node.pool_bytes for node in nodes),
        }


def _log_path() -> Path:
    return cache_root() / "demo.log"


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # what others print belongs into the log file
        redirect_stderr=False,
    )


def _set_engine_environment() -> None:
    """Settings that vLLM reads when it is imported; what the user has set stays."""
    cores = sorted(os.sched_getaffinity(0))
    defaults = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    if len(cores) > 1:  # the last core is for Ray and for vLLM's other processes
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores[:-1]))
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


@contextmanager
def _child_output_in(log: Path, console: Console) -> Iterator[None]:
    """Send this process's standard output and error, and its children's, to `log`.

    The engine's processes inherit the descriptors, so nothing less keeps them off the display. A
    console on standard output or error goes on where it was.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    shown = console.file
    with ExitStack() as stack:
        display = _duplicate_of_terminal(console)
        if display is not None:
            console.file = stack.enter_context(display)
            stack.callback(setattr, console, "file", shown)
        sink = stack.enter_context(log.open("wb"))
        for stream, descriptor in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            saved = os.dup(descriptor)
            stack.callback(os.close, saved)
            stack.callback(os.dup2, saved, descriptor)
            stack.callback(stream.flush)
            os.dup2(sink.fileno(), descriptor)
        yield


def _duplicate_of_terminal(console: Console) -> IO[str] | None:
    """A second file object for what `console` writes to; None if that is not our output."""
    try:
        descriptor = console.file.fileno()
    except (AttributeError, OSError):  # a string buffer, or a test's capture
        return None
    if descriptor not in (1, 2):
        return None
    return os.fdopen(os.dup(descriptor), "w", encoding=console.encoding)
