"""Fetch or compute? Chunks of another node, or of a disk, are fetched if that is expected to be the
faster way.

All rates are measured: bytes per second of the fetches that ended, from nodes and from disks,
tokens per second of the prefill steps that the engine ran. As long as one that matters is unknown,
a fetch is tried. Since a rate that is not measured again never changes, every `EXPLORE_EVERY`-th
refusal is a fetch all the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from raykv.base.ids import TokenSource
from raykv.engine.layered import Steps

WEIGHT = 0.2
"""Weight of the newest measurement in the running mean."""

MIN_PREFILL_TOKENS = 64
"""Smaller steps say nothing about prefill."""

MIN_FETCH_BYTES = 1 << 20
"""Smaller fetches are all latency."""

EXPLORE_EVERY = 32


class FetchCost:
    """See the module's docstring; a rate that is unknown is not there."""

    def __init__(self) -> None:
        self.bytes_per_s: dict[TokenSource, float] = {}
        self.prefill_tokens_per_s: float | None = None
        self._refusals = 0

    def fetched(self, source: TokenSource, num_bytes: int, seconds: float) -> None:
        """A fetch has ended, of which all came from there."""
        if num_bytes >= MIN_FETCH_BYTES and seconds > 0:
            self.bytes_per_s[source] = _mean(self.bytes_per_s.get(source), num_bytes / seconds)

    def computed(self, num_tokens: int, seconds: float) -> None:
        """An engine step that computed `num_tokens` has ended."""
        if num_tokens >= MIN_PREFILL_TOKENS and seconds > 0:
            self.prefill_tokens_per_s = _mean(self.prefill_tokens_per_s, num_tokens / seconds)

    def prefers_fetch(
        self, num_bytes: Mapping[TokenSource, int], num_tokens: int, queued_bytes: int
    ) -> bool:
        """Whether to fetch `num_bytes` from each source, behind `queued_bytes`, or to compute
        `num_tokens`.
        """
        rates, prefill = self.bytes_per_s, self.prefill_tokens_per_s
        if prefill is None or not num_bytes.keys() <= rates.keys():
            return True
        seconds = sum(size / rates[source] for source, size in num_bytes.items())
        # What is queued before it may come from either.
        is_remote = TokenSource.OTHER_NODE in num_bytes
        queue = rates.get(TokenSource.OTHER_NODE if is_remote else TokenSource.DISK)
        if queue is not None:
            seconds += queued_bytes / queue
        if seconds <= num_tokens / prefill:
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
