"""A plugin for pytest: vLLM's own tests of its offloading connector meet RayKV's classes.

It is loaded in a folder that has vLLM's tests as the package `tests`. `RAYKV_TEST_MODEL` is a model
in the place of one that would be downloaded.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from raykv.base.settings import Settings
from raykv.engine.view import EngineView
from raykv.vllm.manager import ChunkTracker
from raykv.vllm.transfers import RayKVConnectorMetadata, RayKVWorkerMetadata
from raykv.vllm.worker import RayKVConnectorWorker

OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
UNIT = "tests.v1.kv_connector.unit"


class Tracker(ChunkTracker):
    """Made with the arguments of vLLM's."""

    def __init__(self, config: Any, group_specs: Any = None) -> None:
        super().__init__(config, EngineView(Settings(request_deadline_s=5.0)), "tiny", None)
        self._group_specs = group_specs or {}


INSTEAD = {
    "OffloadingEventsTracker": Tracker,
    "OffloadingConnectorWorker": RayKVConnectorWorker,
    "OffloadingConnectorMetadata": RayKVConnectorMetadata,
    "OffloadingWorkerMetadata": RayKVWorkerMetadata,
}


def take_the_places_of_vllms() -> None:
    """Before vLLM's tests are imported, which have them by name."""
    for name in (".common", ".events", ".scheduler", ".worker", "_connector"):
        module: Any = import_module(f"{OFFLOADING}{name}")
        for vllms, ours in INSTEAD.items():
            if hasattr(module, vllms):
                setattr(module, vllms, ours)


take_the_places_of_vllms()
request_runner = import_module(f"{UNIT}.offloading_connector.utils").request_runner
"""The fixture of vLLM's conftest, whose parents import more than is installed."""


def pytest_configure() -> None:
    create = import_module(f"{UNIT}.utils").create_vllm_config
    create.__defaults__ = (os.environ["RAYKV_TEST_MODEL"], *create.__defaults__[1:])
