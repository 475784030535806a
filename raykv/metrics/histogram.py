"""Histograms with fixed buckets: observing is a search in a short list and an addition.

Invariant: a bucket counts what is above the bound before it and not above its own; the last one
counts what is above all bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from raykv.protocol.measures import HistogramData


class Histogram:
    """One thread observes; others may look at the same time.

    Args:
        bounds: upper ends of the buckets, rising.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value; NaN counts as above all bounds."""
        if value != value:
            self.counts[-1] += 1
            return
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def data(self) -> HistogramData:
        """A copy of what was counted so far."""
        return HistogramData(list(self.counts), self.total)

    def add(self, now: HistogramData, before: HistogramData) -> None:
        """Take in what another histogram of these bounds has counted between two looks at it.

        Ignore it if it has other bounds or has counted backwards.
        """
        old = before.counts or [0] * len(now.counts)
        if len(now.counts) != len(self.counts) or len(old) != len(self.counts):
            return
        more = [new - known for new, known in zip(now.counts, old, strict=True)]
        if min(more) < 0 or not now.total >= before.total:
            return
        for bucket, count in enumerate(more):
            self.counts[bucket] += count
        self.total += now.total - before.total
