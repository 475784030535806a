"""An engine's exchange when the scheduler actor fails, hangs and comes back; and its end."""

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

from raykv.base.deadlines import ENTER_S
from raykv.base.errors import ClusterError
from raykv.base.ids import EngineId, NodeId
from raykv.cluster import names
from raykv.cluster.breaker import BreakerState, Pauses
from raykv.cluster.join import leave_ray
from raykv.engine.hints import Allowed, Hint, HintBox
from raykv.engine.requests import RequestOptions
from raykv.engine.runtime import EngineRuntime
from raykv.engine.session import Session, SessionSettings
from raykv.engine.view import EngineView
from raykv.protocol.columns import Handles, Leases
from raykv.protocol.engine import EngineAttached, Naming, Space, SyncReply, SyncRequest
from raykv.protocol.framing import decode, encode
from raykv.protocol.measures import BreakerReport
from raykv.protocol.sessions import SessionWord
from tests.fixtures.engine.scheduler import PlayedScheduler, attached
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until

LONG_S = 10.0
SECONDS = 3.0
"""What "within seconds" is for an engine that ends."""


class Scheduler:
    """Stands for the scheduler actor: `trouble` is what happens to a call first."""

    def __init__(self) -> None:
        self.requests: list[SyncRequest] = []
        self.num_attached = 0
        self.trouble: Callable[[], object] = lambda: None

    def attach(self, raw: bytes) -> bytes:
        """See `SchedulerCalls.attach`."""
        self.num_attached += 1
        self.trouble()
        return encode(EngineAttached(epoch=1, node_epoch=1))

    def sync(self, raw: bytes) -> bytes:
        """See `SchedulerCalls.sync`."""
        request = decode(raw, SyncRequest)
        self.requests.append(request)
        self.trouble()
        return encode(SyncReply(1, request.seq, 1))

    def detach(self, engine_id: str) -> None:
        """See `SchedulerCalls.detach`."""
        self.trouble()


def die() -> None:
    raise ConnectionError("the actor died\nand much more")


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler()


@pytest.fixture
def session(scheduler: Scheduler) -> Iterator[Session]:
    view = EngineView(EngineId("engine"), [0], 1.0, 4)
    settings = SessionSettings("engine", "n", "ns", "model", 1, {0: 4096}, heartbeat_s=0.01)
    made = Session(view, scheduler, settings)
    made._breakers.pauses = Pauses(0.01, 0.02)
    yield made
    scheduler.trouble = lambda: None
    made.stop(LONG_S)


def state(session: Session) -> BreakerState:
    return session._breakers.state_of(names.SCHEDULER)


def test_dead_scheduler_actor_is_logged_once_and_its_return_too(
    session: Session, scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "raykv.session")
    session.attach(LONG_S)
    session.start()
    scheduler.trouble = die
    wait_until(
        lambda: session._breakers.failures_of(names.SCHEDULER) > 5, LONG_S, "it fails and fails"
    )
    scheduler.trouble = lambda: None
    wait_until(lambda: state(session) is BreakerState.CLOSED, LONG_S, "it is back")
    assert caplog.text.count("no exchange with the scheduler actor: ConnectionError") == 1
    assert caplog.text.count("works again") == 1
    session.drain()
    num_known = len(scheduler.requests)
    wait_until(lambda: len(scheduler.requests) > num_known + 2, LONG_S, "exchanges go on")
    assert scheduler.requests[-1].breakers.opened == 1
    assert scheduler.requests[-1].breakers.failed > 5


class Place:
    """At which node an engine is."""

    def __init__(self) -> None:
        self.node_id = "n"

    def follow(self) -> str:
        return self.node_id


