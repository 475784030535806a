"""What vLLM decides without telling connectors, and its methods that are wrapped."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

logger = logging.getLogger("raykv")


def serve_flags() -> Any:
    """vLLM's module of the flags of `vllm serve`, which 0.33 has moved."""
    try:
        return import_module("vllm.entrypoints.common.cli_args")
    except ModuleNotFoundError:
        return import_module("vllm.entrypoints.launchers.cli_args")


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
    from vllm._custom_ops import cpu_attn_reshape_and_cache
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    isa = _get_attn_isa(
        vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype
    )

    def write(keys: Any, values: Any) -> Any:
        tokens, heads, dims = keys.shape
        page = torch.zeros((1, heads, 2 * tokens, dims), dtype=spec.dtype)
        key_cache, value_cache = page.chunk(2, dim=2)
        cpu_attn_reshape_and_cache(
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
    from vllm.device_allocator import alloc_conf

    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        return None

    @contextmanager
    def ordinary() -> Iterator[None]:
        alloc_conf.set_alloc_conf(
            alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False)
        )
        try:
            yield
        finally:
            alloc_conf.set_alloc_conf(before)

    return ordinary()


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
    """Wrap a method, once with each wrapper however often this is called; False: there is none of
    that name.
    """
    method = getattr(owner, name, None)
    if method is None:
        return False
    # On what was wrapped; `functools.wraps` hands it on to the next one.
    mark = f"_raykv{getattr(wrapper, '__qualname__', '')}"
    if not hasattr(method, mark):
        wrapped = wrapper(method)
        setattr(wrapped, mark, True)
        setattr(owner, name, wrapped)
    return True


def around(call: Callable[..., Any]) -> Wrapper:
    """A wrapper that has `call` called in a method's place, which gets the method first."""

    @functools.wraps(call)
    def wrapper(method: Any) -> Any:
        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return call(method, *args, **kwargs)

        return wrapped

    return wrapper


def wrap_adapter_hashes(wrapper: Wrapper) -> bool:
    """`hashed(request)`; False: this vLLM hashes adapters in another way."""
    from vllm.v1.core import kv_cache_utils

    return wrap(kv_cache_utils, HASHED, wrapper)


def wrap_adapter_loads(wrapper: Wrapper) -> bool:
    """`load(manager, lora_request)`; False: this vLLM loads adapters in another way."""
    from vllm.lora.worker_manager import WorkerLoRAManager

    return wrap(WorkerLoRAManager, LOADS, wrapper)


def adapter_settings_of(manager: Any) -> Any:
    """The `LoRAConfig` of a `WorkerLoRAManager`, by which it is known whose it is."""
    return getattr(manager, "lora_config", None)


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


def configuration_of(owner: Any) -> Any:
    """Of what renders or processes prompts; None if it can't be told whose it is."""
    return getattr(owner, "vllm_config", None) or getattr(owner, "config", None)


def wrap_multi_connector(wrapper: Wrapper) -> None:
    """`start(connector, vllm_config, …)` of a connector that has others."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    wrap(MultiConnector, "__init__", wrapper)


def wrap_core(name: str, wrapper: Wrapper) -> bool:
    """A method of `EngineCore`, as `wrap` does it."""
    from vllm.v1.engine.core import EngineCore

    return wrap(EngineCore, name, wrapper)


def ask_workers(core: Any, function: Callable[..., Any], *args: Any) -> list[Any] | None:
    """What a function says of each worker of an `EngineCore`; None while they sleep."""
    executor = core.model_executor
    if getattr(executor, "is_sleeping", False):
        return None
    return list(executor.collective_rpc(function, args=args))


WARM_UP = "compile_or_warm_up_model"
"""Of a worker: the last call of its start."""


def worker_class_of(vllm_config: Any) -> Any:
    """The class of vLLM's workers with this configuration."""
    from vllm.utils.import_utils import resolve_obj_by_qualname

    named = vllm_config.parallel_config.worker_cls
    return resolve_obj_by_qualname(named) if isinstance(named, str) else named


def id_of_configuration(worker: Any) -> int:
    """The identity of the configuration that one of vLLM's workers was made with."""
    return id(getattr(worker, "vllm_config", None))


def cpu_probes(model: Any) -> Iterator[tuple[str, Any]]:
    """What layers make of numbers that are always the same, where vLLM's CPU kernels compute with
    copies of their weights; the weights themselves may be gone.
    """
    import torch
    from vllm.model_executor.layers.utils import cpu_unquantized_gemm

    for name, layer in model.named_modules():
        weight = getattr(layer, "weight", None)
        if weight is None or weight.is_meta or not hasattr(layer, "cpu_linear"):
            continue
        whole = getattr(layer, "input_size", None)
        size = getattr(layer, "input_size_per_partition", whole)
        size = weight.shape[1] if weight.numel() else size
        asked = torch.sin(torch.arange(size, dtype=torch.float64)).to(weight.dtype)
        yield name, cpu_unquantized_gemm(layer, asked.unsqueeze(0), weight, None)


def is_quantized(worker: Any) -> bool:
    """Whether what a worker's model was loaded from is not what lies in its memory."""
    return worker.vllm_config.quant_config is not None


def models_of(worker: Any) -> list[Any]:
    """The model of one of vLLM's workers, and the one that guesses tokens, if there is one."""
    draft = getattr(worker, "get_draft_model", None)
    found = [worker.get_model(), None if draft is None else draft()]
    return [model for model in found if model is not None]


def wrap_load_weights(model: Any, wrapper: Wrapper) -> bool:
    """`load_weights(…)` of a model, which frameworks that train call without asking vLLM.

    False: the model has none, and calls that may do anything are judged by what they do to it.
    """
    return wrap(model, "load_weights", wrapper)


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


@around
def _resting_while(method: Any, /, *args: Any, **kwargs: Any) -> Any:
    global _resting
    _resting += 1
    try:
        return method(*args, **kwargs)
    finally:
        _resting -= 1
