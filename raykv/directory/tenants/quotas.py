"""Tenants of the whole cluster: their numbers in the tables, and their quotas.

          number_of, set                    no chunk is left, and no quota
  label ─────────────────► has a number ───────────────────────────────────► (its number is free)

Who has no number is nobody in particular: number 0, together with all whose requests name no
tenant. Only a tenant with a quota is set apart: all others share what it leaves as if they were
one, so that nobody gets more by calling itself by many names.

Invariants:
1. Numbers are from 1 to `MAX_OWNERS` - 1, each of one label at most.
2. A label with a quota has a number. Labels without one, which clients choose by their salts, get
   at most `MAX_WITHOUT_QUOTA`, so that there is one left for each quota.
3. All guarantees together are at most `MAX_GUARANTEED`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from raykv.base.ids import NodeId
from raykv.base.shares import NO_SHARE, Share
from raykv.base.tenants import OTHERS
from raykv.directory.members import Node
from raykv.directory.meter.cluster import MeteredTenant
from raykv.directory.table.protocol import MAX_OWNERS, NOBODY, Changes
from raykv.protocol.engine import MissRecord, Owned, tokens_by_source
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.operator import MAX_GUARANTEED, MAX_QUOTAS, Quota, QuotaAnswer, TenantStatus

MAX_WITHOUT_QUOTA = MAX_OWNERS - 1 - MAX_QUOTAS
"""Tenants without a quota that are shown by name."""

LOOK_S = 60.0
"""Pause between two searches for labels that are not needed any more: each looks at all chunks."""


class Tenants:
    """See the module's docstring; `nodes` has all nodes, kept up to date by the block manager."""

    def __init__(self, nodes: Mapping[NodeId, Node]) -> None:
        self._nodes = nodes
        # The shares of disks, by label.
        self.disk_shares: dict[str, tuple[float, float]] = {}
        self._numbers: dict[str, int] = {}
        self._labels: dict[int, str] = {}
        self._quotas: dict[str, Quota] = {}
        self._look_at = float("-inf")
        self.shares: dict[int, Share] = {}
        # Of those that have a quota, and of all others: chunks that went since their tenant had
        # more than its share, and tokens of prompts.
        self._evicted: Counter[int] = Counter()
        self._tokens: dict[int, Counter[str]] = {}

    # Labels

    def take(self, node: Node, owned: Owned, now: float) -> None:
        """An engine of a node says what belongs to whom."""
        numbers = [self.number_of(label, now) for label in owned.tenants]
        owners = [numbers[index] for index in owned.tenant_index]
        slots, generations = owned.slots, owned.generations
        if NOBODY in numbers:
            rows = [row for row, owner in enumerate(owners) if owner != NOBODY]
            owners = [owners[row] for row in rows]
            slots, generations = [slots[row] for row in rows], [generations[row] for row in rows]
        if owners:
            node.book.table.own(slots, generations, owners)

    def number_of(self, label: str, now: float) -> int:
        """A tenant's number; one without a quota gets one if there is any left for such."""
        return self._number(label, now, self._has_room_without_quota)

    def _number(self, label: str, now: float, has_room: Callable[[], bool]) -> int:
        known = self._numbers.get(label)
        if known is not None:
            return known
        if not has_room() and now >= self._look_at:
            self._look_at = now + LOOK_S
            self._forget_unused()
        if not has_room():
            return NOBODY
        free = next(n for n in range(1, MAX_OWNERS) if n not in self._labels)
        self._numbers[label] = free
        self._labels[free] = label
        return free

    def _has_room(self) -> bool:
        return len(self._labels) < MAX_OWNERS - 1

    def _has_room_without_quota(self) -> bool:
        with_quota = {quota.tenant for quota in self._quotas.values() if quota.tenant}
        return self._has_room() and len(self._labels) - len(with_quota) < MAX_WITHOUT_QUOTA

    def _forget_unused(self) -> None:
        """Labels without chunks and without a quota have no number any more."""
        used = self._used()
        kept = {quota.tenant for quota in self._quotas.values()}
        for number, label in list(self._labels.items()):
            if number not in used and label not in kept:
                del self._labels[number], self._numbers[label]

    def name_of(self, number: int) -> str:
        """What people call the tenant of a number."""
        label = self._labels.get(number, "")
        return self.name(label)

    def name(self, label: str) -> str:
        """What people call the tenant of a label."""
        names = [quota.name for quota in self._quotas.values() if quota.tenant == label]
        return names[0] if names else label or OTHERS

    # Quotas

    def set(self, quota: Quota, now: float) -> QuotaAnswer:
        """Give a tenant a share, in place of the one that it had; refused if there is no room."""
        error = self._objection(quota)
        if not error and quota.tenant:
            number = self._number(quota.tenant, now, self._has_room)
            if number == NOBODY:
                error = f"{MAX_OWNERS - 1} tenants have chunks: try again when some have none"
        if error:
            return QuotaAnswer(PROTOCOL_VERSION, error)
        self._quotas[quota.name] = quota
        self._share()
        return QuotaAnswer(PROTOCOL_VERSION)

    def _objection(self, quota: Quota) -> str:
        others = [each for each in self._quotas.values() if each.name != quota.name]
        for each in others:
            if each.tenant == quota.tenant:
                return f"the quota {each.name!r} is of the same tenant: remove it first"
        if len(others) >= MAX_QUOTAS:
            return f"there are {MAX_QUOTAS} quotas already, the most that are allowed"
        total = sum(each.guaranteed for each in others)
        if total + quota.guaranteed > MAX_GUARANTEED + 1e-9:
            return (
                f"{quota.guaranteed:g} can't be guaranteed: others are guaranteed {total:g}, and "
                f"all together at most {MAX_GUARANTEED:g}, since engines lease free slots ahead"
            )
        return ""

    def remove(self, name: str) -> bool:
        """End a quota; False if there is none of that name."""
        if self._quotas.pop(name, None) is None:
            return False
        self._share()
        return True

    def _share(self) -> None:
        self.shares = {
            self._numbers[quota.tenant] if quota.tenant else NOBODY: Share(
                quota.guaranteed, quota.most
            )
            for quota in self._quotas.values()
        }
        self.disk_shares = {
            quota.tenant: (quota.guaranteed, quota.most) for quota in self._quotas.values()
        }
        for node in self._nodes.values():
            node.book.share(self.shares)

    def label_with_quota(self, number: int) -> str:
        """The label of the tenant of that number, if it has a quota; else empty."""
        return self._labels[number] if number != NOBODY and number in self.shares else ""

    # Numbers

    def evicted(self, changes: Changes) -> None:
        """Chunks were evicted since their tenants had more than their shares."""
        for owner in changes.owners or [NOBODY] * len(changes):
            self._evicted[self._holder(owner)] += 1

    def finished(self, records: Iterable[MissRecord]) -> None:
        """Requests have ended; they are counted where tenants have quotas."""
        if not self.shares:
            return
        for record in records:
            number = self._numbers.get(record.tenant, NOBODY)
            tokens = self._tokens.setdefault(self._holder(number), Counter())
            tokens.update(tokens_by_source(record))

    def _holder(self, number: int) -> int:
        """Whose share a tenant's chunks count to."""
        return number if number in self.shares else NOBODY

    def metered(self, disk_bytes: Mapping[str, int]) -> list[MeteredTenant]:
        """What metrics show: tenants with a quota, and all others as one; none without quotas.

        `disk_bytes` as in `status`.
        """
        if not self.shares:
            return []
        used = dict.fromkeys([NOBODY, *self.shares], 0)
        for owner, count in self._used().items():
            used[self._holder(owner)] += count
        return [
            MeteredTenant(
                name=self.name_of(number),
                pool_bytes=count,
                disk_bytes=disk_bytes.get(self._labels.get(number, ""), 0),
                num_evicted=self._evicted[number],
                tokens=self._tokens.get(number, {}),
            )
            for number, count in used.items()
        ]

    # Looking

    def status(self, disk_bytes: Mapping[str, int]) -> list[TenantStatus]:
        """Tenants with a quota, and others that have chunks; takes as long as there are chunks.

        `disk_bytes` are those on disks, by label.
        """
        if not self._labels and not self._quotas:
            return []
        used = self._used()
        numbers = sorted({NOBODY, *used, *self.shares})
        return [self._status(number, used[number], disk_bytes) for number in numbers]

    def _used(self) -> Counter[int]:
        """Bytes of chunks in all pools, by number."""
        used: Counter[int] = Counter()
        for node in self._nodes.values():
            used.update(node.book.table.owned_bytes())
        return used

    def _status(self, number: int, used: int, disk_bytes: Mapping[str, int]) -> TenantStatus:
        label = self._labels.get(number, "")
        share = self.shares.get(number, NO_SHARE)
        return TenantStatus(
            name=self.name(label),
            tenant=label,
            pool_bytes=used,
            disk_bytes=disk_bytes.get(label, 0),
            has_quota=number in self.shares,
            guaranteed=share.guaranteed,
            most=share.most,
        )

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        assert self._labels == {number: label for label, number in self._numbers.items()}
        assert all(0 < number < MAX_OWNERS for number in self._labels), self._labels
        named = {quota.tenant for quota in self._quotas.values()} - {""}
        assert named <= self._numbers.keys(), named - self._numbers.keys()
        assert sum(share.guaranteed for share in self.shares.values()) <= MAX_GUARANTEED + 1e-6
