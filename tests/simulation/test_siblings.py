"""What another connector of `MultiConnector` fails to load within a step: none of it is stored."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.fixtures.effort import seeds
from tests.fixtures.vllm import CHUNK
from tests.simulation.sibling_world import SiblingWorld
from tests.simulation.test_layered_scheduler import prompt


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_sibling_fails_to_load_is_not_stored(model: Path, is_async: bool) -> None:
    world = SiblingWorld(model, 1, is_async=is_async)
    world.losing = 1.0
    world.add(prompt(1, 6 * CHUNK + 5), 1)
    world.run()
    assert world.num_lost >= 4
    world.check_pool()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_a_sibling_has_loaded_is_stored(model: Path, is_async: bool) -> None:
    world = SiblingWorld(model, 1, is_async=is_async)
    world.add(prompt(1, 6 * CHUNK + 5), 3)
    world.run()
    world.check()
    world.check_pool()
    assert world.view.num_ready == 6


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed", seeds(10, range(60)))
def test_pool_is_right_whatever_siblings_fail_to_load(
    model: Path, seed: int, is_async: bool
) -> None:
    """Requests of few documents share blocks, and are taken back while the model runs."""
    world = SiblingWorld(model, seed, is_async=is_async)
    rng, world.losing, world.aborting = world.rng, 0.3, 0.1
    documents = [prompt(number, 150) for number in range(3)]
    for at in range(60):
        if rng.random() < 0.4:
            tokens = rng.choice(documents)[: rng.randrange(20, 150)]
            world.add([*tokens, *prompt(10 + at, rng.randrange(60))], rng.choice([1, 1, 3, 30]))
        if rng.random() < 0.05:
            world.scheduler.reset_prefix_cache()
        world.sibling.most = rng.choice([0, 32, 64, 96])
        if world.scheduler.has_requests():
            world.step()
        world.check_pool()
    # Not until all is answered: steps ahead, and blocks that don't come, may leave a request that
    # vLLM's own recovery never schedules again.
    for _ in range(60):
        if world.scheduler.has_requests():
            world.step()
    world.check_pool()
    assert world.view.num_ready
