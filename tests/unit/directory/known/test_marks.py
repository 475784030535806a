"""Which copies are spare: of the nodes that have a chunk, who is told what, and in which order."""

from __future__ import annotations

import pytest

import raykv.directory.known.marks
from raykv.base.ids import NO_BLOCKS, Key, Namespace, NodeId
from raykv.directory.known.holdings import Holdings, Name
from raykv.directory.known.marks import MOST_SENT, Numbering, SpareMarks
from raykv.protocol.listing import ListedRow, Reason, Where
from raykv.protocol.node import Marks
from tests.fixtures.directory.reporting import listed

SPACE = Namespace("n")
KNOWN = 7


def name(number: int) -> Name:
    return SPACE, Key(number.to_bytes(8, "little"))


class Nodes:
    """Nodes that believe what they are told; what they have is known at once."""

    def __init__(self, *names: str) -> None:
        self.holdings = Holdings()
        self.numbering = Numbering(100)
        self.leaving: set[NodeId] = set()
        self.marks = SpareMarks(self.holdings, self.is_staying, self.numbering)
        self.spare: dict[NodeId, set[Name]] = {}
        self.heard: dict[NodeId, int] = {}
        self.ram: dict[NodeId, set[Name]] = {}
        # Of those that are lost: they still have it.
        self.unheard: dict[NodeId, set[Name]] = {}
        for each in names:
            self.join(NodeId(each))
            self.hear_all()

    def is_staying(self, node_id: NodeId) -> bool:
        return node_id not in self.leaving

    def join(self, node_id: NodeId) -> None:
        listed(self.holdings, node_id)
        self.marks.join(node_id)
        self.ram[node_id] = set()
        self.heard.setdefault(node_id, 0)
        believed = set(self.spare.setdefault(node_id, set()))
        self.put(node_id, *sorted(self.unheard.pop(node_id, ())))
        self.spare[node_id] = believed

    def lose(self, node_id: NodeId) -> None:
        """It is not heard of; what it believes stays."""
        self.holdings.lose(node_id)
        self.marks.lose(node_id)
        self.unheard[node_id] = self.ram.pop(node_id)

    def turn(self, node_id: NodeId, *, leaves: bool) -> None:
        (self.leaving.add if leaves else self.leaving.discard)(node_id)
        self.marks.turn(node_id)

    def put(self, node_id: NodeId, *names: Name, where: Where = Where.RAM) -> None:
        for each in names:
            if not where & Where.RAM:
                self.ram[node_id].discard(each)
                self.spare[node_id].discard(each)
            elif each not in self.ram[node_id]:
                self.ram[node_id].add(each)
                self.spare[node_id].discard(each)
        rows = [ListedRow(*each, where, NO_BLOCKS, Reason.STORED) for each in names]
        for moved in listed(self.holdings, node_id, *rows):
            self.marks.moved(node_id, moved)

    def drop(self, node_id: NodeId, *names: Name) -> None:
        self.put(node_id, *names, where=Where.NOWHERE)

    def share(self, count: int) -> None:
        """The first two have so many names, and have heard of it."""
        for node_id in ALL[:2]:
            self.put(node_id, *map(name, range(count)))
        self.hear_all()

    def hear(self, node_id: NodeId, *, is_lost: bool = False) -> Marks:
        """An answer, and the next report, which shows what was heard."""
        marks = self.marks.marks(node_id, KNOWN)
        if not is_lost and marks.number > self.heard[node_id]:
            self.heard[node_id] = marks.number
            if marks.forget:
                self.spare[node_id].clear()
            self.spare[node_id] |= set(marks.spare) & self.ram[node_id]
            self.spare[node_id] -= set(marks.kept)
        self.marks.hear(node_id, self.heard[node_id])
        return marks

    def hear_all(self) -> None:
        for node_id in self.ram:
            while self.hear(node_id).number:
                pass
        self.marks.check()

    def holders(self, each: Name) -> list[NodeId]:
        return [node_id for node_id, names in self.ram.items() if each in names]

    def keepers(self, each: Name) -> list[NodeId]:
        """Those that stay and do not take their copy for spare."""
        return [
            node_id
            for node_id in self.holders(each)
            if each not in self.spare[node_id] and node_id not in self.leaving
        ]

    def one_keeper(self, each: Name) -> NodeId:
        (keeper,) = self.keepers(each)
        return keeper


ONE, TWO, THREE = map(NodeId, ("one", "two", "three"))
ALL = (ONE, TWO, THREE)


@pytest.fixture
def nodes() -> Nodes:
    return Nodes(*ALL)


def test_of_several_copies_all_but_one_are_spare(nodes: Nodes) -> None:
    nodes.share(60)
    nodes.put(THREE, *map(name, range(60)))
    nodes.hear_all()
    keepers = [nodes.one_keeper(name(number)) for number in range(60)]
    # Nobody has to keep all of them.
    assert all(keepers.count(node_id) > 6 for node_id in ALL)


