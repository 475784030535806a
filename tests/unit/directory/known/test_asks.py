"""What an engine gets to know of keys that its places do not have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

import raykv.directory.known.asks
from raykv.base.ids import Namespace, part_of
from raykv.directory.known.coming import COMING_S
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import Orders
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Ask, AskAnswer
from raykv.protocol.framing import decode, encode
from raykv.protocol.listing import Reason, Where
from raykv.protocol.node import NodeStats
from tests.fixtures.directory.reporting import (
    SPACE,
    ReportingNode,
    engine_of,
    gone,
    key_of,
    row_of,
)

OTHER = Namespace("m")


@pytest.fixture
def directory() -> Directory:
    return Directory(1000, Orders(None, 1, 0.0))


@pytest.fixture
def nodes(directory: Directory) -> list[ReportingNode]:
    return [ReportingNode(directory, each) for each in ("a", "b", "c", "d")]


def keys_of(numbers: Iterable[int]) -> Keys:
    return Keys.of(key_of(number) for number in numbers)


def ask(
    directory: Directory,
    *numbers: int,
    places: tuple[str, ...] = ("mine",),
    coming: tuple[int, ...] = (),
    now: float = 0.0,
    **fields: Any,
) -> AskAnswer:
    named = {"engine_id": "e", "life": 1, "namespace": SPACE, **fields}
    question = Ask(
        places=list(places),
        keys=keys_of(numbers),
        coming=keys_of(coming),
        **named,
    )
    raw = encode(directory.ask(decode(encode(question), Ask), now))
    return decode(raw, AskAnswer)


def sources(answer: AskAnswer, *numbers: int) -> list[list[tuple[str, bool]]]:
    """Of each key, the nodes, and whether that is their disk."""
    found = answer.sources.by_key(len(numbers))
    return [
        [(each.node_id, each.is_disk) for each in found.get(at, [])] for at in range(len(numbers))
    ]


# Sources


def test_best_sources_come_first_and_no_more_than_two(
    directory: Directory, nodes: list[ReportingNode]
) -> None:
    a, b, c, d = nodes
    for node in nodes:
        node.report(0.0, row_of(1))
    assert sources(ask(directory, 1), 1) == [[("a", False), ("b", False)]]
    a.report(0.0, stats=NodeStats(queued_jobs=2))
    b.report(0.0, stats=NodeStats(reading=1))
    assert sources(ask(directory, 1), 1) == [[("c", False), ("d", False)]]
    c.report(0.0, is_leaving=True)
    assert sources(ask(directory, 1), 1) == [[("d", False), ("b", False)]]
    for node in (a, d):
        node.report(0.0, row_of(1, Where.DISK))
    assert sources(ask(directory, 1), 1) == [[("b", False), ("c", False)]]
    c.report(0.0, gone(1))
    assert sources(ask(directory, 1), 1) == [[("b", False), ("d", True)]]


# What is coming


def test_key_is_coming_for_others_until_its_time_is_over(directory: Directory) -> None:
    ask(directory, places=("a",), coming=(1, 2))
    assert ask(directory, 2, 3, life=2).coming == [0]
    assert ask(directory, 1, engine_id="f", now=COMING_S - 0.1).coming == [0]
    assert ask(directory, 1).coming == []
    assert ask(directory, 1, namespace=OTHER, life=2).coming == []
    assert ask(directory, 1, life=2, now=COMING_S).coming == []


def test_key_is_not_coming_once_its_node_has_it(
    directory: Directory, nodes: list[ReportingNode]
) -> None:
    a, b, *_ = nodes
    ask(directory, places=("a",), coming=(1, 2))
    b.report(0.0, row_of(1))
    a.report(0.0, row_of(2, Where.DISK))
    assert ask(directory, 1, 2, life=2).coming == [0, 1]
    a.report(0.0, row_of(1))
    assert ask(directory, 1, 2, life=2).coming == [1]
    # Said late: it is there.
    ask(directory, places=("a",), coming=(1,))
    assert ask(directory, 1, life=2).coming == []
    ask(directory, places=("c",), coming=(1,))
    assert ask(directory, 1, life=2).coming == [0]


def test_key_is_not_coming_once_its_engine_or_node_is_gone(
    directory: Directory, nodes: list[ReportingNode]
) -> None:
    a, b, *_ = nodes
    a.report(0.0, engines=[engine_of("e"), engine_of("f")])
    b.report(0.0, engines=[engine_of("g")])
    for number, engine_id in enumerate("efg"):
        ask(directory, places=("a",), coming=(number,), engine_id=engine_id)
    assert ask(directory, 0, 1, 2, engine_id="h").coming == [0, 1, 2]
    a.report(0.0, engines=[engine_of("e"), engine_of("f", life=2)])
    assert ask(directory, 0, 1, 2, engine_id="h").coming == [0, 2]
    ReportingNode(directory, "b", life=2).report(0.0)
    assert ask(directory, 0, 1, 2, engine_id="h").coming == [0]


# What is nowhere


def test_answer_says_why_the_last_copy_went(
    directory: Directory, nodes: list[ReportingNode]
) -> None:
    a, b, *_ = nodes
    a.report(0.0, *map(row_of, (1, 2, 3, 4)))
    b.report(0.0, row_of(4), row_of(1, space=OTHER))
    a.report(0.0, gone(1), gone(2, Reason.CLEARED), row_of(3, Where.DISK), gone(4))
    answer = ask(directory, 0, 1, 2, 3, 4)
    assert answer.gone == [1, 2]
    assert list(answer.reasons) == [Reason.EVICTED, Reason.CLEARED]
    b.report(0.0, gone(4, Reason.DAMAGED))
    a.report(0.0, row_of(1))
    answer = ask(directory, 0, 1, 2, 3, 4)
    assert answer.gone == [2, 4]
    assert list(answer.reasons) == [Reason.CLEARED, Reason.DAMAGED]


def test_departures_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.directory.known.asks, "MOST_DEPARTED", 8)
    directory = Directory(1000, Orders(None, 1, 0.0))
    node = ReportingNode(directory, "a")
    node.report(0.0, *map(row_of, range(20)))
    for number in range(20):
        node.report(0.0, gone(number))
    assert 4 <= len(ask(directory, *range(20)).gone) <= 8
    assert 19 in ask(directory, *range(20)).gone


def test_part_of_the_same_engine_is_no_other_namespace(
    directory: Directory, nodes: list[ReportingNode]
) -> None:
    """One of its places has given up what the other one has."""
    mine, its = (part_of(SPACE, name) for name in ("0.0.a", "0.1.a"))
    nodes[0].report(0.0, row_of(1, space=its), row_of(2, space=OTHER))
    assert ask(directory, 1, 2, namespace=mine).other == [1]


def test_answer_says_that_another_namespace_has_a_key(
    directory: Directory, nodes: list[ReportingNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, *_ = nodes
    a.report(0.0, row_of(1), row_of(2, space=OTHER), row_of(5, space=Namespace("o")))
    b.report(0.0, row_of(1, space=OTHER), row_of(7, space=OTHER))
    assert ask(directory, 1, 2, 3, 5).other == [1, 3]
    assert ask(directory, 1, 2, 3, 5, places=("a", "b")).other == [1, 3]
    monkeypatch.setattr(raykv.directory.known.asks, "MOST_MISSING", 2)
    assert ask(directory, 1, 3, 2, 7).other == [2]
    monkeypatch.setattr(raykv.directory.known.asks, "MOST_SPACES", 2)
    assert ask(directory, 2).other == []
