"""Pools ahead of time, transfers and pins with real actors on two Ray nodes; no engine's vLLM."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import xxhash
from typer.testing import CliRunner

from raykv.base.errors import ChunkFileError, ClusterError, SettingError
from raykv.base.ids import Namespace, Stamp
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.cluster import ask
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from raykv.node.disk.chunk_file import ChunkBytes, write_chunks
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import Read, ReadReply
from raykv.protocol.events import LifeBegan, NodeJoined
from raykv.protocol.framing import decode, encode
from raykv.protocol.operator import ClearOrder, OrderState
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.played_engine import PlayedEngine
from tests.fixtures.waiting import wait_until, wait_until_quiet

pytestmark = pytest.mark.integration

POOL_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
NUM_BLOCKS = 64
NAMESPACE = Namespace("model")
PATIENCE_S = 30.0


def hexes(*numbers: int) -> list[str]:
    return [key(number).hex() for number in numbers]


class Engine(PlayedEngine):
    """It stores chunks by their numbers."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id, "played", NAMESPACE, CHUNK_BYTES, NUM_BLOCKS)

    def put(self, *numbers: int, tenant: str = "") -> int:
        """How many of them are there."""
        return self.store([key(number) for number in numbers], tenant)


@dataclass
class Nodes:
    """A cluster with the pools of two nodes, and the engine on the first."""

    cluster: Cluster
    first: str
    second: str
    engine: Engine


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module", autouse=True)
def without_metrics() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYKV_METRICS_PORT", "off")
        yield


@pytest.fixture(scope="module")
def up(cluster: Cluster) -> Iterator[str]:
    """`raykv up` on the one node; its id."""
    cluster.down()
    address = cluster.address
    (made,) = json.loads(run("up", "--pool-bytes", "32MiB", "--json", "--address", address))
    assert made["is_new"]
    assert made["prefaulted_bytes"] == made["pool_bytes"] == POOL_BYTES
    yield made["node_id"]
    cluster.down()


@pytest.fixture(scope="module")
def second(cluster: Cluster, up: str) -> Iterator[LocalNode]:
    """It joins after `up`."""
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def nodes(cluster: Cluster, up: str, second: LocalNode) -> Iterator[Nodes]:
    wait_until(lambda: len(cluster.status().nodes) == 2, PATIENCE_S, "both nodes report")
    engine = Engine(up)
    yield Nodes(cluster, up, second.node_id, engine)
    engine.end()


def held_on(cluster: Cluster, node_id: str) -> set[int]:
    return {
        int.from_bytes(name[:32], "big")
        for node, _, name in cluster.snapshot().chunks
        if node == node_id
    }


def bytes_on(node_id: str, number: int) -> bytes:
    """Of a chunk in a node's pool, as the node itself reads them."""
    actor = ask.find_node_actor(node_id)
    name = NAMESPACE, Keys.of([key(number)]), Numbers.of([CHUNK_BYTES])
    request = Read(*name)
    raw, data = ray.get(actor.read.remote(encode(request)), timeout=10.0)  # type: ignore[union-attr]
    assert decode(raw, ReadReply).refusals == bytes(1)
    return bytes(data)


def test_up_changes_nothing_the_second_time(cluster: Cluster, up: str) -> None:
    pid = ask.describe(ask.find_node_actor(up), 10.0).pid
    output = run("up", "--pool-bytes", "64MiB", "--address", cluster.address)
    assert "was there already" in output
    assert "has a pool of 32.0 MiB already" in output
    assert ask.describe(ask.find_node_actor(up), 10.0).pid == pid
    run("up", "--pool-bytes", "32MiB", "--address", cluster.address)


@pytest.mark.extended
def test_up_heeds_the_settings_of_metrics_on_later_nodes_too(nodes: Nodes) -> None:
    status = nodes.cluster.status()
    assert [node.metrics for node in status.nodes] == ["", ""]
    assert status.metrics == ""


def test_up_names_what_no_node_matches(cluster: Cluster, up: str) -> None:
    with pytest.raises(ClusterError, match="no live node of the cluster matches 'TPU'"):
        cluster.up(on="TPU")


