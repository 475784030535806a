"""Engines whose KV cache is smaller than twice their longest request, in every other way at once.

KV groups, loads that fail, steps ahead, both model runners, chunks that are evicted, requests that
are taken back, and resets are mixed by the seed. Answers are right, what is stored is right, and no
request is forgotten.

    python -m tests.simulation.small_pools --minutes 60

With `--plant BUG SEED` a bug is planted, see `bugs.py`. The order of sets belongs to what a seed
stands for.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import pytest
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from raykv.lab.demo.tiny_llama import tiny_llama
from tests.fixtures.vllm import CHUNK, CHUNKED, FULL, STATE, STATE_INSIDE, WINDOW
from tests.simulation.bugs import POOL_BUGS
from tests.simulation.hook_world import AheadHookWorld
from tests.simulation.layered_world import AheadWorld, World
from tests.simulation.test_layered_scheduler import prompt

Kinds = Sequence[KVCacheSpec]

KINDS: list[Kinds] = [
    (FULL, WINDOW),
    (FULL,),
    (FULL, STATE),
    (FULL, WINDOW, WINDOW),
    (FULL, CHUNKED),
    (FULL, STATE_INSIDE),
    (WINDOW,),
]

LONGEST = 220
"""Tokens of a request and its answer."""

MOST_SAID = 30


def num_needed(model: Path, kinds: Kinds) -> int:
    """Blocks that the longest request takes by itself; a state is copied before it changes."""
    world = World(model, 0, 0.0, 400, kinds)
    name = world.add(prompt(1, LONGEST))
    copies = len(kinds) - 1
    return copies + int(world.scheduler._request_remaining_blocks(world.asked[name].request))


def make_world(model: Path, seed: int) -> AheadWorld:
    """What a seed stands for."""
    rng = random.Random(f"small pools {seed}")
    kinds = KINDS[seed % len(KINDS)]
    by_layer = kinds == (FULL,) and rng.random() < 0.5
    needed = num_needed(model, kinds)
    num_blocks = 1 + needed + rng.randrange(needed)
    failing = rng.choice([0.02, 0.1, 0.3, 1.0])
    is_async, is_second = rng.random() < 0.7, rng.random() < 0.5
    if by_layer:
        return AheadWorld(
            model, seed, failing, num_blocks=num_blocks, is_async=is_async, is_second=is_second
        )
    states = any(isinstance(kind, MambaSpec) for kind in kinds)
    world = AheadHookWorld(
        model,
        seed,
        num_blocks=num_blocks,
        kinds=kinds,
        is_async=is_async,
        is_second=is_second,
        retention_interval=rng.choice([0, None, 4 * CHUNK]) if states else None,
        share=rng.choice([0.0, 0.25]),
    )
    world.line.failing = failing
    world.evicting = rng.choice([0.0, 0.01, 0.05])
    return world


def come(world: AheadWorld, at: int) -> None:
    """A request about one of few documents."""
    rng = world.rng
    known = prompt(rng.randrange(3), rng.randrange(CHUNK, LONGEST - MOST_SAID))
    own = prompt(10 + at, rng.choice([0, 5, 40, 100]))
    tokens = [*known, *own][: LONGEST - MOST_SAID]
    world.add(tokens, rng.choice([1, 3, MOST_SAID]))


def play(model: Path, seed: int, num_steps: int = 120) -> AheadWorld:
    """An engine's life under a seed; in the end all prompts come again.

    Raises:
        AssertionError: with what is wrong.
    """
    world = make_world(model, seed)
    rng = world.rng
    for at in range(num_steps):
        world.aborting = 0.02
        if rng.random() < 0.3:
            come(world, at)
        if rng.random() < 0.04:
            world.scheduler.reset_prefix_cache()
        if rng.random() < 0.02:
            world.reset_running()
        world.step()
    world.aborting = 0.0
    world.run(5000)
    world.scheduler.reset_prefix_cache()
    for asked in [*world.asked.values()][-10:]:
        world.add(asked.request.prompt_token_ids)
    world.run(5000)
    check(world)
    return world


def check(world: AheadWorld) -> None:
    """Every answer is right, and nothing is left."""
    world.check()
    world.check_rest()
    if isinstance(world, AheadHookWorld):
        world.check_pool()


def main() -> int:
    """Play one seed after the other; each finding is printed with its seed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument(
        "--seeds", type=int, help="how many, at most; default: all that time allows"
    )
    parser.add_argument(
        "--plant", nargs=2, action="append", metavar=("BUG", "SEED"), help="play that alone"
    )
    chosen = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(
            sys.executable, [sys.executable, "-m", "tests.simulation.small_pools", *sys.argv[1:]]
        )
    logging.disable(logging.CRITICAL)
    until, findings = time.monotonic() + chosen.minutes * 60, 0
    last = None if chosen.seeds is None else chosen.seed + chosen.seeds
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_llama(Path(folder), layers=1, hidden_size=32, vocab_size=64)
        for bug, planted in chosen.plant or ():
            with pytest.MonkeyPatch.context() as patches:
                POOL_BUGS[bug](patches)
                findings += not survives(model, int(planted))
        for seed in () if chosen.plant else count(chosen.seed):
            if time.monotonic() > until or seed == last:
                break
            findings += not survives(model, seed)
            if seed % 25 == 0:
                print(f"played up to seed {seed}, {findings} findings", flush=True)
    print(f"over: {findings} findings", flush=True)
    return findings > 0


def survives(model: Path, seed: int) -> bool:
    """Play a seed; print what it finds."""
    try:
        play(model, seed)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
        traceback.print_exc()
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
