"""A plugin for pytest: vLLM's own tests of its offloading connector meet RayKV's classes.

It is loaded in a folder that has vLLM's tests as the package `tests`. `RAYKV_TEST_MODEL` is a model
in the place of one that would be downloaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
UNIT = "tests.v1.kv_connector.unit"

request_runner = import_module(f"{UNIT}.offloading_connector.utils").request_runner
"""The fixture of vLLM's conftest, whose parents import more than is installed."""


def pytest_configure() -> None:
    from raykv.engine.runtime import EngineIdentity
    from raykv.vllm.manager import ChunkTracker
    from raykv.vllm.worker import RayKVConnectorWorker

    create = import_module(f"{UNIT}.utils").create_vllm_config
    create.__defaults__ = (os.environ["RAYKV_TEST_MODEL"], *create.__defaults__[1:])
    who = EngineIdentity("engine", "namespace", "tiny", 1, {0: 4096}, "")

    class Tracker(ChunkTracker):
        """Made with the arguments of vLLM's."""

        def __init__(self, config: Any, group_specs: Any = None) -> None:
            super().__init__(config, who, None, None)
            self._group_specs = group_specs or {}

    for name in ("offloading.events", "offloading.scheduler", "offloading.worker"):
        module: Any = import_module(f"{OFFLOADING.removesuffix('.offloading')}.{name}")
        if hasattr(module, "OffloadingEventsTracker"):
            module.OffloadingEventsTracker = Tracker
        if hasattr(module, "OffloadingConnectorWorker"):
            module.OffloadingConnectorWorker = RayKVConnectorWorker
    connector: Any = import_module(f"{OFFLOADING}_connector")
    connector.OffloadingConnectorWorker = RayKVConnectorWorker
