"""Prompts that vLLM goes on with while they are loaded: whatever does not come, answers are right.

vLLM's scheduler, its prefix cache and RayKV's connector are real. What each precaution is for is
shown without it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from raykv.base import guard
from raykv.engine.layered import LayeredLoads
from raykv.vllm import layered
from raykv.vllm.internals import scheduling
from raykv.vllm.layered import LayeredScheduling, LoadScheduling
from tests.fixtures.effort import seeds
from tests.fixtures.vllm import CHUNK
from tests.simulation.layered_world import AheadWorld, World, WrongAnswerError

SEEDS = range(60)


def prompt(number: int, length: int) -> list[int]:
    return [3 + (number * 7919 + at * at) % 59 for at in range(length)]


def stored(world: World, *prompts: list[int]) -> World:
    """These prompts are in the pool, and nothing is in vLLM's own cache."""
    for tokens in prompts:
        world.add(tokens)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    return world


def play(world: World) -> None:
    """Requests of few documents come, are taken back, and lose what they load."""
    rng = world.rng
    world.aborting = 0.05
    documents = [prompt(number, 150) for number in range(3)]
    for _ in range(60):
        if rng.random() < 0.4:
            tokens = documents[rng.randrange(3)][: rng.randrange(20, 150)]
            tail = prompt(rng.randrange(10, 13), rng.choice([0, 0, 5, 40, 100]))
            world.add(tokens + tail, rng.choice([1, 1, 3, 30]))
        if rng.random() < 0.05:
            world.scheduler.reset_prefix_cache()
        if isinstance(world, AheadWorld) and rng.random() < 0.04:
            world.reset_running()
        if world.scheduler.has_requests():
            world.step()
    world.aborting = 0.0
    world.run()
    world.check()


AS_RUN = [(False, False), (False, True), (True, False), (True, True)]
"""Whether steps are scheduled ahead, and whether it is vLLM's second model runner."""


def play_all(model: Path, as_run: tuple[bool, bool] | None = None) -> None:
    """With the seeds that lose something."""
    for seed in SEEDS:
        if seed % 4:
            play_seed(model, seed, as_run)


def play_seed(model: Path, seed: int, as_run: tuple[bool, bool] | None = None) -> World:
    """In the end all prompts come again, and what was stored is loaded.

    `as_run` None: the worker sees what the scheduler knows.
    """
    failing, num_blocks = (0.0, 0.2, 0.5, 1.0)[seed % 4], 40 + seed % 40
    world = World(model, seed, failing, num_blocks)
    if as_run is not None:
        is_async, is_second = as_run
        world = AheadWorld(
            model, seed, failing, is_async=is_async, is_second=is_second, num_blocks=num_blocks
        )
    play(world)
    world.failing = 0.0
    assert world.scheduler.reset_prefix_cache()
    for asked in list(world.asked.values()):
        world.add(asked.request.prompt_token_ids)
    world.run()
    world.check()
    if isinstance(world, AheadWorld):
        world.check_rest()
    return world


@pytest.mark.parametrize("seed", seeds(20, SEEDS))
def test_answers_are_right_whatever_does_not_come(model: Path, seed: int) -> None:
    assert play_seed(model, seed).num_loaded


@pytest.mark.parametrize("as_run", AS_RUN)
@pytest.mark.parametrize("seed", seeds(8, SEEDS))
def test_answers_of_engines_as_users_run_them_are_right_whatever_does_not_come(
    model: Path, seed: int, as_run: tuple[bool, bool]
) -> None:
    assert play_seed(model, seed, as_run).num_loaded


def test_whole_prompt_is_loaded_at_once_but_for_its_last_tokens(model: Path) -> None:
    tokens = prompt(1, 8 * CHUNK)
    world = stored(World(model, 1, 0.0), tokens)
    world.add(tokens, 1)
    world.step()
    assert [len(asked.answer) for asked in world.asked.values()] == [3, 1]
    world.run()
    world.check()
    assert world.num_loaded == 8