def test_engine_that_is_at_another_node_attaches_there_with_nothing_of_the_last_one() -> None:
    scheduler, place = PlayedScheduler(), Place()
    view = EngineView(EngineId("engine"), [0], 1.0, 4, node_id=NodeId("n"))
    settings = SessionSettings("engine", "n", "ns", "model", 1, {0: 4096}, heartbeat_s=0.01)
    session = Session(view, scheduler, settings, follow=place.follow)
    session.attach(LONG_S)
    scheduler.grants = 4
    session._exchange_quietly()
    session.drain()
    view.start_request("r", RequestOptions())
    assert view.prepare_store("r", [key(1)]) is not None
    place.node_id, scheduler.wants_attach = "next", True
    session._exchange_quietly()
    session._exchange_quietly()
    there = scheduler.attached[-1]
    assert (there.node_id, there.leases) == ("next", Leases())
    # The engine's thread does not know yet: nothing of the last node is told to the next one.
    assert scheduler.requests[-1].idle
    session.drain()
    assert view.node_id == "next"
    session._exchange_quietly()
    told = scheduler.requests[-1]
    assert not told.idle
    assert (told.released, told.announced) == (Leases(), Handles())
    assert told.wanted


def test_messages_tell_of_the_lines_of_the_workers(session: Session, scheduler: Scheduler) -> None:
    session.attach(LONG_S)
    session.take_lines({0: BreakerReport(["own node"], ["open"], [2], [1.0], ["gone"], 1, 2, 3)})
    session.start()
    num_known = len(scheduler.requests)
    wait_until(lambda: len(scheduler.requests) > num_known, LONG_S, "an exchange")
    told = scheduler.requests[-1].breakers
    assert (told.peers, told.states, told.reasons) == (["own node"], ["open"], ["gone"])
    assert told.seconds[0] >= 1.0
    session.take_lines({0: BreakerReport(opened=1)})
    num_known = len(scheduler.requests)
    wait_until(lambda: len(scheduler.requests) > num_known + 1, LONG_S, "an exchange")
    assert scheduler.requests[-1].breakers == BreakerReport(opened=1)


def test_start_does_not_hammer_a_scheduler_actor_that_dies_after_the_attach(
    session: Session, scheduler: Scheduler
) -> None:

    def die_unless_it_attaches() -> None:
        if scheduler.requests:
            die()

    scheduler.trouble = die_unless_it_attaches
    started = time.monotonic()
    session.attach(LONG_S)
    assert time.monotonic() - started < SECONDS
    assert len(scheduler.requests) == 1


# The end


@pytest.fixture
def hanging() -> Iterator[threading.Event]:
    """Waits until it is set, at the latest by the end of the test."""
    made = threading.Event()
    yield made
    made.set()


@pytest.mark.usefixtures("session")
def test_session_ends_in_time_while_an_exchange_hangs(
    session: Session, scheduler: Scheduler, hanging: threading.Event
) -> None:
    session.attach(LONG_S)
    session.start()
    scheduler.trouble = lambda: hanging.wait(LONG_S)
    num_known = len(scheduler.requests)
    wait_until(lambda: len(scheduler.requests) > num_known, LONG_S, "an exchange hangs")
    scheduler.detach = lambda engine_id: None  # type: ignore[method-assign]
    started = time.monotonic()
    session.stop(0.2)
    assert time.monotonic() - started < SECONDS


def test_session_ends_at_once_while_it_leaves_the_scheduler_actor_alone(
    session: Session, scheduler: Scheduler
) -> None:
    session._breakers.pauses = Pauses(LONG_S, LONG_S)
    session.attach(LONG_S)
    session.start()
    scheduler.trouble = die
    wait_until(lambda: state(session) is BreakerState.OPEN, LONG_S, "the breaker opens")
    started = time.monotonic()
    session.stop(LONG_S)
    assert time.monotonic() - started < SECONDS
    assert session._thread is not None
    assert not session._thread.is_alive()


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


