"""Who makes room: which chunks go so that another one has a slot.

Chunks of one slot size, and of one tenant that has a share, have an order of eviction. A slot size
that has less than its part of the slabs takes one from a size that has more, or that nobody has
wanted for a while; else it gives up its own. Nobody goes below what is guaranteed to it as long as
something else is left, or will be soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from raykv.base.shares import NO_SHARE, Share, shareholder, to_give_up
from raykv.node.pool.order import EvictionOrder
from raykv.node.pool.places import Places
from raykv.node.pool.records import ChunkRecord, Standing

NOBODY = 0
"""The number of all who have no share of their own."""

IDLE_S = 60.0
"""A slot size that nobody has stored or found for so long makes room for others."""

PIECES = 1024
"""Room is made for so many parts of what is there, at most `MOST_AT_ONCE` chunks at a time."""

MOST_AT_ONCE = 64

MOST_LOOKED_AT = 64
"""Slabs that are looked at, for one of which everything may go."""

MayGo = Callable[[ChunkRecord], bool]


class Room:
    """See the module's docstring."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._orders: dict[tuple[int, int], EvictionOrder] = {}
        self._shares: dict[int, Share] = {}
        self._wanted_at: dict[int, float] = {}

    def order_of(self, record: ChunkRecord) -> EvictionOrder:
        """The order in which a chunk is, or will be once it is READY."""
        return self._order(record.slot_bytes, self._holder(record.owner))

    def _order(self, slot_bytes: int, holder: int) -> EvictionOrder:
        order = self._orders.get((slot_bytes, holder))
        if order is None:
            order = self._orders[slot_bytes, holder] = EvictionOrder()
        return order

    def _holder(self, owner: int) -> int:
        return owner if owner in self._shares else NOBODY

    def want(self, slot_bytes: int, now: float) -> None:
        """Chunks of that slot size were offered or found."""
        self._wanted_at[slot_bytes] = now

    @property
    def num_entered(self) -> int:
        """Chunks in all orders."""
        return sum(map(len, self._orders.values()))

    def victims(self, wanted: ChunkRecord, now: float, may_go: MayGo) -> list[ChunkRecord]:
        """What goes for a chunk that wants a slot, in this step; none: there is no room for it.

        When all of it is gone there may be a slot, or there is more to go.
        """
        size = wanted.slot_bytes
        return self._slab_for(size, now, may_go) or self._first(size, may_go)

    def _first(self, slot_bytes: int, may_go: MayGo) -> list[ChunkRecord]:
        for may_go_below in (False, True):
            holders = {NOBODY, *self._shares}
            while parts := self._parts(slot_bytes, holders, may_go_below=may_go_below):
                found = [
                    record
                    for holder, wanted in parts.items()
                    for record in self._order(slot_bytes, holder).first(wanted, may_go)
                ]
                if found:
                    return found
                # What they have is being copied, or was found just now.
                holders -= parts.keys()
            if {NOBODY, *self._shares} - holders:
                return []
        return []

    def _parts(
        self, slot_bytes: int, holders: Iterable[int], *, may_go_below: bool
    ) -> dict[int, int]:
        """How many chunks each gives up, in one piece."""
        used: dict[int, int] = dict.fromkeys(holders, 0)
        for (size, holder), order in self._orders.items():
            if holder in used:
                used[holder] += size * len(order)
        total = self._places.geometry.pool_bytes
        left = {holder: self._order(slot_bytes, holder).num_that_go for holder in used}
        holdings = [
            shareholder(
                holder, used[holder], self._shares.get(holder, NO_SHARE), total, left[holder]
            )
            for holder in sorted(used)
        ]
        piece = min(MOST_AT_ONCE, 1 + sum(left.values()) // PIECES)
        return to_give_up(holdings, slot_bytes, piece, may_go_below=may_go_below)

    def _slab_for(self, slot_bytes: int, now: float, may_go: MayGo) -> list[ChunkRecord]:
        """All chunks of a slab that changes its slot size."""
        classes = self._places.classes()
        others = [size for size in classes if size != slot_bytes]
        fair = self._places.geometry.num_slabs // (len(others) + 1)
        has_less = classes.get(slot_bytes, 0) < max(fair, 1)
        donors = [
            size
            for size in others
            if now - self._wanted_at.get(size, 0.0) > IDLE_S or (has_less and classes[size] > fair)
        ]
        for donor in sorted(donors, key=lambda size: -classes[size]):
            if classes[donor] > 1 and (found := self._slab_of(donor, may_go)):
                return found
        return []

    def _slab_of(self, donor: int, may_go: MayGo) -> list[ChunkRecord]:
        seen: set[int] = set()
        for (size, _), order in list(self._orders.items()):
            for record in order if size == donor else ():
                slab = self._places.geometry.slab_of(record.slot)
                if slab in seen:
                    continue
                if len(seen) == MOST_LOOKED_AT:
                    return []
                seen.add(slab)
                records = self._places.records_in(slab)
                if all(map(self.may_evict, records)) and all(map(may_go, records)):
                    return records
        return []

    def may_evict(self, record: ChunkRecord) -> bool:
        """Whether a chunk is READY and not pinned."""
        return record.queue is not None and record.standing is not Standing.PINNED

    # Tenants

    def used_bytes(self, holder: int) -> int:
        """What READY chunks of a tenant with a share take up, or (`NOBODY`) of all others."""
        return sum(size * len(o) for (size, owner), o in self._orders.items() if owner == holder)

    def share(self, shares: Mapping[int, Share], ready: Iterable[ChunkRecord]) -> None:
        """Tenants have these shares from now on, by number; `ready` are all READY chunks.

        Chunks that change their order count as used now, in the order in which they would go.
        """
        old, rank = self._orders, {}
        for order in old.values():
            rank.update({id(record): number for number, record in enumerate(order)})
        moved = sorted(ready, key=lambda record: rank.get(id(record), len(rank)))
        for record in moved:
            self.order_of(record).leave(record, remember=False)
        self._orders, self._shares = {}, dict(shares)
        for record in moved:
            self.order_of(record).enter([record])

    def over(self, may_go: MayGo) -> list[ChunkRecord]:
        """Chunks that tenants have above their greatest shares, of the slot size of which each has
        the most.
        """
        found: list[ChunkRecord] = []
        for holder, share in self._shares.items():
            over = self.used_bytes(holder) - int(share.most * self._places.geometry.pool_bytes)
            if over > 0:
                held = {size: o for (size, owner), o in self._orders.items() if owner == holder}
                size = max(held, key=lambda size: size * len(held[size]))
                found += held[size].first(-(-over // size), may_go)
        return found
