"""What a small pool gives up goes to the disk, and a real engine loads it back, even after all that
ran has ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raykv.base.errors import NotFoundError
from raykv.base.geometry import aligned
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.protocol.status import NodeStatus
from tests.fixtures.told import told_after
from tests.fixtures.waiting import stage, wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32
CHUNK_BYTES = aligned(4 * 2 * 2 * 64 * 4 * BLOCK)
"""Four layers, keys and values, two heads of 64 floats of 4 bytes, 32 tokens."""

POOL_CHUNKS = 32
PROMPT_CHUNKS = 8
NUM_PROMPTS = 9
WRITTEN_S = 2.0


def the_prompt(seed: int) -> list[int]:
    return prompt(700 + seed, PROMPT_CHUNKS * BLOCK + 5)


def start(cluster: Cluster, model: Path, disk: Path, log: Path) -> EngineProcess:
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": POOL_CHUNKS * CHUNK_BYTES,
        "disk_path": str(disk),
        "disk_bytes": "64MiB",
        "disk_free_bytes": "1MiB",
        "client_hints": "session",
        "request_deadline_s": 30.0,
        # However fast this small model computes on this machine.
        "always_fetch": True,
    }
    return EngineProcess(model, log, settings)


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def references(
    cluster: Cluster, tiny_model: Path, disk: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[list[int]]]:
    """The answers of vLLM's own prefix hits, after which everything has ended but the disk."""
    cluster.down()
    engine = start(cluster, tiny_model, disk, tmp_path_factory.mktemp("first") / "log")
    try:
        engine.tokens([the_prompt(0)])
        wait_until(lambda: not node(cluster).disk.problem, 20.0, "the disk is open")
        answers = []
        for seed in range(NUM_PROMPTS):
            engine.tokens([the_prompt(seed)])
            answers.append(engine.tokens([the_prompt(seed)])[0])
            # What goes for the next one is to be there; it is lost where it comes too fast.
            wait_until_written(cluster)
        engine.reset()
        check_comes_from_disk(engine, cluster, answers)
        yield answers
    finally:
        engine.stop()


def wait_until_written(cluster: Cluster) -> None:
    """Until nothing has come to the disk for longer than a file and a report take."""
    last, since = -1, 0.0

    def is_quiet() -> bool:
        nonlocal last, since
        count = node(cluster).disk.num_chunks
        if count != last:
            last, since = count, time.monotonic()
        return time.monotonic() - since >= WRITTEN_S

    wait_until(is_quiet, 30.0, "the disk is written")


def node(cluster: Cluster) -> NodeStatus:
    (only,) = cluster.status().nodes
    return only


def check_comes_from_disk(
    engine: EngineProcess,
    cluster: Cluster,
    answers: list[list[int]],
    seeds: tuple[int, ...] = (0, 1, 2),
) -> None:
    """Some prompts are in no pool, the oldest ones for example, and yet nothing is computed."""
    before, read = cluster.requests().last, node(cluster).disk.chunks_read
    for seed in seeds:
        (output,) = engine.call("generate", prompts=[the_prompt(seed)])
        assert output["cached"] == PROMPT_CHUNKS * BLOCK, told_after(cluster, before)
        assert output["tokens"] == answers[seed]
        wait_until_written(cluster)
    wait_until(
        lambda: node(cluster).disk.chunks_read >= read + len(seeds) * PROMPT_CHUNKS,
        10.0,
        "it was read",
    )

    def from_disk() -> int:
        return sum(each.record.disk for each in cluster.requests(before).found)

    expected = len(seeds) * PROMPT_CHUNKS * BLOCK
    wait_until(lambda: from_disk() == expected, 10.0, "the requests tell where it came from")


@pytest.mark.support("disk", models=["llama"])
def test_what_the_pool_gave_up_comes_back_with_equal_tokens(
    cluster: Cluster, references: list[list[int]]
) -> None:
    """The work was done by the fixture; here is what can be seen afterwards."""
    assert len(references) == NUM_PROMPTS
    kept = node(cluster).disk
    assert kept.num_chunks * CHUNK_BYTES > POOL_CHUNKS * CHUNK_BYTES
    assert kept.chunks_damaged == kept.writes_failed == 0


