"""Engines of different tensor-parallel sizes and one pool: what one stores the other one loads.

The maps are vLLM's own; what a page of a rank looks like is written here anew, head by head.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("vllm")
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from raykv.base.errors import SettingError
from raykv.base.geometry import MAX_SLAB_BYTES
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.plan import Planner
from raykv.memory.handles import check_layout
from raykv.protocol.worker import CanonicalPages, KVLayout, TensorLayout
from raykv.vllm.kv_form import block_bytes, pages_of
from tests.fixtures.copy.memories import MEMORIES, NEVER, Memory, carried_out
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import named_key

STORE, LOAD = Direction.STORE, Direction.LOAD
Bytes = npt.NDArray[np.uint8]

NUM_BLOCKS = 8
ELEMENT = 2
BYTE_ORDERS = {
    # Of a page as vLLM's attention back ends have it: axes of [K or V, heads, tokens, dims].
    "packed, by head": (1, 2, 0, 3),
    "packed, by token": (2, 1, 0, 3),
    "halves, by head": (0, 1, 2, 3),
    "halves, by token": (0, 2, 1, 3),
}


@dataclass(frozen=True)
class Model:
    """What an engine serves. `order` is one of `BYTE_ORDERS`, or "latent": MLA."""

    order: str
    heads: int
    tokens: int
    dims: int
    group_layers: list[int]
    blocks_per_chunk: int

    @property
    def is_latent(self) -> bool:
        return self.order == "latent"

    def heads_of(self, rank: int, num_ranks: int) -> slice:
        """Those of which a rank has K and V."""
        if self.is_latent or num_ranks == 1:
            return slice(None)
        if num_ranks > self.heads:
            head = rank * self.heads // num_ranks
            return slice(head, head + 1)
        each = self.heads // num_ranks
        return slice(rank * each, (rank + 1) * each)

    def page(self, truth: Bytes, heads: slice = slice(None)) -> Bytes:
        """The bytes of K and V of some heads; `truth` is [K or V, heads, tokens, bytes]."""
        if self.is_latent:
            return truth[0, 0].reshape(-1)
        return truth[:, heads].transpose(BYTE_ORDERS[self.order]).reshape(-1)

    def truth(self, group: int, random: np.random.Generator) -> Bytes:
        """A chunk of a group, [blocks, layers, K or V, heads, tokens, bytes]."""
        shape = (self.blocks_per_chunk, self.group_layers[group])
        page = (2, self.heads, self.tokens, self.dims * ELEMENT)
        return random.integers(0, 256, (*shape, *page), np.uint8)

    def canonical_size(self, group: int) -> int:
        """Bytes of a chunk of a group."""
        page = 2 * self.heads if not self.is_latent else 1
        count = self.blocks_per_chunk * self.group_layers[group]
        return count * page * self.tokens * self.dims * ELEMENT

    def canonical(self, truth: Bytes) -> Bytes:
        """The chunk as it is to be in the pool."""
        blocks, layers = truth.shape[:2]
        return np.concatenate(
            [self.page(truth[block, layer]) for layer in range(layers) for block in range(blocks)]
        )


def vllm_spec(model: Model, num_ranks: int) -> Any:
    shape = {"block_size": model.tokens, "head_size": model.dims, "dtype": torch.bfloat16}
    if model.is_latent:
        return MLAAttentionSpec(num_kv_heads=1, **shape)
    return FullAttentionSpec(num_kv_heads=max(1, model.heads // num_ranks), **shape)


def vllm_tensor(model: Model, num_ranks: int) -> torch.Tensor:
    """The KV cache of a layer in the shape and strides of its byte order; it has no memory."""
    heads, tokens, dims = max(1, model.heads // num_ranks), model.tokens, model.dims
    is_by_token = model.order.endswith("by token")
    if model.order.startswith("halves"):
        # vLLM's axes: [blocks, K or V, tokens, heads, dims].
        sides = (tokens, heads) if is_by_token else (heads, tokens)
        memory = torch.empty((NUM_BLOCKS, 2, *sides, dims), dtype=torch.bfloat16, device="meta")
        return memory if is_by_token else memory.transpose(2, 3)
    # vLLM's axes: [blocks, heads, tokens, dims of K and V].
    sides = (tokens, heads) if is_by_token else (heads, tokens)
    memory = torch.empty((NUM_BLOCKS, *sides, 2 * dims), dtype=torch.bfloat16, device="meta")
    return memory.transpose(1, 2) if is_by_token else memory


def vllm_config(model: Model, rank: int, num_ranks: int) -> Any:
    parallel = SimpleNamespace(
        rank=rank,
        world_size=num_ranks,
        tensor_parallel_size=num_ranks,
        prefill_context_parallel_size=1,
        decode_context_parallel_size=1,
        cp_kv_cache_interleave_size=1,
    )
    of = SimpleNamespace(get_total_num_kv_heads=lambda: model.heads)
    return SimpleNamespace(parallel_config=parallel, model_config=of)


def cache_config(model: Model, num_ranks: int) -> Any:
    names = [
        [f"{group}.{layer}" for layer in range(layers)]
        for group, layers in enumerate(model.group_layers)
    ]
    spec = vllm_spec(model, num_ranks)
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=each) for each in names]
    return SimpleNamespace(num_blocks=NUM_BLOCKS, kv_cache_groups=groups)


def certified(model: Model, rank: int, num_ranks: int, kv_cache_layout: str = "") -> CanonicalPages:
    """What vLLM says of a rank's pages; the layout is the model's if none is named."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping

    config = cache_config(model, num_ranks)
    names = [name for group in config.kv_cache_groups for name in group.layer_names]
    tensor = vllm_tensor(model, num_ranks)
    found = canonical_mapping.derive_canonical_mappings(
        vllm_config(model, rank, num_ranks), config, dict.fromkeys(names, tensor)
    )
    refs = [
        [SimpleNamespace(mapping=found.get(name)) for name in group.layer_names]
        for group in config.kv_cache_groups
    ]
    layout = "LBNHC" if model.order.endswith("by token") else "LBHNC"
    return pages_of(SimpleNamespace(group_data_refs=refs), kv_cache_layout or layout)


