"""A node's pool at which an engine of one rank is."""

from __future__ import annotations

import pytest

from tests.fixtures.node.owned_pool import OwnedPool


@pytest.fixture
def pool() -> OwnedPool:
    made = OwnedPool()
    made.hello()
    return made
