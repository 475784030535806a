"""Pins, by example: through the block manager, with either table of chunks."""

from __future__ import annotations

import pytest

import raykv.directory.pins
from raykv.base.ids import EngineId
from raykv.directory.pins import FAVOUR_S, LOOK_S
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Hints, SyncRequest
from tests.fixtures.directory.pinned import LINGER_S, PAGE, SPACE, Cluster, key

pytestmark = pytest.mark.usefixtures("table")


@pytest.fixture
def one() -> Cluster:
    made = Cluster()
    made.add("a")
    return made


def test_pinned_chunks_stay_while_all_others_are_evicted(one: Cluster) -> None:
    one.store("a", *range(8))
    assert one.pin(0, 1, 2).pin is not None
    for start in range(100, 140, 5):
        assert one.store("a", *range(start, start + 5)) == 5
    assert one.held("a", *range(8)) == [0, 1, 2]


def test_chunks_without_a_pin_are_evicted_in_the_same_place(one: Cluster) -> None:
    one.store("a", *range(8))
    one.store("a", *range(100, 105))
    assert one.held("a", *range(8)) == [0, 1, 2]


def test_slots_run_out_rather_than_a_pin(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2)
    assert one.store("a", *range(100, 120)) == 5
    assert one.held("a", 0, 1, 2) == [0, 1, 2]


def test_unpinned_chunks_are_evicted_after_a_moment(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2)
    assert one.manager.pins.unpin("p", one.now)
    assert not one.manager.pins.unpin("p", one.now)
    one.wait(LINGER_S)
    one.store("a", *range(100, 108))
    assert one.held("a", *range(8)) == []


def test_pin_ends_with_its_time(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, ttl_s=10)
    assert one.wait(9) == []
    assert one.wait(1) == ["p"]
    assert one.manager.pins.pinned(one.now).pins == []
    one.wait(LINGER_S)
    one.store("a", *range(100, 108))
    assert one.held("a", *range(8)) == []


def test_eviction_looks_at_the_time_itself_not_at_the_next_look(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, ttl_s=10)
    one.now += 10
    one.store("a", *range(100, 108))
    assert one.held("a", *range(8)) == []


def test_short_soft_pin_does_not_shorten_a_pin(one: Cluster) -> None:
    """An engine that loads a chunk pins it for some seconds."""
    one.store("a", *range(8))
    one.pin(0, 1, 2)
    request = SyncRequest(
        EngineId("engine of a"),
        1,
        one._seq("engine of a"),
        pinned=Keys.of([key(0)]),
        asked=Keys.of([key(1)]),
    )
    one.manager.sync(request, one.now)
    one.wait(LINGER_S + 1)
    one.store("a", *range(100, 105))
    assert one.held("a", 0, 1, 2) == [0, 1, 2]


def test_chunk_that_is_not_stored_yet_is_pinned_when_it_comes(one: Cluster) -> None:
    answer = one.pin(0, 1)
    assert answer.pin is not None
    assert (answer.pin.chunks, answer.pin.held_chunks) == (2, 0)
    one.store("a", *range(8))
    one.store("a", *range(100, 106))
    assert one.held("a", *range(8)) == [0, 1]
    (pin,) = one.manager.pins.pinned(one.now).pins
    assert (pin.held_chunks, pin.kept_bytes) == (2, 2 * PAGE)


def test_pin_beyond_the_quota_is_refused_whole_with_a_sentence(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, pin_id="first")
    error = one.pin(1, 2, 3, 4).error
    for part in ("16.0 KiB more of node a", "pins take 4.0 KiB of the 16.0 KiB", "pin_share=0.5"):
        assert part in error, error
    assert [pin.pin_id for pin in one.manager.pins.pinned(one.now).pins] == ["first"]
    one.store("a", *range(100, 107))
    assert one.held("a", *range(8)) == [0]


def test_chunks_of_two_pins_count_once_and_stay_until_both_have_ended(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, 3, pin_id="long")
    assert not one.pin(2, 3, pin_id="short", ttl_s=5).error
    one.wait(6)
    one.manager.pins.unpin("long", one.now)
    (node,) = one.manager.pins.pinned(one.now).nodes
    assert node.kept_bytes == 0


def test_order_of_a_known_id_takes_the_place_of_the_earlier_one(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1, 2, 3)
    assert not one.pin(2, 3, 4, 5).error, "what it gives back counts"
    one.wait(LINGER_S)
    one.store("a", *range(100, 104))
    assert one.held("a", *range(8)) == [2, 3, 4, 5]
    assert one.pin(2, 3, 4, 5) == one.pin(2, 3, 4, 5), "it comes again"


