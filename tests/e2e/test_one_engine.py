"""One real vLLM engine in its usual three processes, with its KV cache in a NodeActor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.bench.engine import EngineProcess
from raykv.client import Cluster
from raykv.errors import ClusterError
from raykv.messages import NodeStatus
from tests.processes import freeze
from tests.prompts import prompt
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32
"""Tokens per block, and with `blocks_per_chunk` 1 per chunk."""

LOAD_DEADLINE_S = 1.0

RECOVERY_DEADLINE_S = 60.0
"""Ray starts a killed actor again after 1 to 4 s on a quiet machine."""


@pytest.fixture(scope="module")
def engine(
    cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    cluster.down()
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": "256MiB",
        "load_deadline_s": LOAD_DEADLINE_S,
        "flush_deadline_s": LOAD_DEADLINE_S,
        "cancel_grace_s": 0.5,
    }
    log = tmp_path_factory.mktemp("engine") / "log"
    process = EngineProcess(tiny_model, log, settings, multiprocess=True)
    yield process
    process.stop()


def node(cluster: Cluster) -> NodeStatus:
    (only,) = cluster.status().nodes
    return only


def store(engine: EngineProcess, cluster: Cluster, prompts: list[list[int]]) -> list[list[int]]:
    """Have `prompts` computed and stored, vLLM's own cache emptied; returns vLLM's own tokens.

    The reference is vLLM's own prefix hit: in float32 it is what a load must reproduce.
    """
    engine.tokens(prompts)
    reference = engine.tokens(prompts)
    settle(engine, cluster)
    return reference


def settle(engine: EngineProcess, cluster: Cluster) -> None:
    """Wait until nothing is being stored, then drop vLLM's own cache."""
    seen = [-1]

    def unchanged() -> bool:
        before, seen[0] = seen[0], node(cluster).bytes_stored
        return before == seen[0]

    wait_until(unchanged, 20.0, "stores come to an end")
    engine.reset()


def loads_again(engine: EngineProcess, tokens: list[int], expected: list[int]) -> bool:
    """One round of store and load; True if the load came out of RayKV. Tokens are always right."""
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    before = engine.call("counters").get("vllm:external_prefix_cache_hits", 0.0)
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    return bool(engine.call("counters").get("vllm:external_prefix_cache_hits", 0.0) > before)


@pytest.mark.parametrize("length", [8 * BLOCK - 1, 8 * BLOCK, 8 * BLOCK + 1])
def test_load_gives_tokens_of_prefix_hit_at_chunk_boundary(
    engine: EngineProcess, cluster: Cluster, length: int
) -> None:
    tokens = [prompt(length, length)]
    reference = store(engine, cluster, tokens)
    before = node(cluster).bytes_loaded
    outputs = engine.call("generate", prompts=tokens)
    assert [output["tokens"] for output in outputs] == reference
    chunks = length // BLOCK
    assert outputs[0]["cached"] == chunks * BLOCK
    chunk_bytes = node(cluster).used_bytes // node(cluster).chunks
    assert node(cluster).bytes_loaded - before == chunks * chunk_bytes


def test_load_gives_tokens_of_prefix_hit_for_many_requests_at_once(
    engine: EngineProcess, cluster: Cluster
) -> None:
    prompts = [prompt(100 + i, 300 + 61 * i) for i in range(8)]
    reference = store(engine, cluster, prompts)
    outputs = engine.call("generate", prompts=prompts)
    assert [output["tokens"] for output in outputs] == reference
    assert all(output["cached"] >= 288 for output in outputs), outputs


def test_generated_tokens_are_found_by_next_turn(engine: EngineProcess, cluster: Cluster) -> None:
    first = prompt(200, 100)
    answer = engine.tokens([first], max_tokens=64)[0]
    settle(engine, cluster)
    (cached,) = engine.cached([[*first, *answer, 7, 8, 9]])
    assert cached == 160
    engine.reset()


def test_request_that_opts_out_neither_stores_nor_loads(
    engine: EngineProcess, cluster: Cluster
) -> None:
    tokens = [prompt(300, 320)]
    before = node(cluster).bytes_stored
    expected = engine.tokens(tokens, params={"raykv_store": False})
    settle(engine, cluster)
    assert node(cluster).bytes_stored == before
    assert engine.tokens(tokens) == expected
    settle(engine, cluster)
    assert node(cluster).bytes_stored > before
    assert engine.cached(tokens, params={"raykv_load": False}) == [0]
    engine.reset()
    assert engine.cached(tokens, params={"raykv_load": "no, thanks"}) == [320]
    engine.reset()


def test_cache_salt_keeps_requests_apart(engine: EngineProcess, cluster: Cluster) -> None:
    tokens = [prompt(310, 320)]
    engine.tokens(tokens, salt="mine")
    settle(engine, cluster)
    assert engine.cached(tokens, salt="yours") == [0]
    engine.reset()
    assert engine.cached(tokens) == [0]
    engine.reset()
    assert engine.cached(tokens, salt="mine") == [320]
    engine.reset()


def test_paused_cache_is_left_alone_until_resumed(engine: EngineProcess, cluster: Cluster) -> None:
    tokens = [prompt(400, 320)]
    reference = store(engine, cluster, tokens)
    cluster.pause()
    try:
        # An engine learns of it with its next exchange; a step in between takes it in.
        def is_off() -> bool:
            engine.tokens([[1, 2, 3]])
            engine.reset()
            return engine.cached(tokens) == [0]

        wait_until(is_off, 10.0, "the engine stops loading")
        stored = node(cluster).bytes_stored
        engine.tokens([prompt(401, 320)])
        settle(engine, cluster)
        assert node(cluster).bytes_stored == stored
    finally:
        cluster.resume()

    def is_on() -> bool:
        engine.reset()
        engine.tokens([[1, 2, 3]])
        return engine.cached(tokens) == [320]

    wait_until(is_on, 10.0, "the engine loads again")
    engine.reset()
    assert engine.tokens(tokens) == reference


