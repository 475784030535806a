"""Two Ray nodes on one machine, an engine on each: what one computes, the other one loads."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import ray

import raykv
from raykv.base.errors import ClusterError
from raykv.client.cluster import Cluster
from raykv.cluster import ask, names
from raykv.cluster import join as actors
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from raykv.protocol.events import NodeLost
from raykv.protocol.status import NodeStatus
from tests.fixtures.processes import freeze
from tests.fixtures.scrapes import by_label, scrape
from tests.fixtures.told import told_after
from tests.fixtures.truth import directory_of, inventories
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32
REQUEST_DEADLINE_S = 15.0
PATIENCE = {"request_deadline_s": REQUEST_DEADLINE_S, "step_deadline_s": 20.0}
"""A machine that does something else for a second is no fault of the cache: a query may take 1.5 s,
a tenth of the request's deadline. With a longer one, the test of a frozen source takes as much
longer, twice."""

RECOVERY_DEADLINE_S = 60.0

ALWAYS_FETCH = {"always_fetch": True}
"""However fast this small model computes on this machine."""


@pytest.fixture(scope="module")
def second(cluster: Cluster) -> Iterator[LocalNode]:
    node = add_local_node(cluster.address)
    yield node
    node.stop()


@pytest.fixture(scope="module")
def engines(
    cluster: Cluster,
    second: LocalNode,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[EngineProcess]]:
    """One on the head node, one on the second."""
    cluster.down()
    logs = tmp_path_factory.mktemp("engines")
    nodes = (actors.resolve_node_id(""), second.node_id)

    def start(number: int) -> EngineProcess:
        settings = {
            "ray_address": cluster.address,
            "node_id": nodes[number],
            "pool_bytes": "128MiB",
            **PATIENCE,
            **ALWAYS_FETCH,
            "client_hints": "session",
        }
        return EngineProcess(tiny_model, logs / f"{number}.log", settings, cores=str(number))

    started = started_together(partial(start, 0), partial(start, 1))
    wait_until(lambda: have_stored(cluster, started), 60.0, "both engines store")
    wait_until(lambda: are_acquainted(cluster), 20.0, "both engines know that they are two")
    yield started
    for engine in started:
        engine.stop()


def have_stored(cluster: Cluster, engines: list[EngineProcess]) -> bool:
    """Whether each has; the first store of a NodeActor takes seconds: it loads compiled code."""
    for number, engine in enumerate(engines):
        engine.tokens([prompt(90 + number, BLOCK * 4)])
    return len({node_id for node_id, *_ in inventories(cluster)}) == len(engines)


def are_acquainted(cluster: Cluster) -> bool:
    """Whether each has spoken with the scheduler actor since both had requests.

    An engine asks nobody before its node has heard of the other one.
    """
    engines = cluster.status().engines
    return len(engines) == 2 and all(each.counters.get("prompt_tokens") for each in engines)


def node_of(cluster: Cluster, node_id: str) -> NodeStatus:
    return next(node for node in cluster.status().nodes if node.node_id == node_id)


def counter(cluster: Cluster, node_id: str, name: str) -> int:
    """Of the engine on a node, once the node's next report has brought it."""
    (engine,) = [engine for engine in cluster.status().engines if engine.node_id == node_id]
    return engine.counters[name]


def settle(engine: EngineProcess, cluster: Cluster) -> None:
    """Wait until all that is stored is in the directory, then drop vLLM's own prefix cache."""
    seen: list[object] = [None]

    def unchanged() -> bool:
        before, seen[0] = seen[0], inventories(cluster)
        return before == seen[0] == directory_of(cluster)

    wait_until(unchanged, 20.0, "stores come to an end")
    engine.reset()


def computed(engine: EngineProcess, cluster: Cluster, tokens: list[int]) -> list[int]:
    """Have a prompt computed and stored; returns the tokens of vLLM's own prefix hit."""
    engine.tokens([tokens])
    (reference,) = engine.tokens([tokens])
    settle(engine, cluster)
    return reference


def loaded(
    engine: EngineProcess, cluster: Cluster, tokens: list[int], num_tokens: int
) -> list[int]:
    """The answer to a prompt of which so many tokens must come out of a cache."""
    before = cluster.requests().last
    (output,) = engine.call("generate", prompts=[tokens])
    assert output["cached"] == num_tokens, told_after(cluster, before)
    return list(output["tokens"])


