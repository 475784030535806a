"""All asks of a demo in their order: rounds on one engine, then one more on another node's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess, settle, wait_for_pools
from raykv.lab.demo.prompts import Prompt, Step, other_node_steps, schedule
from raykv.lab.demo.report import PHASE_TITLES, DemoAsk, DemoReport, DemoTokens, Phase, show_ask

_HEARTBEAT_S = 1.2
"""Counts of loads arrive with a NodeActor's next heartbeat."""

_SHORT_TOKENS = 8
"""Too few to be cached."""

_FETCH_TOKENS = 512

_SOURCES = {
    "computed": "local_compute",
    "prefix_cache": "local_cache_hit",
    "raykv": "external_kv_transfer",
}
"""Where tokens of prompts come from, and what vLLM's counter calls it."""


@dataclass(frozen=True)
class Setup:
    """What differs between the real model and the tiny one.

    `config` is for `EngineProcess`, `sampling` for its command `generate`, and `decode` makes a
    text of an answer's tokens.
    """

    model: Path
    name: str
    caveat: str
    prompts: Sequence[Prompt]
    config: dict[str, Any]
    sampling: dict[str, Any]
    decode: Callable[[Sequence[int]], str]


class DemoSession:
    """A running engine and its cluster, and the asks made so far.

    Args:
        setup: What the engines run.
        engine: The one that computes.
        start_other: Starts an engine on another node, whose pool is empty; None if there is one
            node only.
        cluster: For RayKV's counts.
    """

    def __init__(
        self,
        setup: Setup,
        engine: EngineProcess,
        start_other: Callable[[], EngineProcess] | None,
        cluster: Cluster,
    ) -> None:
        self._setup = setup
        self._engine = engine
        self._start_other = start_other
        self._cluster = cluster
        self._asks: list[DemoAsk] = []

    def run(self, rounds: int, console: Console) -> DemoReport:
        """Ask everything in all rounds, then on the other node, if there is one."""
        prompts = self._setup.prompts
        before = self._counts()
        self._generate(self._engine, _short(prompts[0]))
        steps = schedule(prompts, rounds)
        last_steps = other_node_steps(prompts, rounds + 1) if self._start_other else []
        with _progress(console) as progress:
            progress.add_task("", total=len(steps) + len(last_steps))
            self._ask_all(self._engine, steps, progress)
            if self._start_other:
                _say(progress, "starting another Ray node, and vLLM there")
                other = self._start_warm(self._start_other, prompts[0])
                self._ask_all(other, last_steps, progress)
        settle(self._cluster, _HEARTBEAT_S)
        after = self._counts()
        return DemoReport(
            model=self._setup.name,
            caveat=self._setup.caveat,
            rounds=rounds,
            asks=tuple(self._asks),
            bytes_stored=after["bytes_stored"] - before["bytes_stored"],
            bytes_loaded=after["bytes_loaded"] - before["bytes_loaded"],
            pool_bytes=after["pool_bytes"],
        )

    def _ask_all(self, engine: EngineProcess, steps: Sequence[Step], progress: Progress) -> None:
        for step in steps:
            title = PHASE_TITLES[step.phase]
            _say(progress, f"round {step.round}, {title}: {step.prompt.document}")
            if step.phase not in (Phase.PREFIX_HIT, Phase.REMOTE):
                settle(self._cluster)
                engine.reset()
            before = self._counts()["bytes_fetched"]
            ask = self._ask(engine, step)
            ask = replace(ask, bytes_fetched=self._counts()["bytes_fetched"] - before)
            self._asks.append(ask)
            progress.console.print(show_ask(ask))
            progress.advance(progress.task_ids[0])

    def _ask(self, engine: EngineProcess, step: Step) -> DemoAsk:
        """Ask once."""
        prompt = step.prompt
        before = _sources(engine)
        params = {"raykv_load": False} if step.phase is Phase.RECOMPUTE else None
        output = self._generate(engine, prompt.token_ids, params)
        token_ids = tuple(output["tokens"])
        return DemoAsk(
            document=prompt.document,
            question=prompt.question,
            phase=step.phase,
            round=step.round,
            prompt_tokens=len(prompt.token_ids),
            sources=_sources(engine).since(before),
            ttft_s=output["ttft_s"],
            token_ids=token_ids,
            answer=self._setup.decode(token_ids),
        )

    def _generate(
        self,
        engine: EngineProcess,
        token_ids: Sequence[int],
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        prompts = [list(token_ids)]
        (output,) = engine.call("generate", prompts=prompts, params=params, **self._setup.sampling)
        found: dict[str, Any] = output
        return found

    def _start_warm(
        self, start_other: Callable[[], EngineProcess], prompt: Prompt
    ) -> EngineProcess:
        """Start the engine on the other node, and pay for what happens there once.

        That is the engine's first step, the first touch of the pool's pages, and the first fetch
        between the two nodes, of a prompt that no document begins with.
        """
        fetched = prompt.token_ids[:_FETCH_TOKENS][::-1]
        self._generate(self._engine, fetched)
        settle(self._cluster)
        other = start_other()
        self._generate(other, _short(prompt))
        wait_for_pools(self._cluster)
        self._generate(other, fetched)
        return other

    def _counts(self) -> dict[str, int]:
        nodes = self._cluster.status().nodes
        names = ("bytes_stored", "bytes_loaded", "bytes_fetched", "pool_bytes")
        return {name: sum(getattr(node, name) for node in nodes) for name in names}


def _sources(engine: EngineProcess) -> DemoTokens:
    """Count where the tokens of prompts came from since the engine started."""
    counters = engine.call("counters")
    return DemoTokens(
        **{
            source: int(counters.get(f"vllm:prompt_tokens_by_source{{{label}}}", 0))
            for source, label in _SOURCES.items()
        }
    )


def _short(prompt: Prompt) -> tuple[int, ...]:
    """A short prompt for an engine's first step, which takes longer than those after it."""
    return prompt.token_ids[-_SHORT_TOKENS:]


def _progress(console: Console) -> Progress:
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )


def _say(progress: Progress, sentence: str) -> None:
    progress.update(progress.task_ids[0], description=sentence)
