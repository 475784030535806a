"""An engine's session: what its view and its place learn, and when."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import raykv.engine.lines
import raykv.engine.listed
from raykv.base import deadlines
from raykv.base.ids import Key, Lookup, Stamp
from raykv.engine.hints import Allowed, Hint, HintBox
from raykv.engine.lines import LEAST_ROWS, WorkerReport
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.metrics.reach import Reach
from raykv.protocol.descriptions import Description
from raykv.protocol.engine import ChangesAnswer, Naming, Space
from raykv.protocol.listing import ALL_READ, Position
from raykv.protocol.measures import BreakerReport, OpenBreaker
from raykv.protocol.node import NodeDescription
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.sessions import SessionWord
from raykv.stream.descriptions import DescriptionOutbox
from tests.fixtures.engine.place import EngineAt, PlayedPlace
from tests.fixtures.engine.scheduler import DEADLINE_S
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until, wait_until_quiet


@pytest.fixture
def engine() -> Iterator[EngineAt]:
    with PlayedPlace() as place, EngineAt(place, hints=HintBox(Allowed.SESSION)) as made:
        yield made


def with_facts(answer: ChangesAnswer, **facts: Any) -> ChangesAnswer:
    return msgspec.structs.replace(answer, facts=msgspec.structs.replace(answer.facts, **facts))


def test_engine_that_begins_knows_what_is_there_and_what_comes_and_goes(engine: EngineAt) -> None:
    engine.place.store(*(key(number) for number in range(20)))
    engine.session.attach(DEADLINE_S)
    assert engine.view.num_ready == 20
    assert engine.lookup(3) is Lookup.HIT, "workers that say nothing are believed"
    engine.session.start()
    engine.place.store(key(30))
    engine.until(lambda: key(30) in engine.view.loadable, "it has come")
    engine.place.drop(key(3))
    engine.until(lambda: key(3) not in engine.view.loadable, "it is gone")
    engine.view.check()


def test_what_requests_found_and_want_is_told(engine: EngineAt) -> None:
    keys = [key(number) for number in range(5)]
    engine.place.store(*keys)
    engine.begin()
    engine.view.start_request("r", RequestOptions())
    engine.session.note_wanted(keys)

    def is_told() -> bool:
        return each in found_keys(engine.place)

    for each in keys:
        engine.view.prepare_load([each], "r")
        engine.until(is_told, "it is told")
    tells = list(engine.place.tells)
    assert found_keys(engine.place) == keys
    assert tells[-1].counters["wanted_chunks"] == 5
    reach = Reach()
    for tell in tells:
        reach.add(0, tell.wanted_keys)
    reach.num_wanted = 5
    assert round(reach.num_distinct) == 5
    assert [tell.seq for tell in tells] == [*range(1, len(tells) + 1)]


def test_end_of_a_session_is_told_after_the_touches_of_its_chunks(engine: EngineAt) -> None:
    """A touch that came later would take its chunks back."""
    keys = [key(number) for number in range(2000)]
    engine.session.hints.begin("request", Hint(session="agent", is_over=True))
    engine.view.prepare_load(keys)
    engine.session.hints.name_chunks("request", [keys[:2]])
    engine.session.hints.end("request")
    engine.session.attach(DEADLINE_S)
    engine.until(lambda: any(tell.sessions for tell in engine.place.tells), "it is told")
    touched = [number for number, each in enumerate(engine.place.tells) if each.found.keys]
    told = [number for number, each in enumerate(engine.place.tells) if each.sessions]
    assert len(touched) == 2
    assert told == [touched[-1]]
    words = [each.word for each in engine.place.tells[told[0]].sessions]
    assert words == [SessionWord.CAME, SessionWord.OVER]


def ask_for_what_is_being_stored(engine: EngineAt) -> None:
    engine.scheduler.is_being_stored = True
    engine.begin()
    engine.ask(prefilled=True)


def test_chunks_that_are_being_stored_are_asked_for_again_and_again(engine: EngineAt) -> None:
    ask_for_what_is_being_stored(engine)
    engine.until(lambda: len(engine.scheduler.asked) >= 10, "it is asked for ten times")
    assert all([*each.keys] == [key(1)] for each in engine.scheduler.asked)
    assert engine.lookup(1) is Lookup.HIT_PENDING


def store_one_by_one(engine: EngineAt, count: int) -> None:
    """Each with an answer of its own, while the engine has no step."""
    for number in range(count):
        engine.place.store(key(number))
        wait_for_queries(engine, 1)


def wait_for_queries(engine: EngineAt, count: int) -> None:
    known = len(engine.place.queries)
    wait_until(lambda: len(engine.place.queries) >= known + count, DEADLINE_S, "it is asked")


def test_what_is_being_stored_is_not_asked_for_again_before_the_answer_is_taken_in(
    engine: EngineAt,
) -> None:
    ask_for_what_is_being_stored(engine)
    engine.until(lambda: engine.view.remote.has_repeats, "it is to be asked for again")
    wait_until_quiet(lambda: len(engine.scheduler.asked), DEADLINE_S, "it is asked for")
    assert len(engine.session.inbox) == 1


def test_engine_that_has_nothing_to_do_reads_on(engine: EngineAt) -> None:
    engine.begin()
    store_one_by_one(engine, 20)
    wait_until(lambda: len(engine.session.inbox) >= 20, DEADLINE_S, "all has come")
    engine.session.drain()
    assert engine.lookup(19) is Lookup.HIT


def test_engine_that_lacks_the_last_news_does_not_call_a_chunk_a_miss(
    engine: EngineAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.engine.lines, "MAX_UNREAD", 4 * LEAST_ROWS)
    engine.begin()
    engine.place.altered = lambda answer: with_facts(answer, has_peers=False)
    store_one_by_one(engine, 20)
    engine.session.drain()
    assert engine.lookup(19) is Lookup.RETRY
    engine.until(lambda: engine.lookup(19) is Lookup.HIT, "it has read on")
    assert engine.lookup(20) is Lookup.MISS, "it knows that it has read all"


def test_engine_that_has_nothing_to_do_hoards_no_answers_and_knows_what_is_so_now(
    engine: EngineAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.engine.lines, "MAX_UNREAD", 4 * LEAST_ROWS)
    engine.begin()
    store_one_by_one(engine, 20)
    assert len(engine.session.inbox) <= 4
    assert engine.place.queries[-1].most == 0
    engine.place.altered = lambda answer: with_facts(answer, is_paused=True)
    wait_for_queries(engine, 3)
    engine.session.drain()
    assert engine.view.is_paused
    engine.place.altered = lambda answer: answer
    engine.until(lambda: engine.view.num_ready == 20, "it takes in the rest")


def test_clear_is_ordered_once_and_over_when_the_place_has_shown_its_number(
    engine: EngineAt,
) -> None:
    engine.place.store(key(1))
    engine.scheduler.orders = None
    engine.begin()
    engine.view.reset()
    engine.session.enter(Space("next"))
    assert engine.view.namespace == "ns", "a clearing is of the namespace in which it was asked for"
    engine.until(lambda: engine.scheduler.num_calls > 5, "it asks what has become of it")
    assert [each.namespace for each in engine.scheduler.clears] == ["ns"]
    engine.scheduler.orders = Stamp(1, 5)
    engine.until(
        lambda: engine.place.tells[-1].orders == Stamp(1, 5), "the place is told the number"
    )
    assert engine.view.is_clearing
    assert not engine.view.loadable
    engine.place.take_orders(OrdersDocument(Stamp(1, 5), floors={"ns": 5}))
    engine.until(lambda: not engine.view.is_clearing, "the place has shown it")
    assert (engine.view.namespace, len(engine.scheduler.clears)) == ("next", 1)


def test_clear_is_ordered_anew_where_the_engine_has_gone_to() -> None:
    with PlayedPlace() as place, PlayedPlace("second", life=3) as second:

        def locate(is_lost: bool) -> NodeDescription:
            return (second if is_lost else place).description()

        with EngineAt(place, locate=locate) as engine:
            engine.begin()
            engine.scheduler.orders = Stamp(9, 5)
            engine.view.reset()
            engine.until(lambda: place.tells[-1].orders == Stamp(9, 5), "it is ordered")
            engine.scheduler.orders = Stamp(1, 2)
            place.__exit__()
            engine.until(lambda: len(engine.scheduler.clears) == 2, "it is ordered again")
            engine.until(
                lambda: second.tells and second.tells[-1].orders == Stamp(1, 2),
                "the number is the later one's",
            )
            second.take_orders(OrdersDocument(Stamp(1, 2), floors={"ns": 2}))
            engine.until(lambda: not engine.view.is_clearing, "it is over")


def test_clear_that_was_refused_is_ordered_anew(engine: EngineAt) -> None:
    engine.begin()
    engine.scheduler.orders, engine.scheduler.error = None, "no room"
    engine.view.reset()
    engine.until(lambda: len(engine.scheduler.clears) == 2, "it is ordered again")
    assert len({each.order_id for each in engine.scheduler.clears}) == 2


def test_view_knows_whether_the_scheduler_actor_answers(engine: EngineAt) -> None:
    engine.begin()
    engine.scheduler.trouble = lambda: 1 / 0
    engine.ask()
    engine.until(lambda: engine.view.remote.is_cut_off, "the view hears of the failure")
    engine.scheduler.trouble = lambda: None
    engine.until(lambda: not engine.view.remote.is_cut_off, "the view hears that it is over")
    engine.until(lambda: engine.lookup(1) is Lookup.MISS, "and gets the answer")
    assert len(engine.scheduler.asked) == 1


def test_name_of_the_weights_is_heard_once_and_that_is_told_at_once(engine: EngineAt) -> None:
    place, naming = engine.place, Naming(Stamp(1, 5), "v2")
    place.altered = lambda answer: with_facts(answer, naming=naming)
    engine.session.attach(DEADLINE_S)
    wait_until(lambda: any(tell.heard == (1, 5) for tell in place.tells), DEADLINE_S, "it is told")
    assert engine.session.take_naming() == naming
    # The place says it once more.
    place.store(key(1))
    engine.until(lambda: engine.lookup(1) is Lookup.HIT, "it is heard")
    assert engine.session.take_naming() is None


@pytest.mark.parametrize("ordered_after", [0, 1])
def test_name_that_was_ordered_before_the_weights_changed_is_not_theirs(
    engine: EngineAt, ordered_after: int
) -> None:
    """The order may be heard minutes later, from a place that was away."""
    place, naming = engine.place, Naming(Stamp(1, 5), "v2", ordered_after)
    engine.session.attach(DEADLINE_S)
    engine.session.change_weights()
    wait_until(lambda: any(tell.weights == 1 for tell in place.tells), DEADLINE_S, "it is told")
    place.altered = lambda answer: with_facts(answer, naming=naming)
    place.store(key(1))
    engine.until(lambda: engine.lookup(1) is Lookup.HIT, "it is heard")
    assert (engine.session.take_naming() is not None) == bool(ordered_after)
    assert (engine.session._heard == (1, 5)) == bool(ordered_after)


def test_loads_only_while_all_workers_have_a_line_to_the_life_that_is_listed(
    engine: EngineAt,
) -> None:
    engine.place.store(key(1))
    engine.session.attach(DEADLINE_S)
    assert engine.view.loadable
    row = OpenBreaker("own node", "open", 2, 1.0, "gone")
    fine, broken = BreakerReport(), BreakerReport([row])
    engine.session.take_lines({0: WorkerReport(7, fine), 1: WorkerReport(0, broken)})
    engine.session.drain()
    assert not engine.view.loadable
    engine.view.prepare_load([key(1)])
    engine.until(
        lambda: any(
            row.peer == "own node" for tell in engine.place.tells for row in tell.breakers.rows
        ),
        "the breaker is told with the next news",
    )
    engine.session.take_lines({1: WorkerReport(7, fine)})
    engine.session.drain()
    assert engine.view.loadable


def test_node_that_ranks_have_on_their_host_now_is_followed(engine: EngineAt) -> None:
    followed: list[tuple[int, str]] = []
    engine.session.follow = lambda at, node_id: followed.append((at, node_id))
    engine.session.attach(DEADLINE_S)
    engine.session.take_lines({0: WorkerReport(7, BreakerReport())})
    assert followed == []
    engine.session.take_lines({0: WorkerReport(0, BreakerReport(), "next")})
    assert followed == [(0, "next")]


def test_engine_in_another_namespace_knows_what_is_there_at_once(engine: EngineAt) -> None:
    engine.begin()
    engine.place.store(key(1), namespace="next")
    engine.view.leave(0.0)
    engine.session.enter(Space("next", {"weights": "new"}))
    assert (engine.view.namespace, engine.view.has_left, engine.view.num_ready) == (
        "next",
        False,
        1,
    )
    assert (engine.place.hellos[-1].namespace, engine.place.hellos[-1].traits) == (
        "next",
        {"weights": "new"},
    )
    num_hellos = len(engine.place.hellos)
    engine.view.leave(0.0)
    engine.session.enter(Space("next", {"weights": "new"}))
    assert (engine.view.has_left, engine.view.num_ready, len(engine.place.hellos)) == (
        False,
        1,
        num_hellos,
    )


def test_session_is_told_with_all_its_chunks_in_another_namespace(engine: EngineAt) -> None:
    engine.begin()

    def told(request_id: str) -> list[Key]:
        """With the first of its news that has any."""
        engine.place.tells.clear()
        engine.session.hints.begin(request_id, Hint(session="agent"))
        engine.session.hints.name_chunks(request_id, [[key(1), key(2)]])
        engine.session.hints.end(request_id)
        engine.until(
            lambda: any(
                each.word is SessionWord.USED for t in engine.place.tells for each in t.sessions
            ),
            "it is told",
        )
        return [
            Key(each) for tell in engine.place.tells for news in tell.sessions for each in news.keys
        ]

    assert told("first") == [key(1), key(2)]
    assert told("second") == []
    engine.session.enter(Space("next"))
    assert told("third") == [key(1), key(2)]


def test_answer_that_could_not_be_taken_in_costs_nothing_but_time(
    engine: EngineAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.place.store(key(1))
    engine.begin()
    engine.place.store(key(2))
    wait_until(lambda: bool(engine.session.inbox), DEADLINE_S, "an answer has come")
    with monkeypatch.context() as patch:
        patch.setattr(EngineView, "take", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.session.drain()
    engine.until(lambda: engine.view.num_ready == 2, "all is read anew")


def test_cleared_chunks_are_described_again() -> None:
    described = DescriptionOutbox()
    described.add(Description("ns", key(1), None, b"", bytes(4), 1))
    with PlayedPlace() as place, EngineAt(place, described=described) as engine:
        place.store(key(1))
        engine.session.attach(DEADLINE_S)
        engine.until(lambda: any(tell.described for tell in place.tells), "it is told")
        assert described.knows("ns", key(1))
        place.take_orders(OrdersDocument(Stamp(1, 5), floors={"ns": 5}))
        engine.until(lambda: not described.knows("ns", key(1)), "it is cleared")
        described.add(Description("ns", key(1), None, b"", bytes(4), 1))
        engine.until(lambda: not described.has_news, "it is told again")
        behind = Position(place.life, 10**6, ALL_READ)
        query = msgspec.structs.replace(engine.view.query(0), position=behind)
        engine.session.heard(engine.session.lines[0], query, place.pool.changes(query, 0.0))
        assert not described.knows("ns", key(1)), "what was cleared meanwhile is not said"


def test_engine_that_has_lost_its_place_says_that_it_is_there(
    engine: EngineAt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "WAKE_S", 0.02)
    engine.begin()
    engine.until(lambda: engine.place.tells, "it is at its place")
    assert not engine.scheduler.asked
    engine.place.refusal = "not any more"
    engine.place.hang_up()
    wait_until(lambda: len(engine.scheduler.asked) > 1, DEADLINE_S, "it goes on saying so")
    assert not engine.scheduler.asked[-1].keys


def test_engine_with_two_places_follows_and_tells_both() -> None:
    """What is of the engine itself the first one is told alone."""
    names = [f"ns/{at}" for at in range(2)]
    hints, described = HintBox(Allowed.SESSION), DescriptionOutbox()
    for namespace in ("ns", "earlier"):
        described.add(Description(namespace, key(1), None, b"", bytes(4), 1))
    with (
        PlayedPlace("one") as one,
        PlayedPlace("two") as two,
        EngineAt(one, hints=hints, described=described, others=[two], parts=["0", "1"]) as engine,
    ):
        for place, name in zip((one, two), names, strict=True):
            place.store(key(1), namespace=name)
        one.store(key(2), namespace=names[0])
        engine.begin()
        assert [each.hellos[0].namespace for each in (one, two)] == names
        assert [(h.place, h.num_places) for h in (one.hellos[0], two.hellos[0])] == [
            (1, 2),
            (2, 2),
        ]
        assert engine.lookup(1) is Lookup.HIT
        assert key(2) not in engine.view.loadable, "half of it"
        engine.view.start_request("r", RequestOptions())
        engine.view.prepare_load([key(1)], "r")
        engine.view.accounts.open("other", 32)
        engine.view.accounts.close("other", [])
        engine.until(lambda: all(found_keys(each) for each in (one, two)), "both are told")
        assert found_keys(one) == found_keys(two) == [key(1)]
        assert {tell.life for tell in two.tells} == {11}
        assert any(tell.counters for tell in one.tells)
        assert any(tell.finished for tell in one.tells)
        assert not any(t.counters or t.described or t.finished for t in two.tells)
        described_in = [each.namespace for tell in one.tells for each in tell.described]
        assert described_in == ["ns/0", "earlier/0"]
        two.drop(key(1), namespace=names[1])
        engine.until(lambda: key(1) not in engine.view.loadable, "one part is gone")
        engine.view.check()


def found_keys(place: PlayedPlace) -> list[Key]:
    return [Key(each) for tell in place.tells for each in tell.found.keys]


def test_engine_whose_second_place_falls_silent_has_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(raykv.engine.listed, "SILENT_S", 0.5)
    with (
        PlayedPlace("one") as one,
        PlayedPlace("two") as two,
        EngineAt(one, others=[two], parts=["0", "1"]) as engine,
    ):
        for at, place in enumerate((one, two)):
            place.store(key(1), namespace=f"ns/{at}")
        engine.begin()
        engine.until(lambda: engine.lookup(1) is Lookup.HIT, "both places have it")
        two.refusal = "not any more"
        two.hang_up()
        engine.until(lambda: not engine.view.loadable, "nothing is believed of it")
        engine.view.prepare_load([key(9)])
        engine.until(lambda: key(9) in found_keys(one), "the first place is told")
        two.refusal = ""
        engine.until(lambda: engine.lookup(1) is Lookup.HIT, "it is there again")
        engine.view.prepare_load([key(8)])
        engine.until(lambda: key(8) in found_keys(two), "it is told what is new")
        assert key(9) not in found_keys(two), "what it was to be told meanwhile is old"
