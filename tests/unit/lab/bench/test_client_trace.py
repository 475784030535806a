"""What is played of a trace."""

from __future__ import annotations

from typing import Any

import pytest

from raykv.lab.bench.client_trace import TRACED_TOKENS, scaled, whole_conversations


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
    rows = scaled(TRACE, 32, 2.0, 0)
    assert [row["input_length"] for row in rows] == [31, 46, 18, 78, 21, 62]
    assert {row["output_length"] for row in rows} == {1}
    times = [row["timestamp"] for row in rows]
    assert times[0] == 0
    assert times[-1] == 3.0
    assert times[1] == pytest.approx(0.6)


def test_chunks_of_scaled_requests_hold_all_their_tokens() -> None:
    for row in scaled(TRACE, 32, 1.0, 0):
        assert row["input_length"] <= TRACED_TOKENS // 32 * len(row["hash_ids"])


def test_no_chunk_of_a_repeat_is_that_of_another() -> None:
    one, other = (
        {name for row in scaled(TRACE, 1, 1.0, repeat) for name in row["hash_ids"]}
        for repeat in range(2)
    )
    assert len(one) == len(other) == 10
    assert not one & other