class Rank:
    """A worker: where its KV is, and what it has of a model."""

    def __init__(
        self, model: Model, rank: int, num_ranks: int, padding: int, memory: Memory, number: int
    ) -> None:
        self.model = model
        self.heads = model.heads_of(rank, num_ranks)
        self.kv = memory.kvs[number]
        self._backend = memory.backend(number)
        self._pool = memory.pool
        page = vllm_spec(model, num_ranks).real_page_size_bytes
        stride = page + padding
        count = sum(model.group_layers)
        numbers = iter(range(count))
        self.layout = KVLayout(
            "memfd",
            len(self.kv),
            model.blocks_per_chunk,
            [
                TensorLayout(layer * NUM_BLOCKS * stride, NUM_BLOCKS, stride, stride)
                for layer in range(count)
            ],
            list(range(len(model.group_layers))),
            [[next(numbers) for _ in range(layers)] for layers in model.group_layers],
            canonical=certified(model, rank, num_ranks),
        )
        check_layout(self.layout)
        self.page_bytes = page
        self.planner = Planner(self.layout, rank)

    def pages(self, group: int, blocks: list[int]) -> Iterator[tuple[int, int, slice]]:
        """Block of the chunk, layer of the group, and where its page is in the KV cache."""
        for place, block in enumerate(blocks):
            for layer, number in enumerate(self.layout.groups[group]):
                tensor = self.layout.tensors[number]
                begin = tensor.offset + block * tensor.block_stride
                yield place, layer, slice(begin, begin + self.page_bytes)

    def write(self, group: int, blocks: list[int], truth: Bytes) -> None:
        for place, layer, where in self.pages(group, blocks):
            self.kv[where] = self.model.page(truth[place, layer], self.heads)

    def copy(
        self, direction: Direction, groups: list[int], slots: list[int], blocks: list[list[int]]
    ) -> int:
        keys = [named_key("k", group) for group in groups]
        plan = self.planner.plan(named_job(direction, keys, blocks))
        runs = plan.runs(range(len(slots)), list(map(Slot, slots)), MAX_SLAB_BYTES)
        assert carried_out(self._backend, direction, runs, NEVER)
        return runs.num_bytes


def kv_bytes(model: Model, padding: int) -> int:
    return (
        sum(model.group_layers) * NUM_BLOCKS * (vllm_spec(model, 1).real_page_size_bytes + padding)
    )


models = st.builds(
    Model,
    order=st.sampled_from([*BYTE_ORDERS, "latent"]),
    heads=st.sampled_from([1, 2, 4]),
    tokens=st.sampled_from([2, 4]),
    dims=st.sampled_from([2, 3, 8]),
    group_layers=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    blocks_per_chunk=st.sampled_from([1, 2]),
)
sizes = st.sampled_from([1, 2, 4])


