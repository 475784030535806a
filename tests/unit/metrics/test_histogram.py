"""Histograms against a count by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.directory.meter.ages import SPAN_BITS, StoreTimes
from raykv.metrics.histogram import Histogram
from raykv.protocol.measures import HistogramData

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.floats(0, 10), max_size=30))
def test_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed(values: list[float]) -> None:
    one, many = Histogram(BOUNDS), Histogram(BOUNDS)
    for value in values:
        one.observe(value)
    many.observe_many(np.array(values, np.float64))
    expected = [0, 0, 0, 0]
    for value in values:
        expected[next((at for at, bound in enumerate(BOUNDS) if value <= bound), 3)] += 1
    assert one.counts == many.counts == expected
    assert one.total == pytest.approx(many.total) == pytest.approx(math.fsum(values))


def test_nonsense_is_counted_and_spoils_no_sum() -> None:
    made = Histogram(BOUNDS)
    made.observe(math.nan)
    made.observe(2.0)
    assert made.data() == HistogramData([0, 0, 1, 1], 2.0)


def test_difference_of_two_looks_is_added() -> None:
    made = Histogram(BOUNDS)
    made.add(HistogramData([1, 0, 2, 0], 5.0), HistogramData())
    made.add(HistogramData([2, 0, 2, 1], 15.0), HistogramData([1, 0, 2, 0], 5.0))
    assert made.data() == HistogramData([2, 0, 2, 1], 15.0)


@pytest.mark.parametrize(
    "bad",
    [
        HistogramData([1, 0, 2], 5.0),
        HistogramData([1] * 5, 5.0),
        HistogramData([0, 0, 0, 0], 5.0),
        HistogramData([1, 1, 1, 1], 1.0),
        HistogramData([1, 1, 1, 1], math.nan),
    ],
)
def test_what_counts_backwards_or_has_other_buckets_is_left_out(bad: HistogramData) -> None:
    made = Histogram(BOUNDS)
    made.add(bad, HistogramData([1, 0, 0, 0], 2.0))
    assert made.data() == HistogramData([0, 0, 0, 0], 0.0)


# Ages


def test_age_is_since_the_last_store_of_the_generations_beside_it() -> None:
    times = StoreTimes(num_spans=64)
    span = 1 << SPAN_BITS
    times.stored([5 * span, 5 * span + 1], now=100.0)
    times.stored([9 * span], now=130.0)
    assert times.ages([5 * span, 9 * span, 7 * span], now=150.0).tolist() == [50.0, 20.0]
    times.stored([5 * span + 3], now=140.0)
    assert times.ages([5 * span], now=150.0).tolist() == [10.0]


def test_generation_that_was_forgotten_has_no_age() -> None:
    times = StoreTimes(num_spans=8)
    span = 1 << SPAN_BITS
    times.stored([3 * span], now=1.0)
    times.stored([(3 + 8) * span], now=2.0)
    assert times.ages([3 * span], now=5.0).tolist() == []
    assert times.ages([(3 + 8) * span], now=5.0).tolist() == [3.0]
    assert times.ages([], now=5.0).tolist() == []
