"""What an engine of vLLM would have and do, found out without one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from raykv.vllm.internals.offloading import SchedulerTables


def engine_config(arguments: Mapping[str, Any]) -> Any:
    """vLLM's configuration for arguments of its server's engine; nothing is started."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    return EngineArgs(**arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)


# The KV cache


def planned_kv_cache(vllm_config: Any) -> tuple[Any, list[Any]]:
    """The KV cache that an engine would have: as its scheduler is told, and as each rank is.

    The model is made of shapes without memory, on torch's meta device, and vLLM's own start asks
    its layers what they keep. The configuration changes as an engine's does.
    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    parallel, layers = vllm_config.parallel_config, vllm_config.compilation_config
    specs: list[Any] = []
    with set_current_vllm_config(vllm_config):
        for stage in range(parallel.pipeline_parallel_size):
            layers.static_forward_context.clear()
            with _first_of_a_stage(parallel, stage):
                with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
                    initialize_model(vllm_config)
                current_platform.update_block_size_for_backend(vllm_config)
                of_stage = get_kv_cache_spec(vllm_config)
            specs += [of_stage] * (parallel.world_size // parallel.pipeline_parallel_size)
        with _first_of_a_stage(parallel, 0):
            executor = _WithoutWorkers(vllm_config, specs)
            core: Any = SimpleNamespace(model_executor=executor)
            return EngineCore._initialize_kv_caches(core, vllm_config), executor.kv_cache_configs


class _WithoutWorkers:
    """Stands for an engine's executor: answers for workers with a model of shapes.

    Args:
        vllm_config: of the engine.
        specs: what the layers of each rank keep.
    """

    def __init__(self, vllm_config: Any, specs: list[Any]) -> None:
        self._config = vllm_config
        self._specs = specs
        self._num_ranks = len(specs)
        self.kv_cache_configs: list[Any] = []

    def get_kv_cache_specs(self) -> list[Any]:
        return self._specs

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
        from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts

        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(self._config))
        return [[layout.name for layout in layouts]] * self._num_ranks

    def set_kv_cache_layout(self, layout: str, *_more: Any) -> None:
        self._config.cache_config.kv_cache_layout = layout

    def determine_available_memory(self) -> list[int]:
        """Enough for any model: nothing is allocated."""
        return [1 << 60] * self._num_ranks

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.kv_cache_configs = kv_cache_configs

    def compile_or_warm_up_model(self) -> None:
        """There is nothing to compile."""


@contextmanager
def _first_of_a_stage(parallel: Any, stage: int) -> Iterator[None]:
    """vLLM believes that this process is the first rank of a pipeline stage; nobody is spoken
    to.
    """
    from torch.distributed import ProcessGroup
    from vllm.distributed import parallel_state

    sizes = dict.fromkeys(("_WORLD", "_INNER_DP_WORLD", "_EP", "_EPLB"), parallel.world_size)
    sizes |= dict.fromkeys(("_TP", "_ETP"), parallel.tensor_parallel_size)
    sizes |= dict.fromkeys(("_PCP", "_DP", "_ENGRAM_DP"), 1)
    sizes["_PP"] = parallel.pipeline_parallel_size
    sizes["_DCP"] = parallel.decode_context_parallel_size
    before = {name: getattr(parallel_state, name) for name in sizes}
    try:
        for name, size in sizes.items():
            group = object.__new__(parallel_state.GroupCoordinator)
            group.world_size, group.ranks = size, list(range(size))
            group.rank = group.rank_in_group = group.local_rank = 0
            group.cpu_group = group.device_group = ProcessGroup(0, size)
            group.device_communicator = group.mq_broadcaster = None
            setattr(parallel_state, name, group)
        stages: Any = parallel_state._PP
        stages.rank = stages.rank_in_group = stage
        yield
    finally:
        for name, group in before.items():
            setattr(parallel_state, name, group)


# What is offered to be stored


def planned_tables(spec: Any, vllm_config: Any, kv_cache_config: Any) -> SchedulerTables:
    """Of a scheduler's side that knows its KV groups, and no request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    config = scheduler.SchedulerOffloadConfig.from_spec(spec, vllm_config, kv_cache_config)
    return SchedulerTables(SimpleNamespace(config=config))


def offered_chunks(tables: SchedulerTables, prompt: int) -> dict[int, int | None]:
    """How many chunks of each KV group vLLM offers, of a prompt of this length.

    None: those that vLLM's prefix cache hands over, where steps end.
    """
    return {
        each.group_idx: None if each.requires_cow_source else _offered(tables.owner, each, prompt)
        for each in tables.owner.config.kv_group_configs
    }


def _offered(owner: Any, group_config: Any, prompt: int) -> int:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler

    config = owner.config
    chunks: int = prompt // group_config.tokens_per_chunk
    is_dense = config.retention_interval is None
    mask = scheduler.OffloadingConnectorScheduler._reachable_store_block_mask(
        owner,
        group_config=group_config,
        start_chunk_idx=0,
        end_chunk_idx=chunks,
        final_segment_end_chunk_idx=chunks if is_dense else None,
        reachable_boundaries=() if is_dense else (prompt - 1,),
    )
    if mask is None:
        return chunks
    step = config.blocks_per_chunk
    return sum(any(mask[at : at + step]) for at in range(0, len(mask), step))
