"""An engine on a GPU that is kept busy, and whose NodeActor fails; see `test_engines.py`."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import psutil
import pytest

from raykv.lab.bench.prompts import prompt
from tests.fixtures.platforms import BLOCK, Platform
from tests.fixtures.processes import freeze, signal_after
from tests.fixtures.served import Served, parted_at_a_tie, whole
from tests.fixtures.waiting import wait_until
from tests.gpu.conftest import StartShared

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster

NUM_BLOCKS = 120
"""Of vLLM's own KV memory."""

STEP_DEADLINE_S = 1.0
RECOVERY_S = 90.0
"""A NodeActor with a pool that is page-locked takes seconds to end, and as long to start again."""

FEW_TIES = 4
"""One of so many answers may part from the expected one, where next to nothing decided it."""

KNOWN = [prompt(1000 + number, (11 + 3 * number) * BLOCK + 7) for number in range(7)]
"""Of 140 chunks: more than vLLM's own memory has."""

FRESH = [prompt(2000 + number, (6 + number) * BLOCK + 13) for number in range(6)]


@pytest.fixture(scope="module")
def engine(platform: Platform, start_shared: StartShared) -> Iterator[Served]:
    """EngineCore is a process of its own, and waits a second for a load at most."""
    raykv = {
        "step_deadline_s": STEP_DEADLINE_S,
    }
    with start_shared(
        **platform.exact,
        raykv=raykv,
        multiprocess=True,
        max_model_len=1024,
        num_gpu_blocks_override=NUM_BLOCKS,
    ) as served:
        yield served


def check_together(engine: Served, asked: dict[int, list[int]], expected: dict[int, object]) -> int:
    """All of these at once; how many of their tokens came out of a cache."""
    found = engine.ask([*asked.values()])
    ties = [
        parted_at_a_tie(answer, expected[number], engine.tie)
        for number, answer in zip(asked, found, strict=True)
    ]
    assert sum(ties) <= len(ties) // FEW_TIES, "answers part too often for rounding"
    return sum(answer["cached"] for answer in found)


def test_answers_are_those_of_prefix_hits_while_others_are_computed_stored_and_loaded(
    engine: Served,
) -> None:
    prompts = dict(enumerate([*KNOWN, *FRESH]))
    answers = engine.own_hits([*prompts.values()])
    expected = dict(enumerate(answers))
    engine.store(KNOWN)
    chunks = sum(whole(tokens) for tokens in KNOWN) // BLOCK
    assert chunks > NUM_BLOCKS
    source = random.Random(11)
    for turn in range(3):
        before = engine.bytes_loaded
        order = source.sample([*prompts], len(prompts))
        cached = check_together(engine, {number: prompts[number] for number in order}, expected)
        assert cached >= chunks * BLOCK, f"turn {turn}"
        assert engine.bytes_loaded - before >= chunks * engine.chunk_bytes()
        engine.settle()


HARMS = ["frozen", "killed while it is waited for", "killed"]


@pytest.mark.parametrize("harm", HARMS)
def test_node_actor_that_fails_during_loads_costs_no_answer(
    engine: Served, cluster: Cluster, harm: str
) -> None:
    """The middle of a copy is met by chance, in `killed`; in the others none gets through."""
    seed = 3000 + 10 * HARMS.index(harm)
    stored = [prompt(seed + number, 20 * BLOCK + 9) for number in range(4)]
    fresh = prompt(seed + 5, 5 * BLOCK + 9)
    *expected, new = engine.own_hits([*stored, fresh])
    engine.store(stored)
    node = psutil.Process(cluster.status().nodes[0].pid)
    said = len(engine.process.log_text)
    if harm != "killed":
        freeze(node.pid)
    engine.begin([*stored, fresh])
    if harm != "frozen":
        delay_s = 0.01 if harm == "killed" else STEP_DEADLINE_S / 3
        signal_after(node.pid, signal.SIGKILL, delay_s)
    began = time.monotonic()
    pairs = zip(engine.finish(), [*expected, new], strict=True)
    assert time.monotonic() - began < RECOVERY_S / 2
    assert sum(parted_at_a_tie(*pair, engine.tie) for pair in pairs) <= 1
    if harm == "frozen":
        assert "no line to the NodeActor" in engine.process.log_text[said:]
    # A load that is given up could still be written into the engine's blocks.
    node.wait(RECOVERY_S)
    # Neither vLLM's own cache nor what is computed now has anything of the failed loads.
    for tokens, answer in zip(stored, expected, strict=True):
        assert not parted_at_a_tie(engine.ask([tokens])[0], answer, engine.tie)
    assert engine.own_hits([fresh])[0]["tokens"] == new["tokens"]
    wait_until(
        lambda: engine.loads_again(stored[0], expected[0]), RECOVERY_S, "offloading works again"
    )
