"""Real engines whose ranks are at several places: on two Ray nodes, and in two pipeline stages."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.cluster import join as actors
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from raykv.lab.hosts.local_nodes import LocalNode, add_local_node
from tests.fixtures.engine_child import ADDRESS, RESOURCES
from tests.fixtures.processes import freeze
from tests.fixtures.served import ALONE
from tests.fixtures.told import told_after
from tests.fixtures.waiting import wait_until
from tests.house import CHILDREN

pytestmark = pytest.mark.e2e

BLOCK = 32
STEP_DEADLINE_S = 1.0
PROMPTS = [prompt(60 + i, 200 + BLOCK * i) for i in range(2)]
WHOLE = [len(tokens) // BLOCK for tokens in PROMPTS]

# vLLM's CPU worker makes the buffers between stages only when it warms the model up.
STAGES = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}
RANKS = {"tensor_parallel_size": 2}
HEAD, SECOND = "node:__internal_head__", "second"
HERE_AND_THERE = f"{HEAD},{SECOND}"


@pytest.fixture(autouse=True)
def new_pools(cluster: Cluster) -> None:
    """Nothing of an earlier test is there."""
    cluster.down()


@pytest.fixture(autouse=True)
def patient_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that leave the machine's two cores to others while they wait."""
    monkeypatch.setenv("PYTHONPATH", str(CHILDREN / "patient"))


@pytest.fixture
def second(cluster: Cluster) -> Iterator[LocalNode]:
    """One more Ray node; as resources are named, the cluster's first one is `HEAD`."""
    node = add_local_node(cluster.address, resources={SECOND: 2})
    yield node
    node.stop()


@contextmanager
def engine_on(
    cluster: Cluster,
    model: Path,
    log: Path,
    ranks_at: str,
    arguments: dict[str, Any],
    **settings: Any,
) -> Iterator[EngineProcess]:
    """An engine whose ranks are Ray actors, where the resources are, if any are named."""
    settings |= {"ray_address": cluster.address, "pool_bytes": "128MiB"}
    how: dict[str, Any] = {"multiprocess": True, "cores": "0|1"}
    if ranks_at:
        how = {"ranks_in_ray_actors": True}
        os.environ[ADDRESS], os.environ[RESOURCES] = cluster.address, ranks_at
    engine = EngineProcess(model, log, settings, **how, **arguments)
    try:
        yield engine
    finally:
        engine.stop()


