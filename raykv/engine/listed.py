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

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec import structs

from raykv.base.ids import Blocks, Key, Namespace, NodeId, part_of
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.engine import EngineHello
from raykv.protocol.listing import ALL_READ, ListedRow, ListingPart, Position, Reason, Where

SILENT_S = 5.0
"""To the engine, a node that has been silent for this long has nothing."""

_RAM, _DISK, _COMING = int(Where.RAM), int(Where.DISK), int(Where.COMING)
"""Numbers: flags take some times as long, and there may be a million rows."""


class EnginePlace(NamedTuple):
    """A node with ranks of an engine, all of one pipeline stage, and what of a chunk they have.

    `part`: its name in namespaces; empty: the place has all ranks. `life`: by which the NodeActor
    knows the engine; 0: the EngineCore's. `ranks`: of vLLM, the first part of a chunk first; empty:
    all. `slot_bytes`: of the part's chunks, by KV group index. `free_bytes`: the memory that a
    pool may take there; 0: it is not known.
    """

    node_id: NodeId
    part: str = ""
    life: int = 0
    ranks: tuple[int, ...] = ()
    slot_bytes: Mapping[int, int] = {}
    free_bytes: int = 0

    def introduced(self, hello: EngineHello) -> EngineHello:
        """How the engine of `hello` introduces itself at this place."""
        if not self.part:
            return hello
        return structs.replace(
            hello,
            namespace=part_of(hello.namespace, self.part),
            life=self.life,
            num_ranks=len(self.ranks),
            slot_bytes=dict(self.slot_bytes),
        )


class PlaceChange(NamedTuple):
    """Keys have come to RAM (with which blocks), or gone from it.

    `reason` says why; None: the node's life is over. Many that go at once are one change.
    """

    keys: Collection[Key]
    blocks: Blocks | None
    reason: Reason | None


class ListedPlace:
    """See the module's docstring. Times are of one clock that never goes back.

    Args:
        place: which one.
        family: the engine's namespace.
        reader: another number for each namespace, so that no late answer is for another one.
        now: the time.
    """

    def __init__(self, place: EnginePlace, family: Namespace, reader: int, now: float) -> None:
        self.place, self.namespace = place, part_of(family, place.part)
        self.position = Position(reader=reader)
        # What others look at, while it goes on changing: READY chunks with the blocks that are
        # there; those that the node would have to fetch from its own disk; and what is being stored
        # there.
        self.ready: dict[Key, Blocks] = {}
        self.on_disk: dict[Key, Blocks] = {}
        self.coming: set[Key] = set()
        # Results that the listing has not been read up to, by key.
        self._early: dict[Key, int] = {}
        # Of a listing that has begun anew: what is gone unless a page or a change has it.
        self._unseen: set[Key] = set()
        # By key, the number at which others of its blocks were wanted than are there.
        self._distrusted: dict[Key, int] = {}
        self._heard_at = now

    # Looking

    def is_silent(self, now: float) -> bool:
        """Whether the place was silent for too long to be believed."""
        return now - self._heard_at >= SILENT_S

    def disk_of(self, key: Key) -> tuple[Source, ...]:
        """The place's own disk, if it has a chunk that the place lacks in RAM."""
        return (Source(self.place.node_id, SourceKind.DISK),) if key in self.on_disk else ()

    # The listing

    def hear(self, now: float) -> None:
        """The place was heard of then; parts of its listing may still wait to be taken."""
        self._heard_at = max(self._heard_at, now)

    def take(self, part: ListingPart, now: float) -> list[PlaceChange]:
        """The next part of the listing; any other changes nothing. Returns what has come and gone,
        for followers of the view: a key that is listed again as it was is neither.
        """
        if not part.follows(self.position):
            return []
        self.hear(now)
        changes = self._begin(part.end) if part.begins else []
        for row in part.rows:
            is_older = self._early.get(row.key, 0) > part.end.number
            if row.namespace == self.namespace and not is_older:
                changes += self._be(row)
        self.position = part.end
        if part.end.place == ALL_READ:
            changes += self._drop(self._unseen)
            self._unseen = set()
        if self._early:
            early = self._early.items()
            self._early = {key: number for key, number in early if number > part.end.number}
        return changes

    def learn(
        self, life: int, number: int, rows: Iterable[ListedRow], now: float
    ) -> list[PlaceChange]:
        """How chunks of a job, or of a fetch, were at a number of the listing."""
        if life != self.position.life or self.is_silent(now):
            # Of another life nothing is known yet.
            return []
        changes = []
        for row in rows:
            if row.namespace == self.namespace and self._is_news(row, number):
                if number > self.position.number:
                    self._early[row.key] = number
                changes += self._be(row)
        return changes

    def distrust(self, key: Key, blocks: Blocks) -> list[PlaceChange]:
        """Other blocks of a chunk are wanted than these, which were there: it counts as gone, so
        that it is stored again, until its owner says that it is there; nothing if it has since.
        """
        if self.ready.get(key) != blocks:
            return []
        changes = self._drop([key])
        self._distrusted[key] = self.position.number
        return changes

    def _is_news(self, row: ListedRow, number: int) -> bool:
        """Whether a result is newer than what has been read of its key."""
        position = self.position
        if number > position.number:
            return number >= self._early.get(row.key, 0)
        if number == position.number and position.place != ALL_READ:
            return True
        if number >= self._distrusted.get(row.key, number + 1):
            # Since then the listing has said nothing of it.
            return True
        # What is believed from before the listing began anew is older still.
        return row.key in self._unseen and not row.where

    def _begin(self, end: Position) -> list[PlaceChange]:
        """The listing begins anew: in another life with nothing, else what is there is gone only if
        all pages are read without it.
        """
        if end.life == self.position.life:
            later = {key for key, number in self._early.items() if number > end.number}
            known = {*self.ready, *self.on_disk, *self.coming, *self._distrusted}
            self._unseen = known - later
            return []
        # The latest ones first: of very many no more are remembered.
        gone = list(reversed(self.ready))
        for each in (self.ready, self.on_disk, self.coming, self._early, self._distrusted):
            each.clear()
        self._unseen.clear()
        return [PlaceChange(gone, None, None)] if gone else []

    def _be(self, row: ListedRow) -> list[PlaceChange]:
        """Take a row as the state of its key."""
        key, where = row.key, int(row.where)
        self._unseen.discard(key)
        self._distrusted.pop(key, None)
        if where & _COMING:
            self.coming.add(key)
        else:
            self.coming.discard(key)
        if where & _RAM:
            before = self.ready.get(key)
            self.ready[key] = row.blocks
            self.on_disk.pop(key, None)
            return [] if before == row.blocks else [PlaceChange([key], row.blocks, row.reason)]
        if where & _DISK:
            self.on_disk[key] = row.blocks
        else:
            self.on_disk.pop(key, None)
        if self.ready.pop(key, None) is None:
            return []
        return [PlaceChange([key], None, row.reason)]

    def _drop(self, keys: Collection[Key]) -> list[PlaceChange]:
        """Forget keys that are gone for an unknown reason."""
        self.coming.difference_update(keys)
        for key in keys:
            self.on_disk.pop(key, None)
            self._distrusted.pop(key, None)
        gone = [key for key in keys if self.ready.pop(key, None) is not None]
        return [PlaceChange(gone, None, Reason.FAILED)] if gone else []