def test_tail_that_is_computed_beside_a_load_is_stored_one_step_later(model: Path) -> None:
    prefix = prompt(1, 6 * CHUNK)
    longer = prefix + prompt(2, 10 * CHUNK)
    world = stored(World(model, 1, 0.0), prefix)
    before = world.num_stored
    world.add(longer, 1)
    world.step()
    assert not world._stores
    world.run()
    assert world.num_loaded == 6
    assert world.num_stored == before + 10
    assert world.scheduler.reset_prefix_cache()
    world.add(longer, 1)
    world.run()
    assert world.num_loaded == 6 + 16
    world.check()


def test_tail_of_a_request_that_ends_with_the_step_of_its_load_is_stored(model: Path) -> None:
    prefix = prompt(1, 6 * CHUNK)
    world = stored(World(model, 1, 0.0), prefix)
    before = world.num_stored
    world.add(prefix + prompt(2, 2 * CHUNK), 1)
    world.run()
    assert world.num_stored == before + 2
    world.check()


def test_request_that_would_share_what_is_being_loaded_waits_for_one_step(model: Path) -> None:
    tokens = prompt(1, 8 * CHUNK)
    world = stored(World(model, 1, 0.0), tokens)
    first, second = world.add(tokens, 1), world.add(tokens + [5] * 9, 1)
    other = world.add(prompt(2, CHUNK), 1)
    world.step()
    answers = {name: len(world.asked[name].answer) for name in (first, second, other)}
    assert answers == {first: 1, second: 0, other: 1}
    world.step()
    assert len(world.asked[second].answer) == 1
    world.run()
    assert world.num_loaded == 8
    world.check()


def test_request_taken_back_while_its_load_fails_leaves_nothing_behind(model: Path) -> None:
    tokens = prompt(1, 4 * CHUNK)
    longer = tokens + prompt(2, 3 * CHUNK)
    world = stored(World(model, 1, 0.0), tokens)
    world.failing = 1.0
    gone = world.add(longer)
    world.step(gone)
    for _ in range(2):
        world.add(longer)
        world.run()
    world.failing = 0.0
    world.scheduler.reset_prefix_cache()
    world.add(longer)
    world.run()
    world.check()


def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayeredLoads, "must_wait", lambda *_: False)


def without_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCacheManager, "evict_blocks", lambda *_: None)


def with_eviction_of_the_invalid_only(monkeypatch: pytest.MonkeyPatch) -> None:
    end_step = LayeredLoads.end_step

    def end(loads: LayeredLoads, step: int, invalid: set[int]) -> set[int]:
        return end_step(loads, step, invalid) & invalid

    monkeypatch.setattr(LayeredLoads, "end_step", end)
    monkeypatch.setattr(
        "raykv.engine.layered.spoiled_blocks", lambda blocks, invalid: invalid & {*blocks}
    )


def with_stores_after_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    end_step = LayeredLoads.end_step

    def end(loads: LayeredLoads, step: int, invalid: set[int]) -> set[int]:
        lost = end_step(loads, step, invalid)
        loads.spoiled.clear()
        return lost

    monkeypatch.setattr(LayeredLoads, "end_step", end)


@pytest.mark.parametrize(
    "harm",
    [
        without_waiting,
        without_eviction,
        with_eviction_of_the_invalid_only,
        with_stores_after_failures,
    ],
)
def test_answers_are_wrong_without_one_of_the_precautions(
    model: Path, monkeypatch: pytest.MonkeyPatch, harm: Any
) -> None:
    harm(monkeypatch)
    with pytest.raises(WrongAnswerError):
        play_all(model)


def with_vllms_own_recovery(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayeredScheduling, "_compute_anew", lambda *_: set())


def without_dropping_what_is_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def take_back(scheduler: Scheduler, request_ids: Collection[str]) -> None:
        scheduling.take_back(scheduler, request_ids)
        for request_id in request_ids & scheduler.requests.keys():
            scheduler.requests[request_id].drop_stale_output = False

    monkeypatch.setattr(layered, "take_back", take_back)


def without_telling_tokens_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(set[str]):
        def discard(self, _name: object) -> None:
            pass

    start = AheadWorld.__init__

    def started(world: AheadWorld, *args: Any, **kwargs: Any) -> None:
        start(world, *args, **kwargs)
        world.scheduler.prev_step_scheduled_req_ids = Kept()

    monkeypatch.setattr(AheadWorld, "__init__", started)


