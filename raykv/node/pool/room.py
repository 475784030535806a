"""Making room: which chunks go so that another one has a slot.

Chunks of one slot size, and of one tenant that has a share, have an order of eviction. A slot size
that has less than its part of the slabs takes one from a size that has more, or that nobody has
wanted for a while; else it gives up its own. No tenant goes below its guarantee as long as
something else is left, or will be soon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from sys import intern

from raykv.base.ids import Key, Namespace
from raykv.base.shares import NO_SHARE, Share, shareholder, to_give_up
from raykv.base.tenants import is_label
from raykv.node.pool.order import EvictionOrder
from raykv.node.pool.places import Places
from raykv.node.pool.records import ChunkRecord, Standing

NOBODY = ""
"""The label of all tenants that have no share of their own."""

MOST_TENANTS = 4096
"""Tenants that are told apart while they have chunks. Beyond it only those with shares are."""

IDLE_S = 60.0
"""Idle time after which chunks of one slot size may be evicted to make room for another."""

PIECES = 1024
"""Unless more is wanted, room is made for one part in this many of what is there, at most
`MOST_AT_ONCE` chunks at a time."""

MOST_AT_ONCE = 64

MOST_OVER = 4096
"""Chunks above greatest shares that go at once."""

LIKELY_CHUNKS, LIKELY_SLABS = 256, 8
"""A slab that changes its slot size is one of `LIKELY_SLABS`: those with the most of the
`LIKELY_CHUNKS` that go first.
"""

LOOK_S = 1.0
"""Between two looks at all slabs of other slot sizes."""

MayGo = Callable[[ChunkRecord], bool]

Companions = Callable[[Namespace, Sequence[Key]], Iterable[Key]]
"""What is worth nothing once chunks of a namespace are gone."""


class Room:
    """See the module's docstring.

    Args:
        places: of the pool.
        find: the READY record of a name.
        companions: see there.
    """

    def __init__(
        self,
        places: Places,
        find: Callable[[Namespace, Key], ChunkRecord | None],
        companions: Companions,
    ) -> None:
        self._places = places
        self._find = find
        self._companions = companions
        self._orders: dict[tuple[int, str], EvictionOrder] = {}
        self._shares: dict[str, Share] = {}
        self._wanted_at: dict[int, float] = {}
        # By tenant, what is READY or being written; and by namespace.
        self._used: Counter[str] = Counter()
        self._by_space: Counter[Namespace] = Counter()
        self.all_used = 0
        """Bytes of all together, of what is being written too."""
        # By slot size, when to look again at all slabs of others.
        self._look_at: dict[int, float] = {}

    def order_of(self, record: ChunkRecord) -> EvictionOrder:
        """The order in which a chunk is, or will be once it is READY."""
        at = record.slot_bytes, self._holder(record.tenant)
        order = self._orders.get(at)
        if order is None:
            order = self._orders[at] = EvictionOrder()
        return order

    def _holder(self, tenant: str) -> str:
        return tenant if tenant in self._shares else NOBODY

    def want(self, slot_bytes: int, now: float) -> None:
        """Chunks of that slot size were offered or found."""
        self._wanted_at[slot_bytes] = now

    @property
    def num_entered(self) -> int:
        """Chunks in all orders."""
        return sum(map(len, self._orders.values()))

    def came(self, record: ChunkRecord) -> None:
        """A chunk is being written."""
        self._used[record.tenant] += record.slot_bytes
        self._by_space[record.namespace] += record.slot_bytes
        self.all_used += record.slot_bytes

    def went(self, record: ChunkRecord) -> None:
        """A chunk is neither being written nor READY any more."""
        self._used[record.tenant] -= record.slot_bytes
        if not self._used[record.tenant]:
            del self._used[record.tenant]
        self._by_space[record.namespace] -= record.slot_bytes
        self.all_used -= record.slot_bytes

    @property
    def by_space(self) -> dict[Namespace, int]:
        """Bytes of each namespace that has any, of what is being written too."""
        self._by_space = +self._by_space
        return dict(self._by_space)

    def next_to_go(self, count: int) -> list[ChunkRecord]:
        """About `count` chunks that go next: of each order its part."""
        total = max(self.num_entered, 1)
        return [
            record
            for order in self._orders.values()
            for record in islice(order, -(-count * len(order) // total))
        ]

    @property
    def num_uses(self) -> int:
        """Another one whenever the orders are: chunks came, were found, or stand in another way."""
        return sum(order.now for order in self._orders.values())

    @property
    def used(self) -> dict[str, int]:
        """Bytes of each tenant that has any, of what is being written too."""
        return dict(self._used)

    def victims(
        self, wanted: ChunkRecord, count: int, now: float, may_go: MayGo
    ) -> list[ChunkRecord] | None:
        """What goes for `count` chunks like one that wants a slot, in this step; None if
        nothing may go for it.

        When all of it is gone there may be a slot, or there is more to go.
        """
        found = self._slab_for(wanted.slot_bytes, now, may_go)
        if found is None:
            found = self._first(wanted, count, may_go) or None
        if found:
            found += filter(may_go, self.companions_of(found))
        return found

    def companions_of(self, gone: Sequence[ChunkRecord]) -> list[ChunkRecord]:
        """What goes along with chunks that go; what is pinned is in no queue."""
        by_namespace: dict[Namespace, list[Key]] = {}
        for each in gone:
            by_namespace.setdefault(each.namespace, []).append(each.key)
        found = dict.fromkeys(
            self._find(namespace, key)
            for namespace, keys in by_namespace.items()
            for key in self._companions(namespace, keys)
        )
        others = [each for each in found if each is not None and each.queue is not None]
        known = set(gone)
        return [each for each in others if each not in known]

    def _first(self, wanted: ChunkRecord, count: int, may_go: MayGo) -> list[ChunkRecord]:
        for may_go_below in (False, True):
            holders = {NOBODY, *self._shares}
            while parts := self._parts(wanted, count, holders, may_go_below=may_go_below):
                found = [
                    record
                    for holder, num in parts.items()
                    for record in self._orders[wanted.slot_bytes, holder].first(num, may_go)
                ]
                if found:
                    return found
                # What they have is being copied, or was found just now.
                holders -= parts.keys()
            if {NOBODY, *self._shares} - holders:
                return []
        return []

    def _parts(
        self, wanted: ChunkRecord, count: int, holders: Iterable[str], *, may_go_below: bool
    ) -> dict[str, int]:
        """Chunks that each holder gives up in one step. The wanted ones count as there already."""
        total, size = self._places.geometry.pool_bytes, wanted.slot_bytes
        orders = {holder: self._orders.get((size, holder)) for holder in holders}
        left = {holder: order.num_that_go for holder, order in orders.items() if order}
        piece = max(count, min(MOST_AT_ONCE, 1 + sum(left.values()) // PIECES))
        own = self._holder(wanted.tenant)
        holdings = [
            shareholder(
                holder,
                self._used_by(holder) + (size * count if holder == own else 0),
                self._shares.get(holder, NO_SHARE),
                total,
                num,
            )
            for holder, num in sorted(left.items())
        ]
        return to_give_up(holdings, size, piece, may_go_below=may_go_below)

    def _used_by(self, holder: str) -> int:
        """Bytes of a holder, of what is being written too."""
        if holder != NOBODY:
            return self._used[holder]
        return self.all_used - sum(self._used[each] for each in self._shares if each != NOBODY)

    # Slabs

    def _slab_for(self, slot_bytes: int, now: float, may_go: MayGo) -> list[ChunkRecord] | None:
        """All chunks of a slab that changes its slot size; None if none does."""
        for slabs, below in self._looks(slot_bytes, now):
            slab = self._oldest(slabs, below, may_go)
            if slab is not None:
                records = self._places.records_in(slab)
                if not records:
                    self._places.give_slab(slab)
                return records
        return None

    def _looks(self, slot_bytes: int, now: float) -> Iterator[tuple[list[int], Standing]]:
        """Slabs of which one may change its slot size, if all of its chunks stand below that: those
        with chunks that go first, then, once in a while, all.
        """
        own = self._places.classes().get(slot_bytes, 0)
        donors = self._donors(slot_bytes, own, now)
        for donor in donors:
            yield self._likely(donor), Standing.KEPT
        if now < self._look_at.get(slot_bytes, now):
            return
        self._look_at[slot_bytes] = now + LOOK_S
        # A slot size without a slab takes what is kept, before its chunks find no room at all.
        for below in (Standing.KEPT,) if own else (Standing.KEPT, Standing.PINNED):
            for donor in donors:
                yield self._places.slabs_of(donor), below

    def _donors(self, slot_bytes: int, own: int, now: float) -> list[int]:
        """Slot sizes that give a slab to one that has `own`, those first that have the most."""
        classes = self._places.classes()
        others = [size for size in classes if size != slot_bytes]
        fair = self._places.geometry.num_slabs // (len(others) + 1)

        def gives(donor: int) -> bool:
            is_idle = now - self._wanted_at.get(donor, -IDLE_S) >= IDLE_S
            may_give = classes[donor] > 1 or (is_idle and not own)
            has_more = classes[donor] > fair and own < max(fair, 1)
            return may_give and (is_idle or has_more)

        return sorted(filter(gives, others), key=lambda size: -classes[size])

    def _likely(self, donor: int) -> list[int]:
        """Those slabs of a class that have the most of the chunks that go first."""
        slabs = self._places.slabs_of(donor)
        if len(slabs) <= LIKELY_SLABS:
            return slabs
        orders = (order for (size, _), order in self._orders.items() if size == donor)
        first = chain.from_iterable(islice(order, LIKELY_CHUNKS) for order in orders)
        likely = Counter(self._places.geometry.slab_of(record.slot) for record in first)
        return [slab for slab, _ in likely.most_common(LIKELY_SLABS)]

    def _oldest(self, slabs: Iterable[int], below: Standing, may_go: MayGo) -> int | None:
        """The slab that was used longest ago, of those of which all chunks may go, and stand below
        that, and no tenant goes below its guarantee.
        """
        total = self._places.geometry.pool_bytes
        least = {label: int(each.guaranteed * total) for label, each in self._shares.items()}
        used = {holder: self._used_by(holder) for holder in least}
        found: int | None = None
        oldest = 0
        for slab in slabs:
            records = self._places.records_in(slab)
            latest = max((record.used for record in records), default=0)
            if found is not None and latest > oldest:
                continue
            taken: Counter[str] = Counter()
            for record in records:
                taken[self._holder(record.tenant)] += record.slot_bytes
            goes_below = any(
                used[holder] - num_bytes < least[holder]
                for holder, num_bytes in taken.items()
                if holder in least
            )
            may_all = all(
                each.queue is not None and each.standing < below and may_go(each)
                for each in records
            )
            if may_all and not goes_below:
                found, oldest = slab, latest
        return found

    def forget_sizes(self) -> None:
        """Forget slot sizes that have no slab any more."""
        sizes = self._places.classes()
        self._orders = {at: order for at, order in self._orders.items() if at[0] in sizes}
        self._wanted_at = {size: at for size, at in self._wanted_at.items() if size in sizes}
        self._look_at = {size: at for size, at in self._look_at.items() if size in sizes}

    # Tenants

    def share(self, shares: Mapping[str, Share], ready: Iterable[ChunkRecord]) -> None:
        """Tenants have these shares from now on, by label; `ready` are all READY chunks.

        Chunks that change their order count as used now, those first that would go first.
        """
        if shares == self._shares:
            return
        changed = (self._shares.keys() ^ shares.keys()) - {NOBODY}
        moving = [record for record in ready if record.tenant in changed]
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

    def tenant(self, label: str) -> str:
        """What chunks of a tenant count to: its label, or `NOBODY` if it is not told apart."""
        if label not in self._shares and label not in self._used:
            num_tenants = len(self._used) - (NOBODY in self._used)
            if num_tenants >= MOST_TENANTS or not is_label(label):
                return NOBODY
        # A million chunks have it.
        return intern(label)

    def own(self, records: Sequence[ChunkRecord], label: str) -> None:
        """READY chunks of a prompt, from its head on, are a tenant's from now on; those that change
        their order count as used now.
        """
        tenant = self.tenant(label)
        moving: dict[int, list[ChunkRecord]] = {}
        for record in records:
            before = self.order_of(record)
            self.went(record)
            record.tenant = tenant
            self.came(record)
            if self.order_of(record) is not before:
                before.leave(record, remember=False)
                moving.setdefault(record.slot_bytes, []).append(record)
        for some in moving.values():
            self.order_of(some[0]).enter(some)

    def over(self, may_go: MayGo, most: int = MOST_OVER) -> list[ChunkRecord]:
        """Up to `most` chunks that tenants have above their greatest shares, of the slot size of
        which each has the most.
        """
        found: list[ChunkRecord] = []
        for holder, share in self._shares.items():
            over = self._used_by(holder) - int(share.most * self._places.geometry.pool_bytes)
            if over <= 0:
                continue
            held = {size: o for (size, whose), o in self._orders.items() if whose == holder}
            if held:
                size = max(held, key=lambda size: size * len(held[size]))
                found += held[size].first(min(-(-over // size), most - len(found)), may_go)
        return found

    def is_over(self, record: ChunkRecord) -> bool:
        """Whether a chunk counts to a share of which more is used than is guaranteed."""
        holder = self._holder(record.tenant)
        share, total = self._shares.get(holder), self._places.geometry.pool_bytes
        return share is not None and self._used_by(holder) > int(share.guaranteed * total)

    # Spare copies

    def forget_spares(self) -> None:
        """No chunk is spare any more; `unmark` comes to all of them."""
        for order in self._orders.values():
            order.forget_spares()

    def unmark(self, most: int) -> None:
        """Let up to `most` chunks that are spare no more stand like others."""
        for order in self._orders.values():
            most -= order.unmark(most)
