"""Sizes that follow from a model's shape, and what is said of settings that don't fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from raykv.client.capacity import (
    GroupShape,
    KVShape,
    Plan,
    PoolWishes,
    StoredPrompt,
    make_plan,
)

MIB = 1 << 20
FULL = GroupShape(kind="full attention", layers=32, tokens_per_chunk=64, chunk_bytes=32 * 4096 * 64)
WINDOW = GroupShape(
    kind="sliding window",
    layers=30,
    tokens_per_chunk=64,
    chunk_bytes=30 * 4096 * 64,
    window_tokens=1024,
    window_chunks=16,
)
SHAPE = KVShape(
    model="m",
    dtype="bfloat16",
    layers=32,
    max_model_len=4096,
    slot_bytes=8 * MIB,
    node_bytes=8 * MIB,
    num_nodes=1,
    num_ranks=1,
    num_parts=1,
    groups=(FULL,),
)
MIXED = msgspec.structs.replace(SHAPE, groups=(WINDOW, WINDOW, FULL))
PROMPTS = [
    StoredPrompt(tokens=2048, chunks=[24, 24, 32], default_chunks=[16, 16, 32]),
    StoredPrompt(tokens=4096, chunks=[32, 32, 64], default_chunks=[16, 16, 64]),
]


def wishes(**changes: Any) -> PoolWishes:
    usual: dict[str, Any] = {"pool_bytes": 8 << 30, "staging_bytes": None}
    return PoolWishes(**{**usual, **changes})


def plain(shape: KVShape = SHAPE, **changes: Any) -> Plan:
    chunks = [shape.max_model_len // each.tokens_per_chunk for each in shape.groups]
    whole = StoredPrompt(tokens=shape.max_model_len, chunks=chunks, default_chunks=chunks)
    return make_plan(shape, [whole], wishes(**changes))


def test_sizes_follow_from_the_shape() -> None:
    plan = plain()
    assert (plan.bytes_per_token, plan.window_bytes) == (128 << 10, 0)
    assert (plan.pool.chunks, plan.pool.tokens, plan.pool.prompts) == (1024, 65_536, [16.0])
    assert (plan.problems, plan.hints) == ([], [])
    # Tokens at the end of a prompt that fill no chunk are not held.
    assert plain(msgspec.structs.replace(SHAPE, max_model_len=4100)).pool.tokens == 65_536
    nothing = StoredPrompt(tokens=4096, chunks=[0], default_chunks=[0])
    plan = make_plan(SHAPE, [nothing], wishes())
    assert (plan.pool.tokens, plan.pool.prompts) == (0, [0.0])
    assert plan.prompts[0].default_share == 1.0


def test_prompt_takes_slots_of_all_groups() -> None:
    plan = make_plan(MIXED, PROMPTS, wishes())
    assert (plan.bytes_per_token, plan.window_bytes) == (128 << 10, 2 * 16 * 8 * MIB)
    assert [each.num_bytes for each in plan.prompts] == [80 * 8 * MIB, 128 * 8 * MIB]
    longest = plan.prompts[1]
    assert longest.bytes_per_token == 128 * 8 * MIB // 4096
    assert (longest.default_bytes, longest.default_share) == (96 * 8 * MIB, 0.75)
    assert (plan.pool.prompts, plan.pool.tokens) == ([12.8, 8.0], 8 * 4096)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"pool_bytes": 4 * MIB}, "has no room for a chunk of 8.0 MiB: set a larger pool_bytes"),
        ({"objection": "too large"}, "too large"),
        ({"staging_bytes": MIB}, "staging_bytes=1048576 has no room for a rank's part"),
    ],
)
def test_what_can_not_be_is_a_problem(changes: dict[str, Any], problem: str) -> None:
    plan = plain(**changes)
    (found,) = plan.problems
    assert problem in found
    assert plan.hints == []
    # Staging memory has to hold one part of a chunk.
    parts = msgspec.structs.replace(SHAPE, num_ranks=8, num_parts=8)
    assert bool(plain(parts, **changes).problems) == ("staging_bytes" not in changes)


def test_what_may_be_meant_is_a_hint() -> None:
    small = plain(pool_bytes=256 * MIB)
    assert small.problems == []
    assert "a prompt of 4,096 tokens takes 512.0 MiB" in small.hints[0]
    windows = plain(msgspec.structs.replace(SHAPE, groups=(WINDOW,)))
    assert windows.bytes_per_token == 0
    assert "attention looks back 1,024 tokens only" in windows.hints[0]
    assert plain(MIXED).hints == []
    known = make_plan(MIXED, PROMPTS, wishes(pool_bytes=256 * MIB), "known already")
    assert known.hints[1:] == ["known already"]


def test_pool_of_each_node_has_room_for_its_part_of_a_chunk() -> None:
    """So two of them have room for twice as many."""
    spread = plain(msgspec.structs.replace(SHAPE, node_bytes=4 * MIB, num_nodes=2))
    assert spread.pool.chunks == 2 * plain().pool.chunks
    assert spread.prompts == plain().prompts
    assert not plain(spread.shape, pool_bytes=4 * MIB).problems
    (problem,) = plain(spread.shape, pool_bytes=4 * MIB - 1).problems
    assert "has no room for a chunk of 4.0 MiB" in problem
