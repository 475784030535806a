"""Threads of an engine that fail, or that the system does not give: what they do goes on later."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from raykv.base.settings import Settings
from raykv.engine.view import EngineView
from raykv.protocol.engine import ChangesQuery
from tests.fixtures.engine.place import EngineAt, PlayedPlace
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until

LONG_S = 10.0


class Failing:
    """Raises the first few times that it is asked."""

    def __init__(self, num_failures: int = 2) -> None:
        self.left = num_failures

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            raise ValueError("a bug")


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of threads that the system does not give."""
    refused: set[str] = set()
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr("raykv.base.deadlines.AGAIN_S", 0.0)
    return refused


@pytest.fixture
def place() -> Iterator[PlayedPlace]:
    with PlayedPlace() as made:
        yield made


def test_engine_goes_on_after_the_thread_of_its_line_has_failed(place: PlayedPlace) -> None:
    fail = Failing()

    class Faulty(EngineView):
        def query(self, place: int) -> ChangesQuery:
            fail()
            return super().query(place)

    place.store(key(1))
    with EngineAt(place, Faulty(Settings(request_deadline_s=5.0))) as engine:
        engine.session.attach(LONG_S)
        assert not fail.left
        assert engine.view.num_ready == 1


def test_engine_asks_after_the_thread_that_asks_has_failed(
    place: PlayedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = Failing()
    with EngineAt(place) as engine:
        take_questions = engine.view.remote.take_questions

        def faulty(most: int, may_repeat: bool) -> list[bytes]:
            fail()
            return take_questions(most, may_repeat)

        monkeypatch.setattr(engine.view.remote, "take_questions", faulty)
        engine.begin()
        engine.ask()
        engine.session.nudge()
        wait_until(lambda: bool(engine.scheduler.asked), LONG_S, "it asks")
        assert not fail.left


def test_engine_is_heard_of_once_there_is_a_thread_for_it(
    place: PlayedPlace, no_threads: set[str]
) -> None:
    with EngineAt(place) as engine:
        no_threads.add("raykv-place")
        engine.session.start()
        engine.session.nudge()
        no_threads.clear()
        assert not place.hellos
        engine.session.nudge()
        wait_until(lambda: bool(place.hellos), LONG_S, "it is heard of")