def test_reset_of_connector_empties_cache(engine: EngineProcess, cluster: Cluster) -> None:
    tokens = [prompt(500, 320)]
    reference = store(engine, cluster, tokens)
    engine.reset(connector=True)
    outputs = engine.call("generate", prompts=tokens)
    assert [output["tokens"] for output in outputs] == reference
    assert outputs[0]["cached"] == 0
    wait_until(lambda: loads_again(engine, tokens[0], reference[0]), 20.0, "the cache fills again")


def test_request_aborted_during_load_leaves_engine_in_order(
    engine: EngineProcess, cluster: Cluster
) -> None:
    tokens = [prompt(600, 640)]
    reference = store(engine, cluster, tokens)
    pid = node(cluster).pid
    freeze(pid)
    try:
        engine.begin("abort_after", prompt=tokens[0], seconds=0.3)
        assert engine.finish()
    finally:
        os.kill(pid, signal.SIGCONT)
    others = [prompt(610 + i, 640) for i in range(3)]
    expected = store(engine, cluster, others)
    assert engine.tokens(others) == expected
    engine.reset()
    assert engine.tokens(tokens) == reference
    engine.reset()
    assert node(cluster).pid == pid


def test_node_actor_killed_while_idle_costs_no_request(
    engine: EngineProcess, cluster: Cluster
) -> None:
    tokens = [prompt(700, 640)]
    reference = store(engine, cluster, tokens)
    os.kill(node(cluster).pid, signal.SIGKILL)
    assert engine.tokens(tokens) == reference
    wait_until(
        lambda: loads_again(engine, tokens[0], reference[0]),
        RECOVERY_DEADLINE_S,
        "offloading works again",
    )


@pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03])
def test_node_actor_killed_while_it_copies_costs_no_request(
    engine: EngineProcess, cluster: Cluster, delay_s: float
) -> None:
    prompts = [prompt(800 + i, 1600) for i in range(4)]
    reference = store(engine, cluster, prompts)
    pid = node(cluster).pid
    engine.begin("generate", prompts=prompts)
    signal_after(pid, signal.SIGKILL, delay_s)
    assert [output["tokens"] for output in engine.finish()] == reference
    wait_until(
        lambda: loads_again(engine, prompts[0], reference[0]),
        RECOVERY_DEADLINE_S,
        "offloading works again",
    )


def test_node_actor_frozen_beyond_deadline_costs_no_request(
    engine: EngineProcess, cluster: Cluster
) -> None:
    tokens = [prompt(900, 640)]
    reference = store(engine, cluster, tokens)
    pid = node(cluster).pid
    freeze(pid)
    assert engine.tokens(tokens) == reference
    # The load was reported failed, so its NodeActor must be gone: it could write into the blocks.
    assert not Path(f"/proc/{pid}/stat").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    wait_until(
        lambda: loads_again(engine, tokens[0], reference[0]),
        RECOVERY_DEADLINE_S,
        "offloading works again",
    )


def test_node_actor_frozen_for_a_moment_delays_load(
    engine: EngineProcess, cluster: Cluster
) -> None:
    prompts = [prompt(950 + i, 1600) for i in range(4)]
    reference = store(engine, cluster, prompts)
    pid = node(cluster).pid
    freeze(pid)
    engine.begin("generate", prompts=prompts)
    signal_after(pid, signal.SIGCONT, LOAD_DEADLINE_S / 4)
    outputs = engine.finish()
    assert [output["tokens"] for output in outputs] == reference
    engine.reset()
    assert node(cluster).pid == pid


def test_scheduler_actor_killed_costs_no_request_and_no_chunk(
    engine: EngineProcess, cluster: Cluster
) -> None:
    import ray

    prompts = [prompt(1000 + i, 640) for i in range(3)]
    reference = store(engine, cluster, prompts)
    before = cluster.status()
    ray.kill(ray.get_actor("scheduler", namespace="raykv"), no_restart=False)
    # What the engine holds needs no scheduler actor.
    outputs = engine.call("generate", prompts=prompts)
    assert [output["tokens"] for output in outputs] == reference
    assert [output["cached"] for output in outputs] == [640] * 3
    engine.reset()

    def is_rebuilt() -> bool:
        try:
            now = cluster.status()
        except ClusterError:
            return False
        return bool(now.engines) and bool(now.nodes) and now.epoch > before.epoch

    wait_until(is_rebuilt, RECOVERY_DEADLINE_S, "node and engine are known again")
    wait_until(
        lambda: node(cluster).chunks == before.nodes[0].chunks,
        RECOVERY_DEADLINE_S,
        "the directory knows every chunk again",
    )
    fresh = prompt(1010, 640)
    wait_until(
        lambda: loads_again(engine, fresh, engine.tokens([fresh])[0]),
        RECOVERY_DEADLINE_S,
        "new prompts are stored again",
    )


def test_engine_says_at_start_what_it_joined(engine: EngineProcess, cluster: Cluster) -> None:
    (line,) = [line for line in engine.log_text.splitlines() if "Ray cluster" in line]
    words = ("RayKV", "vLLM 0.3", cluster.address, "node ", "256.0 MiB", "prefaulted", "namespace ")
    for word in words:
        assert word in line
    assert cluster.status().engines[0].versions in line


def signal_after(pid: int, number: signal.Signals, delay_s: float) -> None:
    """Send a signal in a moment; which moment of a copy it meets is up to the machine."""
    import threading

    timer = threading.Timer(delay_s, os.kill, (pid, number))
    timer.start()
    timer.join()
