"""Announcements: whose they are, and how many there may be."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

import raykv.directory.known.coming
from raykv.base.ids import EngineId, NodeId
from raykv.directory.known.coming import COMING_S, MOST_PLACES, Coming
from raykv.directory.known.members import EngineLife
from tests.fixtures.directory.reporting import SPACE, key_of

ONE, TWO, THREE = (EngineLife(EngineId("e"), life) for life in (1, 2, 3))
NODE, OTHER = NodeId("a"), NodeId("b")


def announce(
    coming: Coming, engine: EngineLife, places: list[NodeId], numbers: Iterable[int], now: float
) -> None:
    coming.announce(engine, places, SPACE, list(map(key_of, numbers)), now)


def is_coming(coming: Coming, number: int, engine: EngineLife, now: float) -> bool:
    return coming.of_others(SPACE, [key_of(number)], engine, now) == [0]


@pytest.fixture
def coming() -> Coming:
    return Coming()


def test_latest_announcement_counts(coming: Coming) -> None:
    announce(coming, ONE, [NODE], [1], 0.0)
    announce(coming, TWO, [OTHER], [1], 1.0)
    coming.check()
    assert len(coming) == 1
    assert is_coming(coming, 1, ONE, 2.5)
    assert not is_coming(coming, 1, TWO, 2.5)
    coming.came(NODE, SPACE, [key_of(1)])
    assert is_coming(coming, 1, ONE, 2.5)
    coming.came(OTHER, SPACE, [key_of(1)])
    assert not len(coming)


def test_announcement_that_is_repeated_lasts_longer(coming: Coming) -> None:
    announce(coming, ONE, [NODE], [1, 2], 0.0)
    announce(coming, ONE, [NODE], [1], 1.0)
    coming.expire(COMING_S)
    coming.check()
    assert is_coming(coming, 1, TWO, COMING_S)
    assert not is_coming(coming, 2, TWO, COMING_S)
    coming.end(ONE)
    coming.check()
    assert not len(coming)


def test_oldest_announcements_are_forgotten_first(
    coming: Coming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.coming, "MOST_COMING", 6)
    monkeypatch.setattr(raykv.directory.known.coming, "MOST_OF_AN_ENGINE", 4)
    announce(coming, ONE, [NODE], range(6), 0.0)
    assert [n for n in range(6) if is_coming(coming, n, THREE, 0.0)] == [2, 3, 4, 5]
    announce(coming, TWO, [NODE], range(10, 13), 0.0)
    assert [n for n in range(6) if is_coming(coming, n, THREE, 0.0)] == [3, 4, 5]
    assert all(is_coming(coming, n, THREE, 0.0) for n in range(10, 13))
    coming.check()


def test_engine_of_too_many_places_has_the_first_ones(coming: Coming) -> None:
    places = [NodeId(str(number)) for number in range(MOST_PLACES + 1)]
    announce(coming, ONE, places, [1], 0.0)
    coming.came(places[-1], SPACE, [key_of(1)])
    assert len(coming)
    coming.came(places[-2], SPACE, [key_of(1)])
    assert not len(coming)
