"""How old chunks are when they go, in constant memory: by the generations of their slots.

Every lease has a new generation, so generations say which chunk it was. Neighbours are granted
together and mostly stored together: `SPAN` of them share the time of their last store. What goes
after `NUM_SPANS * SPAN` later grants has no known age.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

SPAN_BITS = 4
NUM_SPANS = 1 << 18
"""4 million generations, in 4 MiB."""

Times = np.ndarray[Any, np.dtype[np.float64]]


class StoreTimes:
    """See the module's docstring; times in seconds of one clock."""

    def __init__(self, num_spans: int = NUM_SPANS) -> None:
        self._mask = num_spans - 1
        assert num_spans & self._mask == 0, num_spans
        self._spans = np.full(num_spans, -1, np.int64)
        self._at: Times = np.zeros(num_spans, np.float64)

    def stored(self, generations: Sequence[int], now: float) -> None:
        """Chunks of these generations came to their nodes."""
        spans = np.asarray(generations, np.int64) >> SPAN_BITS
        places = spans & self._mask
        self._spans[places] = spans
        self._at[places] = now

    def ages(self, generations: Sequence[int], now: float) -> Times:
        """Seconds since chunks were stored; those whose time is not known are left out."""
        spans = np.asarray(generations, np.int64) >> SPAN_BITS
        places = spans & self._mask
        known = self._spans[places] == spans
        ages: Times = np.maximum(now - self._at[places[known]], 0.0)
        return ages