def stored(
    engine: EngineProcess, cluster: Cluster, prompts: list[list[int]] = PROMPTS
) -> list[list[int]]:
    """Store prompts of two places; returns the tokens of vLLM's own prefix hit."""
    known = sum(cluster.status().namespaces.values())
    new = 2 * sum(len(tokens) // BLOCK for tokens in prompts)
    engine.tokens(prompts)
    reference = engine.tokens(prompts)

    def are_known() -> bool:
        # New nodes store nothing until they have their orders: it is asked for again.
        assert engine.tokens(prompts) == reference
        return sum(cluster.status().namespaces.values()) == known + new

    wait_until(are_known, 30.0, "the directory knows both parts")
    return reference


def check_loaded(engine: EngineProcess, cluster: Cluster, reference: list[list[int]]) -> None:
    """All whole chunks come from the pools, and the tokens are right."""
    before = cluster.requests().last
    outputs = engine.call("generate", prompts=PROMPTS)
    assert [output["tokens"] for output in outputs] == reference
    cached = [output["cached"] for output in outputs]
    assert cached == [count * BLOCK for count in WHOLE], told_after(cluster, before)


def check_own_reload(engine: EngineProcess, cluster: Cluster) -> None:
    """Each of two places stores its part of all chunks, and what vLLM forgets is loaded again."""
    reference = stored(engine, cluster)
    assert sorted(cluster.status().namespaces.values()) == [sum(WHOLE)] * 2
    engine.reset()
    check_loaded(engine, cluster, reference)


@pytest.mark.support("pipeline stages", models=["llama"])
def test_pipeline_stages_on_one_node_load_what_they_stored(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    with engine_on(cluster, tiny_model, tmp_path / "log", "", STAGES) as engine:
        check_own_reload(engine, cluster)
        (node,) = cluster.status().nodes
        assert node.num_workers == 2
        assert node.bytes_loaded == node.bytes_stored


@pytest.mark.support("ranks on two nodes", models=["llama"])
def test_ranks_on_two_nodes_load_what_they_stored(
    cluster: Cluster, second: LocalNode, tiny_model: Path, tmp_path: Path
) -> None:
    with engine_on(cluster, tiny_model, tmp_path / "log", HERE_AND_THERE, RANKS) as engine:
        check_own_reload(engine, cluster)
        workers = {node.node_id: node.num_workers for node in cluster.status().nodes}
        assert workers == {actors.resolve_node_id(""): 1, second.node_id: 1}


@pytest.mark.extended
@pytest.mark.support("pipeline stages", models=["llama"])
def test_pipeline_stages_on_two_nodes_load_what_they_stored(
    cluster: Cluster, second: LocalNode, tiny_model: Path, tmp_path: Path
) -> None:
    with engine_on(cluster, tiny_model, tmp_path / "log", HERE_AND_THERE, STAGES) as engine:
        check_own_reload(engine, cluster)


@pytest.mark.extended
def test_engine_on_two_nodes_goes_on_after_a_nodeactor_has_died(
    cluster: Cluster, second: LocalNode, tiny_model: Path, tmp_path: Path
) -> None:
    with engine_on(cluster, tiny_model, tmp_path / "log", HERE_AND_THERE, RANKS) as engine:
        reference = stored(engine, cluster)
        (pid,) = [node.pid for node in cluster.status().nodes if node.node_id == second.node_id]
        os.kill(pid, signal.SIGKILL)
        engine.reset()
        assert engine.tokens(PROMPTS) == reference, "one part is gone: it is computed"
        wait_until(lambda: _is_back(cluster, second, pid), 60.0, "there is a new NodeActor")
        engine.reset()
        wait_until(lambda: _loads(engine, reference), 60.0, "it is stored again, and loaded")


@pytest.mark.extended
@pytest.mark.parametrize("loads", [False, True], ids=["storing", "loading"])
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_engine_on_two_nodes_goes_on_when_a_nodeactor_freezes(
    cluster: Cluster,
    second: LocalNode,
    tiny_model: Path,
    tmp_path: Path,
    loads: bool,
    delay_s: float,
) -> None:
    many = [prompt(80 + at, 1600) for at in range(4)]
    log, settings = tmp_path / "log", {"step_deadline_s": STEP_DEADLINE_S}
    with engine_on(cluster, tiny_model, log, HERE_AND_THERE, RANKS, **settings) as engine:
        if loads:
            reference = stored(engine, cluster, many)
            engine.reset()
        else:
            reference = engine.tokens(many, params=ALONE)
            engine.reset()
        (pid,) = [node.pid for node in cluster.status().nodes if node.node_id == second.node_id]
        engine.begin("generate", prompts=many)
        time.sleep(delay_s)
        freeze(pid)
        try:
            assert [output["tokens"] for output in engine.finish()] == reference
            engine.reset()
            reference = engine.tokens(PROMPTS, params=ALONE)
        finally:
            # Unless a rank has ended it, since it could have written into the blocks.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        engine.reset()
        wait_until(lambda: _loads(engine, reference), 60.0, "both places load")


def _is_back(cluster: Cluster, node: LocalNode, pid: int) -> bool:
    known = {each.node_id: each for each in cluster.status().nodes}
    return node.node_id in known and known[node.node_id].pid != pid


def _loads(engine: EngineProcess, reference: list[list[int]]) -> bool:
    outputs = engine.call("generate", prompts=PROMPTS)
    assert [output["tokens"] for output in outputs] == reference
    engine.reset()
    return [output["cached"] for output in outputs] == [count * BLOCK for count in WHOLE]


@pytest.mark.extended
@pytest.mark.support("ranks on two nodes", models=["llama"])
def test_engine_whose_ranks_are_the_other_way_round_fetches_each_part(
    cluster: Cluster, second: LocalNode, tiny_model: Path, tmp_path: Path
) -> None:
    with engine_on(cluster, tiny_model, tmp_path / "first", HERE_AND_THERE, RANKS) as engine:
        reference = stored(engine, cluster)
    swapped = f"{SECOND},{HEAD}"
    with engine_on(cluster, tiny_model, tmp_path / "swapped", swapped, RANKS) as engine:
        check_loaded(engine, cluster, reference)
        fetched = [node.bytes_fetched for node in cluster.status().nodes if node.bytes_fetched]
        assert len(fetched) == 2, "each place its part"
        assert len({*fetched}) == 1


@pytest.mark.extended
@pytest.mark.support("ranks on two nodes", models=["llama"])
def test_engine_on_two_other_nodes_fetches_each_part_until_a_node_is_gone(
    cluster: Cluster, second: LocalNode, tiny_model: Path, tmp_path: Path
) -> None:
    late = prompt(90, 200)
    with engine_on(cluster, tiny_model, tmp_path / "first", HERE_AND_THERE, RANKS) as engine:
        reference = stored(engine, cluster)
        (late_answer,) = stored(engine, cluster, [late])
    others = [add_local_node(cluster.address, resources={name: 2}) for name in ("third", "fourth")]
    try:
        with engine_on(cluster, tiny_model, tmp_path / "log", "third,fourth", RANKS) as engine:
            check_loaded(engine, cluster, reference)
            fetched = {node.node_id: node.bytes_fetched for node in cluster.status().nodes}
            assert {fetched[node.node_id] > 0 for node in others} == {True}
            second.stop()
            (output,) = engine.call("generate", prompts=[late])
            assert (output["tokens"], output["cached"]) == (late_answer, 0), "half of it is gone"
            engine.reset()
            check_loaded(engine, cluster, reference)
    finally:
        for node in others:
            node.stop()
