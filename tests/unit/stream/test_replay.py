"""The directory rebuilt by its readers: from all events, or from a snapshot and what came after."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import Key, Namespace, NodeId, Stamp
from raykv.directory.answers import event_page
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.directory.known.members import EXPIRY_S
from raykv.protocol import events
from raykv.protocol.listing import Where
from raykv.protocol.operator import OrdersDocument
from raykv.stream.replay import Replay
from tests.fixtures.directory.reporting import SPACE, ReportingNode, gone, key_of, row_of

A, B = NodeId("a"), NodeId("b")


class Stream:
    """A reader, and events for it by name."""

    def __init__(self) -> None:
        self.replay = Replay()
        self.seq = 0

    def __call__(self, kind: Any, **fields: Any) -> Any:
        self.seq += 1
        return self.replay.apply(kind(life=3, seq=self.seq, **fields))

    def stored(self, number: int, node: str = A, life: int = 1) -> Any:
        return self._block(events.BlockStored, number, node, life)

    def removed(self, number: int, node: str = A, life: int = 1) -> Any:
        return self._block(events.BlockRemoved, number, node, life)

    def _block(self, kind: Any, number: int, node: str, life: int) -> Any:
        key = key_of(number)
        return self(kind, node_id=node, node_life=life, number=1, namespace=SPACE, key=key)

    def joined(self, node: str = A, life: int = 1) -> Any:
        return self(events.NodeJoined, node_id=node, node_life=life, number=0)

    def lost(self, node: str = A, life: int = 1) -> Any:
        return self(events.NodeLost, node_id=node, node_life=life, number=0)


def place(number: int, node: NodeId = A) -> tuple[NodeId, Namespace, Key]:
    return node, SPACE, key_of(number)


def test_chunks_come_and_go_with_their_nodes() -> None:
    stream = Stream()
    stream.joined(A)
    stream.joined(B)
    assert stream.stored(1).came == [place(1)]
    assert stream.stored(1).came == []
    stream.stored(1, B)
    stream.stored(2, B)
    assert stream.replay.chunks == {place(1), place(1, B), place(2, B)}
    assert stream.removed(1).went == [place(1)]
    assert stream.removed(1).went == []
    assert set(stream.lost(B).went) == {place(1, B), place(2, B)}
    assert stream.replay.chunks == set()
    assert stream.replay.nodes == {A: 1}
    assert stream.replay.place == (3, stream.seq)
    stream.stored(1)
    assert stream(events.LifeBegan).went == [place(1)]
    assert (stream.replay.nodes, stream.replay.chunks) == ({}, set())


def test_clearing_and_missed_events_change_nothing_by_themselves() -> None:
    stream = Stream()
    stream.joined()
    stream.stored(1)
    stream(events.CacheCleared, namespace=SPACE, history=1, floor=9)
    at = stream.replay.place
    stream(events.EventsMissed, missed=5)
    assert stream.replay.chunks == {place(1)}
    assert stream.replay.place == at


def test_events_of_an_earlier_life_do_not_count_behind_a_snapshot_of_a_later_one() -> None:
    stream = Stream()
    stream.replay.load(A, 2, [(SPACE, key_of(1))])
    stream.removed(1)
    stream.stored(2)
    stream.lost()
    assert (stream.replay.nodes, stream.replay.chunks) == ({A: 2}, {place(1)})
    # The directory hears of that life only now, and tells all that it has.
    assert stream.joined(life=2).went == [place(1)]
    stream.stored(3, life=2)
    assert stream.replay.chunks == {place(3)}


def test_node_whose_listing_begins_anew_has_what_is_told_from_then_on() -> None:
    stream = Stream()
    stream.replay.load(A, 1, [(SPACE, key_of(1))])
    stream.lost()
    stream.joined()
    stream.stored(2)
    assert stream.replay.chunks == {place(2)}


class Cluster:
    """A directory, nodes that report to it, and two readers: one has had a snapshot."""

    def __init__(self) -> None:
        self.now = 0.0
        orders = Orders(OrdersDocument(Stamp(7, 1)), 8, -MEMBERS_S)
        self.directory = Directory(9, orders)
        self.nodes = {node_id: ReportingNode(self.directory, node_id) for node_id in (A, B)}
        # What nodes have, and what they have not told yet.
        self.held: dict[NodeId, set[int]] = {A: set(), B: set()}
        self.untold: dict[NodeId, set[int]] = {A: set(), B: set()}
        self.readers = [Replay(), Replay()]

    def change(self, node_id: NodeId, number: int) -> None:
        if number not in self.untold[node_id]:
            self.held[node_id] ^= {number}
            self.untold[node_id].add(number)

    def report(self, node_id: NodeId) -> None:
        node = self.nodes[node_id]
        numbers = self.untold[node_id]
        if node.position.life != node.life:
            numbers = numbers | self.held[node_id]
        rows = [row_of(n) if n in self.held[node_id] else gone(n) for n in sorted(numbers)]
        node.report(self.now, *rows)
        self.untold[node_id] = set()

    def restart(self, node_id: NodeId) -> None:
        self.nodes[node_id].life += 1
        self.held[node_id], self.untold[node_id] = set(), set()

    def be_silent(self, node_id: NodeId) -> None:
        self.now += EXPIRY_S
        for each in self.nodes:
            if each != node_id:
                self.report(each)
        self.directory.expire(self.now)
        # What it reports as its first report after that is a new listing.
        self.nodes[node_id].position = type(self.nodes[node_id].position)()

    def snapshot(self) -> None:
        """The second reader begins anew, with the nodes as they are."""
        replay = self.readers[1] = Replay()
        replay.place = (9, self.directory.events.last_seq)
        for node_id, node in self.nodes.items():
            names = [(SPACE, key_of(number)) for number in self.held[node_id]]
            replay.load(node_id, node.life, names)

    def read(self) -> None:
        for replay in self.readers:
            page = event_page(self.directory, *replay.place, self.now)
            assert not page.is_gap
            for event in events.events_of(page):
                replay.apply(event)

    def settle(self) -> None:
        for node_id in self.nodes:
            self.report(node_id)
            self.report(node_id)
        self.read()
        truth = {place(number, node) for node, held in self.held.items() for number in held}
        known = {
            (each.node_id, SPACE, key_of(number))
            for number in range(4)
            for each in self.directory.where(SPACE, [key_of(number)])[0]
            if each.where & Where.RAM
        }
        assert known == truth
        for replay in self.readers:
            assert replay.chunks == truth
            assert replay.nodes == {node_id: node.life for node_id, node in self.nodes.items()}


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("change"), st.sampled_from([A, B]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["report", "restart", "be_silent"]), st.sampled_from([A, B])),
        st.tuples(st.sampled_from(["snapshot", "read"])),
    ),
    max_size=40,
)


@given(STEPS)
def test_readers_come_to_what_nodes_have_from_all_events_and_from_a_snapshot(
    steps: list[tuple[Any, ...]],
) -> None:
    """But for chunks that come and go between two reports, which do not happen here."""
    cluster = Cluster()
    for name, *arguments in steps:
        getattr(cluster, name)(*arguments)
    cluster.settle()
