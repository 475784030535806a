"""What is played of a trace."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.lab.bench.client.trace import TracePart, scaled, whole_conversations


def request(at: int, tokens: int, *names: int, answer: int = 32) -> dict[str, Any]:
    return {
        "timestamp": at,
        "input_length": tokens,
        "output_length": answer,
        "hash_ids": list(names),
    }


TRACE = [
    request(0, 1000, 0, 1),
    request(10, 1500, 0, 2, 3),
    request(20, 600, 0, 4),
    request(30, 2500, 0, 1, 5, 6, 7),
    request(40, 700, 0, 8),
    request(50, 2000, 0, 2, 3, 9),
]
"""Two conversations of two turns and two of one; all begin with the chunk 0."""


def test_conversations_are_whole_and_in_order_of_time() -> None:
    for seed in range(8):
        picked = whole_conversations(TRACE, 3, 100_000, seed)
        assert len(picked) in (3, 4)
        assert picked == sorted(picked, key=lambda row: row["timestamp"])
        firsts = [row["hash_ids"][1] for row in picked]
        assert all(firsts.count(name) == 2 for name in (1, 2) if name in firsts)


def test_conversations_are_left_out_if_one_request_is_too_long() -> None:
    picked = whole_conversations(TRACE, 100, 2400, seed=1)
    assert [row["timestamp"] for row in picked] == [10, 20, 40, 50]


def test_conversations_are_the_same_for_the_same_seed() -> None:
    assert whole_conversations(TRACE, 2, 9999, 3) == whole_conversations(TRACE, 2, 9999, 3)
    assert len({str(whole_conversations(TRACE, 1, 9999, seed)) for seed in range(20)}) > 1


def test_scaled_requests_are_shorter_and_come_at_the_rate() -> None:
    part = scaled(TRACE, 32, rate=2.0)
    assert part.chunk_tokens == 16
    assert [row["input_length"] for row in part.rows] == [31, 46, 18, 78, 21, 62]
    assert {row["output_length"] for row in part.rows} == {1}
    times = [row["timestamp"] for row in part.rows]
    assert times[0] == 0
    assert times[-1] == 3.0
    assert times[1] == pytest.approx(0.6)


def test_chunks_of_scaled_requests_hold_all_their_tokens() -> None:
    for row in scaled(TRACE, 32, 1.0).rows:
        assert row["input_length"] <= 16 * len(row["hash_ids"])


def test_tokens_known_are_whole_blocks_of_what_came_before() -> None:
    part = TracePart(tuple(TRACE), 512)
    # The chunk 0, which is whole, four times; a conversation's first turn had 488 tokens of chunk
    # 1, and the next one all of it; the other one's chunks 2 and 3.
    assert part.tokens_known(128) == 512 + 512 + 512 + 512 + 1408 // 128 * 128 - 384
    assert part.tokens_known(100_000) == 0


def test_tokens_known_never_have_a_prompts_last_token() -> None:
    part = TracePart((request(0, 512, 1), request(1, 512, 1)), 512)
    assert part.tokens_known(128) == 384
