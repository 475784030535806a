"""The sketch against exact counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.metrics.hyperloglog import MAX_RANK, NUM_REGISTERS, HyperLogLog, _sigma, _tau
from raykv.protocol.measures import KeySketch

MOST = 4 * 0.0081
"""Four standard errors."""


def keys(count: int, seed: int) -> list[bytes]:
    """As vLLM makes them: 32 random bytes and a KV group."""
    rows = np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)
    return [row.tobytes() + bytes(4) for row in rows]


def sketch_of(*parts: list[bytes]) -> HyperLogLog:
    made = HyperLogLog()
    for part in parts:
        made.add(part)
    return made


@pytest.mark.parametrize("count", [0, 1, 2, 10, 100, 1_000, 10_000, 30_000, 45_000, 200_000])
def test_estimate_is_within_four_standard_errors(count: int) -> None:
    for seed in range(3):
        found = sketch_of(keys(count, seed)).estimate()
        assert abs(found - count) <= max(0.5, MOST * count), (count, seed, found)


def test_estimate_has_no_bias_over_many_sketches() -> None:
    """Also where the classical estimator is off by some per cent: at 2.5 times the registers."""
    count = 5 * NUM_REGISTERS // 2
    found = [sketch_of(keys(count, seed)).estimate() / count for seed in range(20)]
    assert abs(np.mean(found) - 1) < 4 * 0.0081 / 20**0.5


def test_keys_that_differ_little_count_one_by_one() -> None:
    plain = [number.to_bytes(36, "big") for number in range(50_000)]
    groups = [b"h" * 32 + group.to_bytes(4, "big") for group in range(50_000)]
    for same in (plain, groups):
        assert abs(sketch_of(same).estimate() / 50_000 - 1) <= MOST


def test_repeated_keys_and_their_order_change_nothing() -> None:
    some = keys(5_000, 1)
    once = sketch_of(some)
    again = sketch_of(some[::-1], some, some[:7])
    assert (once.registers == again.registers).all()


def test_maximum_of_two_is_the_sketch_of_both() -> None:
    left, right = keys(9_000, 1), keys(9_000, 2) + keys(3_000, 1)
    known = HyperLogLog()
    merged = sketch_of(left)
    merged.merge(sketch_of(right).changed_since(known.registers, NUM_REGISTERS))
    assert (merged.registers == sketch_of(left, right).registers).all()


def test_changes_in_pages_give_the_whole_sketch() -> None:
    own, told, other = sketch_of(keys(20_000, 3)), HyperLogLog(), HyperLogLog()
    pages = 0
    while (page := own.changed_since(told.registers, 1000)).ranks:
        assert len(page.ranks) <= 1000
        other.merge(page)
        other.merge(page)
        pages += 1
    assert pages > 10
    assert (own.registers == other.registers).all()
    own.add(keys(1, 4))
    assert len(own.changed_since(told.registers, 1000).ranks) <= 1


@given(registers=st.binary(max_size=40), ranks=st.binary(max_size=20))
def test_registers_that_can_not_be_change_nothing_else(registers: bytes, ranks: bytes) -> None:
    made = HyperLogLog()
    made.merge(KeySketch(registers, ranks))
    assert made.registers.shape == (NUM_REGISTERS,)
    assert made.registers.max() <= MAX_RANK
    if len(registers) != 2 * len(ranks):
        assert not made.registers.any()
    assert made.estimate() >= 0


def test_full_and_empty_sketches_have_estimates() -> None:
    made = HyperLogLog()
    assert made.estimate() == 0
    made.registers[:] = MAX_RANK - 1
    assert 2**50 < made.estimate() < 2**70


@pytest.mark.parametrize("x", [0.0, 1e-9, 0.1, 0.5, 0.9, 1 - 1e-9, 1.0])
def test_corrections_for_empty_and_full_registers_are_the_sums_of_their_series(x: float) -> None:
    steps = range(1, 60)
    tau = (1 - x - sum((1 - x ** (2.0**-k)) ** 2 * 2.0**-k for k in steps)) / 3 if x else 0.0
    assert _tau(x) == pytest.approx(tau, abs=1e-7)
    if x < 1:
        sigma = x + sum(x ** (2.0**k) * 2.0 ** (k - 1) for k in steps)
        assert _sigma(x) == pytest.approx(sigma, rel=1e-6)
