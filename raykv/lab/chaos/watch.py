"""Whether offloading works as engines see it, measured with prompts that are new to all of them.

An engine computes and stores a probe, drops vLLM's own prefix cache, and asks again until the
answer comes out of RayKV. Then engines of other nodes ask for it too, and have to fetch it.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from raykv.lab.chaos.report import ChaosAnswer


@dataclass(frozen=True)
class Stored:
    """A probe that an engine has stored and loaded back."""

    number: int
    engine: int
    answer: ChaosAnswer


class ChaosWatch:
    """Which engines have stored, loaded and fetched since it was made.

    Each engine is at a node of its own; the threads of all report to it.

    Args:
        num_engines: all of them must do so.
    """

    def __init__(self, num_engines: int) -> None:
        self._lock = threading.Condition()
        self._num_engines = num_engines
        self._began_at = time.monotonic()
        self._loads: dict[int, float] = {}
        self._fetches: dict[int, float] = {}
        self._stored: list[Stored] = []
        self._asked: set[tuple[int, int]] = set()

    def loaded(self, stored: Stored) -> None:
        """Note that an engine has stored a probe and loaded it back."""
        with self._lock:
            self._loads.setdefault(stored.engine, time.monotonic() - self._began_at)
            self._stored.append(stored)
            self._lock.notify_all()

    def fetched(self, engine: int) -> None:
        """Note that an engine loaded another node's probe."""
        with self._lock:
            self._fetches.setdefault(engine, time.monotonic() - self._began_at)
            self._lock.notify_all()

    def to_fetch(self, engine: int) -> Stored | None:
        """Return the newest probe of another node that this engine has not been asked yet."""
        with self._lock:
            if engine in self._fetches:
                return None
            for stored in reversed(self._stored):
                asked = (engine, stored.number)
                if stored.engine != engine and asked not in self._asked:
                    self._asked.add(asked)
                    return stored
            return None

    @property
    def loads_again_s(self) -> float | None:
        """Seconds until the last engine loaded; None if some have not."""
        return self._last(self._loads)

    @property
    def fetches_again_s(self) -> float | None:
        """Seconds until the last engine fetched; None if some have not."""
        return self._last(self._fetches)

    def _last(self, times: dict[int, float]) -> float | None:
        return max(times.values()) if len(times) == self._num_engines else None

    def wait(self, deadline_s: float) -> bool:
        """Wait until all engines have loaded and fetched; return whether they have."""
        with self._lock:
            return self._lock.wait_for(
                lambda: self.fetches_again_s is not None and self.loads_again_s is not None,
                deadline_s,
            )
