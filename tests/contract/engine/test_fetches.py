"""An engine's orders for its NodeActor over the place's line, whatever that does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from raykv.base.ids import Lookup, Namespace, Refusal
from raykv.base.settings import Settings
from raykv.cluster.breaker import Pauses
from raykv.engine.remote import FetchOrder
from raykv.engine.requests import RequestOptions
from raykv.engine.view import EngineView
from raykv.protocol.columns import Source
from raykv.protocol.copies import CopyResult, Fetch
from tests.fixtures.engine import scheduler
from tests.fixtures.engine.place import EngineAt, PlayedPlace
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.waiting import wait_until

LONG_S = 10.0
DEADLINE_S = 0.3
GRACE_S = 0.2


def order(number: int) -> FetchOrder:
    return scheduler.order(number, Source("far"))


class FetchingEngine(EngineAt):
    """How its fetches have ended is noted."""

    def __init__(self, place: PlayedPlace, deadline_s: float = LONG_S, **more: Any) -> None:
        settings = Settings(request_deadline_s=deadline_s)
        super().__init__(place, EngineView(settings), **more)
        self.results: list[list[CopyResult | None]] = []
        self.ended: list[tuple[list[FetchOrder], CopyResult | None]] = []
        finish = self.view.finish_fetch

        def finished(
            orders: list[FetchOrder], results: list[CopyResult | None], now: float
        ) -> None:
            self.ended.append((orders, results[0]))
            self.results.append(results)
            finish(orders, results, now)

        self.view.finish_fetch = finished  # type: ignore[assignment, method-assign]

    def order(self, *orders: FetchOrder) -> None:
        self.view.remote._orders.extend(orders)
        self.session.nudge()

    def wait_for_ends(self, num_ends: int) -> list[CopyResult | None]:
        self.until(lambda: len(self.ended) >= num_ends, "the orders end")
        return [result for _, result in self.ended]


@pytest.fixture
def place() -> Iterator[PlayedPlace]:
    with PlayedPlace() as made:
        yield made


@pytest.fixture
def engine(place: PlayedPlace, monkeypatch: pytest.MonkeyPatch) -> Iterator[FetchingEngine]:
    monkeypatch.setattr("raykv.base.deadlines.GRACE_S", GRACE_S)
    with FetchingEngine(place) as made:
        yield made


def result_of(request: Fetch) -> CopyResult:
    return CopyResult(request.number, 7, 1, num_bytes=4096, seconds=0.5)


def wait_for_requests(place: PlayedPlace, number: int) -> None:
    wait_until(lambda: len(place.fetches) >= number, LONG_S, "the NodeActor is asked")


def test_chunk_of_another_node_is_there_after_its_fetch(
    place: PlayedPlace, engine: FetchingEngine
) -> None:
    def fetch(request: Fetch) -> CopyResult:
        place.store(key(1))
        life, number, rows = place.pool.state_of(Namespace("ns"), [key(1)])
        return CopyResult(request.number, life, number, rows, num_bytes=4096, seconds=0.5)

    place.fetch = fetch
    engine.begin()
    view = engine.view
    view.start_request("r", RequestOptions())
    request = view.requests.get("r")
    request.asked.add(key(1))
    request.find(key(1), ((Source("far"),),), view.node_ids)
    assert view.lookup("r", key(1), 0.0) is Lookup.HIT_PENDING
    engine.until(lambda: view.lookup("r", key(1), 0.0) is Lookup.HIT, "it is there")
    (sent,) = place.fetches
    assert (sent.life, sent.namespace, sent.sources.sources) == (view.life, "ns", [Source("far")])
    assert view.counters["chunks_fetched"] == 1


def test_fetches_that_take_long_hold_up_nothing_else(
    place: PlayedPlace, engine: FetchingEngine
) -> None:
    engine.begin()
    engine.order(order(0), scheduler.order(1, Source("far"), tenant="another"))
    wait_for_requests(place, 2)
    place.store(key(9))
    engine.until(lambda: engine.view.num_ready == 1, "the line goes on")
    assert engine.ended == []


@pytest.mark.parametrize("breaks", ["hang up", "rubbish", "another message"])
def test_orders_end_without_a_result_when_the_line_breaks_and_the_next_ones_work(
    place: PlayedPlace, engine: FetchingEngine, breaks: str
) -> None:
    engine.session.lines[0].breakers.pauses = Pauses(0.01, 0.02)
    engine.begin()

    def fetch(_: Fetch) -> CopyResult | None:
        if breaks == "hang up":
            place.hang_up()
            return None
        if breaks == "rubbish":
            return msgspec.structs.replace(CopyResult(1, 7, 1), rows=b"rubbish")
        return msgspec.structs.replace(CopyResult(1, 7, 1), num_bytes="words")

    place.fetch = fetch
    engine.order(order(0), order(1))
    assert engine.wait_for_ends(1) == [None]
    assert engine.ended[0][0] == [order(0), order(1)]
    place.fetch = result_of
    engine.until(lambda: not engine.session.lines[0].is_left_alone, "the line is there again")
    engine.order(order(2))
    assert engine.wait_for_ends(2)[1] == result_of(place.fetches[-1])


def test_orders_without_an_answer_end_at_deadline_and_grace(
    place: PlayedPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.GRACE_S", GRACE_S)
    with FetchingEngine(place, DEADLINE_S) as engine:
        engine.begin()
        started = time.monotonic()
        engine.order(order(0))
        engine.order(order(1))
        assert engine.wait_for_ends(2) == [None, None]
        assert DEADLINE_S + GRACE_S <= time.monotonic() - started < LONG_S / 2
        assert not engine.session.lines[0].is_left_alone
        place.fetch = result_of
        engine.order(order(2))
        assert engine.wait_for_ends(3)[2] is not None


def test_orders_end_at_once_while_the_node_is_left_alone(
    place: PlayedPlace, engine: FetchingEngine
) -> None:
    engine.begin()
    engine.session.lines[0].breakers.pauses = Pauses(LONG_S, LONG_S)
    place.hang_up()
    wait_until(lambda: engine.session.lines[0].is_left_alone, LONG_S, "the line is down")
    for number in range(3):
        engine.order(order(number), order(10 + number))
        engine.session.drain()
        orders, refused = engine.ended[-1]
        assert orders == [order(number), order(10 + number)]
        assert refused is not None
        assert list(refused.failed_chunks) == [0, 1]
        assert refused.refusals == bytes([Refusal.BREAKER_OPEN]) * 2
    # Its own attempts count, too; it makes none any more.
    engine.session.stop(LONG_S)
    now = time.monotonic()
    of_line = engine.session.lines[0].breakers.report(now).refused
    assert engine.session._breaker_report(now).refused == of_line + 3
    assert not place.fetches


def test_fetch_has_ended_when_it_has_at_every_place(place: PlayedPlace) -> None:
    with (
        PlayedPlace("two") as two,
        FetchingEngine(place, others=[two], parts=["0", "1"]) as engine,
    ):
        engine.begin()
        place.fetch = result_of
        engine.order(FetchOrder(key(1), 4096, ((Source("far"),), (Source("farther"),))))
        wait_for_requests(two, 1)
        wait_until(lambda: bool(engine.session.inbox), LONG_S, "the first place has answered")
        engine.session.drain()
        assert engine.ended == []
        two.hang_up()
        engine.until(lambda: engine.ended, "it has ended")
        assert engine.results == [[result_of(place.fetches[0]), None]]
        sent = [(each.life, each.namespace) for each in (place.fetches[0], two.fetches[0])]
        assert sent == [(10, "ns/0"), (11, "ns/1")]
        assert two.fetches[0].sources.sources == [Source("farther")]


def test_stop_waits_for_nothing_and_ends_what_is_under_way(
    place: PlayedPlace, engine: FetchingEngine
) -> None:
    engine.begin()
    engine.order(order(0))
    wait_for_requests(place, 1)
    started = time.monotonic()
    engine.session.stop(LONG_S)
    assert time.monotonic() - started < LONG_S / 2
    engine.session.drain()
    assert engine.ended == [([order(0)], None)]
    engine.order(order(1))
    assert len(place.fetches) == 1
