"""The event log: its numbers, its pages, and what a reader at a strange place is told."""

from __future__ import annotations

import pytest

from raykv.base.ids import Epoch, Generation, Key, Namespace, NodeId, Slot
from raykv.directory.log import MAX_PAGE, EventLog
from raykv.directory.table.protocol import Changes
from raykv.protocol.events import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EpochBegan,
    Event,
    EventPage,
    NodeJoined,
    NodeLost,
    events_of,
)
from raykv.protocol.framing import decode, encode
from tests.fixtures.keys import named_key as key

EPOCH = Epoch(3)
NODE, OTHER = NodeId("node"), NodeId("other")
MODEL, SECOND = Namespace("model"), Namespace("second")


def came(namespace: Namespace, name: Key, slot: Slot, generation: Generation) -> Changes:
    return Changes(True, namespace, [name], [slot], [generation])


def went(namespace: Namespace, name: Key, slot: Slot, generation: Generation) -> Changes:
    return Changes(False, namespace, [name], [slot], [generation])


def add(log: EventLog, count: int) -> None:
    """So many chunks come to a node; the generation is the event's number."""
    for _ in range(count):
        seq = log.last_seq + 1
        log.stored(NODE, came(MODEL, key(str(seq)), Slot(seq), Generation(seq)))


def log_of(last_seq: int, most: int = 100) -> EventLog:
    """A log with events up to that number; the first one is EPOCH_BEGAN."""
    log = EventLog(EPOCH, most)
    add(log, last_seq - 1)
    return log


def numbers(page: EventPage) -> list[int]:
    return [event.seq for event in events_of(page)]


def received(page: EventPage) -> list[Event]:
    """The events as they come out at the other end of the wire."""
    return list(events_of(decode(encode(page), EventPage)))


# Numbers


def test_log_begins_with_epoch_began_as_number_one() -> None:
    log = EventLog(EPOCH)
    assert (log.first_seq, log.last_seq) == (1, 1)
    page = log.page(EPOCH, 0)
    assert list(events_of(page)) == [EpochBegan(epoch=EPOCH, seq=1)]
    assert not page.is_gap


def test_event_says_when_it_happened() -> None:
    log = EventLog(EPOCH)
    log.set_clock(10.0)
    log.node_joined(NODE, Epoch(70))
    log.set_clock(12.5)
    log.node_lost(NODE, Epoch(70))
    log.set_clock(13.0)
    page = decode(encode(log.page(EPOCH, 0)), EventPage)
    assert [event.time for event in events_of(page, 1000.0)] == [997.0, 997.0, 999.5]
    assert {event.time for event in events_of(page)} == {0.0}


def test_events_cross_the_wire_whole_and_numbered_in_their_order() -> None:
    log = EventLog(EPOCH)
    log.node_joined(NODE, Epoch(70))
    log.stored(NODE, came(MODEL, key("a", 2), Slot(5), Generation(1 << 40)))
    log.node_joined(OTHER, Epoch(80))
    log.stored(OTHER, came(SECOND, key("b"), Slot(6), Generation(8)))
    log.removed(NODE, went(MODEL, key("a", 2), Slot(5), Generation(1 << 40)))
    log.cleared(SECOND, Generation(9))
    log.node_lost(OTHER, Epoch(80))
    assert received(log.page(EPOCH, 0)) == [
        EpochBegan(epoch=3, seq=1),
        NodeJoined(epoch=3, seq=2, node_id="node", node_epoch=70),
        BlockStored(
            epoch=3,
            seq=3,
            node_id="node",
            namespace="model",
            key=key("a", 2),
            slot=5,
            generation=1 << 40,
        ),
        NodeJoined(epoch=3, seq=4, node_id="other", node_epoch=80),
        BlockStored(
            epoch=3, seq=5, node_id="other", namespace="second", key=key("b"), slot=6, generation=8
        ),
        BlockRemoved(
            epoch=3,
            seq=6,
            node_id="node",
            namespace="model",
            key=key("a", 2),
            slot=5,
            generation=1 << 40,
        ),
        CacheCleared(epoch=3, seq=7, namespace="second", generation=9),
        NodeLost(epoch=3, seq=8, node_id="other", node_epoch=80),
    ]
    assert log.last_seq == 8


def test_page_names_each_node_and_namespace_once() -> None:
    log = EventLog(EPOCH)
    for number in range(5):
        log.stored(NODE, came(MODEL, key(str(number)), Slot(number), Generation(number)))
        log.removed(OTHER, went(SECOND, key(str(number)), Slot(number), Generation(number)))
    page = log.page(EPOCH, 1)
    assert page.nodes == ["node", "other"]
    assert page.namespaces == ["model", "second"]
    assert len(page) == 10


def test_block_event_has_the_parts_of_its_key() -> None:
    log = EventLog(EPOCH)
    log.stored(NODE, came(MODEL, key("hash", 7), Slot(0), Generation(1)))
    (event,) = events_of(log.page(EPOCH, 1))
    assert isinstance(event, BlockStored)
    assert (event.block_hash, event.group) == (b"hash", 7)


