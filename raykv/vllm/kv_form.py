"""How KV lies in the chunks of this engine: as vLLM says, and measured with its own kernel.

With `canonical_layout` engines of any tensor-parallel size share chunks: vLLM derives for each
layer where a rank's page is in the canonical page, which is the page of an engine of one rank, and
says whether the bytes are the same for all tensor-parallel sizes. Whatever it does not certify is
refused at the start: an engine that went on without sharing would look like one whose requests
simply miss.

The order of the elements in a page depends on the attention back end, the instruction set and the
data type. Numbers that say which element they are go through the kernel that writes the KV cache,
and are looked for in the page.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.base.errors import SettingError
from raykv.memory.kv_form import ELEMENT_BYTES, objection
from raykv.protocol.worker import CanonicalPages, ElementOrder, GroupForm, KVForm, PageMap
from raykv.vllm.internals.engine import cpu_writer

logger = logging.getLogger("raykv")

_DIGIT = 128
"""Base of the numbers that are sent through the kernel: all digits are exact in bfloat16."""

WriteBlock = Callable[[Any, Any], Any]
"""K and V of one block, [tokens, heads, dims], to the page that the back end makes of them."""


def kv_form_of(vllm_config: Any, kv_cache_config: Any, spec: Any) -> KVForm:
    """The form of this engine's chunks, or why it is unknown. Never raises."""
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
        ValueError: the order is unknown: an element is missing, or its place is not the sum of
            one number for its head, one for its token and one for its dimension.
    """
    shape = (tokens, heads, dims)
    found = np.zeros((3, 2 * tokens * heads * dims), np.int64)
    signs = np.zeros(found.shape[1], np.int64)
    for side, numbers in zip(found, np.indices(shape), strict=True):
        for power in (_DIGIT, 1):
            digits = (numbers // power % _DIGIT + 1).astype(np.float32)
            # K is positive and V negative: one page shows both.
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
    # No negative differences: the smallest place of each side goes into the heads.
    low_token, low_dim = int(tokens.min()), int(dims.min())
    return ElementOrder(
        heads=(heads - 2 * first + low_token + low_dim).tolist(),
        tokens=(tokens - low_token).tolist(),
        dims=(dims - low_dim).tolist(),
    )


# Chunks that engines of any tensor-parallel size share


def block_bytes(vllm_config: Any, kv_cache_config: Any) -> dict[int, int]:
    """Bytes of a canonical block of each KV group that has attention only, without padding."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    sizes = {}
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        specs = [whole_spec(vllm_config, spec) for spec in layer_specs(group)]
        if all(isinstance(spec, AttentionSpec) for spec in specs):
            sizes[number] = sum(spec.real_page_size_bytes for spec in specs)
    return sizes


def layer_specs(group: Any) -> list[Any]:
    """What vLLM says of each layer of a KV group, in the order of `layer_names`."""
    by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    return [by_layer.get(name, group.kv_cache_spec) for name in group.layer_names]


def keeps_every_block(kv_cache_config: Any) -> bool:
    """Whether a request has all blocks of its tokens, in one KV group: then the tokens before a
    block are there. Of windows, chunks and states only the last ones are.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, RSWASpec

    groups = kv_cache_config.kv_cache_groups
    return len(groups) == 1 and all(
        isinstance(spec, FullAttentionSpec) and not isinstance(spec, RSWASpec)
        for spec in layer_specs(groups[0])
    )


def whole_spec(vllm_config: Any, spec: Any) -> Any:
    """The spec of a layer as an engine of one rank has it.

    Sources: vLLM's `derive_canonical_mappings`, for the number of shards; all ranks have the
    latents of MLA.
    """
    from vllm.v1.kv_cache_interface import AttentionSpec, MLAAttentionSpec

    if not isinstance(spec, AttentionSpec) or isinstance(spec, MLAAttentionSpec):
        return spec
    ranks = vllm_config.parallel_config.tensor_parallel_size
    shards = min(ranks, vllm_config.model_config.get_total_num_kv_heads())
    return dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads * shards, page_size_padded=None)


def pages_of(kv_caches: Any, kv_cache_layout: str) -> CanonicalPages:
    """Where the pages of vLLM's `CanonicalKVCaches` are in canonical ones.

    Args:
        kv_caches: with the mappings that vLLM has derived.
        kv_cache_layout: vLLM's name of the order of bytes, part of the namespace.

    Raises:
        SettingError: vLLM does not certify that the bytes are the same for all ranks.
    """
    numbers: dict[Any, int] = {}
    groups = []
    for refs in kv_caches.group_data_refs:
        for ref in refs:
            if not _is_certified(ref.mapping, kv_cache_layout):
                raise SettingError(
                    "canonical_layout=true can't be had: vLLM certifies no byte order of this "
                    f"engine's KV cache (kv_cache_layout={kv_cache_layout}) that does not depend "
                    "on tensor_parallel_size: choose another layout (VLLM_KV_CACHE_LAYOUT=LBHNC), "
                    "or leave it out"
                )
        groups.append([numbers.setdefault(ref.mapping, len(numbers)) for ref in refs])
    smallest = min((run.fragment_size for mapping in numbers for run in mapping.runs), default=0)
    if any(_is_by_token(mapping) for mapping in numbers):
        logger.warning(
            "canonical_layout copies the KV cache token by token, in pieces of %d bytes, which is "
            "slow, since kv_cache_layout=%s: VLLM_KV_CACHE_LAYOUT=LBHNC makes them whole pages, if "
            "all engines that share chunks are given it",
            smallest,
            kv_cache_layout,
        )
    return CanonicalPages([_page_map(mapping) for mapping in numbers], groups)


def _is_certified(mapping: Any, kv_cache_layout: str) -> bool:
    """Whether all engines of the namespace have that canonical page.

    A rank with one head has the same bytes by head and by token, and vLLM tells these apart by
    the strides of its tensor: they must agree with the layout that is in the namespace.
    """
    if mapping is None or not mapping.parallelism_agnostic:
        return False
    if mapping.canonical_page_size_bytes == mapping.local_page_size_bytes:
        return True
    return _is_by_token(mapping) == kv_cache_layout.endswith("NHC")


def _is_by_token(mapping: Any) -> bool:
    return any(run.num_fragments > 1 for run in mapping.runs)


def _page_map(mapping: Any) -> PageMap:
    """Of vLLM's `CanonicalPageMapping`."""
    runs = mapping.runs
    return PageMap(
        page_bytes=mapping.canonical_page_size_bytes,
        own=[run.local_offset for run in runs],
        whole=[run.canonical_offset for run in runs],
        sizes=[run.fragment_size for run in runs],
        counts=[run.num_fragments for run in runs],
        own_strides=[run.local_stride for run in runs],
        whole_strides=[run.canonical_stride for run in runs],
        num_writers=mapping.num_writers,
        writer=mapping.writer_index,
    )


def spec_text(vllm_config: Any, group: Any, *, whole: bool) -> str:
    """What vLLM says of a KV group's pages; with `whole`, as an engine of one rank has them."""
    if not whole:
        return str(group.kv_cache_spec)
    return str([str(whole_spec(vllm_config, spec)) for spec in layer_specs(group)])
