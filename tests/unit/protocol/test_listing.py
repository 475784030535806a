"""Listings on their way: rows in columns, and who takes which part."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raykv.base.errors import MessageError
from raykv.base.ids import ALL_BLOCKS, NO_BLOCKS, Blocks, Key, Namespace
from raykv.protocol.columns import MAX_ROWS, Keys, Numbers
from raykv.protocol.framing import encode, receive
from raykv.protocol.listing import (
    ALL_READ,
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)

ROWS = [
    ListedRow(Namespace("a"), Key(b"one"), Where.RAM, ALL_BLOCKS, Reason.STORED),
    ListedRow(Namespace("b"), Key(b"two"), Where.NOWHERE, NO_BLOCKS, Reason.EVICTED),
    ListedRow(
        Namespace("a"), Key(b"x" * 36), Where.RAM | Where.COMING, Blocks(2, 3), Reason.COMING
    ),
]


def received(part: ListingPart) -> ListingPart:
    return receive(encode(part), ListingPart, "a node", "this test")


def test_rows_are_the_same_on_the_other_side() -> None:
    part = ListingPart(False, Position(7, 3, 4), Position(7, 5, ALL_READ), ListedRows.of(ROWS))
    assert received(part) == part
    assert list(received(part).rows) == ROWS
    assert list(ListedRows.of([])) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"where": b"\x01\x00"},
        {"where": b"\x01\x00\x08"},
        {"reasons": b"\x01\x03\x06"},
        {"namespaces": (["a", "b"], Numbers.of([0, 1, 2]))},
        {"namespaces": (["a", "b"], Numbers.of([0, 1, -1]))},
        {"namespaces": (["a", "b" * 5000], Numbers.of([0, 1, 0]))},
        {"num_blocks": Numbers.of([1, 0, -1])},
        {"num_blocks": Numbers.of([1, 0, 1 << 40])},
        {"first_block": Numbers.of([-1, 0, 0])},
        {"keys": Keys.of([b"one", b"two", b"x" * 200])},
        {"keys": Keys.of([b"one", b"two", b""])},
        {"keys": Keys.of([b"one", b"two"])},
    ],
    ids=str,
)
def test_rows_that_no_node_has_are_refused(wrong: dict[str, Any]) -> None:
    """Made by somebody who does not check."""
    columns = msgspec.to_builtins(ListedRows.of(ROWS))
    names = ListedRows.__struct_fields__
    bad = [msgspec.to_builtins(wrong.get(name, columns[at])) for at, name in enumerate(names)]
    raw = msgspec.msgpack.encode([False, [1, 1, 1, 0], [1, 1, 1, 0], bad])
    with pytest.raises(MessageError):
        receive(raw, ListingPart, "a node", "this test")


def test_more_rows_than_a_message_has_are_refused() -> None:
    row = ROWS[0]
    many = [row._replace(key=Key(number.to_bytes(4, "big"))) for number in range(MAX_ROWS)]
    assert len(ListedRows.of(many).keys) == MAX_ROWS
    with pytest.raises(ValueError, match="keys"):
        ListedRows.of([*many, row])


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (Position(), Position()),
        (Position(1, 1), Position(2, 1)),
        (Position(1, 1, 0, 1), Position(1, 1, 0, 2)),
    ],
)
def test_part_over_two_lives_or_readers_is_refused(start: Position, end: Position) -> None:
    raw = msgspec.msgpack.encode([False, msgspec.to_builtins(start), msgspec.to_builtins(end)])
    with pytest.raises(MessageError):
        receive(raw, ListingPart, "a node", "this test")


HERE = Position(5, 100, 40)


@pytest.mark.parametrize(
    ("begins", "start", "is_taken"),
    [
        (False, HERE, True),
        (False, Position(5, 99, 40), False),
        (False, Position(5, 100, 0), False),
        (False, Position(6, 100, 40), False),
        (True, Position(6, 3), True),
        (True, Position(5, 101), True),
        (True, Position(5, 99), False),
        (True, Position(4, 1000), False),
    ],
)
def test_part_is_taken_where_it_goes_on_and_a_new_listing_unless_it_is_an_old_one(
    begins: bool, start: Position, is_taken: bool
) -> None:
    part = ListingPart(begins, start, Position(start.life, start.number + 1, ALL_READ))
    assert part.follows(HERE) is is_taken
