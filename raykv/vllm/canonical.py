"""Chunks that engines of any tensor-parallel size share: vLLM's `canonical_layout`.

vLLM derives for each layer where a rank's page is in the canonical page, which is the page of an
engine of one rank, and says whether the bytes are the same for all tensor-parallel sizes. What it
does not certify is refused at the start: an engine that ran on without sharing would look like one
whose requests just miss.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from raykv.base.errors import SettingError
from raykv.protocol.worker import CanonicalPages, PageMap

logger = logging.getLogger("raykv")


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
