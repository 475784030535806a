"""What a node's reports do, with a scheduler actor that is a function."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, NoReturn

import msgspec
import pytest

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Key, Namespace, NodeId, Stamp
from raykv.cluster import bequest
from raykv.cluster.bequest import KeptOrders
from raykv.node.keeper import PoolKeeper
from raykv.node.reports import Reports
from raykv.protocol.columns import NamedKeys
from raykv.protocol.engine import EngineHello, Tell
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import ALL_READ, Position
from raykv.protocol.node import NodeStats, Report, ReportAnswer
from raykv.protocol.operator import OrderedPin, OrdersDocument

PAGE = 4096
A = Namespace("a")
FIRST = Stamp(1, 1)


def no_answer(*_: object) -> NoReturn:
    raise TimeoutError("nobody is there")


class PlayedReports:
    """A node that reports when it is told to, and what the scheduler actor says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.keeper = PoolKeeper(NodeId("n"), 7, PoolGeometry(8 * PAGE, 4 * PAGE))
        self.reports = Reports(self.keeper, lambda: NodeStats(num_workers=3))
        self.calls: list[str] = []
        self.told: list[Report] = []
        self.answer = ReportAnswer(5)
        self.documents: list[OrdersDocument] = []
        self.keys: dict[bytes, NamedKeys] = {}
        self.is_alone = False
        monkeypatch.setattr(self.reports, "_call", self.call)

    def call(self, method: str, *arguments: Any) -> Any:
        if self.is_alone:
            no_answer()
        self.calls.append(method)
        if method == "report":
            self.told.append(decode(arguments[0], Report))
            return encode(self.answer)
        if method == "orders":
            return encode(self.documents[-1]) if self.documents else b""
        if method == "pin_keys":
            found = self.keys.get(arguments[0])
            return b"" if found is None else encode(found)
        assert method == "show_orders", method
        self.documents.append(decode(arguments[0], OrdersDocument))
        return None

    def report(self) -> list[str]:
        """Report once; the calls that were made."""
        self.calls.clear()
        self.reports._report_once(1)
        return list(self.calls)

    def say(self, **fields: Any) -> None:
        self.answer = msgspec.structs.replace(self.answer, **fields)


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedReports]:
    made = PlayedReports(monkeypatch)
    yield made
    made.keeper.pool.stop()


def test_report_says_who_the_node_is(node: PlayedReports) -> None:
    assert node.report() == ["report"]
    (told,) = node.told
    assert (told.node_id, told.life, told.seq, told.stats.num_workers) == ("n", 7, 1, 3)
    assert told.pid
    assert told.hostname
    assert not node.reports.breaker_report().rows


def test_later_orders_are_fetched_and_shown_with_the_next_report(node: PlayedReports) -> None:
    node.say(orders=FIRST)
    node.documents.append(OrdersDocument(FIRST, is_paused=True))
    assert node.report() == ["report", "orders"]
    assert node.keeper.owner.orders.stamp == FIRST
    assert node.report() == ["report"]
    assert [each.orders for each in node.told] == [Stamp(0, 0), FIRST]


def test_orders_are_not_shown_before_the_disk_has_kept_what_they_clear(node: PlayedReports) -> None:
    kept = [False, False, True]
    node.keeper.keep_floors = lambda _floors, _deadline: kept.pop(0)
    node.say(orders=FIRST)
    node.documents.append(OrdersDocument(FIRST))
    for _ in range(3):
        node.report()
    # Asked once, tried with each report.
    assert [each.orders for each in node.told] == [Stamp(0, 0), Stamp(0, 0), FIRST]
    assert node.calls == ["report"]
    assert not kept


def test_orders_that_an_engine_names_and_nobody_has_are_asked_for_once(node: PlayedReports) -> None:
    node.documents.append(OrdersDocument(FIRST))
    hello = EngineHello("e", 1, A, slot_bytes={0: PAGE})
    owner, now = node.keeper.owner, node.keeper.now()
    owner.hello(hello, now)
    owner.tell(Tell(1, 1, A, orders=Stamp(1, 9)), now)
    assert node.report() == ["report", "orders"]
    assert node.report() == ["report"]


