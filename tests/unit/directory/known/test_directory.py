"""What nodes report to the directory, and what it answers."""

from __future__ import annotations

import pytest

import raykv.directory.known.directory
from raykv.base.ids import EventKind, Namespace, NodeId, Stamp, part_of
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.directory.known.members import EXPIRY_S
from raykv.directory.known.spaces import LEFT_S
from raykv.protocol.engine import NOTHING_ORDERED, Ask, Naming
from raykv.protocol.listing import Position, Where
from raykv.protocol.node import PAUSE_MS, ReportAnswer, SessionsWord
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.fixtures.directory.reporting import (
    LIFE,
    SPACE,
    ReportingNode,
    TwoNodes,
    engine_of,
    gone,
    key_of,
    row_of,
    sizes,
    two_nodes,
)


@pytest.fixture
def cluster() -> TwoNodes:
    return two_nodes()


def holders(directory: Directory, number: int) -> dict[str, Where]:
    return {each.node_id: each.where for each in directory.where(SPACE, [key_of(number)])[0]}


def kinds(directory: Directory) -> list[tuple[EventKind, str]]:
    events, _ = directory.events.after(0, 1000)
    return [(each.kind, each.node_id) for each in events]


def test_key_of_an_engine_with_several_places_is_where_all_its_parts_are(
    cluster: TwoNodes,
) -> None:
    directory, _, one, two = cluster
    parts = [part_of(SPACE, name) for name in ("0.0.2-a", "0.1.2-a")]
    other, half = part_of(SPACE, "0.0.1-b"), part_of(SPACE, "0.0.2-c")
    one.report(
        0.0,
        *(row_of(number)._replace(namespace=parts[0]) for number in (1, 2, 4)),
        row_of(2)._replace(namespace=other),
        row_of(3),
        row_of(5)._replace(namespace=half),
    )
    two.report(0.0, row_of(1)._replace(namespace=parts[1]), row_of(3))
    assert holders(directory, 1) == {"one": Where.RAM, "two": Where.RAM}
    assert holders(directory, 2) == {"one": Where.RAM}, "the other shape has one part"
    assert holders(directory, 3) == {"one": Where.RAM, "two": Where.RAM}, "whole ones"
    assert holders(directory, 4) == {}, "half of it is nowhere"
    assert holders(directory, 5) == {}, "nothing of the other half is anywhere"
    assert directory.where(parts[1], [key_of(2)])[0] == ()


# Members


def test_node_is_a_member_until_it_is_silent(cluster: TwoNodes) -> None:
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


def test_earlier_life_of_a_node_is_not_listened_to(cluster: TwoNodes) -> None:
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


def test_late_report_changes_no_gauge_and_its_rows_are_judged_alone(cluster: TwoNodes) -> None:
    directory, orders, one, _ = cluster
    one.report(0.0, row_of(1))
    late = one.next_report(row_of(2), pinned_bytes=1, is_leaving=True, orders=Stamp(7, 1))
    now = one.next_report(pinned_bytes=2, is_leaving=False, orders=Stamp(7, 10))
    directory.report(now, 1.0)
    answer = directory.report(late, 5.0)
    member = directory.members[NodeId("one")]
    assert (member.report.pinned_bytes, member.report.is_leaving) == (2, False)
    assert member.heard_at == 1.0
    assert orders.behind(Stamp(7, 10)) == []
    # Its part was the next one.
    assert answer.position == Position(1, 2, -1)
    assert holders(directory, 2) == {"one": Where.RAM}


def test_report_that_is_older_than_the_loss_makes_no_member(cluster: TwoNodes) -> None:
    directory, _, one, _ = cluster
    report = one.next_report(row_of(1))
    directory.report(report, 0.0)
    directory.expire(EXPIRY_S)
    assert directory.report(report, EXPIRY_S).position == Position()
    assert not holders(directory, 1)
    one.report(EXPIRY_S, row_of(1))
    assert holders(directory, 1)


# Listings


def test_listing_that_begins_anew_is_a_node_that_was_lost(cluster: TwoNodes) -> None:
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


def test_node_that_begins_anew_frees_others_of_marks_for_its_sake(cluster: TwoNodes) -> None:
    _, _, one, two = cluster
    one.report(0.0, *map(row_of, range(20)))
    assert one.report(0.0).marks.number == 0
    told = two.report(0.0, *map(row_of, range(20))).marks
    assert 0 < len(told.spare) < 20
    assert told.number > LIFE
    assert told.known == two.number
    assert not two.report(0.0).marks.number
    ReportingNode(one.directory, "one", life=2).report(1.0)
    assert two.report(1.0).marks.forget


def test_node_keeps_no_more_chunks_than_one_can_have(
    cluster: TwoNodes, monkeypatch: pytest.MonkeyPatch
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


# Answers


def test_alone_is_who_has_a_namespace_for_himself(cluster: TwoNodes) -> None:
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


def test_namespaces_that_engines_have_left_are_told_to_who_has_chunks(cluster: TwoNodes) -> None:
    _, _, one, two = cluster
    one.report(0.0, engines=[engine_of("a")], spaces={"n": 1, "other": 2})
    two.report(0.0, spaces={"m": 1})
    one.report(5.0, engines=[engine_of("a", space=Namespace("m"))])
    assert one.report(5.0 + LEFT_S - 1).left == []
    assert one.report(5.0 + LEFT_S).left == ["n"]
    assert two.report(5.0 + LEFT_S).left == []
    two.report(16.0, engines=[engine_of("b")])
    assert one.report(16.0).left == []


def test_session_that_is_over_at_one_node_is_told_to_the_other(cluster: TwoNodes) -> None:
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


def test_order_of_a_session_that_only_nodes_know_goes_to_all_of_them(cluster: TwoNodes) -> None:
    directory, _, one, two = cluster
    for node in (one, two):
        node.report(0.0)
    news = SessionNews("chat", SessionWord.PAUSED, pause_s=5.0, priority=3)
    assert directory.sessions.order(SPACE, news) == ["one", "two"]
    for node in (one, two):
        assert node.report(0.0).words == [SessionsWord(SPACE, news)]
        assert node.report(0.0).words == []


def test_orders_are_told_by_number_and_asked_for_where_they_are_not_known(
    cluster: TwoNodes,
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


def test_weights_have_the_name_that_was_ordered_until_it_is_heard(cluster: TwoNodes) -> None:
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


def test_names_of_weights_are_not_told_again_by_the_next_life(cluster: TwoNodes) -> None:
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
    assert nodes[0].report(0.0).orders == NOTHING_ORDERED
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


def test_engine_that_asks_and_is_introduced_by_no_node_waits(cluster: TwoNodes) -> None:
    directory, _, one, _ = cluster
    one.report(0.0, engines=[engine_of("known")])
    for engine_id, place in (("known", "one"), ("stranger", "one"), ("lost", "nowhere")):
        directory.ask(Ask(engine_id, 1, SPACE, [place]), 0.0)
    assert directory.waiting(0.0) == {"stranger": "one", "lost": "nowhere"}
    one.report(1.0, engines=[engine_of("known"), engine_of("stranger")])
    assert directory.waiting(1.0) == {"lost": "nowhere"}
    assert directory.waiting(EXPIRY_S) == {}
