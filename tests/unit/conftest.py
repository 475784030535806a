"""Hypothesis without deadlines: they count what other programs take of a busy machine. And no Ray:
an earlier life of the scheduler actor has left nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raykv.cluster.bequest.entries", lambda: iter(()))
        patch.setattr("raykv.cluster.bequest.get", lambda _name: None)
        patch.setattr("raykv.cluster.bequest.put", lambda _name, _value: None)
        yield
