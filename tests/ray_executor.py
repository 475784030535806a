"""A Ray executor for CPU engines, which vLLM's own refuse: one rank, in a Ray actor of its own.

vLLM's `distributed_executor_backend="tests.ray_executor.RayActorExecutor"`. The rank is placed as
vLLM's Ray executors place theirs: in a bundle of `parallel_config.placement_group`, which asks for
the resource that the environment names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from vllm.utils.network_utils import get_file_store_init_method
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.serial_utils import run_method
from vllm.v1.worker.worker_base import WorkerWrapperBase

ADDRESS, RESOURCE = "TEST_RAY_ADDRESS", "TEST_RANKS_RESOURCE"


class Rank:
    """The actor: vLLM's worker, called as an executor calls it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._worker = WorkerWrapperBase(rpc_rank=0)
        self._worker.init_worker(all_kwargs=[arguments])
        self._worker.init_device()
        self._worker.load_model()

    def call(self, method: str | Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a method of the worker, or a function of it."""
        return run_method(self._worker, method, args, kwargs)


class RayActorExecutor(UniProcExecutor):
    """See the module's docstring."""

    uses_ray = True

    def _init_executor(self) -> None:
        ray.init(address=os.environ[ADDRESS], log_to_driver=False, configure_logging=False)
        group = placement_group([{"CPU": 1, os.environ[RESOURCE]: 1}])
        ray.get(group.ready(), timeout=60)
        self.parallel_config.placement_group = group
        placed = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        arguments = {
            "vllm_config": self.vllm_config,
            "local_rank": 0,
            "rank": 0,
            "distributed_init_method": get_file_store_init_method(),
            "is_driver_worker": True,
        }
        made = ray.remote(Rank).options(num_cpus=1, scheduling_strategy=placed)
        self._rank = made.remote(arguments)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        single_value: bool = False,
    ) -> Any:
        """See `Executor.collective_rpc`."""
        result = ray.get(self._rank.call.remote(method, args, kwargs or {}), timeout=timeout)
        value = result if single_value else [result]
        if not non_block:
            return value
        future: Future[Any] = Future()
        future.set_result(value)
        return future

    def shutdown(self) -> None:
        """See `Executor.shutdown`."""
        ray.kill(self._rank)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """See `Executor.supports_async_scheduling`."""
        return False