@pytest.mark.parametrize(
    ("as_run", "harm"),
    [
        # What vLLM does itself: only its first model runner, without steps ahead, gives right ones.
        *((as_run, with_vllms_own_recovery) for as_run in AS_RUN[1:]),
        *((as_run, without_dropping_what_is_under_way) for as_run in AS_RUN),
        *((as_run, without_telling_tokens_again) for as_run in AS_RUN[::2]),
    ],
)
def test_answers_of_engines_as_users_run_them_are_wrong_without_one_of_the_precautions(
    model: Path, monkeypatch: pytest.MonkeyPatch, as_run: tuple[bool, bool], harm: Any
) -> None:
    before = guard.failures.copy()
    harm(monkeypatch)
    with pytest.raises(AssertionError, match=r"^r\d+|^the engine does not come to an end"):
        play_all(model, as_run)
    # vLLM's connector notices some of it.
    guard.failures.clear()
    guard.failures.update(before)


def play_tail_ahead(model: Path, *, is_second: bool) -> None:
    """A request is taken back when its load's step is under way, and the one behind it, which
    computes the prompt's end. The load fails, and the prompt comes again, twice.
    """
    tokens = prompt(1, 4 * CHUNK)
    longer = tokens + prompt(2, 8 * CHUNK)
    world = stored(AheadWorld(model, 1, 0.0, is_async=True, is_second=is_second), tokens)
    world.failing = 1.0
    gone = world.add(longer)
    world.step()
    world.step(gone)
    assert world.num_failed == 4
    world.failing = 0.0
    # The first one computes it, and the second one finds it in vLLM's cache.
    for _ in range(2):
        world.run()
        world.add([*longer, 5])
    world.run()
    world.check()


@pytest.mark.parametrize("is_second", [False, True])
def test_what_a_step_ahead_computed_leaves_the_cache_with_what_did_not_come(
    model: Path, monkeypatch: pytest.MonkeyPatch, is_second: bool
) -> None:
    play_tail_ahead(model, is_second=is_second)
    monkeypatch.setattr(LayeredLoads, "grow", lambda *_: None)
    with pytest.raises(WrongAnswerError):
        play_tail_ahead(model, is_second=is_second)


def test_vllms_own_recovery_is_right_on_its_first_model_runner_without_steps_ahead(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_vllms_own_recovery(monkeypatch)
    play_all(model, AS_RUN[0])


def within_the_step(world: World) -> World:
    """It loads as vLLM 0.33 does with `sync_load_budget_bytes`."""
    connector: Any = world.connector
    connector._loading = LoadScheduling()
    connector._kv_cache_config = world.scheduler.kv_cache_config
    scheduler = connector.connector_scheduler
    fields = {"sync_load_budget_bytes": 1 << 20, "kv_bytes_per_token": 1}
    if not fields.keys() <= {*scheduler.config._fields}:
        pytest.skip("this vLLM has no loads within the step")
    scheduler.config = scheduler.config._replace(**fields)
    return world


@pytest.mark.parametrize("failing", [0.0, 1.0])
def test_vllms_loads_within_the_step_are_refused_for_what_they_leave_behind_when_they_fail(
    model: Path, failing: float
) -> None:
    """Where this fails, vLLM has mended it: then `sync_load_budget_bytes` can be allowed."""
    tokens = prompt(1, 4 * CHUNK)
    longer = tokens + prompt(2, 3 * CHUNK)
    world = stored(within_the_step(World(model, 1, 0.0)), tokens)
    world.failing = failing
    gone = world.add(longer)
    world.step(gone)
    assert world.num_loaded == 4
    world.failing = 0.0
    world.add([*longer, 5])
    world.run()
    with pytest.raises(WrongAnswerError) if failing else nullcontext():
        world.check()
    # It is in vLLM's own cache: the pool has what was right.
    assert world.num_loaded == 4


@pytest.mark.expects_failures
def test_nothing_is_loaded_beside_a_store_without_the_refusal(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LayeredLoads, "held", frozenset())
    before = guard.failures.copy()
    world = stored(World(model, 1, 0.0), prompt(1, 6 * CHUNK))
    world.add(prompt(1, 6 * CHUNK) + prompt(2, 4 * CHUNK), 1)
    world.run()
    world.check()
    assert guard.failures - before == {"RayKVConnector.build_connector_meta": 1}
    monkeypatch.undo()
