"""Tenants' shares of pools: set, ended, listed."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raykv.base.errors import NotFoundError, SettingError
from raykv.base.tenants import MAX_LABEL, OTHERS, is_label, salt_label
from raykv.protocol.operator import EndQuota, Quota, TenantStatus

if TYPE_CHECKING:
    from raykv.client.scheduler import Scheduler


@dataclass(frozen=True)
class Quotas:
    """Tenants of a cluster and their shares, as `raykv.connect().quotas`.

    All methods raise a `ClusterError` if RayKV does not run there, or does not answer.
    """

    scheduler: Scheduler

    def set(
        self,
        name: str,
        *,
        guaranteed: float = 0.0,
        most: float = 1.0,
        salt: str = "",
        tenant: str = "",
    ) -> None:
        """Give a tenant a share of every pool and disk, in place of the one that it had.

        Args:
            name: what people call it; "others" are all tenants without a quota, together.
            guaranteed: the part that others can't take from it, from 0 to 1.
            most: the part that it can take.
            salt: the `cache_salt` of its requests; it does not leave this process.
            tenant: else its label, if that is not `name`.

        Raises:
            SettingError: an argument is invalid.
            ClusterError: too much would be guaranteed.
        """
        quota = quota_of(name, guaranteed, most, salt, tenant)
        self.scheduler.order(quota, refused="the quota was not set")

    def remove(self, name: str) -> None:
        """End a quota: its tenant is one of the others again.

        Raises:
            NotFoundError: there is no such quota.
        """
        known = sorted(each.name for each in self.tenants() if each.has_quota)
        if name not in known:
            there = ", ".join(known) or "none"
            raise NotFoundError(f"there is no quota {name!r}; there are {there}")
        self.scheduler.order(EndQuota(uuid.uuid4().hex, name))

    def tenants(self) -> list[TenantStatus]:
        """Tenants that have a quota, and others that have chunks in pools."""
        return self.scheduler.status().tenants


def quota_of(name: str, guaranteed: float, most: float, salt: str, tenant: str) -> Quota:
    """What a cluster is asked for; see `Quotas.set`.

    Raises:
        SettingError: an argument is invalid.
    """
    if salt and tenant:
        raise SettingError("a tenant is named by its cache_salt or by its label, not by both")
    if not is_label(name) and name != OTHERS:
        raise SettingError(
            f"the name {name!r} is not of 1 to {MAX_LABEL} characters that can be shown"
        )
    if name == OTHERS and (salt or tenant):
        raise SettingError(f"{OTHERS!r} are all without a quota: choose another name")
    if not 0 <= guaranteed <= most <= 1:
        raise SettingError(
            f"guaranteed={guaranteed:g} and most={most:g} must be from 0 to 1, the second one "
            "no less than the first"
        )
    label = salt_label(salt) or tenant or ("" if name == OTHERS else name)
    if label and not is_label(label):
        raise SettingError(f"{label!r} is no tenant's label: see `raykv quota ls`")
    return Quota(uuid.uuid4().hex, name, label, guaranteed, most)
