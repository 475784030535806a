"""What the commands' tests share."""

from __future__ import annotations

import pytest

import raykv
from tests.fixtures.commands import AnsweringCluster


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> AnsweringCluster:
    """What every command connects to."""
    made = AnsweringCluster()
    monkeypatch.setattr(raykv, "connect", lambda _: made)
    return made
