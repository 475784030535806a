"""Engines with the arguments that people give them: equal tokens, and hits, or a refusal."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from raykv.lab.bench.prompts import prompt
from tests.fixtures.server import served
from tests.fixtures.waiting import wait_until

pytestmark = pytest.mark.e2e

BLOCK = 32
LENGTH = 8 * BLOCK + 5

Start = Callable[..., EngineProcess]


@pytest.fixture
def start(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    cluster.down()
    running: list[EngineProcess] = []

    def make(raykv: dict[str, Any] | None = None, **config: Any) -> EngineProcess:
        settings = {"ray_address": cluster.address, "pool_bytes": "64MiB", **(raykv or {})}
        plain = settings if "connector" not in config else None
        made = EngineProcess(tiny_model, tmp_path / f"log{len(running)}", plain, **config)
        running.append(made)
        return made

    yield make
    for each in running:
        each.stop()


def stored(cluster: Cluster, count: int) -> None:
    wait_until(lambda: len(list(cluster.chunks())) >= count, 20.0, f"{count} chunks are stored")


def check_load(engine: EngineProcess, cluster: Cluster, seed: int) -> None:
    """A prompt is computed, found in vLLM's cache, and loaded from RayKV: the same tokens."""
    asked = prompt(seed, LENGTH)
    engine.tokens([asked], max_tokens=8)
    expected = engine.tokens([asked], max_tokens=8)
    stored(cluster, LENGTH // BLOCK)
    engine.reset()
    (output,) = engine.call("generate", prompts=[asked], max_tokens=8)
    assert [output["tokens"]] == expected
    assert output["cached"] == LENGTH // BLOCK * BLOCK


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.extended
def test_prompt_is_loaded_with_and_without_async_scheduling(
    start: Start, cluster: Cluster, is_async: bool
) -> None:
    check_load(start(async_scheduling=is_async), cluster, 1)


@pytest.mark.extended
def test_prompt_is_loaded_without_vllms_own_prefix_cache(start: Start, cluster: Cluster) -> None:
    engine = start(enable_prefix_caching=False)
    asked = prompt(2, LENGTH)
    expected = engine.tokens([asked], max_tokens=8)
    stored(cluster, LENGTH // BLOCK)
    (output,) = engine.call("generate", prompts=[asked], max_tokens=8)
    assert [output["tokens"]] == expected
    assert output["cached"] == LENGTH // BLOCK * BLOCK


@pytest.mark.versions
def test_load_beside_another_connector_that_fails_costs_no_request(
    start: Start, cluster: Cluster, tmp_path: Path
) -> None:
    """The policy of MultiConnector counts for both, and vLLM's default ends such requests."""
    settings = {"ray_address": cluster.address, "pool_bytes": "64MiB", "step_deadline_s": 2.0}
    ours = {
        "kv_connector": "RayKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    other = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "other")},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [ours, other]},
    }
    engine = start(connector=both)
    assert "kv_load_failure_policy of MultiConnector is set to recompute" in engine.log_text
    check_load(engine, cluster, 3)
    expected = engine.tokens([prompt(3, LENGTH)], max_tokens=8)
    engine.reset()
    (node,) = cluster.status().nodes
    os.kill(node.pid, signal.SIGSTOP)
    try:
        assert engine.tokens([prompt(3, LENGTH)], max_tokens=8) == expected
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(node.pid, signal.SIGCONT)


@pytest.mark.extended
@pytest.mark.timeout(400)
def test_engines_behind_several_api_servers_load_what_either_has_stored(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Data parallel engines, out of a file of flags."""
    cluster.down()
    flags = tmp_path / "flags.yaml"
    flags.write_text("data-parallel-size: 2\napi-server-count: 2\n")
    both = ("--config", str(flags))
    with served(tmp_path, cluster.address, *both, cores="0|1") as server:
        text = "All happy families are alike. " * 40
        answers = [server.complete(text)]
        stored(cluster, 2)
        for _ in range(4):
            server.post("/reset_prefix_cache")
            answers.append(server.complete(text))
        assert len(set(answers)) == 1
        loaded = [
            float(line.rsplit(" ", 1)[1])
            for line in server.get("/metrics").splitlines()
            if line.startswith("vllm:prompt_tokens_by_source_total")
            and 'source="external_kv_transfer"' in line
        ]
        assert len(loaded) == 2
        assert min(loaded) > 0
