"""An engine believes its place's listing and the results of its jobs, each for what it is worth."""

from __future__ import annotations

import msgspec
import pytest

from raykv.base.ids import ALL_BLOCKS, NO_BLOCKS, Blocks, Key, Namespace, NodeId
from raykv.engine.listed import SILENT_S, EnginePlace, ListedPlace, PlaceChange
from raykv.protocol.listing import (
    ALL_READ,
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)
from tests.fixtures.keys import numbered_key

OURS, OTHERS = Namespace("ours"), Namespace("others'")
A, B, C = Key(b"a"), Key(b"b"), Key(b"c")


def row(
    key: Key,
    where: Where,
    reason: Reason = Reason.STORED,
    namespace: Namespace = OURS,
    blocks: Blocks = ALL_BLOCKS,
) -> ListedRow:
    return ListedRow(namespace, key, where, blocks if where else NO_BLOCKS, reason)


def part(
    start: Position, number: int, *rows: ListedRow, begins: bool = False, place: int = ALL_READ
) -> ListingPart:
    start = msgspec.structs.replace(start, reader=3)
    return ListingPart(begins, start, Position(start.life, number, place, 3), ListedRows.of(rows))


@pytest.fixture
def place() -> ListedPlace:
    """At number 10 of life 1, with chunk A."""
    made = ListedPlace(EnginePlace(NodeId("here")), OURS, 3, 0.0)
    came = made.take(part(Position(1, 10), 10, row(A, Where.RAM), begins=True), 1.0)
    assert came == [PlaceChange([A], ALL_BLOCKS, Reason.STORED)]
    return made


def at(number: int, life: int = 1) -> Position:
    return Position(life, number, ALL_READ, 3)


def test_what_is_listed_is_there_with_its_blocks_and_nothing_of_other_namespaces(
    place: ListedPlace,
) -> None:
    some = Blocks(2, 2)
    found = place.take(
        part(
            at(10),
            12,
            row(A, Where.NOWHERE, Reason.EVICTED),
            row(B, Where.RAM, blocks=some),
            row(C, Where.RAM, namespace=OTHERS),
        ),
        2.0,
    )
    assert found == [PlaceChange([A], None, Reason.EVICTED), PlaceChange([B], some, Reason.STORED)]
    assert place.ready[B].has(some)
    assert not place.ready[B].has(Blocks(0, 4))
    assert len(place.ready) == 1
    assert place.take(part(at(12), 13, row(B, Where.RAM, blocks=some)), 2.0) == []


def test_chunk_that_is_on_the_disk_alone_is_not_ready(place: ListedPlace) -> None:
    evicted = row(A, Where.DISK, Reason.EVICTED)
    written = row(A, Where.RAM | Where.DISK)
    assert place.take(part(at(10), 11, written), 2.0) == []
    assert (len(place.ready), len(place.on_disk)) == (1, 0)
    assert place.take(part(at(11), 12, evicted), 2.0) == [PlaceChange([A], None, Reason.EVICTED)]
    assert (len(place.ready), place.on_disk) == (0, {A: ALL_BLOCKS})
    assert place.take(part(at(12), 13, written), 2.0) == [
        PlaceChange([A], ALL_BLOCKS, Reason.STORED)
    ]
    assert (len(place.ready), len(place.on_disk)) == (1, 0)


def test_what_is_on_the_disk_goes_without_any_change_of_what_is_ready(place: ListedPlace) -> None:
    place.take(part(at(10), 12, row(B, Where.DISK), row(C, Where.DISK)), 2.0)
    assert place.learn(1, 13, [row(B, Where.NOWHERE, Reason.DAMAGED)], 2.0) == []
    assert place.on_disk == {C: ALL_BLOCKS}
    anew = part(Position(1, 25), 25, row(A, Where.RAM), begins=True)
    assert place.take(anew, 2.0) == []
    assert (place.on_disk, len(place.ready)) == ({}, 1)
    place.take(part(at(25), 26, row(B, Where.DISK)), 2.0)
    assert place.take(part(Position(2, 3), 3, begins=True), 3.0) == [PlaceChange([A], None, None)]
    assert place.on_disk == {}


def test_refusal_holds_against_what_the_listing_said_before_it(place: ListedPlace) -> None:
    """A was evicted at 12 and a load was refused then; its store at 11 is read afterwards."""
    refused = place.learn(1, 12, [row(A, Where.NOWHERE, Reason.EVICTED)], 1.0)
    assert refused == [PlaceChange([A], None, Reason.EVICTED)]
    assert place.take(part(at(10), 11, row(A, Where.RAM)), 2.0) == []
    assert A not in place.ready
    # Stored again, at 13.
    assert place.take(part(at(11), 13, row(A, Where.RAM)), 2.0)
    assert A in place.ready


def test_refusal_from_before_what_was_read_says_nothing(place: ListedPlace) -> None:
    assert place.learn(1, 10, [row(A, Where.NOWHERE)], 1.0) == []
    assert place.learn(2, 99, [row(A, Where.NOWHERE)], 1.0) == []
    assert A in place.ready


def test_results_count_in_the_order_of_their_numbers(place: ListedPlace) -> None:
    assert place.learn(1, 14, [row(B, Where.RAM)], 1.0)
    assert place.learn(1, 12, [row(B, Where.NOWHERE)], 1.0) == []
    assert B in place.ready
    # What is read up to then has it, or says why not.
    assert place.take(part(at(10), 14, row(B, Where.RAM)), 2.0) == []
    assert place.take(part(at(14), 15, row(B, Where.NOWHERE, Reason.CLEARED)), 2.0)
    assert len(place.ready) == 1


