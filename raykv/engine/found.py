"""What an engine's requests have found, on its way to the places, which are to keep it."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from itertools import chain, islice

from raykv.base.ids import Key
from raykv.engine.remote import MAX_ASKED, take
from raykv.engine.requests import RequestState
from raykv.protocol.columns import MAX_KEYS, Keys, Texts
from raykv.protocol.engine import FoundKeys

MAX_TOUCHES = 65_536
"""Found chunks that wait to be told; beyond it the oldest are lost, which only ages them."""

TOUCH_S = 1.0
"""Until what a request has found is told again while it waits: a place keeps it for 3 s. Of all
requests `MAX_ASKED` chunks are told again in this time."""


class FoundChunks:
    """What requests have found, and whose they are, until it is sent to the places.

    `take` and `len` may be called on another thread.
    """

    def __init__(self) -> None:
        self._rows: deque[tuple[str, Key]] = deque(maxlen=MAX_TOUCHES)
        # How many may be sent again until then.
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

    def take(self, most: int = MAX_KEYS // 2) -> FoundKeys:
        """What requests have found since the last call, to be told now."""
        rows = take(self._rows, most)
        keys, tenants = (key for _, key in rows), (tenant for tenant, _ in rows)
        return FoundKeys(Keys.of(keys), Texts.of(tenants))

    def clear(self) -> None:
        """Forget the chunks that requests have found: they are void."""
        self._rows.clear()
