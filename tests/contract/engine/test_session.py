"""An engine whose actors fail, hang and come back; and its end."""

from __future__ import annotations

import atexit
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray

from raykv.base.deadlines import PROMPT_S
from raykv.base.errors import ClusterError
from raykv.base.settings import Settings
from raykv.cluster import names
from raykv.cluster.breaker import BreakerState, Pauses
from raykv.cluster.join import leave_ray
from raykv.engine.lines import OWN_PLACE
from raykv.engine.requests import RequestOptions
from raykv.engine.runtime import EngineRuntime
from raykv.engine.session import Session
from raykv.engine.view import EngineView
from raykv.protocol.engine import Space
from raykv.protocol.node import NodeDescription
from tests.fixtures.breakers import failures_of
from tests.fixtures.engine.place import PlayedPlace, session_at
from tests.fixtures.engine.scheduler import PlayedScheduler
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until

LONG_S = 10.0
SECONDS = 3.0
"""What "within seconds" is for an engine that ends."""


def die() -> None:
    raise ConnectionError("the actor died\nand much more")


@pytest.fixture
def scheduler() -> PlayedScheduler:
    return PlayedScheduler()


@pytest.fixture
def place() -> Iterator[PlayedPlace]:
    with PlayedPlace() as made:
        yield made


@pytest.fixture
def view() -> EngineView:
    return EngineView(Settings(request_deadline_s=5.0))


@pytest.fixture
def session(place: PlayedPlace, scheduler: PlayedScheduler, view: EngineView) -> Iterator[Session]:
    made = session_at(place, scheduler, view)
    made._breakers.pauses = Pauses(0.01, 0.02)
    yield made
    scheduler.trouble = lambda: None
    made.stop(LONG_S)


def drained(session: Session, is_so: Callable[[], object], what: str) -> None:
    """The engine goes on from step to step until something is so."""

    def step() -> bool:
        session.drain()
        session.nudge()
        return bool(is_so())

    wait_until(step, LONG_S, what)


def asks(view: EngineView) -> None:
    """A request wants to know of a chunk."""
    view.remote.has_peers = True
    view.start_request("r", RequestOptions())
    view.ask("r", [key(1)])


def state(session: Session) -> BreakerState:
    return session._breakers.state_of(names.SCHEDULER)


# The scheduler actor


