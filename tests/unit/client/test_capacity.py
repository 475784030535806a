"""Sizes that follow from a model's shape, and what is said of settings that don't fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy import sizes
from raykv.base.errors import SettingError
from raykv.client.capacity import KVShape, PoolWishes, make_plan
from tests.fixtures.model_configs import LLAMA

MIB = 1 << 20
SHAPE = KVShape(
    model="m",
    dtype="bfloat16",
    layers=32,
    layer_bytes=4096,
    is_latent=False,
    window_tokens=None,
    max_model_len=4096,
    tokens_per_block=16,
    num_ranks=1,
)


def wishes(**changes: Any) -> PoolWishes:
    usual: dict[str, Any] = {
        "pool_bytes": 8 << 30,
        "blocks_per_chunk": 4,
        "lease_slots": 64,
        "staging_bytes": None,
    }
    return PoolWishes(**{**usual, **changes})


def test_sizes_follow_from_the_shape() -> None:
    plan = make_plan(SHAPE, wishes())
    assert plan.bytes_per_token == 128 << 10
    assert plan.tokens_per_chunk == 64
    assert plan.slot_bytes == 8 * MIB
    assert (plan.pool.chunks, plan.pool.tokens) == (1024, 65_536)
    assert plan.pool.longest_prompts == 16.0
    assert plan.sensible_lease_slots == 128
    assert (plan.problems, plan.hints) == ([], [])


def test_slot_is_rounded_up_to_pages() -> None:
    shape = msgspec.structs.replace(SHAPE, layers=1, layer_bytes=100, tokens_per_block=1)
    assert make_plan(shape, wishes(blocks_per_chunk=1)).slot_bytes == 4096


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pool_bytes": 4 * MIB}, "has no room for a chunk of 8.0 MiB: set a larger pool_bytes"),
        ({"objection": "too large"}, "too large"),
        ({"staging_bytes": MIB}, "staging_bytes=1048576 has no room for a rank's part"),
    ],
)
def test_what_can_not_be_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    plan = make_plan(SHAPE, wishes(**changes))
    (found,) = plan.problems
    assert problem in found
    assert plan.hints == []


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"pool_bytes": 256 * MIB, "lease_slots": 1}, "a prompt of 4,096 tokens takes 512.0 MiB"),
        ({"lease_slots": 600}, "lease_slots=600 is more than half of the pool's 1,024 slots"),
    ],
)
def test_what_may_be_meant_is_a_hint(changes: dict[str, Any], hint: str) -> None:
    plan = make_plan(SHAPE, wishes(**changes))
    assert plan.problems == []
    assert hint in plan.hints[0]


def test_window_is_mentioned() -> None:
    plan = make_plan(msgspec.structs.replace(SHAPE, window_tokens=1024), wishes())
    assert "attention looks back 1,024 tokens only" in plan.hints[0]


# Out of a model's folder


LATENT = {
    **LLAMA,
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "q_lora_rank": None,
    "n_routed_experts": 4,
    "moe_intermediate_size": 32,
}
MIXED = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": 512,
}
RECURRENT = {**LLAMA, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1"}


def folder(tmp_path: Path, config: dict[str, Any]) -> str:
    pytest.importorskip("vllm")
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def test_shape_is_read_from_a_models_folder(tmp_path: Path) -> None:
    from raykv.client.plan import plan

    model = folder(tmp_path, LLAMA)
    sizes = {"pool_bytes": "64MiB", "blocks_per_chunk": 2}
    found = plan(model, sizes, {"block_size": 16, "dtype": "float32"})
    # Keys and values of 2 heads of 16 numbers of 4 bytes in 4 layers.
    assert found.bytes_per_token == 2 * 2 * 16 * 4 * 4
    assert found.tokens_per_chunk == 32
    assert found.pool.pool_bytes == 64 * MIB
    split = plan(model, sizes, {"block_size": 16, "tensor_parallel_size": 4})
    # A head can't be split: two ranks have the same one.
    assert split.bytes_per_token == 2 * 4 * 16 * 2 * 4
    by_tokens = plan(model, {"block_size": 64}, {"block_size": 16})
    assert by_tokens.tokens_per_chunk == 64


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [
        (
            sizes.SMOLLM2_135M,
            {
                "hidden_size": 576,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                "num_hidden_layers": 30,
            },
        ),
        (
            sizes.QWEN3_8B,
            {
                "hidden_size": 4096,
                "head_dim": 128,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_hidden_layers": 36,
                "max_position_embeddings": 40960,
            },
        ),
    ],
    ids=["smollm2", "qwen3"],
)
def test_shapes_of_the_manifests_are_what_plan_reads(
    tmp_path: Path, shape: KVShape, numbers: dict[str, int]
) -> None:
    from raykv.client.plan import plan

    model = folder(tmp_path, {**LLAMA, "max_position_embeddings": 8192, **numbers})
    engine = {"block_size": shape.tokens_per_block, "max_model_len": shape.max_model_len}
    assert plan(model, {}, engine).shape == msgspec.structs.replace(shape, model=model)


def test_latent_attention_has_one_vector_for_all_heads(tmp_path: Path) -> None:
    from raykv.client.plan import plan

    found = plan(folder(tmp_path, LATENT))
    assert found.shape.is_latent
    assert found.bytes_per_token == (512 + 64) * 2 * 4


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MIXED, r"mixes layers of several kinds \(full_attention, sliding_attention\)"),
        (RECURRENT, "has layers with a recurrent state"),
    ],
    ids=["mixed", "recurrent"],
)
def test_model_whose_sizes_are_not_known_is_refused(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    from raykv.client.plan import plan

    with pytest.raises(SettingError, match=expected):
        plan(folder(tmp_path, config))


@pytest.mark.parametrize(
    ("settings", "engine", "expected"),
    [
        ({"pool_bytes": "much"}, {}, "pool_bytes='much' is not a size"),
        ({"pool_byte": 1}, {}, "did you mean 'pool_bytes'"),
        ({"blocks_per_chunk": 0}, {}, "blocks_per_chunk=0 must be a whole number"),
        ({"block_size": 33}, {"block_size": 16}, "no multiple of vLLM's block, 16 tokens"),
        ({"block_size": 32, "blocks_per_chunk": 2}, {}, "are both set"),
        ({}, {"gpu_memory_utilization": 1}, "sizes follow from block_size"),
        ({}, {"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3'"),
        ({}, {"dtype": "int3"}, "vLLM can't read the model"),
    ],
)
def test_settings_that_are_wrong_are_refused(
    tmp_path: Path, settings: dict[str, Any], engine: dict[str, Any], expected: str
) -> None:
    from raykv.client.plan import plan

    with pytest.raises(SettingError, match=expected):
        plan(folder(tmp_path, LLAMA), settings, engine)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    from raykv.client.plan import plan

    with pytest.raises(SettingError, match="vLLM can't read the model"):
        plan(str(tmp_path))
