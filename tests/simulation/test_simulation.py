"""Seeds that the simulated cluster must survive, and bugs that it must find."""

from __future__ import annotations

import pytest

from tests.fixtures.directory.tables import use_table
from tests.fixtures.effort import seeds
from tests.simulation.bugs import BUGS
from tests.simulation.world import SimulationError, run

NUM_SEEDS = 64
NUM_STEPS = 3000

LATE_FINDERS = {
    "source_serves_what_is_in_the_slot": 14,
    "slot_is_written_under_its_readers": 24,
    "fetch_outlives_its_lease": 28,
    "clearing_is_of_what_is_known": 62,
    "clearing_dies_with_its_scheduler_actor": 21,
}
"""The first seeds that find them are tried first, then all."""


@pytest.mark.parametrize("seed", seeds(24, range(400)))
def test_cluster_comes_to_the_truth_after_faults(seed: int) -> None:
    world = run(seed, NUM_STEPS)

    # Otherwise there was nothing to find.
    assert world.cluster.directory()


@pytest.mark.parametrize("seed", seeds(6, range(0, NUM_SEEDS, 4)))
def test_cluster_comes_to_the_truth_with_a_flat_directory(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_table(monkeypatch, "flat")
    world = run(seed, NUM_STEPS)

    assert world.cluster.directory()


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(bug: str) -> None:
    for seed in [LATE_FINDERS.get(bug, 0), *range(NUM_SEEDS)]:
        try:
            run(seed, NUM_STEPS, bug)
        except SimulationError:
            return
    pytest.fail(f"{NUM_SEEDS} seeds survive {bug}")


def test_seed_plays_the_same_again() -> None:
    first, second = run(7, 500), run(7, 500)

    assert first.actions == second.actions
    assert first.cluster.directory() == second.cluster.directory()
