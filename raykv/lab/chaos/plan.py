"""Faults and requests of a chaos run, drawn from its seed. Pure.

The same seed gives the same faults in the same order, and the same prompts to each engine in the
same order; how many of them fit into the time depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from raykv.lab.bench.prompts import prompt

BLOCK = 32
"""Tokens in a block, and in a chunk."""

NUM_DOCUMENTS = 12
QUESTIONS = 3
"""About each document."""

MAX_TOKENS = 24
MOST_AT_ONCE = 6
"""Requests of a batch: together they are more than the KV cache of the engines holds."""

ABORTED = 0.1
RESETS = 0.5
OVERLAPPING = 0.25
"""Shares: of requests that are taken back, of batches after which vLLM's own prefix cache is
dropped, of faults after which the run does not wait for recovery."""

FREEZE_S = (1.0, 8.0)
PAUSE_S = (0.5, 4.0)
"""How long a frozen process stays so, and how long the next fault is waited for."""

AWAY_S = (5.0, 5.0, 30.0, 30.0, 120.0)
"""How long a host is away, one of these: Ray gives it up after about a minute."""

PROBE_SEEDS = 1_000_000
"""Prompts that no engine was asked before have seeds from here on."""


class FaultKind(StrEnum):
    """What happens to which part of the cluster."""

    NODE_ACTOR_KILLED = "NodeActor killed"
    NODE_ACTOR_FROZEN = "NodeActor frozen"
    SCHEDULER_ACTOR_KILLED = "SchedulerActor killed"
    SCHEDULER_ACTOR_FROZEN = "SchedulerActor frozen"
    RAYLET_KILLED = "raylet killed"
    RAYLET_FROZEN = "raylet frozen"
    ENGINE_KILLED = "engine killed"
    ENGINE_FROZEN = "engine frozen"
    GCS_FROZEN = "GCS frozen"
    HOST_CUT_OFF = "host cut off"
    HOST_HALF_OPEN = "host heard by nobody"
    HOST_SLOW = "host at a slow link"
    HOST_FROZEN = "host frozen"
    HOST_LOST = "host without power"

    @property
    def freezes(self) -> bool:
        """Whether the process, or the host, goes on after a while."""
        return self.value.endswith("frozen")

    @property
    def is_of_a_host(self) -> bool:
        """Whether it needs hosts, with networks of their own."""
        return self.value.startswith("host")

    @property
    def lasts(self) -> bool:
        """Whether it is over after a while; else something was killed."""
        return self.freezes or self.is_of_a_host

    @property
    def hits_engine(self) -> bool:
        """Whether the node's engine ends, or stands still."""
        return self.value.startswith("engine") or self in (
            FaultKind.HOST_FROZEN,
            FaultKind.HOST_LOST,
        )

    @property
    def is_of_the_cluster(self) -> bool:
        """Whether there is one such process only, so that the fault has no node."""
        return self.value.startswith(("SchedulerActor", "GCS"))


@dataclass(frozen=True)
class Fault:
    """One fault.

    Node 0 is the head. `lasts_s` is 0 if something is killed. The run waits `pause_s` before the
    fault. If it `overlaps`, the next fault does not wait until offloading works again.
    """

    number: int
    kind: FaultKind
    node: int
    lasts_s: float
    pause_s: float
    overlaps: bool


def faults(seed: int, num_nodes: int, kinds: Sequence[FaultKind]) -> Iterator[Fault]:
    """Draw faults without end; each kind comes once in every round, in a random order.

    A head node's raylet is never killed, and its host never loses power: Ray itself does not
    survive that.
    """
    source = random.Random(f"faults {seed}")
    number = 0
    while True:
        for kind in source.sample(list(kinds), len(kinds)):
            first = 1 if kind in (FaultKind.RAYLET_KILLED, FaultKind.HOST_LOST) else 0
            yield Fault(
                number,
                kind,
                0 if kind.is_of_the_cluster else source.randrange(first, num_nodes),
                _lasts_s(source, kind),
                source.uniform(*PAUSE_S),
                source.random() < OVERLAPPING,
            )
            number += 1


def _lasts_s(source: random.Random, kind: FaultKind) -> float:
    if kind.freezes:
        return source.uniform(*FREEZE_S)
    return source.choice(AWAY_S) if kind.lasts else 0.0


@dataclass(frozen=True)
class PlannedAsk:
    """One request: a prompt by its number, and the step after which it is aborted, if any."""

    prompt: int
    max_tokens: int
    abort_after_steps: int | None


@dataclass(frozen=True)
class AskBatch:
    """Requests that one engine gets at once; `resets` vLLM's own prefix cache afterwards."""

    asks: tuple[PlannedAsk, ...]
    resets: bool


def prompts(seed: int) -> list[list[int]]:
    """Draw questions about documents; questions about the same document share a prefix."""
    found = []
    for number in range(NUM_DOCUMENTS):
        source = random.Random(f"document {seed} {number}")
        document = prompt(source.getrandbits(32), source.randrange(4, 14) * BLOCK)
        for _ in range(QUESTIONS):
            question = prompt(source.getrandbits(32), source.randrange(5, 2 * BLOCK))
            found.append(document + question)
    return found


def probe(number: int) -> list[int]:
    """Draw a prompt that no engine has been asked before."""
    return prompt(PROBE_SEEDS + number, 4 * BLOCK + 7)


def batches(seed: int, engine: int, num_prompts: int) -> Iterator[AskBatch]:
    """Draw an engine's requests without end. Most of them are about a few documents."""
    source = random.Random(f"load {seed} {engine}")
    while True:
        asks = []
        for _ in range(source.randint(1, MOST_AT_ONCE)):
            number = min(source.randrange(num_prompts), source.randrange(num_prompts))
            is_aborted = source.random() < ABORTED
            steps = source.randint(1, 8) if is_aborted else None
            asks.append(PlannedAsk(number, source.randint(4, MAX_TOKENS), steps))
        yield AskBatch(tuple(asks), source.random() < RESETS)
