"""What one engine has yet to be told of its node's chunks: a snapshot, then the changes since.

Invariants:
1. A snapshot entry is read when its page is made up, and changes go out after the snapshot: what
   happens meanwhile is told at least once, and nothing newer is followed by something older that
   the generations don't expose.
2. The changes kept are bounded: an engine that does not fetch them gets a new snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from raykv.core.book import Change, Chunk
from raykv.messages import MAX_KEYS, Handles
from raykv.types import Generation, Key, Slot

MAX_PENDING_CHANGES = 262_144
"""Per engine: about 40 MB."""


class Mirror:
    """One engine's queue; `keys` are all that its snapshot begins with."""

    def __init__(self, keys: list[Key]) -> None:
        self._changes: deque[Change] = deque()
        self._snapshot: Iterator[Key] | None = iter(keys)
        # Whether the next page is the first of a snapshot.
        self.is_reset = True

    @property
    def has_more(self) -> bool:
        """Whether something is left to be told."""
        return bool(self._changes) or self._snapshot is not None

    @property
    def is_overfull(self) -> bool:
        """Whether a new snapshot is cheaper than what is kept."""
        return len(self._changes) > MAX_PENDING_CHANGES

    def add(self, change: Change) -> None:
        """Something happened that the engine should know."""
        self._changes.append(change)

    def next_page(self, find: Callable[[Key], Chunk | None]) -> tuple[Handles, Handles]:
        """What came and what went, at most `MAX_KEYS` together.

        An engine takes a page's removals first, so a chunk that came and went is only removed.
        `find` gives the chunk that is held under a key now.
        """
        self.is_reset = False
        stored, removed = Handles([], [], []), Handles([], [], [])
        while self._snapshot is not None and len(stored) < MAX_KEYS:
            key = next(self._snapshot, None)
            if key is None:
                self._snapshot = None
                break
            chunk = find(key)
            if chunk is not None:
                _append(stored, key, chunk.slot, chunk.generation)
        came: dict[Key, Change] = {}
        while self._snapshot is None and self._changes:
            if len(stored) + len(came) + len(removed) >= MAX_KEYS:
                break
            change = self._changes.popleft()
            if change.stored:
                came[change.key] = change
            else:
                came.pop(change.key, None)
                _append(removed, change.key, change.slot, change.generation)
        for change in came.values():
            _append(stored, change.key, change.slot, change.generation)
        return stored, removed


def _append(handles: Handles, key: Key, slot: Slot, generation: Generation) -> None:
    handles.keys.append(key)
    handles.slots.append(slot)
    handles.generations.append(generation)
