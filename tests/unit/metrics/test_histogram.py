"""Histograms against a count by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.metrics.histogram import Histogram
from raykv.protocol.measures import HistogramData

BOUNDS = (0.5, 1.0, 4.0)


@given(st.lists(st.floats(0, 10), max_size=30))
def test_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed(values: list[float]) -> None:
    made = Histogram(BOUNDS)
    for value in values:
        made.observe(value)
    expected = [0, 0, 0, 0]
    for value in values:
        expected[next((at for at, bound in enumerate(BOUNDS) if value <= bound), 3)] += 1
    assert made.counts == expected
    assert made.total == pytest.approx(math.fsum(values))


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
