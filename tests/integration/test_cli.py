"""The command line against a real cluster; RayKV's actors without an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import ray
from typer.testing import CliRunner

from raykv.actors import cluster as clusters
from raykv.actors.discovery import default_path
from raykv.cli import app
from raykv.client import Cluster
from raykv.errors import ClusterError, MessageError
from raykv.messages import (
    PROTOCOL_VERSION,
    AttachEngine,
    EngineAttached,
    SyncRequest,
    decode,
    encode,
)
from raykv.miss_types import MissRecord
from tests.one_node import actors_of_one_node
from tests.waiting import wait_until

pytestmark = pytest.mark.integration

POOL_BYTES = 64 << 20


@pytest.fixture(scope="module")
def running(cluster: Cluster) -> Iterator[Cluster]:
    """Both actors, as an engine's start makes them."""
    with actors_of_one_node(cluster, POOL_BYTES):
        yield cluster


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_status_says_what_is_missing_without_raykv(cluster: Cluster) -> None:
    cluster.down()
    with pytest.raises(ClusterError, match="RayKV does not run in the Ray cluster at"):
        cluster.status()


def test_status_shows_node_and_pool(running: Cluster) -> None:
    wait_until(
        lambda: running.status().nodes[0].prefaulted_bytes == POOL_BYTES, 20.0, "prefaulting ends"
    )
    data = json.loads(run("status", "--json"))
    assert data["nodes"][0]["pool_bytes"] == POOL_BYTES
    assert data["paused"] is False
    text = run("status")
    assert "64.0 MiB" in text
    assert "100 %" in text


def test_targets_of_prometheus_are_beside_rays_own(running: Cluster) -> None:
    path = default_path()
    assert path is not None
    targets = [running.status().metrics, running.status().nodes[0].metrics]
    assert all(targets)

    def are_told() -> bool:
        return path.exists() and json.loads(path.read_text())[0]["targets"] == targets

    wait_until(are_told, 20.0, f"{path} has both")
    assert path.parent.name.startswith("session_")


def test_pause_is_seen_and_outlives_scheduler_actor(running: Cluster) -> None:
    run("pause")
    assert running.status().paused
    # Every NodeActor hears of it with its next report, and tells the actor's next life.
    paused_at = time.monotonic()
    wait_until(
        lambda: running.status().nodes[0].age_s < time.monotonic() - paused_at - 0.1,
        10.0,
        "a report after the pause",
    )
    epoch = running.status().epoch
    ray.kill(ray.get_actor("scheduler", namespace="raykv"), no_restart=False)

    def is_back() -> bool:
        try:
            status = running.status()
        except ClusterError:
            return False
        return status.epoch > epoch and bool(status.nodes)

    wait_until(is_back, 60.0, "the scheduler actor is back")
    assert running.status().paused
    run("resume")
    assert not running.status().paused


def test_request_that_has_ended_is_explained_by_the_beginning_of_its_id(running: Cluster) -> None:
    scheduler = clusters.find_scheduler_actor()
    assert scheduler is not None
    node_id = clusters.resolve_node_id("")
    hello = AttachEngine(PROTOCOL_VERSION, "played", node_id, "ns", "model", 1, {0: 4096})
    attached = decode(ray.get(scheduler.attach.remote(encode(hello)), timeout=10), EngineAttached)
    assert not attached.error
    record = MissRecord("cmpl-7-0-abcd", 100, 30, 20, {"evicted": 50}, b"key" + bytes(4))
    message = SyncRequest("played", attached.epoch, 1, finished=[record])
    ray.get(scheduler.sync.remote(encode(message)), timeout=10)
    (row,) = json.loads(run("why-miss", "cmpl-7", "--json"))
    assert row["missed_tokens"] == {"evicted": 50}
    assert row["node_id"] == node_id
    assert "computed: evicted" in run("why-miss", "cmpl-7-0-abcd")
    with pytest.raises(ClusterError, match="among the latest 1 that have ended"):
        running.why_miss("cmpl-8")
    ray.get(scheduler.detach.remote("played"), timeout=10)


def test_creators_that_race_get_one_actor_each(running: Cluster) -> None:
    node_id = clusters.resolve_node_id("")
    before = running.status().nodes[0].pid
    for _ in range(3):
        clusters.node_actor(running.address, node_id, 2 * POOL_BYTES, 1 << 20, "")
    actor = clusters.find_node_actor(node_id)
    described = clusters.describe(actor, 10.0)
    assert described.pid == before
    assert described.pool_bytes == POOL_BYTES


def test_engine_of_other_protocol_is_refused_by_name(running: Cluster) -> None:
    scheduler = clusters.find_scheduler_actor()
    assert scheduler is not None
    hello = AttachEngine(
        PROTOCOL_VERSION + 1, "e", clusters.resolve_node_id(""), "ns", "model", 1, {0: 4096}
    )
    answer = decode(ray.get(scheduler.attach.remote(encode(hello)), timeout=10), EngineAttached)
    assert str(PROTOCOL_VERSION) in answer.error
    assert str(PROTOCOL_VERSION + 1) in answer.error


def test_garbage_message_leaves_scheduler_actor_alive(running: Cluster) -> None:
    scheduler = clusters.find_scheduler_actor()
    assert scheduler is not None
    with pytest.raises(MessageError):
        ray.get(scheduler.sync.remote(b"\xff\x00nonsense"), timeout=10)
    assert running.status().nodes


def test_unknown_node_id_is_refused_with_live_ones(running: Cluster) -> None:
    with pytest.raises(ClusterError, match="no live node of the cluster"):
        clusters.resolve_node_id("ab" * 28)


def test_down_ends_actors_and_frees_pool(running: Cluster) -> None:
    pid = running.status().nodes[0].pid
    assert "ended 2 actors" in run("down")
    import psutil

    wait_until(lambda: not psutil.pid_exists(pid), 20.0, "the NodeActor's process ends")
