"""An engine whose actors fail, hang and come back; and its end."""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from raykv.base.deadlines import PROMPT_S
from raykv.base.errors import ClusterError
from raykv.cluster import names
from raykv.cluster.breaker import BreakerState, Pauses
from raykv.cluster.join import leave_ray
from raykv.engine.lines import OWN_PLACE
from raykv.engine.requests import RequestOptions
from raykv.engine.runtime import EngineRuntime
from raykv.protocol.engine import Space
from raykv.protocol.node import NodeDescription
from tests.fixtures.breakers import failures_of
from tests.fixtures.engine.place import EngineAt, PlayedPlace
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until

LONG_S = 10.0
SECONDS = 3.0
"""What "within seconds" is for an engine that ends."""


def die() -> None:
    raise ConnectionError("the actor died\nand much more")


@pytest.fixture
def engine() -> Iterator[EngineAt]:
    with PlayedPlace() as place, EngineAt(place) as made:
        made.session._breakers.pauses = Pauses(0.01, 0.02)
        yield made


def state(engine: EngineAt) -> BreakerState:
    return engine.session._breakers.state_of(names.SCHEDULER)


# The scheduler actor


def test_dead_scheduler_actor_is_logged_once_and_its_return_too(
    engine: EngineAt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    engine.begin()
    engine.scheduler.trouble = die
    engine.ask()
    engine.session.nudge()
    wait_until(
        lambda: failures_of(engine.session._breakers, names.SCHEDULER) > 5,
        LONG_S,
        "it fails and fails",
    )
    engine.scheduler.trouble = lambda: None
    wait_until(lambda: "answers again" in caplog.text, LONG_S, "it is back")
    assert state(engine) is BreakerState.CLOSED
    assert caplog.text.count("the scheduler actor does not answer: ConnectionError") == 1
    assert caplog.text.count("answers again") == 1
    engine.until(lambda: engine.place.tells[-1].breakers.failed > 5, "that is told")
    assert engine.place.tells[-1].breakers.opened == 1


# The line


def test_line_that_broke_is_opened_again_with_all_that_is_there(
    engine: EngineAt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    engine.place.store(key(1))
    engine.begin()
    engine.place.hang_up()
    engine.place.store(key(2))
    engine.until(lambda: engine.view.num_ready == 2, "it hears of the other chunk")
    assert len(engine.place.hellos) == 2
    wait_until(lambda: "there again" in caplog.text, LONG_S, "that is said")
    assert caplog.text.count("no line to the NodeActor") == 1


def test_line_that_broke_is_opened_again_while_ray_does_not_answer() -> None:
    def locate(is_lost: bool) -> NodeDescription:
        if is_lost:
            raise ClusterError("Ray does not answer")
        return place.description()

    with PlayedPlace() as place, EngineAt(place, locate=locate) as engine:
        engine.begin()
        place.hang_up()
        place.store(key(1))
        engine.until(lambda: engine.view.num_ready == 1, "it is there again")


def test_next_life_of_the_node_has_nothing_of_the_last_one(engine: EngineAt) -> None:
    engine.place.store(key(1))
    engine.begin()
    engine.place.__exit__()
    with PlayedPlace(life=8, name=engine.place.name) as later:
        later.store(key(2))
        engine.until(lambda: [*engine.view.loadable] == [key(2)], "it has what the next one has")
        assert engine.view.life_of(0) == 8
        wait_until(lambda: bool(later.tells), LONG_S, "the next one is told of the engine")


def test_engine_goes_to_the_node_where_it_is_found_with_nothing_of_the_last_one() -> None:
    with PlayedPlace("first") as first, PlayedPlace("second", life=3) as second:
        here = [first]

        def locate(is_lost: bool) -> NodeDescription:
            return (here[-1] if is_lost else first).description()

        with EngineAt(first, locate=locate) as engine:
            view = engine.view
            first.store(key(1))
            second.store(key(2))
            engine.begin()
            view.start_request("r", RequestOptions())
            assert view.prepare_store("r", [key(9)]) == [key(9)]
            here.append(second)
            first.__exit__()
            engine.until(lambda: [*view.loadable] == [key(2)], "it has what is there")
            assert view.node_ids == ["second"]
            view.start_request("s", RequestOptions())
            assert view.prepare_store("s", [key(9)]) == [key(9)]


def test_refused_engine_says_why_and_goes_on_trying(
    engine: EngineAt, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    engine.place.refusal = "install the same version on both"
    with pytest.raises(ClusterError, match="install the same version on both"):
        engine.begin()
    wait_until(lambda: len(engine.place.hellos) > 2, LONG_S, "it tries again")
    assert caplog.text.count("install the same version") == 1
    assert not engine.view.life_of(0)
    engine.place.refusal = ""
    engine.until(lambda: engine.view.life_of(0), "it is let in")


def test_node_that_does_not_answer_is_left_alone_for_a_while() -> None:
    with EngineAt(PlayedPlace()) as engine:
        breakers = engine.session.feeds[0].line.breakers
        breakers.pauses = Pauses(LONG_S, LONG_S)
        started = time.monotonic()
        with pytest.raises(ClusterError, match="does not answer"):
            engine.session.attach(0.2)
        engine.session.start()
        engine.session.enter(Space("next"))
        assert time.monotonic() - started < PROMPT_S
        assert engine.view.namespace == "next"
        assert failures_of(breakers, OWN_PLACE) == 1
        started = time.monotonic()
        engine.session.stop(LONG_S)
        assert time.monotonic() - started < SECONDS


# The end


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """Waits until it is set, at the latest by the end of the test."""
    made = threading.Event()
    yield made
    made.set()


def test_session_ends_in_time_while_a_question_hangs(
    engine: EngineAt, hanging: threading.Event
) -> None:
    engine.begin()
    engine.scheduler.trouble = lambda: hanging.wait(LONG_S)
    engine.ask()
    engine.session.nudge()
    wait_until(lambda: engine.scheduler.num_calls > 0, LONG_S, "a question hangs")
    started = time.monotonic()
    engine.session.stop(0.2)
    assert time.monotonic() - started < SECONDS


def test_session_ends_at_once_while_it_leaves_the_scheduler_actor_alone(engine: EngineAt) -> None:
    engine.session._breakers.pauses = Pauses(LONG_S, LONG_S)
    engine.begin()
    engine.scheduler.trouble = die
    engine.ask()
    engine.session.nudge()
    wait_until(lambda: state(engine) is BreakerState.OPEN, LONG_S, "the breaker opens")
    started = time.monotonic()
    engine.session.stop(LONG_S)
    assert time.monotonic() - started < SECONDS
    assert not engine.session._asking.is_alive()


def test_node_sees_that_an_engine_has_ended(engine: EngineAt) -> None:
    engine.session.attach(LONG_S)
    assert engine.place.num_open == 1
    engine.session.stop(LONG_S)
    wait_until(lambda: engine.place.num_open == 0, LONG_S, "the line ends")


@pytest.mark.parametrize("lets_go", [True, False])
def test_ray_is_left_properly_if_it_lets_go_in_time(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch, lets_go: bool
) -> None:
    given_up: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", given_up.append)
    done = threading.Event()

    def shutdown() -> None:
        if not lets_go:
            hanging.wait(LONG_S)
        done.set()

    started = time.monotonic()
    assert leave_ray(shutdown, LONG_S if lets_go else 0.2) is lets_go
    assert time.monotonic() - started < SECONDS
    assert done.is_set() is lets_go
    assert given_up == ([] if lets_go else [ray.shutdown])


EXIT = """
import atexit, time
import ray._private.worker
calls = []
ray._private.worker.disconnect = lambda *_: time.sleep(60)
from raykv.engine.hints import Allowed, Hint, HintBox
from raykv.cluster.join import leave_ray
import ray
assert not leave_ray(ray.shutdown, 0.2)
"""


def test_process_ends_although_ray_does_not_let_go() -> None:
    """Ray's own clean-up at exit would wait as long again."""
    subprocess.run([sys.executable, "-c", EXIT], timeout=30, check=True)


def test_engine_that_ends_asks_ray_for_nothing_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        pytest.fail("Ray would start a cluster of its own")

    for name in ("ask.find_node_actor", "scheduler_actor", "node_actor"):
        monkeypatch.setattr(f"raykv.engine.runtime.{name}", refuse)
    ended = object.__new__(EngineRuntime)
    ended._stopped = threading.Event()
    ended._stopped.set()
    home: Any = None
    for find in (ended._find_actors, lambda: ended._describe_node(home, 0.0)):
        with pytest.raises(ClusterError, match="the engine is shutting down"):
            find()
