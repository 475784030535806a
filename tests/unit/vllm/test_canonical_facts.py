"""What engines of different tensor-parallel sizes must agree on before they share chunks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

from raykv.base.errors import SettingError
from raykv.base.settings import load_settings
from raykv.vllm.identity import readers
from raykv.vllm.internals.engine import cpu_writer
from raykv.vllm.kv_form import kv_form_of
from raykv.vllm.spec import TOLD, told_to_specs

HEADS, TOKENS, DIMS = 4, 32, 64
PAGE_BYTES = 2 * HEADS * TOKENS * DIMS * 4
LAYERS = ["layer.0", "layer.1"]


def layer(num_ranks: int, **changed: Any) -> Any:
    shape = {"block_size": TOKENS, "head_size": DIMS, "dtype": torch.float32, **changed}
    return FullAttentionSpec(num_kv_heads=max(1, HEADS // num_ranks), **shape)


def caches(spec: Any) -> Any:
    group = SimpleNamespace(kv_cache_spec=spec, layer_names=LAYERS)
    return SimpleNamespace(kv_cache_groups=[group], num_blocks=8)


def engine(num_ranks: int, dtype: Any = torch.float32) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=num_ranks, decode_context_parallel_size=1
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def offloading(num_ranks: int, *, canonical: bool, layout: str = "LBHNC") -> Any:
    sizes = {"tp_size": num_ranks, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    return SimpleNamespace(
        canonical_layout=canonical,
        replicated_layout=False,
        kv_cache_layout=layout,
        parallel=SimpleNamespace(world_size=num_ranks, **sizes),
    )


def facts(num_ranks: int, *, canonical: bool, layout: str = "LBHNC", spec: Any = None) -> Any:
    found = readers.ReadableEngine(
        engine(num_ranks),
        caches(layer(num_ranks) if spec is None else spec),
        offloading(num_ranks, canonical=canonical, layout=layout),
    )
    asked = (readers.kv_groups, readers.replicated, readers.parallel)
    return str([read(found) for read in asked])


def test_engines_of_all_sizes_have_one_namespace_if_they_are_canonical() -> None:
    assert len({facts(ranks, canonical=True) for ranks in (1, 2, 4, 8)}) == 1
    assert len({facts(ranks, canonical=False) for ranks in (1, 2, 4, 8)}) == 4
    assert facts(1, canonical=True) != facts(1, canonical=False)


def test_layers_that_differ_in_padding_only_have_one_namespace() -> None:
    padded = layer(2, page_size_padded=PAGE_BYTES)
    assert facts(2, canonical=True, spec=padded) == facts(1, canonical=True)


def test_layers_of_their_own_specs_are_told_one_by_one() -> None:
    specs = {name: layer(2) for name in LAYERS}
    mixed = UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=specs)
    whole = UniformTypeKVCacheSpecs(
        block_size=TOKENS, kv_cache_specs={name: layer(1) for name in LAYERS}
    )
    assert facts(2, canonical=True, spec=mixed) == facts(1, canonical=True, spec=whole)


@pytest.mark.parametrize(
    "other",
    [
        {"layout": "LBNHC"},
        {"spec": layer(1, block_size=16)},
        {"spec": layer(1, dtype=torch.bfloat16)},
        {"spec": layer(2)},
    ],
    ids=["layout", "tokens", "dtype", "heads"],
)
def test_what_changes_a_canonical_page_is_another_namespace(other: dict[str, Any]) -> None:
    assert facts(1, canonical=True, **other) != facts(1, canonical=True)


def test_sizes_are_told_to_specs_only_and_are_no_setting() -> None:
    config: dict[str, Any] = {"canonical_layout": True, "staging_bytes": 8}
    for num_ranks in (1, 2, 8):
        with told_to_specs(config, engine(num_ranks), caches(layer(num_ranks))):
            sizes = config[TOLD].block_bytes
        assert sizes == {0: 2 * PAGE_BYTES}
        assert config == {"canonical_layout": True, "staging_bytes": 8}
    with pytest.raises(SettingError, match="unknown setting"):
        load_settings({TOLD: {}}, {})


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_form_is_that_of_an_engine_of_one_rank(num_ranks: int) -> None:
    forms = []
    for ranks in (1, num_ranks):
        spec = SimpleNamespace(
            config=offloading(ranks, canonical=True),
            group_ids=[0],
            blocks_per_chunk=2,
            slot_bytes_by_group=lambda: {0: 4 * PAGE_BYTES},
        )
        forms.append(kv_form_of(engine(ranks), caches(layer(ranks)), spec))
    assert forms[0] == forms[1]
    assert (forms[0].num_ranks, forms[0].groups[0].page_bytes) == (1, PAGE_BYTES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_pages_that_vllms_cpu_kernel_writes_are_those_that_vllm_certifies(
    num_ranks: int, dtype: Any
) -> None:
    """Its mapping takes a page for heads of plain rows; the kernel orders the inside of a head."""
    write = cpu_writer(engine(1, dtype), layer(1, dtype=dtype))
    random = np.random.default_rng(0)
    keys, values = (
        random.integers(-100, 100, (TOKENS, HEADS, DIMS)).astype(np.float32) for _ in range(2)
    )
    whole = np.asarray(write(keys, values)).reshape(-1)
    each = HEADS // num_ranks
    parts = [
        np.asarray(write(keys[:, at : at + each].copy(), values[:, at : at + each].copy()))
        for at in range(0, HEADS, each)
    ]
    assert np.array_equal(np.concatenate([part.reshape(-1) for part in parts]), whole)