def test_node_that_joins_after_up_gets_its_pool(nodes: Nodes) -> None:
    known = {node.node_id: node.pool_bytes for node in nodes.cluster.status().nodes}
    assert known == {nodes.first: POOL_BYTES, nodes.second: POOL_BYTES}


def test_prefetched_chunks_have_the_same_bytes_on_the_other_node(nodes: Nodes) -> None:
    assert nodes.engine.put(*range(6)) == 6
    wait_until(lambda: held_on(nodes.cluster, nodes.first) >= set(range(6)), 10, "stored")
    told: list[int] = []
    result = nodes.cluster.prefetch(
        hexes(*range(6), 99), nodes.second[:12], watch=lambda so_far: told.append(so_far.came)
    )
    assert (result.came, result.nowhere, result.failed) == (6, 1, 1)
    assert result.num_bytes == 6 * CHUNK_BYTES
    assert told == [6]
    wait_until(lambda: held_on(nodes.cluster, nodes.second) == set(range(6)), 10, "reported")
    for number in range(6):
        assert bytes_on(nodes.second, number) == nodes.engine.block(number)
    again = nodes.cluster.prefetch(hexes(*range(6)), nodes.second)
    assert (again.there, again.came, again.failed) == (6, 0, 0)


def test_moved_chunks_are_on_the_other_node_only(nodes: Nodes) -> None:
    assert nodes.engine.put(10, 11) == 2
    wait_until(lambda: held_on(nodes.cluster, nodes.first) >= {10, 11}, 10, "stored")
    output = run("move", *hexes(10, 11), "--to", nodes.second)
    assert "2 of 2 chunks came" in output
    assert "2 copies were given up elsewhere" in output
    assert not held_on(nodes.cluster, nodes.first) & {10, 11}
    for number in (10, 11):
        assert bytes_on(nodes.second, number) == nodes.engine.block(number)
    run("prefetch", *hexes(98), "--to", nodes.second, code=1)


def test_pinned_chunks_outlive_eviction_and_the_scheduler_actor(nodes: Nodes) -> None:
    cluster, engine = nodes.cluster, nodes.engine
    engine.put(20, 21, 22)
    wait_until(lambda: held_on(cluster, nodes.first) >= {20, 21, 22}, 10, "stored")
    said = run("pin", "add", *hexes(20, 21, 30), "--id", "kept")
    assert "2 of 3 chunks are stored and kept" in said
    with pytest.raises(ClusterError, match=r"pins take 2.0 MiB of the 8.0 MiB"):
        cluster.pin(hexes(*range(6), 22))
    pressure(engine, 1000)
    assert held_on(cluster, nodes.first) & {20, 21, 22} == {20, 21}
    life = cluster.status().life
    ray.kill(ask.find_scheduler_actor(), no_restart=False)

    def is_back() -> bool:
        try:
            status = cluster.status()
        except ClusterError:
            return False
        return status.life > life and held_on(cluster, nodes.first) >= {20, 21}

    wait_until(is_back, 60.0, "the scheduler actor is back and knows what the nodes have")
    assert json.loads(run("pin", "ls", "--json"))["pins"][0]["held_chunks"] == 2

    pressure(engine, 2000)
    assert held_on(cluster, nodes.first) & {20, 21} == {20, 21}
    assert "kept" in run("pin", "ls")
    run("pin", "rm", "kept")
    with pytest.raises(ClusterError, match="there is no pin 'kept'"):
        cluster.unpin("kept")


def flood(engine: Engine, numbers: range) -> None:
    """The noisy tenant stores one chunk after the other."""
    for number in numbers:

        def is_stored(number: int = number) -> bool:
            return engine.put(number, tenant="noisy") == 1

        wait_until(is_stored, 10, "a slot is free")


