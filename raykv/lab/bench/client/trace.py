"""A part of a trace of requests, cut to a size that one small server can play. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

TRACED_TOKENS = 512
"""Of a chunk in the published traces."""

COMMON = 0.1
"""A chunk with which this share of the requests begin is of no conversation: all have it."""


@dataclass(frozen=True)
class TracePart:
    """Requests as `vllm bench serve` reads them: lengths in tokens, times in seconds from 0."""

    rows: tuple[dict[str, Any], ...]
    chunk_tokens: int

    def tokens_known(self, block: int) -> int:
        """Tokens of prompts that a cache which forgets nothing has when they come: whole blocks,
        and never a prompt's last token.
        """
        known: set[tuple[Any, int]] = set()
        found = 0
        for row in self.rows:
            chunks = list(self._chunks(row))
            length = 0
            for chunk in chunks:
                if chunk not in known:
                    break
                length += chunk[1]
            known.update(chunks)
            found += min(length, row["input_length"] - 1) // block * block
        return found

    def _chunks(self, row: dict[str, Any]) -> Iterator[tuple[Any, int]]:
        """What the client makes tokens of: a name and a size for each; the last may be shorter."""
        left = row["input_length"]
        for name in row["hash_ids"]:
            if left <= 0:
                return
            size = min(left, self.chunk_tokens)
            yield name, size
            left -= size


def whole_conversations(
    rows: Sequence[dict[str, Any]], num_requests: int, most_tokens: int, seed: int
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


def scaled(rows: Sequence[dict[str, Any]], divisor: int, rate: float) -> TracePart:
    """With lengths divided, and times stretched by one factor to so many requests a second."""
    times = [row["timestamp"] for row in rows]
    first = min(times, default=0)
    seconds = len(rows) / rate / max(max(times, default=0) - first, 1)
    return TracePart(
        tuple(
            {
                "timestamp": (row["timestamp"] - first) * seconds,
                "input_length": max(1, row["input_length"] // divisor),
                "output_length": max(1, row["output_length"] // divisor),
                "hash_ids": row["hash_ids"],
            }
            for row in rows
        ),
        TRACED_TOKENS // divisor,
    )
