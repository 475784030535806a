"""A chunk's record, queues of records, and those of a store job.

            first part                 last part                   nobody copies
  (none) ─────────────► WRITING ──────────────────────► READY ────────────────────► (none)
                           │ a part fails, too late,       │ evicted, cleared, damaged,
                           │ cleared                       │ replaced
                           └────────────► VOID ◄───────────┘

A record is its own ticket: who was admitted to it ends with it, whatever the index has by then.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf

import msgspec

from raykv.base.ids import ALL_BLOCKS, Blocks, Key, Namespace, Refusal, Slot, Stamp


class ChunkState(IntEnum):
    """See the diagram in the module's docstring."""

    WRITING = 0
    READY = 1
    VOID = 2
    """Not found any more; its slot is free once the last reader and writer have ended."""


# Found as names of a module in a fifth of the time that their class takes to find them.
WRITING, READY, VOID = ChunkState


class Standing(IntEnum):
    """Which chunks go before which: those of the first kind that has any."""

    RELEASED = 0
    """Its session is over, or no engine has its weights."""
    SPARE = 1
    """Another node keeps it, too."""
    NORMAL = 2
    KEPT = 3
    """It goes when nothing else is left, or of lower priority; this is the lowest."""
    KEPT_2 = 4
    KEPT_3 = 5
    KEPT_4 = 6
    KEPT_5 = 7
    KEPT_6 = 8
    KEPT_7 = 9
    KEPT_8 = 10
    KEPT_9 = 11
    PINNED = 12
    """It does not go."""

    @staticmethod
    def kept(priority: int) -> Standing:
        """Of chunks that are kept with a priority from 1 to `MAX_PRIORITY`."""
        return Standing(Standing.KEPT + priority - 1)


NORMAL = Standing.NORMAL


class ChunkRecord(msgspec.Struct, eq=False, gc=False):
    """One stay of a chunk in a pool, which has a slot once it was admitted.

    There are millions: the garbage collector passes them by, and who takes one out of a queue takes
    its links away. A pool is not given up before its process.

    Args:
        namespace: see `Namespace`.
        key: see `Key`.
        slot_bytes: what the slot takes up.
        stamp: the orders under which its bytes were stored.
        blocks: those of it that are stored.
        tenant: label of the tenant; empty if the chunk belongs to none.
        slot: where its bytes are.
    """

    namespace: Namespace
    key: Key
    slot_bytes: int
    stamp: Stamp
    blocks: Blocks = ALL_BLOCKS
    tenant: str = ""
    slot: Slot = Slot(-1)
    state: ChunkState = ChunkState.WRITING
    number: int = 0
    """Of the listing, when it last changed."""
    readers: int = 0
    writers: int = 0
    """A bit for each rank that copies now."""
    used: int = 0
    """The order's time of the last use."""
    came_at: float = -inf
    """When its store began, in seconds, if that was in this life of the NodeActor."""
    found_at: float = -inf
    """When it was found last, in seconds."""
    hits: int = 0
    standing: Standing = Standing.NORMAL
    checksum: int | None = None
    """Of the slot's bytes, once it was made."""
    is_proven: bool = True
    """False: the checksum came with a pool file, and was not compared with the bytes since."""
    is_written: bool = False
    """The disk has had it, or does not want it: it is not written twice in one stay."""
    queue: RecordQueue | None = None
    before: ChunkRecord | None = None
    after: ChunkRecord | None = None

    def __repr__(self) -> str:
        return f"{self.state.name} {self.key.hex()} of {self.namespace} at {self.slot}"

    @property
    def is_busy(self) -> bool:
        """Whether it is being copied to or from."""
        return self.readers > 0 or self.writers > 0


class StorePart(msgspec.Struct, frozen=True, gc=False):
    """One rank's part of a store job.

    Args:
        life: of the EngineCore process; jobs of another life are others.
        job_id: rises within a life.
        rank: of this node's ranks.
        num_ranks: the number of parts that make a chunk.
    """

    life: int
    job_id: int
    rank: int = 0
    num_ranks: int = 1


class RecordQueue:
    """Records, linked to each other: each is in one queue at most."""

    __slots__ = ("first", "last")

    def __init__(self) -> None:
        self.first: ChunkRecord | None = None
        self.last: ChunkRecord | None = None

    def add(self, record: ChunkRecord, after: ChunkRecord | None = None) -> None:
        """Add a record that is in no queue, in front of one that is in this, or as the last."""
        assert record.queue is None, record
        before = self.last if after is None else after.before
        record.queue, record.before, record.after = self, before, after
        if before is None:
            self.first = record
        else:
            before.after = record
        if after is None:
            self.last = record
        else:
            after.before = record

    def renew(self, record: ChunkRecord) -> None:
        """Make one that is in this queue the last of it."""
        before, after, last = record.before, record.after, self.last
        if after is None or last is None:
            return
        if before is None:
            self.first = after
        else:
            before.after = after
        after.before, last.after, self.last = before, record, record
        record.before, record.after = last, None

    def remove(self, record: ChunkRecord) -> None:
        """Take out a record that is in this queue."""
        assert record.queue is self, record
        before, after = record.before, record.after
        if before is None:
            self.first = after
        else:
            before.after = after
        if after is None:
            self.last = before
        else:
            after.before = before
        record.queue = record.before = record.after = None

    def __iter__(self) -> Iterator[ChunkRecord]:
        record = self.first
        while record is not None:
            following = record.after
            yield record
            record = following


@dataclass(slots=True)
class OpenJob:
    """What ranks are told about a job's chunks; `ended` has a bit for each rank that has ended it.

    `full`: KV groups of which a chunk found no room. All later chunks of those groups are refused:
    behind a gap in a prefix nothing is worth its slot. `here`: what was offered and is there; that
    and what is stored are the job's `own`. Of each queue, `latest` is the chunk that has entered it
    last. `seen_at`: by an `expire`, the first time.
    """

    num_ranks: int
    verdicts: dict[tuple[Namespace, Key], ChunkRecord | Refusal] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    here: list[ChunkRecord] = field(default_factory=list)
    own: set[ChunkRecord] = field(default_factory=set)
    latest: dict[RecordQueue, ChunkRecord] = field(default_factory=dict)
    ended: int = 0
    seen_at: float | None = None
