"""Whoever is killed or frozen at any message, just before or after it arrives: nothing wrong is
loaded, and everybody comes to the truth.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.simulation.nodes import world as simulated
from tests.simulation.nodes.checks import settle
from tests.simulation.nodes.nature import FAULTS, ROUTINE, WorldNature
from tests.simulation.nodes.world import NodesWorld, small_bounds
from tests.simulation.wire import Manners, Wire

SEEDS = (1, 7)
"""Together they have messages of all kinds."""

NUM_STEPS = 700

STEP_S = 0.02
"""Fast enough for the first orders of a head to come, and slow enough for requests."""

FROZEN_STEPS = 60
FROZEN_STEP_S = 0.1
"""It takes longer than engines believe in a place of which they hear nothing."""

SLABS = 6

KINDS = (
    "answer to changes",
    "answer to document",
    "answer to fetch",
    "answer to hello",
    "answer to keys",
    "answer to order",
    "answer to pin",
    "answer to questions",
    "answer to read",
    "answer to report",
    "answer to reset",
    "answer to shares",
    "answer to tell",
    "changes",
    "document",
    "fetch",
    "hello",
    "jobs",
    "keys",
    "order",
    "pin",
    "questions",
    "read",
    "report",
    "reset",
    "result",
    "shares",
    "tell",
)

OPERATORS = {"operator_clears": 2.0, "operator_pins": 3.0, "operator_shares": 2.0}
OTHERS = {"engine_resets": 0.5, "weights_change": 0.1}


class Strike(NamedTuple):
    """What befalls whom, at a message of a kind: before it arrives, or after."""

    kind: str
    victim: str
    is_killed: bool
    is_before: bool


def strikes() -> list[Any]:
    """All that there are; by default one for each kind and victim."""
    found = []
    ways = [*product((True, False), (True, False))]
    for at, (kind, victim) in enumerate(product(KINDS, ("node", "head", "engine"))):
        for number, (is_killed, is_before) in enumerate(ways):
            strike = Strike(kind, victim, is_killed, is_before)
            how = f"{'killed' if is_killed else 'frozen'}_{'before' if is_before else 'after'}"
            is_later = number != (at + at // len(ways)) % len(ways)
            marks = pytest.mark.extended if is_later else ()
            name = f"{victim}_{how}_{kind.replace(' ', '_')}"
            found.append(pytest.param(strike, marks=marks, id=name))
    return found


def kind_of(label: str) -> str:
    rest = label.removeprefix("answer to ")
    word = re.search("[a-z]+", rest)
    assert word is not None, label
    return label[: len(label) - len(rest)] + word.group()


def calm_nature(_: object) -> WorldNature:
    """Nothing befalls anybody, but for what operators and users want."""
    routine = dict(ROUTINE)
    del routine["node_thaws"]
    wanted = OPERATORS | OTHERS
    return WorldNature(
        is_calm=False,
        num_nodes=2,
        num_engines=3,
        num_documents=4,
        num_slabs=SLABS,
        kv_blocks=64,
        results_share=0.7,
        most_events=100_000,
        pieces=(1, 8, 24),
        manners=Manners(disorder=0.1),
        routine=routine,
        faults={name: wanted.get(name, 0.0) for name in FAULTS},
    )


class Watched:
    """A world, and what is done at the messages that arrive there."""

    def __init__(self, seed: int, patches: pytest.MonkeyPatch) -> None:
        self.num_seen: Counter[str] = Counter()
        self.before: Callable[[str], None] = lambda _: None
        self.after: Callable[[str], None] = lambda _: None
        patches.setattr(simulated, "nature", calm_nature)
        patches.setattr(Wire, "deliver", self._deliver())
        self.world = NodesWorld(seed)

    def _deliver(self) -> Callable[[Wire, str, Callable[[], None]], None]:
        def deliver(_: Wire, label: str, arrive: Callable[[], None]) -> None:
            self.num_seen[kind_of(label)] += 1
            self.before(label)
            arrive()
            self.after(label)

        return deliver

    def play(self, num_steps: int, step_s: float = STEP_S) -> None:
        for _ in range(num_steps):
            self.world.step()
            self.world.cluster.now += step_s


@pytest.fixture(scope="module")
def counts() -> dict[int, Counter[str]]:
    """By seed, how many messages of each kind there are if nothing befalls anybody."""
    return {seed: _count(seed) for seed in SEEDS}


def _count(seed: int) -> Counter[str]:
    with small_bounds() as patches:
        watched = Watched(seed, patches)
        watched.play(NUM_STEPS)
        return watched.num_seen


def test_every_kind_of_message_is_met(counts: dict[int, Counter[str]]) -> None:
    assert sorted(set().union(*counts.values())) == sorted(KINDS)


@pytest.mark.parametrize("strike", strikes())
def test_nodes_come_to_the_truth_whoever_is_struck_at_a_message(
    strike: Strike, counts: dict[int, Counter[str]]
) -> None:
    seed = max(SEEDS, key=lambda each: counts[each][strike.kind])
    # In the middle of all that there are.
    at = (counts[seed][strike.kind] + 1) // 2
    with small_bounds() as patches:
        watched = Watched(seed, patches)
        go_on: list[Callable[[], None]] = []

        def befall(label: str) -> None:
            is_there = kind_of(label) == strike.kind and watched.num_seen[strike.kind] == at
            if is_there and not go_on:
                go_on.append(_strike(watched.world, strike, label))

        if strike.is_before:
            watched.before = befall
        else:
            watched.after = befall
        for _ in range(NUM_STEPS):
            if not go_on:
                watched.play(1)
        watched.play(FROZEN_STEPS, FROZEN_STEP_S)
        go_on[0]()
        watched.play(FROZEN_STEPS)
        settle(watched.world.cluster, watched.world.reader)


def _strike(world: NodesWorld, strike: Strike, label: str) -> Callable[[], None]:
    """Strike the node or the engine that a message is of, or else the first; returns what ends
    that.
    """
    cluster = world.cluster
    if strike.victim == "head":
        if strike.is_killed:
            cluster.head.die()
            return lambda: cluster.head.begin() if cluster.head.is_down else None
        cluster.head.is_frozen = True
        return cluster.head.thaw
    if strike.victim == "node":
        nodes = list(cluster.nodes.values())
        node = next((each for each in nodes if each.node_id in label), nodes[0])
        if strike.is_killed:
            cluster.restart_node(node.node_id, SLABS, keeps_memory=True)
            return lambda: None
        node.is_frozen = True
        return node.thaw
    engines = cluster.engines
    engine = next((each for each in engines if str(each.life) in label), engines[0])
    if strike.is_killed:
        world.kill(engine, None)
    else:
        engine.is_frozen = True

    def go_on() -> None:
        engine.is_frozen = False

    return go_on