@pytest.mark.parametrize("kind", MEMORIES)
@settings(deadline=None, max_examples=40)
@given(
    model=models,
    storing=sizes,
    loading=sizes,
    padding=st.sampled_from([0, 8]),
    seed=st.integers(0, 99),
)
def test_what_one_size_stores_another_loads(
    kind: str, model: Model, storing: int, loading: int, padding: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    slot_units = -(
        -max(map(model.canonical_size, range(len(model.group_layers)))) // SLOT_ALIGNMENT
    )
    pool_bytes = 4 * slot_units * SLOT_ALIGNMENT
    with MEMORIES[kind](storing + loading, pool_bytes, kv_bytes(model, padding)) as memory:
        for each in (memory.pool, *memory.kvs):
            each[:] = random.integers(0, 256, len(each), np.uint8)
        stores = [Rank(model, rank, storing, padding, memory, rank) for rank in range(storing)]
        loads = [
            Rank(model, rank, loading, padding, memory, storing + rank) for rank in range(loading)
        ]
        groups = random.integers(0, len(model.group_layers), 2).tolist()
        slots = (random.permutation(4)[:2] * slot_units).tolist()
        truths = [model.truth(group, random) for group in groups]
        count = model.blocks_per_chunk
        expected = memory.pool.copy()
        for slot, truth in zip(slots, truths, strict=True):
            whole = model.canonical(truth)
            expected[slot * SLOT_ALIGNMENT : slot * SLOT_ALIGNMENT + len(whole)] = whole
        written = 0
        for rank in stores:
            order = random.permutation(NUM_BLOCKS).tolist()
            blocks = [order[:count], order[count : 2 * count]]
            for group, some, truth in zip(groups, blocks, truths, strict=True):
                rank.write(group, some, truth)
            before = rank.kv.copy()
            num_bytes = rank.copy(STORE, groups, slots, blocks)
            assert num_bytes > 0
            written += num_bytes
            assert np.array_equal(rank.kv, before)
        assert np.array_equal(memory.pool, expected)
        # Nothing is stored twice, whoever has it.
        assert written == sum(len(model.canonical(truth)) for truth in truths)
        for rank in loads:
            order = random.permutation(NUM_BLOCKS).tolist()
            blocks = [order[:count], order[count : 2 * count]]
            wanted = rank.kv.copy()
            for group, some, truth in zip(groups, blocks, truths, strict=True):
                for place, layer, where in rank.pages(group, some):
                    wanted[where] = model.page(truth[place, layer], rank.heads)
            rank.copy(LOAD, groups, slots, blocks)
            assert np.array_equal(rank.kv, wanted)
        assert np.array_equal(memory.pool, expected)
        for rank in (*stores, *loads):
            for group in range(len(model.group_layers)):
                chunk = rank.planner.chunk_bytes(group, 99)
                assert chunk == model.canonical_size(group)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("order", [*BYTE_ORDERS, "latent"])
def test_size_of_a_block_is_the_same_for_all_ranks(order: str, num_ranks: int) -> None:
    model = Model(order, 4, 4, 8, [3, 2], 1)
    config = cache_config(model, num_ranks)
    for group in config.kv_cache_groups:
        group.kv_cache_spec = vllm_spec(model, num_ranks)
    found = block_bytes(vllm_config(model, 0, num_ranks), config)
    assert found == {group: model.canonical_size(group) for group in range(2)}


def test_layout_that_is_not_certified_is_refused() -> None:
    """By vLLM: 4 heads can't be spread over 3 ranks."""
    with pytest.raises(SettingError, match="canonical_layout=true can't be had"):
        certified(Model("packed, by head", 4, 2, 2, [1], 1), 0, 3)
    refs = [[SimpleNamespace(mapping=None)]]
    with pytest.raises(SettingError, match="leave it out"):
        pages_of(SimpleNamespace(group_data_refs=refs), "LBHNC")


def test_pages_by_token_are_copied_with_a_warning_that_names_the_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    certified(Model("packed, by head", 4, 2, 2, [1], 1), 0, 2)
    certified(Model("packed, by token", 4, 2, 2, [1], 1), 0, 1)
    assert "VLLM_KV_CACHE_LAYOUT" not in caplog.text
    certified(Model("packed, by token", 4, 2, 2, [1], 1), 0, 2)
    assert "in pieces of 16 bytes" in caplog.text
    assert "VLLM_KV_CACHE_LAYOUT=LBHNC" in caplog.text


def test_mapping_that_is_not_of_the_namespaces_layout_is_refused() -> None:
    """A rank with one head has the same bytes either way, and the whole page has not."""
    for order, layout in (("packed, by head", "LBNHC"), ("halves, by token", "LBHNC")):
        with pytest.raises(SettingError, match=f"kv_cache_layout={layout}"):
            certified(Model(order, 2, 4, 2, [1], 1), 1, 2, layout)
