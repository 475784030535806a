"""An order is done when it is kept and all nodes have heard of it; who has not is named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import ray

from raykv.base.errors import ClusterError
from raykv.base.ids import Stamp
from raykv.client import scheduler as asking
from raykv.client.scheduler import namespace_of, refuse_parts
from raykv.protocol.framing import encode, receive
from raykv.protocol.operator import OperatorOrder, OrderAnswer, OrderState, PauseOrder
from raykv.protocol.status import ClusterStatus
from tests.fixtures.played_cluster import play

ORDER = PauseOrder("an id", paused=True)
KEPT = Stamp(1, 7)


class Ordered:
    """A scheduler actor that answers what became of an order in that order, the last for ever."""

    def __init__(self, patches: pytest.MonkeyPatch, states: Sequence[OrderState]) -> None:
        self.orders: list[Any] = []
        self.told: list[list[str]] = []
        self._now = 0.0
        self._states = itertools.chain(states, itertools.repeat(states[-1]))
        patches.setattr(asking, "time", self)
        self._scheduler = play(patches, {"order": self._order, "order_state": self._state})

    def _order(self, raw: bytes) -> bytes:
        self.orders.append(receive(raw, OperatorOrder, "a test", "it"))
        return encode(OrderAnswer())

    def _state(self, order_id: str) -> bytes:
        assert order_id == ORDER.order_id
        return encode(next(self._states))

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds

    def carry_out(self) -> list[str]:
        return self._scheduler.order(ORDER, self.told.append, "nothing was done")


def test_namespace_is_named_by_its_beginning_and_a_part_by_its_whole_name() -> None:
    spaces = {"5f0c/0.0": 1, "5f0c/1.1": 1, "77ab": 2}
    known = ClusterStatus("", 1, "", paused=False, namespaces=spaces)
    assert namespace_of(known, "5f") == "5f0c"
    assert namespace_of(known, "5f0c/1") == "5f0c/1.1"
    assert namespace_of(known, "7") == "77ab"
    with pytest.raises(ClusterError, match="2 namespaces of the cache begin with ''"):
        namespace_of(known, "")


@pytest.mark.parametrize(
    ("spaces", "is_refused"), [({"5f0c/0.0.a": 1}, True), ({"5f0c": 1}, False)]
)
def test_chunks_that_lie_in_parts_are_moved_by_part(
    spaces: dict[str, int], is_refused: bool
) -> None:
    known = ClusterStatus("", 1, "", paused=False, namespaces=spaces)
    for name in spaces:
        refuse_parts(name, known)
    if is_refused:
        with pytest.raises(ClusterError, match=r"several places: name one of 5f0c/0\.0\.a"):
            refuse_parts("5f0c", known)
    else:
        refuse_parts("5f0c", known)


def test_order_is_done_when_it_is_kept_and_nobody_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = [OrderState(), OrderState(KEPT, behind=["one"]), OrderState(KEPT, told=["engine"])]
    ordered = Ordered(monkeypatch, states)
    assert ordered.carry_out() == ["engine"]
    assert ordered.orders == [ORDER]
    assert ordered.told == []


def test_order_that_a_new_life_does_not_know_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ordered = Ordered(monkeypatch, [OrderState(is_known=False), OrderState(KEPT)])
    ordered.carry_out()
    assert ordered.orders == [ORDER, ORDER]


def test_node_that_is_behind_is_named_once_and_then_in_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ordered = Ordered(monkeypatch, [OrderState(KEPT, behind=["two", "one"])])
    with pytest.raises(ClusterError, match="kept, but one, two have not heard of it"):
        ordered.carry_out()
    assert ordered.told == [["two", "one"]]


def test_order_that_nobody_keeps_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="head node has not kept it"):
        Ordered(monkeypatch, [OrderState()]).carry_out()


def test_refusal_says_what_was_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match="nothing was done: there are too many"):
        Ordered(monkeypatch, [OrderState(error="there are too many")]).carry_out()


@pytest.mark.parametrize("is_late", [True, False])
def test_scheduler_actor_that_is_waited_for_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, is_late: bool
) -> None:
    scheduler = play(monkeypatch, {"quotas": lambda: b"late"})
    if is_late:
        monkeypatch.setattr(ray, "wait", lambda refs, **_: ([], list(refs)))
    assert scheduler.ask("quotas") == b"late"
    assert caplog.messages == ["waiting for the scheduler actor, 8 s at most"] * is_late
