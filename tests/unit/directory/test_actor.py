"""The scheduler actor without Ray, with the store of Ray's head played by a dictionary."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raykv.base.errors import ClusterError, MessageError
from raykv.base.ids import Stamp
from raykv.cluster import bequest
from raykv.cluster.bequest import ORDERS, PIN, WISH, KeptOrders
from raykv.directory import steward
from raykv.directory.actor import SchedulerActor
from raykv.directory.known import document as orders_document
from raykv.directory.known.desk import Draft
from raykv.directory.steward import Steward, next_life
from raykv.protocol import operator
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Ask, AskAnswer, Naming
from raykv.protocol.events import EventPage
from raykv.protocol.framing import decode, encode
from raykv.protocol.measures import ClusterMetrics
from raykv.protocol.node import Report, ReportAnswer
from raykv.protocol.reader import PrefixPage, PrefixQuery, SpacePage, WherePage, WhereQuery
from raykv.protocol.sessions import SessionAnswer, SessionNews, SessionOrder, SessionWord
from raykv.protocol.status import ClusterStatus
from tests.fixtures.directory.reporting import engine_of
from tests.fixtures.waiting import wait_until

YEAR = 365.25 * 86_400


class Store(dict[str, bytes]):
    """What was left, and whether it takes anything."""

    is_away = False

    def put(self, name: str, value: bytes) -> None:
        if self.is_away:
            raise TimeoutError("the head node is away")
        self[name] = value

    def entries(self) -> Iterator[tuple[str, bytes]]:
        if self.is_away:
            raise TimeoutError("the head node is away")
        return iter(list(self.items()))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """What the actors of a test keep; its end waits for them, since they live on."""
    made = Store()
    started.clear()
    monkeypatch.setattr(bequest, "put", made.put)
    monkeypatch.setattr(bequest, "get", made.get)
    monkeypatch.setattr(bequest, "delete", lambda name: made.pop(name, None))
    monkeypatch.setattr(bequest, "entries", made.entries)
    monkeypatch.setattr(steward, "RECONCILE_PAUSES_S", (0.01, 0.01))
    monkeypatch.setattr(orders_document, "MEMBERS_S", 0.0)
    yield made
    wait_until(lambda: all(each._steward.has_kept for each in started), 10.0, "all is kept")


started: list[SchedulerActor] = []


def start() -> SchedulerActor:
    started.append(SchedulerActor("here"))
    return started[-1]


def order(actor: SchedulerActor, what: operator.OperatorOrder) -> operator.OrderAnswer:
    return decode(actor.order(encode(what)), operator.OrderAnswer)


def state(actor: SchedulerActor, order_id: str) -> operator.OrderState:
    return decode(actor.order_state(order_id), operator.OrderState)


def carry_out(actor: SchedulerActor, what: operator.OperatorOrder) -> Stamp:
    assert not order(actor, what).error
    wait_until(lambda: state(actor, what.order_id).orders is not None, 10.0, "it is in force")
    stamp = state(actor, what.order_id).orders
    assert stamp is not None
    return Stamp(*stamp)


def report(actor: SchedulerActor, **fields: Any) -> ReportAnswer:
    report.seq += 1  # type: ignore[attr-defined]
    message = Report("node", 1, report.seq, **fields)  # type: ignore[attr-defined]
    return decode(actor.report(encode(message)), ReportAnswer)


report.seq = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("year", [-1, 0, 54, 55.1, 56, 123.1, 200])
def test_life_is_above_the_last_one_whatever_the_clock_says(year: float) -> None:
    for last in (0, 5, 1 << 50):
        assert next_life(year * YEAR, last) > last
    assert next_life(57 * YEAR, 0) > next_life(56 * YEAR, 0) > next_life(0, 0) >= 1


def test_lives_rise(store: Store) -> None:
    store[bequest.LIFE] = b"%d" % (1 << 50)
    assert [report(start()).life for _ in range(2)] == [(1 << 50) + 1, (1 << 50) + 2]


def test_order_is_in_force_once_the_store_has_it_and_for_the_next_life(store: Store) -> None:
    actor = start()
    stamp = carry_out(actor, operator.ClearOrder("a", "space"))
    kept = decode(store[ORDERS], KeptOrders).document
    assert kept.stamp == stamp == report(actor).orders
    assert kept.floors == {"space": stamp.number}
    carry_out(actor, operator.PauseOrder("b", paused=True))
    later = start()
    assert decode(later.status(), ClusterStatus).paused
    assert decode(later.orders(), operator.OrdersDocument).floors == {"space": stamp.number}
    assert state(later, "a").orders == stamp
    assert carry_out(later, operator.PauseOrder("c", paused=False)) > stamp


def test_nobody_hears_of_orders_that_the_store_may_not_have(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = []

    def end_process(why: str) -> None:
        ended.append(why)
        # bounded: with the tests; nothing of a process that has ended goes on
        threading.Event().wait()

    monkeypatch.setattr(steward, "end_process", end_process)
    actor = start()
    started.clear()
    before = carry_out(actor, operator.PauseOrder("a", paused=True))
    store.is_away = True
    order(actor, operator.PauseOrder("b", paused=False))
    wait_until(lambda: bool(ended), 10.0, "the process ends")
    assert "not known whether orders were kept" in ended[0]
    assert state(actor, "b").orders is None
    assert report(actor).orders == before
    assert decode(actor.status(), ClusterStatus).paused


def test_pin_outlives_the_actor_with_the_time_that_is_left(store: Store) -> None:
    first = start()
    carry_out(first, operator.PinOrder("a", "p", "space", Keys.of([b"k"]), 100.0))
    carry_out(first, operator.PinOrder("b", "q", "space", Keys.of([b"other"]), 100.0))
    carry_out(first, operator.UnpinOrder("c", "q"))
    kept = decode(store[ORDERS], KeptOrders)
    store[ORDERS] = encode(KeptOrders(kept.document, kept.at - 60.0))
    later = start()
    ((pin_id, pin),) = decode(later.orders(), operator.OrdersDocument).pins.items()
    assert pin_id == "p"
    assert 30.0 < pin.left_s <= 40.0
    assert later.pin_keys(pin.digest) == store[PIN + pin.digest.hex()]
    wait_until(lambda: sum(name.startswith(PIN) for name in store) == 1, 10.0, "one is forgotten")
    store[ORDERS] = encode(KeptOrders(kept.document, time.time() - 200.0))
    assert not decode(start().orders(), operator.OrdersDocument).pins


class TakenAtOnce(list[bytes]):
    """Digests of which another thread takes one out whenever somebody looks for it."""

    def __contains__(self, digest: object) -> bool:
        is_here = super().__contains__(digest)
        self.clear()
        return is_here


@pytest.mark.usefixtures("store")
def test_keys_that_are_about_to_be_forgotten_are_kept_with_a_new_pin() -> None:
    made = Steward("here")
    made._unused = TakenAtOnce([b"digest"])
    made.keep(Draft(operator.OrdersDocument(Stamp(1, 1)), "order", b"digest", b"keys"))
    assert not made._unused
    assert not made.has_kept


def test_keys_of_a_pin_are_kept_before_the_document_that_names_them(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, value: bytes) -> None:
        if name == ORDERS:
            for pin in decode(value, KeptOrders).document.pins.values():
                lacking.extend([pin] if PIN + pin.digest.hex() not in store else [])
        store.put(name, value)

    lacking: list[operator.OrderedPin] = []
    monkeypatch.setattr(bequest, "put", put)
    carry_out(start(), operator.PinOrder("a", "p", "space", Keys.of([b"k"]), 100.0))
    assert decode(store[ORDERS], KeptOrders).document.pins
    assert not lacking


def test_clock_that_was_set_back_makes_no_pin_longer_and_no_life_lower(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = start()
    carry_out(first, operator.PinOrder("a", "p", "space", Keys.of([b"k"]), 100.0))
    life, now = report(first).life, time.time()
    monkeypatch.setattr(time, "time", lambda: now - YEAR)
    later = start()
    (pin,) = decode(later.orders(), operator.OrdersDocument).pins.values()
    assert pin.left_s <= 100.0
    assert report(later).life > life


def test_only_what_was_cleared_outlives_the_end_of_all_actors(store: Store) -> None:
    first = start()
    carry_out(first, operator.PauseOrder("a", paused=True))
    carry_out(first, operator.PinOrder("b", "p", "space", Keys.of([b"k"]), 100.0))
    stamp = carry_out(first, operator.ClearOrder("c", "space"))
    store[WISH] = b"a wish"
    bequest.delete(WISH)
    # What is ordered until the actors have ended has a number that nothing else has.
    stamp = carry_out(first, operator.ClearOrder("d", "space"))
    for _ in range(2):
        bequest.forget_orders()
    assert store.keys() == {ORDERS, bequest.LIFE}
    later = decode(start().orders(), operator.OrdersDocument)
    assert later.floors == {"space": stamp.number}
    assert later.stamp == Stamp(stamp.history, stamp.number + 1)
    assert not later.is_paused
    assert not later.pins


def test_life_does_not_begin_without_what_is_left(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.is_away = True
    monkeypatch.setattr(steward, "INHERIT_S", 0.0)
    with pytest.raises(ClusterError, match="what an earlier life has left can't be read"):
        start()


def test_what_is_left_and_can_not_be_read_is_as_if_it_were_not_there(store: Store) -> None:
    store |= {ORDERS: b"no struct", bequest.LIFE: b"no number", PIN + "no digest": b"", "wish": b""}
    actor = start()
    assert carry_out(actor, operator.PauseOrder("a", paused=True)).number >= 1


@pytest.mark.usefixtures("store")
def test_newer_document_that_a_node_has_seen_is_taken_over() -> None:
    actor = start()
    mine = carry_out(actor, operator.PauseOrder("a", paused=False))
    theirs = operator.OrdersDocument(
        Stamp(mine.history, mine.number + 5), {"space": 3}, is_paused=True
    )
    assert report(actor, orders=theirs.stamp).wants_orders
    actor.show_orders(encode(theirs))
    wait_until(lambda: report(actor, orders=theirs.stamp).orders > theirs.stamp, 10.0, "it is kept")
    assert decode(actor.orders(), operator.OrdersDocument).is_paused


@pytest.mark.usefixtures("store")
def test_engines_hear_what_their_weights_are_called() -> None:
    actor = start()
    report(actor, engines=[engine_of("engine 1"), engine_of("other", 2)])
    stamp = carry_out(actor, operator.NameWeights("a", "engine", "v2"))
    assert state(actor, "a").told == ["engine 1"]
    assert not actor.has_heard("a")
    told = report(actor, engines=[engine_of("engine 1")]).namings
    assert told == {1: Naming(stamp, "v2")}
    report(actor, engines=[engine_of("engine 1", heard=stamp)])
    assert actor.has_heard("a")
    assert not actor.has_heard("never ordered")


@pytest.mark.usefixtures("store")
def test_actor_answers_everybody() -> None:
    actor = start()
    report(actor, engines=[engine_of("e")])
    assert decode(actor.ask(encode(Ask("e", 1, "n", ["node"]))), AskAnswer).life
    assert decode(actor.spaces(), SpacePage).engine_nodes == [["node"]]
    where = encode(WhereQuery("n", [b"k"]))
    assert decode(actor.where(where), WherePage).answered == 1
    prefixes = encode(PrefixQuery("n", "0:16", [b"k"], [1]))
    assert decode(actor.prefixes(prefixes), PrefixPage).anywhere == [0]
    assert decode(actor.status(), ClusterStatus).tenants == []
    page = decode(actor.events(0, 0), EventPage)
    assert page.last_seq == len(page) == 2
    assert actor.targets() == []
    over = SessionOrder("n", SessionNews("s", SessionWord.OVER))
    assert decode(actor.order_session(encode(over)), SessionAnswer).nodes == ["node"]
    families = decode(actor.metrics(), ClusterMetrics).families
    assert {"raykv_nodes", "raykv_engines", "raykv_call_seconds"} <= {f.name for f in families}


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("report", (b"x",)),
        ("ask", (b"x",)),
        ("order", (b"x",)),
        ("order", ("x",)),
        ("order_state", (7,)),
        ("show_orders", (b"x",)),
        ("pin_keys", ("x",)),
        ("events", (-1, 0)),
        ("events", (0, 1 << 70)),
        ("where", (b"x",)),
        ("prefixes", (b"x",)),
        ("wish", (b"x",)),
        ("order_session", (b"x",)),
    ],
)
def test_nonsense_is_refused(method: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(MessageError):
        getattr(start(), method)(*arguments)
