"""Events as vLLM publishes them: what becomes MessagePack, without the encoding.

The fields and their order are those of vLLM's `distributed/kv_events.py`. Since June 2026 an event
is a map with its `type`; before it was an array that begins with it. Both leave defaults out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raykv.base.ids import Key, group_of
from raykv.protocol.descriptions import Description

MEDIUM = "CPU"
LOCALITY = "LOCAL"

_LOW_BITS = (1 << 64) - 1

_NUM_REQUIRED_STORED = 7
_NUM_REQUIRED_REMOVED = 2
_ARRAY_FIELDS = 10
"""Of `BlockStored`, up to the kind of attention: what came after it was never sent in an array."""


def bare(key: Key) -> Description:
    """Stands for the description of a chunk if only its key is known."""
    return Description(namespace="", key=key, parent=None, inner=b"", tokens=b"", block_size=0)


@dataclass(frozen=True)
class WireFormat:
    """How events look.

    `form` is "map" or "array"; `hashes` "int" for the low 64 bits of a block hash, or "bytes" for
    all of it, as vLLM's VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES.
    """

    form: str = "map"
    hashes: str = "int"

    def stored(self, row: Description) -> Any:
        """`BlockStored` of the blocks of one chunk, with their tokens.

        All of them are named, although a prompt that shares only the first ones loads none: vLLM's
        events have blocks, and no chunks.
        """
        fields = {
            "block_hashes": [self.hash(each) for each in row.block_hashes],
            "parent_block_hash": None if row.parent is None else self.hash(row.parent),
            "token_ids": row.token_ids,
            "block_size": row.block_size,
            "lora_id": None,
            "medium": MEDIUM,
            "lora_name": row.lora,
            "extra_keys": None,
            "group_idx": group_of(Key(row.key)),
            "kv_cache_spec_kind": row.kind or None,
            # As vLLM writes it, which says no more of a block that it knows nothing of.
            "locality": LOCALITY if row.tokens else None,
        }
        return self._event("BlockStored", fields, _NUM_REQUIRED_STORED)

    def removed(self, group: int, hashes: Sequence[bytes]) -> Any:
        """`BlockRemoved` of blocks of one KV group."""
        fields = {
            "block_hashes": [self.hash(each) for each in hashes],
            "medium": MEDIUM,
            "group_idx": group,
        }
        return self._event("BlockRemoved", fields, _NUM_REQUIRED_REMOVED)

    def cleared(self) -> Any:
        """`AllBlocksCleared`."""
        return self._event("AllBlocksCleared", {}, 0)

    def hash(self, block_hash: bytes) -> int | bytes:
        """A block hash as it is published."""
        if self.hashes == "bytes":
            return block_hash
        return int.from_bytes(block_hash, "big") & _LOW_BITS

    def _event(self, kind: str, fields: dict[str, Any], num_required: int) -> Any:
        if self.form == "map":
            required = list(fields)[:num_required]
            kept = {k: v for k, v in fields.items() if k in required or v is not None}
            return {"type": kind, **kept}
        values = list(fields.values())[:_ARRAY_FIELDS]
        while len(values) > num_required and values[-1] is None:
            values.pop()
        return [kind, *values]


def batch(now: float, events: Sequence[Any]) -> Any:
    """A message's payload: when (Unix time), what, and the data-parallel rank, which there is not.

    vLLM's publishers always give a rank, so 0 stands for it.
    """
    return [now, list(events), 0]
