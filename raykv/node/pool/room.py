"""Who makes room: which chunks go so that another one has a slot.

Chunks of one slot size, and of one tenant that has a share, have an order of eviction. A slot size
that has less than its part of the slabs takes one from a size that has more, or that nobody has
wanted for a while; else it gives up its own. Nobody goes below what is guaranteed to it as long as
something else is left, or will be soon.
"""

from __future__ import annotations

from collections import Counter
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

LOOK_S = 1.0
"""Between two looks for a slab that changes its slot size, after none was found."""

MayGo = Callable[[ChunkRecord], bool]


class Room:
    """See the module's docstring."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._orders: dict[tuple[int, int], EvictionOrder] = {}
        self._shares: dict[int, Share] = {}
        self._wanted_at: dict[int, float] = {}
        # By tenant, what is being written.
        self._writing_bytes: Counter[int] = Counter()
        # By slot size, when to look again for a slab, after none was found.
        self._look_at: dict[int, float] = {}

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

    def begun(self, record: ChunkRecord) -> None:
        """A chunk is being written."""
        self._writing_bytes[record.owner] += record.slot_bytes

    def ended(self, record: ChunkRecord) -> None:
        """It is not being written any more."""
        self._writing_bytes[record.owner] -= record.slot_bytes
        if not self._writing_bytes[record.owner]:
            del self._writing_bytes[record.owner]

    def victims(self, wanted: ChunkRecord, now: float, may_go: MayGo) -> list[ChunkRecord] | None:
        """What goes for a chunk that wants a slot, in this step; None: there is no room for it.

        When all of it is gone there may be a slot, or there is more to go.
        """
        found = self._slab_for(wanted.slot_bytes, now, may_go)
        return found if found is not None else self._first(wanted, may_go) or None

    def _first(self, wanted: ChunkRecord, may_go: MayGo) -> list[ChunkRecord]:
        for may_go_below in (False, True):
            holders = {NOBODY, *self._shares}
            while parts := self._parts(wanted, holders, may_go_below=may_go_below):
                found = [
                    record
                    for holder, count in parts.items()
                    for record in self._order(wanted.slot_bytes, holder).first(count, may_go)
                ]
                if found:
                    return found
                # What they have is being copied, or was found just now.
                holders -= parts.keys()
            if {NOBODY, *self._shares} - holders:
                return []
        return []

    def _parts(
        self, wanted: ChunkRecord, holders: Iterable[int], *, may_go_below: bool
    ) -> dict[int, int]:
        """How many chunks each gives up, in one piece; the one that is wanted counts already."""
        used = self._used()
        used[self._holder(wanted.owner)] += wanted.slot_bytes
        total, size = self._places.geometry.pool_bytes, wanted.slot_bytes
        left = {holder: self._order(size, holder).num_that_go for holder in holders}
        holdings = [
            shareholder(
                holder, used[holder], self._shares.get(holder, NO_SHARE), total, left[holder]
            )
            for holder in sorted(holders)
        ]
        piece = min(MOST_AT_ONCE, 1 + sum(left.values()) // PIECES)
        return to_give_up(holdings, size, piece, may_go_below=may_go_below)

    def _used(self) -> Counter[int]:
        """Bytes of each holder, of what is being written too."""
        used: Counter[int] = Counter()
        for (size, holder), order in self._orders.items():
            used[holder] += size * len(order)
        for owner, num_bytes in self._writing_bytes.items():
            used[self._holder(owner)] += num_bytes
        return used

    # Slabs

    def _slab_for(self, slot_bytes: int, now: float, may_go: MayGo) -> list[ChunkRecord] | None:
        """All chunks of a slab that changes its slot size; None if none does."""
        if now < self._look_at.get(slot_bytes, now):
            return None
        classes = self._places.classes()
        others = [size for size in classes if size != slot_bytes]
        own, fair = classes.get(slot_bytes, 0), self._places.geometry.num_slabs // (len(others) + 1)
        for donor in sorted(others, key=lambda size: -classes[size]):
            is_idle = now - self._wanted_at.get(donor, -IDLE_S) >= IDLE_S
            may_give = classes[donor] > 1 or (is_idle and not own)
            has_more = classes[donor] > fair and own < max(fair, 1)
            if may_give and (is_idle or has_more):
                slab = self._slab_of(donor, may_go)
                if slab is not None:
                    records = self._places.records_in(slab)
                    if not records:
                        self._places.give_slab(slab)
                    return records
        self._look_at[slot_bytes] = now + LOOK_S
        return None

    def _slab_of(self, donor: int, may_go: MayGo) -> int | None:
        """The slab of a class that was used longest ago, of those of which all may go and nobody
        goes below its guarantee.
        """
        used, total = self._used(), self._places.geometry.pool_bytes
        least = {owner: int(each.guaranteed * total) for owner, each in self._shares.items()}
        found: int | None = None
        oldest = 0
        for slab in self._places.slabs_of(donor):
            records = self._places.records_in(slab)
            latest = max((record.used for record in records), default=0)
            if found is not None and latest > oldest:
                continue
            taken = Counter(self._holder(record.owner) for record in records)
            goes_below = any(
                used[holder] - count * donor < least.get(holder, 0)
                for holder, count in taken.items()
            )
            may_all = all(self._may_hand_over(each) and may_go(each) for each in records)
            if may_all and not goes_below:
                found, oldest = slab, latest
        return found

    def _may_hand_over(self, record: ChunkRecord) -> bool:
        return self.may_evict(record) and record.standing is not Standing.KEPT

    def may_evict(self, record: ChunkRecord) -> bool:
        """Whether a chunk is READY and not pinned."""
        return record.queue is not None and record.standing is not Standing.PINNED

    # Tenants

    def share(self, shares: Mapping[int, Share], ready: Iterable[ChunkRecord]) -> None:
        """Tenants have these shares from now on, by number; `ready` are all READY chunks.

        Chunks that change their order count as used now, those first that would go first.
        """
        if shares == self._shares:
            return
        changed = self._shares.keys() ^ shares.keys()
        moving = [record for record in ready if record.owner in changed]
        rank: dict[ChunkRecord, int] = {}
        for order in {id(each): each for each in map(self.order_of, moving)}.values():
            rank.update({record: number - len(order) for number, record in enumerate(order)})
        moving.sort(key=lambda record: rank.get(record, 0))
        for record in moving:
            self.order_of(record).leave(record, remember=False)
        self._shares = dict(shares)
        for record in moving:
            self.order_of(record).enter([record])
        self._orders = {
            (size, holder): order
            for (size, holder), order in self._orders.items()
            if holder == NOBODY or holder in shares
        }

    def over(self, may_go: MayGo) -> list[ChunkRecord]:
        """Chunks that tenants have above their greatest shares, of the slot size of which each has
        the most.
        """
        found: list[ChunkRecord] = []
        for holder, share in self._shares.items():
            over = self._used()[holder] - int(share.most * self._places.geometry.pool_bytes)
            if over > 0:
                held = {size: o for (size, owner), o in self._orders.items() if owner == holder}
                size = max(held, key=lambda size: size * len(held[size]))
                found += held[size].first(-(-over // size), may_go)
        return found
