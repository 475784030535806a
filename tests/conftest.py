"""Fixtures that cost seconds: one Ray cluster and one tiny model for the whole session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from raykv.base import guard
from raykv.lab.bench.engine import EngineProcess
from tests.fixtures.forked_engine import forked, import_ahead
from tests.fixtures.not_run import FOLDER, Noted

if TYPE_CHECKING:
    # A machine for the tests marked `gpu` may have no Ray.
    from raykv.client.cluster import Cluster


def pytest_configure(config: pytest.Config) -> None:
    """Nothing of the user's surroundings may leak into the tests."""
    if folder := os.environ.get(FOLDER):
        config.pluginmanager.register(Noted(Path(folder)))
    for name in list(os.environ):
        if name.startswith("RAYKV_"):
            del os.environ[name]
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    # A test that asks often for something new is to find it stored.
    os.environ["RAYKV_STOP_UNUSED_STORES"] = "false"


@pytest.fixture(autouse=True)
def _hooks_swallow_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hooks swallow exceptions, and a test of them could not fail: only those marked for it may.

    One that is marked, and has no failing hook, is not the test that it says it is.
    """
    before = guard.failures.copy()
    yield
    swallowed = guard.failures - before
    if request.node.get_closest_marker("expects_failures") is None:
        assert not swallowed, f"hooks have failed, and hidden it: {dict(swallowed)}"
    else:
        assert swallowed, "no hook has failed: take the marker expects_failures away"


@pytest.fixture(scope="session", autouse=True)
def _forked_engines() -> None:
    """Imports are most of an engine's start, and the same for all."""
    EngineProcess.launch = forked


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node, started as an engine without a cluster would start it."""
    from raykv.cluster import join as cluster

    joined = cluster.ensure_cluster("local")
    import_ahead()
    assert joined.started, joined
    yield joined.address
    cluster.stop_started(joined.address)


@pytest.fixture(scope="session")
def cluster(ray_address: str) -> Iterator[Cluster]:
    """This process as a client of the cluster."""
    from raykv.client.cluster import connect

    with connect(ray_address) as connected:
        yield connected


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded random Llama of four layers."""
    pytest.importorskip("vllm")
    from raykv.lab.demo.tiny_llama import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("models") / "tiny")