def test_engine_that_goes_to_another_namespace_attaches_there_with_nothing_of_the_last_one() -> (
    None
):
    scheduler = PlayedScheduler()
    scheduler.grants = 4
    view, session = attached(scheduler, heartbeat_s=LONG_S)
    session.start()
    try:
        view.start_request("r", RequestOptions())
        assert view.prepare_store("r", [key(1)]) is not None
        view.leave()
        began = time.monotonic()
        session.enter(Space("next", {"weights": "new"}))
        assert time.monotonic() - began < ENTER_S
        there = scheduler.attached[-1]
        assert (there.namespace, there.traits) == ("next", {"weights": "new"})
        assert there.leases == Leases()
        assert (view.namespace, view.epoch, view.has_left) == ("next", 1, False)
        num_attached = len(scheduler.attached)
        view.leave()
        session.enter(Space("next", {"weights": "new"}))
        assert not view.has_left
        assert len(scheduler.attached) == num_attached
    finally:
        session.stop(LONG_S)


def test_clearing_is_of_the_namespace_in_which_it_was_asked_for() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=LONG_S)
    view.reset()
    session.enter(Space("next"))
    assert view.namespace == "ns"
    session._exchange_quietly()
    assert scheduler.requests[-1].clear == 1
    assert scheduler.attached[-1].namespace == "ns"
    session.drain()
    assert view.namespace == "next"
    session._exchange_quietly()
    assert scheduler.attached[-1].namespace == "next"
    assert scheduler.requests[-1].clear == 0


def test_answers_of_the_last_namespace_are_ignored_when_they_come_late() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=LONG_S)
    scheduler.grants, scheduler.wants_attach = 4, True
    session._exchange_quietly()
    session.enter(Space("next"))
    # It has attached as of the last one meanwhile.
    assert (view.namespace, view.epoch) == ("next", 0)
    session._exchange_quietly()
    session.drain()
    assert (view.namespace, view.epoch) == ("next", 1)


def test_engine_does_not_wait_for_a_scheduler_actor_that_does_not_answer() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=LONG_S)
    session._breakers.pauses = Pauses(LONG_S, LONG_S)
    session.start()
    try:
        scheduler.answers = False
        began = time.monotonic()
        session.enter(Space("next"))
        assert time.monotonic() - began < ENTER_S + SECONDS
        assert view.namespace == "next"
    finally:
        scheduler.answers = True
        session.stop(LONG_S)


def test_name_of_the_weights_is_heard_once_and_that_is_told_at_once() -> None:
    scheduler = PlayedScheduler()
    _, session = attached(scheduler, heartbeat_s=LONG_S)
    scheduler.naming = Naming("order", "v2")
    session._exchange_quietly()
    assert session._wake.is_set()
    session._exchange_quietly()
    assert scheduler.requests[-1].heard == "order"
    assert session.take_naming() == Naming("order", "v2")
    assert session.take_naming() is None


def test_end_of_a_session_is_told_after_the_touches_of_its_chunks(scheduler: Scheduler) -> None:
    """A touch that came later would take its chunks back."""
    view = EngineView(EngineId("engine"), [0], 1.0, 4)
    view.attached(EngineAttached(1, 1, {0: 4}))
    hints = HintBox(Allowed.SESSION)
    settings = SessionSettings("engine", "n", "ns", "model", 1, {0: 4096})
    session = Session(view, scheduler, settings, hints=hints)
    keys = [key(number) for number in range(2000)]
    hints.begin("request", Hint(session="agent", is_over=True))
    view.prepare_load(keys)
    hints.name_chunks("request", [keys[:2]])
    hints.end("request")
    assert session._exchange_quietly()
    touched = [number for number, each in enumerate(scheduler.requests) if each.touched]
    told = [number for number, each in enumerate(scheduler.requests) if each.sessions]
    assert len(touched) == 2
    assert told == [touched[-1]]
    assert [each.word for each in scheduler.requests[told[0]].sessions] == [
        SessionWord.CAME,
        SessionWord.OVER,
    ]
