"""An engine for each model of the zoo, with RayKV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from raykv.client.cluster import Cluster
from raykv.lab.bench.engine import EngineProcess
from tests.fixtures.zoo import ZOO, build
from tests.fixtures.zoo_engine import BLOCK, ZooEngine

StartZoo = Callable[..., ZooEngine]


@pytest.fixture(scope="session")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="module")
def start_zoo(
    cluster: Cluster, zoo_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StartZoo]:
    """Starts an engine of a model, or of another one of its kind in `folder`, over the pool that is
    there, or over a new one.
    """
    running: list[EngineProcess] = []

    def start(
        name: str,
        *,
        anew: bool = True,
        raykv: dict[str, Any] | None = None,
        connector: str = "RayKVConnector",
        log: Path | None = None,
        folder: Path | None = None,
        **engine: Any,
    ) -> ZooEngine:
        if anew:
            for each in running:
                each.stop()
            cluster.down()
        folder = folder or zoo_folder / name
        if not folder.exists():
            build(name, folder)
        settings = {"ray_address": cluster.address, "pool_bytes": "256MiB", **(raykv or {})}
        log = log or tmp_path_factory.mktemp(name) / "log"
        usual = {"dtype": "float32", "max_model_len": 2048, "block_size": BLOCK}
        config = {**usual, **ZOO[name].engine, **engine}
        transfer = {"kv_connector": connector, "kv_connector_extra_config": settings}
        running.append(EngineProcess(folder, log, None, connector=transfer, **config))
        return ZooEngine(name, folder, cluster, running[-1], config)

    yield start
    for each in running:
        each.stop()
