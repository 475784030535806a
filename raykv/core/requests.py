"""What the engine's view remembers of one request: what it allows, and what it must not have."""

from __future__ import annotations

from dataclasses import dataclass, field

from raykv.types import Key


@dataclass(frozen=True)
class RequestOptions:
    """What a request allows: `load` from the cache, `store` into it."""

    load: bool = True
    store: bool = True


@dataclass(slots=True)
class RequestState:
    """A request from its first sight to its end.

    `barred` are keys whose load failed for it; they stay a MISS. `waiting_since` is when a lookup
    first found a chunk that was not READY yet.
    """

    options: RequestOptions
    barred: set[Key] = field(default_factory=set)
    waiting_since: float | None = None

    def may_wait(self, now: float, deadline_s: float) -> bool:
        """Whether the request may still wait for chunks; the clock starts with the first call."""
        if self.waiting_since is None:
            self.waiting_since = now
        return now - self.waiting_since < deadline_s