@pytest.mark.support("fetch", models=["llama"])
@pytest.mark.versions
@pytest.mark.parametrize("length", [BLOCK * 8 - 1, BLOCK * 8, BLOCK * 8 + 1, BLOCK * 40])
def test_prompt_of_one_node_is_loaded_on_the_other_with_equal_tokens(
    engines: list[EngineProcess], cluster: Cluster, second: LocalNode, length: int
) -> None:
    tokens = prompt(100 + length, length)
    reference = computed(engines[0], cluster, tokens)
    fetched = node_of(cluster, second.node_id).bytes_fetched
    assert loaded(engines[1], cluster, tokens, length // BLOCK * BLOCK) == reference
    assert node_of(cluster, second.node_id).bytes_fetched > fetched
    engines[1].reset()


def test_session_is_brought_to_the_engine_where_it_goes_on(
    engines: list[EngineProcess], cluster: Cluster, second: LocalNode
) -> None:
    tokens = prompt(60, BLOCK * 8)
    params = {"raykv_session": "wanderer"}
    (first,) = engines[0].call("generate", prompts=[tokens], params=params)
    # What a request has used is told with the next step of the engine.
    engines[0].tokens([prompt(61, 4)], max_tokens=1)
    settle(engines[0], cluster)
    wait_until(lambda: [each.chunks for each in cluster.sessions()] == [8], 10.0, "it is told")
    session = cluster.session("wanderer")
    assert second.node_id not in session.status().in_pools
    (there,) = [each for each in cluster.status().engines if each.node_id == second.node_id]
    brought = session.prefetch(there.engine_id)
    assert (brought.came, brought.failed) == (8, 0)
    wait_until(lambda: session.status().in_pools.get(second.node_id) == 8, 10.0, "it is there")
    settle(engines[1], cluster)
    fetched = node_of(cluster, second.node_id).bytes_fetched
    assert loaded(engines[1], cluster, tokens, 8 * BLOCK) == first["tokens"]
    assert node_of(cluster, second.node_id).bytes_fetched == fetched


def test_fetched_chunks_are_loaded_again_without_asking_anybody(
    engines: list[EngineProcess], cluster: Cluster, second: LocalNode
) -> None:
    tokens = prompt(7, BLOCK * 12)
    reference = computed(engines[0], cluster, tokens)
    assert engines[1].tokens([tokens]) == [reference]
    settle(engines[1], cluster)
    time.sleep(1.2)
    asked = counter(cluster, second.node_id, "chunks_asked")
    fetched = node_of(cluster, second.node_id).bytes_fetched
    assert loaded(engines[1], cluster, tokens, len(tokens)) == reference
    time.sleep(1.2)
    assert counter(cluster, second.node_id, "chunks_asked") == asked
    assert node_of(cluster, second.node_id).bytes_fetched == fetched


def test_tokens_of_the_other_node_are_told_apart_in_all_metrics(
    engines: list[EngineProcess], cluster: Cluster, second: LocalNode
) -> None:
    tokens = prompt(16, BLOCK * 8)
    reference = computed(engines[0], cluster, tokens)
    names = [f"vllm:prompt_tokens_cached_by_source{{{source}}}" for source in ("p2p", "host")]
    before = engines[1].call("counters")
    assert loaded(engines[1], cluster, tokens, len(tokens)) == reference
    after = engines[1].call("counters")
    assert [after[name] - before.get(name, 0.0) for name in names] == [len(tokens), 0.0]
    target = node_of(cluster, second.node_id).metrics

    def is_told() -> bool:
        told = by_label(scrape(target), "raykv_cluster_prompt_tokens_total")
        return told.get("other_node", 0.0) >= len(tokens)

    wait_until(is_told, 10.0, "its NodeActor has heard of it")
    here, there = (
        scrape(node_of(cluster, node_id).metrics)
        for node_id in (second.node_id, actors.resolve_node_id(""))
    )
    for text, name in (
        (here, "raykv_fetch_seconds_count"),
        (here, "raykv_fetched_bytes_total"),
        (there, "raykv_read_seconds_count"),
        (there, "raykv_sent_bytes_total"),
        (here, "raykv_lookup_seconds_count"),
    ):
        assert sum(by_label(text, name).values()) > 0, name
    engines[1].reset()


def test_prefix_that_lies_on_both_nodes_is_put_together(
    engines: list[EngineProcess], cluster: Cluster
) -> None:
    tokens = prompt(8, BLOCK * 16)
    computed(engines[1], cluster, tokens[: BLOCK * 8])
    reference = computed(engines[0], cluster, tokens)
    assert loaded(engines[1], cluster, tokens, len(tokens)) == reference
    engines[1].reset()


@pytest.mark.versions
def test_several_requests_for_one_prompt_share_the_fetch(
    engines: list[EngineProcess], cluster: Cluster, second: LocalNode
) -> None:
    tokens = prompt(9, BLOCK * 16)
    reference = computed(engines[0], cluster, tokens)
    time.sleep(1.2)
    before = counter(cluster, second.node_id, "chunks_fetched")
    assert engines[1].tokens([tokens] * 3) == [reference] * 3
    time.sleep(1.2)
    assert counter(cluster, second.node_id, "chunks_fetched") == before + 16
    engines[1].reset()


def test_cleared_cache_is_empty_on_all_nodes(
    engines: list[EngineProcess], cluster: Cluster
) -> None:
    tokens = prompt(10, BLOCK * 8)
    reference = computed(engines[0], cluster, tokens)
    raykv.clear()
    assert directory_of(cluster) == set()
    wait_until(lambda: inventories(cluster) == set(), 10.0, "the nodes have heard of it")
    time.sleep(1.2)
    (output,) = engines[1].call("generate", prompts=[tokens])
    assert output["cached"] == 0
    assert output["tokens"] == reference
    settle(engines[1], cluster)


@pytest.mark.extended
def test_source_that_is_frozen_or_killed_during_a_fetch_costs_a_recomputation(
    engines: list[EngineProcess], cluster: Cluster
) -> None:
    head = actors.resolve_node_id("")
    frozen, killed = prompt(11, BLOCK * 16), prompt(12, BLOCK * 16)
    references = [computed(engines[0], cluster, tokens) for tokens in (frozen, killed)]
    pid = node_of(cluster, head).pid
    freeze(pid)
    try:
        began = time.monotonic()
        assert engines[1].tokens([frozen]) == [references[0]]
        assert time.monotonic() - began < REQUEST_DEADLINE_S + 5.0
        time.sleep(REQUEST_DEADLINE_S + 0.5)
        engines[1].begin("generate", prompts=[killed])
        time.sleep(0.3)
    finally:
        os.kill(pid, signal.SIGKILL)
    (output,) = engines[1].finish()
    assert output["tokens"] == references[1]
    assert output["reason"] == "length"
    wait_until(lambda: node_is_back(cluster, head, pid), RECOVERY_DEADLINE_S, "the NodeActor")
    tokens = prompt(13, BLOCK * 8)
    wait_until(
        lambda: goes_from_node_to_node(engines, cluster, tokens),
        RECOVERY_DEADLINE_S,
        "chunks are fetched again",
    )


def node_is_back(cluster: Cluster, node_id: str, old_pid: int) -> bool:
    return any(
        node.node_id == node_id and node.pid != old_pid and node.num_workers
        for node in cluster.status().nodes
    )


def goes_from_node_to_node(
    engines: list[EngineProcess], cluster: Cluster, tokens: list[int]
) -> bool:
    """One try; the tokens are right in any case."""
    reference = computed(engines[0], cluster, tokens)
    (output,) = engines[1].call("generate", prompts=[tokens])
    engines[1].reset()
    assert output["tokens"] == reference
    return bool(output["cached"] == len(tokens))


def test_scheduler_actor_killed_under_load_fails_no_request_and_comes_back_to_the_truth(
    engines: list[EngineProcess], cluster: Cluster
) -> None:
    prompts = [prompt(200 + number, BLOCK * 12) for number in range(6)]
    references = [computed(engines[0], cluster, tokens) for tokens in prompts]
    outputs: list[list[list[int]]] = [[], []]

    def work(which: int) -> None:
        for _ in range(3):
            outputs[which] += engines[which].tokens(prompts)
            engines[which].reset()

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1)]
    life = cluster.status().life
    for thread in threads:
        thread.start()
    ray.kill(ask.find_scheduler_actor(), no_restart=False)
    wait_until(lambda: life_of(cluster) > life, RECOVERY_DEADLINE_S, "a new scheduler actor")
    wait_until(lambda: is_the_truth(cluster), 5.0, "the directory is what the nodes have")
    for thread in threads:
        thread.join(120.0)
    assert outputs == [references * 3, references * 3]
    # The last stores' copies go on after the last tokens are out.
    wait_until(lambda: is_the_truth(cluster), 5.0, "the directory is the truth at the end")
    assert node_of_the_scheduler_actor() == head_node_id()