def test_dead_scheduler_actor_is_logged_once_and_its_return_too(
    session: Session,
    scheduler: PlayedScheduler,
    place: PlayedPlace,
    view: EngineView,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    session.attach(LONG_S)
    session.start()
    scheduler.trouble = die
    asks(view)
    session.nudge()
    wait_until(
        lambda: failures_of(session._breakers, names.SCHEDULER) > 5, LONG_S, "it fails and fails"
    )
    scheduler.trouble = lambda: None
    wait_until(lambda: state(session) is BreakerState.CLOSED, LONG_S, "it is back")
    assert caplog.text.count("the scheduler actor does not answer: ConnectionError") == 1
    assert caplog.text.count("answers again") == 1
    drained(session, lambda: place.tells[-1].breakers.failed > 5, "that is told")
    assert place.tells[-1].breakers.opened == 1


# The line


def test_line_that_broke_is_opened_again_with_all_that_is_there(
    session: Session, place: PlayedPlace, view: EngineView, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    place.store(key(1))
    session.attach(LONG_S)
    session.start()
    place.hang_up()
    place.store(key(2))
    drained(session, lambda: view.num_ready == 2, "it hears of the other chunk")
    assert len(place.hellos) == 2
    wait_until(lambda: "there again" in caplog.text, LONG_S, "that is said")
    assert caplog.text.count("no line to the NodeActor") == 1


def test_line_that_broke_is_opened_again_while_ray_does_not_answer(
    place: PlayedPlace, scheduler: PlayedScheduler, view: EngineView
) -> None:
    def locate(is_lost: bool) -> NodeDescription:
        if is_lost:
            raise ClusterError("Ray does not answer")
        return place.description()

    session = session_at(place, scheduler, view, locate=locate)
    try:
        session.attach(LONG_S)
        session.start()
        place.hang_up()
        place.store(key(1))
        drained(session, lambda: view.num_ready == 1, "it is there again")
    finally:
        session.stop(LONG_S)


def test_next_life_of_the_node_has_nothing_of_the_last_one(
    session: Session, place: PlayedPlace, view: EngineView
) -> None:
    place.store(key(1))
    session.attach(LONG_S)
    session.start()
    place.__exit__()
    with PlayedPlace(life=8, name=place.name) as later:
        later.store(key(2))
        drained(session, lambda: [*view.loadable] == [key(2)], "it has what the next one has")
        assert view.life_of(0) == 8
        wait_until(lambda: bool(later.tells), LONG_S, "the next one is told of the engine")


def test_engine_goes_to_the_node_where_it_is_found_with_nothing_of_the_last_one(
    scheduler: PlayedScheduler, view: EngineView
) -> None:
    with PlayedPlace("first") as first, PlayedPlace("second", life=3) as second:
        second.store(key(2))
        here = [first]

        def locate(is_lost: bool) -> NodeDescription:
            return (here[-1] if is_lost else first).description()

        session = session_at(first, scheduler, view, locate=locate)
        try:
            first.store(key(1))
            session.attach(LONG_S)
            session.start()
            view.start_request("r", RequestOptions())
            assert view.prepare_store("r", [key(9)]) == [key(9)]
            here.append(second)
            first.__exit__()
            drained(session, lambda: [*view.loadable] == [key(2)], "it has what is there")
            assert view.node_ids == ["second"]
            view.start_request("s", RequestOptions())
            assert view.prepare_store("s", [key(9)]) == [key(9)]
        finally:
            session.stop(LONG_S)


def test_refused_engine_says_why_and_goes_on_trying(
    session: Session, place: PlayedPlace, view: EngineView, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    place.refusal = "install the same version on both"
    with pytest.raises(ClusterError, match="install the same version on both"):
        session.attach(LONG_S)
    session.start()
    wait_until(lambda: len(place.hellos) > 2, LONG_S, "it tries again")
    assert caplog.text.count("install the same version") == 1
    assert not view.life_of(0)
    place.refusal = ""
    drained(session, lambda: view.life_of(0), "it is let in")


def test_node_that_does_not_answer_is_left_alone_for_a_while(
    scheduler: PlayedScheduler, view: EngineView
) -> None:
    session = session_at(PlayedPlace(), scheduler, view)
    session._line.breakers.pauses = Pauses(LONG_S, LONG_S)
    try:
        started = time.monotonic()
        with pytest.raises(ClusterError, match="does not answer"):
            session.attach(0.2)
        session.start()
        session.enter(Space("next"))
        assert time.monotonic() - started < PROMPT_S
        assert view.namespace == "next"
        assert failures_of(session._line.breakers, OWN_PLACE) == 1
    finally:
        started = time.monotonic()
        session.stop(LONG_S)
        assert time.monotonic() - started < SECONDS


# The end


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """Waits until it is set, at the latest by the end of the test."""
    made = threading.Event()
    yield made
    made.set()


def test_session_ends_in_time_while_a_question_hangs(
    session: Session, scheduler: PlayedScheduler, view: EngineView, hanging: threading.Event
) -> None:
    session.attach(LONG_S)
    session.start()
    scheduler.trouble = lambda: hanging.wait(LONG_S)
    asks(view)
    session.nudge()
    wait_until(lambda: scheduler.num_calls > 0, LONG_S, "a question hangs")
    started = time.monotonic()
    session.stop(0.2)
    assert time.monotonic() - started < SECONDS


def test_session_ends_at_once_while_it_leaves_the_scheduler_actor_alone(
    session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    session._breakers.pauses = Pauses(LONG_S, LONG_S)
    session.attach(LONG_S)
    session.start()
    scheduler.trouble = die
    asks(view)
    session.nudge()
    wait_until(lambda: state(session) is BreakerState.OPEN, LONG_S, "the breaker opens")
    started = time.monotonic()
    session.stop(LONG_S)
    assert time.monotonic() - started < SECONDS
    assert not session._asking.is_alive()


def test_node_sees_that_an_engine_has_ended(session: Session, place: PlayedPlace) -> None:
    session.attach(LONG_S)
    assert place.num_open == 1
    session.stop(LONG_S)
    wait_until(lambda: place.num_open == 0, LONG_S, "the line ends")


def test_ray_that_does_not_let_go_is_left(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", given_up.append)
    started = time.monotonic()

    def shutdown() -> None:
        hanging.wait(LONG_S)

    assert not leave_ray(shutdown, 0.2)
    assert time.monotonic() - started < SECONDS
    assert given_up == [ray.shutdown]


def test_ray_that_lets_go_is_left_properly(monkeypatch: pytest.MonkeyPatch) -> None:
    given_up: list[Any] = []
    monkeypatch.setattr(atexit, "unregister", given_up.append)
    done = threading.Event()
    assert leave_ray(done.set, LONG_S)
    assert done.is_set()
    assert given_up == []


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
    for find in (ended._find_actors, ended._find_node_actor):
        with pytest.raises(ClusterError, match="the engine is shutting down"):
            find()
