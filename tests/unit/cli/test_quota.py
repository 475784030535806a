"""What `raykv quota set` warns of."""

from __future__ import annotations

import pytest

from raykv.cli import quota
from tests.fixtures.statuses import engine


@pytest.mark.parametrize(
    ("label", "counters", "is_said"),
    [
        ("acme", {"prompt_tokens": 1}, True),
        ("acme", {"prompt_tokens": 1, "tenants_by_server": 1}, False),
        ("acme", {}, False),
        ("salt:0123", {"prompt_tokens": 1}, False),
        ("", {"prompt_tokens": 1}, False),
    ],
)
def test_quota_of_a_tenant_that_nobody_can_be_is_warned_of(
    label: str, counters: dict[str, int], is_said: bool
) -> None:
    said = quota.nobodys(label, [engine("e", **counters)])
    assert bool(said) == is_said
    assert ("tenant_source=server" in said) == is_said
