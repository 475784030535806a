"""Whose processes are Ray's on this host; what plays a raylet is a shell with its name."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from raykv.base.errors import ClusterError
from raykv.cluster import join as cluster
from tests.fixtures.ports import free_port

STRANGER = 1234
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root has processes of other users")


@contextmanager
def raylet(address: str, node_id: str, uid: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process of that user which looks like a raylet, in a process group of its own."""
    arguments = ["raylet", "-c", "read line", f"--gcs-address={address}", f"--node-id={node_id}"]
    process = subprocess.Popen(
        arguments,
        executable="/bin/sh",
        stdin=subprocess.PIPE,
        user=uid if uid != os.getuid() else None,
        process_group=0,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def _no_named_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def address() -> str:
    return f"127.0.0.1:{free_port()}"


def test_raylet_of_this_user_is_a_cluster_and_ends_with_it() -> None:
    here = address()
    with raylet(here, "own", os.getuid()):
        assert here in cluster.running_clusters()
        (found,) = (each for each in cluster.raylets() if each.address == here)
        assert found.node_id == "own"
        assert found.is_own


@needs_root
def test_raylet_of_another_user_is_no_cluster_no_successor_and_is_not_stopped() -> None:
    here = address()
    with raylet(here, "own", os.getuid()), raylet(here, "fake", STRANGER) as fake:
        (own,) = (each for each in cluster.raylets() if each.address == here)
        assert own.node_id == "own"
        assert cluster.successor(own, cluster.raylets()) is None
        there = [each for each in cluster.everybodys_raylets() if each.address == here]
        (foreign,) = (each for each in there if not each.is_own)
        assert foreign.node_id == "fake"
        cluster.stop_started(here)
        with pytest.raises(subprocess.TimeoutExpired):
            fake.wait(0.0)
        assert psutil.Process(fake.pid).status() != psutil.STATUS_ZOMBIE


@needs_root
def test_clusters_of_other_users_are_named_and_not_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cluster, "running_clusters", list)
    first, second = address(), address()
    with raylet(first, "a", STRANGER), raylet(second, "b", STRANGER):
        assert cluster.find_cluster(None) is None
    assert all(each in caplog.text for each in (first, second, "ray_address"))


@needs_root
def test_cluster_of_another_user_may_be_named() -> None:
    here = address()
    with raylet(here, "a", STRANGER):
        assert cluster.find_cluster(here) == here
        with pytest.raises(ClusterError, match="can be reached"):
            cluster.check_reachable(here)
