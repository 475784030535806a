"""An engine's session: what its view and its place learn, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import raykv.engine.session
from raykv.base.ids import Key, Lookup, Stamp
from raykv.base.settings import Settings
from raykv.engine.hints import Allowed, Hint, HintBox
from raykv.engine.requests import RequestOptions
from raykv.engine.session import LEAST_ROWS, Session, WorkerReport
from raykv.engine.view import EngineView
from raykv.metrics.reach import Reach
from raykv.protocol.descriptions import Description
from raykv.protocol.engine import ChangesAnswer, Naming, Space
from raykv.protocol.listing import ALL_READ, Position
from raykv.protocol.measures import BreakerReport
from raykv.protocol.node import NodeDescription
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.sessions import SessionWord
from raykv.stream.descriptions import DescriptionOutbox
from tests.fixtures.engine.place import PlayedPlace, session_at
from tests.fixtures.engine.scheduler import DEADLINE_S, PlayedScheduler
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until, wait_until_quiet


@pytest.fixture
def place() -> Iterator[PlayedPlace]:
    with PlayedPlace() as made:
        yield made


@pytest.fixture
def scheduler() -> PlayedScheduler:
    return PlayedScheduler()


@pytest.fixture
def view() -> EngineView:
    return EngineView(Settings(request_deadline_s=5.0))


@pytest.fixture
def session(place: PlayedPlace, scheduler: PlayedScheduler, view: EngineView) -> Iterator[Session]:
    made = session_at(place, scheduler, view, HintBox(Allowed.SESSION))
    yield made
    made.stop(DEADLINE_S)


def with_facts(answer: ChangesAnswer, **facts: Any) -> ChangesAnswer:
    return msgspec.structs.replace(answer, facts=msgspec.structs.replace(answer.facts, **facts))


def drained(session: Session, is_so: object, what: str) -> None:
    """The engine goes on from step to step until something is so."""

    def step() -> bool:
        session.drain()
        session.nudge()
        return bool(is_so())  # type: ignore[operator]

    wait_until(step, DEADLINE_S, what)


def test_engine_that_begins_knows_what_is_there_and_what_comes_and_goes(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    place.store(*(key(number) for number in range(20)))
    session.attach(DEADLINE_S)
    assert view.num_ready == 20
    view.start_request("r", RequestOptions())
    assert view.lookup("r", key(3), 0.0) is Lookup.HIT, "workers that say nothing are believed"
    session.start()
    place.store(key(30))
    drained(session, lambda: key(30) in view.loadable, "it has come")
    place.drop(key(3))
    drained(session, lambda: key(3) not in view.loadable, "it is gone")
    view.check()


def test_what_requests_found_and_want_is_told(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    keys = [key(number) for number in range(5)]
    place.store(*keys)
    session.attach(DEADLINE_S)
    session.start()
    view.start_request("r", RequestOptions())
    view.prepare_load(keys, "r")
    session.note_wanted(keys)
    drained(session, lambda: len(place.tells) > 3, "it is told some times")
    tells = list(place.tells)
    assert [Key(each) for tell in tells for each in tell.found.keys] == keys
    assert tells[-1].counters["wanted_chunks"] == 5
    reach = Reach()
    for tell in tells:
        reach.add(0, tell.wanted_keys)
    reach.num_wanted = 5
    assert round(reach.num_distinct) == 5
    assert [tell.seq for tell in tells] == [*range(1, len(tells) + 1)]


def test_end_of_a_session_is_told_after_the_touches_of_its_chunks(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    """A touch that came later would take its chunks back."""
    keys = [key(number) for number in range(2000)]
    session.hints.begin("request", Hint(session="agent", is_over=True))
    view.prepare_load(keys)
    session.hints.name_chunks("request", [keys[:2]])
    session.hints.end("request")
    session.attach(DEADLINE_S)
    drained(session, lambda: any(tell.sessions for tell in place.tells), "it is told")
    touched = [number for number, each in enumerate(place.tells) if each.found.keys]
    told = [number for number, each in enumerate(place.tells) if each.sessions]
    assert len(touched) == 2
    assert told == [touched[-1]]
    words = [each.word for each in place.tells[told[0]].sessions]
    assert words == [SessionWord.CAME, SessionWord.OVER]


def ask_for_what_is_being_stored(
    session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    scheduler.is_being_stored = True
    session.attach(DEADLINE_S)
    session.start()
    view.remote.has_peers = True
    view.start_request("r", RequestOptions(prefilled=True))
    view.ask("r", [key(1)])


def test_chunks_that_are_being_stored_are_asked_for_again_and_again(
    session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    ask_for_what_is_being_stored(session, scheduler, view)
    drained(session, lambda: len(scheduler.asked) >= 10, "it is asked for ten times")
    assert all([*each.keys] == [key(1)] for each in scheduler.asked)
    assert view.lookup("r", key(1), 0.0) is Lookup.HIT_PENDING


def store_one_by_one(place: PlayedPlace, count: int) -> None:
    """Each with an answer of its own, while the engine has no step."""
    for number in range(count):
        place.store(key(number))
        known = len(place.queries)
        wait_until(lambda: len(place.queries) > known, DEADLINE_S, "it is asked")  # noqa: B023


def test_what_is_being_stored_is_not_asked_for_again_before_the_answer_is_taken_in(
    session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    ask_for_what_is_being_stored(session, scheduler, view)
    drained(session, lambda: view.remote.has_repeats, "it is to be asked for again")
    wait_until_quiet(lambda: len(scheduler.asked), DEADLINE_S, "it is asked for")
    assert len(session._inbox) == 1


def test_engine_that_has_nothing_to_do_reads_on(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    session.attach(DEADLINE_S)
    session.start()
    store_one_by_one(place, 20)
    wait_until(lambda: len(session._inbox) >= 20, DEADLINE_S, "all has come")
    session.drain()
    view.start_request("r", RequestOptions())
    assert view.lookup("r", key(19), 0.0) is Lookup.HIT


def test_engine_that_lacks_the_last_news_does_not_call_a_chunk_a_miss(
    place: PlayedPlace, session: Session, view: EngineView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.engine.session, "MAX_UNREAD", 4 * LEAST_ROWS)
    session.attach(DEADLINE_S)
    session.start()
    place.altered = lambda answer: with_facts(answer, has_peers=False)
    store_one_by_one(place, 20)
    session.drain()
    view.start_request("r", RequestOptions())
    assert view.lookup("r", key(19), 0.0) is Lookup.RETRY
    drained(session, lambda: view.lookup("r", key(19), 0.0) is Lookup.HIT, "it has read on")
    assert view.lookup("r", key(20), 0.0) is Lookup.MISS, "it knows that it has read all"


def test_engine_that_has_nothing_to_do_hoards_no_answers_and_knows_what_is_so_now(
    place: PlayedPlace, session: Session, view: EngineView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.engine.session, "MAX_UNREAD", 4 * LEAST_ROWS)
    session.attach(DEADLINE_S)
    session.start()
    store_one_by_one(place, 20)
    assert len(session._inbox) <= 4
    assert place.queries[-1].most == 0
    place.altered = lambda answer: with_facts(answer, is_paused=True)
    known = len(place.queries)
    wait_until(lambda: len(place.queries) > known + 2, DEADLINE_S, "it hears of a pause")
    session.drain()
    assert view.is_paused
    place.altered = lambda answer: answer
    drained(session, lambda: view.num_ready == 20, "it takes in the rest")


def test_clear_is_ordered_once_and_over_when_the_place_has_shown_its_number(
    place: PlayedPlace, session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    place.store(key(1))
    scheduler.orders = None
    session.attach(DEADLINE_S)
    session.start()
    view.reset()
    session.enter(Space("next"))
    assert view.namespace == "ns", "a clearing is of the namespace in which it was asked for"
    drained(session, lambda: scheduler.num_calls > 5, "it asks what has become of it")
    assert [each.namespace for each in scheduler.clears] == ["ns"]
    scheduler.orders = Stamp(1, 5)
    drained(session, lambda: place.tells[-1].orders == Stamp(1, 5), "the place is told the number")
    assert view.is_clearing
    assert not view.loadable
    place.take_orders(OrdersDocument(Stamp(1, 5), floors={"ns": 5}))
    drained(session, lambda: not view.is_clearing, "the place has shown it")
    assert (view.namespace, len(scheduler.clears)) == ("next", 1)


def test_clear_is_ordered_anew_where_the_engine_has_gone_to(
    place: PlayedPlace, scheduler: PlayedScheduler, view: EngineView
) -> None:
    with PlayedPlace("second", life=3) as second:

        def locate(is_lost: bool) -> NodeDescription:
            return (second if is_lost else place).description()

        session = session_at(place, scheduler, view, locate=locate)
        try:
            session.attach(DEADLINE_S)
            session.start()
            scheduler.orders = Stamp(9, 5)
            view.reset()
            drained(session, lambda: place.tells[-1].orders == Stamp(9, 5), "it is ordered")
            scheduler.orders = Stamp(1, 2)
            place.__exit__()
            drained(session, lambda: len(scheduler.clears) == 2, "it is ordered again")
            drained(
                session,
                lambda: second.tells and second.tells[-1].orders == Stamp(1, 2),
                "the number is the later one's",
            )
            second.take_orders(OrdersDocument(Stamp(1, 2), floors={"ns": 2}))
            drained(session, lambda: not view.is_clearing, "it is over")
        finally:
            session.stop(DEADLINE_S)


def test_clear_that_was_refused_is_ordered_anew(
    session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    session.attach(DEADLINE_S)
    session.start()
    scheduler.orders, scheduler.error = None, "no room"
    view.reset()
    drained(session, lambda: len(scheduler.clears) == 2, "it is ordered again")
    assert len({each.order_id for each in scheduler.clears}) == 2


def test_view_knows_whether_the_scheduler_actor_answers(
    session: Session, scheduler: PlayedScheduler, view: EngineView
) -> None:
    session.attach(DEADLINE_S)
    session.start()
    scheduler.trouble = lambda: 1 / 0
    view.remote.has_peers = True
    view.start_request("r", RequestOptions())
    view.ask("r", [key(1)])
    drained(session, lambda: view.remote.is_cut_off, "the view hears of the failure")
    scheduler.trouble = lambda: None
    drained(session, lambda: not view.remote.is_cut_off, "the view hears that it is over")
    drained(session, lambda: view.lookup("r", key(1), 0.0) is Lookup.MISS, "and gets the answer")
    assert len(scheduler.asked) == 1


def test_name_of_the_weights_is_heard_once_and_that_is_told_at_once(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    def named(answer: ChangesAnswer) -> ChangesAnswer:
        return with_facts(answer, naming=Naming(Stamp(1, 5), "v2"))

    place.altered = named
    session.attach(DEADLINE_S)
    wait_until(
        lambda: bool(place.tells) and place.tells[-1].heard == (1, 5), DEADLINE_S, "it is told"
    )
    assert session.take_naming() == Naming(Stamp(1, 5), "v2")
    # The place says it once more.
    place.store(key(1))
    drained(session, lambda: view.lookup("r", key(1), 0.0) is Lookup.HIT, "it is heard")
    assert session.take_naming() is None


@pytest.mark.parametrize("ordered_after", [0, 1])
def test_name_that_was_ordered_before_the_weights_changed_is_not_theirs(
    place: PlayedPlace, session: Session, ordered_after: int
) -> None:
    """The order may be heard minutes later, from a place that was away."""

    def named(answer: ChangesAnswer) -> ChangesAnswer:
        return with_facts(answer, naming=Naming(Stamp(1, 5), "v2", ordered_after))

    session.attach(DEADLINE_S)
    session.change_weights()
    wait_until(lambda: bool(place.tells) and place.tells[-1].weights == 1, DEADLINE_S, "it is told")
    place.altered = named
    place.store(key(1))
    drained(session, lambda: session._view.lookup("r", key(1), 0.0) is Lookup.HIT, "it is heard")
    assert (session.take_naming() is not None) == bool(ordered_after)
    assert (session._heard == (1, 5)) == bool(ordered_after)


def test_loads_only_while_all_workers_have_a_line_to_the_life_that_is_listed(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    place.store(key(1))
    session.attach(DEADLINE_S)
    assert view.loadable
    fine, broken = BreakerReport(), BreakerReport(["own node"], ["open"], [2], [1.0], ["gone"])
    session.take_lines({0: WorkerReport(7, fine), 1: WorkerReport(0, broken)})
    session.drain()
    assert not view.loadable
    wait_until(
        lambda: any(tell.breakers.peers == ["own node"] for tell in place.tells),
        DEADLINE_S,
        "the breaker is told",
    )
    session.take_lines({1: WorkerReport(7, fine)})
    session.drain()
    assert view.loadable


def test_engine_in_another_namespace_knows_what_is_there_at_once(
    place: PlayedPlace, session: Session, view: EngineView
) -> None:
    session.attach(DEADLINE_S)
    session.start()
    place.store(key(1), namespace="next")
    view.leave(0.0)
    session.enter(Space("next", {"weights": "new"}))
    assert (view.namespace, view.has_left, view.num_ready) == ("next", False, 1)
    assert (place.hellos[-1].namespace, place.hellos[-1].traits) == ("next", {"weights": "new"})
    num_hellos = len(place.hellos)
    view.leave(0.0)
    session.enter(Space("next", {"weights": "new"}))
    assert (view.has_left, view.num_ready, len(place.hellos)) == (False, 1, num_hellos)


def test_session_is_told_with_all_its_chunks_in_another_namespace(
    place: PlayedPlace, session: Session
) -> None:
    session.attach(DEADLINE_S)
    session.start()

    def told(request_id: str) -> list[Key]:
        """With the first of its news that has any."""
        place.tells.clear()
        session.hints.begin(request_id, Hint(session="agent"))
        session.hints.name_chunks(request_id, [[key(1), key(2)]])
        session.hints.end(request_id)
        drained(
            session,
            lambda: any(each.word is SessionWord.USED for t in place.tells for each in t.sessions),
            "it is told",
        )
        return [Key(each) for tell in place.tells for news in tell.sessions for each in news.keys]

    assert told("first") == [key(1), key(2)]
    assert told("second") == []
    session.enter(Space("next"))
    assert told("third") == [key(1), key(2)]


def test_answer_that_could_not_be_taken_in_costs_nothing_but_time(
    place: PlayedPlace, session: Session, view: EngineView, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.store(key(1))
    session.attach(DEADLINE_S)
    session.start()
    place.store(key(2))
    wait_until(lambda: bool(session._inbox), DEADLINE_S, "an answer has come")
    with monkeypatch.context() as patch:
        patch.setattr(EngineView, "take", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.drain()
    drained(session, lambda: view.num_ready == 2, "all is read anew")


def test_cleared_chunks_are_described_again(place: PlayedPlace, scheduler: PlayedScheduler) -> None:
    described = DescriptionOutbox()
    described.add(Description("ns", key(1), None, b"", bytes(4), 1))
    session = session_at(place, scheduler, described=described)
    try:
        place.store(key(1))
        session.attach(DEADLINE_S)
        drained(session, lambda: any(tell.described for tell in place.tells), "it is told")
        assert described.knows("ns", key(1))
        place.take_orders(OrdersDocument(Stamp(1, 5), floors={"ns": 5}))
        drained(session, lambda: not described.knows("ns", key(1)), "it is cleared")
        described.add(Description("ns", key(1), None, b"", bytes(4), 1))
        drained(session, lambda: not described.has_news, "it is told again")
        behind = Position(place.life, 10**6, ALL_READ)
        query = msgspec.structs.replace(session.query(), position=behind)
        session.answered(query, place.pool.changes(query, 0.0))
        assert not described.knows("ns", key(1)), "what was cleared meanwhile is not said"
    finally:
        session.stop(DEADLINE_S)