def test_tenant_keeps_what_it_is_guaranteed_while_another_one_floods(nodes: Nodes) -> None:
    cluster, engine = nodes.cluster, nodes.engine
    cluster.clear()
    assert "25% of each pool guaranteed" in run("quota", "set", "quiet", "--guaranteed", "0.25")
    run("quota", "set", "noisy", "--most", "0.5")
    hers = set(range(300, 308))
    assert engine.put(*sorted(hers), tenant="quiet") == len(hers)
    wait_until(lambda: held_on(cluster, nodes.first) >= hers, 10, "stored")
    flood(engine, range(4000, 4120))
    assert held_on(cluster, nodes.first) >= hers
    listed = {each["name"]: each for each in json.loads(run("quota", "ls", "--json"))}
    assert listed["quiet"]["pool_bytes"] == len(hers) * CHUNK_BYTES
    assert 0 < listed["noisy"]["pool_bytes"] <= POOL_BYTES // 2 + 4 * CHUNK_BYTES
    assert "quiet" in run("status")
    assert "removed quiet" in run("quota", "rm", "quiet", "noisy")
    with pytest.raises(ClusterError, match="there is no quota 'quiet'; there are none"):
        cluster.quotas.remove("quiet")
    with pytest.raises(ClusterError, match=r"all together at most 0\.75"):
        cluster.quotas.set("greedy", guaranteed=0.9)


def test_cleared_chunks_stay_away_when_the_scheduler_actor_dies_and_a_node_has_not_heard(
    nodes: Nodes,
) -> None:
    """The node is frozen meanwhile, and it is the first to tell the new actor what it has."""
    cluster, engine = nodes.cluster, nodes.engine
    engine.put(40, 41)
    wait_until(lambda: held_on(cluster, nodes.first) >= {40, 41}, 10, "stored")
    cluster.prefetch(hexes(40, 41), nodes.second)
    wait_until(lambda: held_on(cluster, nodes.second) >= {40, 41}, 10, "fetched")
    pids = {node.node_id: node.pid for node in cluster.status().nodes}
    scheduler = ask.find_scheduler_actor()
    assert scheduler is not None
    with frozen(pids[nodes.second]), frozen(pids[nodes.first]):
        order = encode(ClearOrder("all"))
        ray.get(scheduler.order.remote(order), timeout=10.0)

        def is_kept() -> bool:
            raw = ray.get(scheduler.order_state.remote("all"), timeout=10.0)
            return decode(raw, OrderState).orders is not None

        wait_until(is_kept, 10, "kept")
        life = cluster.status().life
        ray.kill(scheduler, no_restart=False)

    def are_empty() -> bool:
        try:
            status = cluster.status()
        except ClusterError:
            return False
        there = {node.node_id: node.used_bytes for node in status.nodes}
        return status.life > life and there == {nodes.first: 0, nodes.second: 0}

    wait_until(are_empty, 60.0, "both nodes have heard of the clearing")
    told = list(cluster.events(since=0, follow=False))
    assert [type(event) for event in told] == [LifeBegan, NodeJoined, NodeJoined]
    assert engine.put(42) == 1, "what is new is stored"
    wait_until(lambda: held_on(cluster, nodes.first) == {42}, 10, "and nothing else is there")


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pressure(engine: Engine, first: int) -> None:
    """Store more than the pool holds."""
    stored = 0

    def store_some() -> bool:
        nonlocal stored
        stored += engine.put(*range(first + stored, first + stored + 8))
        return stored >= 48

    wait_until(store_some, 60.0, "48 chunks are stored into a pool of 32")


def test_exported_chunks_are_imported_with_the_same_bytes(nodes: Nodes, tmp_path: Path) -> None:
    cluster, engine = nodes.cluster, nodes.engine
    wanted = list(range(200, 206))
    assert engine.put(*wanted) == len(wanted)
    wait_until(lambda: held_on(cluster, nodes.first) >= set(wanted), 10, "stored")
    cluster.pin(hexes(*wanted[:2]), pin_id="shipped")
    folder, one, pinned = tmp_path / "all", tmp_path / "one.safetensors", tmp_path / "pinned"
    told = json.loads(run("export", str(folder), *hexes(*wanted), "--json"))
    assert (told["chunks"], told["asked"], told["files"]) == (6, 6, 1)
    assert cluster.export_chunks(one, keys=hexes(200)).chunks == 1
    assert cluster.export_chunks(pinned, pin_id="shipped").chunks == 2
    assert cluster.export_chunks(tmp_path / "hot", most_bytes=3 * CHUNK_BYTES).chunks == 3
    cluster.unpin("shipped")
    with pytest.raises(SettingError, match="export to another place"):
        cluster.export_chunks(folder)
    cluster.clear()
    wait_until(lambda: not held_on(cluster, nodes.first), 10, "cleared")
    found = cluster.import_chunks(folder, nodes.second)
    assert (found.came, found.failed, found.num_bytes) == (6, 0, 6 * CHUNK_BYTES)
    wait_until(lambda: held_on(cluster, nodes.second) == set(wanted), 10, "reported")
    for number in wanted:
        assert bytes_on(nodes.second, number) == engine.block(number)
    assert "6 were there" in run("import", str(folder), "--to", nodes.second)


