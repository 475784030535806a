"""An engine's stock of leases: free slots that it may store or fetch into, by KV group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from raykv.messages import MAX_KEYS, Handle, Leases, handles_of


class LeaseStock:
    """Args:
    groups: KV group indices.
    most: free slots to hold per group, at most.
    """

    def __init__(self, groups: Iterable[int], most: int) -> None:
        self._most = most
        self._leases: dict[int, deque[Handle]] = {group: deque() for group in groups}
        self.capacity: dict[int, int] = dict.fromkeys(self._leases, 0)
        # KV groups of which the last answer granted fewer leases than were wanted.
        self._dry: set[int] = set()

    def take(self, group: int) -> Handle | None:
        """The oldest lease of a group; None if there is none left."""
        leases = self._leases[group]
        return leases.popleft() if leases else None

    def add(self, granted: Leases, wanted: dict[int, int]) -> None:
        """Take in what was granted for what was wanted."""
        handles = handles_of(granted.slots, granted.generations)
        for group, handle in zip(granted.groups, handles, strict=True):
            self._leases[group].append(handle)
        if wanted:
            counts = Counter(granted.groups)
            is_full = len(granted.slots) >= MAX_KEYS
            self._dry = {g for g, count in wanted.items() if counts[g] < count and not is_full}

    def is_dry(self, group: int) -> bool:
        """Whether the scheduler actor had nothing more to give."""
        return group in self._dry

    def clear(self) -> None:
        """All leases are void."""
        for leases in self._leases.values():
            leases.clear()

    def keep(self, handles: Collection[Handle]) -> None:
        """All leases but those are void."""
        for group, leases in self._leases.items():
            self._leases[group] = deque(handle for handle in leases if handle in handles)

    def rows(self) -> list[tuple[int, Handle]]:
        """All leases with their groups."""
        return [(group, handle) for group, some in self._leases.items() for handle in list(some)]

    def target(self, group: int) -> int:
        """Free slots to hold: a quarter of what the pool can hold at most, at least one."""
        return max(1, min(self._most, self.capacity[group] // 4))

    def wanted(self, extra: Counter[int]) -> dict[int, int]:
        """Refill each group to its target once it is below half of it; `extra` comes on top."""
        wanted: dict[int, int] = {}
        for group, leases in self._leases.items():
            target = self.target(group)
            if 2 * len(leases) <= target or extra[group]:
                wanted[group] = max(0, target - len(leases)) + extra[group]
        return wanted