# Pages


@pytest.mark.parametrize(("after", "expected"), [(0, [1, 2, 3, 4]), (1, [2, 3, 4]), (3, [4])])
def test_page_holds_what_follows_a_place(after: int, expected: list[int]) -> None:
    page = log_of(4).page(EPOCH, after)
    assert numbers(page) == expected
    assert (page.epoch, page.first_seq, page.last_seq) == (EPOCH, expected[0], 4)
    assert not page.is_gap


def test_page_is_empty_and_no_gap_at_the_end_of_the_log() -> None:
    page = log_of(4).page(EPOCH, 4)
    assert len(page) == 0
    assert (page.first_seq, page.last_seq) == (5, 4)
    assert not page.is_gap


def test_pages_follow_on_each_other_when_the_log_is_longer_than_one() -> None:
    log = log_of(8)
    pages = [log.page(EPOCH, after, most=3) for after in (0, 3, 6)]
    assert [numbers(page) for page in pages] == [[1, 2, 3], [4, 5, 6], [7, 8]]
    assert [page.last_seq for page in pages] == [8, 8, 8]
    assert not any(page.is_gap for page in pages)


def test_page_goes_on_with_what_happened_since_the_last_one() -> None:
    log = log_of(3)
    assert numbers(log.page(EPOCH, 0)) == [1, 2, 3]
    add(log, 2)
    assert numbers(log.page(EPOCH, 3)) == [4, 5]


def test_page_of_the_default_size_is_small_enough_to_go_inline() -> None:
    log = EventLog(EPOCH)
    for number in range(MAX_PAGE + 5):
        name = Key(number.to_bytes(36, "big"))
        log.stored(NODE, came(Namespace("f" * 64), name, Slot(1 << 31), Generation(1 << 60)))
    page = log.page(EPOCH, 1)
    assert len(page) == MAX_PAGE
    assert len(encode(page)) < 100 * 1024


# Strange places


@pytest.mark.parametrize(
    ("epoch", "after"), [(EPOCH, 5), (EPOCH, 9000), (2, 2), (2, 4), (4, 0), (0, 0)]
)
def test_place_in_the_future_or_in_another_epoch_is_answered_from_the_start(
    epoch: int, after: int
) -> None:
    page = log_of(4).page(Epoch(epoch), after)
    assert numbers(page) == [1, 2, 3, 4]
    assert page.epoch == EPOCH
    assert not page.is_gap, "EPOCH_BEGAN says all"


@pytest.mark.parametrize(("epoch", "after"), [(EPOCH, 11), (2, 9), (4, 5)])
def test_such_a_place_is_a_gap_when_the_start_is_forgotten(epoch: int, after: int) -> None:
    page = log_of(10, most=4).page(Epoch(epoch), after)
    assert numbers(page) == [7, 8, 9, 10]
    assert page.is_gap


def test_place_in_another_epoch_is_a_gap_even_if_the_page_follows_on_its_number() -> None:
    page = log_of(10, most=4).page(Epoch(2), 6)
    assert numbers(page) == [7, 8, 9, 10]
    assert page.is_gap


# The bound


def test_log_forgets_the_oldest_events_above_its_bound() -> None:
    log = log_of(4, most=4)
    assert (log.first_seq, log.last_seq) == (1, 4)
    add(log, 2)
    assert (log.first_seq, log.last_seq) == (3, 6)


@pytest.mark.parametrize(("after", "is_gap"), [(0, True), (5, True), (6, False)])
def test_place_that_the_log_does_not_reach_back_to_is_a_gap(after: int, is_gap: bool) -> None:
    page = log_of(10, most=4).page(EPOCH, after)
    assert numbers(page) == [7, 8, 9, 10]
    assert page.first_seq == 7
    assert page.is_gap == is_gap


def test_log_that_has_forgotten_nothing_but_its_beginning_is_a_gap_too() -> None:
    page = log_of(5, most=4).page(EPOCH, 0)
    assert numbers(page) == [2, 3, 4, 5]
    assert page.is_gap


def test_gap_is_told_in_the_first_page_only() -> None:
    log = log_of(10, most=4)
    first = log.page(EPOCH, 2, most=2)
    second = log.page(EPOCH, 8, most=2)
    assert (numbers(first), numbers(second)) == ([7, 8], [9, 10])
    assert (first.is_gap, second.is_gap) == (True, False)


# A higher epoch


def test_reader_at_the_old_epoch_begins_again_when_the_epoch_rises() -> None:
    log = log_of(3)
    log.rise_to(Epoch(9))
    add(log, 1)
    page = log.page(EPOCH, 3)
    assert [(event.epoch, event.seq) for event in events_of(page)] == [
        (9, 1),
        (9, 2),
        (9, 3),
        (9, 4),
    ]
    assert isinstance(next(events_of(page)), EpochBegan)
    assert not page.is_gap
    assert numbers(log.page(Epoch(9), 3)) == [4]