def test_import_of_more_than_a_pool_holds_brings_the_first_chunks_and_says_so(
    nodes: Nodes, tmp_path: Path
) -> None:
    nodes.cluster.clear()
    data = np.arange(CHUNK_BYTES, dtype=np.uint8)
    checksum = xxhash.xxh3_64_intdigest(data.data)
    numbers = range(400, 440)
    chunks = [ChunkBytes(key(number), Stamp(1, 1), checksum, data) for number in numbers]
    path = tmp_path / "large.safetensors"
    write_chunks(path, NAMESPACE, chunks)
    text = run("import", str(path), "--to", nodes.second, code=1)
    assert "32 of 40 chunks came" in text
    assert "there was no room for 8" in text
    first = set(numbers[:32])
    wait_until(lambda: held_on(nodes.cluster, nodes.second) == first, 10, "the first are there")


def test_damaged_export_brings_no_wrong_byte(nodes: Nodes, tmp_path: Path) -> None:
    cluster, engine = nodes.cluster, nodes.engine
    assert engine.put(210, 211) == 2
    wait_until(lambda: held_on(cluster, nodes.first) >= {210, 211}, 10, "stored")
    path = tmp_path / "x.safetensors"
    cluster.export_chunks(path, keys=hexes(210, 211))
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    cluster.clear()
    found = cluster.import_chunks(path, nodes.second)
    assert (found.came, found.failed, found.refusals) == (1, 1, {"CORRUPT": 1})
    with pytest.raises(SettingError, match="no file of chunks"):
        cluster.import_chunks(tmp_path / "nowhere")
    path.write_bytes(raw[:100])
    with pytest.raises(ChunkFileError, match="cut short"):
        cluster.import_chunks(path)


def test_down_that_keeps_ends_nothing_where_it_would_lose_chunks(nodes: Nodes) -> None:
    def held() -> dict[int, int]:
        return {node.pid: node.chunks for node in nodes.cluster.status().nodes}

    wait_until_quiet(held, 10.0, "what was imported is reported")
    before = held()
    with pytest.raises(SettingError, match=r"nothing was ended.*neither disk_path nor pool_path"):
        run("down", "--keep", "--address", nodes.cluster.address)
    assert held() == before
    assert any(before.values())


def test_down_leaves_no_wish_behind(nodes: Nodes) -> None:
    nodes.engine.end()
    run("down")
    assert not ask.named_actors()


def test_up_says_which_node_gives_no_pool(cluster: Cluster, second: LocalNode) -> None:
    """What no machine has."""
    arguments = ("--pool-bytes", "8TiB", "--node", second.node_id, "--json")
    (node,) = json.loads(run("up", *arguments, "--address", cluster.address, code=1))
    assert node["node_id"] == second.node_id
    assert "8.0 TiB" in node["error"] or str(8 << 40) in node["error"]
    cluster.down()


def lives_again(node_id: str, before: int) -> bool:
    try:
        return ask.describe(ask.find_node_actor(node_id), PATIENCE_S).life != before
    except ClusterError:
        return False


def test_node_actor_is_on_its_node_in_each_of_its_lives(
    cluster: Cluster, up: str, second: LocalNode
) -> None:
    """Ray's own placement would be right once in a while: hence both nodes, and two lives."""

    def here(_actor: object) -> str:
        return str(ray.get_runtime_context().get_node_id())

    run("up", "--pool-bytes", "32MiB", "--address", cluster.address)
    for life in range(2):
        for node in (up, second.node_id):
            actor = ask.find_node_actor(node)
            assert actor is not None
            assert ray.get(actor.__ray_call__.remote(here), timeout=PATIENCE_S) == node
            if life == 0:
                life = ask.describe(actor, PATIENCE_S).life
                ray.kill(actor, no_restart=False)
                wait_until(partial(lives_again, node, life), PATIENCE_S, "it lives again")
