"""Identifiers and enums that every part of RayKV shares (DESIGN words, one meaning each)."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NewType

NodeId = NewType("NodeId", str)
"""Ray's node id, hex."""

EngineId = NewType("EngineId", str)
"""vLLM's `engine_id`: one per engine process and data-parallel rank."""

Namespace = NewType("Namespace", str)
"""Digest of everything that makes the KV bytes of two engines interchangeable."""

Key = NewType("Key", bytes)
"""vLLM's offload key: block hash followed by the KV group index (4 bytes, big endian)."""

Slot = NewType("Slot", int)
"""A chunk-sized place in one node's pool: its byte offset divided by `SLOT_ALIGNMENT`."""

Generation = NewType("Generation", int)
"""The n-th use of a slot: scheduler epoch and counter in one ordered number."""

Epoch = NewType("Epoch", int)
"""The n-th life of an actor. Only the order of two epochs of the same actor means anything."""

SLOT_ALIGNMENT = 4096
"""Bytes. Slots start on page boundaries, so that pieces of the pool can be pinned and mapped."""

NO_GENERATION = Generation(0)
"""Older than any generation that is ever granted: a load that names it is refused."""

_COUNTER_BITS = 32


def make_generation(epoch: Epoch, counter: int) -> Generation:
    """Pack the scheduler actor's epoch and its grant counter; later grants compare higher."""
    assert 0 <= counter < 1 << _COUNTER_BITS, counter
    return Generation((epoch << _COUNTER_BITS) | counter)


def epoch_of(generation: Generation) -> Epoch:
    """The scheduler epoch under which `generation` was granted."""
    return Epoch(generation >> _COUNTER_BITS)


def group_of(key: Key) -> int:
    """The KV group index that vLLM packs into the last four bytes of an offload key."""
    return int.from_bytes(key[-4:], "big")


class Lookup(Enum):
    """Answer to a lookup; the names are those of vLLM's `LookupResult`."""

    MISS = "miss"
    HIT = "hit"
    HIT_PENDING = "hit_pending"
    RETRY = "retry"


class Direction(IntEnum):
    """Way of a copy: a store moves KV cache to pool, a load moves pool to KV cache."""

    STORE = 0
    LOAD = 1


class EventKind(IntEnum):
    """What happened to the directory; see `raykv.core.events`."""

    EPOCH_BEGAN = 0
    BLOCK_STORED = 1
    BLOCK_REMOVED = 2
    NODE_JOINED = 3
    NODE_LOST = 4
    CACHE_CLEARED = 5


class Refusal(IntEnum):
    """Why one chunk of a copy job did not happen. `NONE` means that it did."""

    NONE = 0
    STALE = 1
    """The slot has moved on to another generation, or holds another key."""
    WRITING = 2
    """The slot is being written; a load of it would read half a chunk."""
    CLEARED = 3
    """The namespace was cleared after this generation was granted."""
    BAD_HANDLE = 4
    """No slot can be at that place of the pool, or the node has another epoch."""
    CANCELLED = 5
    """The engine gave the job up before it was done."""
    QUEUE_FULL = 6
    """The node's copy queue is at its bound."""
    NODE_LOST = 7
    """The NodeActor died or could not be reached."""
    COPY_FAILED = 8
    """The back end reported an error while it copied."""
    POISONED = 9
    """Another rank of the same store failed."""
    CORRUPT = 10
    """The bytes that came over the network are not those that were sent."""
    TOO_LATE = 11
    """There was no time left, or no answer in time."""

    @property
    def is_final(self) -> bool:
        """Whether the chunk is gone for every engine, not only for this job."""
        return self in (Refusal.STALE, Refusal.CLEARED, Refusal.BAD_HANDLE)
