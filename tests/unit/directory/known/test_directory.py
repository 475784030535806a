"""What nodes report to the directory, and what it answers."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest

import raykv.directory.known.directory
from raykv.base.ids import EventKind, Namespace, NodeId, Stamp
from raykv.directory.answers import chunk_counts
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.directory.known.holdings import HeldAt
from raykv.directory.known.spaces import LEFT_S
from raykv.protocol.engine import NOTHING_ORDERED, Ask, Naming
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.listing import ListingPart, Position, Where
from raykv.protocol.node import PAUSE_MS, Report, ReportAnswer, SessionsWord
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.fixtures.directory.reporting import (
    SPACE,
    ReportingNode,
    engine_of,
    gone,
    key_of,
    row_of,
    sizes,
)

LIFE = 1000
EXPIRY_S = 10.0


class Cluster(NamedTuple):
    directory: Directory
    orders: Orders
    one: ReportingNode
    two: ReportingNode


@pytest.fixture
def cluster() -> Cluster:
    orders = Orders(OrdersDocument(Stamp(7, 10)), 8, -MEMBERS_S)
    directory = Directory(LIFE, orders, node_expiry_s=EXPIRY_S)
    nodes = [ReportingNode(directory, each) for each in ("one", "two")]
    return Cluster(directory, orders, *nodes)


def holders(directory: Directory, number: int) -> dict[str, Where]:
    return {each.node_id: each.where for each in directory.where(SPACE, [key_of(number)])[0]}


def kinds(directory: Directory) -> list[tuple[EventKind, str]]:
    events, _ = directory.events.after(0, 1000)
    return [(each.kind, each.node_id) for each in events]


# Members


def test_node_is_a_member_until_it_is_silent(cluster: Cluster) -> None:
    directory, _, one, two = cluster
    one.report(0.0, row_of(1))
    two.report(0.0, row_of(1), row_of(2))
    one.report(EXPIRY_S - 1)
    assert directory.expire(EXPIRY_S) == [NodeId("two")]
    assert holders(directory, 1) == {"one": Where.RAM}
    assert not holders(directory, 2)
    assert directory.expire(EXPIRY_S) == []
    directory.check()
    assert sizes(directory._holdings) == {SPACE: 1}
    # It comes back with all that it has.
    two.position = Position()
    two.report(EXPIRY_S, row_of(2))
    assert holders(directory, 2) == {"two": Where.RAM}
    directory.check()


def test_later_life_of_a_node_begins_with_nothing(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, row_of(1), row_of(2))
    later = ReportingNode(directory, "one", life=2)
    answer = later.report(1.0)
    assert answer.position == Position()
    assert not holders(directory, 1)
    later.report(1.0, row_of(2))
    assert holders(directory, 2) == {"one": Where.RAM}
    stored = (EventKind.BLOCK_STORED, "one")
    joined, lost = (EventKind.NODE_JOINED, "one"), (EventKind.NODE_LOST, "one")
    assert kinds(directory)[1:] == [joined, stored, stored, lost, joined, stored]


def test_earlier_life_of_a_node_is_not_listened_to(cluster: Cluster) -> None:
    directory, _, one, two = cluster
    later = ReportingNode(directory, "one", life=2)
    later.report(0.0, row_of(2))
    two.report(0.0, row_of(2))
    before = kinds(directory)
    answer = one.report(1.0, row_of(1), is_leaving=True, orders=Stamp(7, 12))
    assert answer == ReportAnswer(LIFE, orders=Stamp(7, 10), pause_ms=PAUSE_MS[1])
    assert not holders(directory, 1)
    assert not directory.members[NodeId("one")].report.is_leaving
    assert kinds(directory) == before


def test_late_report_changes_no_gauge_and_its_rows_are_judged_alone(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, row_of(1))
    late = one.next_report(row_of(2), pinned_bytes=1, is_leaving=True)
    now = one.next_report(pinned_bytes=2, is_leaving=False)
    directory.report(now, 1.0)
    answer = directory.report(late, 5.0)
    member = directory.members[NodeId("one")]
    assert (member.report.pinned_bytes, member.report.is_leaving) == (2, False)
    assert member.heard_at == 1.0
    # Its part was the next one.
    assert answer.position == Position(1, 2, -1)
    assert holders(directory, 2) == {"one": Where.RAM}


def test_report_that_is_older_than_the_loss_makes_no_member(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    report = one.next_report(row_of(1))
    directory.report(report, 0.0)
    directory.expire(EXPIRY_S)
    assert directory.report(report, EXPIRY_S).position == Position()
    assert not holders(directory, 1)
    one.report(EXPIRY_S, row_of(1))
    assert holders(directory, 1)


def test_engine_that_is_not_introduced_any_more_is_gone(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, engines=[engine_of("a", 1), engine_of("b", 1)])
    one.report(0.0, engines=[engine_of("a", 2)])
    assert [tuple(each) for each in directory.members[NodeId("one")].engines] == [("a", 2)]


# Listings


def test_chunk_is_where_its_node_says(cluster: Cluster) -> None:
    directory, _, one, two = cluster
    one.report(0.0, row_of(1, Where.RAM | Where.COMING), row_of(2, Where.COMING))
    two.report(0.0, row_of(1, Where.DISK))
    assert directory.where(SPACE, [key_of(1)])[0] == (
        HeldAt(NodeId("one"), Where.RAM),
        HeldAt(NodeId("two"), Where.DISK),
    )
    assert not holders(directory, 2)
    answer = one.report(0.0, gone(1))
    assert answer.position == Position(1, 2, -1)
    assert holders(directory, 1) == {"two": Where.DISK}


def test_repeated_part_changes_nothing(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, row_of(1))
    report = one.next_report(gone(1))
    first = directory.report(report, 0.0)
    one.position = first.position
    one.report(0.0, row_of(1))
    assert directory.report(report, 0.0).position == Position(1, 3, -1)
    assert holders(directory, 1) == {"one": Where.RAM}


def test_listing_that_begins_anew_is_a_node_that_was_lost(cluster: Cluster) -> None:
    directory, _, one, two = cluster
    one.report(0.0, row_of(1), row_of(2))
    two.report(0.0, row_of(1), row_of(2))
    one.position = Position()
    one.report(0.0, row_of(2))
    assert holders(directory, 1) == {"two": Where.RAM}
    events, _ = directory.events.after(0, 100)
    tail = [(each.kind, each.node_id, each.life) for each in events[-3:]]
    assert tail == [
        (EventKind.NODE_LOST, "one", 1),
        (EventKind.NODE_JOINED, "one", 1),
        (EventKind.BLOCK_STORED, "one", 1),
    ]
    directory.check()


def test_marks_are_void_when_a_listing_begins_anew(cluster: Cluster) -> None:
    _, _, one, two = cluster
    one.report(0.0, *map(row_of, range(20)))
    two.report(0.0, *map(row_of, range(20)))
    assert one.report(0.0).marks.spare
    assert not one.report(0.0).marks.number
    one.position = Position()
    assert one.report(0.0, row_of(50)).marks.forget


def test_node_that_begins_anew_frees_others_of_marks_for_its_sake(cluster: Cluster) -> None:
    _, _, one, two = cluster
    one.report(0.0, *map(row_of, range(20)))
    assert one.report(0.0).marks.number == 0
    told = two.report(0.0, *map(row_of, range(20))).marks
    assert 0 < len(told.spare) < 20
    assert not two.report(0.0).marks.number
    ReportingNode(one.directory, "one", life=2).report(1.0)
    assert two.report(1.0).marks.forget


def test_node_keeps_no_more_chunks_than_one_can_have(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.directory, "MOST_CHUNKS", 5)
    directory, _, one, _ = cluster
    for number in range(0, 12, 2):
        one.report(0.0, row_of(number), row_of(number + 1))
    assert sizes(directory._holdings) == {SPACE: 4}
    answer = one.report(0.0, gone(0), gone(11))
    assert answer.position.number == one.number
    assert directory.members[NodeId("one")].chunks.total() == 3
    one.report(0.0, row_of(20))
    assert holders(directory, 20)


def test_nonsense_in_a_listing_is_taken_as_it_comes(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, row_of(1), gone(1), row_of(1), gone(2), row_of(2, Where.COMING), row_of(1))
    two = ReportingNode(directory, "two")
    two.report(0.0, row_of(1), gone(1), gone(1), row_of(3), row_of(3, Where.DISK))
    assert holders(directory, 1) == {"one": Where.RAM}
    assert holders(directory, 3) == {"two": Where.DISK}
    directory.check()
    back = Position(1, 0, 0)
    report = one.next_report(row_of(1))
    part = ListingPart(begins=False, start=one.position, end=back)
    directory.report(msgspec.structs.replace(report, part=part), 0.0)
    directory.check()


# Answers


def test_node_is_told_what_of_its_chunks_is_spare(cluster: Cluster) -> None:
    _, _, one, two = cluster
    one.report(0.0, *map(row_of, range(20)))
    one.report(0.0)
    marks = two.report(0.0, *map(row_of, range(20))).marks
    assert marks.number > LIFE
    assert marks.known == two.number
    spare = {key for _, key in marks.spare}
    others = {key for _, key in one.report(0.0).marks.spare}
    assert not spare & others
    assert len(spare | others) == 20


def test_alone_is_who_has_a_namespace_for_himself(cluster: Cluster) -> None:
    _, _, one, two = cluster
    engines = [engine_of("a"), engine_of("b", space=Namespace("m"))]
    two.report(0.0)
    assert one.report(1.0, engines=engines).alone == []
    # By now all had time to report.
    now = EXPIRY_S
    assert one.report(now).alone == ["m", "n"]
    two.report(now, spaces={"m": 3, "n": 0})
    assert one.report(now).alone == ["n"]
    two.report(now, spaces={}, engines=[engine_of("c")])
    assert one.report(now).alone == ["m"]
    assert two.report(now).alone == []
    one.report(now, engines=[])
    assert two.report(now).alone == ["n"]


def test_namespaces_that_engines_have_left_are_told_to_who_has_chunks(cluster: Cluster) -> None:
    _, _, one, two = cluster
    one.report(0.0, engines=[engine_of("a")], spaces={"n": 1, "other": 2})
    two.report(0.0, spaces={"m": 1})
    one.report(5.0, engines=[engine_of("a", space=Namespace("m"))])
    assert one.report(5.0 + LEFT_S - 1).left == []
    assert one.report(5.0 + LEFT_S).left == ["n"]
    assert two.report(5.0 + LEFT_S).left == []
    two.report(16.0, engines=[engine_of("b")])
    assert one.report(16.0).left == []


def test_session_that_is_over_at_one_node_is_told_to_the_other(cluster: Cluster) -> None:
    _, _, one, two = cluster
    for node in (one, two):
        node.report(0.0, sessions=[SessionsWord("n", SessionNews("s", SessionWord.CAME))])
        node.report(0.0, sessions=[])
    over = SessionsWord("n", SessionNews("s", SessionWord.OVER))
    report = one.next_report(sessions=[over])
    assert not one.directory.report(report, 0.0).words
    # What comes twice is said once.
    one.directory.report(report, 0.0)
    answer = two.report(0.0)
    assert answer.words == [over]
    assert answer.words_number > LIFE
    assert not two.report(0.0).words


def test_orders_are_told_by_number_and_asked_for_where_they_are_not_known(
    cluster: Cluster,
) -> None:
    directory, orders, one, two = cluster
    answer = one.report(0.0, orders=Stamp(7, 10))
    assert (answer.orders, answer.wants_orders) == (Stamp(7, 10), False)
    assert two.report(0.0, orders=Stamp(7, 11)).wants_orders
    orders.confirm(orders.draft("x", 1.0, is_paused=True), 1.0)
    assert one.report(1.0).orders == Stamp(7, 11)
    assert orders.behind(Stamp(7, 11)) == ["one"]
    directory.expire(EXPIRY_S)
    two.report(EXPIRY_S)
    directory.expire(EXPIRY_S + 1)
    assert orders.behind(Stamp(7, 11)) == []


def test_no_orders_are_in_force_without_a_document() -> None:
    directory = Directory(LIFE, Orders(None, 1, 0.0))
    answer = ReportingNode(directory, "one").report(0.0)
    assert (answer.orders, answer.namings) == (NOTHING_ORDERED, {})


def test_late_report_shows_no_orders(cluster: Cluster) -> None:
    directory, orders, one, _ = cluster
    late = one.next_report(orders=Stamp(7, 1))
    one.report(0.0, orders=Stamp(7, 10))
    directory.report(late, 0.0)
    assert orders.behind(Stamp(7, 10)) == []


def test_weights_have_the_name_that_was_ordered_until_it_is_heard(cluster: Cluster) -> None:
    directory, orders, one, _ = cluster
    engines = [engine_of(f"engine-{life}", life) for life in (1, 2, 3)]
    one.report(1.0, engines=engines)
    assert list(directory.engines()) == engines
    first = Naming(Stamp(7, 11), "v1")
    orders.confirm(orders.draft("x", 1.0, namings={1: first, 2: first}), 1.0)
    assert one.report(1.0).namings == {1: first, 2: first}
    orders.confirm(orders.draft("y", 1.0, is_paused=True), 1.0)
    # Another order changes no naming.
    heard = [engine_of("engine-1", heard=Stamp(7, 11)), *engines[1:]]
    assert one.report(1.0, engines=heard).namings == {2: first}
    second = Naming(Stamp(7, 13), "v1", 5)
    orders.confirm(orders.draft("z", 1.0, namings={1: second, 2: first}), 1.0)
    assert one.report(1.0).namings == {1: second, 2: first}


def test_names_of_weights_are_not_told_again_by_the_next_life(cluster: Cluster) -> None:
    """Those weights may be gone, and an engine of that id may be another one."""
    _, orders, one, _ = cluster
    one.report(1.0, engines=[engine_of("e", 1)])
    orders.confirm(orders.draft("x", 1.0, namings={1: Naming(Stamp(7, 11), "step-7")}), 1.0)
    orders.confirm(orders.draft("y", 1.0, is_paused=True), 1.0)
    later = ReportingNode(Directory(LIFE + 1, Orders(orders.told(1.0), 9, 1.0)), "one")
    assert later.report(1.0, engines=[engine_of("e", 1, heard=Stamp(7, 11))]).namings == {}
    assert later.report(1.0, engines=[engine_of("e", 2)]).namings == {}
    assert later.report(1.0, engines=[engine_of("e", 1)]).namings.keys() == {1}


def test_pause_grows_with_nodes_and_their_cost_and_is_short_while_much_is_left() -> None:
    directory = Directory(LIFE, Orders(None, 1, 0.0))
    directory.cost_s = 0.005
    nodes = [ReportingNode(directory, str(number)) for number in range(60)]
    pauses = [node.report(0.0).pause_ms for node in nodes]
    assert pauses[0] == 20
    assert pauses[9] == 200
    assert pauses[-1] == PAUSE_MS[1]
    assert nodes[0].report(0.0, *map(row_of, range(999))).pause_ms == PAUSE_MS[1]
    full = [*map(row_of, range(1000))]
    assert [node.report(0.0, *full).pause_ms for node in nodes[:4]] == [0, 5, 10, 15]
    assert nodes[0].report(0.0).pause_ms == PAUSE_MS[1]
    assert nodes[1].report(0.0, *full).pause_ms == 10
    directory.cost_s = 0.0
    assert nodes[0].report(0.0).pause_ms == PAUSE_MS[0]


# Events and questions


def test_events_tell_what_came_and_went_by_the_nodes_numbers(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(1.0, row_of(1), row_of(2, Where.DISK))
    one.report(2.0, row_of(1, Where.DISK), row_of(3))
    one.report(3.0, gone(1))
    events, is_gap = directory.events.after(2, 100)
    assert not is_gap
    assert [(each.seq, each.kind, each.key, each.life, each.number) for each in events] == [
        (3, EventKind.BLOCK_STORED, key_of(1), 1, 1),
        (4, EventKind.BLOCK_STORED, key_of(2), 1, 1),
        (5, EventKind.BLOCK_STORED, key_of(3), 1, 3),
        (6, EventKind.BLOCK_REMOVED, key_of(1), 1, 4),
    ]
    assert [each.at for each in events] == [1.0, 1.0, 2.0, 3.0]


def test_clear_is_an_event_once_and_none_of_what_was_cleared_before() -> None:
    orders = Orders(OrdersDocument(Stamp(7, 10), {"m": 3}), 8, -MEMBERS_S)
    directory = Directory(LIFE, orders)
    directory.expire(0.0)
    orders.confirm(orders.clear("x", "n", 1.0), 1.0)
    directory.expire(1.0)
    directory.expire(1.0)
    orders.confirm(orders.draft("y", 1.0, is_paused=True), 1.0)
    orders.confirm(orders.clear("z", "", 2.0), 2.0)
    directory.expire(2.0)
    events, _ = directory.events.after(1, 100)
    assert [(each.kind, each.namespace, each.life, each.number) for each in events] == [
        (EventKind.CACHE_CLEARED, "n", 7, 11),
        (EventKind.CACHE_CLEARED, "", 7, 13),
    ]


def test_directory_counts_chunks_by_namespace_and_tier(cluster: Cluster) -> None:
    directory, _, one, two = cluster
    one.report(0.0, row_of(0), row_of(1, Where.RAM | Where.DISK), row_of(2, Where.COMING))
    two.report(0.0, row_of(1, Where.DISK))
    both = {(SPACE, Where.RAM): 2, (SPACE, Where.DISK): 2}
    assert chunk_counts(directory.members.values()) == both
    one.report(0.0, gone(1), row_of(0, Where.DISK))
    assert chunk_counts(directory.members.values()) == {(SPACE, Where.DISK): 2}
    one.life += 1
    one.report(0.0, row_of(3))
    assert chunk_counts(directory.members.values()) == dict.fromkeys(both, 1)


def test_engine_that_asks_and_is_introduced_by_no_node_waits(cluster: Cluster) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, engines=[engine_of("known")])
    for engine_id, place in (("known", "one"), ("stranger", "one"), ("lost", "nowhere")):
        directory.ask(Ask(PROTOCOL_VERSION, engine_id, 1, SPACE, [place]), 0.0)
    assert directory.waiting(0.0) == {"stranger": "one", "lost": "nowhere"}
    one.report(1.0, engines=[engine_of("known"), engine_of("stranger")])
    assert directory.waiting(1.0) == {"lost": "nowhere"}
    assert directory.waiting(EXPIRY_S) == {}


def test_messages_survive_the_wire(cluster: Cluster) -> None:
    directory, _, one, two = cluster
    for node in (one, two):
        report = node.next_report(*map(row_of, range(20)), engines=[engine_of("a")])
        raw = encode(directory.report(decode(encode(report), Report), 0.0))
        assert decode(raw, ReportAnswer).marks.forget