def test_listing_that_begins_anew_takes_away_what_no_page_and_no_change_has(
    place: ListedPlace,
) -> None:
    place.take(part(at(10), 12, row(B, Where.RAM), row(C, Where.RAM)), 1.0)
    assert place.take(part(Position(1, 25), 25, row(A, Where.RAM), begins=True, place=7), 2.0) == []
    assert len(place.ready) == 3
    assert place.take(part(Position(1, 25, 7), 26, row(C, Where.RAM), place=9), 2.0) == []
    assert place.take(part(Position(1, 26, 9), 26), 2.0) == [PlaceChange([B], None, Reason.FAILED)]
    assert len(place.ready) == 2


def test_listing_that_begins_anew_is_older_than_a_result_that_came_before_it(
    place: ListedPlace,
) -> None:
    """B is stored, and has not changed since: no later part names it."""
    place.learn(1, 30, [row(B, Where.RAM)], 1.0)
    anew = part(Position(1, 25), 25, row(B, Where.RAM), begins=True)
    assert place.take(anew, 2.0) == [PlaceChange([A], None, Reason.FAILED)]
    assert B in place.ready
    place.take(part(at(25), 40), 2.0)
    assert B in place.ready


def test_result_counts_while_the_page_that_has_its_chunk_is_not_read_yet() -> None:
    place = ListedPlace(EnginePlace(NodeId("here")), OURS, 3, 0.0)
    place.take(part(Position(1, 60), 60, begins=True, place=4), 1.0)
    assert place.learn(1, 60, [row(A, Where.RAM)], 1.0)
    assert A in place.ready
    assert place.take(part(Position(1, 60, 4), 60, row(A, Where.RAM)), 1.0) == []


def test_older_refusal_counts_while_a_listing_that_began_anew_has_not_shown_its_chunk(
    place: ListedPlace,
) -> None:
    place.take(part(Position(1, 25), 25, begins=True, place=7), 2.0)
    assert place.learn(1, 20, [row(A, Where.RAM)], 2.0) == []
    refused = place.learn(1, 20, [row(A, Where.NOWHERE, Reason.EVICTED)], 2.0)
    assert refused == [PlaceChange([A], None, Reason.EVICTED)]


def test_late_answer_for_another_namespace_is_not_taken() -> None:
    """The engine has other weights, and begins to read anew."""
    late = part(Position(1, 100), 100, row(A, Where.RAM, namespace=OTHERS), begins=True)
    place = ListedPlace(EnginePlace(NodeId("here")), OURS, 4, 0.0)
    place.take(late, 1.0)
    assert place.position == Position(reader=4)


def test_silent_place_takes_no_results(place: ListedPlace) -> None:
    assert place.learn(1, 30, [row(B, Where.RAM)], 1.0 + SILENT_S) == []


def test_another_life_begins_with_nothing(place: ListedPlace) -> None:
    place.learn(1, 500, [row(B, Where.RAM)], 1.0)
    late = part(at(10), 20, row(Key(b"late"), Where.RAM))
    found = place.take(part(Position(2, 3), 3, row(B, Where.COMING), begins=True), 2.0)
    assert found == [PlaceChange([B, A], None, None)]
    assert place.take(late, 3.0) == []
    assert len(place.ready) == 0
    assert B in place.coming
    assert place.take(part(at(3, 2), 4, row(B, Where.RAM)), 3.0)
    assert B not in place.coming


def test_many_chunks_that_go_at_once_are_one_change(place: ListedPlace) -> None:
    many = [numbered_key(number) for number in range(10_000)]
    rows = [row(key, Where.RAM) for key in many]
    place.take(part(at(10), 11, *rows), 1.0)
    begins = part(Position(1, 900), 900, row(A, Where.RAM), begins=True)
    (gone,) = place.take(begins, 2.0)
    assert (len(gone.keys), gone.reason) == (len(many), Reason.FAILED)
    place.take(part(at(900), 901, *rows), 3.0)
    (lost,) = place.take(part(Position(2, 1), 1, begins=True), 4.0)
    assert (len(lost.keys), lost.reason) == (len(many) + 1, None)
    assert not place.ready


def test_chunk_that_was_distrusted_is_there_again_once_its_owner_says_so(
    place: ListedPlace,
) -> None:
    """Other blocks than are there were wanted; then a store was told that all of its own are."""
    assert place.distrust(A, ALL_BLOCKS) == [PlaceChange([A], None, Reason.FAILED)]
    here = row(A, Where.RAM)
    assert place.learn(1, 9, [here], 1.0) == [], "before others were wanted"
    place.take(part(at(10), 12, row(B, Where.RAM)), 1.0)
    assert place.learn(1, 11, [here], 1.0) == [PlaceChange([A], ALL_BLOCKS, Reason.STORED)]
    assert place.distrust(A, ALL_BLOCKS)
    place.take(part(at(12), 14, row(A, Where.NOWHERE, Reason.EVICTED)), 1.0)
    assert place.learn(1, 13, [here], 1.0) == [], "it has gone since"
    assert A not in place.ready


def test_result_about_another_namespace_says_nothing(place: ListedPlace) -> None:
    others = [row(B, Where.RAM, namespace=OTHERS), row(A, Where.NOWHERE, namespace=OTHERS)]
    assert place.learn(1, 12, others, 1.0) == []
    assert list(place.ready) == [A]


def test_place_that_is_silent_says_so_until_it_is_heard_again(place: ListedPlace) -> None:
    assert not place.is_silent(1.0 + SILENT_S - 0.1)
    assert place.is_silent(1.0 + SILENT_S)
    assert place.take(part(at(9), 12), 20.0) == []
    assert place.is_silent(20.0)
    place.take(part(at(10), 10), 20.0)
    assert not place.is_silent(20.0)
