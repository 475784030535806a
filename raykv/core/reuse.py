"""Whether storing pays: chunks loaded beside chunks stored, by namespace, over all its engines.

        a sample with too few loads
  ALL ─────────────────────────────► SOME (one request in sixteen stores)
   ▲                                   │ a sample with enough loads
   └───────────────────────────────────┘

A store costs an engine a small part of the time that computing the chunk took; a load saves nearly
all of it. So few loads are enough. A sample ends when as many chunks were stored as the pools hold,
and never before `MIN_SAMPLE`: until then a chunk had no time to be asked for again. The sums of the
last sample count half in the next one, so that one odd sample does not switch anything for long.
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_REUSE = 0.03
"""Loads for each store below which it does not pay: a store costs up to 3 % of computing."""

MIN_SAMPLE = 2048
"""Chunks stored before anything is decided."""

PROBE_SAMPLE = 256
"""Chunks stored before it is decided again, while few are."""

SOME = 16
"""Then one request of so many stores, to notice when reuse begins."""


@dataclass
class ReuseGauge:
    """Of one namespace. `store_share`: one request of so many should store."""

    stored: float = 0.0
    loaded: float = 0.0
    store_share: int = 1
    # Stored and loaded that were left over from earlier samples.
    _old_stored: float = 0.0

    def count(self, stored: int, loaded: int, capacity: int) -> None:
        """Engines have stored and loaded chunks; `capacity` is how many the pools hold."""
        self.stored += max(0, stored)
        self.loaded += max(0, loaded)
        sample = PROBE_SAMPLE if self.store_share > 1 else max(MIN_SAMPLE, capacity)
        if self.stored - self._old_stored < sample:
            return
        self.store_share = 1 if self.loaded >= LEAST_REUSE * self.stored else SOME
        self.stored /= 2
        self.loaded /= 2
        self._old_stored = self.stored
