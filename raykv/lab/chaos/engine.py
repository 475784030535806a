"""One engine of a chaos run, and the thread that keeps it busy and checks its answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from raykv.lab.bench.engine import EngineError, EngineProcess
from raykv.lab.chaos.plan import BLOCK, MAX_TOKENS, AskBatch, probe
from raykv.lab.chaos.report import ChaosAnswer, Seen
from raykv.lab.chaos.watch import ChaosWatch, Stored

PROBE_TRIES = 8
PROBE_PAUSE_S = 0.15
"""How long to wait before a probe is repeated, since its store takes a moment, and how often."""


class Worked(threading.Thread):
    """An engine that is asked batch after batch until it is stopped.

    Args:
        number: of the engine.
        process: the engine.
        start: starts the engine again after it was killed or its node was replaced.
        prompts: by the numbers that batches use.
        references: the answers of an engine that uses no cache.
        batches: what to ask.
        next_probe: a new number each time, for all engines.
    """

    def __init__(
        self,
        number: int,
        process: EngineProcess,
        start: Callable[[], EngineProcess],
        prompts: list[list[int]],
        references: list[ChaosAnswer],
        batches: Iterator[AskBatch],
        next_probe: Callable[[], int],
    ) -> None:
        super().__init__(name=f"chaos-engine-{number}", daemon=True)
        self.number = number
        self.seen = Seen()
        self.process = process
        self.watch: ChaosWatch | None = None
        # What made this thread end early, if anything.
        self.error: Exception | None = None
        self._start = start
        self._prompts = prompts
        self._references = references
        self._batches = batches
        self._next_probe = next_probe
        self._stopping = threading.Event()
        self._is_victim = threading.Event()
        self._must_restart = threading.Event()
        self._preemptions = 0

    # The fault's side

    def hit(self) -> None:
        """Note that a fault hits the engine itself.

        If the engine ends, it starts again and its current requests are not counted. If it
        continues, the duration of its requests is not counted.
        """
        self._is_victim.set()

    def restart(self) -> None:
        """Stop the engine between two batches, and start it again."""
        self._must_restart.set()

    def stop(self, deadline_s: float) -> None:
        """Ask no further batch; wait for the current one."""
        self._stopping.set()
        self.join(deadline_s)

    # The load's side

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._one_round()
        except Exception as error:  # noqa: BLE001 - reported to the main thread
            self.error = error

    def _one_round(self) -> None:
        if self._must_restart.is_set():
            self._must_restart.clear()
            self.process.stop()
            self._begin_anew()
        batch = next(self._batches)
        try:
            self._ask(batch)
            watch = self.watch
            if watch is not None:
                self._probe(watch)
        except EngineError as error:
            if self._is_victim.is_set():
                self.seen.lost_with_engine += len(batch.asks)
            else:
                self.seen.failed.append(f"engine {self.number}: {error}")
                self.process.stop()
            self._begin_anew()

    def _begin_anew(self) -> None:
        self._is_victim.clear()
        self._preemptions = 0
        self.process = self._start()

    def _serve(self, requests: list[dict[str, Any]]) -> list[ChaosAnswer]:
        output = self.process.call("serve", requests=requests)
        preemptions = int(output["preemptions"])
        self.seen.preemptions += preemptions - self._preemptions
        self._preemptions = preemptions
        return [ChaosAnswer(**each) for each in output["outputs"]]

    def _ask(self, batch: AskBatch) -> None:
        answers = self._serve(
            [{**asdict(ask), "prompt": self._prompts[ask.prompt]} for ask in batch.asks]
        )
        was_victim = self._is_victim.is_set()
        self._is_victim.clear()
        for ask, answer in zip(batch.asks, answers, strict=True):
            self.seen.requests += 1
            if answer.reason == "abort" and ask.abort_after_steps is not None:
                self.seen.aborted += 1
                continue
            self._check(f"prompt {ask.prompt}", answer, self._references[ask.prompt])
            if len(answer.tokens) != ask.max_tokens:
                self._fail(f"prompt {ask.prompt}", f"{len(answer.tokens)} tokens")
            self.seen.prompt_tokens += len(self._prompts[ask.prompt])
            self.seen.cached_tokens += answer.cached
            if not was_victim:
                self.seen.worst_stall_s = max(self.seen.worst_stall_s, answer.seconds)
        if batch.resets:
            self.process.reset()

    def _check(self, what: str, answer: ChaosAnswer, reference: ChaosAnswer) -> None:
        if answer.reason != "length":
            self._fail(what, f"ended with {answer.reason!r}")
        elif not answer.agrees(reference):
            self.seen.wrong.append(
                f"engine {self.number}, {what}, {answer.cached} tokens cached: {answer.tokens} "
                f"instead of {reference.tokens}"
            )

    def _fail(self, what: str, why: str) -> None:
        self.seen.failed.append(f"engine {self.number}, {what}: {why}")

    # Probes

    def _probe(self, watch: ChaosWatch) -> None:
        number = self._next_probe()
        computed = self._ask_probe(number)
        for _ in range(PROBE_TRIES):
            time.sleep(PROBE_PAUSE_S)
            self.process.reset()
            loaded = self._ask_probe(number)
            self._check(f"probe {number}", loaded, computed)
            if loaded.cached >= len(probe(number)) // BLOCK * BLOCK:
                watch.loaded(Stored(number, self.number, computed))
                break
        others = watch.to_fetch(self.number)
        if others is not None:
            fetched = self._ask_probe(others.number)
            self._check(f"probe {others.number} of another node", fetched, others.answer)
            if fetched.cached >= len(probe(others.number)) // BLOCK * BLOCK:
                watch.fetched(self.number)

    def _ask_probe(self, number: int) -> ChaosAnswer:
        self.seen.probes += 1
        (answer,) = self._serve([{"prompt": probe(number), "max_tokens": MAX_TOKENS}])
        return answer