def test_keeper_is_told_nothing_and_marks_are_of_what_was_read(nodes: Nodes) -> None:
    nodes.put(ONE, name(1))
    assert not nodes.hear(ONE).number
    nodes.put(TWO, name(1))
    told = {node_id: nodes.hear(node_id) for node_id in (ONE, TWO)}
    (spare,) = [node_id for node_id, marks in told.items() if marks.number]
    assert list(told[spare].spare) == [name(1)]
    assert not told[spare].kept
    assert told[spare].known == KNOWN
    assert nodes.one_keeper(name(1)) != spare


def test_better_keeper_that_comes_makes_the_former_one_spare(nodes: Nodes) -> None:
    nodes.share(20)
    before = [nodes.one_keeper(name(number)) for number in range(20)]
    nodes.put(THREE, *map(name, range(20)))
    nodes.hear_all()
    after = [nodes.one_keeper(name(number)) for number in range(20)]
    # It changes only to the one that came.
    assert {b for a, b in zip(before, after, strict=True) if a != b} == {THREE}


def test_copy_that_is_kept_and_spare_again_before_it_is_told_is_spare(nodes: Nodes) -> None:
    nodes.share(1)
    keeper = nodes.one_keeper(name(0))
    nodes.drop(keeper, name(0))
    nodes.put(keeper, name(0))
    nodes.marks.check()
    nodes.hear_all()
    assert nodes.one_keeper(name(0)) == keeper


def test_marks_come_again_until_they_are_heard(nodes: Nodes) -> None:
    for node_id in ALL[:2]:
        nodes.put(node_id, name(1))
    first = [nodes.hear(node_id, is_lost=True) for node_id in ALL[:2]]
    for node_id in ALL[:2]:
        # The number of another life of the directory.
        nodes.marks.hear(node_id, 1 << 40)
    assert [nodes.hear(node_id) for node_id in ALL[:2]] == first
    assert not any(nodes.hear(node_id).number for node_id in ALL[:2])
    nodes.one_keeper(name(1))


def test_who_was_spared_by_a_lost_node_forgets_and_nobody_else(nodes: Nodes) -> None:
    nodes.share(20)
    believed = set(nodes.spare[TWO])
    nodes.lose(THREE)
    assert not nodes.hear(TWO).number
    assert nodes.spare[TWO] == believed != set()
    nodes.lose(ONE)
    assert nodes.hear(TWO).forget
    assert not nodes.spare[TWO]
    # What comes later is marked anew.
    nodes.join(ONE)
    nodes.put(ONE, *map(name, range(20)))
    nodes.hear_all()
    assert {nodes.one_keeper(name(number)) for number in range(20)} == {ONE, TWO}


def test_node_that_leaves_keeps_nothing_for_others(nodes: Nodes) -> None:
    nodes.share(20)
    nodes.turn(ONE, leaves=True)
    nodes.hear_all()
    assert all(nodes.one_keeper(name(number)) == TWO for number in range(20))
    # Its copies are spare as soon as others come.
    nodes.share(30)
    assert name(29) in nodes.spare[ONE]


@pytest.mark.parametrize("each", [name(number) for number in range(12)])
def test_node_that_stays_after_all_is_a_keeper_of_what_it_has(nodes: Nodes, each: Name) -> None:
    nodes.turn(ONE, leaves=True)
    for node_id in ALL:
        nodes.put(node_id, each)
    nodes.hear_all()
    (other,) = nodes.keepers(each)
    nodes.turn(ONE, leaves=False)
    nodes.hear_all()
    assert not nodes.spare[ONE]
    # Who kept it may give it up, and the one that stays may go with all that it has.
    nodes.drop(other, each)
    nodes.lose(ONE)
    nodes.hear_all()
    nodes.one_keeper(each)


def test_answer_has_so_many_names_and_kept_ones_first(nodes: Nodes) -> None:
    nodes.put(ONE, *map(name, range(4000)))
    nodes.put(TWO, *map(name, range(4000)))
    first = nodes.hear(TWO)
    assert len(first.spare) == MOST_SENT
    dropped = set(first.spare)
    nodes.drop(ONE, *dropped)
    second = nodes.hear(TWO)
    assert set(second.kept) == dropped
    assert not second.spare
    nodes.hear_all()
    assert all(nodes.keepers(name(number)) for number in range(4000))


def test_beyond_the_bound_spare_ones_are_lost_first(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.marks, "MOST_WAITING", 8)
    nodes.put(ONE, *map(name, range(40)))
    nodes.put(TWO, *map(name, range(40)))
    nodes.hear_all()
    assert len(nodes.spare[ONE] | nodes.spare[TWO]) == 16
    spare = list(nodes.spare[TWO])
    # Each is kept, and others come that are spare.
    nodes.drop(ONE, *spare)
    nodes.put(ONE, *map(name, range(100, 140)))
    nodes.put(TWO, *map(name, range(100, 140)))
    nodes.hear_all()
    assert not nodes.spare[TWO] & set(spare)


def test_node_forgets_all_if_too_many_are_kept(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.share(40)
    spare = list(nodes.spare[TWO])
    monkeypatch.setattr(raykv.directory.known.marks, "MOST_WAITING", 4)
    assert len(spare) > 4
    nodes.drop(ONE, *spare)
    assert nodes.hear(TWO).forget
    nodes.hear_all()
    assert not nodes.spare[TWO]
