"""What an engine says to vLLM's own subscribers: which chunks it can load from its node.

           expect          came, or found there            went
 (absent) ───────► expected ───────────────────► told ─────────────► (absent)
                      └──── has not come ──────────────────────────────┘

The view says what comes and goes. Of what others store on the node only what this engine has found
is announced.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raykv.base.ids import Key


class News(NamedTuple):
    """Chunks that came, chunks that went, and those that were expected and have not come."""

    stored: list[Key]
    removed: list[Key]
    missing: list[Key]


class Announcements:
    """See the module's docstring."""

    def __init__(self) -> None:
        # Whether each was told.
        self._known: dict[Key, bool] = {}
        self._stored: dict[Key, None] = {}
        self._removed: list[Key] = []
        self._missing: list[Key] = []

    def __len__(self) -> int:
        return len(self._known)

    def expect(self, keys: Iterable[Key]) -> None:
        """Chunks are being stored."""
        for key in keys:
            self._known.setdefault(key, False)

    def come(self, keys: Iterable[Key]) -> None:
        """Chunks are there."""
        for key in keys:
            if not self._known.get(key, False):
                self._known[key] = True
                self._stored[key] = None

    def changed(self, key: Key, *, is_there: bool) -> None:
        """A chunk has come or gone, or a store of it has ended; unknown chunks are ignored."""
        if key not in self._known:
            return
        if is_there:
            self.come([key])
        elif not self._known.pop(key):
            self._missing.append(key)
        elif key in self._stored:
            # It came and went in between.
            del self._stored[key]
        else:
            self._removed.append(key)

    def lose_all(self) -> None:
        """None of them can be loaded any more."""
        for key in list(self._known):
            self.changed(key, is_there=False)

    def take(self) -> News:
        """Return the news since the last call; removals are announced before arrivals."""
        news = News(list(self._stored), self._removed, self._missing)
        self._stored, self._removed, self._missing = {}, [], []
        return news

    def clear(self) -> None:
        """Forget all chunks: vLLM itself announces that the cache was emptied."""
        self._known.clear()
        self.take()
