"""Fetch or compute? Chunks of another node, or of a disk, are fetched if that is expected to be the
faster way.

All rates are measured: bytes per second of the fetches that ended, from nodes and from disks,
tokens per second of the prefill steps that the engine ran. As long as one that matters is unknown,
a fetch is tried. Since a rate that is not measured again never changes, every `EXPLORE_EVERY`-th
refusal is a fetch all the same.
"""

from __future__ import annotations

from raykv.engine.layered import Steps

WEIGHT = 0.2
"""Weight of the newest measurement in the running mean."""

MIN_PREFILL_TOKENS = 64
"""Smaller steps say nothing about prefill."""

MIN_FETCH_BYTES = 1 << 20
"""Smaller fetches are all latency."""

EXPLORE_EVERY = 32


class FetchCost:
    """See the module's docstring; each rate is None while it is unknown."""

    def __init__(self) -> None:
        self.fetch_bytes_per_s: float | None = None
        self.disk_bytes_per_s: float | None = None
        self.prefill_tokens_per_s: float | None = None
        self._refusals = 0

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A fetch has ended."""
        if num_bytes >= MIN_FETCH_BYTES and seconds > 0:
            self.fetch_bytes_per_s = _mean(self.fetch_bytes_per_s, num_bytes / seconds)

    def came_from_disk(self, num_bytes: int, seconds: float) -> None:
        """A fetch has ended, of which all came from a disk."""
        if num_bytes >= MIN_FETCH_BYTES and seconds > 0:
            self.disk_bytes_per_s = _mean(self.disk_bytes_per_s, num_bytes / seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """An engine step that computed `num_tokens` has ended."""
        if num_tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, num_tokens / seconds)

    def prefers_fetch(
        self, num_bytes: int, num_tokens: int, queued_bytes: int, disk_bytes: int = 0
    ) -> bool:
        """Whether to fetch, behind `queued_bytes`, or to compute `num_tokens`.

        It would be `num_bytes` from other nodes, and `disk_bytes` from disks.
        """
        fetch, disk = self.fetch_bytes_per_s, self.disk_bytes_per_s
        prefill = self.prefill_tokens_per_s
        if prefill is None or (num_bytes and fetch is None) or (disk_bytes and disk is None):
            return True
        # What is queued before it may come from either.
        queue = fetch if num_bytes else disk
        parts = ((queued_bytes, queue), (num_bytes, fetch), (disk_bytes, disk))
        if sum(size / rate for size, rate in parts if rate) <= num_tokens / prefill:
            return True
        self._refusals += 1
        return self._refusals % EXPLORE_EVERY == 0


class StepTimes:
    """How long an engine's steps take; vLLM may schedule one before the one before it has ended."""

    def __init__(self) -> None:
        # How many tokens, and when.
        self._under_way: Steps[tuple[int, float]] = Steps()
        self._last_end = 0.0

    def begin(self, step: object, num_tokens: int, now: float) -> None:
        """A step goes out."""
        self._under_way.begin(step, (num_tokens, now))

    def end(self, step: object, now: float) -> tuple[int, float] | None:
        """A step's tokens, and the seconds that it had the engine for itself; None: unknown."""
        num_tokens, began = self._under_way.end(step, (0, now))
        began, self._last_end = max(began, self._last_end), now
        return (num_tokens, now - began) if num_tokens else None


def _mean(known: float | None, latest: float) -> float:
    return latest if known is None else (1 - WEIGHT) * known + WEIGHT * latest
