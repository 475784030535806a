"""A pool that tenants share: whose chunks are evicted, by `raykv/base/shares.py`.

Tenants are numbers; who has no share is one with all others who have none, number 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from raykv.base.ids import Slot
from raykv.base.shares import (
    ABOVE_GUARANTEED,
    NO_SHARE,
    Share,
    Shareholder,
    shareholder,
    to_give_up,
)
from raykv.directory.table.protocol import NOBODY, Changes, NodeTable

SOON_S = 30.0
"""Chunks that are kept for longer are pinned by somebody; loads and answers keep them for 10 s."""


class SharedPool:
    """See the module's docstring.

    Args:
        table: of the pool's node.
        shares: of tenants.
        sizes: the slot sizes that there are.
    """

    def __init__(
        self, table: NodeTable, shares: Mapping[int, Share], sizes: Collection[int]
    ) -> None:
        self._table = table
        self._shares = shares
        self._sizes = sizes
        self._total = table.geometry.pool_bytes
        # Those that are the same to `to_give_up` take turns in this order.
        self._holders = sorted({NOBODY, *shares})

    def _used(self, owner: int) -> int:
        return sum(size * self._table.num_held(size, owner) for size in self._sizes)

    def _holdings(self, slot_bytes: int, owners: Iterable[int]) -> list[Shareholder[int]]:
        return [
            shareholder(
                owner,
                self._used(owner),
                self._shares.get(owner, NO_SHARE),
                self._total,
                self._table.num_held(slot_bytes, owner),
            )
            for owner in owners
        ]

    def evict(
        self, slot_bytes: int, count: int, now: float, *, may_go_below: bool
    ) -> Iterator[list[Changes]]:
        """Drop up to `count` chunks of a slot size, those of a tenant in its own eviction order."""
        holders = list(self._holders)
        while count > 0 and holders:
            holdings = self._holdings(slot_bytes, holders)
            above = {
                each.holder for each in holdings if each.rank(slot_bytes)[0] >= ABOVE_GUARANTEED
            }
            parts = to_give_up(holdings, slot_bytes, count, may_go_below=may_go_below)
            if not parts:
                return
            for owner, wanted in parts.items():
                gone = self._table.evict(slot_bytes, wanted, now, owner)
                evicted = sum(map(len, gone))
                if evicted < wanted:
                    # All that is left is pinned.
                    holders.remove(owner)
                count -= evicted
                if owner in self._shares and owner in above:
                    gone = [replace(changes, over_quota=True) for changes in gone]
                yield gone

    def has_more_soon(self, slot_bytes: int, now: float) -> bool:
        """Whether somebody who is above its guarantee can give something up as soon as what was
        just loaded, or told to others, need not be kept any more.
        """
        return any(
            each.rank(slot_bytes)[0] >= ABOVE_GUARANTEED
            and self._table.can_evict(slot_bytes, now + SOON_S, each.holder)
            for each in self._holdings(slot_bytes, self._holders)
        )

    def trim(self, now: float) -> Iterator[list[Changes]]:
        """Drop what tenants have above their greatest shares, of the slot size of which each has
        the most.
        """
        for owner, share in self._shares.items():
            over = self._used(owner) - int(share.most * self._total)
            if over <= 0:
                continue
            size = max(self._sizes, key=lambda size: size * self._table.num_held(size, owner))
            gone = self._table.evict(size, -(-over // size), now, owner)
            yield [replace(changes, over_quota=True) for changes in gone]

    def candidates(self, slot_bytes: int) -> Iterator[Slot]:
        """Slots in an order in which they might be given up: of those furthest above their
        guarantees first.
        """
        holdings = self._holdings(slot_bytes, self._holders)
        for each in sorted(holdings, key=lambda each: each.rank(slot_bytes), reverse=True):
            yield from self._table.candidates(slot_bytes, each.holder)

    def is_free_to_take(self, places: Sequence[object]) -> bool:
        """Whether nobody goes below its guarantee if all chunks at some places go."""
        uses = self._table.uses_at(places)
        taken: dict[int, int] = {}
        for owner, size in zip(uses.owners, uses.slot_bytes, strict=True):
            holder = owner if owner in self._shares else NOBODY
            taken[holder] = taken.get(holder, 0) + size
        return all(
            self._used(owner) - size >= int(self._shares[owner].guaranteed * self._total)
            for owner, size in taken.items()
            if owner in self._shares
        )
