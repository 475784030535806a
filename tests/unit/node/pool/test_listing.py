"""A node's numbered account of what it has."""

from __future__ import annotations

from raykv.base.ids import Key, Namespace, Stamp
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord
from raykv.protocol.listing import Reason


def chunk(name: str) -> ChunkRecord:
    return ChunkRecord(Namespace("n"), Key(name.encode()), 4096, Stamp(0, 1))


def listed(listing: Listing, number: int, most: int = 9) -> tuple[str, int]:
    found = listing.since(number, most)
    assert found is not None
    changes, upto = found
    return "".join(each.record.key.decode() for each in changes), upto


def test_reader_gets_what_has_changed_since_its_number() -> None:
    listing, a, b = Listing(7), chunk("a"), chunk("b")
    listing.changed(a, Reason.STORED)
    listing.changed(b, Reason.STORED)
    assert listed(listing, 0) == ("ab", 2)
    assert listed(listing, 1) == ("b", 2)
    assert listed(listing, 2) == ("", 2)
    assert (a.number, b.number) == (1, 2)


def test_name_that_changes_again_is_there_once_with_its_latest_reason() -> None:
    listing, a, b = Listing(7), chunk("a"), chunk("b")
    for record, reason in ((a, Reason.STORED), (b, Reason.STORED), (a, Reason.EVICTED)):
        listing.changed(record, reason)
    listing.changed(chunk("a"), Reason.COMING)
    found = listing.since(0, 9)
    assert found is not None
    assert [(each.record.key, each.reason) for each in found[0]] == [
        (b"b", Reason.STORED),
        (b"a", Reason.COMING),
    ]


def test_answers_are_bounded_and_go_on_where_they_ended() -> None:
    listing = Listing(7)
    for name in "abcde":
        listing.changed(chunk(name), Reason.STORED)
    assert listed(listing, 0, 2) == ("ab", 2)
    assert listed(listing, 2, 2) == ("cd", 4)
    assert listed(listing, 4, 2) == ("e", 5)


def test_who_is_too_far_behind_or_ahead_is_told_so() -> None:
    listing = Listing(7, most=2)
    for name in "abc":
        listing.changed(chunk(name), Reason.STORED)
    assert listing.since(0, 9) is None
    assert listing.since(4, 9) is None
    assert listed(listing, 1) == ("bc", 3)
