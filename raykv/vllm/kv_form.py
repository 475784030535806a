"""How KV lies in the chunks of this engine, measured with vLLM's own kernel.

The order of the elements in a page depends on the attention back end, the instruction set and the
data type. Numbers that say which element they are go through the kernel that writes the KV cache,
and are looked for in the page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.memory.kv_form import ELEMENT_BYTES, objection
from raykv.protocol.worker import ElementOrder, GroupForm, KVForm
from raykv.vllm.canonical import whole_spec
from raykv.vllm.internals import cpu_writer

logger = logging.getLogger("raykv")

_DIGIT = 128
"""Base of the numbers that are sent through the kernel: all digits are exact in bfloat16."""

WriteBlock = Callable[[Any, Any], Any]
"""K and V of one block, [tokens, heads, dims], to the page that the back end makes of them."""


def kv_form_of(vllm_config: Any, kv_cache_config: Any, spec: Any) -> KVForm:
    """The form of this engine's chunks; what can't be told says why. Never raises."""
    try:
        form = _form(vllm_config, kv_cache_config, spec)
        wrong = objection(form)
    except Exception as error:
        form, wrong = KVForm(), f"{type(error).__name__}: {error}"
    if wrong:
        logger.warning("the KV of this engine's chunks can't be inspected: %s", wrong)
        return KVForm()
    return form


def _form(vllm_config: Any, kv_cache_config: Any, spec: Any) -> KVForm:
    parallel = spec.config.parallel
    total_heads = vllm_config.model_config.get_total_num_kv_heads()
    # A canonical chunk is one of an engine of one rank.
    is_canonical = spec.config.canonical_layout
    groups = {}
    for group_id in spec.group_ids:
        known = kv_cache_config.kv_cache_groups[group_id]
        layer = (
            whole_spec(vllm_config, known.kv_cache_spec) if is_canonical else known.kv_cache_spec
        )
        groups[group_id] = _group_form(vllm_config, layer, list(known.layer_names))
    return KVForm(
        num_ranks=1 if is_canonical else parallel.world_size,
        head_copies=1 if is_canonical else max(1, parallel.tp_size // total_heads),
        blocks_per_chunk=spec.blocks_per_chunk,
        slot_bytes=spec.slot_bytes_by_group(),
        groups=groups,
    )


def _group_form(vllm_config: Any, spec: Any, layers: list[str]) -> GroupForm:
    refusal = _refusal(vllm_config, spec)
    if refusal:
        return GroupForm(refusal=refusal)
    keys, values = measured(
        cpu_writer(vllm_config, spec), spec.num_kv_heads, spec.block_size, spec.head_size
    )
    return GroupForm(
        layers=layers,
        dtype=_dtype_name(spec.dtype),
        page_bytes=spec.page_size_bytes,
        keys=keys,
        values=values,
    )


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _refusal(vllm_config: Any, spec: Any) -> str:
    """Why chunks of a group can't be read as K and V, in a sentence; empty if they can."""
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

    if not current_platform.is_cpu():
        return "only vLLM's CPU attention has a layout that RayKV can read yet"
    if isinstance(spec, MLAAttentionSpec) or not isinstance(spec, AttentionSpec):
        return f"{type(spec).__name__} keeps no K and V apart: latents or states, not attention"
    if _dtype_name(spec.dtype) not in ELEMENT_BYTES:
        return f"a KV cache of {spec.dtype} is quantized, and its scales are not in the chunk"
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        return "its K and V have heads of different sizes"
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        return "with decode_context_parallel_size above 1 its tokens are spread over the ranks"
    return ""


def measured(
    write: WriteBlock, heads: int, tokens: int, dims: int
) -> tuple[ElementOrder, ElementOrder]:
    """Where K and V of a block are in its page.

    Raises:
        ValueError: the order can't be told: an element is missing, or its place is not the sum of
            one number for its head, one for its token and one for its dimension.
    """
    shape = (tokens, heads, dims)
    found = np.zeros((3, 2 * tokens * heads * dims), np.int64)
    signs = np.zeros(found.shape[1], np.int64)
    for side, numbers in zip(found, np.indices(shape), strict=True):
        for power in (_DIGIT, 1):
            digits = (numbers // power % _DIGIT + 1).astype(np.float32)
            # K is positive and V negative: one page tells of both.
            page = np.asarray(write(digits, -digits)).reshape(-1)
            if page.size != side.size:
                raise ValueError(f"a page of {page.size} elements for {side.size}")
            signs[:] = np.sign(page)
            side += power * (np.abs(page).astype(np.int64) - np.abs(signs))
    keys, values = np.flatnonzero(signs > 0), np.flatnonzero(signs < 0)
    return _order(found, keys, shape), _order(found, values, shape)


def _order(
    sides: npt.NDArray[np.int64], at: npt.NDArray[np.int64], shape: tuple[int, ...]
) -> ElementOrder:
    """The order of those of a page's elements that are at `at`."""
    if at.size != np.prod(shape):
        raise ValueError(f"{at.size} elements of {shape} tokens, heads and dimensions in a page")
    places = np.full(shape, -1, np.int64)
    places[tuple(sides[:, at])] = at
    tokens, heads, dims = places[:, 0, 0], places[0, :, 0], places[0, 0, :]
    first = int(places[0, 0, 0])
    sums = tokens[:, None, None] + (heads - first)[None, :, None] + (dims - first)[None, None, :]
    if not np.array_equal(sums, places):
        raise ValueError("the place of an element is not a sum over token, head and dimension")
    # No negative differences: what is smallest of each side goes into the heads.
    low_token, low_dim = int(tokens.min()), int(dims.min())
    return ElementOrder(
        heads=(heads - 2 * first + low_token + low_dim).tolist(),
        tokens=(tokens - low_token).tolist(),
        dims=(dims - low_dim).tolist(),
    )