def node_of_the_scheduler_actor() -> str:
    actor = ask.find_scheduler_actor()
    assert actor is not None
    where = actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
    return str(ray.get(where, timeout=5.0))


def head_node_id() -> str:
    (head,) = [node for node in ray.nodes() if names.ON_HEAD.keys() <= node["Resources"].keys()]
    return str(head["NodeID"])


def life_of(cluster: Cluster) -> int:
    """Of the scheduler actor; 0 while there is none."""
    try:
        return cluster.status().life
    except ClusterError:
        return 0


def is_the_truth(cluster: Cluster) -> bool:
    there = inventories(cluster)
    return bool(there) and directory_of(cluster) == there


@pytest.mark.extended
def test_lost_node_leaves_the_directory_and_a_new_one_takes_part(
    engines: list[EngineProcess],
    cluster: Cluster,
    second: LocalNode,
    tiny_model: Path,
    tmp_path: Path,
) -> None:
    """The third node comes while the second is there, and loads from both others."""
    third = add_local_node(cluster.address)
    newcomer: EngineProcess | None = None
    try:
        settings = {
            "ray_address": cluster.address,
            "node_id": third.node_id,
            "pool_bytes": "128MiB",
            **PATIENCE,
            **ALWAYS_FETCH,
        }
        newcomer = EngineProcess(tiny_model, tmp_path / "third.log", settings)
        check_three_nodes([*engines, newcomer], cluster)
        check_loss([*engines, newcomer], cluster, second)
    finally:
        if newcomer is not None:
            newcomer.stop()
        third.stop()


