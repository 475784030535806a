"""Identifiers and enums that every part of RayKV shares (DESIGN words, one meaning each)."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, IntEnum, StrEnum
from typing import NamedTuple, NewType

NodeId = NewType("NodeId", str)
"""Ray's node id, hex."""

EngineId = NewType("EngineId", str)
"""vLLM's `engine_id`: one per engine process and data-parallel rank."""

Namespace = NewType("Namespace", str)
"""Digest of everything that makes the KV bytes of two engines interchangeable; where an engine has
several places, followed by the part of it that is at one of them.
"""

PART_MARK = "/"
"""Between a namespace's digest and a part of an engine: what its ranks are called."""


def family_of(namespace: str) -> Namespace:
    """The namespace without the part, as people and orders name it."""
    return Namespace(namespace.partition(PART_MARK)[0])


def name_of_part(namespace: str) -> str:
    """The part's name in its namespace; empty: it is the whole."""
    return namespace.partition(PART_MARK)[2]


def part_of(namespace: str, part: str) -> Namespace:
    """The namespace of what a part of an engine has; an empty one is all of it."""
    return Namespace(f"{namespace}{PART_MARK}{part}" if part else namespace)


def shape_name(num_parts: int, digest: str) -> str:
    """What the names of all parts of engines of one shape end with, behind a dot."""
    return f"{num_parts}-{digest}"


def wholes(parts: Iterable[str]) -> list[list[str]]:
    """Those names of parts that together are whole chunks: all of one shape, or the empty one."""
    shapes: dict[str, list[str]] = {}
    for part in sorted({*parts}):
        shapes.setdefault(part.rpartition(".")[-1], []).append(part)
    return [
        same
        for shape, same in shapes.items()
        if not shape or shape.partition("-")[0] == str(len(same))
    ]


EVERY_NAMESPACE = Namespace("")
"""Stands for all namespaces in tables of floors, also for those not known yet."""


def short_namespace(namespace: str) -> str:
    """A namespace as people are shown it: the first digits, and the stage and the ranks."""
    digest, mark, part = namespace.partition(PART_MARK)
    return digest[:12] + mark + ".".join(part.split(".")[:2])


Key = NewType("Key", bytes)
"""vLLM's offload key: block hash followed by the KV group index (4 bytes, big endian)."""

Slot = NewType("Slot", int)
"""A chunk-sized place in one node's pool: its byte offset divided by `SLOT_ALIGNMENT`."""

SLOT_ALIGNMENT = 4096
"""Bytes. Slots start on page boundaries, so that pieces of the pool can be pinned and mapped."""

MAX_KEY_BYTES = 128
"""Bytes of an offload key; vLLM's longest has 36."""

MAX_BLOCKS = 1 << 32
"""Blocks of a chunk."""

MAX_REQUEST_ID = 256
"""Characters of a request's id that are shown; vLLM's own ids have some 60."""


def shown_id(request_id: str) -> str:
    """The id of a request as messages and people get it.

    A client may have chosen it: characters that can't be printed are escaped, and what is beyond
    `MAX_REQUEST_ID` characters is cut off.
    """
    cut = request_id[:MAX_REQUEST_ID]
    if cut.isprintable():
        return cut
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in cut)[:MAX_REQUEST_ID]


class Blocks(NamedTuple):
    """Blocks of a chunk that follow each other, by their numbers in it."""

    first: int
    length: int

    @property
    def is_sound(self) -> bool:
        """Whether a chunk can have these, at least one."""
        return 0 <= self.first < self.first + self.length <= MAX_BLOCKS

    def has(self, wanted: Blocks) -> bool:
        """Whether all wanted blocks are among these; true if none is wanted."""
        (first, length), (own_first, own_length) = wanted, self
        if not length:
            return True
        ends_inside = first + length <= own_first + own_length
        return length > 0 and own_first <= first and ends_inside


ALL_BLOCKS = Blocks(0, MAX_BLOCKS)
"""All blocks of a chunk, however many it has."""

NO_BLOCKS = Blocks(0, 0)


GROUP_BYTES = 4
"""At the end of a key: where vLLM packs the KV group index."""


