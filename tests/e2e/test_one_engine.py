"""One real vLLM engine in its usual three processes, with its KV cache in a NodeActor."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from raykv.base.errors import ClusterError
from raykv.cli import app
from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.prompts.block_hashes import PromptTraits
from raykv.protocol.engine import MissRecord
from raykv.protocol.status import NodeStatus
from raykv.serve.plan import plan
from tests.fixtures.as_on_gpu import AS_ON_CPU, AS_ON_GPU, engine_in, extended
from tests.fixtures.processes import freeze, signal_after
from tests.fixtures.waiting import wait_until, wait_until_it_stores, wait_until_stored

pytestmark = pytest.mark.e2e

BLOCK = 32
"""Tokens per block, and with `blocks_per_chunk` 1 per chunk."""

STEP_DEADLINE_S = 1.0

RECOVERY_DEADLINE_S = 60.0
"""Ray starts a killed actor again after 1 to 4 s on a quiet machine."""

TOLD_S = 20.0
"""The record of a request comes with the next exchange, within about a second."""


@pytest.fixture(scope="module", params=[AS_ON_CPU, extended(AS_ON_GPU)], ids=str)
def engine(
    request: pytest.FixtureRequest,
    cluster: Cluster,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    cluster.down()
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": "256MiB",
        "step_deadline_s": STEP_DEADLINE_S,
    }
    log = tmp_path_factory.mktemp("engine") / "log"
    process = engine_in(request.param, tiny_model, log, settings, multiprocess=True)
    # Before the first request, so that it meets no pool that is page-locked meanwhile.
    wait_until(
        lambda: "attached to NodeActor" in process.log_text, TOLD_S, "an idle engine attaches"
    )
    wait_until_it_stores(process, cluster)
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
    wait_until_stored(cluster)
    engine.reset()


def loads_again(engine: EngineProcess, tokens: list[int], expected: list[int]) -> bool:
    """One round of store and load; True if the load came out of RayKV. Tokens are always right."""
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    before = engine.call("counters").get("vllm:external_prefix_cache_hits", 0.0)
    assert engine.tokens([tokens]) == [expected]
    engine.reset()
    return bool(engine.call("counters").get("vllm:external_prefix_cache_hits", 0.0) > before)


@pytest.mark.support("load", models=["llama"])
@pytest.mark.versions
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


@pytest.mark.support("conversation", models=["llama"])
@pytest.mark.versions
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


def test_lookup_and_listing_name_the_chunks_that_the_engine_stored(
    engine: EngineProcess, cluster: Cluster, tiny_model: Path
) -> None:
    tokens = prompt(320, 10 * BLOCK + 5)
    engine.tokens([tokens], salt="mine")
    settle(engine, cluster)
    found = cluster.lookup(tokens, traits=PromptTraits(cache_salt="mine"))
    assert found.cached_tokens == 10 * BLOCK
    assert cluster.lookup(tokens).cached_tokens == 0
    assert {chunk.key for chunk in found.chunks} <= {chunk.key for chunk in cluster.chunks()}
    assert engine.cached([tokens], salt="mine") == [10 * BLOCK]
    engine.reset()
    wait_until(lambda: cluster.chunk(found.chunks[0].key)[0].hits > 0, 10.0, "the load counts")
    planned = plan(str(tiny_model), {}, {"block_size": BLOCK, "dtype": "float32"})
    assert cluster.chunk(found.chunks[0].key)[0].num_bytes == planned.shape.slot_bytes


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


@pytest.mark.versions
def test_reset_of_connector_empties_cache(engine: EngineProcess, cluster: Cluster) -> None:
    tokens = [prompt(500, 320)]
    reference = store(engine, cluster, tokens)
    engine.reset(connector=True)
    outputs = engine.call("generate", prompts=tokens)
    assert [output["tokens"] for output in outputs] == reference
    assert outputs[0]["cached"] == 0
    wait_until(lambda: loads_again(engine, tokens[0], reference[0]), 20.0, "the cache fills again")


@pytest.mark.versions
def test_engine_that_slept_loads_what_it_stored_before(
    engine: EngineProcess, cluster: Cluster
) -> None:
    tokens = [prompt(510, 320)]
    reference = store(engine, cluster, tokens)
    chunks = node(cluster).chunks
    assert engine.call("rest", level=1)
    outputs = engine.call("generate", prompts=tokens)
    assert [output["tokens"] for output in outputs] == reference
    assert outputs[0]["cached"] == 320
    assert node(cluster).chunks == chunks
    engine.reset()


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


# What `raykv explain` says agrees with what vLLM counts


class Asker:
    """Asks the engine one prompt at a time, and the cluster what became of its tokens."""

    def __init__(self, engine: EngineProcess, cluster: Cluster) -> None:
        self.engine = engine
        self._cluster = cluster
        self._seen = {record.request_id for record in self.records()}

    def records(self) -> list[MissRecord]:
        try:
            return [each.record for each in self._cluster.why_miss("")]
        except ClusterError:
            return []

    def ask(self, tokens: list[int], **arguments: object) -> MissRecord:
        """The record of one request; its sums agree with what vLLM says was cached."""
        (cached,) = self.engine.cached([tokens], **arguments)
        new: list[MissRecord] = []

        def is_told() -> bool:
            new[:] = [record for record in self.records() if record.request_id not in self._seen]
            return bool(new)

        wait_until(is_told, TOLD_S, "the request's record comes")
        (record,) = new
        self._seen.add(record.request_id)
        assert record.prompt == len(tokens)
        assert record.own + record.loaded == cached
        assert sum(record.missed.values()) == len(tokens) - cached
        return record

    def settle(self) -> None:
        settle(self.engine, self._cluster)


@pytest.fixture(scope="module")
def asker(engine: EngineProcess, cluster: Cluster) -> Asker:
    # The records of the requests before are in by then.
    time.sleep(2.0)
    return Asker(engine, cluster)


def test_new_prompt_was_never_stored_and_is_loaded_or_cached_afterwards(asker: Asker) -> None:
    tokens = prompt(901, 10 * BLOCK + 5)
    record = asker.ask(tokens)
    assert record.missed == {"never_stored": 10 * BLOCK, "incomplete_chunk": 5}
    assert (record.own, record.loaded) == (0, 0)
    again = asker.ask(tokens)
    assert (again.own, again.missed) == (10 * BLOCK, {"incomplete_chunk": 5})
    asker.settle()
    loaded = asker.ask(tokens)
    assert (loaded.own, loaded.loaded) == (0, 10 * BLOCK)
    assert loaded.missed == {"incomplete_chunk": 5}


def test_whole_prompt_of_full_chunks_misses_nothing(asker: Asker) -> None:
    tokens = prompt(902, 8 * BLOCK)
    asker.ask(tokens)
    asker.settle()
    record = asker.ask(tokens)
    assert (record.loaded, record.missed) == (8 * BLOCK, {})


@pytest.mark.support("explain", models=["llama"])
def test_known_document_with_a_new_question_names_the_first_chunk_of_the_question(
    asker: Asker,
) -> None:
    document = prompt(903, 6 * BLOCK)
    asker.ask(document)
    asker.settle()
    record = asker.ask(document + prompt(904, 3 * BLOCK))
    assert (record.loaded, record.missed) == (6 * BLOCK, {"never_stored": 3 * BLOCK})
    assert record.missing


def test_request_that_opts_out_says_so(asker: Asker) -> None:
    tokens = prompt(905, 4 * BLOCK)
    asker.ask(tokens, params={"raykv_store": False})
    asker.engine.reset()
    assert asker.ask(tokens).missed == {"stores_off": 4 * BLOCK}
    asker.settle()
    assert asker.ask(tokens, params={"raykv_load": False}).missed == {"opted_out": 4 * BLOCK}
    asker.engine.reset()


def test_cleared_cache_is_the_reason_after_it(asker: Asker, cluster: Cluster) -> None:
    tokens = prompt(906, 4 * BLOCK)
    asker.ask(tokens)
    asker.settle()
    cluster.clear()

    def is_cleared() -> bool:
        asker.ask(prompt(907, 1))
        asker.engine.reset()
        return cluster.status().nodes[0].chunks == 0

    wait_until(is_cleared, TOLD_S, "the cache is empty")
    assert asker.ask(tokens).missed == {"cleared": 4 * BLOCK}


def test_command_prints_it_and_status_has_the_sums(asker: Asker, cluster: Cluster) -> None:
    record = asker.ask(prompt(908, 4 * BLOCK))
    arguments = ["explain", record.request_id[:-3], "--address", cluster.address]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "computed: never_stored" in shown.output
    shown = CliRunner().invoke(app, [*arguments, "--json"], catch_exceptions=False)
    assert json.loads(shown.output)[0]["missed_tokens"] == {"never_stored": 4 * BLOCK}
    counters = cluster.status().engines[0].counters
    missed = sum(count for name, count in counters.items() if name.startswith("missed_tokens_"))
    cached = counters["own_cache_tokens"] + counters["loaded_tokens"]
    assert counters["prompt_tokens"] == cached + missed
    assert counters["missed_tokens_never_stored"] >= 4 * BLOCK


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


@pytest.mark.versions
@pytest.mark.parametrize("delay_s", [0.01, extended(0.0), extended(0.03)])
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
    signal_after(pid, signal.SIGCONT, STEP_DEADLINE_S / 4)
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
        return bool(now.engines) and bool(now.nodes) and now.life > before.life

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
