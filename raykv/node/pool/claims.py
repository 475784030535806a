"""Why chunks stay longer than others, or go first: claims, each with an owner and an end.

A claim is one owner's, on a name, whether the chunk is there or not, and ends alone. The highest
one counts. A chunk is released only if its one session has released it: what another has used as
well stays, also if that one has ended, and what was stored once more. A priority that requests gave
it ends with its session. Claims beyond their share of the pool wait, and are as if they were not
there until there is room.

Chunks of a namespace that all engines have left are released as well, unless somebody wants more
than that they stay. And a chunk that no claim says anything of may be spare: that is not known
here, and stays so until a claim says otherwise.

Nothing of it outlives the NodeActor; operators' pins are orders, and are claimed again.

Invariants:
1. A READY record stands as its claims say, or was found since it was released.
2. What is pinned takes at most the share of pins, and what only requests and sessions keep or pin
   half of that at most.
3. There are at most `MOST_CLAIMS` of each kind of owner.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from raykv.base.ids import Key, Namespace
from raykv.node.pool.records import ChunkRecord, Standing

Name = tuple[Namespace, Key]

MOST_FILLED = 64
"""Chunks that wait for room, and are tried at once."""

FEW_ENDS = 1024
"""Ends of claims that were changed since, and are kept beside as many as there are claims."""

PIN_SHARE = 0.25
"""Part of the pool that pins may take by default."""


SOON_S = 1.0
"""The end of a claim is moved only by more than that."""


class OwnerKind(IntEnum):
    """Kinds of owners of claims."""

    OPERATOR = 0
    REQUEST = 1
    SESSION = 2
    SERIES = 3
    """Chunks that an operator brings here."""


CLIENTS = (OwnerKind.REQUEST, OwnerKind.SESSION)
"""What only these claim has a share of its own."""

MOST_CLAIMS = {kind: 16_384 if kind is OwnerKind.REQUEST else 65_536 for kind in OwnerKind}
"""An eviction walks past what is pinned: some milliseconds at most."""


class Owner(NamedTuple):
    """A pin, a request, a session or a series."""

    kind: OwnerKind
    name: str


class Claim(NamedTuple):
    """How a chunk is to stand, and until when."""

    standing: Standing
    until: float


@dataclass(slots=True)
class _Claimed:
    """What is wanted of a name; `record` is there if the chunk is. `is_shared`: several sessions
    have used it. `has_gone`: the chunk was there since it was wanted, and is not now.
    """

    claims: dict[Owner, Claim] = field(default_factory=dict)
    record: ChunkRecord | None = None
    is_shared: bool = False
    has_gone: bool = False


class Claims:
    """See the module's docstring.

    Args:
        pool_bytes: of the whole pool.
        find: the READY record of a name.
        stand: has a READY record go sooner or later.
        share: part of the pool that pins may take.
    """

    def __init__(
        self,
        pool_bytes: int,
        find: Callable[[Namespace, Key], ChunkRecord | None],
        stand: Callable[[ChunkRecord, Standing], None],
        share: float = PIN_SHARE,
    ) -> None:
        self._find = find
        self._stand = stand
        self.most_bytes = int(pool_bytes * share)
        self._claimed: dict[Name, _Claimed] = {}
        # From heads of prompts to tails, as they were claimed.
        self._names: dict[Owner, dict[Name, None]] = {}
        self._num = dict.fromkeys(OwnerKind, 0)
        self._left: Collection[Namespace] = frozenset()
        # When claims end, the soonest first; of those that were changed since there are old ones.
        self._ends: list[tuple[float, Owner, Name]] = []
        # What is pinned, and what is kept or pinned and wanted by clients alone; bytes of each. And
        # what waits, the oldest first.
        self._pinned: set[Name] = set()
        self._clients: set[Name] = set()
        self.pinned_bytes = self.requests_bytes = 0
        self._waiting: dict[Name, None] = {}
        # Whether there may be more room since it was tried to give it to what waits.
        self._has_room = False
        self.num_refused = self.num_released = 0
        """Numbers of refused claims, and of chunks that were released."""

    # Owners

    def claim(self, owner: Owner, names: Iterable[Name], standing: Standing, until: float) -> None:
        """An owner wants chunks to stand so, until then; in place of what it wanted of them before.
        They are those of a prompt from its head on: its tail goes first of them.

        Beyond `MOST_CLAIMS` its claims are refused, and counted.
        """
        own = self._names.setdefault(owner, {})
        chunks = []
        for name in names:
            if name not in own:
                if self._num[owner.kind] >= MOST_CLAIMS[owner.kind]:
                    self.num_refused += 1
                    continue
                self._num[owner.kind] += 1
                own[name] = None
            claimed = self._claimed.get(name)
            if claimed is None:
                claimed = self._claimed[name] = _Claimed(record=self._find(*name))
            claimed.claims[owner] = Claim(standing, until)
            if owner.kind is OwnerKind.SESSION and not claimed.is_shared:
                kinds = [each.kind for each in claimed.claims]
                claimed.is_shared = kinds.count(OwnerKind.SESSION) > 1
            if until < inf:
                heappush(self._ends, (until, owner, name))
            chunks.append(claimed)
        self._settle(chunks)
        if len(self._ends) > 2 * sum(self._num.values()) + FEW_ENDS:
            self._ends = [
                (claim.until, each, name)
                for name, claimed in self._claimed.items()
                for each, claim in claimed.claims.items()
                if claim.until < inf
            ]
            heapify(self._ends)
        if not own:
            del self._names[owner]
        self._fill()

    def end(self, owner: Owner, names: Iterable[Name] | None = None) -> None:
        """An owner wants nothing any more of chunks, or (None) of any."""
        own = self._names.get(owner, {})
        for name in reversed(list(own) if names is None else [n for n in names if n in own]):
            self._drop(owner, name)
        self._fill()

    def names_of(self, owner: Owner) -> KeysView[Name]:
        """Of what an owner wants something, from heads of prompts to tails; not valid after a
        change.
        """
        return self._names.get(owner, {}).keys()

    def claims_on(self, name: Name) -> dict[Owner, Claim]:
        """What all owners want of a chunk; a copy."""
        claimed = self._claimed.get(name)
        return {} if claimed is None else dict(claimed.claims)

    def owners(self, kind: OwnerKind) -> list[Owner]:
        """All of a kind."""
        return [owner for owner in self._names if owner.kind is kind]

    def num_free(self, kind: OwnerKind) -> int:
        """How many more claims owners of a kind may have."""
        return MOST_CLAIMS[kind] - self._num[kind]

    def expire(self, now: float) -> None:
        """End the claims whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            until, owner, name = heappop(self._ends)
            claimed = self._claimed.get(name)
            claim = None if claimed is None else claimed.claims.get(owner)
            if claim is not None and claim.until == until:
                self._drop(owner, name)
        self._fill()

    def _drop(self, owner: Owner, name: Name) -> None:
        claimed = self._claimed[name]
        del claimed.claims[owner]
        self._num[owner.kind] -= 1
        own = self._names[owner]
        del own[name]
        if not own:
            del self._names[owner]
        self._settle([claimed])
        if not claimed.claims:
            del self._claimed[name]

    # Chunks

    def came(self, record: ChunkRecord) -> None:
        """A chunk has become READY, and is in its order."""
        name = record.namespace, record.key
        claimed = self._claimed.get(name)
        if claimed is None:
            if record.namespace in self._left:
                self._stand(record, Standing.RELEASED)
            return
        if claimed.record is not None:
            # This one takes its place.
            self._discount(name, claimed.record)
        if claimed.has_gone or claimed.record is not None:
            # The session that has released it stored it before that.
            self._keep(claimed)
        claimed.record = record
        self._settle([claimed])
        self._fill()

    def found(self, record: ChunkRecord) -> None:
        """A released chunk was used again: its release is void."""
        name = record.namespace, record.key
        claimed = self._claimed.get(name)
        if claimed is not None:
            self._keep(claimed)

    def _keep(self, claimed: _Claimed) -> None:
        for owner, claim in claimed.claims.items():
            if claim.standing is Standing.RELEASED:
                claimed.claims[owner] = Claim(Standing.NORMAL, claim.until)

    def went(self, record: ChunkRecord) -> None:
        """A chunk is not READY any more; what is wanted of its name stays."""
        name = record.namespace, record.key
        claimed = self._claimed.get(name)
        if claimed is not None and claimed.record is record:
            claimed.record, claimed.has_gone = None, True
            self._discount(name, record)
            self._fill()

    def leave(self, namespaces: Collection[Namespace]) -> None:
        """All engines have left these, and no others; `resettle` is for chunks that are there."""
        self._left = namespaces

    def resettle(self, record: ChunkRecord) -> None:
        """A READY chunk stands as is wanted of it now."""
        self._settle([self._claimed.get((record.namespace, record.key)) or _Claimed(record=record)])

    def _settle(self, chunks: Sequence[_Claimed]) -> None:
        """Chunks of a prompt, from its head on, stand as is wanted of them now: its head has room
        first, and goes last.
        """
        there = [(each, each.record) for each in chunks if each.record is not None]
        wanted = [self._wanted(claimed, record) for claimed, record in there]
        for (_, record), standing in zip(reversed(there), reversed(wanted), strict=True):
            self.num_released += standing is Standing.RELEASED is not record.standing
            if standing is Standing.NORMAL and record.namespace in self._left:
                standing = Standing.RELEASED
            if standing is not Standing.NORMAL or record.standing is not Standing.SPARE:
                self._stand(record, standing)

    def _wanted(self, claimed: _Claimed, record: ChunkRecord) -> Standing:
        """How a chunk stands by the highest claim that there is room for; it is counted."""
        name = record.namespace, record.key
        self._discount(name, record)
        claims = claimed.claims
        standings = {each.standing for each in claims.values()}
        is_released = Standing.RELEASED in standings and not claimed.is_shared
        if is_released:
            standings = {
                each.standing
                for owner, each in claims.items()
                if owner.kind is not OwnerKind.REQUEST or each.standing is Standing.PINNED
            }
        if standings <= {Standing.RELEASED}:
            return Standing.RELEASED if is_released else Standing.NORMAL
        for standing in sorted(standings, reverse=True):
            if standing <= Standing.NORMAL:
                break
            if self._count(name, record, claimed, standing):
                return standing
            self._waiting[name] = None
        return Standing.NORMAL

    def _count(
        self, name: Name, record: ChunkRecord, claimed: _Claimed, standing: Standing
    ) -> bool:
        """Count a chunk that is to be kept or pinned; False: that has no room in its share."""
        size, is_pinned = record.slot_bytes, standing is Standing.PINNED
        if is_pinned and self.pinned_bytes + size > self.most_bytes:
            return False
        if all(
            owner.kind in CLIENTS or claim.standing < standing
            for owner, claim in claimed.claims.items()
        ):
            if self.requests_bytes + size > self.most_bytes // 2:
                return False
            self._clients.add(name)
            self.requests_bytes += size
        if is_pinned:
            self._pinned.add(name)
            self.pinned_bytes += size
        return True

    def _discount(self, name: Name, record: ChunkRecord) -> None:
        self._waiting.pop(name, None)
        if name in self._pinned:
            self._pinned.remove(name)
            self.pinned_bytes -= record.slot_bytes
            self._has_room = True
        if name in self._clients:
            self._clients.remove(name)
            self.requests_bytes -= record.slot_bytes
            self._has_room = True

    def _fill(self) -> None:
        """Keep what waits, as far as there may be room now; the oldest `MOST_FILLED` are tried."""
        if self._has_room:
            self._has_room = False
            names = list(islice(self._waiting, MOST_FILLED))
            self._settle([self._claimed[name] for name in names])

    @property
    def num_pinned(self) -> int:
        """Chunks that are pinned."""
        return len(self._pinned)

    @property
    def num_waiting(self) -> int:
        """Chunks that are here and would be kept or pinned if there was room in the share."""
        return len(self._waiting)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        records = [c.record for c in self._claimed.values() if c.record is not None]
        pinned = [each for each in records if (each.namespace, each.key) in self._pinned]
        assert len(pinned) == len(self._pinned)
        assert all(each.standing is Standing.PINNED for each in pinned), pinned
        assert self.pinned_bytes == sum(each.slot_bytes for each in pinned)
        assert self.pinned_bytes <= self.most_bytes
        wished = [each for each in records if (each.namespace, each.key) in self._clients]
        assert all(each.standing >= Standing.KEPT for each in wished), wished
        assert self.requests_bytes == sum(each.slot_bytes for each in wished)
        assert self.requests_bytes <= self.most_bytes // 2
        assert not self._waiting.keys() & self._pinned
        by_owner = {(owner, name) for owner, names in self._names.items() for name in names}
        by_name = {(o, name) for name, each in self._claimed.items() for o in each.claims}
        assert by_owner == by_name
        for kind, count in self._num.items():
            assert count == sum(owner.kind is kind for owner, _ in by_owner) <= MOST_CLAIMS[kind]
