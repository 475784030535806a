"""Pins: ordered where there is room for them, and put together from what nodes say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from raykv.base.errors import ClusterError, NotFoundError
from raykv.base.ids import Key, Namespace, Stamp, part_of
from raykv.client import pins
from raykv.protocol.columns import NamedKeys, Numbers, Source
from raykv.protocol.framing import encode, receive
from raykv.protocol.operator import (
    NodePins,
    OperatorOrder,
    OrderAnswer,
    OrderedPin,
    OrdersDocument,
    OrderState,
    PinHere,
    PinOrder,
    PinsHere,
    PinStatus,
    UnpinOrder,
)
from raykv.protocol.status import NamespaceStatus
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.played_cluster import Methods, play, silent, status, where_page

SPACE = "model"
CHUNK_BYTES = 10


def held(kept: list[int], waiting: Sequence[int] = ()) -> PinHere:
    """Chunks of a pin by their numbers."""
    return PinHere(Numbers.of(kept), Numbers.of(waiting), len(kept) * CHUNK_BYTES)


class PlayedPins:
    """Two nodes that have chunks 0 to 3, of which the second one has room for one pinned chunk."""

    def __init__(self, patches: pytest.MonkeyPatch, told: dict[str, list[bytes]]) -> None:
        self.orders: list[Any] = []
        self.held: dict[str, dict[str, dict[str, PinHere]]] = {"one": {}, "two": {}}
        self.nodes: dict[str, Methods] = {
            name: {"pins": lambda name=name: self._pins(name)} for name in self.held
        }
        space = NamespaceStatus(SPACE, "tiny", 8, 8 * CHUNK_BYTES)
        known = status(namespaces={SPACE: 8}, spaces=[space])
        document = OrdersDocument(
            Stamp(1, 1),
            pins={
                pin_id: OrderedPin(SPACE, pin_id.encode(), len(keys), 5.0)
                for pin_id, keys in told.items()
            },
        )
        places = {key(at): [Source("one"), Source("two")] for at in range(4)}
        methods: Methods = {
            "where": lambda raw: where_page(raw, places),
            "status": lambda: encode(known),
            "orders": lambda: encode(document),
            "pin_keys": lambda digest: encode(
                NamedKeys.of((Namespace(SPACE), Key(each)) for each in told[digest.decode()])
            ),
            "order": self._order,
            "order_state": lambda _: encode(OrderState(Stamp(1, 1))),
        }
        self.scheduler = play(patches, methods, self.nodes)

    def _order(self, raw: bytes) -> bytes:
        order = receive(raw, OperatorOrder, "a test", "it")
        self.orders.append(order)
        if isinstance(order, PinOrder):
            self.held["one"][order.pin_id] = {"": held([0], [1])}
            self.held["two"][order.pin_id] = {"": held([1], [2])}
        return encode(OrderAnswer())

    def _pins(self, node_id: str) -> bytes:
        quota = {"one": 100, "two": CHUNK_BYTES}[node_id]
        parts = self.held[node_id].values()
        kept = sum(each.num_bytes for some in parts for each in some.values())
        sums = NodePins(node_id, kept, 0, 0, quota)
        return encode(PinsHere(sums, self.held[node_id], 2, 1))

    def pin(self, *numbers: int, pin_id: str = "new", priority: int | None = None) -> PinStatus:
        return pins.pin(
            self.scheduler, [key(at) for at in numbers], ttl_s=5.0, priority=priority, pin_id=pin_id
        )


def test_pin_without_room_is_refused_before_it_is_ordered(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPins(monkeypatch, {})
    with pytest.raises(
        ClusterError, match="that takes 20 B more of node two, where pins take 0 B of the 10 B"
    ):
        played.pin(0, 1)
    assert played.orders == []
    # What gives way takes no room.
    played.pin(0, 1, priority=1)
    assert len(played.orders) == 1


def test_chunks_that_are_pinned_already_take_no_more_room(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPins(monkeypatch, {"old": [key(0), key(1)]})
    played.held["two"]["old"] = {"": held([0])}
    with pytest.raises(ClusterError, match="nothing was pinned"):
        played.pin(2)
    # It takes the place of the earlier one of that name.
    played.pin(2, pin_id="old")
    played.pin(0, 1)


def test_all_pins_are_listed_with_their_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPins(monkeypatch, {"old": [key(0), key(1)], "empty": []})
    played.held["two"]["old"] = {"": held([1])}
    known = pins.pins(played.scheduler)
    pin = known.pins[0]
    assert (pin.pin_id, pin.chunks, pin.held_chunks) == ("old", 2, 1)
    assert [node.node_id for node in known.nodes] == ["one", "two"]
    assert (known.client_chunks, known.hints_refused) == (4, 2)
    assert pins.chunks_of(played.scheduler, "old") == (SPACE, [key(0), key(1)])
    with pytest.raises(ClusterError, match="keys of the pin 'empty' are not known"):
        pins.chunks_of(played.scheduler, "empty")


def test_chunk_is_kept_that_nodes_keep_together(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPins(monkeypatch, {"old": [key(at) for at in range(4)]})
    played.held["one"]["old"] = {"0.0.2-a": held([0, 1], [2]), "0.0.2-b": held([3])}
    played.held["two"]["old"] = {"0.1.2-a": held([1, 2])}
    (pin,) = pins.pins(played.scheduler).pins
    assert (pin.held_chunks, pin.waiting_chunks) == (1, 1)
    assert pin.kept_bytes == 5 * CHUNK_BYTES


def test_what_is_pinned_on_a_node_is_what_its_firm_pins_keep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedPins(monkeypatch, {"old": [key(0), key(1)], "other": [key(2)]})
    played.held["two"]["old"] = {"": held([1], [0]), "0.0.2-a": held([0])}
    played.held["one"]["other"] = {"": held([0])}
    assert pins.pinned_on(played.scheduler, "two", SPACE) == {key(1)}
    assert pins.pinned_on(played.scheduler, "two", part_of(SPACE, "0.0.2-a")) == {key(0)}
    assert pins.pinned_on(played.scheduler, "one", SPACE) == {key(2)}
    assert pins.pinned_on(played.scheduler, "two", "another") == set()


def test_pin_is_told_with_what_nodes_keep_of_it_and_a_silent_one_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = PlayedPins(monkeypatch, {})
    asked: list[str] = []
    played.nodes["three"] = {"pins": silent(asked)}
    made = played.pin(0)
    # Chunk 1 waits at the first node and is kept at the second.
    assert (made.held_chunks, made.waiting_chunks, made.kept_bytes) == (2, 1, 2 * CHUNK_BYTES)
    assert len(asked) == 1
    assert "without node three" in caplog.text


def test_only_a_pin_that_is_there_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedPins(monkeypatch, {"old": [key(0)]})
    with pytest.raises(NotFoundError, match="there are old"):
        pins.unpin(played.scheduler, "new")
    assert played.orders == []
    pins.unpin(played.scheduler, "old")
    (order,) = played.orders
    assert isinstance(order, UnpinOrder)
