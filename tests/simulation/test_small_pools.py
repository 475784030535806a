"""Seeds that engines with small pools survive, and bugs that these seeds find."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.fixtures.effort import seeds
from tests.simulation.bugs import POOL_BUGS
from tests.simulation.small_pools import play

NUM_SEEDS = 60

FINDERS = {
    "blocks_of_the_preempted_are_stored": (3144, "AssertionError: .* has other bytes"),
    "room_is_kept_for_a_load_that_failed": (2, "ForgottenError"),
    "failed_load_waits_in_front_of_those_that_hold_blocks": (10, "ForgottenError"),
    "windows_need_no_room": (76, "ForgottenError"),
}
"""The seeds that find them, and what is found."""

LIMIT_S = 240.0


@pytest.mark.parametrize("seed", seeds(7, range(NUM_SEEDS)))
def test_engine_whose_cache_is_smaller_than_two_long_requests_answers_right(
    model: Path, seed: int
) -> None:
    play(model, seed)


def test_planted_bugs_are_found() -> None:
    """In a process of its own, where sets have the order that the seeds were found with."""
    assert FINDERS.keys() == POOL_BUGS.keys()
    command = [sys.executable, "-m", "tests.simulation.small_pools"]
    for bug, (seed, _) in FINDERS.items():
        command += ["--plant", bug, str(seed)]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    for bug, (seed, found) in FINDERS.items():
        assert re.search(f"seed {seed}: {found}", done.stdout), bug + done.stdout + done.stderr
