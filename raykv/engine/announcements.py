"""What an engine says of chunks: to vLLM's own subscribers which it can load from its node, and to
its places which its requests have found.

           expect          came, or found there            went
 (absent) ───────► expected ───────────────────► told ─────────────► (absent)
                      └──── has not come ──────────────────────────────┘

The view says what comes and goes. Of what others store on the node only what this engine has found
is announced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import chain, islice
from typing import NamedTuple

from raykv.base.ids import Key
from raykv.engine.remote import MAX_ASKED, take
from raykv.engine.requests import RequestState
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.engine import FoundKeys

MAX_TOUCHES = 65_536
"""Found chunks that wait to be told; beyond it the oldest are lost, which only ages them."""

TOUCH_S = 1.0
"""Until what a request has found is told again while it waits: a place keeps it for 3 s. Of all
requests `MAX_ASKED` chunks are told again in this time."""


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
        """A chunk has come or gone, or a store of it has ended; others are nobody's business."""
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
        """What to announce: what is gone before what came."""
        news = News(list(self._stored), self._removed, self._missing)
        self._stored, self._removed, self._missing = {}, [], []
        return news

    def clear(self) -> None:
        """The cache was emptied, and vLLM announces that."""
        self._known.clear()
        self.take()


class FoundChunks:
    """What requests have found, with whose they are, until the places are told.

    `take` and `len` may be called on another thread.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[str, Key]] = deque(maxlen=MAX_TOUCHES)
        # So many may be told again until then.
        self._left, self._until = 0, 0.0

    def __len__(self) -> int:
        return len(self._rows)

    def note(self, request: RequestState, keys: Iterable[Key]) -> None:
        """A request has found chunks."""
        found = list(keys)
        request.told.update(found)
        self._rows.extend((request.options.tenant, key) for key in found)

    def note_again(self, request: RequestState, ready: Container[Key], now: float) -> None:
        """A request waits: every `TOUCH_S` what is `ready` of its chunks is told again, as far as
        other requests have left room.
        """
        if now < request.touch_at:
            return
        request.touch_at = now + TOUCH_S
        if now >= self._until:
            self._left, self._until = MAX_ASKED, now + TOUCH_S
        keys = chain.from_iterable(request.chunks.values())
        again = list(islice((key for key in keys if key in ready), self._left))
        self.note(request, again)
        self._left -= len(again)

    def take(self, most: int) -> FoundKeys:
        """What is to be told now."""
        rows = take(self._rows, most)
        tenants = list(dict.fromkeys(tenant for tenant, _ in rows))
        at = {tenant: number for number, tenant in enumerate(tenants)}
        return FoundKeys(
            Keys.of(key for _, key in rows), tenants, Numbers.of(at[tenant] for tenant, _ in rows)
        )

    def clear(self) -> None:
        """What was found is void."""
        self._rows.clear()
