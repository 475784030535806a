"""An exception at any point of any hook: right tokens, no request without end, an engine at rest.

vLLM's scheduler, its offloading scheduler and worker, and both sides of RayKV's connector are real.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    DirectionalTransferStats,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from raykv.base.ids import Direction
from raykv.engine.view import EngineView
from raykv.vllm.internals.names import vllm_version
from tests.fixtures.vllm import FULL, STATE
from tests.simulation.hook_world import (
    SCHEDULER_HOOKS,
    WORKER_HOOKS,
    Faults,
    HookWorld,
    PlantedError,
    Point,
)
from tests.simulation.test_failed_loads import SEVERAL
from tests.simulation.test_layered_scheduler import prompt

UNCALLED = {"request_finished", "wait_for_layer_load"}
"""By this engine: the first belongs to connectors of one KV group, and the second to loads that
come layer by layer."""

Kinds = Sequence[KVCacheSpec]

KINDS: list[Kinds] = [(FULL,), SEVERAL, (FULL, STATE)]
NAMES = ["one_group", "window", "states"]

DOCUMENTS = [prompt(number, 100) for number in range(4)]


@pytest.fixture(autouse=True)
def time_is_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a fast machine as on a slow one, what is due after a time is due after as many steps.

    Tests elsewhere hand over the time; here vLLM calls the hooks, which read the clock themselves.
    """
    monkeypatch.setattr(HookWorld, "now", 0.0)
    monkeypatch.setattr(time, "monotonic", lambda: HookWorld.now)


def play(world: HookWorld) -> None:
    """Requests of few documents come, are taken back, preempted, and load what others stored."""
    rng, world.evicting = world.rng, 0.01
    for document in DOCUMENTS:
        world.add(document)
    world.run()
    world.scheduler.reset_prefix_cache()
    world.aborting = 0.03
    for at in range(40):
        if rng.random() < 0.4:
            document = rng.choice(DOCUMENTS)
            world.add([*document[: rng.randrange(20, 100)], *prompt(at, 20)], rng.randrange(1, 30))
        if rng.random() < 0.1:
            world.scheduler.reset_prefix_cache()
        if at == 25:
            world.connector.reset_cache()
        world.step()
    world.aborting = 0.0
    world.run()


def points_passed(model: Path, seed: int, kinds: Kinds) -> dict[Point, str]:
    faults = Faults()
    world = HookWorld(model, seed, faults, kinds=kinds)
    play(world)
    world.check_all()
    assert world.line.num_loaded
    return faults.seen


@dataclass
class Outcome:
    """What became of an engine with an exception at a point; `wrong` is empty where all is well."""

    point: Point
    hook: str
    keeps_on: bool
    wrong: str


def outcome(
    model: Path, seed: int, kinds: Kinds, point: Point, hook: str, *, keeps_on: bool
) -> Outcome:
    faults = Faults(point, keeps_on)
    world = HookWorld(model, seed, faults, kinds=kinds)
    wrong = ""
    try:
        play(world)
        world.check()
        assert faults.num_planted, "it did not come to the exception"
        faults.point = None
        # One state that is evicted costs a whole prompt.
        world.evicting = 0.0
        before = world.line.num_loaded
        for _ in range(3):
            world.scheduler.reset_prefix_cache()
            world.add(DOCUMENTS[0], 3)
            world.run()
        world.check_all()
        # Where the line itself fails, there is nothing left to load through.
        assert world.line.num_loaded > before or (keeps_on and world.line.is_closed), "no loads"
    except (AssertionError, PlantedError) as error:
        wrong = f"{type(error).__name__}: {error}"
    return Outcome(point, hook, keeps_on, wrong)


PARTS = 4
"""Of all points, so that each part is played well within a test's time limit."""


def play_all(
    model: Path, seed: int, kinds: Kinds, *, every: int, part: int, parts: int
) -> list[Outcome]:
    """With an exception at one point in `every`, once and each time; one part of them all."""
    points = sorted(points_passed(model, seed, kinds).items())[seed % every :: every]
    return [
        outcome(model, seed, kinds, point, hook, keeps_on=keeps_on)
        for point, hook in points[part::parts]
        for keeps_on in (False, True)
    ]


def wrong_ones(outcomes: list[Outcome]) -> str:
    """A line for each."""
    return "\n".join(map(str, (each for each in outcomes if each.wrong)))


@pytest.mark.parametrize("kinds", KINDS, ids=NAMES)
def test_engine_without_exceptions_passes_every_hook(model: Path, kinds: Kinds) -> None:
    assert (
        set(points_passed(model, 1, kinds).values()) >= {*SCHEDULER_HOOKS, *WORKER_HOOKS} - UNCALLED
    )


def cases() -> Iterator[Any]:
    """Some points in parts of some seconds; `make test-extended` has many more."""
    for kinds, name, few, many in zip(KINDS, NAMES, (36, 72, 72), (1, 4, 4), strict=True):
        for part in range(2):
            yield pytest.param(kinds, few, 1, part, 2, id=f"{name}-{part}")
        for seed, part in product((1, 2), range(PARTS)):
            at = f"{name}-all-{seed}-{part}"
            yield pytest.param(kinds, many, seed, part, PARTS, marks=pytest.mark.extended, id=at)


