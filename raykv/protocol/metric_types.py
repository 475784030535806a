"""Metrics as they cross processes: what engines tell, and what a scrape is made of."""

from __future__ import annotations

import msgspec


class HistogramData(msgspec.Struct, frozen=True, array_like=True):
    """Observations since the start by bucket, and their sum.

    The last bucket is for what is above all bounds; the bounds are those of the metric's name.
    """

    counts: list[int] = []
    total: float = 0.0


class KeySketch(msgspec.Struct, frozen=True, array_like=True):
    """Registers of a HyperLogLog sketch: their numbers (2 bytes each, little endian), their ranks.

    Taking in the same ones again changes nothing.
    """

    registers: bytes = b""
    ranks: bytes = b""


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
