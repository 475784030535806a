"""Models with recurrent states beside attention, or alone: what is found again, and right bytes.

The kinds are as vLLM makes them, whose scheduler and KV cache manager are real; vLLM's CPU build
lacks the kernels of most of these models (`tests/fixtures/zoo.py`). A state can be had where a step
ends, and Mamba 2 keeps one more: of the last block that is full before a prompt's end.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from tests.fixtures.effort import seeds
from tests.fixtures.vllm import CHUNK, FULL, STATE, STATE_INSIDE
from tests.simulation.hook_world import HookWorld
from tests.simulation.test_layered_scheduler import prompt

KINDS = {
    "qwen3-next": (FULL, STATE),
    "kimi-linear, many layers": (FULL, STATE, STATE, STATE),
    "granite 4, jamba, nemotron-h": (FULL, STATE_INSIDE),
    "linear attention alone": (STATE,),
    "mamba 2": (STATE_INSIDE,),
}

DOCUMENT = prompt(1, 14 * CHUNK + 3)


def quiet_world(model: Path, name: str, share: float) -> HookWorld:
    """vLLM would keep the states at prompts' ends alone."""
    return HookWorld(model, 1, num_blocks=160, kinds=KINDS[name], retention_interval=0, share=share)


def num_loaded(world: HookWorld, tokens: list[int]) -> int:
    """Tokens that a request loads; the engine has none of them."""
    assert world.scheduler.reset_prefix_cache()
    request_id = world.add(tokens)
    world.run()
    world.check_all()
    records = world.view.accounts.take_records()
    (loaded,) = [each.loaded for each in records if each.request_id == request_id]
    return loaded


def question(number: int, length: int) -> list[int]:
    """About a beginning of the document."""
    return [*DOCUMENT[:length], *prompt(20 + number, 30)]


@pytest.mark.parametrize("name", KINDS)
def test_document_is_found_up_to_its_last_chunk(model: Path, name: str) -> None:
    world = quiet_world(model, name, share=0.25)
    assert [num_loaded(world, DOCUMENT) for _ in range(2)] == [0, 14 * CHUNK]
    # Of attention all chunks, of each state the last.
    full = 14 * (FULL in KINDS[name])
    assert world.line.num_loaded == full + len(KINDS[name]) - (FULL in KINDS[name])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("chunks", "first"), [(6, 4), (8, 8), (11, 10)])
def test_question_finds_a_state_before_it_and_the_next_one_the_state_where_prompts_part(
    model: Path, name: str, chunks: int, first: int
) -> None:
    """States of a document are where steps end: behind 4 and 8 chunks, and 10, before its end."""
    world = quiet_world(model, name, share=0.25)
    assert num_loaded(world, DOCUMENT) == 0
    found = [num_loaded(world, question(number, chunks * CHUNK + 5)) for number in range(3)]
    # Without attention nobody knows where prompts part: a step of the question may end there.
    then = chunks if FULL in KINDS[name] or chunks == 6 else first
    assert found == [first * CHUNK, then * CHUNK, then * CHUNK]


@pytest.mark.parametrize("name", KINDS)
def test_without_window_share_a_question_finds_what_vllm_keeps(model: Path, name: str) -> None:
    world = quiet_world(model, name, share=0.0)
    assert num_loaded(world, DOCUMENT) == 0
    assert [num_loaded(world, question(number, 8 * CHUNK + 5)) for number in range(3)] == [0, 0, 0]
    assert num_loaded(world, DOCUMENT) == 14 * CHUNK


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("seed", seeds(1, range(20)))
def test_answers_and_pool_are_right_whatever_is_evicted_or_does_not_come(
    model: Path, name: str, share: float, seed: int
) -> None:
    kinds = KINDS[name]
    world = HookWorld(
        model,
        seed,
        num_blocks=60 if FULL in kinds else 24,
        kinds=kinds,
        retention_interval=(0, None, 4 * CHUNK)[seed % 3],
        share=share,
    )
    world.evicting, world.line.failing = 0.01, 0.1
    for number in range(40):
        length = world.rng.randrange(CHUNK, len(DOCUMENT))
        world.add(question(number % 3, length), world.rng.randrange(1, 6))
        world.step()
        if number % 4 == 3:
            world.run()
            world.check_pool()
            assert world.scheduler.reset_prefix_cache()
    world.check_all()
    assert world.line.num_loaded or not share
