"""Orders are kept before they are told, and outlive the scheduler actor and the head's store."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from raykv.base.clearings import MAX_NAMESPACES
from raykv.base.ids import NodeId, Stamp
from raykv.directory.known.document import MEMBERS_S, OrderError, Orders
from raykv.protocol.engine import Naming
from raykv.protocol.framing import encode
from raykv.protocol.operator import (
    MAX_TOLD_DONE,
    MAX_TOLD_PINS,
    MAX_WANTED_BYTES,
    OrderedPin,
    OrderedShare,
    OrdersDocument,
)

ONE, TWO = NodeId("one"), NodeId("two")
PIN = OrderedPin("n", b"digest", 3, 60.0)


def in_force(orders: Orders, now: float) -> OrdersDocument:
    told = orders.told(now)
    assert told is not None
    return told


@pytest.fixture
def orders() -> Orders:
    """Members have had their time at 0."""
    return Orders(OrdersDocument(Stamp(7, 10), {"a": 5}), 8, -MEMBERS_S)


def test_order_is_in_force_once_it_is_kept_and_not_before(orders: Orders) -> None:
    draft = orders.draft("x", 1.0, is_paused=True)
    told = in_force(orders, 1.0)
    assert (told.stamp, told.is_paused, orders.number_of("x")) == (Stamp(7, 10), False, None)
    again = orders.draft("y", 2.0)
    assert again.stamp == draft.stamp == Stamp(7, 11)
    orders.confirm(draft, 2.0)
    told = in_force(orders, 2.0)
    assert (told.stamp, told.is_paused, orders.number_of("x")) == (Stamp(7, 11), True, Stamp(7, 11))


def test_clearing_makes_void_what_was_stored_before_its_number(orders: Orders) -> None:
    orders.confirm(orders.clear("x", "b", 0.0), 0.0)
    orders.confirm(orders.clear("y", "", 0.0), 0.0)
    told = in_force(orders, 0.0)
    # That of all covers those before it.
    assert (told.stamp.number, told.floors) == (12, {"": 12})


def test_ids_of_the_latest_orders_are_known_in_the_next_life(orders: Orders) -> None:
    for number in range(MAX_TOLD_DONE + 3):
        orders.confirm(orders.draft(str(number), 0.0), 0.0)
    later = Orders(orders.told(0.0), 9, 0.0)
    assert later.number_of("2") is None
    assert later.number_of("3") == Stamp(7, 14)
    # This life remembers more of them.
    assert orders.number_of("2") == Stamp(7, 13)
    assert later.stamp == orders.stamp


def test_pins_are_told_by_the_time_that_they_have_left(orders: Orders) -> None:
    orders.confirm(orders.draft("x", 100.0, pins={"p": PIN}), 100.0)
    told = in_force(orders, 145.0)
    assert told.pins["p"].left_s == 15.0
    # Each later document says what is left then, and a later life counts from that.
    orders.confirm(orders.draft("y", 150.0), 150.0)
    later = Orders(orders.told(155.0), 9, 1000.0)
    told = in_force(later, 1004.0)
    assert told.pins["p"].left_s == 1.0
    told = in_force(later, 1005.0)
    assert not told.pins


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pins": {f"{number:04}" * 60: PIN for number in range(MAX_TOLD_PINS)}}, "49,152"),
        ({"pins": {str(number): PIN for number in range(MAX_TOLD_PINS + 1)}}, "length <= 256"),
        ({"pins": {"p": msgspec.structs.replace(PIN, priority=10)}}, "<= 9"),
        ({"shares": {"t": OrderedShare("t", most=1.5)}}, "<= 1.0"),
        ({"namings": {1: Naming(Stamp(1, 1), "v" * 5000)}}, "length <= 4096"),
    ],
    ids=str,
)
def test_order_that_nobody_could_read_is_refused_and_nothing_has_changed(
    orders: Orders, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(OrderError, match=why):
        orders.draft("x", 0.0, **changes)
    assert orders.stamp == Stamp(7, 10)


def test_clear_of_all_is_possible_when_those_of_some_fill_the_document(orders: Orders) -> None:
    for number in range(16):
        name = f"{number:02}" + "x" * 4000
        orders.confirm(orders.clear(str(number), name, 0.0), 0.0)
    with pytest.raises(OrderError, match="65,536"):
        orders.clear("x", "y" * 4000, 0.0)
    orders.confirm(orders.clear("all", "", 0.0), 0.0)
    told = in_force(orders, 0.0)
    assert set(told.floors) == {""}


def test_cache_can_be_cleared_when_pins_take_all_the_room_that_they_may(orders: Orders) -> None:
    pins = {f"{number:0250}": PIN for number in range(MAX_TOLD_PINS)}
    with pytest.raises(OrderError, match="pins, quotas and names"):
        orders.draft("too many", 0.0, pins=pins)
    while len(encode(OrdersDocument(Stamp(7, 10), pins=pins))) > MAX_WANTED_BYTES - 200:
        pins.popitem()
    orders.confirm(orders.draft("pins", 0.0, pins=pins), 0.0)
    for number in range(MAX_NAMESPACES):
        orders.confirm(orders.clear(f"{number:032}", f"{number:032}", 0.0), 0.0)
    told = in_force(orders, 0.0)
    assert len(told.floors) == MAX_NAMESPACES + 1
    orders.confirm(orders.draft("unpin", 0.0, pins={}), 0.0)


def test_node_that_has_shown_a_later_history_is_behind_what_was_ordered_before_it(
    orders: Orders,
) -> None:
    orders.confirm(orders.clear("x", "b", 0.0), 0.0)
    theirs = OrdersDocument(Stamp(9 << 32, 9))
    assert orders.show(ONE, theirs.stamp)
    draft = orders.meet(theirs, 0.0)
    assert draft is not None
    orders.confirm(draft, 0.0)
    assert orders.number_of("x") == draft.stamp
    assert orders.behind(draft.stamp) == [ONE]


def test_order_that_a_store_has_lost_is_not_known_to_be_done(orders: Orders) -> None:
    orders.confirm(orders.draft("x", 0.0, is_paused=True), 0.0)
    # Before it went back another life had ordered this.
    later = orders.meet(OrdersDocument(Stamp(7, 57)), 0.0)
    assert later is not None
    orders.confirm(later, 0.0)
    assert not later.is_paused
    assert orders.number_of("x") is None


def test_without_a_store_the_latest_document_of_the_members_goes_on_in_a_new_history() -> None:
    """What was cleared in any of them is void in those before."""
    orders = Orders(None, 8, 100.0)
    assert orders.told(100.0) is None
    with pytest.raises(OrderError, match="asks the nodes"):
        orders.draft("x", 100.0)
    assert not orders.show(TWO, None)
    history = 3 << 32 | 7
    assert orders.show(ONE, Stamp(history, 57))
    assert orders.meet(OrdersDocument(Stamp(history, 57), {"a": 50}, is_paused=True), 101.0) is None
    # Another one has seen what that one has not.
    assert not orders.show(ONE, Stamp(history, 57))
    assert orders.show(TWO, Stamp(2 << 32 | 9, 900))
    assert orders.meet(OrdersDocument(Stamp(2 << 32 | 9, 900), {"c": 1}), 101.0) is None
    assert orders.show(TWO, Stamp(history, 60))
    latest = OrdersDocument(Stamp(history, 60), {"b": 60}, pins={"p": PIN})
    assert orders.meet(latest, 102.0) is None
    assert orders.first(104.9) is None
    draft = orders.first(100.0 + MEMBERS_S)
    floors = {"a": 1, "b": 1, "c": 1}
    assert draft == OrdersDocument(Stamp(4 << 32 | 8, 1), floors, pins={"p": PIN})
    orders.confirm(draft, 105.0)
    assert orders.first(106.0) is None
    assert orders.draft("x", 106.0).stamp == Stamp(4 << 32 | 8, 2)


@pytest.mark.parametrize("history", [4 << 32, 7])
def test_who_was_away_when_nobody_had_any_brings_back_nothing_but_its_floors(history: int) -> None:
    mine = OrdersDocument(Stamp(1 << 32, 9), {"a": 8}, is_paused=True)
    orders = Orders(mine, 8, 100.0)
    late = OrdersDocument(Stamp(history, 57), {"b": 50, "a": 20}, pins={"p": PIN})
    assert orders.show(ONE, late.stamp)
    draft = orders.meet(late, 101.0)
    if history > mine.stamp.history:
        assert draft == OrdersDocument(Stamp(5 << 32 | 8, 1), {"a": 1, "b": 1}, is_paused=True)
    else:
        assert draft == OrdersDocument(Stamp(1 << 32, 10), {"a": 10, "b": 10}, is_paused=True)
    assert not orders.show(ONE, late.stamp)


def test_store_that_has_gone_back_costs_no_order_and_no_floor() -> None:
    history = 4 << 32
    orders = Orders(OrdersDocument(Stamp(history, 9), {"a": 8, "b": 9}), 8, 100.0)
    later = OrdersDocument(Stamp(history, 57), {"b": 50, "c": 5}, is_paused=True)
    assert orders.show(ONE, later.stamp)
    draft = orders.meet(later, 101.0)
    floors = {"a": 1, "b": 1, "c": 1}
    assert draft == OrdersDocument(Stamp(5 << 32 | 8, 1), floors, is_paused=True)


def test_order_is_done_when_all_nodes_have_shown_its_number(orders: Orders) -> None:
    orders.show(ONE, Stamp(7, 11))
    orders.show(TWO, None)
    assert orders.behind(Stamp(7, 11)) == [TWO]
    orders.show(TWO, Stamp(6, 90))
    assert orders.behind(Stamp(7, 11)) == [TWO]
    for later in (Stamp(7, 12), Stamp(8, 1)):
        orders.show(TWO, later)
        assert orders.behind(Stamp(7, 11)) == []
    orders.show(TWO, Stamp(7, 3))
    orders.lose(TWO)
    assert orders.behind(Stamp(7, 11)) == []


class World:
    """A head's store that loses what it has, lives of the scheduler actor, and members that hear
    now and then.
    """

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.now = 0.0
        self.store: OrdersDocument | None = None
        self.members: dict[NodeId, OrdersDocument | None] = {ONE: None, TWO: None}
        self.heard: dict[Stamp, OrdersDocument] = {}
        self.orders = self.begin()

    def begin(self) -> Orders:
        self.reported = set[NodeId]()
        return Orders(self.store, self.source.getrandbits(32), self.now)

    def keep(self, draft: OrdersDocument | None) -> None:
        """The store keeps it and says so; or nobody knows whether it does, and a life begins."""
        if draft is None:
            return
        fate = self.source.randrange(6)
        if fate:
            self.store = draft
        if fate > 1:
            self.orders.confirm(draft, self.now)
        else:
            self.orders = self.begin()

    def step(self, number: int) -> None:
        self.now += self.source.choice([0.0, 0.1, 3.0])
        node = self.source.choice([ONE, TWO])
        match self.source.randrange(9):
            case 0 | 1 | 2:
                self.order(str(number))
            case 3 | 4:
                self.hear(node)
            case 5 | 6:
                self.report(node)
            case 7 if not self.source.randrange(3):
                self.orders = self.begin()
            case 8 if not self.source.randrange(4):
                # Ray's head is lost, and comes back with nothing.
                self.store = None
                self.orders = self.begin()
        if self.members.keys() <= self.reported:
            self.keep(self.orders.first(self.now))

    def order(self, name: str) -> None:
        """After all have reported, as members do within their time."""
        for node in self.members.keys() - self.reported:
            self.report(node)
        try:
            draft = self.orders.clear(name, self.source.choice(["a", "b", ""]), self.now)
        except OrderError:
            return
        self.keep(draft)

    def hear(self, node: NodeId) -> None:
        told = self.orders.told(self.now)
        if told is None:
            return
        assert self.heard.setdefault(told.stamp, told) == told, "one number, two documents"
        self.members[node] = told

    def report(self, node: NodeId) -> None:
        seen = self.members[node]
        self.reported.add(node)
        if self.orders.show(node, seen.stamp if seen else None) and seen is not None:
            self.keep(self.orders.meet(seen, self.now))


def test_one_number_is_one_document_and_no_floor_is_lost_whatever_is() -> None:
    for seed in range(300):
        world = World(seed)
        for number in range(120):
            world.step(number)
        histories = {stamp.history for stamp in world.heard}
        for history in histories:
            some = sorted(stamp for stamp in world.heard if stamp.history == history)
            floors = [world.heard[stamp].floors for stamp in some]
            for before, after in pairwise(floors):
                for name, floor in before.items():
                    assert max(after.get(name, 0), after.get("", 0)) >= floor, seed
