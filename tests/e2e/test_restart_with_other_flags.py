"""A pool outlives its engine: the next one, with another flag, must not find what it computes anew.

The flags change the KV of the same weights under the same name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess, started_together
from raykv.lab.bench.prompts import prompt
from raykv.lab.demo.tiny_llama import tiny_llama
from tests.fixtures.waiting import wait_until_stored

pytestmark = [pytest.mark.e2e, pytest.mark.extended]

BLOCK = 32
ORIGINAL_LENGTH = 1024
PROMPTS = [prompt(900 + number, 8 * BLOCK + number) for number in range(3)]

LONGER: dict[str, Any] = {"max_model_len": 2 * ORIGINAL_LENGTH}
TRANSFORMERS: dict[str, Any] = {"model_impl": "transformers"}


@pytest.fixture(scope="module")
def long_rope_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the rope of Phi-3: other factors for engines that allow longer prompts."""
    folder = tiny_llama(tmp_path_factory.mktemp("models") / "long-rope")
    file = folder / "config.json"
    config = json.loads(file.read_text())
    half = config["head_dim"] // 2
    config["max_position_embeddings"] = 4 * ORIGINAL_LENGTH
    config["rope_scaling"] = {
        "rope_type": "longrope",
        "short_factor": [1.0] * half,
        "long_factor": [1.0 + number / 4 for number in range(half)],
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    }
    config["original_max_position_embeddings"] = ORIGINAL_LENGTH
    file.write_text(json.dumps(config))
    return folder


def start(model: Path, log: Path, cluster: Cluster | None, **flags: Any) -> EngineProcess:
    settings = {"ray_address": cluster.address, "pool_bytes": "128MiB"} if cluster else None
    return EngineProcess(model, log, settings, **{"max_model_len": ORIGINAL_LENGTH, **flags})


@pytest.fixture(scope="module")
def first_tokens(
    cluster: Cluster, long_rope_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[list[int]]]:
    """An engine computes and stores the prompts, then ends."""
    cluster.down()
    engine = start(long_rope_model, tmp_path_factory.mktemp("first") / "log", cluster)
    tokens = engine.tokens(PROMPTS)
    wait_until_stored(cluster)
    engine.stop()
    yield tokens
    cluster.down()


@pytest.fixture(scope="module")
def next_engines(
    first_tokens: list[list[int]],
    cluster: Cluster,
    long_rope_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[list[EngineProcess]]:
    """With the same flags, for longer prompts, the same without RayKV, and by Transformers."""
    logs = tmp_path_factory.mktemp("next")
    engines = started_together(
        lambda: start(long_rope_model, logs / "same", cluster),
        lambda: start(long_rope_model, logs / "longer", cluster, **LONGER),
        lambda: start(long_rope_model, logs / "plain", None, **LONGER),
        lambda: start(long_rope_model, logs / "transformers", cluster, **TRANSFORMERS),
    )
    yield engines
    with ThreadPoolExecutor() as threads:
        list(threads.map(EngineProcess.stop, engines))


def test_restart_finds_chunks_if_flags_are_the_same(
    next_engines: list[EngineProcess], first_tokens: list[list[int]]
) -> None:
    outputs = next_engines[0].call("generate", prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == [8 * BLOCK] * len(PROMPTS)
    assert [output["tokens"] for output in outputs] == first_tokens


def test_restart_finds_nothing_if_longer_prompts_give_other_factors(
    next_engines: list[EngineProcess], first_tokens: list[list[int]]
) -> None:
    _, longer, plain, _ = next_engines
    outputs = longer.call("generate", prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == [0] * len(PROMPTS)
    tokens = plain.tokens(PROMPTS)
    assert [output["tokens"] for output in outputs] == tokens
    # Were it not so, a wrong chunk could not be seen.
    assert tokens != first_tokens


def test_restart_finds_nothing_if_another_implementation_computes(
    next_engines: list[EngineProcess],
) -> None:
    transformers = next_engines[3]
    alone = {"raykv_load": False, "raykv_store": False}
    expected = transformers.tokens(PROMPTS, params=alone)
    transformers.reset()
    outputs = transformers.call("generate", prompts=PROMPTS)
    assert [output["cached"] for output in outputs] == [0] * len(PROMPTS)
    assert [output["tokens"] for output in outputs] == expected