@pytest.mark.expects_failures
@pytest.mark.parametrize(("kinds", "every", "seed", "part", "parts"), [*cases()])
def test_exception_in_a_hook_leaves_right_tokens_and_an_engine_that_comes_to_rest(
    model: Path, kinds: Kinds, every: int, seed: int, part: int, parts: int
) -> None:
    outcomes = play_all(model, seed, kinds, every=every, part=part, parts=parts)
    assert len(outcomes) > 2000 // every // parts
    assert not wrong_ones(outcomes)


def failing(method: Callable[..., Any], *, when: Callable[..., bool]) -> Callable[..., Any]:
    """The method, but with an exception before it where `when` says so of its arguments."""

    def call(*args: Any, **more: Any) -> Any:
        if when(*args):
            raise PlantedError
        return method(*args, **more)

    return call


@pytest.fixture
def busy(model: Path) -> HookWorld:
    """The documents are in the pool, and nothing is in vLLM's own cache."""
    world = HookWorld(model, 1, Faults(point=("nowhere", 0)))
    for document in DOCUMENTS:
        world.add(document)
    world.run()
    assert world.scheduler.reset_prefix_cache()
    return world


@pytest.mark.expects_failures
def test_request_whose_load_can_not_be_made_up_is_computed_in_a_busy_engine(
    busy: HookWorld,
) -> None:
    vllm = busy.connector.scheduler
    bad = busy.add(DOCUMENTS[0], 5)
    vllm.update_state_after_alloc = failing(
        vllm.update_state_after_alloc, when=lambda request, *_: request.request_id == bad
    )
    for number in range(50):
        busy.add([*DOCUMENTS[1][:48], *prompt(number, 10)], 2)
        busy.step()
    assert busy.asked[bad].request.is_finished()
    busy.run()
    busy.check()
    assert busy.line.num_loaded


@pytest.mark.expects_failures
def test_loads_of_others_go_out_while_one_request_has_every_step_fail(busy: HookWorld) -> None:
    vllm = busy.connector.scheduler
    bad = busy.add(prompt(99, 20), 60)
    busy.step()
    vllm._build_store_jobs = failing(
        vllm._build_store_jobs, when=lambda output: bad in output.num_scheduled_tokens
    )
    others = [busy.add(document, 3) for document in DOCUMENTS]
    while not all(busy.asked[each].request.is_finished() for each in others):
        assert not busy.asked[bad].request.is_finished()
        busy.step()
    assert busy.line.num_loaded >= 4
    busy.run()
    busy.check_all()


@pytest.mark.expects_failures
@pytest.mark.parametrize("kinds", KINDS, ids=NAMES)
def test_load_whose_result_is_not_understood_counts_as_failed(
    model: Path, monkeypatch: pytest.MonkeyPatch, kinds: Kinds
) -> None:
    world = HookWorld(model, 1, kinds=kinds)
    world.add(DOCUMENTS[0])
    world.run()
    assert world.scheduler.reset_prefix_cache()
    world.line.failing = 1.0
    record = failing(DirectionalTransferStats.record, when=lambda *_: True)
    monkeypatch.setattr(DirectionalTransferStats, "record", record)
    world.add(DOCUMENTS[0])
    world.run()
    world.check_all()
    assert not world.line.num_loaded


@pytest.mark.expects_failures
def test_reset_that_did_not_work_is_not_called_done(
    busy: HookWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineView, "reset", failing(EngineView.reset, when=lambda *_: True))
    assert busy.connector.reset_cache() is False
    monkeypatch.undo()
    assert busy.connector.reset_cache() is True
    assert not busy.view.loadable


def step_until(world: HookWorld, *, is_store: bool) -> None:
    """Until the line has a job of that kind."""
    wanted = Direction.STORE if is_store else Direction.LOAD
    for _ in range(50):
        if any(job.direction is wanted for job in world.line.waiting.values()):
            return
        world.step()
    raise AssertionError("no such job")


@pytest.mark.parametrize("is_store", [False, True], ids=["loads", "stores"])
def test_reset_while_the_node_actor_is_dead_is_over_when_its_jobs_have_failed(
    busy: HookWorld, monkeypatch: pytest.MonkeyPatch, is_store: bool
) -> None:
    flushed: list[int] = []
    manager = type(busy.manager)
    monkeypatch.setattr(
        manager, "on_reset_flushed", lambda _: flushed.append(busy.num_steps), raising=False
    )
    for number, document in enumerate(DOCUMENTS):
        busy.add([*document[:80], *prompt(10 + number, 40)], 10)
    step_until(busy, is_store=is_store)
    busy.line.node_life = 0
    reset_at = busy.num_steps
    assert busy.connector.reset_cache() is True
    has_fence = bool(busy.connector._tables.fence)
    assert busy.connector.has_pending_push_work() is has_fence
    busy.run()
    while busy.connector.has_pending_push_work():
        busy.step()
    # vLLM 0.32 does not wait for such jobs.
    assert has_fence is (vllm_version() >= "0.33")
    assert len(flushed) == has_fence
    assert not flushed or flushed[0] > reset_at
    assert not busy.connector._tables.fence
    busy.check_all()
    assert not busy.view.loadable


def test_reset_works_right_after_another_one_with_stores_under_way(busy: HookWorld) -> None:
    busy.add(prompt(7, 60), 10)
    while not any(job.is_store for job in busy.connector.scheduler._jobs.values()):
        busy.step()
    assert [busy.connector.reset_cache() for _ in range(2)] == [True, True]
    busy.run()
    busy.check()
