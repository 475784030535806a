"""Orders on their way into the document."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.base.ids import Namespace, NodeId, Stamp
from raykv.directory.known import document
from raykv.directory.known.desk import MOST_WAITING, OrderDesk
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.protocol import operator
from raykv.protocol.columns import Keys, NamedKeys
from raykv.protocol.engine import Naming
from raykv.protocol.framing import decode
from raykv.protocol.node import ReportedEngine
from tests.fixtures.directory.reporting import engine_of


class Store:
    """A desk, and a store that keeps what it is given."""

    def __init__(self, kept: operator.OrdersDocument | None = None) -> None:
        self.now = 0.0
        self.orders = Orders(kept, 7, 0.0)
        self.engines: list[ReportedEngine] = []
        self.desk = OrderDesk(self.orders, {}, lambda: self.engines)
        self.keys: dict[bytes, bytes] = {}

    def keep(self) -> bool:
        draft = self.desk.next(self.now)
        if draft is None:
            return False
        if draft.keys:
            self.keys[draft.digest] = draft.keys
        for digest in self.desk.kept(self.now):
            self.keys.pop(digest, None)
        return True

    def order(self, order: operator.OperatorOrder) -> str:
        """Carry an order out; why it was refused."""
        if error := self.desk.take(order):
            return error
        while self.keep():
            pass
        return self.state(order.order_id).error

    def state(self, order_id: str) -> operator.OrderState:
        return self.desk.state(order_id, self.now)

    @property
    def document(self) -> operator.OrdersDocument:
        told = self.orders.told(self.now)
        assert told is not None
        return told


@pytest.fixture
def store() -> Store:
    made = Store()
    made.now = MEMBERS_S
    assert made.keep()
    return made


def pin(pin_id: str, *keys: bytes, order_id: str = "", **fields: Any) -> operator.PinOrder:
    return operator.PinOrder(
        order_id or f"pins {pin_id}", pin_id, "space", Keys.of(keys), 60.0, **fields
    )


def test_order_waits_until_members_had_time_to_show_what_they_know() -> None:
    store = Store()
    assert not store.order(operator.PauseOrder("a", paused=True))
    assert store.state("a").orders is None
    assert store.state("a").is_known
    store.now = MEMBERS_S
    assert store.keep()
    assert store.keep()
    assert not store.keep()
    assert store.document.is_paused
    assert store.state("a").orders == store.orders.stamp


def test_order_that_comes_again_is_the_same_one(store: Store) -> None:
    for _ in range(3):
        store.order(operator.PauseOrder("a", paused=True))
    number = store.document.stamp.number
    store.order(operator.PauseOrder("b", paused=False))
    store.order(operator.PauseOrder("a", paused=True))
    assert store.document.stamp.number == number + 1
    assert not store.document.is_paused
    assert not store.state("c").is_known


def test_order_that_is_being_kept_and_comes_again_is_not_carried_out_twice(store: Store) -> None:
    store.desk.take(operator.PauseOrder("a", paused=True))
    assert store.desk.next(store.now)
    assert store.desk.next(store.now) is None
    store.desk.take(operator.PauseOrder("a", paused=True))
    assert store.state("a").is_known
    store.desk.kept(store.now)
    assert store.desk.next(store.now) is None


def test_keys_of_a_pin_are_kept_with_it_and_no_longer(store: Store) -> None:
    store.order(pin("p", b"k1", b"k2", b"k1"))
    document = store.orders.told(store.now + 10.0)
    assert document is not None
    told_pin = document.pins["p"]
    assert (told_pin.namespace, told_pin.num_keys, told_pin.left_s) == ("space", 2, 50.0)
    names = decode(store.desk.pin_keys(told_pin.digest), NamedKeys)
    assert list(names) == [("space", b"k1"), ("space", b"k2")]
    store.order(pin("q", b"k1", b"k2"))
    assert len(store.keys) == 1
    store.order(pin("p", b"k3", order_id="another"))
    assert len(store.keys) == 2
    store.order(operator.UnpinOrder("c", "q"))
    assert len(store.keys) == 1
    assert store.desk.pin_keys(told_pin.digest) == b""
    assert "no pin 'q'" in store.order(operator.UnpinOrder("d", "q"))
    assert not store.order(operator.UnpinOrder("c", "q"))


def test_quotas_that_guarantee_too_much_together_are_refused(store: Store) -> None:
    assert not store.order(operator.Quota("a", "acme", "one", 0.5, 0.6))
    assert "guaranteed 0.5" in store.order(operator.Quota("b", "other", "two", 0.5, 0.6))
    assert "same tenant" in store.order(operator.Quota("c", "other", "one", 0.1, 0.6))
    assert not store.order(operator.Quota("d", "acme", "one", 0.1, 0.6))
    assert not store.order(operator.Quota("e", "other", "two", 0.5, 0.6))
    assert not store.order(operator.EndQuota("f", "acme"))
    assert "no quota" in store.order(operator.EndQuota("g", "acme"))
    assert [share.name for share in store.document.shares.values()] == ["other"]


def name(store: Store, version: str, order_id: str = "", beginning: str = "engine") -> Stamp:
    """Name weights; the number of the order."""
    assert not store.order(operator.NameWeights(order_id or version, beginning, version))
    return store.document.stamp


def test_weights_that_engines_have_now_have_the_name_that_was_given_last(store: Store) -> None:
    store.engines = [engine_of("engine 1", 11, weights=2), engine_of("engine 2", 12)]
    store.engines.append(engine_of("other", 13, space=Namespace("engine")))
    first = name(store, "v1")
    assert store.document.namings == {11: Naming(first, "v1", 2), 12: Naming(first, "v1")}
    assert store.state("v1").told == ["engine 1", "engine 2"]
    # The same name again may be of other weights.
    store.engines[0] = engine_of("engine 1", 11, weights=3)
    second = name(store, "v1", "again", "engine 1")
    assert store.document.namings == {12: Naming(first, "v1"), 11: Naming(second, "v1", 3)}
    assert store.state("again").told == ["engine 1"]


def test_engine_of_that_id_which_comes_later_has_other_weights(store: Store) -> None:
    store.engines = [engine_of("engine", 11)]
    name(store, "v1")
    store.engines = [engine_of("engine", 12)]
    assert store.document.namings.keys() == {11}
    stamp = name(store, "v2")
    assert store.document.namings == {12: Naming(stamp, "v2")}
    store.engines = []
    assert "the id of no engine" in store.order(operator.NameWeights("b", "engine", "v3"))


def test_names_of_the_latest_engines_are_told_and_more_at_once_are_refused(store: Store) -> None:
    store.engines = [engine_of(f"{life:04}", life) for life in range(operator.MAX_TOLD_NAMINGS + 1)]
    assert "a longer beginning" in store.order(operator.NameWeights("all", "0", "v"))
    for engine in store.engines:
        name(store, f"of {engine.hello.life}", beginning=engine.hello.engine_id)
    assert list(store.document.namings) == list(range(1, operator.MAX_TOLD_NAMINGS + 1))


def test_name_is_heard_when_all_engines_that_it_is_for_say_so(store: Store) -> None:
    store.engines = [engine_of("engine 1", 11), engine_of("engine 2", 12)]
    stamp = name(store, "v1")
    assert not store.desk.has_heard("v1", store.now)
    store.engines = [engine_of(f"engine {at}", 10 + at, heard=stamp) for at in (1, 2)]
    assert store.desk.has_heard("v1", store.now)
    # That another one has not heard its name is no matter of this order.
    store.engines.append(engine_of("engine 3", 13))
    name(store, "v2", beginning="engine 3")
    assert store.desk.has_heard("v1", store.now)
    assert not store.desk.has_heard("v2", store.now)
    assert not store.desk.has_heard("never ordered", store.now)


def test_nobody_knows_whether_an_order_is_done_before_members_had_time_to_report(
    store: Store,
) -> None:
    store.engines = [engine_of("engine", 11)]
    name(store, "v1")
    later = Store(store.document)
    assert later.state("v1") == operator.OrderState()
    assert not later.desk.has_heard("v1", later.now)
    later.orders.show(NodeId("one"), None)
    later.now = MEMBERS_S
    assert later.state("v1").behind == ["one"]
    assert later.desk.has_heard("v1", later.now)


def test_orders_of_which_a_life_remembers_the_numbers_are_bounded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(document, "MOST_DONE", 80)
    for number in range(100):
        store.order(operator.PauseOrder(str(number), paused=bool(number % 2)))
    assert [str(n) for n in range(100) if store.state(str(n)).is_known] == list(
        map(str, range(20, 100))
    )


def test_no_more_orders_wait_than_there_is_room_for() -> None:
    store = Store()
    for number in range(MOST_WAITING):
        assert not store.desk.take(operator.PauseOrder(str(number), paused=True))
    assert "try again" in store.desk.take(operator.PauseOrder("one more", paused=True))
