"""An engine whose weights change while it runs leaves the namespace to those that have the old."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from raykv.base.errors import ClusterError
from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.protocol.engine import MissRecord
from raykv.serve.models import tiny_llama
from tests.fixtures.waiting import wait_until, wait_until_quiet

pytestmark = pytest.mark.e2e


def told(cluster: Cluster, request_id: str) -> MissRecord:
    """What the engine said of a request."""
    found: list[MissRecord] = []

    def is_told() -> bool:
        with contextlib.suppress(ClusterError):
            found.append(cluster.why_miss(request_id)[0].record)
        return bool(found)

    wait_until(is_told, 20.0, "the engine tells of the request")
    return found[0]


def test_engine_with_reloaded_weights_neither_loads_nor_stores_and_says_so(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    cluster.down()
    tokens, other_tokens = prompt(1, 320), prompt(2, 320)
    settings = {"ray_address": cluster.address, "pool_bytes": "256MiB"}
    new_model = tiny_llama(tmp_path / "new", seed=1)
    engine, plain = started_together(
        lambda: EngineProcess(tiny_model, tmp_path / "log", settings, multiprocess=True),
        lambda: EngineProcess(new_model, tmp_path / "plain", None, cores="1"),
    )
    try:
        old = engine.tokens([tokens])
        wait_until_quiet(lambda: cluster.status().nodes[0].bytes_stored, 20.0, "stores end")
        engine.reset()
        assert engine.cached([tokens]) == [320]
        engine.reset()
        before = cluster.status()
        assert engine.call("reload_weights", path=str(new_model))
        new = plain.tokens([tokens, other_tokens])
        assert new[0] != old[0]
        for _ in range(2):
            outputs = engine.call("generate", prompts=[tokens, other_tokens])
            assert [output["tokens"] for output in outputs] == new
            assert [output["cached"] for output in outputs] == [0, 0]
            # What trainers do after an update takes nothing from others.
            engine.reset(connector=True)
        after = cluster.status()
        assert after.nodes[0].bytes_stored == before.nodes[0].bytes_stored
        assert after.nodes[0].chunks == before.nodes[0].chunks
        wait_until(
            lambda: cluster.status().engines[0].counters["weights_changed"] == 1, 20.0, "it is told"
        )
        request_id = engine.call("generate", prompts=[tokens])[0]["id"]
        record = told(cluster, request_id)
        assert record.missed == {"weights_changed": 320}
        assert engine.log_text.count("weights have changed (reload_weights)") == 1
    finally:
        engine.stop()
        plain.stop()