def group_of(key: Key) -> int:
    """The KV group index of an offload key."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


def in_group(key: Key, group: int) -> Key:
    """The offload key of the same tokens in a KV group."""
    return Key(key[:-GROUP_BYTES] + group.to_bytes(GROUP_BYTES, "big"))


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
    """What happened to the directory; see `raykv.directory.known.events`."""

    LIFE_BEGAN = 0
    BLOCK_STORED = 1
    BLOCK_REMOVED = 2
    NODE_JOINED = 3
    NODE_LOST = 4
    CACHE_CLEARED = 5


class Refusal(IntEnum):
    """Why one chunk of a copy job did not happen. `NONE` means that it did."""

    NONE = 0
    WRITING = 2
    """It is being written: a load would read half a chunk, and another store has begun."""
    CLEARED = 3
    """The namespace was cleared after it was offered."""
    BAD_HANDLE = 4
    """No such chunk can be: of that size, of those blocks, of an engine that is not known."""
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
    """The bytes are not those that were sent, or not those that were stored."""
    TOO_LATE = 11
    """There was no time left, or no answer in time."""
    BREAKER_OPEN = 12
    """The node with the chunk did not answer a short while ago, and is not asked again yet."""
    PARTIAL = 13
    """Only some of the chunk's blocks were stored, and others were wanted."""
    NOT_HERE = 14
    """The node has no such chunk."""
    HERE = 15
    """Nothing is to be stored: the node has the chunk."""
    NO_ROOM = 16
    """There is no room for it, and nothing that may go for it."""


class TokenSource(StrEnum):
    """Where a prompt token's KV came from: every token of an ended request has one of these."""

    COMPUTED = "computed"
    OWN_CACHE = "own_cache"
    """It was in vLLM's own cache."""
    SAME_NODE = "same_node"
    """Loaded from the pool of the engine's node."""
    OTHER_NODE = "other_node"
    """Loaded from there too, but fetched from another node for it."""
    DISK = "disk"
    """Loaded from there too, but brought back from a disk for it."""


class MissReason(StrEnum):
    """Why tokens of a prompt were not loaded. The first missing chunk decides for all behind it."""

    INCOMPLETE_CHUNK = "incomplete_chunk"
    """Less than a whole chunk was left: mostly the prompt's end."""
    OPTED_OUT = "opted_out"
    """The request did not want to load (all of) it, or wants what only computing gives."""
    ADAPTER_UNKNOWN = "adapter_unknown"
    """The files of the request's LoRA adapter can't be read, or are not those that were loaded."""
    MEDIA_UNKNOWN = "media_unknown"
    """Images or sound of the request go by names that its client gave, or may do so."""
    WEIGHTS_CHANGED = "weights_changed"
    """The engine got other weights while it ran, and what there is was computed with others."""
    PAUSED = "paused"
    """The cache was switched off with `raykv pause`."""
    NOT_ATTACHED = "not_attached"
    """The engine had not reached its NodeActor yet."""
    NEVER_STORED = "never_stored"
    """The chunk is unknown: it was not stored, or long ago."""
    STORES_OFF = "stores_off"
    """It was computed here, and not to be stored: by that request, or because the cache was off."""
    STORE_FAILED = "store_failed"
    """It was computed here, and its store failed."""
    POOL_FULL = "pool_full"
    """There was no room: to store it when it was computed, or to fetch it."""
    EVICTED = "evicted"
    """It was given up for other chunks."""
    QUOTA = "quota"
    """It was given up since its tenant had more than its share."""
    CLEARED = "cleared"
    """The cache was emptied."""
    CLEARING = "clearing"
    """The engine had its cache emptied, and not all of its nodes knew of that yet."""
    OTHER_NAMESPACE = "other_namespace"
    """Only engines with another model, or another layout of the KV cache, have it."""
    PENDING_TOO_LONG = "pending_too_long"
    """It was being stored, and not there when the request could not wait any more."""
    UNANSWERED = "unanswered"
    """The scheduler actor did not say in time which node has it."""
    FETCH_SLOWER = "fetch_slower"
    """Another node, or a disk, has it, and computing was measured to be faster than fetching."""
    WINDOW_MISSING = "window_missing"
    """The prefix is known, but no window or state with which it could be loaded."""
    FETCH_FAILED = "fetch_failed"
    """Another node, or a disk, had it, and it did not come, or not in time."""
    NODE_LOST = "node_lost"
    """The NodeActor that had it was gone, or the engine could not reach its own."""
    LOAD_FAILED = "load_failed"
    """It was here, and its copy into the engine's KV cache failed."""
    BREAKER_OPEN = "breaker_open"
    """The actor to ask had failed too often and was left alone for a while."""
    ABORTED = "aborted"
    """The request ended before it was scheduled, or while it loaded."""
    OTHER = "other"
    """None of these; a failed hook of the connector, for example."""


class Stamp(NamedTuple):
    """The number of an operators' document of orders; of a copy, that under which it was stored.

    Numbers rise within a history, which begins anew with the store of Ray's head.
    """

    history: int
    number: int
