"""What an endless pool would hit: the estimate against exact counts."""

from __future__ import annotations

import random

import pytest

from raykv.metrics.reach import MAX_AT_ONCE, MAX_REGISTERS, MAX_WAITING, Reach, WantedKeys


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32) + bytes(4)


def told(engine: WantedKeys, reach: Reach, life: int = 1) -> None:
    """Messages until nothing is new."""
    before = engine.num_wanted
    while (sketch := engine.take(life)).ranks or engine.num_wanted != before:
        assert len(sketch.ranks) <= MAX_REGISTERS
        reach.add(engine.num_wanted - before, sketch)
        before = engine.num_wanted


@pytest.mark.parametrize("share_of_old", [0.0, 0.3, 0.9])
def test_hit_ratio_is_near_the_exact_one(share_of_old: float) -> None:
    chance = random.Random(7)
    seen: set[int] = set()
    wanted = 0
    engines, reach = [WantedKeys(), WantedKeys()], Reach()
    for request in range(400):
        prompt = [
            chance.randrange(1000) if chance.random() < share_of_old else request * 1000 + 5000 + at
            for at in range(50)
        ]
        seen.update(prompt)
        wanted += len(prompt)
        engines[request % 2].note([key(number) for number in prompt])
        if request % 17 == 0:
            told(engines[0], reach)
            told(engines[1], reach)
    told(engines[0], reach)
    told(engines[1], reach)
    assert reach.num_wanted == wanted
    assert abs(reach.hit_ratio - (1 - len(seen) / wanted)) < 4 * 0.0081
    assert 0 <= reach.hit_ratio <= 1


def test_engine_begins_anew_for_another_life_of_the_node() -> None:
    engine, first, second = WantedKeys(), Reach(), Reach()
    keys = [key(number) for number in range(500)]
    engine.note(keys)
    told(engine, first, life=1)
    engine.note(keys)
    told(engine, second, life=2)
    assert first.hit_ratio == pytest.approx(0, abs=0.03)
    assert second.num_distinct == pytest.approx(500, rel=0.03)
    assert second.hit_ratio == pytest.approx(0, abs=0.03)


def test_nothing_wanted_has_no_ratio_and_no_news() -> None:
    assert Reach().hit_ratio == 0
    assert WantedKeys().take(1).ranks == b""


def test_requests_that_nobody_takes_are_bounded() -> None:
    engine = WantedKeys()
    for number in range(MAX_WAITING + 10):
        engine.note([key(number % 5)])
    for _ in range(9):
        engine.take(1)
    assert engine.num_wanted == MAX_WAITING


def test_many_keys_are_counted_in_several_messages() -> None:
    engine = WantedKeys()
    for _ in range(4):
        engine.note([key(1)] * (MAX_AT_ONCE // 2))
    engine.take(1)
    assert engine.num_wanted == MAX_AT_ONCE
    engine.take(1)
    assert engine.num_wanted == 2 * MAX_AT_ONCE


def test_message_that_was_lost_is_made_up_for_when_all_is_told_again() -> None:
    engine, reach = WantedKeys(), Reach()
    engine.note([key(number) for number in range(300)])
    engine.take(1)
    reach.add(engine.num_wanted, engine.take(1))
    assert reach.num_distinct == 0
    engine.tell_all_again()
    told(engine, reach)
    assert reach.num_distinct == pytest.approx(300, rel=0.03)
