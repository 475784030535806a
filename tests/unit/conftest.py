"""Hypothesis without deadlines: they count what other programs take of a busy machine. And no Ray:
an earlier life of the scheduler actor has left nothing.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("unit", deadline=None)
settings.load_profile("unit")

ASYNC_TEST_S = 30.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Give a test that is a coroutine its own event loop, and a deadline."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, ASYNC_TEST_S))
    return True


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raykv.cluster.bequest.entries", lambda: iter(()))
        patch.setattr("raykv.cluster.bequest.get", lambda _name: None)
        patch.setattr("raykv.cluster.bequest.put", lambda _name, _value: None)
        yield
