"""Chunks of four blocks; a second engine finds what the first one stored; strangers do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from raykv.bench.engine import EngineProcess
from raykv.bench.prompts import prompt
from raykv.client import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32
CHUNK = 4 * BLOCK

PROMPTS = [prompt(40 + i, length) for i, length in enumerate([383, 384, 385, 500, 1000])]


@pytest.fixture(scope="module")
def fresh_cluster(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster.down()
    POOL_FILE["path"] = str(tmp_path_factory.mktemp("pool") / "pool")
    yield cluster
    cluster.down()


POOL_FILE: dict[str, str] = {}
"""The pool of this module's engines is a file, so that it outlives its NodeActor."""


def start(
    cluster: Cluster, model: Path, log: Path, blocks_per_chunk: int, **settings: str
) -> EngineProcess:
    extra = {
        "ray_address": cluster.address,
        "pool_bytes": "128MiB",
        "pool_path": POOL_FILE["path"],
        "blocks_per_chunk": blocks_per_chunk,
        **settings,
    }
    return EngineProcess(model, log, extra)


@pytest.fixture(scope="module")
def first_run(
    fresh_cluster: Cluster, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """An engine computes and stores the prompts, then ends; gives vLLM's own tokens."""
    engine = start(fresh_cluster, tiny_model, tmp_path_factory.mktemp("first") / "log", 4)
    engine.tokens(PROMPTS)
    reference = engine.tokens(PROMPTS)
    seen = [-1]

    def unchanged() -> bool:
        (node,) = fresh_cluster.status().nodes
        before, seen[0] = seen[0], node.bytes_stored
        return before == seen[0]

    wait_until(unchanged, 20.0, "stores come to an end")
    engine.stop()
    return reference


@pytest.fixture(scope="module")
def second_engine(
    first_run: list[list[int]],
    fresh_cluster: Cluster,
    tiny_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[EngineProcess]:
    engine = start(fresh_cluster, tiny_model, tmp_path_factory.mktemp("second") / "log", 4)
    yield engine
    engine.stop()


def test_second_engine_loads_what_first_one_stored(
    second_engine: EngineProcess, first_run: list[list[int]]
) -> None:
    outputs = second_engine.call("generate", prompts=PROMPTS)
    assert [output["tokens"] for output in outputs] == first_run
    expected = [len(tokens) // CHUNK * CHUNK for tokens in PROMPTS]
    assert [output["cached"] for output in outputs] == expected
    second_engine.reset()


def test_load_begins_inside_of_chunk_after_local_prefix_hit(
    second_engine: EngineProcess, first_run: list[list[int]]
) -> None:
    """vLLM's own cache has six blocks of a prompt, RayKV has chunks of four."""
    long = PROMPTS[4]
    second_engine.tokens([long[: 6 * BLOCK]], params={"raykv_load": False, "raykv_store": False})
    outputs = second_engine.call("generate", prompts=[long])
    assert outputs[0]["tokens"] == first_run[4]
    assert outputs[0]["cached"] == len(long) // CHUNK * CHUNK
    second_engine.reset()


def test_pool_file_outlives_its_node_actor(
    second_engine: EngineProcess, first_run: list[list[int]], fresh_cluster: Cluster
) -> None:
    (before,) = fresh_cluster.status().nodes
    os.kill(before.pid, signal.SIGKILL)

    def loads() -> bool:
        """Nothing is stored here, so what is loaded was in the file."""
        outputs = second_engine.call("generate", prompts=PROMPTS, params={"raykv_store": False})
        second_engine.reset()
        assert [output["tokens"] for output in outputs] == first_run
        return all(output["cached"] >= 2 * CHUNK for output in outputs)

    wait_until(loads, 60.0, "the chunks of the pool file are loaded again")
    (after,) = fresh_cluster.status().nodes
    assert after.epoch > before.epoch
    assert after.bytes_stored == 0


def test_ended_engine_has_given_its_leases_back(
    second_engine: EngineProcess, fresh_cluster: Cluster
) -> None:
    status = fresh_cluster.status()
    assert len(status.engines) == 1
    assert status.nodes[0].num_workers == 1


@pytest.mark.parametrize(
    ("blocks_per_chunk", "settings"),
    [(1, {}), (4, {"weights_version": "2"})],
    ids=["other-chunk-size", "other-weights-version"],
)
def test_engine_of_other_namespace_finds_nothing(
    first_run: list[list[int]],
    second_engine: EngineProcess,
    fresh_cluster: Cluster,
    tiny_model: Path,
    tmp_path: Path,
    blocks_per_chunk: int,
    settings: dict[str, str],
) -> None:
    engine = start(fresh_cluster, tiny_model, tmp_path / "log", blocks_per_chunk, **settings)
    try:
        outputs = engine.call("generate", prompts=PROMPTS)
        assert [output["cached"] for output in outputs] == [0] * len(PROMPTS)
        assert [output["tokens"] for output in outputs] == first_run
        engine.reset()
        # It shares the pool all the same, in a namespace of its own.
        wait_until(
            lambda: engine.cached(PROMPTS[:1]) != [0] or engine.call("reset") is False,
            20.0,
            "the pool takes chunks of the other namespace",
        )
        assert len(fresh_cluster.status().namespaces) >= 2
    finally:
        engine.stop()
