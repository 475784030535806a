"""Orders on their way into the document."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.base.errors import MessageError, VersionError
from raykv.base.ids import NodeId, Stamp
from raykv.directory.known.desk import MOST_WAITING, OrderDesk
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.protocol.columns import Keys
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.named.columns import NamedKeys
from raykv.protocol.operator import (
    MAX_TOLD_PINS,
    ClearOrder,
    EndQuota,
    NameWeights,
    OperatorOrder,
    OrdersDocument,
    PauseOrder,
    PinOrder,
    Quota,
    UnpinOrder,
    receive_order,
)

V = PROTOCOL_VERSION


class Store:
    """A desk, and a store that keeps what it is given."""

    def __init__(self, kept: OrdersDocument | None = None) -> None:
        self.now = 0.0
        self.orders = Orders(kept, 7, 0.0)
        self.desk = OrderDesk(self.orders, {})
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

    def order(self, order: OperatorOrder) -> str:
        """Carry an order out; why it was refused."""
        if error := self.desk.take(order):
            return error
        while self.keep():
            pass
        return self.desk.state(order.order_id).error

    @property
    def document(self) -> OrdersDocument:
        told = self.orders.told(self.now)
        assert told is not None
        return told


@pytest.fixture
def store() -> Store:
    made = Store()
    made.now = MEMBERS_S
    assert made.keep()
    return made


def pin(pin_id: str, *keys: bytes, order_id: str = "", **fields: Any) -> PinOrder:
    return PinOrder(V, order_id or f"pins {pin_id}", pin_id, "space", Keys.of(keys), 60.0, **fields)


def test_order_waits_until_members_had_time_to_show_what_they_know() -> None:
    store = Store()
    assert not store.order(PauseOrder(V, "a", paused=True))
    assert store.desk.state("a").orders is None
    assert store.desk.state("a").is_known
    store.now = MEMBERS_S
    assert store.keep()
    assert store.keep()
    assert not store.keep()
    assert store.document.is_paused
    assert store.desk.state("a").orders == store.orders.stamp


def test_order_that_comes_again_is_the_same_one(store: Store) -> None:
    for _ in range(3):
        store.order(PauseOrder(V, "a", paused=True))
    number = store.document.stamp.number
    store.order(PauseOrder(V, "b", paused=False))
    store.order(PauseOrder(V, "a", paused=True))
    assert store.document.stamp.number == number + 1
    assert not store.document.is_paused
    assert not store.desk.state("c").is_known


def test_order_that_is_being_kept_and_comes_again_is_not_carried_out_twice(store: Store) -> None:
    store.desk.take(PauseOrder(V, "a", paused=True))
    assert store.desk.next(store.now)
    assert store.desk.next(store.now) is None
    store.desk.take(PauseOrder(V, "a", paused=True))
    assert store.desk.state("a").is_known
    store.desk.kept(store.now)
    assert store.desk.next(store.now) is None


def test_order_is_done_when_all_nodes_have_shown_its_number(store: Store) -> None:
    store.order(ClearOrder(V, "a", "space"))
    stamp = store.document.stamp
    assert store.document.floors == {"space": stamp.number}
    store.orders.show(NodeId("one"), Stamp(stamp.history, stamp.number - 1))
    store.orders.show(NodeId("two"), stamp)
    assert store.desk.state("a").behind == ["one"]
    store.orders.show(NodeId("one"), stamp)
    assert store.desk.state("a").behind == []


def test_keys_of_a_pin_are_kept_with_it_and_no_longer(store: Store) -> None:
    store.order(pin("p", b"k1", b"k2", b"k1"))
    (told,) = store.desk.pins(store.now + 10.0)
    assert (told.pin_id, told.namespace, told.chunks, told.left_s) == ("p", "space", 2, 50.0)
    names = decode(store.desk.pin_keys(told.digest), NamedKeys)
    assert list(names) == [("space", b"k1"), ("space", b"k2")]
    store.order(pin("q", b"k1", b"k2"))
    assert len(store.keys) == 1
    store.order(pin("p", b"k3", order_id="another"))
    assert len(store.keys) == 2
    store.order(UnpinOrder(V, "c", "q"))
    assert len(store.keys) == 1
    assert store.desk.pin_keys(told.digest) == b""
    assert "no pin 'q'" in store.order(UnpinOrder(V, "d", "q"))
    assert not store.order(UnpinOrder(V, "c", "q"))


def test_document_that_would_be_too_large_is_refused_and_nothing_has_changed(store: Store) -> None:
    for number in range(MAX_TOLD_PINS):
        assert not store.order(pin(str(number), b"k"))
    stamp = store.document.stamp
    assert store.order(pin("too much", b"k"))
    assert store.document.stamp == stamp
    assert not store.order(PauseOrder(V, "a", paused=True))


def test_quotas_that_guarantee_too_much_together_are_refused(store: Store) -> None:
    assert not store.order(Quota(V, "a", "acme", "one", 0.5, 0.6))
    assert "guaranteed 0.5" in store.order(Quota(V, "b", "other", "two", 0.5, 0.6))
    assert "same tenant" in store.order(Quota(V, "c", "other", "one", 0.1, 0.6))
    assert not store.order(Quota(V, "d", "acme", "one", 0.1, 0.6))
    assert not store.order(Quota(V, "e", "other", "two", 0.5, 0.6))
    assert not store.order(EndQuota(V, "f", "acme"))
    assert "no quota" in store.order(EndQuota(V, "g", "acme"))
    assert [share.name for share in store.document.shares.values()] == ["other"]


def test_weights_have_the_name_that_was_given_last(store: Store) -> None:
    store.order(NameWeights(V, "a", "engine", "v1"))
    store.order(NameWeights(V, "b", "engine", "v2"))
    assert store.document.namings == {"engine": "v2"}


def test_document_that_a_node_shows_is_met_and_kept(store: Store) -> None:
    mine = store.document
    shown = OrdersDocument(Stamp(mine.stamp.history, 9), {"space": 5}, is_paused=True)
    store.desk.show(shown)
    assert store.keep()
    assert not store.keep()
    assert store.document.is_paused
    assert store.document.stamp > shown.stamp


def test_no_more_orders_wait_than_there_is_room_for() -> None:
    store = Store()
    for number in range(MOST_WAITING):
        assert not store.desk.take(PauseOrder(V, str(number), paused=True))
    assert "try again" in store.desk.take(PauseOrder(V, "one more", paused=True))


@pytest.mark.parametrize(
    "fields",
    [
        {"order_id": ""},
        {"order_id": "x" * 200},
        {"pin_id": ""},
        {"namespace": ""},
        {"ttl_s": 0.0},
        {"ttl_s": 1e9},
        {"ttl_s": float("nan")},
        {"priority": 0},
        {"priority": 10},
        {"keys": Keys()},
        {"keys": Keys.of([b"k"] * 5000)},
    ],
    ids=str,
)
def test_order_that_cannot_be_meant_is_refused(fields: dict[str, Any]) -> None:
    good: dict[str, Any] = {
        "type": "pin",
        "version": V,
        "order_id": "a",
        "pin_id": "p",
        "namespace": "space",
        "keys": Keys.of([b"k"]),
        "ttl_s": 1.0,
    }
    good_order = receive_order(encode(good), "the operator", "here")  # type: ignore[arg-type]
    assert good_order.order_id == "a"
    with pytest.raises(MessageError):
        receive_order(encode(good | fields), "the operator", "here")  # type: ignore[arg-type]
    with pytest.raises(VersionError):
        receive_order(encode(good | {"version": V + 1}), "them", "here")  # type: ignore[arg-type]