def test_what_is_on_the_disk_is_listed_and_is_brought_to_ram_when_it_is_wanted(
    cluster: Cluster, references: list[list[int]]
) -> None:
    node_id = node(cluster).node_id
    found = cluster.lookup(tokens=the_prompt(3))
    assert found.cached_tokens == PROMPT_CHUNKS * BLOCK
    # It is old: nothing of it has been loaded since it was evicted.
    assert found.disk_tokens == found.cached_tokens
    assert [chunk.disks for chunk in found.chunks] == [[node_id]] * PROMPT_CHUNKS
    (only,) = found.nodes
    assert (only.tokens, only.tokens_with_disk) == (0, found.cached_tokens)
    listed = {chunk.key for chunk in cluster.chunks(tier="disk")}
    assert len(listed) == node(cluster).disk.num_chunks
    assert listed.issuperset(found.keys)
    (shown,) = cluster.chunk(found.keys[0])
    assert (shown.tier, shown.num_bytes) == ("disk", CHUNK_BYTES)
    brought = cluster.prefetch(found.keys, node_id)
    assert (brought.came, brought.failed) == (PROMPT_CHUNKS, 0)
    wait_until(lambda: not cluster.lookup(tokens=the_prompt(3)).disk_tokens, 10.0, "it is in RAM")
    assert {chunk.tier for chunk in cluster.chunk(found.keys[0])} == {"ram", "disk"}
    again = cluster.prefetch(found.keys, node_id)
    assert (again.came, again.there) == (0, PROMPT_CHUNKS)


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an export is, of the last prompt."""
    return tmp_path_factory.mktemp("shipped") / "export"


def test_restart_of_everything_finds_the_chunks_again_until_they_are_cleared(
    cluster: Cluster,
    references: list[list[int]],
    tiny_model: Path,
    disk: Path,
    shipped: Path,
    tmp_path: Path,
) -> None:
    told = CliRunner().invoke(app, ["down", "--keep", "--json", "--address", cluster.address])
    (kept,) = json.loads(told.output)["kept"]
    assert (kept["place"], kept["left"], kept["problem"]) == (str(disk), 0, "")
    engine = start(cluster, tiny_model, disk, tmp_path / "log")
    try:
        wait_until(lambda: bool(cluster.status().nodes), 20.0, "the node is known")
        num_chunks = NUM_PROMPTS * PROMPT_CHUNKS
        wait_until(lambda: node(cluster).disk.num_chunks >= num_chunks, 20.0, "the disk is read")
        # What only the pool had when it ended is there too.
        seeds = (0, 5, NUM_PROMPTS - 1)

        def are_known() -> bool:
            """The NodeActor tells of them some at a time, after it has read which there are."""
            try:
                found = [cluster.lookup(tokens=the_prompt(seed)).cached_tokens for seed in seeds]
            except NotFoundError:
                return False
            return found == [PROMPT_CHUNKS * BLOCK] * len(seeds)

        wait_until(are_known, 20.0, "the directory knows what is on the disk")
        check_comes_from_disk(engine, cluster, references, seeds)
        found = cluster.lookup(tokens=the_prompt(6))
        assert found.disk_tokens == found.cached_tokens == PROMPT_CHUNKS * BLOCK
        assert cluster.export_chunks(shipped.parent / "6", keys=found.keys).chunks == PROMPT_CHUNKS
        keys = cluster.lookup(tokens=the_prompt(NUM_PROMPTS - 1)).keys
        assert cluster.export_chunks(shipped, keys=keys).chunks == PROMPT_CHUNKS
        cluster.clear()
        assert list(disk.glob("*/floors.json")), "a clearing that has returned outlives all"
        wait_until(lambda: not list(disk.glob("*/*.safetensors")), 10.0, "the files go")
        engine.reset()
        assert engine.cached([the_prompt(0)]) == [0]
    finally:
        engine.stop()


def test_exported_prompt_is_loaded_in_another_cluster(
    cluster: Cluster, references: list[list[int]], tiny_model: Path, shipped: Path, tmp_path: Path
) -> None:
    """Another one is the same with new actors, which know nothing, and without the disk."""
    last = NUM_PROMPTS - 1
    cluster.down()
    pool_bytes = POOL_CHUNKS * CHUNK_BYTES
    cluster.up(pool_bytes=pool_bytes)
    found = cluster.import_chunks(shipped)
    assert (found.came, found.failed) == (PROMPT_CHUNKS, 0)
    wait_until(lambda: node(cluster).chunks == PROMPT_CHUNKS, 10.0, "they are reported")
    settings = {"ray_address": cluster.address, "pool_bytes": pool_bytes}
    engine = EngineProcess(tiny_model, tmp_path / "log", settings)
    try:
        (output,) = engine.call("generate", prompts=[the_prompt(last)])
        assert output["cached"] == PROMPT_CHUNKS * BLOCK
        assert output["tokens"] == references[last]
    finally:
        engine.stop()


def test_session_is_brought_from_the_disk_before_it_goes_on(
    cluster: Cluster,
    references: list[list[int]],
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """With a disk of its own: what it takes to have the session evicted would fill the other."""
    cluster.down()
    engine = start(cluster, tiny_model, tmp_path / "disk", tmp_path / "log")
    try:
        params = {"raykv_session": "agent", "raykv_session_over": True}
        engine.call("generate", prompts=[the_prompt(4)], params=params)
        others = count(5)
        # That a request has ended is told with the next step of the engine.
        engine.tokens([the_prompt(next(others))])
        wait_until(lambda: stage(cluster, "agent") == "over", 10.0, "it is told")
        while cluster.lookup(tokens=the_prompt(4)).disk_tokens < PROMPT_CHUNKS * BLOCK:
            # It is over, and goes first.
            engine.tokens([the_prompt(next(others))])
        known = cluster.session("agent").status()
        assert (known.in_pools, sum(known.on_disks.values())) == ({}, PROMPT_CHUNKS)
        came = 0

        def is_brought() -> bool:
            """On a busy machine a disk may be too slow for a part."""
            nonlocal came
            brought = cluster.session("agent").prefetch()
            came += brought.came
            return brought.failed == 0

        wait_until(is_brought, 30.0, "the session is brought")
        assert came == PROMPT_CHUNKS
        wait_until(lambda: not cluster.lookup(tokens=the_prompt(4)).disk_tokens, 10.0, "in RAM")
        engine.tokens([the_prompt(next(others))])
        engine.reset()
        before = cluster.requests().last
        (output,) = engine.call("generate", prompts=[the_prompt(4)], params=params)
        assert output["cached"] == PROMPT_CHUNKS * BLOCK, told_after(cluster, before)
        assert output["tokens"] == references[4]
    finally:
        engine.stop()
