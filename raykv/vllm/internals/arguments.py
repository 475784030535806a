"""Arguments of vLLM that RayKV can't be used with.

Flags, configuration files, keyword arguments and Ray's configurations all end in a `VllmConfig`:
whichever way an argument came, it is seen there, in the user's own process and before any other is
started. Who reads arguments before that may refuse the same ones by their names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from raykv.base.errors import SettingError
from raykv.vllm.internals.engine import Wrapper, wrap

REFUSED_ARGUMENTS = {
    "kv_offloading_size": (
        "turns on vLLM's own offloading in RayKV's place: leave it out, and set the size of "
        "RayKV's pool with pool_bytes"
    ),
    "enable_return_routed_experts": (
        "can't be used with RayKV: vLLM knows the experts of tokens that it has computed, and "
        "those of tokens that are loaded are missing: leave it out, or leave RayKV out"
    ),
}
"""By the names of vLLM's engine: what is wrong, and what to do."""


def refuse_by_name(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of vLLM's engine before it has parsed them.

    Raises:
        SettingError: naming one that RayKV can't be used with.
    """
    for name, why in REFUSED_ARGUMENTS.items():
        value = arguments.get(name)
        if value is not None and value is not False:
            raise SettingError(f"{name}={value} {why}")


def refuse_arguments(vllm_config: Any) -> None:
    """Refuse what vLLM has made of its arguments, for an engine with RayKV.

    Raises:
        SettingError: vLLM's own offloading is wanted, or outputs that come of computing alone; or
            vLLM keeps no KV of this engine's prompts, or finds none, for a reason that holds for
            RayKV too.
    """
    refuse_by_name(
        {
            "kv_offloading_size": vllm_config.cache_config.kv_offloading_size,
            "enable_return_routed_experts": vllm_config.aux_output_config.enabled,
        }
    )
    _refuse_off_for_kernels(vllm_config.cache_config)
    if vllm_config.model_config is not None:
        _refuse_off_for_models(vllm_config.model_config)


def _refuse_off_for_models(model_config: Any) -> None:
    """vLLM has its own prefix cache off with such a model, and asks connectors all the same."""
    pooler = model_config.pooler_config
    if pooler is None or model_config.is_prefix_caching_supported:
        return
    if model_config.attn_type == "encoder_only":
        raise SettingError(
            f"the model {model_config.model!r} encodes prompts as a whole and vLLM keeps no KV of "
            "them, so that there is nothing to store: leave RayKV out"
        )
    raise SettingError(
        f"the pooling of the model {model_config.model!r} needs each token of a prompt computed "
        f"(seq_pooling_type={pooler.seq_pooling_type}, tok_pooling_type={pooler.tok_pooling_type}),"
        " and vLLM has no prefix cache with it: leave RayKV out, or choose a pooling of the last "
        "token"
    )


def _refuse_off_for_kernels(cache_config: Any) -> None:
    """vLLM switches its prefix cache off with kernels that depend on where a prefix ends."""
    if (
        os.environ.get("VLLM_BATCH_INVARIANT", "0") == "1"
        and not cache_config.enable_prefix_caching
    ):
        raise SettingError(
            "with VLLM_BATCH_INVARIANT=1 and enable_prefix_caching=false no answer may depend on "
            "what is cached, and with RayKV it would: choose an attention back end for which vLLM "
            "leaves its prefix cache on (not FLASHINFER or TRITON_MLA), or leave RayKV out"
        )


def wrap_arguments(wrapper: Wrapper) -> None:
    """`finish(vllm_config)`, which puts vLLM's own offloading in the place of other connectors."""
    from vllm.config import VllmConfig

    wrap(VllmConfig, "_post_init_kv_transfer_config", wrapper)
