"""Plans for models of every kind, out of their folders: no engine, and no weights.

Engines of these models attach with the same KV groups and slots, and store what is said here:
`tests/e2e/zoo/test_kinds.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm", exc_type=ImportError)
from vllm.distributed import parallel_state

from deploy import sizes
from raykv.base.errors import SettingError
from raykv.protocol.descriptions import ChunkGroup, groups_text
from raykv.serve.plan import plan
from tests.fixtures.model_configs import LLAMA
from tests.fixtures.zoo import ZOO, build

MIB = 1 << 20
SPREAD = {"tensor_parallel_size": 2, "nnodes": 2}
STAGES = {"pipeline_parallel_size": 2, "nnodes": 2}
MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "model_type": "mamba2",
    "hidden_size": 64,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
T5 = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
ENGINE = {"block_size": 32, "max_model_len": 2048, "dtype": "bfloat16"}

STATE_TOKENS = 96 if torch.cpu._is_avx512_bf16_supported() else 64
"""In a chunk of Qwen3-Next: as large as its state, whose form depends on the CPU."""

LATENT_TOKENS = 32 if torch.cpu._is_amx_tile_supported() else 16
"""In a chunk of latents: without AMX vLLM's kernel has blocks of its own size."""


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_shape_is_read_from_a_models_folder(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    sizes = {"pool_bytes": "64MiB", "blocks_per_chunk": 2}
    found = plan(model, sizes, {"block_size": 16, "dtype": "float32"})
    # Keys and values of 2 heads of 16 numbers of 4 bytes in 4 layers.
    assert found.bytes_per_token == 2 * 2 * 16 * 4 * 4
    (group,) = found.shape.groups
    assert (group.kind, group.layers, group.tokens_per_chunk) == ("full attention", 4, 32)
    assert found.shape.slot_bytes == group.chunk_bytes == 32 * found.bytes_per_token
    assert found.pool.pool_bytes == 64 * MIB
    by_tokens = plan(model, {"block_size": 64}, {"block_size": 16})
    assert by_tokens.shape.groups[0].tokens_per_chunk == 64


def test_small_model_is_planned_by_its_name_without_a_download(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    expected = sizes.SMOLLM2_135M
    engine = {"dtype": "bfloat16", "max_model_len": expected.max_model_len, "block_size": 128}
    shape = plan("smollm2", {}, engine).shape
    assert shape == msgspec.structs.replace(expected, model="smollm2")
    assert not list(tmp_path.glob("raykv/*"))


def test_head_that_can_not_be_split_is_on_several_ranks(tmp_path: Path) -> None:
    model = folder(tmp_path, LLAMA)
    split = plan(model, {}, {"block_size": 16, "tensor_parallel_size": 4})
    assert split.bytes_per_token == 2 * 4 * 16 * 2 * 4
    assert (split.shape.num_ranks, split.shape.num_parts) == (4, 4)
    whole = plan(model, {"canonical_layout": True}, {"block_size": 16, "tensor_parallel_size": 4})
    assert whole.shape.slot_bytes == split.shape.slot_bytes // 2


def test_each_node_of_an_engine_keeps_its_ranks_part_of_a_chunk(tmp_path: Path) -> None:
    model = folder(tmp_path, {**LLAMA, "num_hidden_layers": 3})
    whole, spread, stages = (
        plan(model, {}, {"block_size": 64, **each}).shape
        for each in ({"tensor_parallel_size": 2}, SPREAD, STAGES)
    )
    assert (whole.num_nodes, whole.node_bytes) == (1, whole.slot_bytes)
    assert (spread.num_nodes, 2 * spread.node_bytes) == (2, whole.slot_bytes)
    assert spread.groups == whole.groups
    # One stage has two of the three layers.
    assert (stages.num_nodes, stages.num_ranks) == (2, 2)
    assert (stages.layers, stages.groups[0].layers) == (3, 3)
    assert 3 * stages.node_bytes == 2 * stages.slot_bytes


def test_latents_that_all_ranks_have_are_kept_by_each_rank_of_several_nodes(
    tmp_path: Path,
) -> None:
    """As vLLM's connector stores them: once only where all ranks are on one host."""
    model = str(build("deepseek", tmp_path))
    whole, spread = (
        plan(model, {}, {**ENGINE, **ZOO["deepseek"].engine, "tensor_parallel_size": 2, **more})
        for more in ({}, {"nnodes": 2})
    )
    assert (whole.shape.num_parts, spread.shape.num_parts) == (1, 2)
    assert spread.bytes_per_token == 2 * whole.bytes_per_token
    assert spread.shape.node_bytes == whole.shape.slot_bytes


@pytest.mark.parametrize(
    ("name", "kinds", "chunks"),
    [
        ("mistral", ["4 sliding window"], "0:32/3"),
        (
            "gemma3-groups",
            [*["2 sliding window"] * 5, "1 sliding window", "2 full attention"],
            "0:32/3 1:32/3 2:32/3 3:32/3 4:32/3 5:32/3 6:32",
        ),
        (
            "llama4",
            [*["1 chunked local attention"] * 3, "1 full attention"],
            "0:32/4 1:32/4 2:32/4 3:32",
        ),
        ("deepseek", ["2 latent attention"], f"0:{LATENT_TOKENS}"),
        (
            "qwen3-next",
            [*["1 recurrent state"] * 3, "1 full attention"],
            f"0:{STATE_TOKENS}/1 1:{STATE_TOKENS}/1 2:{STATE_TOKENS}/1 3:{STATE_TOKENS}",
        ),
    ],
)
def test_kv_groups_are_as_vllm_makes_them(
    name: str, kinds: list[str], chunks: str, tmp_path: Path
) -> None:
    found = plan(str(build(name, tmp_path)), {}, {**ENGINE, **ZOO[name].engine})
    groups = found.shape.groups
    assert [f"{each.layers} {each.kind}" for each in groups] == kinds
    told = [
        ChunkGroup(number, each.tokens_per_chunk, each.window_chunks)
        for number, each in enumerate(groups)
    ]
    assert groups_text(told) == chunks
    assert max(each.chunk_bytes for each in groups) == found.shape.slot_bytes


def test_windows_between_are_stored_beside_those_at_the_end(tmp_path: Path) -> None:
    model = str(build("gemma3", tmp_path))
    some = plan(model, {"window_share": 1.0}, ENGINE, [1024])
    none = plan(model, {"window_share": 0}, ENGINE, [1024])
    assert [each.tokens for each in some.prompts] == [1024, 2048]
    for with_some, with_none in zip(some.prompts, none.prompts, strict=True):
        assert with_some.num_bytes > with_some.default_bytes == with_none.num_bytes
        assert with_none.default_share == 1.0
    assert none.prompts[1].chunks == [3, 3, 3, 3, 3, 64]
    assert some.pool.tokens < none.pool.tokens


def test_larger_steps_store_fewer_states(tmp_path: Path) -> None:
    model = str(build("qwen3-next", tmp_path))
    engine = {**ENGINE, **ZOO["qwen3-next"].engine}
    small = plan(model, {}, {**engine, "max_num_batched_tokens": 512}, [])
    large = plan(model, {}, {**engine, "max_num_batched_tokens": 2048}, [])
    (prompt,) = {large.prompts[0].tokens, small.prompts[0].tokens}
    in_full = prompt // STATE_TOKENS
    # The ends of steps, of which one is before the last 1,024 tokens, and the last whole chunk.
    step = 512 // STATE_TOKENS * STATE_TOKENS
    ends = {*range(step, prompt, step), in_full * STATE_TOKENS}
    assert large.prompts[0].chunks == [2, 2, 2, in_full]
    assert small.prompts[0].chunks == [len(ends)] * 3 + [in_full]
    assert f"every {step} tokens with max_num_batched_tokens=512" in small.hints[-1]


def test_states_without_a_prefix_cache_are_stored_nowhere(tmp_path: Path) -> None:
    model = folder(tmp_path, MAMBA)
    off = plan(model, {}, {"enable_prefix_caching": False})
    assert off.prompts[-1].num_bytes == 0
    assert "give its engine enable_prefix_caching=True" in off.hints[-1]
    assert plan(model, {}, {"enable_prefix_caching": True}).prompts[-1].num_bytes > 0
    mixed = str(build("qwen3-next", tmp_path / "mixed"))
    with pytest.raises(SettingError, match="need --enable-prefix-caching"):
        plan(mixed, {}, {**ENGINE, "enable_prefix_caching": False})


def test_nothing_of_vllm_stays_changed(tmp_path: Path) -> None:
    before = dict(os.environ), vars(parallel_state).copy()
    plan(folder(tmp_path, LLAMA), {}, {"tensor_parallel_size": 2})
    assert dict(os.environ) == before[0]
    assert vars(parallel_state) == before[1]


def test_shape_of_the_manifests_is_what_plan_reads(tmp_path: Path) -> None:
    numbers = {"hidden_size": 4096, "head_dim": 128, "num_hidden_layers": 36}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    model = folder(tmp_path, {**LLAMA, **numbers, **heads, "max_position_embeddings": 40960})
    expected = sizes.QWEN3_8B
    block_size = expected.groups[0].tokens_per_chunk
    engine = {"block_size": block_size, "max_model_len": expected.max_model_len}
    assert plan(model, {}, engine).shape == msgspec.structs.replace(expected, model=model)


@pytest.mark.parametrize(
    ("settings", "engine", "expected"),
    [
        ({"pool_bytes": "much"}, {}, "pool_bytes='much' is not a size"),
        ({"pool_byte": 1}, {}, "did you mean 'pool_bytes'"),
        ({"blocks_per_chunk": 0}, {}, "'blocks_per_chunk' must be greater than 0"),
        ({"block_size": 33}, {"block_size": 16}, "must be a multiple of the GPU KV cache block"),
        ({"block_size": 32, "blocks_per_chunk": 2}, {}, "Specify only one of 'block_size'"),
        ({}, {"gpu_memory_utilization": 1}, "sizes follow from block_size"),
        ({}, {"kv_cache_dtype": "int3"}, "the KV cache of the model .*: cache_dtype: I"),
        ({}, {"dtype": "int3"}, "vLLM can't plan the KV cache of the model"),
        ({}, {"tensor_parallel_size": 3}, "must be divisible by"),
        ({}, {"tensor_parallel_size": 2, "nnodes": 4}, "evenly over nnodes=4"),
        ({}, {"nnodes": "two"}, "nnodes"),
        ({"canonical_layout": True}, SPREAD, "none of which has whole canonical pages"),
    ],
)
def test_settings_that_are_wrong_are_refused(
    tmp_path: Path, settings: dict[str, Any], engine: dict[str, Any], expected: str
) -> None:
    with pytest.raises(SettingError, match=expected):
        plan(folder(tmp_path, LLAMA), settings, engine)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (T5, "has an encoder and a decoder"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "encodes prompts as a whole"),
        ({**LLAMA, "num_attention_heads": 3}, "vLLM can't plan the KV cache of the model"),
        (None, "vLLM can't plan the KV cache of the model"),
    ],
)
def test_model_that_can_not_be_planned_is_refused(
    tmp_path: Path, config: dict[str, Any] | None, expected: str
) -> None:
    with pytest.raises(SettingError, match=expected):
        plan(folder(tmp_path, config) if config else str(tmp_path))
