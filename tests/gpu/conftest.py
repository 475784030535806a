"""Engines on a GPU, and dry runs of the same tests on CPUs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from raykv.lab.bench.engine import EngineProcess
from tests.fixtures.as_on_gpu import engine_in
from tests.fixtures.platforms import BFLOAT16_TIE, BLOCK, CPU, CUDA, Platform
from tests.fixtures.served import Served

if TYPE_CHECKING:
    from raykv.client.cluster import Cluster

Start = Callable[..., Served]
StartShared = Callable[..., AbstractContextManager[Served]]

POOL_BYTES = 512 << 20


def has_engines_on_gpu() -> bool:
    """Whether a GPU, vLLM's build for it and Ray are there.

    vLLM's build for CPUs has a torch that sees no GPU.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "vllm", "ray")):
        return False
    from tests.gpu.test_cuda_copy import has_gpu

    return has_gpu()


on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not has_engines_on_gpu(), reason="there is no GPU here, vLLM for it, or Ray"
    ),
]
"""Marks of what runs engines on a GPU."""

on_cpu = [
    pytest.mark.e2e,
    pytest.mark.extended,
    pytest.mark.skipif(has_engines_on_gpu(), reason="vLLM's build here is the one for GPUs"),
]
"""Marks of its dry run."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(CPU, marks=on_cpu), pytest.param(CUDA, marks=on_gpu)],
    ids=lambda platform: platform.name,
)
def platform(request: pytest.FixtureRequest) -> Platform:
    found: Platform = request.param
    return found


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def started(cluster: Cluster, platform: Platform, model: Path, log: Path, **config: Any) -> Served:
    """An engine over the pool that is there; `raykv` are RayKV's settings, `ways` how it steps (by
    default as vLLM does here), the rest vLLM's.
    """
    settings = {
        "ray_address": cluster.address,
        "pool_bytes": POOL_BYTES,
        **config.pop("raykv", {}),
    }
    config = {"max_model_len": 2048, "block_size": BLOCK, **config}
    tie = platform.tie if config["dtype"] == "float32" else BFLOAT16_TIE
    ways = config.pop("ways", None)
    if ways is None:
        return Served(EngineProcess(model, log, settings, **config), cluster, tie)
    return Served(engine_in(ways, model, log, settings, **config), cluster, tie)


@pytest.fixture
def start(
    cluster: Cluster, platform: Platform, model_folder: Path, tmp_path: Path
) -> Iterator[Start]:
    """Starts engines of one test, over one new pool; see `started`."""
    cluster.down()
    running: list[Served] = []

    def start_one(**config: Any) -> Served:
        model = platform.model(model_folder / platform.name)
        log = tmp_path / f"log-{len(running)}"
        running.append(started(cluster, platform, model, log, **config))
        return running[-1]

    yield start_one
    for each in running:
        each.process.stop()


@pytest.fixture(scope="module")
def start_shared(
    cluster: Cluster,
    platform: Platform,
    model_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> StartShared:
    """Starts the one engine of a module's tests, over a new pool, and ends it; see `started`."""

    @contextmanager
    def start(**config: Any) -> Iterator[Served]:
        cluster.down()
        model = platform.model(model_folder / platform.name)
        log = tmp_path_factory.mktemp("engine") / "log"
        served = started(cluster, platform, model, log, **config)
        yield served
        served.process.stop()

    return start
