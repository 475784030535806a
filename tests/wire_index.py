"""A subscriber's index of published events, as a router keeps it; it shares no code with ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec


@dataclass
class Block:
    """A block as it was told."""

    parent: int | bytes | None
    tokens: list[int]
    size: int


@dataclass
class WireIndex:
    """By topic: the blocks that are held, by KV group and hash. Sees gaps in the numbers.

    `orphans`: blocks whose parent was not known when they came.
    """

    blocks: dict[str, dict[tuple[int, int | bytes], Block]] = field(default_factory=dict)
    last_seq: dict[str, int] = field(default_factory=dict)
    gaps: list[tuple[str, int, int]] = field(default_factory=list)
    orphans: int = 0

    def take(self, topic: str, seq: int, payload: bytes) -> None:
        """One message; those that came before are not taken in again."""
        last = self.last_seq.get(topic)
        if last is not None and seq <= last:
            return
        if last is not None and seq != last + 1:
            self.gaps.append((topic, last + 1, seq))
        self.last_seq[topic] = seq
        self.apply(topic, payload)

    def apply(self, topic: str, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            self._apply(self.blocks.setdefault(topic, {}), as_map(event))

    def _apply(self, blocks: dict[tuple[int, int | bytes], Block], event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            blocks.clear()
            return
        assert event["medium"] == "CPU"
        group = event["group_idx"]
        if event["type"] == "BlockRemoved":
            for each in event["block_hashes"]:
                del blocks[group, each]
            return
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == size * len(event["block_hashes"])
        if parent is not None and (group, parent) not in blocks:
            self.orphans += 1
        for number, each in enumerate(event["block_hashes"]):
            part = tokens[number * size : (number + 1) * size]
            blocks[group, each] = Block(parent, part, size)
            parent = each


def as_map(event: Any) -> dict[str, Any]:
    """An event as a map, in whatever form it was."""
    if isinstance(event, dict):
        return event
    kind, *values = event
    stored = [
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
    ]
    names = stored if kind == "BlockStored" else ["block_hashes", "medium", "group_idx"]
    return {"type": kind, **dict(zip(names, values, strict=False))}
