"""Seeds that the simulated nodes must survive, and bugs that the simulation must find."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.fixtures.effort import seeds
from tests.house import ROOT
from tests.simulation.nodes.bugs import BUGS
from tests.simulation.nodes.world import SeedError, run

NUM_SEEDS = 64
NUM_STEPS = 2000

LATE_FINDERS: dict[str, int] = {}
"""The first seeds that find them are tried first, then all."""

SLOW = {
    "all_nodes_are_spare",
    "end_is_by_name",
    "keeper_is_not_told",
    "late_refusal_of_blocks_counts",
    "mark_counts_at_any_number",
    "marks_are_never_forgotten",
    "rank_of_a_voided_store_joins_again",
    "slot_is_given_while_it_has_readers",
    "store_of_a_dead_engine_never_ends",
    "verdict_differs_between_ranks",
}
"""It takes many seeds to find these."""

EXTENDED = pytest.mark.extended

PLAYED = "from tests.simulation.nodes.world import run; print(*run(7, 600).actions, sep=chr(10))"


@pytest.mark.parametrize("seed", seeds(24, range(400)))
def test_nodes_come_to_the_truth_after_faults(seed: int) -> None:
    run(seed, NUM_STEPS)


@pytest.mark.parametrize(
    "bug", [pytest.param(bug, marks=EXTENDED if bug in SLOW else ()) for bug in BUGS]
)
def test_planted_bug_of_nodes_is_found(bug: str) -> None:
    for seed in [LATE_FINDERS.get(bug, 0), *range(NUM_SEEDS)]:
        try:
            run(seed, NUM_STEPS, bug)
        except SeedError:
            return
    pytest.fail(f"{NUM_SEEDS} seeds survive {bug}")


def test_seed_plays_the_same_whatever_hashes_are() -> None:
    played = [
        subprocess.run(
            [sys.executable, "-c", PLAYED],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]

    assert played[0] == played[1]
    assert played[0].splitlines() == list(run(7, 600).actions)
