"""What an endless pool would hit: the estimate against exact counts."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.metrics.reach import (
    MAX_AT_ONCE,
    MAX_HASHES,
    MAX_WAITING,
    NUM_KEPT,
    DistinctKeys,
    Reach,
    WantedKeys,
)

MOST = 4 * 0.0081
"""Four standard errors."""


def random_keys(count: int, seed: int) -> list[bytes]:
    """As vLLM makes them: 32 random bytes and a KV group."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)
    return [row.tobytes() + bytes(4) for row in rows]


def sketch_of(*parts: list[bytes]) -> DistinctKeys:
    made = DistinctKeys()
    for part in parts:
        made.add(part)
    return made


@pytest.mark.parametrize("count", [0, 1, 2, 10, 100, 1_000, 10_000, 30_000, 45_000, 200_000])
def test_estimate_is_within_four_standard_errors(count: int) -> None:
    for seed in range(3):
        found = sketch_of(random_keys(count, seed)).estimate()
        assert abs(found - count) <= max(0.5, MOST * count), (count, seed, found)


def test_estimate_has_no_bias_over_many_sketches() -> None:
    count = 5 * NUM_KEPT // 2
    found = [sketch_of(random_keys(count, seed)).estimate() / count for seed in range(20)]
    assert abs(np.mean(found) - 1) < 4 * 0.0081 / 20**0.5


def test_keys_that_differ_little_count_one_by_one() -> None:
    plain = [number.to_bytes(36, "big") for number in range(50_000)]
    groups = [b"h" * 32 + group.to_bytes(4, "big") for group in range(50_000)]
    for same in (plain, groups):
        assert abs(sketch_of(same).estimate() / 50_000 - 1) <= MOST


def test_repeated_keys_and_their_order_change_nothing() -> None:
    some = random_keys(5_000, 1)
    once = sketch_of(some)
    again = sketch_of(some[::-1], some, some[:7])
    assert np.array_equal(once.smallest, again.smallest)


def test_smallest_hashes_of_two_are_those_of_both() -> None:
    left, right = random_keys(9_000, 1), random_keys(9_000, 2) + random_keys(3_000, 1)
    merged = sketch_of(left)
    merged.merge(sketch_of(right).smallest)
    assert np.array_equal(merged.smallest, sketch_of(left, right).smallest)
    assert not len(merged.merge(sketch_of(right).smallest)), "known ones are no news"


def test_changes_in_pages_give_the_whole_sketch() -> None:
    engine, reach = WantedKeys(), Reach()
    engine.note(random_keys(20_000, 3))
    pages = 0
    while page := engine.take(1):
        assert len(page) <= 8 * MAX_HASHES
        reach.add(20_000, page)
        reach.add(0, page)
        pages += 1
    assert pages > 3
    assert np.array_equal(reach._sketch.smallest, sketch_of(random_keys(20_000, 3)).smallest)
    engine.note(random_keys(1, 4))
    assert len(engine.take(1)) <= 8


@given(st.lists(st.binary(max_size=40), max_size=3))
def test_hashes_that_can_not_be_change_nothing_else(told: list[bytes]) -> None:
    reach = Reach()
    for each in told:
        reach.add(100, each)
    sound = b"".join(each for each in told if len(each) % 8 == 0)
    different = {sound[at : at + 8] for at in range(0, len(sound), 8)} - {b"\xff" * 8}
    assert reach.num_distinct == len(different)


def test_sketch_of_the_smallest_hashes_that_can_be_has_an_estimate() -> None:
    made = DistinctKeys()
    assert made.estimate() == 0
    made.merge(np.arange(NUM_KEPT, dtype=np.uint64))
    assert 2**50 < made.estimate() < 2**70


def key(number: int) -> bytes:
    return random.Random(number).randbytes(32) + bytes(4)


def told(engine: WantedKeys, reach: Reach, life: int = 1) -> None:
    """Messages until nothing is new."""
    before = engine.num_wanted
    while (sketch := engine.take(life)) or engine.num_wanted != before:
        assert len(sketch) <= 8 * MAX_HASHES
        reach.add(engine.num_wanted - before, sketch)
        before = engine.num_wanted


@pytest.mark.parametrize("share_of_old", [0.0, 0.3, 0.9])
def test_hit_ratio_is_near_the_exact_one(share_of_old: float) -> None:
    chance = random.Random(7)
    seen: set[int] = set()
    engines, reach = [WantedKeys(), WantedKeys()], Reach()
    for request in range(400):
        prompt = [
            chance.randrange(1000) if chance.random() < share_of_old else request * 1000 + 5000 + at
            for at in range(50)
        ]
        seen.update(prompt)
        engines[request % 2].note([key(number) for number in prompt])
        if request % 17 == 0:
            told(engines[0], reach)
            told(engines[1], reach)
    told(engines[0], reach)
    told(engines[1], reach)
    assert reach.num_wanted == 400 * 50
    assert abs(reach.hit_ratio - (1 - len(seen) / reach.num_wanted)) < 4 * 0.0081


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


def test_requests_that_nobody_takes_are_bounded() -> None:
    engine = WantedKeys()
    assert (engine.take(1), Reach().hit_ratio) == (b"", 0)
    for number in range(MAX_WAITING + 10):
        engine.note([key(number % 5)])
    for _ in range(9):
        engine.take(1)
    assert engine.num_wanted == MAX_WAITING


def test_many_keys_are_counted_in_several_messages() -> None:
    engine = WantedKeys()
    for _ in range(4):
        engine.note([key(1)] * (MAX_AT_ONCE // 2))
    for count in (MAX_AT_ONCE, 2 * MAX_AT_ONCE):
        engine.take(1)
        assert engine.num_wanted == count


def test_message_that_was_lost_is_made_up_for_when_all_is_told_again() -> None:
    engine, reach = WantedKeys(), Reach()
    engine.note([key(number) for number in range(300)])
    engine.take(1)
    reach.add(engine.num_wanted, engine.take(1))
    assert reach.num_distinct == 0
    engine.tell_all_again()
    told(engine, reach)
    assert reach.num_distinct == pytest.approx(300, rel=0.03)
