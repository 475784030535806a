"""Why a lookup is a MISS: one test for each reason that the engine's view can give."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.base.ids import Key, Lookup, MissReason, Refusal, Stamp
from raykv.base.settings import Settings
from raykv.engine.remote import ChunkSize
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Numbers
from raykv.protocol.engine import AskAnswer
from raykv.protocol.listing import Reason, Where
from tests.fixtures.engine.views import HERE, STORE_S, HeardPlace, asked, made, row, told
from tests.fixtures.keys import named_key as key

QUERY_S = 1.0
SIZES = {0: ChunkSize(1000, 16)}
A, B, C = key("a"), key("b"), key("c")


@pytest.fixture
def place() -> HeardPlace:
    """It has peers; its view has the request "r"."""
    _, (place,) = made(HERE, sizes=SIZES)
    place.has_peers = True
    place.says()
    return place


@pytest.fixture
def view(place: HeardPlace) -> EngineView:
    return place.view


@pytest.fixture
def alone(place: HeardPlace) -> HeardPlace:
    """It has chunk A, and no peers."""
    place.has_peers = False
    place.says(row(A))
    return place


def look(view: EngineView, name: Key, now: float = 0.0, request: str = "r") -> Lookup:
    return view.lookup(request, name, now)


def learn(view: EngineView) -> None:
    """The request asks for A, and is told where that is."""
    view.ask("r", [A])
    told(view, asked(view), {A: "one"})


def why(view: EngineView, name: Key, now: float = 0.0, request: str = "r") -> MissReason:
    """The reason that is kept for a lookup which is a MISS."""
    view.requests.take_miss(request)
    assert look(view, name, now, request) is Lookup.MISS
    miss = view.requests.take_miss(request)
    assert miss is not None
    assert miss.key == name
    return miss.reason


def finished(place: HeardPlace, refusal: Refusal | None) -> None:
    """The fetch of A ends so; None: without an answer."""
    view = place.view
    learn(view)
    assert look(view, A) is Lookup.HIT_PENDING
    result = None if refusal is None else place.result(failed={0: refusal})
    view.finish_fetch(view.remote.take_orders(), [result], 0.0)


def test_latest_miss_is_kept_until_it_is_taken_and_a_hit_is_none(alone: HeardPlace) -> None:
    view = alone.view
    assert look(view, A) is Lookup.HIT
    assert view.requests.take_miss("r") is None
    view.bar("r", [A])
    assert [look(view, name) for name in (A, B)] == [Lookup.MISS] * 2
    miss = view.requests.take_miss("r")
    assert miss is not None
    assert (miss.key, miss.reason) == (B, MissReason.NEVER_STORED)
    assert view.requests.take_miss("r") is None


def test_node_lost_with_all_that_it_had(alone: HeardPlace) -> None:
    alone.life += 1
    alone.says()
    alone.view.set_line(0, alone.life, 0.0)
    assert why(alone.view, A) is MissReason.NODE_LOST
    assert why(alone.view, B) is MissReason.NEVER_STORED


def test_not_attached() -> None:
    view = EngineView(Settings(request_deadline_s=5 * STORE_S))
    view.start_request("r", RequestOptions())
    assert why(view, A) is MissReason.NOT_ATTACHED
    assert view.prepare_store("r", [B]) == []
    assert why(view, B) is MissReason.NOT_ATTACHED


def test_stores_off_for_what_a_request_did_not_store(alone: HeardPlace) -> None:
    alone.view.start_request("other", RequestOptions(store=False))
    assert alone.view.prepare_store("other", [B]) == []
    assert why(alone.view, B) is MissReason.STORES_OFF
    assert why(alone.view, C) is MissReason.NEVER_STORED


@pytest.mark.parametrize(
    "gone", [Reason.EVICTED, Reason.QUOTA, Reason.CLEARED], ids=lambda gone: gone.name
)
def test_what_the_place_says(alone: HeardPlace, gone: Reason) -> None:
    alone.says(row(A, Where.NOWHERE, gone))
    assert why(alone.view, A).name == gone.name


def test_evicted_by_the_result_of_anothers_load(alone: HeardPlace) -> None:
    view, gone = alone.view, row(A, Where.NOWHERE, Reason.EVICTED)
    view.start_request("other", RequestOptions())
    refused = alone.result(gone, failed={0: Refusal.NOT_HERE})
    view.end_load(0, "other", [A], refused, 0.0)
    assert why(view, A, request="other") is MissReason.LOAD_FAILED
    assert why(view, A) is MissReason.EVICTED


@pytest.mark.parametrize("begins_anew", [True, False])
def test_cleared_though_nobody_says_why_the_chunk_is_gone(
    alone: HeardPlace, begins_anew: bool
) -> None:
    """Of a large namespace the listing begins anew."""
    clear(alone)
    if begins_anew:
        alone.says_anew()
    else:
        alone.says(row(A, Where.NOWHERE, Reason.FAILED))
    assert why(alone.view, A) is MissReason.CLEARED


def test_evicted_if_a_listing_that_is_read_anew_does_not_have_it(alone: HeardPlace) -> None:
    alone.says_anew()
    assert why(alone.view, A) is MissReason.EVICTED


def clear(place: HeardPlace) -> None:
    """The engine empties its cache, and the place has shown that; its chunk is not gone yet."""
    place.view.reset()
    place.orders = Stamp(1, 6)
    place.view.cleared(place.view.wanted_clear, place.orders, 0.0)
    place.says()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"gone": [0], "reasons": bytes([Reason.EVICTED])}, MissReason.EVICTED),
        ({"other": [0]}, MissReason.OTHER_NAMESPACE),
        ({}, MissReason.NEVER_STORED),
    ],
)
def test_engine_that_is_alone_learns_why_though_nobody_waits_for_it(
    alone: HeardPlace, answer: dict[str, Any], expected: MissReason
) -> None:
    """What the engine has known is lost with its last life, or never was its own."""
    view = alone.view
    view.accounts.open("r", 100)
    assert why(view, B) is MissReason.NEVER_STORED
    assert view.requests.take_miss("r") is None
    assert look(view, B) is Lookup.MISS
    account = view.accounts.get("r")
    assert account is not None
    account.admit(0, 0, view.requests.take_miss("r"))
    assert view.remote.has_news
    question = asked(view)
    assert question == [B], "once for each request"
    columns = {name: Numbers.of(each) for name, each in answer.items() if name != "reasons"}
    view.take_answers(view.questions(question, []), [AskAnswer(1, **{**answer, **columns})])
    record = view.accounts.close("r")
    assert record is not None
    assert record.missed == {expected: 100}
    assert why(view, B) is expected


def test_breaker_open_while_the_scheduler_actor_is_left_alone(view: EngineView) -> None:
    view.remote.is_cut_off = True
    assert look(view, A, now=0.0) is Lookup.RETRY
    assert why(view, A, now=QUERY_S) is MissReason.BREAKER_OPEN


@pytest.mark.parametrize(
    ("refusal", "expected"),
    [
        (None, MissReason.FETCH_FAILED),
        (Refusal.CORRUPT, MissReason.FETCH_FAILED),
        (Refusal.TOO_LATE, MissReason.FETCH_FAILED),
        (Refusal.NOT_HERE, MissReason.EVICTED),
        (Refusal.CLEARED, MissReason.CLEARED),
        (Refusal.NODE_LOST, MissReason.NODE_LOST),
        (Refusal.NO_ROOM, MissReason.POOL_FULL),
    ],
)
def test_fetch_failed_or_what_its_source_said(
    place: HeardPlace, refusal: Refusal | None, expected: MissReason
) -> None:
    finished(place, refusal)
    assert why(place.view, A) is expected


def test_failed_fetch_is_no_reason_for_who_did_not_know_of_it(place: HeardPlace) -> None:
    finished(place, Refusal.CORRUPT)
    place.has_peers = False
    place.says()
    place.view.start_request("other", RequestOptions())
    assert why(place.view, A, request="other") is MissReason.NEVER_STORED


def test_unknown_request_keeps_no_miss(view: EngineView) -> None:
    assert look(view, A, request="stranger") is not Lookup.HIT
    assert view.requests.take_miss("stranger") is None
