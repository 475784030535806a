"""Jobs of a worker for benchmarks: whole chunks of one KV group."""

from __future__ import annotations

from collections.abc import Sequence

from raykv.base.ids import Direction, Key, Stamp
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyJob

SPACE = "bench"
ORDERED = Stamp(1, 1)
"""The orders of a pool without a scheduler actor."""


def key_of(number: int) -> Key:
    """Make a key of KV group 0, as long as vLLM's."""
    return Key(number.to_bytes(32, "big") + bytes(4))


def named_job(
    job_id: int,
    direction: Direction,
    keys: Sequence[Key],
    block_ids: Sequence[int],
    *,
    namespace: str = SPACE,
    orders: Stamp = ORDERED,
) -> CopyJob:
    """Make a job of chunks with equally many blocks."""
    count = len(keys)
    return CopyJob(
        job_id,
        int(direction),
        namespace,
        Keys.of(keys),
        Numbers.of([len(block_ids) // count] * count),
        Numbers.of([0] * count),
        Numbers.of(block_ids),
        orders=orders,
    )
