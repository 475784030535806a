"""vLLM's subscribers hear of each chunk once when it comes, and once when it goes."""

from __future__ import annotations

import random

import pytest

from raykv.engine.announcements import Announcements, News
from tests.fixtures.keys import numbered_key

NOTHING = News([], [], [])
KEYS = [numbered_key(number) for number in range(8)]


@pytest.fixture
def announcements() -> Announcements:
    return Announcements()


def test_chunk_is_announced_when_it_came_and_not_again(announcements: Announcements) -> None:
    announcements.expect(KEYS[:1])
    assert announcements.take() == NOTHING
    announcements.changed(KEYS[0], is_there=True)
    announcements.changed(KEYS[0], is_there=True)
    announcements.expect(KEYS[:1])
    assert announcements.take() == News(KEYS[:1], [], [])
    announcements.come(KEYS[:1])
    assert announcements.take() == NOTHING


def test_expected_chunk_that_has_not_come_is_missing(announcements: Announcements) -> None:
    announcements.expect(KEYS[:2])
    announcements.changed(KEYS[1], is_there=False)
    assert announcements.take() == News([], [], [KEYS[1]])
    announcements.changed(KEYS[1], is_there=True)
    assert len(announcements) == 1


def test_what_the_engine_has_not_found_or_came_and_went_in_between_is_not_announced(
    announcements: Announcements,
) -> None:
    for is_there in (True, False):
        announcements.changed(KEYS[0], is_there=is_there)
    assert announcements.take() == NOTHING
    announcements.come(KEYS[:1])
    announcements.changed(KEYS[0], is_there=False)
    assert announcements.take() == NOTHING
    assert len(announcements) == 0


def test_cleared_chunks_are_announced_by_vllm_and_lost_ones_here() -> None:
    announcements = Announcements()
    announcements.come(KEYS)
    announcements.take()
    announcements.changed(KEYS[0], is_there=False)
    announcements.clear()
    assert announcements.take() == NOTHING
    announcements.come(KEYS[:2])
    announcements.take()
    announcements.expect(KEYS[2:3])
    announcements.lose_all()
    assert announcements.take() == News([], KEYS[:2], KEYS[2:3])


def test_subscriber_that_believes_all_news_knows_what_is_there() -> None:
    rng = random.Random(7)
    announcements = Announcements()
    there: set[bytes] = set()
    known: set[bytes] = set()
    for _ in range(3000):
        key = rng.choice(KEYS)
        match rng.randrange(4):
            case 0:
                announcements.expect([key])
            case 1 if key in there:
                announcements.come([key])
            case 2:
                is_there = rng.random() < 0.5
                (there.add if is_there else there.discard)(key)
                announcements.changed(key, is_there=is_there)
            case 3:
                news = announcements.take()
                assert known.issuperset(news.removed)
                known.difference_update(news.removed)
                assert known.isdisjoint(news.stored)
                known.update(news.stored)
                assert known <= there