def test_chunk_that_comes_when_pins_are_full_waits_for_room(one: Cluster) -> None:
    one.pin(*range(6), pin_id="wide")
    one.pin(4, 5, pin_id="narrow")
    one.store("a", *range(6))
    wide, narrow = one.manager.pins.pinned(one.now).pins
    assert (wide.held_chunks, wide.waiting_chunks) == (4, 2)
    assert (narrow.held_chunks, narrow.waiting_chunks) == (0, 2)
    one.manager.pins.unpin("wide", one.now)
    (pin,) = one.manager.pins.pinned(one.now).pins
    assert (pin.held_chunks, pin.waiting_chunks) == (2, 0)


def test_pin_that_takes_the_place_of_its_own_gets_the_room_before_what_waits(one: Cluster) -> None:
    one.pin(12, 0, 1, pin_id="other")
    one.pin(0, 1, 2, 3, 4, 12, pin_id="own")
    one.store("a", 5, 0, 1, 2, 3)
    one.store("a", 12)
    pin = one.pin(0, 2, 5, pin_id="own").pin
    assert pin is not None
    assert (pin.held_chunks, pin.waiting_chunks) == (3, 0)


def test_priority_gives_way_last_and_lowest_first(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, pin_id="firm")
    one.pin(1, pin_id="high", priority=9)
    one.pin(2, pin_id="low", priority=1)
    one.store("a", *range(100, 105))
    assert one.held("a", *range(8)) == [0, 1, 2]
    assert one.store("a", *range(110, 116)) == 6
    assert one.held("a", *range(8)) == [0, 1]
    assert one.store("a", *range(120, 128)) == 7
    assert one.held("a", *range(8)) == [0]


def test_replicas_are_pinned_on_every_node_that_has_them() -> None:
    cluster = Cluster()
    cluster.add("a")
    cluster.add("b")
    cluster.store("a", *range(8))
    cluster.pin(0, 1)
    cluster.store("b", 0, 1)
    kept = {node.node_id: node.kept_chunks for node in cluster.manager.pins.pinned(0).nodes}
    assert kept == {"a": 2, "b": 2}
    status = cluster.manager.status("", "", cluster.now)
    assert [(node.pinned_chunks, node.pinned_bytes) for node in status.nodes] == [(2, 2 * PAGE)] * 2


def test_pins_outlive_a_clearing_and_a_node(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(0, 1)
    one.manager.clear(SPACE)
    one.manager.check()
    one.sync("a")
    one.store("a", *range(8))
    one.store("a", *range(100, 106))
    assert one.held("a", *range(8)) == [0, 1]


def test_requests_pin_up_to_half_of_the_quota(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints(Keys.of([key(0), key(1), key(2)]), [20.0] * 3))
    (node,) = one.manager.pins.pinned(one.now).nodes
    assert (node.kept_bytes, node.client_bytes, node.waiting_chunks) == (2 * PAGE, 2 * PAGE, 1)
    assert not one.pin(3, 4).error, "the operator has the other half"
    one.wait(20 + LOOK_S)
    assert one.manager.pins.pinned(one.now).client_chunks == 0


def test_priority_of_a_request_counts_for_a_while(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints(favoured=Keys.of([key(0)]), priorities=[3]))
    one.store("a", *range(100, 107))
    assert one.held("a", *range(8)) == [0]
    one.wait(FAVOUR_S)
    assert one.manager.pins.pinned(one.now).client_chunks == 0


def test_later_hint_makes_a_pin_longer_never_shorter(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints(Keys.of([key(0)]), [30.0]))
    one.sync("a", hints=Hints(Keys.of([key(0)]), [5.0]))
    one.wait(20)
    assert one.manager.pins.pinned(one.now).client_chunks == 1


def test_names_are_bounded(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.pins, "MAX_PINNED", 4)
    one.sync("a", hints=Hints(Keys.of([key(number) for number in range(6)]), [20.0] * 6))
    pinned = one.manager.pins.pinned(one.now)
    assert (pinned.client_chunks, pinned.hints_refused) == (2, 4)
    assert "5 chunks would be pinned, more than 4 in all" in one.pin(10, 11, 12).error
    assert not one.pin(10, 11).error


def test_number_of_pins_is_bounded(one: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.pins, "MAX_PINS", 1)
    one.pin(0)
    assert "there are 1 pins already" in one.pin(1, pin_id="other").error
    assert not one.pin(1).error
