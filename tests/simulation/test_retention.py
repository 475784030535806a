"""`prefix_cache_retention_interval` with a sliding window: what is offered, is stored and found.

vLLM keeps chunks of a window at multiples of the interval and where prompts end; with 0, its
default, where prompts end alone, and with None everywhere. Its scheduler is real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.fixtures.vllm import CHUNK
from tests.simulation.hook_world import HookWorld
from tests.simulation.test_failed_loads import DOCUMENT, SEVERAL
from tests.simulation.test_layered_scheduler import prompt

LENGTHS = {None: {3, 4, 6}, 0: {6}, CHUNK: {3, 4, 6}, 4 * CHUNK: {4, 6}}
"""In chunks, by interval: beginnings of the document that are found, and end where a window does.
The window looks back two chunks."""


def loads(world: HookWorld, tokens: list[int]) -> int:
    """Chunks that a request loads, of both groups."""
    assert world.scheduler.reset_prefix_cache()
    before = world.line.num_loaded
    world.add(tokens)
    world.run()
    world.check_all()
    return world.line.num_loaded - before


@pytest.mark.parametrize("interval", LENGTHS)
@pytest.mark.parametrize("length", [3, 4, 6])
def test_beginning_of_a_document_is_found_where_the_window_was_kept(
    model: Path, interval: int | None, length: int
) -> None:
    world = HookWorld(model, 1, num_blocks=80, kinds=SEVERAL, retention_interval=interval)
    world.add(DOCUMENT)
    world.run()
    tokens = [*DOCUMENT[: length * CHUNK], *prompt(9, 20)]
    assert loads(world, tokens) == (length + 2 if length in LENGTHS[interval] else 0)
    # Its own end was kept.
    assert loads(world, tokens) == len(tokens) // CHUNK + 2


@pytest.mark.parametrize("interval", LENGTHS)
def test_answers_are_right_whatever_comes_and_goes(model: Path, interval: int | None) -> None:
    world = HookWorld(model, 2, num_blocks=60, kinds=SEVERAL, retention_interval=interval)
    world.evicting = 0.003
    world.line.failing = 0.1
    for number in range(40):
        length = world.rng.choice([1, 3, 4, 6]) * CHUNK
        world.add([*DOCUMENT[:length], *prompt(number % 3, 9)], world.rng.randrange(1, 6))
        world.step()
        if number % 4 == 3:
            world.run()
            assert world.scheduler.reset_prefix_cache()
    world.check_all()
    assert world.line.num_loaded > 20