def check_three_nodes(engines: list[EngineProcess], cluster: Cluster) -> None:
    """A prompt of which one node has the beginning and another one the rest."""
    tokens = prompt(14, BLOCK * 16)
    computed(engines[0], cluster, tokens[: BLOCK * 8])
    reference = computed(engines[1], cluster, tokens)
    assert loaded(engines[2], cluster, tokens, len(tokens)) == reference


def check_loss(engines: list[EngineProcess], cluster: Cluster, lost: LocalNode) -> None:
    """A node dies with all that runs on it while others fetch from it."""
    prompts = [prompt(300 + number, BLOCK * 16) for number in range(4)]
    references = [computed(engines[1], cluster, tokens) for tokens in prompts]
    place = cluster.snapshot().place
    pid = node_of(cluster, lost.node_id).pid
    engines[0].begin("generate", prompts=prompts)
    engines[1].kill()
    os.killpg(lost.process_group, signal.SIGKILL)
    # Else it lives on for as long as it takes to notice that its raylet is gone.
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    outputs = engines[0].finish()
    assert [output["tokens"] for output in outputs] == references
    assert all(output["reason"] == "length" for output in outputs)
    wait_until(lambda: has_left(cluster, place, lost.node_id), 10.0, "the node is forgotten")
    assert all(node_id != lost.node_id for node_id, *_ in directory_of(cluster))
    # vLLM begins the stores of a step with the next one.
    assert engines[0].tokens(prompts) == references
    settle(engines[0], cluster)
    assert loaded(engines[2], cluster, prompts[0], len(prompts[0])) == references[0]


def has_left(cluster: Cluster, place: tuple[int, int], node_id: str) -> bool:
    return any(
        isinstance(event, NodeLost) and event.node_id == node_id
        for event in cluster.events(since=place, follow=False)
    )
