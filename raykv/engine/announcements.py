"""What an engine has announced to vLLM's own subscribers: chunks that it can load from its node.

           expect            came, or found there by a look            found missing by a look
 (absent) ───────► expected ────────────────────────────────► told ──────────────────────► (absent)
                      └──────────────────── overdue ──────────────────────────────────────────┘

What goes from the node is found by looking at a few chunks with each step of the engine, so that a
step does not take longer the more chunks there are: subscribers learn of it seconds late.

Invariants:
1. A key is in the round exactly once while it is expected or told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from raykv.base.ids import Key

MAX_LOOKS = 256
"""Chunks that are checked with each step: about 20 microseconds."""

EXPECTED_S = 60.0
"""Beyond it a store has failed: twice the longest usual time."""


@dataclass(frozen=True)
class News:
    """Chunks that came, chunks that went, and those that were expected and have not come."""

    stored: list[Key] = field(default_factory=list)
    removed: list[Key] = field(default_factory=list)
    missing: list[Key] = field(default_factory=list)


class Announcements:
    """See the module's docstring. Times are seconds of one clock of the caller."""

    def __init__(self) -> None:
        # Until when a key is expected; None: it was announced.
        self._known: dict[Key, float | None] = {}
        self._round: deque[Key] = deque()
        self._news = News()

    def __len__(self) -> int:
        return len(self._known)

    def expect(self, key: Key, now: float) -> None:
        """A chunk is being stored."""
        if key not in self._known:
            self._known[key] = now + EXPECTED_S
            self._round.append(key)

    def came(self, keys: Iterable[Key], loadable: Container[Key]) -> None:
        """Chunks were stored, or found; those that can't be loaded count for nothing."""
        for key in keys:
            if key not in loadable or self._known.get(key, 0.0) is None:
                continue
            if key not in self._known:
                self._round.append(key)
            self._tell(key)

    def _tell(self, key: Key) -> None:
        self._known[key] = None
        self._news.stored.append(key)

    def take(self, loadable: Collection[Key], now: float) -> News:
        """Take what to announce; looks at the next few chunks of the round."""
        for _ in range(min(MAX_LOOKS, len(self._round))):
            key = self._round.popleft()
            until = self._known[key]
            if key in loadable:
                if until is not None:
                    self._tell(key)
                self._round.append(key)
            elif until is None or until < now:
                del self._known[key]
                (self._news.removed if until is None else self._news.missing).append(key)
            else:
                self._round.append(key)
        news, self._news = self._news, News()
        # What came and went in between is not announced.
        stored = [key for key in news.stored if key in self._known]
        return News(stored, news.removed, news.missing)

    def clear(self) -> None:
        """The cache was emptied, and vLLM announces that."""
        self._known.clear()
        self._round.clear()
        self._news = News()
