"""What one engine has yet to learn of its node's chunks: a snapshot, then the changes since.

Invariants:
1. A snapshot entry is read when its page is made up, and changes go out after the snapshot: what
   happens meanwhile is sent at least once, and where something older follows something newer, the
   generations show it.
2. The changes kept are bounded: an engine that does not fetch them gets a new snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from raykv.base.ids import Namespace
from raykv.directory.table.protocol import Changes, NodeTable
from raykv.protocol.columns import MAX_KEYS, Handles, Keys

MAX_PENDING_CHANGES = 262_144
"""Changes per engine. The columns are the event log's own, which keeps the latest of them anyway.
"""


class Mirror:
    """One engine's queue, beginning with all chunks of a namespace on a node (None: with none)."""

    def __init__(self, table: NodeTable | None, namespace: Namespace) -> None:
        self._table = table
        self._namespace = namespace
        self._changes: deque[Changes] = deque()
        # How many of them were sent, from the first on.
        self._num_told = 0
        self.num_pending = 0
        self._snapshot: Sequence[Any] | None = [] if table is None else table.places(namespace)
        self._position = 0
        # Whether the next page is the first of a snapshot.
        self.is_reset = True

    @property
    def has_more(self) -> bool:
        """Whether something is left to send."""
        return bool(self._changes) or self._snapshot is not None

    @property
    def is_in_snapshot(self) -> bool:
        """Whether chunks of the table itself are still to be sent."""
        return self._snapshot is not None

    @property
    def is_overfull(self) -> bool:
        """Whether a new snapshot is cheaper than what is kept."""
        return self.num_pending > MAX_PENDING_CHANGES

    def add(self, changes: Changes) -> None:
        """Something happened that the engine should know."""
        self._changes.append(changes)
        self.num_pending += len(changes)

    def next_page(self) -> tuple[Handles, Handles]:
        """What came and what went, at most `MAX_KEYS` together.

        An engine takes a page's removals first, so a chunk that came and went is only removed.
        """
        self.is_reset = False
        stored, removed = _Page(), _Page()
        self._tell_snapshot(stored)
        if self._snapshot is None:
            self._tell_changes(stored, removed)
        return stored.handles, removed.handles

    def _tell_snapshot(self, stored: _Page) -> None:
        while self._snapshot is not None and len(stored) < MAX_KEYS:
            end = self._position + MAX_KEYS - len(stored)
            places = self._snapshot[self._position : end]
            if not len(places):
                self._snapshot = None
                break
            assert self._table is not None
            self._position = end
            held = self._table.held_at(places, self._namespace)
            stored.add(held.keys, held.slots, held.generations)

    def _tell_changes(self, stored: _Page, removed: _Page) -> None:
        """A key that goes after it came is taken out of what came."""
        came: dict[bytes, tuple[int, int]] = {}
        while self._changes and (room := MAX_KEYS - len(stored) - len(came) - len(removed)) > 0:
            first = self._changes[0]
            rows = slice(self._num_told, min(self._num_told + room, len(first)))
            keys, slots = first.keys[rows], first.slots[rows]
            if first.stored:
                places = zip(slots, first.generations[rows], strict=True)
                came.update(zip(keys, places, strict=True))
            else:
                for key in keys if came else ():
                    came.pop(key, None)
                removed.add(keys, slots, first.generations[rows])
            self._advance(len(keys))
        if came:
            slots, generations = map(list, zip(*came.values(), strict=True))
            stored.add(came, slots, generations)

    def _advance(self, count: int) -> None:
        self.num_pending -= count
        self._num_told += count
        if self._num_told == len(self._changes[0]):
            self._changes.popleft()
            self._num_told = 0


class _Page:
    """Columns of an answer that are being filled."""

    def __init__(self) -> None:
        self._keys: list[Keys] = []
        self._slots: list[int] = []
        self._generations: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def add(self, keys: Iterable[bytes], slots: Sequence[int], generations: Sequence[int]) -> None:
        """Add rows."""
        self._keys.append(Keys.of(keys))
        self._slots.extend(slots)
        self._generations.extend(generations)

    @property
    def handles(self) -> Handles:
        """What has been added."""
        keys = Keys.joined(self._keys) if self._keys else Keys()
        return Handles(keys, self._slots, self._generations)
