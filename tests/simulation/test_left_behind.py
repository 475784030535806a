"""Blocks that a running request no longer needs go to others: their bytes never get its names.

A sliding window leaves blocks behind, chunked attention and recurrent states do, and so do requests
that are pre-empted. vLLM's scheduler is real, and so is what offers chunks to be stored.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.kv_cache_interface import KVCacheSpec

from tests.fixtures.effort import seeds
from tests.fixtures.vllm import CHUNK, CHUNKED, FULL, PROMPT, STATE, STATE_INSIDE, WINDOW
from tests.simulation.hook_world import HookWorld
from tests.simulation.test_failed_loads import ALONE, SEVERAL
from tests.simulation.test_layered_scheduler import prompt

KINDS = {
    "full": (FULL,),
    "several": SEVERAL,
    "window": ALONE,
    "chunked": (FULL, CHUNKED),
    "sizes": (replace(FULL, block_size=4 * CHUNK), WINDOW),
    "prompt": (PROMPT,),
    "states": (FULL, STATE),
    "mamba2": (STATE_INSIDE,),
}


@pytest.fixture(params=KINDS)
def kinds(request: pytest.FixtureRequest) -> tuple[KVCacheSpec, ...]:
    return KINDS[request.param]


@pytest.mark.parametrize("interval", [None, 0])
def test_reset_offers_no_block_that_was_left_behind(
    model: Path, kinds: tuple[KVCacheSpec, ...], interval: int | None
) -> None:
    world = HookWorld(model, 1, num_blocks=24, kinds=kinds, retention_interval=interval)
    world.add(prompt(1, 7 * CHUNK), 80)
    for _ in range(45):
        world.step()
    # Others take what its window has left behind, and end.
    for number in range(4):
        world.add(prompt(2 + number, 6 * CHUNK), 2)
        for _ in range(4):
            world.step()
    assert world.connector.reset_cache() is True
    world.run()
    world.check_all()


def test_session_that_goes_on_is_stored_under_its_names(
    model: Path, kinds: tuple[KVCacheSpec, ...]
) -> None:
    world = HookWorld(model, 1, num_blocks=80, kinds=kinds)
    for turn in range(4):
        world.add_turn("session", prompt(turn, 2 * CHUNK + 5), 5)
        for _ in range(12):
            world.step()
    tokens = list(world.asked["session"].request.all_token_ids)
    world.abort("session")
    world.run()
    world.check_all()
    assert world.scheduler.reset_prefix_cache()
    world.add(tokens)
    world.run()
    world.check_pool()
    assert world.line.num_loaded


def play(world: HookWorld, most: int) -> None:
    """Few blocks for few documents: requests are pre-empted and taken back, sessions go on, and all
    is forgotten now and then.
    """
    rng, world.evicting = world.rng, 0.01
    documents = [prompt(number, 150) for number in range(3)]
    world.aborting = 0.02
    for at in range(most):
        if rng.random() < 0.4:
            document = rng.choice(documents)[: rng.randrange(10, 150)]
            world.add(
                [*document, *prompt(10 + at % 5, rng.choice([0, 5, 40]))], rng.choice([1, 3, 30])
            )
        session = f"session {at // 20}"
        if at % 5 == 0 and not world.has_ended(session):
            world.add_turn(session, prompt(at, rng.randrange(1, 40)), rng.randrange(1, 9))
        if rng.random() < 0.06:
            world.scheduler.reset_prefix_cache()
        if rng.random() < 0.03:
            world.connector.reset_cache()
        world.step()
        world.check_pool()
    world.aborting = 0.0
    for at in range(0, most, 20):
        world.abort(f"session {at // 20}")
    world.run()


@pytest.mark.parametrize("seed", seeds(1, range(20)))
@pytest.mark.parametrize("interval", [None, 0])
def test_pool_is_right_whatever_is_left_behind(
    model: Path, kinds: tuple[KVCacheSpec, ...], interval: int | None, seed: int
) -> None:
    num_blocks = (30, 45)[seed % 2] if len(kinds) > 1 else 24
    share = (0.0, 0.5)[seed // 2 % 2]
    world = HookWorld(
        model, seed, num_blocks=num_blocks, kinds=kinds, retention_interval=interval, share=share
    )
    play(world, 60)
    world.check_all()
