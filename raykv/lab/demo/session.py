"""All asks of a demo in their order: rounds on one engine, then one more on another node's."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from raykv.lab.demo.prompts import other_node_steps, schedule
from raykv.lab.demo.report import PHASE_TITLES, DemoAsk, DemoReport, Phase, show_ask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console

    from raykv.lab.demo.engine import DemoEngine, Setup
    from raykv.lab.demo.prompts import Prompt, Step
    from raykv.protocol.status import ClusterStatus

_POLL_S = 0.05
_SETTLE_S = 0.4  # stores are over when the counts have stood still for this long
_HEARTBEAT_S = 1.2  # loads alone reach the counts with a NodeActor's next heartbeat
_STORE_TIMEOUT_S = 20.0
_POOL_TIMEOUT_S = 30.0
_SHORT_TOKENS = 8  # too few to be cached
_FETCH_TOKENS = 512


class DemoCluster(Protocol):
    """What is wanted of `raykv.client.cluster.Cluster`."""

    def status(self) -> ClusterStatus: ...


class DemoSession:
    """A running engine and its cluster, and the asks made so far.

    Args:
        setup: What the engines run.
        engine: The one that computes.
        start_other: Starts an engine on another node, which knows nothing yet; None: there is one
            node only.
        cluster: For RayKV's counts.
    """

    def __init__(
        self,
        setup: Setup,
        engine: DemoEngine,
        start_other: Callable[[], DemoEngine] | None,
        cluster: DemoCluster,
    ) -> None:
        self._setup = setup
        self._engine = engine
        self._start_other = start_other
        self._cluster = cluster
        self._asks: list[DemoAsk] = []

    def run(self, rounds: int, console: Console) -> DemoReport:
        """DemoAsk everything in all rounds, then on the other node, if there is one."""
        prompts = self._engine.prompts()
        before = self._counts()
        self._engine.generate(_short(prompts[0]))
        steps = schedule(prompts, rounds)
        last_steps = other_node_steps(prompts, rounds + 1) if self._start_other else []
        with _Display(console, len(steps) + len(last_steps)) as display:
            self._ask_all(self._engine, steps, display)
            if self._start_other:
                display.say("starting another Ray node, and vLLM there")
                other = self._start_warm(self._start_other, prompts[0])
                self._ask_all(other, last_steps, display)
        after = self._settled_counts(_HEARTBEAT_S)
        return DemoReport(
            model=self._setup.name,
            caveat=self._setup.caveat,
            rounds=rounds,
            asks=tuple(self._asks),
            bytes_stored=after["bytes_stored"] - before["bytes_stored"],
            bytes_loaded=after["bytes_loaded"] - before["bytes_loaded"],
            pool_bytes=after["pool_bytes"],
        )

    def _ask_all(self, engine: DemoEngine, steps: Sequence[Step], display: _Display) -> None:
        for step in steps:
            display.say(f"round {step.round}, {PHASE_TITLES[step.phase]}: {step.prompt.document}")
            if step.phase in (Phase.NEW_QUESTION, Phase.RAYKV):
                self._settled_counts(_SETTLE_S)
                engine.forget_prefixes()
            before = self._counts()["bytes_fetched"]
            ask = engine.ask(step)
            ask = replace(ask, bytes_fetched=self._counts()["bytes_fetched"] - before)
            self._asks.append(ask)
            display.show(ask)

    def _start_warm(self, start_other: Callable[[], DemoEngine], prompt: Prompt) -> DemoEngine:
        """Start the engine on the other node, and pay for what happens there once.

        That is the engine's first step, the first touch of the pool's pages, and the first fetch
        between the two nodes, of a prompt that no document begins with.
        """
        fetched = prompt.token_ids[:_FETCH_TOKENS][::-1]
        self._engine.generate(fetched)
        self._settled_counts(_SETTLE_S)
        other = start_other()
        other.generate(_short(prompt))
        self._wait_for_pools()
        other.generate(fetched)
        return other

    def _wait_for_pools(self) -> None:
        """Wait until the pools' pages are there, or a time-out."""
        give_up_at = time.monotonic() + _POOL_TIMEOUT_S
        while time.monotonic() < give_up_at:
            nodes = self._cluster.status().nodes
            if all(node.prefaulted_bytes >= node.pool_bytes for node in nodes):
                return
            time.sleep(_POLL_S)

    def _settled_counts(self, settle_s: float) -> dict[str, int]:
        """RayKV's counts once they have stood still for `settle_s`, or after a time-out."""
        now = time.monotonic()
        give_up_at, counts, since = now + _STORE_TIMEOUT_S, self._counts(), now
        while now - since < settle_s and now < give_up_at:
            time.sleep(_POLL_S)
            now, latest = time.monotonic(), self._counts()
            if latest != counts:
                counts, since = latest, now
        return counts

    def _counts(self) -> dict[str, int]:
        nodes = self._cluster.status().nodes
        return {
            "bytes_stored": sum(node.bytes_stored for node in nodes),
            "bytes_loaded": sum(node.bytes_loaded for node in nodes),
            "bytes_fetched": sum(node.bytes_fetched for node in nodes),
            "pool_bytes": sum(node.pool_bytes for node in nodes),
        }


def _short(prompt: Prompt) -> tuple[int, ...]:
    """A short prompt for an engine's first step, which takes longer than those after it."""
    return prompt.token_ids[-_SHORT_TOKENS:]


class _Display:
    """What a person sees while the asks are made."""

    def __init__(self, console: Console, num_asks: int) -> None:
        self._progress = Progress(
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
        self._task = self._progress.add_task("", total=num_asks)

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, sentence: str) -> None:
        """What is being done now."""
        self._progress.update(self._task, description=sentence)

    def show(self, ask: DemoAsk) -> None:
        """An ask is over."""
        self._progress.console.print(show_ask(ask))
        self._progress.advance(self._task)