def test_orders_that_nobody_has_are_asked_for_no_sooner_than_the_directory_wants(
    node: PlayedReports,
) -> None:
    hello = EngineHello("e", 1, A, slot_bytes={0: PAGE})
    owner, now = node.keeper.owner, node.keeper.now()
    owner.hello(hello, now)
    owner.tell(Tell(1, 1, A, orders=Stamp(1, 9)), now)
    node.say(pause_ms=400)
    began = time.monotonic()
    assert node.report() == ["report", "orders"]
    assert owner.has_news
    node.reports._wait()
    assert time.monotonic() - began >= 0.4


def test_document_is_sent_to_a_scheduler_actor_that_lacks_it(node: PlayedReports) -> None:
    node.keeper.take_orders(OrdersDocument(FIRST), 1.0)
    node.say(wants_orders=True)
    assert node.report() == ["report", "show_orders"]
    assert node.documents == [OrdersDocument(FIRST)]


def test_keys_of_pins_are_asked_for_until_they_are_known(node: PlayedReports) -> None:
    pins = {name: OrderedPin(A, name.encode(), 1, 60.0) for name in ("p", "q")}
    node.keeper.take_orders(OrdersDocument(FIRST, pins=pins), 1.0)
    node.keys[b"q"] = NamedKeys.of([(A, Key(b"k" * 8))])
    assert node.report() == ["report", "pin_keys", "pin_keys"]
    pins_there = {pin_id: pin.names for pin_id, pin in node.keeper.owner.orders.pins()}
    assert pins_there == {"q": [(A, b"k" * 8)]}
    assert node.report() == ["report", "pin_keys"]


def test_scheduler_actor_that_does_not_answer_is_left_alone(node: PlayedReports) -> None:
    node.is_alone = True
    call = node.reports._breakers.begin("scheduler", time.monotonic())
    assert call is not None
    node.reports._report_once(call)
    assert [row.peer for row in node.reports.breaker_report().rows] == ["scheduler"]
    node.is_alone = False
    assert node.report() == ["report"]
    assert [each.seq for each in node.told] == [2]
    assert not node.reports.breaker_report().rows


def test_orders_are_read_from_the_heads_store_while_nobody_answers(
    node: PlayedReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was stored under an early number would be void once there is a floor."""
    kept: list[bytes] = []

    monkeypatch.setattr(bequest, "get", lambda _: kept[-1] if kept else None)
    node.is_alone = True
    node.report()
    assert node.keeper.owner.orders.stamp == Stamp(0, 0)
    pins = {name: OrderedPin(A, b"d", 1, left_s) for name, left_s in (("p", 90.0), ("q", 10.0))}
    document = OrdersDocument(FIRST, {"a": 1}, is_paused=True, pins=pins)
    kept.append(encode(KeptOrders(document, time.time() - 30.0)))
    node.report()
    told = node.keeper.owner.orders.told(node.keeper.now())
    assert told is not None
    assert (told.stamp, told.is_paused, list(told.pins)) == (FIRST, True, ["p"])
    assert told.pins["p"].left_s == pytest.approx(60.0, abs=20.0)
    # Later ones are the scheduler actor's to tell.
    kept.append(b"no document")
    node.report()
    node.is_alone = False
    node.report()
    assert node.told[-1].orders == FIRST


def test_node_begins_with_the_orders_that_are_kept(
    node: PlayedReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end() -> None:
        raise InterruptedError

    monkeypatch.setattr(
        bequest, "get", lambda _: encode(KeptOrders(OrdersDocument(FIRST), time.time()))
    )
    monkeypatch.setattr(node.reports, "_wait", end)
    with pytest.raises(InterruptedError):
        node.reports._run()
    assert node.keeper.owner.orders.stamp == FIRST


def test_store_that_does_not_answer_costs_no_report(
    node: PlayedReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bequest, "get", no_answer)
    node.is_alone = True
    node.report()
    node.is_alone = False
    assert node.report() == ["report"]


def test_wait_ends_with_news_or_a_heartbeat(
    node: PlayedReports, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 0.2)
    node.say(position=Position(7, 0, ALL_READ))
    node.report()
    began = time.monotonic()
    node.reports._wait()
    assert time.monotonic() - began >= 0.1
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 60.0)
    node.keeper.owner.hello(EngineHello("e", 1, A, slot_bytes={0: PAGE}), node.keeper.now())
    node.reports._wait()
    assert time.monotonic() - began < 30.0
