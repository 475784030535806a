"""Members: whose reports count, and how many there may be."""

from __future__ import annotations

from typing import Any

import pytest

import raykv.directory.known.members
from raykv.base.ids import EngineId, NodeId
from raykv.directory.known.members import EngineLife, Members
from raykv.protocol.node import Report, SessionsWord
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.fixtures.directory.reporting import engine_of

A = NodeId("a")


def report(node_id: str = "a", life: int = 2, seq: int = 1, **fields: Any) -> Report:
    return Report(node_id, life, seq, **fields)


@pytest.fixture
def members() -> Members:
    made = Members()
    made.hear(report(seq=1), 0.0)
    made.hear(report(seq=3), 0.0)
    return made


def test_report_of_number_0_counts_first() -> None:
    members = Members()
    assert members.hear(report(seq=0), 0.0) is members[A]


def test_what_is_kept_of_a_report_is_no_row_and_no_word(members: Members) -> None:
    word = SessionsWord("n", SessionNews("s", SessionWord.CAME))
    before = members.hear(report(seq=4, sessions=[word], engines=[engine_of("e", 7)]), 1.0)
    assert before is not None
    assert (before.engines, before.report.is_leaving) == ({}, False)
    kept = members[A].report
    assert (kept.part, kept.sessions, kept.engines) == (None, [], [])
    engine = EngineLife(EngineId("e"), 7)
    assert members[A].engines.keys() == {engine}
    assert members[A].namespaces == {"n"}
    before = members.hear(report(seq=5, is_leaving=True), 1.0)
    assert before is not None
    assert (list(before.engines), before.report.is_leaving) == ([engine], False)
    assert not members[A].engines
    assert not members.is_staying(A)


def test_life_that_is_over_does_not_come_back(members: Members) -> None:
    assert members.is_over(report(life=1, seq=99))
    assert members.is_new(report(life=3, seq=0))
    assert not members.is_over(report(life=3, seq=0))
    members.lose(A)
    assert members.is_over(report(life=1, seq=99))
    assert members.is_over(report(life=2, seq=3))
    assert not members.is_over(report(life=2, seq=4))
    members.hear(report(life=2, seq=4), 5.0)
    members.check()


def test_so_many_members_and_lost_ones_are_remembered(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.members, "MOST_MEMBERS", 3)
    monkeypatch.setattr(raykv.directory.known.members, "MOST_LOST", 2)
    for node_id in "bc":
        members.hear(report(node_id), 0.0)
    assert members.is_over(report("d"))
    assert not members.is_over(report("a", seq=9))
    for node_id in "abc":
        members.lose(NodeId(node_id))
    members.check()
    assert [members.is_over(report(node_id, seq=1)) for node_id in "abcd"] == [
        False,
        True,
        True,
        False,
    ]
