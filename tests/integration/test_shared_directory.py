"""The scheduler actor under real Ray, and nodes that only report."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec
import pytest
import ray

import raykv
from raykv.base.errors import ClusterError
from raykv.base.ids import Key, NodeId
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.protocol.columns import Keys, Source
from raykv.protocol.engine import Ask, AskAnswer
from raykv.protocol.events import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EventsMissed,
    LifeBegan,
    NodeJoined,
    NodeLost,
)
from raykv.protocol.framing import decode, encode
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.one_node import actors_of_one_node
from tests.fixtures.played_node import PlayedNode, played_actor
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.integration

NAMESPACE = "model"
POOL_BYTES = 64 << 20
NODE_EXPIRY_S = 10.0


@pytest.fixture
def head(cluster: Cluster) -> Iterator[str]:
    """Both actors, new for each test; the node's name."""
    with actors_of_one_node(cluster, POOL_BYTES) as node_id:
        yield node_id


def keys(numbers: range) -> list[Key]:
    return [key(number) for number in numbers]


def ask_as(life: int, place: str, wanted: list[Key], coming: list[Key]) -> AskAnswer:
    """What an engine at a node is answered."""
    question = Ask(
        f"engine {life}",
        life,
        NAMESPACE,
        [place],
        Keys.of(wanted),
        Keys.of(coming),
    )
    scheduler = ask.find_scheduler_actor()
    assert scheduler is not None
    return decode(ray.get(scheduler.ask.remote(encode(question)), timeout=10.0), AskAnswer)


def test_question_about_ten_thousand_chunks_is_answered_in_one_exchange(head: str) -> None:
    other = PlayedNode("other", 10_000)
    wanted = keys(range(10_000))
    assert other.store(wanted, NAMESPACE) == 10_000
    other.report()
    found = ask_as(1, head, wanted, []).sources.by_key(len(wanted))
    assert found == {at: [Source(NodeId("other"))] for at in range(len(wanted))}


def test_chunk_that_another_engine_is_storing_is_waited_for(head: str) -> None:
    other = PlayedNode("other", 8)
    other.attach(NAMESPACE)
    other.report()
    ask_as(1, "other", [], [key(1)])
    waiting = ask_as(2, head, [key(1)], [])
    assert ([*waiting.coming], waiting.sources.by_key(1)) == ([0], {})
    assert other.store([key(1)], NAMESPACE) == 1
    other.report()
    found = ask_as(2, head, [key(1)], [])
    assert [*found.coming] == []
    assert found.sources.by_key(1) == {0: [Source(NodeId("other"))]}


def test_events_are_told_in_order_and_replayed_from_any_number(head: str) -> None:
    seen = list(raykv.events(since=0, follow=False))
    assert [type(event) for event in seen] == [LifeBegan, NodeJoined]
    node = PlayedNode("other", 4)
    node.store(keys(range(2)), NAMESPACE)
    node.report()
    with node.beating():
        raykv.clear(NAMESPACE)
    more = list(raykv.events(since=seen[-1].seq, follow=False))
    kinds = [type(event) for event in more]
    assert kinds[:4] == [NodeJoined, BlockStored, BlockStored, CacheCleared]
    # What a clear makes void goes from each node.
    assert kinds[4:] == [BlockRemoved, BlockRemoved]
    assert [event.seq for event in [*seen, *more]] == list(range(1, 9))
    again = list(raykv.events(since=4, follow=False))
    # When it happened is known to about a second, and reckoned anew for each reader.
    for event, before in zip(again, more[2:], strict=True):
        assert event.time == pytest.approx(before.time, abs=1.0)
        assert msgspec.structs.replace(event, time=before.time) == before
    assert list(raykv.events(follow=False)) == []


