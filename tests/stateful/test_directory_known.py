"""The directory against nodes that report over a wire that loses, repeats, delays and reorders.

Nodes are played: each has its own account of what it has, makes parts of its listing from that, and
believes marks as a NodeActor does. They begin new lives, leave, stay after all, and are silent for
too long; the directory begins new lives, too. A reader folds the events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raykv.base.ids import ALL_BLOCKS, NO_BLOCKS, EventKind, Key, Namespace, NodeId
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import Orders
from raykv.directory.known.members import EXPIRY_S
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Ask, AskAnswer
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import (
    ALL_READ,
    ListedRow,
    ListedRows,
    ListingPart,
    Position,
    Reason,
    Where,
)
from raykv.protocol.node import Report, ReportAnswer
from tests.fixtures.effort import examples

NODES = [NodeId("one"), NodeId("two"), NodeId("three")]
NAMES = [(Namespace(space), Key(bytes([number]) * 8)) for space in "ab" for number in range(2)]
WHERE = [Where.NOWHERE, Where.RAM, Where.DISK, Where.RAM | Where.DISK]
CHANGES_KEPT = 8
MAX_EVENTS = 40
MOST_ROUNDS = 8
"""Of reports, after which all must be known and told."""

RARELY = st.sampled_from([False, False, True])

Name = tuple[Namespace, Key]


class Change(NamedTuple):
    number: int
    name: Name
    where: Where


@dataclass(eq=False)
class PlayedNode:
    """A NodeActor in one life after the other."""

    node_id: NodeId
    life: int = 1
    changes: list[Change] = field(default_factory=list)
    marked: set[Name] = field(default_factory=set)
    is_leaving: bool = False
    position: Position | None = None
    directory_life: int = 0
    heard: int = 0
    seq: int = 0

    @property
    def number(self) -> int:
        return len(self.changes)

    def where(self, name: Name) -> Where:
        return next((each.where for each in reversed(self.changes) if each.name == name), WHERE[0])

    def changed_at(self, name: Name) -> int:
        return next((each.number for each in reversed(self.changes) if each.name == name), 0)

    def be(self, name: Name, where: Where) -> None:
        self.changes.append(Change(self.number + 1, name, where))
        # What is stored anew has another record.
        self.marked.discard(name)

    def begin_life(self) -> None:
        self.life += 1
        self.changes, self.marked, self.position = [], set(), None
        self.directory_life = self.heard = self.seq = 0

    def part(self, position: Position, most: int) -> ListingPart:
        missing = self.number - position.number
        begins = position.life != self.life or not 0 <= missing <= CHANGES_KEPT
        start = Position(self.life, self.number, 0, position.reader) if begins else position
        some = self.changes[start.number :][:most]
        number = start.number + len(some)
        rows = {each.name: each.where for each in some}
        place = start.place
        if place != ALL_READ:
            page = NAMES[place : place + most]
            rows |= {name: self.where(name) for name in page if self.where(name)}
            place = place + most if place + most < len(NAMES) else ALL_READ
        end = Position(self.life, number, place, position.reader)
        return ListingPart(begins, start, end, ListedRows.of(map(self.row, rows)))

    def row(self, name: Name) -> ListedRow:
        """It is as it is now, whatever the part's number is."""
        where = self.where(name)
        reason = Reason.STORED if where else Reason.EVICTED
        return ListedRow(*name, where, ALL_BLOCKS if where else NO_BLOCKS, reason)

    def report(self, most: int) -> Report:
        self.seq += 1
        position = self.position
        is_read = position == Position(self.life, self.number, ALL_READ)
        return Report(
            self.node_id,
            self.life,
            self.seq,
            part=None if position is None or is_read else self.part(position, most),
            heard=self.heard,
            is_leaving=self.is_leaving,
        )

    def answered(self, seq: int, answer: ReportAnswer) -> None:
        if seq != self.seq:
            return
        if answer.life != self.directory_life:
            self.directory_life, self.heard = answer.life, 0
            self.marked.clear()
        self.position = answer.position
        marks = answer.marks
        if marks.number <= self.heard:
            return
        self.heard = marks.number
        if marks.forget:
            self.marked.clear()
        for name in marks.spare:
            if self.where(name) & Where.RAM and self.changed_at(name) <= marks.known:
                self.marked.add(name)
        self.marked -= set(marks.kept)


class SentReport(NamedTuple):
    report: bytes
    node_life: int


class DirectoryKnownMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.nodes = {node_id: PlayedNode(node_id) for node_id in NODES}
        # By node and life: all that ever changed.
        self.accounts: dict[tuple[NodeId, int], list[Change]] = {}
        self.sent: deque[SentReport] = deque(maxlen=12)
        self.lives = 0
        self.begin_directory()

    # The directory

    @rule(is_now=RARELY)
    def end_directory(self, is_now: bool) -> None:
        if is_now:
            self.begin_directory()

    def begin_directory(self) -> None:
        self.lives += 1
        self.directory = Directory(self.lives, Orders(None, 1, self.now), most_events=MAX_EVENTS)
        # As of its answers: how far it has read.
        self.read: dict[NodeId, Position] = {}
        self.seq = 0
        self.folded: dict[NodeId, set[Name]] = {}

    @rule(seconds=st.sampled_from([0.5, 0.5, 4.0, EXPIRY_S + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        for node_id in self.directory.expire(self.now):
            del self.read[node_id]

    # Nodes

    @rule(
        node_id=st.sampled_from(NODES),
        name=st.sampled_from(NAMES),
        where=st.sampled_from([*WHERE, Where.RAM, Where.RAM]),
    )
    def change(self, node_id: NodeId, name: Name, where: Where) -> None:
        self.nodes[node_id].be(name, where)

    @rule(node_id=st.sampled_from(NODES), name=st.sampled_from(NAMES))
    def rush(self, node_id: NodeId, name: Name) -> None:
        """More changes than the node keeps: its listing begins anew."""
        for where in [Where.NOWHERE, Where.RAM] * CHANGES_KEPT:
            self.nodes[node_id].be(name, where)

    @rule(name=st.sampled_from(NAMES))
    def share(self, name: Name) -> None:
        """All have a chunk."""
        for node in self.nodes.values():
            node.be(name, Where.RAM)
            self.exchange(node, most=9)
            self.exchange(node, most=9)

    @rule(name=st.sampled_from(NAMES))
    def evict_kept(self, name: Name) -> None:
        """Who keeps a chunk for the others gives it up."""
        holders = [node for node in self.nodes.values() if node.where(name) & Where.RAM]
        kept = [node for node in holders if name not in node.marked]
        if len(kept) == 1 < len(holders):
            kept[0].be(name, Where.NOWHERE)
            self.exchange(kept[0], most=9)

    @rule(node_id=st.sampled_from(NODES), is_leaving=RARELY)
    def turn(self, node_id: NodeId, is_leaving: bool) -> None:
        self.nodes[node_id].is_leaving = is_leaving

    @rule(node_id=st.sampled_from(NODES), is_now=RARELY)
    def begin_node(self, node_id: NodeId, is_now: bool) -> None:
        if is_now:
            self.nodes[node_id].begin_life()

    # The wire

    @rule(
        node_id=st.sampled_from(NODES),
        most=st.sampled_from([1, 2, 9]),
        arrives=st.sampled_from([True, True, False]),
        is_answered=st.sampled_from([True, True, False]),
    )
    def report(self, node_id: NodeId, most: int, arrives: bool, is_answered: bool) -> None:
        self.exchange(self.nodes[node_id], most, arrives=arrives, is_answered=is_answered)

    def exchange(
        self, node: PlayedNode, most: int, *, arrives: bool = True, is_answered: bool = True
    ) -> ReportAnswer | None:
        self.accounts[node.node_id, node.life] = node.changes
        report = node.report(most)
        self.sent.append(SentReport(encode(report), node.life))
        if not arrives:
            return None
        answer = self.deliver(self.sent[-1])
        if is_answered:
            node.answered(report.seq, answer)
        return answer

    def deliver(self, sent: SentReport) -> ReportAnswer:
        report = decode(sent.report, Report)
        raw = encode(self.directory.report(report, self.now))
        answer = decode(raw, ReportAnswer)
        node_id, members = NodeId(report.node_id), self.directory.members
        if node_id in members and members[node_id].number.life == report.life:
            self.read[node_id] = answer.position
        return answer

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), is_answered=st.booleans())
    def deliver_late(self, data: st.DataObject, is_answered: bool) -> None:
        """A report comes late, or once more, and so does its answer."""
        sent = data.draw(st.sampled_from(list(self.sent)))
        answer = self.deliver(sent)
        report = decode(sent.report, Report)
        node = self.nodes[NodeId(report.node_id)]
        if is_answered and sent.node_life == node.life:
            node.answered(report.seq, answer)

    # Questions

    @rule(places=st.sets(st.sampled_from(NODES), min_size=1, max_size=2), space=st.integers(0, 1))
    def ask(self, places: set[NodeId], space: int) -> None:
        namespace = NAMES[2 * space][0]
        keys = [key for _, key in NAMES[:2]]
        ask = Ask("e", 1, namespace, sorted(places), Keys.of(keys))
        raw = encode(self.directory.ask(decode(encode(ask), Ask), self.now))
        sources = decode(raw, AskAnswer).sources.by_key(len(keys))
        for at, key in enumerate(keys):
            held = {each.node_id: each.where for each in self.directory.where(namespace, [key])[0]}
            others = {node_id: where for node_id, where in held.items() if node_id not in places}
            named = sources.get(at, [])
            assert len(named) == min(2, len(others))
            assert all(others[NodeId(each.node_id)] for each in named)
            in_ram = sum(bool(where & Where.RAM) for where in others.values())
            assert sum(not each.is_disk for each in named) == min(2, in_ram)

    # The reader

    @rule(most=st.integers(1, 9))
    def read_events(self, most: int) -> None:
        self.fold(most)

    def fold(self, most: int) -> int:
        events, is_gap = self.directory.events.after(self.seq, most)
        if is_gap:
            # It takes the directory as it is, and what comes after.
            self.seq = self.directory.events.last_seq
            self.folded = {node_id: set() for node_id in self.directory.members}
            for name in NAMES:
                for held in self.directory.where(name[0], [name[1]])[0]:
                    self.folded[held.node_id].add(name)
            return 0
        for event in events:
            assert event.seq == self.seq + 1
            self.seq = event.seq
            name = event.namespace, event.key
            match event.kind:
                case EventKind.LIFE_BEGAN:
                    assert event.seq == 1
                case EventKind.NODE_JOINED:
                    assert event.node_id not in self.folded
                    self.folded[event.node_id] = set()
                case EventKind.NODE_LOST:
                    del self.folded[event.node_id]
                case EventKind.BLOCK_STORED:
                    assert name not in self.folded[event.node_id]
                    self.folded[event.node_id].add(name)
                case EventKind.BLOCK_REMOVED:
                    self.folded[event.node_id].remove(name)
        return len(events)

    # When it is quiet

    @rule()
    def settle(self) -> None:
        """All report without loss: all is known, and told, within some reports."""
        answers: list[ReportAnswer | None] = []
        for _ in range(MOST_ROUNDS):
            answers = [self.exchange(node, most=9) for node in self.nodes.values()]
        assert all(answer is not None and not answer.marks.number for answer in answers)
        for node in self.nodes.values():
            assert self.read[node.node_id] == Position(node.life, node.number, ALL_READ)
        for name in NAMES:
            truth = {
                node_id: node.where(name)
                for node_id, node in self.nodes.items()
                if node.where(name)
            }
            assert {
                each.node_id: each.where for each in self.directory.where(name[0], [name[1]])[0]
            } == truth
            self.check_marks(name)
        while self.fold(9):
            pass
        assert self.folded == {
            node_id: {name for name in NAMES if node.where(name)}
            for node_id, node in self.nodes.items()
        }

    def check_marks(self, name: Name) -> None:
        """Who takes its copy for spare knows that another one is kept by a node that stays."""
        holders = [node for node in self.nodes.values() if node.where(name) & Where.RAM]
        kept = [node for node in holders if name not in node.marked and not node.is_leaving]
        assert kept or not any(name in node.marked for node in holders), name

    # Always

    @invariant()
    def directory_is_sound(self) -> None:
        self.directory.check()
        for node_id in NODES:
            self.check_belief(node_id)

    def check_belief(self, node_id: NodeId) -> None:
        """What is said of a node was in its account at the number that was read, or later."""
        position = self.read.get(node_id, Position())
        changes = self.accounts.get((node_id, position.life), [])
        for name in NAMES:
            possible = set(states_from(changes, name, position.number))
            if position.place != ALL_READ:
                possible.add(Where.NOWHERE)
            held = {
                each.node_id: each.where for each in self.directory.where(name[0], [name[1]])[0]
            }
            assert held.get(node_id, Where.NOWHERE) in possible, (node_id, name, position)

    def teardown(self) -> None:
        self.settle()
        self.directory.check()


def states_from(changes: list[Change], name: Name, number: int) -> Iterator[Where]:
    """Where a name was at a number of the listing, and after it."""
    where = Where.NOWHERE
    for change in changes:
        if change.number == number + 1:
            yield where
        if change.name == name:
            where = change.where
        if change.number > number:
            yield where
    yield where


DirectoryKnownMachine.TestCase.settings = settings(
    max_examples=examples(200), stateful_step_count=50, deadline=None
)
test_directory_knows_what_nodes_have_whatever_the_wire_does = DirectoryKnownMachine.TestCase
