"""Block managers with either table."""

from __future__ import annotations

import pytest

from tests.fixtures.directory.tables import TABLES, use_table


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    use_table(monkeypatch, request.param)
