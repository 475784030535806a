"""What requests ask for their prompts' chunks, on its way from the engine to the scheduler actor.

           begin            add (keys of the prompt)         take
  (none) ────────► hinting ──────────────────────────► queued ────► sent with the next exchange
                      │ end
                      └─────► (none)

What the server does not allow is ignored and counted. A hint may be lost: it costs an eviction.

Threads: `take` alone may run on the exchange thread; it only pops from the left of the queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from raykv.base.ids import Key
from raykv.engine.outbox import take
from raykv.protocol.engine import Hints

T = TypeVar("T")

MAX_QUEUED = 8192
"""Chunks of hints of each kind that wait for an exchange; further ones are dropped."""

MAX_TOLD = 512
"""Chunks of each kind in one exchange."""

MAX_HINT_S = 3600.0
"""Longest pin of a request; a longer one is cut to it."""


class Allowed(StrEnum):
    """What clients may wish for; each allows what those above it do."""

    NONE = "none"
    PRIORITY = "priority"
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class Hint:
    """What one request asks for its prompt: to be pinned for so long, or a priority over others."""

    pin_s: float | None = None
    priority: int | None = None

    @property
    def num_wishes(self) -> int:
        """How many of the two are set."""
        return (self.pin_s is not None) + (self.priority is not None)


class HintBox:
    """See the module's docstring.

    Args:
        allowed: what the server lets clients wish for.
    """

    def __init__(self, allowed: Allowed = Allowed.NONE) -> None:
        self._allowed = allowed
        self._requests: dict[str, Hint] = {}
        self._pinned: deque[tuple[Key, float]] = deque()
        self._favoured: deque[tuple[Key, int]] = deque()
        self._ignored = 0
        self._queued = 0
        self._dropped = 0

    def begin(self, request_id: str, hint: Hint) -> None:
        """A request is new; wishes that are not allowed are left out."""
        may_pin = self._allowed is Allowed.PIN
        may_prefer = self._allowed is not Allowed.NONE
        kept = Hint(hint.pin_s if may_pin else None, hint.priority if may_prefer else None)
        self._ignored += hint.num_wishes - kept.num_wishes
        if kept.num_wishes:
            self._requests[request_id] = kept

    def add(self, request_id: str, keys: Iterable[Key]) -> None:
        """Chunks of its prompt, the first ones first; a prefix of them is sent if it is full."""
        hint = self._requests.get(request_id)
        if hint is None:
            return
        for key in keys:
            if hint.pin_s is not None:
                self._queue(self._pinned, key, min(hint.pin_s, MAX_HINT_S))
            if hint.priority is not None:
                self._queue(self._favoured, key, hint.priority)

    def _queue(self, queue: deque[tuple[Key, T]], key: Key, wish: T) -> None:
        if len(queue) < MAX_QUEUED:
            queue.append((key, wish))
            self._queued += 1
        else:
            self._dropped += 1

    def end(self, request_id: str) -> None:
        """A request has ended."""
        self._requests.pop(request_id, None)

    @property
    def has_news(self) -> bool:
        """Whether something waits for an exchange."""
        return bool(self._pinned or self._favoured)

    def take(self) -> Hints:
        """What the next exchange tells."""
        pinned, favoured = take(self._pinned, MAX_TOLD), take(self._favoured, MAX_TOLD)
        return Hints(
            pinned=[key for key, _ in pinned],
            pin_s=[pin_s for _, pin_s in pinned],
            favoured=[key for key, _ in favoured],
            priorities=[priority for _, priority in favoured],
        )

    def counter_values(self) -> dict[str, int]:
        """Counts since the start: wishes that were not allowed, and chunks of the others."""
        return {
            "hints_ignored": self._ignored,
            "hinted_chunks": self._queued,
            "hinted_chunks_dropped": self._dropped,
        }
