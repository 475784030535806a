"""An engine's stock of leases: free slots that it may store or fetch into, by KV group."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping

from raykv.protocol.columns import MAX_KEYS, Handle, Leases, handles_of
from raykv.protocol.engine import LEASE_SHARE

RECENT = 4096
"""Leases that were taken count for less once so many more were taken: groups change their needs."""


class LeaseStock:
    """All groups share what the engine may hold: half of it in equal parts, so that each can begin
    to store, half of it by what each has taken lately. But each holds what one step takes, as far
    as the engine's part of the pool allows it: what a step finds no slot for is never stored. That
    is what it could take, until the engine has taken as many as the pool has: from then on, the
    most that was taken between two answers lately, since what is leased holds no chunk; and all of
    it again once a step was short.

    Args:
        groups: KV group indices.
        most: free slots to hold per group, at most.
        steps: chunks that one step may store, by group.
    """

    def __init__(
        self, groups: Iterable[int], most: int, steps: Mapping[int, int] | None = None
    ) -> None:
        self._most = most
        self._steps = steps or {}
        self._needs = dict(self._steps)
        # Taken since the last answer; the most between two answers, and all, since `_needs` could
        # fall last.
        self._burst: Counter[int] = Counter()
        self._peak: Counter[int] = Counter()
        self._since: Counter[int] = Counter()
        # KV groups of which there was none left since the last answer.
        self._short: set[int] = set()
        self._leases: dict[int, deque[Handle]] = {group: deque() for group in groups}
        self._taken: dict[int, int] = dict.fromkeys(self._leases, 0)
        self.capacity: dict[int, int] = dict.fromkeys(self._leases, 0)
        # Of the node's pool, for the free slots of all groups together.
        self._share = LEASE_SHARE
        self._step_share = 0.0
        # What is held of each group at least: its need, as far as there is room.
        self._least: dict[int, int] = {}
        # What was wanted beyond the target, and has not been taken since.
        self._extra: Counter[int] = Counter()
        # KV groups of which the last answer granted fewer leases than were wanted.
        self._dry: set[int] = set()

    def set_shares(self, share: float, step_share: float) -> None:
        """Of the node's pool, whose `capacity` is known, for the leases of all groups; and the most
        for what one step may take, of each group the same part (0: as before).
        """
        self._share = share or self._share
        self._step_share = step_share or self._step_share
        capacity = self.capacity
        step = sum(most / capacity[g] for g, most in self._needs.items() if capacity[g])
        part = min(1.0, self._step_share / step) if step else 0.0
        self._least = {group: int(part * most) for group, most in self._needs.items()}

    def take(self, group: int) -> Handle | None:
        """The oldest lease of a group; None if there is none left."""
        leases = self._leases[group]
        if not leases:
            self._short.add(group)
            return None
        self._burst[group] += 1
        self._taken[group] += 1
        self._extra[group] = max(0, self._extra[group] - 1)
        return leases.popleft()

    def add(self, granted: Leases, wanted: dict[int, int]) -> None:
        """Take in what was granted for what was wanted."""
        handles = handles_of(granted.slots, granted.generations)
        for group, handle in zip(granted.groups, handles, strict=True):
            self._leases[group].append(handle)
        if wanted:
            self._note_needs()
            counts = Counter(granted.groups)
            is_full = len(granted.slots) >= MAX_KEYS
            self._dry = {g for g, count in wanted.items() if counts[g] < count and not is_full}

    def _note_needs(self) -> None:
        for group, most in self._steps.items():
            count = self._burst.pop(group, 0)
            self._since[group] += count
            step = most if group in self._short else min(count, most)
            self._peak[group] = max(self._peak[group], step)
            self._needs[group] = max(self._needs[group], step)
            if self._since[group] >= self.capacity[group]:
                self._needs[group] = self._peak[group]
                self._since[group] = self._peak[group] = 0
        self._short.clear()

    def is_dry(self, group: int) -> bool:
        """Whether the scheduler actor had nothing more to give."""
        return group in self._dry

    def clear(self) -> None:
        """All leases are void."""
        for leases in self._leases.values():
            leases.clear()

    def keep(self, handles: Collection[Handle]) -> None:
        """All other leases are void."""
        for group, leases in self._leases.items():
            self._leases[group] = deque(handle for handle in leases if handle in handles)

    def rows(self) -> list[tuple[int, Handle]]:
        """All leases with their groups."""
        return [(group, handle) for group, some in self._leases.items() for handle in list(some)]

    def target(self, group: int) -> int:
        """Free slots to hold: the group's part of the engine's share of the pool, or what a step
        may take; at least one.
        """
        part = 1 / len(self._leases)
        if total := sum(self._taken.values()):
            part = (part + self._taken[group] / total) / 2
        own = int(self.capacity[group] * self._share * part)
        return max(1, min(self._most, max(own, self._least.get(group, 0))))

    def take_surplus(self) -> list[tuple[int, Handle]]:
        """Leases to give back, with their groups: those beyond what is wanted and a quarter more,
        since others need them now. Also ages the counts of what was taken.
        """
        if sum(self._taken.values()) > RECENT:
            self._taken = {group: count // 2 for group, count in self._taken.items()}
        surplus = []
        for group, leases in self._leases.items():
            most = self.target(group) + self._extra[group]
            if 4 * len(leases) > 5 * most:
                surplus += [(group, leases.pop()) for _ in range(len(leases) - most)]
        return surplus

    def is_low(self, extra: Counter[int]) -> bool:
        """Whether a group has half of its target or less, or something is wanted beyond it: worth a
        message of its own.
        """
        return any(
            2 * len(leases) <= self.target(group) or extra[group]
            for group, leases in self._leases.items()
        )

    def wanted(self, extra: Counter[int]) -> dict[int, int]:
        """What each group lacks to its target; `extra` comes on top."""
        wanted: dict[int, int] = {}
        for group, leases in self._leases.items():
            lacking = max(0, self.target(group) - len(leases)) + extra[group]
            if lacking:
                wanted[group] = lacking
                self._extra[group] = max(self._extra[group], extra[group])
        return wanted
