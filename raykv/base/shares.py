"""Shares of a pool, or of a disk, and who gives something up when there is no room.

The holder furthest above its greatest share gives up first; then the one furthest above what it is
guaranteed. So unused guarantees are shared equally and reclaimed on demand. Holders below their
guarantees give up only when nothing else is left.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the whole, from 0 to 1: `guaranteed` at least, and `most`."""

    guaranteed: float = 0.0
    most: float = 1.0


NO_SHARE = Share()
"""The share of holders without one."""

NOT_ABOVE, ABOVE_GUARANTEED, ABOVE_MOST = range(3)
"""Where a holder is, with one piece less."""


@dataclass(slots=True)
class Shareholder(Generic[T]):
    """What `holder` has, in bytes, and the bounds of its share. `num_left` are the pieces that it
    can give up now.
    """

    holder: T
    used: int
    guaranteed: int
    most: int
    num_left: int

    def rank(self, piece: int) -> tuple[int, int]:
        """The holder of the highest rank gives up a piece of that size next."""
        if self.used > self.most:
            return ABOVE_MOST, self.used - self.most
        is_above = self.used - piece >= self.guaranteed
        return ABOVE_GUARANTEED if is_above else NOT_ABOVE, self.used - self.guaranteed


def shareholder(holder: T, used: int, share: Share, total: int, num_left: int) -> Shareholder[T]:
    """What a holder has of a whole of `total` bytes."""
    bounds = int(share.guaranteed * total), int(share.most * total)
    return Shareholder(holder, used, *bounds, num_left)


def to_give_up(
    holdings: Sequence[Shareholder[T]], piece: int, count: int, *, may_go_below: bool
) -> dict[T, int]:
    """How many pieces of a size each holder gives up, so that it is `count` in all if there are so
    many. The holdings are counted down.

    No holder goes below its guarantee, unless it `may_go_below` once nothing else is left. Among
    equals the first one of `holdings` gives up.
    """
    parts: dict[T, int] = {}
    queue = [(*_turn(each, piece), at) for at, each in enumerate(holdings) if each.num_left > 0]
    heapify(queue)
    while queue and count > 0:
        rank, above, at = heappop(queue)
        if rank == -NOT_ABOVE and not may_go_below:
            break
        # As many as it gives up in a row: until another one is the first, or its rank is lower.
        gap = -above
        if queue and queue[0][0] == rank:
            gap += queue[0][1]
        first = holdings[at]
        taken = min(max(1, gap // piece), count, first.num_left)
        parts[first.holder] = parts.get(first.holder, 0) + taken
        first.used -= taken * piece
        first.num_left -= taken
        count -= taken
        if first.num_left:
            heappush(queue, (*_turn(first, piece), at))
    return parts


def _turn(each: Shareholder[T], piece: int) -> tuple[int, int]:
    """The lowest one is the first."""
    rank, above = each.rank(piece)
    return -rank, -above
