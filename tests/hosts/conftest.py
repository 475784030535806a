"""Hosts for the tests here, where the machine can have them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raykv.lab.hosts.network import Network, networked, objection


@pytest.fixture(scope="session", autouse=True)
def _able() -> None:
    if reason := objection():
        pytest.skip(reason)


@pytest.fixture
def network() -> Iterator[Network]:
    """Without hosts."""
    with networked() as made:
        yield made