def test_node_that_falls_silent_leaves_the_directory_within_seconds(
    head: str, cluster: Cluster
) -> None:
    node = PlayedNode("other", 4)
    node.store(keys(range(2)), NAMESPACE)
    node.report()
    (*_, last) = cluster.events(since=0, follow=False)
    place = (last.life, last.seq)
    began = time.monotonic()
    lost = next(event for event in cluster.events(since=place) if isinstance(event, NodeLost))
    assert lost.node_id == "other"
    assert time.monotonic() - began < NODE_EXPIRY_S + 3.0
    assert not cluster.snapshot().chunks


def test_reader_is_told_when_the_scheduler_actor_has_a_new_life(
    head: str, cluster: Cluster
) -> None:
    reader = cluster.events(since=0)
    first = list(islice(reader, 2))
    assert [type(event) for event in first] == [LifeBegan, NodeJoined]
    ray.kill(ask.find_scheduler_actor(), no_restart=False)
    again = list(islice(reader, 2))
    assert [type(event) for event in again] == [LifeBegan, NodeJoined]
    assert again[0].life > first[0].life


def test_reader_whom_the_log_has_outrun_is_told_and_a_snapshot_puts_it_right(
    head: str, cluster: Cluster
) -> None:
    with played_actor("other", 10_000) as node:
        for round_number in range(1, 10):
            first = round_number * 10_000
            call = node.store.remote(keys(range(first, first + 10_000)), NAMESPACE)
            assert ray.get(call, timeout=30.0) == 10_000
            ray.get(node.report.remote(), timeout=30.0)
        missed = next(cluster.events(since=1))
        assert isinstance(missed, EventsMissed)
        assert missed.missed
        snapshot = cluster.snapshot()
        assert len(snapshot.chunks) == 10_000
        assert list(cluster.events(since=snapshot.place, follow=False)) == []


def test_clearing_one_namespace_leaves_the_others(head: str, cluster: Cluster) -> None:
    with played_actor("other", 4) as node:
        ray.get(node.store.remote(keys(range(2)), NAMESPACE), timeout=10.0)
        ray.get(node.store.remote([key(9)], "foreign"), timeout=10.0)
        ray.get(node.report.remote(), timeout=10.0)
        raykv.clear(NAMESPACE)
        assert {name for _, name, _ in cluster.snapshot().chunks} == {"foreign"}
        with pytest.raises(ClusterError, match="foreig"):
            raykv.clear("nobody")
        raykv.clear()
        assert not cluster.snapshot().chunks


CREATOR = """
import sys
from raykv.cluster import ask, join as cluster
from raykv.directory.actor import scheduler_actor
from raykv.node.launch import node_actor
address, pool_bytes = sys.argv[1], int(sys.argv[2])
cluster.join(address)
node_id = cluster.resolve_node_id("")
print("ready", flush=True)
sys.stdin.readline()
scheduler = scheduler_actor(address)
node = node_actor(address, node_id, pool_bytes, 1 << 20, "")
print(scheduler._actor_id.hex(), node._actor_id.hex(), ask.describe(node, 30.0).pid)
"""


def test_creators_that_race_get_the_same_actors(cluster: Cluster, tmp_path: Path) -> None:
    cluster.down()
    script = tmp_path / "creator.py"
    script.write_text(CREATOR)
    command = [sys.executable, str(script), cluster.address, str(POOL_BYTES)]
    creators = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    try:
        for creator in creators:
            assert creator.stdout is not None
            assert creator.stdout.readline() == "ready\n"
        outputs = [
            creator.communicate(input="\n", timeout=60.0)[0] for creator in start_all(creators)
        ]
    finally:
        for creator in creators:
            creator.kill()
            creator.communicate()
    assert all(creator.returncode == 0 for creator in creators)
    assert len(set(outputs)) == 1
    wait_until(lambda: len(cluster.status().nodes) == 1, 10.0, "the NodeActor reports")
    cluster.down()


def start_all(creators: list[subprocess.Popen[str]]) -> list[subprocess.Popen[str]]:
    """All of them go on at the same time."""
    for creator in creators:
        assert creator.stdin is not None
        creator.stdin.write("\n")
        creator.stdin.flush()
    return creators
