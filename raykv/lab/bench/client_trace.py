"""A part of a trace of requests, cut to a size that one server can play."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

TRACED_TOKENS = 512
"""Of a chunk in the published traces."""

COMMON = 0.1
"""A chunk with which this share of the requests begin is of no conversation: all have it."""

Rows = Sequence[dict[str, Any]]


def whole_conversations(
    rows: Rows, num_requests: int, most_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """All requests of conversations that are drawn until there are so many, in order of time.

    Conversations with a request of more than `most_tokens` are left out.
    """
    counts = Counter(row["hash_ids"][0] for row in rows if row["hash_ids"])
    common = {name for name, count in counts.items() if count > COMMON * len(rows)}
    conversations: dict[Any, list[dict[str, Any]]] = {}
    for number, row in enumerate(rows):
        own = (name for name in row["hash_ids"] if name not in common)
        conversations.setdefault(next(own, ("alone", number)), []).append(row)
    fitting = [
        some
        for some in conversations.values()
        if all(row["input_length"] + row["output_length"] <= most_tokens for row in some)
    ]
    Random(seed).shuffle(fitting)
    picked: list[dict[str, Any]] = []
    for some in fitting:
        if len(picked) >= num_requests:
            break
        picked += some
    return sorted(picked, key=lambda row: row["timestamp"])


def scaled(rows: Rows, divisor: int, rate: float, repeat: int) -> list[dict[str, Any]]:
    """With lengths divided, times in seconds from 0, stretched by one factor to so many requests a
    second, and chunks that no other repeat has.
    """
    times = [row["timestamp"] for row in rows]
    first = min(times, default=0)
    seconds = len(rows) / rate / max(max(times, default=0) - first, 1)
    return [
        {
            "timestamp": (row["timestamp"] - first) * seconds,
            "input_length": max(1, row["input_length"] // divisor),
            "output_length": max(1, row["output_length"] // divisor),
            "hash_ids": [f"{repeat}-{name}" for name in row["hash_ids"]],
        }
        for row in rows
    ]
