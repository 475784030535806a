"""Listings on their way: who takes which part."""

from __future__ import annotations

import pytest

from raykv.protocol.listing import (
    ALL_READ,
    ListingPart,
    Position,
)

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
