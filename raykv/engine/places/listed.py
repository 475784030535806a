"""What one place of an engine has, as the engine believes it; pure.

Two channels tell of one key: the node's listing, which is read on in order, and the results of
jobs, which say how each chunk was at a number of that listing. A result is a change that came
early: it counts until the listing has been read up to its number, though it begin anew meanwhile,
and what the listing says of that key until then may be older, so it does not.

Invariants:
1. A key is as its owner said at the latest number that has been heard of it.
2. Nothing of an earlier life of the node's listing is believed.
3. What is read is believed of the engine's own namespace alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raykv.base.ids import Blocks, Key, Namespace
from raykv.protocol.listing import ListedRow, ListingPart, Position, Reason, Where

SILENT_S = 5.0
"""A node that has not been heard of for so long has nothing, for all that the engine knows."""


class PlaceChange(NamedTuple):
    """A key has come (with which blocks), or gone; `reason` says why."""

    key: Key
    blocks: Blocks | None
    reason: Reason


class ListedPlace:
    """See the module's docstring. Times are of one clock that never goes back.

    Args:
        namespace: of the engine.
        now: the time.
    """

    def __init__(self, namespace: Namespace, now: float) -> None:
        self.namespace = namespace
        self.position = Position()
        # READY chunks with their blocks, in RAM or on disk; and what is being stored.
        self._ready: dict[Key, Blocks] = {}
        self._coming: set[Key] = set()
        # Results that the listing has not been read up to, by key.
        self._early: dict[Key, int] = {}
        self._heard_at = now

    # Looking

    def has(self, key: Key, wanted: Blocks) -> bool:
        """Whether blocks of a chunk can be loaded there."""
        blocks = self._ready.get(key)
        return blocks is not None and blocks.has(wanted)

    def is_coming(self, key: Key) -> bool:
        """Whether somebody stores a chunk there."""
        return key in self._coming

    def __len__(self) -> int:
        """READY chunks."""
        return len(self._ready)

    def is_silent(self, now: float) -> bool:
        """Whether nothing that was heard counts any more."""
        return now - self._heard_at >= SILENT_S

    # The listing

    def take(self, part: ListingPart, now: float) -> list[PlaceChange]:
        """The next part of the listing; any other changes nothing. Returns what has come and gone,
        for whoever follows the view: a key that is listed again as it was is neither.
        """
        if not part.follows(self.position):
            return []
        self._heard_at = now
        if part.end.life != self.position.life:
            self._early.clear()
        changes = self._forget(Reason.FAILED, part.end.number) if part.begins else []
        for row in part.rows:
            is_older = self._early.get(row.key, 0) > part.end.number
            if row.namespace == self.namespace and not is_older:
                changes += self._be(row)
        self.position = part.end
        if self._early:
            early = self._early.items()
            self._early = {key: number for key, number in early if number > part.end.number}
        return changes

    def result(self, life: int, number: int, rows: Iterable[ListedRow]) -> list[PlaceChange]:
        """How chunks of a job, or of a fetch, were at a number of the listing."""
        if life != self.position.life or number <= self.position.number:
            # What has been read is newer; of another life nothing is known yet.
            return []
        changes = []
        for row in rows:
            if row.namespace == self.namespace and number >= self._early.get(row.key, 0):
                self._early[row.key] = number
                changes += self._be(row)
        return changes

    def _be(self, row: ListedRow) -> list[PlaceChange]:
        """A key is as that row says."""
        if row.where & Where.COMING:
            self._coming.add(row.key)
        else:
            self._coming.discard(row.key)
        before = self._ready.get(row.key)
        if row.where & (Where.RAM | Where.DISK):
            self._ready[row.key] = row.blocks
            return [] if before == row.blocks else [PlaceChange(row.key, row.blocks, row.reason)]
        if before is None:
            return []
        del self._ready[row.key]
        return [PlaceChange(row.key, None, row.reason)]

    def _forget(self, why: Reason, number: int) -> list[PlaceChange]:
        """Nothing is known any more, but what was heard of later than that number."""
        later = {key for key, early in self._early.items() if early > number}
        gone = [key for key in self._ready if key not in later]
        for key in gone:
            del self._ready[key]
        self._coming &= later
        return [PlaceChange(key, None, why) for key in gone]
