"""Loads that do not come reach vLLM's scheduler as failed, in models of one and several KV groups.

vLLM's scheduler, its offloading scheduler and worker, and both sides of RayKV's connector are real.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.kv_cache_interface import KVCacheSpec
from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.request import RequestStatus

from tests.fixtures.vllm import CHUNK, FULL, STATE, WINDOW
from tests.simulation.hook_world import HookWorld
from tests.simulation.test_layered_scheduler import prompt

SEVERAL = (FULL, WINDOW)

ALONE = (WINDOW,)

KINDS = [(FULL,), SEVERAL, ALONE]
NAMES = ["one_group", "several_groups", "window_alone"]

DOCUMENT = prompt(1, 6 * CHUNK + 3)

NUM_LOADED = {(FULL,): 6, SEVERAL: 6 + 2, ALONE: 2}
"""Chunks that the document's second request loads; of the window its own alone."""


def stored(model: Path, kinds: tuple[KVCacheSpec, ...], seed: int = 1) -> HookWorld:
    """The document is in the pool, and not in vLLM's own cache."""
    world = HookWorld(model, seed, num_blocks=80, kinds=kinds)
    world.add(DOCUMENT)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    assert not any(told.failed_recving or told.invalid_block_ids for told in world.told)
    return world


def told_as_failed(world: HookWorld) -> tuple[set[str], set[int]]:
    """Requests, and blocks."""
    requests = [told.failed_recving or set() for told in world.told]
    return set().union(*requests), set().union(*(told.invalid_block_ids for told in world.told))


@pytest.mark.parametrize("kinds", KINDS, ids=NAMES)
def test_document_is_loaded_and_not_told_as_failed_when_all_of_it_comes(
    model: Path, kinds: tuple[KVCacheSpec, ...]
) -> None:
    world = stored(model, kinds)
    world.add(DOCUMENT)
    world.run()
    world.check()
    assert world.line.num_loaded == NUM_LOADED[kinds]
    assert told_as_failed(world) == (set(), set())


@pytest.mark.parametrize("kinds", [SEVERAL, ALONE], ids=["several_groups", "window_alone"])
def test_failed_load_is_told_by_its_request_which_is_computed(
    model: Path, kinds: tuple[KVCacheSpec, ...]
) -> None:
    """Before the blocks that were to be loaded for a window there are none to go on from."""
    world = stored(model, kinds)
    world.line.failing = 1.0
    request_id = world.add(DOCUMENT)
    world.run()
    assert told_as_failed(world) == ({request_id}, set())
    world.check_all()
    assert not world.line.num_loaded


def test_failed_load_of_one_group_is_told_by_its_blocks_and_the_request_is_computed(
    model: Path,
) -> None:
    world = stored(model, (FULL,))
    world.line.failing = 1.0
    world.add(DOCUMENT)
    world.run()
    requests, blocks = told_as_failed(world)
    assert (requests, len(blocks)) == (set(), 6)
    world.check_all()


def test_request_of_several_groups_whose_load_fails_ends_where_vllm_is_to_fail_it(
    model: Path,
) -> None:
    world = stored(model, SEVERAL)
    world.scheduler.recompute_kv_load_failures = False
    world.line.failing = 1.0
    request = world.asked[world.add(DOCUMENT)].request
    world.run()
    assert request.status is RequestStatus.FINISHED_ERROR
    world.check_rest()


@pytest.mark.parametrize("kinds", KINDS, ids=NAMES)
@pytest.mark.parametrize("failing", [0.0, 0.2, 1.0])
def test_pause_that_keeps_requests_ends_although_a_prompt_was_loading(
    model: Path, kinds: tuple[KVCacheSpec, ...], failing: float
) -> None:
    """As vLLM's EngineCore pauses: it steps until no job is left, and resets its cache."""
    for seed in range(4):
        world = stored(model, kinds, seed)
        world.line.failing = failing
        loading = world.asked[world.add(DOCUMENT)].request
        other = world.asked[world.add(prompt(9, 5 * CHUNK), 8)].request
        world.step()
        assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        world.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        world.run()
        assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert world.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        assert {loading.num_computed_tokens, other.num_computed_tokens} == {0}
        assert not world.scheduler._inflight_prefills
        world.scheduler.set_pause_state(PauseState.UNPAUSED)
        world.run()
        world.check_all()


def test_request_with_the_id_of_an_earlier_one_is_computed_stored_and_loaded(model: Path) -> None:
    """Its client has got the earlier one's answer, which nobody below has heard of, or which still
    has stores under way.
    """
    for seed in range(8):
        world = HookWorld(model, seed, num_blocks=80)
        name = "again"
        for number in (1, 2, 1, 3, 2):
            world.check()
            world.asked.pop(name, None)
            world._add(name, prompt(number, 4 * CHUNK + 3), 3)
            while not world.has_ended(name):
                world.step()
            world.scheduler.reset_prefix_cache()
        asked = world.asked[name]
        world.run()
        world.check()
        world.check_rest()
        assert len(asked.request.block_hashes) * 3 == len(world.view.loadable)
        assert world.line.num_loaded >= 4


def test_reset_leaves_blocks_alone_that_are_still_loaded_into(model: Path) -> None:
    """vLLM gives the reset up, and whoever asked for it hears of that."""
    for seed in range(20):
        world = stored(model, (FULL,), seed)
        loading = world.asked[world.add(DOCUMENT)].request
        world.step()
        if world.line.waiting:
            break
    else:
        raise AssertionError("no load is under way")
    with pytest.raises(RuntimeError, match="waiting for remote KV transfer"):
        world.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert loading.num_computed_tokens == 6 * CHUNK
    world.run()
    world.check_all()
    assert world.line.num_loaded == NUM_LOADED[(FULL,)]


@pytest.mark.parametrize("kinds", KINDS, ids=NAMES)
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_right_whichever_chunks_do_not_come(
    model: Path, kinds: tuple[KVCacheSpec, ...], seed: int
) -> None:
    world = stored(model, kinds, seed)
    world.line.failing = 0.2
    for number in range(12):
        length = world.rng.randrange(2 * CHUNK, len(DOCUMENT))
        world.add([*DOCUMENT[:length], *prompt(number, 9)], 4)
        world.run()
        world.scheduler.reset_prefix_cache()
    world.check_all()
    assert world.line.num_loaded
    assert told_as_failed(world)[1 if kinds == (FULL,) else 0]


LONG = prompt(2, 12 * CHUNK + 3)


def evict_unnoticed(world: HookWorld, tokens: list[int], at: int, group: int = 0) -> None:
    """A chunk goes from the pool between its lookup and its load."""
    (request,) = (
        each.request for each in world.asked.values() if each.request.prompt_token_ids == tokens
    )
    world.place.evict(make_offload_key(request.block_hashes[at], group))


@pytest.mark.parametrize("kinds", [*KINDS[:2], (FULL, STATE)], ids=[*NAMES[:2], "states"])
@pytest.mark.parametrize("lost", [0, 1, 11])
def test_request_whose_load_failed_is_admitted_where_it_fits_once_and_not_twice(
    model: Path, kinds: tuple[KVCacheSpec, ...], lost: int
) -> None:
    world = HookWorld(model, 1, num_blocks=30, kinds=kinds)
    world.add(LONG)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    evict_unnoticed(world, LONG, lost)
    world.add([*LONG, 5])
    world.add(DOCUMENT)
    world.run()
    world.check_all()
