"""Announcements: whose they are, and how many there may be."""

from __future__ import annotations

import pytest

import raykv.directory.known.coming
from raykv.base.ids import EngineId, Namespace, NodeId
from raykv.directory.known.coming import COMING_S, MOST_PLACES, Coming
from raykv.directory.known.holdings import Name
from raykv.directory.known.members import EngineLife
from tests.fixtures.directory.reporting import key_of

ONE, TWO, THREE = (EngineLife(EngineId("e"), life) for life in (1, 2, 3))
NODE, OTHER = NodeId("a"), NodeId("b")


def name(number: int) -> Name:
    return Namespace("n"), key_of(number)


@pytest.fixture
def coming() -> Coming:
    return Coming()


def test_latest_announcement_counts(coming: Coming) -> None:
    coming.announce(ONE, [NODE], [name(1)], 0.0)
    coming.announce(TWO, [OTHER], [name(1)], 1.0)
    coming.check()
    assert len(coming) == 1
    assert coming.is_coming(name(1), ONE, 2.5)
    assert not coming.is_coming(name(1), TWO, 2.5)
    coming.came(NODE, name(1))
    assert coming.is_coming(name(1), ONE, 2.5)
    coming.came(OTHER, name(1))
    assert not len(coming)


def test_announcement_that_is_repeated_lasts_longer(coming: Coming) -> None:
    coming.announce(ONE, [NODE], [name(1), name(2)], 0.0)
    coming.announce(ONE, [NODE], [name(1)], 1.0)
    coming.expire(COMING_S)
    coming.check()
    assert coming.is_coming(name(1), TWO, COMING_S)
    assert not coming.is_coming(name(2), TWO, COMING_S)
    coming.end(ONE)
    coming.check()
    assert not len(coming)


def test_oldest_announcements_are_forgotten_first(
    coming: Coming, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.coming, "MOST_COMING", 6)
    monkeypatch.setattr(raykv.directory.known.coming, "MOST_OF_AN_ENGINE", 4)
    coming.announce(ONE, [NODE], map(name, range(6)), 0.0)
    assert [n for n in range(6) if coming.is_coming(name(n), THREE, 0.0)] == [2, 3, 4, 5]
    coming.announce(TWO, [NODE], map(name, range(10, 13)), 0.0)
    assert [n for n in range(6) if coming.is_coming(name(n), THREE, 0.0)] == [3, 4, 5]
    assert all(coming.is_coming(name(n), THREE, 0.0) for n in range(10, 13))
    coming.check()


def test_engine_of_too_many_places_has_the_first_ones(coming: Coming) -> None:
    places = [NodeId(str(number)) for number in range(MOST_PLACES + 1)]
    coming.announce(ONE, places, [name(1)], 0.0)
    coming.came(places[-1], name(1))
    assert len(coming)
    coming.came(places[-2], name(1))
    assert not len(coming)
