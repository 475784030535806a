"""`raykv.plan`: sizes for a model, out of its configuration as vLLM reads it; starts nothing."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raykv.base.errors import SettingError, first_line
from raykv.base.parsing import count
from raykv.base.settings import Settings, load_settings
from raykv.client.capacity import KVShape, Plan, PoolWishes, make_plan
from raykv.memory.limits import disk_limit, is_in_memory, memory_limit
from raykv.memory.room import PoolNeeds, default_pool_bytes, objection

ENGINE_KEYS = (
    "block_size",
    "dtype",
    "hf_overrides",
    "kv_cache_dtype",
    "max_model_len",
    "revision",
    "tensor_parallel_size",
    "trust_remote_code",
)
"""Arguments of vLLM's engine that sizes follow from."""


KV_DTYPES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
}
"""Bytes of a number, by vLLM's name for the type of a KV cache; others have scales beside it."""


def plan(
    model: str,
    settings: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
) -> Plan:
    """Bytes per token and per chunk of a model, what pools hold, and whether settings fit.

    Takes seconds, since it imports vLLM. Sizes are those of vLLM's build that is installed here.

    Args:
        model: its folder, or its name if it has been downloaded or may be.
        settings: of RayKV, as in `kv_connector_extra_config`; `RAYKV_` variables count too.
        engine: arguments of vLLM's engine, those in `ENGINE_KEYS`.

    Raises:
        SettingError: a setting is wrong, the model can't be read, or it is of a kind whose sizes
            are not known before it runs.
    """
    extra = dict(settings or {})
    checked = load_settings(extra)
    shape = _shape(model, dict(engine or {}))
    return make_plan(shape, _wishes(extra, checked, shape))


def _wishes(extra: Mapping[str, Any], settings: Settings, shape: KVShape) -> PoolWishes:
    blocks = count("blocks_per_chunk", extra.get("blocks_per_chunk", 1))
    if "block_size" in extra:
        tokens = count("block_size", extra["block_size"])
        if "blocks_per_chunk" in extra:
            raise SettingError("block_size and blocks_per_chunk are both set: give one of them")
        if tokens % shape.tokens_per_block:
            raise SettingError(
                f"block_size={tokens} of RayKV is no multiple of vLLM's block, "
                f"{shape.tokens_per_block} tokens"
            )
        blocks = tokens // shape.tokens_per_block
    limit = memory_limit()
    pool_bytes = settings.pool_bytes or default_pool_bytes(limit.free_bytes)
    in_memory, disk = True, None
    if settings.pool_path:
        path = Path(settings.pool_path)
        in_memory, disk = is_in_memory(path), disk_limit(path)
    needs = PoolNeeds(pool_bytes, in_memory=in_memory)
    return PoolWishes(
        pool_bytes,
        blocks,
        settings.lease_slots,
        settings.staging_bytes if settings.kv_handover == "staged" else None,
        objection(needs, [limit], disk),
    )


def _shape(model: str, engine: dict[str, Any]) -> KVShape:
    wrong = sorted(set(engine) - set(ENGINE_KEYS))
    if wrong:
        raise SettingError(
            f"engine arguments {', '.join(wrong)}: sizes follow from {', '.join(ENGINE_KEYS)} only"
        )
    ranks = count("tensor_parallel_size", engine.pop("tensor_parallel_size", 1))
    block = engine.pop("block_size", None)
    kv_dtype = str(engine.pop("kv_cache_dtype", "auto"))
    config = _model_config(model, engine)
    _refuse_unknown_kinds(model, config)
    dtype, dtype_bytes = _dtype(kv_dtype, config)
    heads = 1 if config.use_mla else max(1, config.get_total_num_kv_heads() // ranks)
    vectors = 1 if config.use_mla else 2
    return KVShape(
        model=model,
        dtype=dtype,
        layers=config.model_arch_config.total_num_hidden_layers,
        layer_bytes=vectors * heads * config.get_head_size() * dtype_bytes * ranks,
        is_latent=config.use_mla,
        window_tokens=config.get_sliding_window(),
        max_model_len=config.max_model_len,
        tokens_per_block=_default_block() if block is None else count("block_size", block),
        num_ranks=ranks,
    )


def _model_config(model: str, engine: dict[str, Any]) -> Any:
    """vLLM's own, read without a tokenizer and without weights."""
    before = logging.root.manager.disable
    try:
        # vLLM tells of its platform on both streams, in the midst of what a command prints.
        logging.disable(logging.WARNING)
        with contextlib.redirect_stdout(io.StringIO()):
            from vllm.engine.arg_utils import EngineArgs

            arguments = {**engine, "model": model, "skip_tokenizer_init": True}
            return EngineArgs(**arguments).create_model_config()
    except ImportError as error:
        raise SettingError(
            f"vLLM is needed to read a model's configuration, and is not here: {first_line(error)}"
        ) from error
    except Exception as error:
        raise SettingError(f"vLLM can't read the model {model!r}: {_reason(error)}") from error
    finally:
        logging.disable(before)


def _reason(error: Exception) -> str:
    """The first line of vLLM's message that says something."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and "validation error" not in line]
    return said[0] if said else type(error).__name__


def _refuse_unknown_kinds(model: str, config: Any) -> None:
    """Raise a SettingError that names a kind of model whose KV can't be planned."""
    layers = set(getattr(config.hf_text_config, "layer_types", None) or ())
    kind = ""
    if config.is_attention_free or config.is_hybrid:
        kind = "has layers with a recurrent state"
    elif config.is_encoder_decoder:
        kind = "has an encoder and a decoder"
    elif config.runner_type == "pooling":
        kind = "generates no tokens"
    elif len(layers) > 1:
        kind = f"mixes layers of several kinds ({', '.join(sorted(layers))})"
    if kind:
        raise SettingError(
            f"the model {model!r} {kind}: vLLM decides how they share its blocks when it starts. "
            "Start an engine, and see the sizes of its chunks with `raykv ls`"
        )


def _dtype(kv_dtype: str, config: Any) -> tuple[str, int]:
    """The KV cache's, and its bytes."""
    if kv_dtype == "auto":
        return str(config.dtype).removeprefix("torch."), config.dtype.itemsize
    if kv_dtype not in KV_DTYPES:
        raise SettingError(
            f"kv_cache_dtype={kv_dtype!r}: sizes are known of {', '.join(KV_DTYPES)} only"
        )
    return kv_dtype, KV_DTYPES[kv_dtype]


def _default_block() -> int:
    """vLLM's block, in tokens, where nobody sets it."""
    from vllm.platforms import current_platform

    return 128 if current_platform.is_cpu() else 16
