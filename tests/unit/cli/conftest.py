"""What the commands' tests share."""

from __future__ import annotations

import pytest

import raykv
from tests.fixtures.commands import PlayedCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> PlayedCluster:
    """What every command connects to."""
    made = PlayedCluster()
    monkeypatch.setattr(raykv, "connect", lambda _: made)
    return made
