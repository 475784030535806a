"""What reports carry besides their message: breakers, histograms, sketches, metrics."""

from __future__ import annotations

import msgspec

MAX_BREAKERS = 16
"""Breakers in one report: the sums count them all."""

MAX_REASON = 120
"""Characters of a reason."""

OWN_NODE = "own node"
"""How a worker's line to its NodeActor is called in reports."""


class OpenBreaker(msgspec.Struct, frozen=True, array_like=True):
    """A breaker that is not closed.

    `peer` is left alone: "scheduler", "node:<node id>" or, for an engine, its own node, for copies
    or for changes. `state` is "open" or "half-open", `failures` are those in a row, `seconds` how
    long the breaker has not been closed.
    """

    peer: str
    state: str
    failures: int
    seconds: float
    reason: str


class BreakerReport(msgspec.Struct, frozen=True, array_like=True):
    """Breakers that are not closed, at most `MAX_BREAKERS`, then sums since the start.

    `opened` counts closed breakers that opened, `failed` calls that failed, `refused` calls that
    were not made because a breaker was open.
    """

    rows: list[OpenBreaker] = []
    opened: int = 0
    failed: int = 0
    refused: int = 0


class HistogramData(msgspec.Struct, frozen=True, array_like=True):
    """Observations since the start by bucket, and their sum.

    The last bucket is for what is above all bounds; the bounds are those of the metric's name.
    """

    counts: list[int] = []
    total: float = 0.0


class MetricRow(msgspec.Struct, frozen=True, array_like=True):
    """One series: the labels' values, and a number or, of a histogram, `histogram`."""

    labels: list[str]
    value: float = 0.0
    histogram: HistogramData = HistogramData()


class MetricFamily(msgspec.Struct, frozen=True, array_like=True):
    """All series of one metric; what it means is in `raykv/metrics/table.py`."""

    name: str
    rows: list[MetricRow]


class ClusterMetrics(msgspec.Struct, frozen=True):
    """What the scheduler actor has to show."""

    families: list[MetricFamily] = []
