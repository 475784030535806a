"""The log of events: numbers, its bound, and who reads it."""

from __future__ import annotations

import pytest

from raykv.base.ids import EventKind, NodeId
from raykv.directory.known.events import EventRing
from raykv.directory.known.holdings import HeldAt, MovedChunks
from raykv.protocol.listing import Reason, Where
from tests.fixtures.directory.reporting import SPACE, key_of

NODE = NodeId("a")


def moved(before: Where, after: Where, *numbers: int) -> list[MovedChunks]:
    held = (HeldAt(NODE, after),)
    return [MovedChunks(SPACE, list(map(key_of, numbers)), before, after, Reason.STORED, held)]


def came(*numbers: int) -> list[MovedChunks]:
    return moved(Where.NOWHERE, Where.RAM, *numbers)


@pytest.fixture
def ring() -> EventRing:
    return EventRing(most=10)


def seqs(ring: EventRing, after: int, most: int = 100) -> list[int]:
    return [each.seq for each in ring.after(after, most)[0]]


def test_reader_that_falls_behind_or_is_ahead_learns_it(ring: EventRing) -> None:
    for number in range(5):
        ring.moved(NODE, 1, number, came(1, 2, 3, 4), 1.0)
        ring.check()
    assert ring.last_seq == 21
    assert ring.first_seq == 12
    assert ring.after(0, 2)[1]
    assert seqs(ring, 0, 2) == [12, 13]
    assert ring.after(10, 2)[1]
    assert not ring.after(11, 2)[1]
    assert ring.after(21, 2) == ([], False)
    assert ring.after(22, 2)[1]
    assert seqs(ring, 22, 2) == [12, 13]


def test_number_of_an_earlier_life_is_answered_from_the_beginning(ring: EventRing) -> None:
    events, is_gap = ring.after(500, 9)
    # It begins with what says all.
    assert [each.kind for each in events] == [EventKind.LIFE_BEGAN]
    assert not is_gap


def test_one_report_may_be_more_than_the_log_keeps(ring: EventRing) -> None:
    ring.moved(NODE, 1, 1, came(*range(25)), 1.0)
    ring.check()
    events, is_gap = ring.after(0, 100)
    assert is_gap
    assert [each.key for each in events] == [key_of(number) for number in range(15, 25)]


def test_what_stays_on_its_node_is_no_event(ring: EventRing) -> None:
    moves = moved(Where.RAM, Where.DISK, 1) + moved(Where.DISK, Where.RAM | Where.DISK, 1)
    ring.moved(NODE, 1, 1, moves, 1.0)
    assert ring.last_seq == 1
