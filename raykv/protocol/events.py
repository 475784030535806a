"""The event stream: what happens to the directory, and the pages in which it crosses processes.

Every event has a place, (`epoch`, `seq`): the scheduler actor's epoch, and a number that rises by
one without gaps. Replaying all events of an epoch gives the directory; an epoch begins with
`EpochBegan`, an empty directory. `raykv.stream.replay.Replay` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from raykv.base.ids import EventKind
from raykv.protocol.node import Inventory


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What all events have. `time`: in Unix seconds, to about a second; 0.0: it is not known."""

    epoch: int
    seq: int
    time: float = 0.0


class EpochBegan(Event, frozen=True, kw_only=True, tag=True):
    """A scheduler actor began with an empty directory: forget everything, it is published anew."""


class NodeJoined(Event, frozen=True, kw_only=True, tag=True):
    """A NodeActor reported for the first time; `node_epoch` is the n-th life of it."""

    node_id: str
    node_epoch: int


class NodeLost(Event, frozen=True, kw_only=True, tag=True):
    """A NodeActor went silent or was restarted: nothing that it held is there any more."""

    node_id: str
    node_epoch: int


class BlockEvent(Event, frozen=True, kw_only=True):
    """What `BlockStored` and `BlockRemoved` have.

    `key` is vLLM's offload key: the block hash, then the KV group index in four bytes.
    """

    node_id: str
    namespace: str
    key: bytes
    slot: int
    generation: int

    @property
    def block_hash(self) -> bytes:
        """vLLM's hash of the tokens up to the end of the chunk."""
        return self.key[:-4]

    @property
    def group(self) -> int:
        """vLLM's KV group index."""
        return int.from_bytes(self.key[-4:], "big")


class BlockStored(BlockEvent, frozen=True, kw_only=True, tag=True):
    """A chunk can be loaded from a node."""


class BlockRemoved(BlockEvent, frozen=True, kw_only=True, tag=True):
    """A chunk can't be loaded from a node any more: evicted, or found to be missing."""


class CacheCleared(Event, frozen=True, kw_only=True, tag=True):
    """All chunks of a namespace are gone, on all nodes, up to a generation."""

    namespace: str
    generation: int


class EventsMissed(Event, frozen=True, kw_only=True, tag=True):
    """Not in the log but made by its reader: the events before (`epoch`, `seq`) are not kept.

    What was known before may be wrong: take a `snapshot`, and read on from its place. `missed` is
    the number of events that are missing; None if that can't be said.
    """

    missed: int | None = None


class EventPage(msgspec.Struct, frozen=True):
    """A stretch of the event log, as columns; see `raykv.directory.log`.

    `ages_ms`: how long ago each happened, to about a second; empty: that is not known. The first
    row has the number `first_seq`. `is_gap`: it does not follow on what was asked for.
    `last_seq` is the log's newest number. `node_index` and `namespace_index` point into `nodes`
    and `namespaces`, which have "" for none.
    """

    version: int
    epoch: int
    first_seq: int
    last_seq: int
    is_gap: bool = False
    nodes: list[str] = []
    namespaces: list[str] = []
    kinds: list[int] = []
    node_index: list[int] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []
    ages_ms: list[int] = []

    def __len__(self) -> int:
        return len(self.kinds)


class SnapshotPage(msgspec.Struct, frozen=True):
    """A part of the directory: chunks of one node; see `raykv.directory.answers.snapshots`.

    All pages together, followed by the events after (`epoch`, `seq`), are the directory. `cursor`
    asks for the next page. With `error` set the snapshot has to be begun anew.
    """

    version: int
    epoch: int
    seq: int
    cursor: int
    node_id: str = ""
    node_epoch: int = 0
    chunks: Inventory = Inventory()
    is_last: bool = False
    error: str = ""


def events_of(page: EventPage, now: float = 0.0) -> Iterator[Event]:
    """The rows of a page as events; they have times if `now` says when it came, in Unix seconds."""
    ages = page.ages_ms if now and page.ages_ms else [None] * len(page)
    columns = zip(
        page.kinds,
        page.node_index,
        page.namespace_index,
        page.keys,
        page.slots,
        page.generations,
        ages,
        strict=True,
    )
    for number, (kind, node, namespace, key, slot, generation, age) in enumerate(columns):
        place = {"epoch": page.epoch, "seq": page.first_seq + number}
        yield _event(
            EventKind(kind),
            place if age is None else {**place, "time": round(now - age / 1000, 3)},
            page.nodes[node],
            page.namespaces[namespace],
            key,
            slot,
            generation,
        )


def _event(
    kind: EventKind,
    place: dict[str, Any],
    node_id: str,
    namespace: str,
    key: bytes,
    slot: int,
    generation: int,
) -> Event:
    match kind:
        case EventKind.EPOCH_BEGAN:
            return EpochBegan(**place)
        case EventKind.NODE_JOINED:
            return NodeJoined(**place, node_id=node_id, node_epoch=generation)
        case EventKind.NODE_LOST:
            return NodeLost(**place, node_id=node_id, node_epoch=generation)
        case EventKind.CACHE_CLEARED:
            return CacheCleared(**place, namespace=namespace, generation=generation)
        case EventKind.BLOCK_STORED | EventKind.BLOCK_REMOVED:
            of = BlockStored if kind is EventKind.BLOCK_STORED else BlockRemoved
            return of(
                **place,
                node_id=node_id,
                namespace=namespace,
                key=key,
                slot=slot,
                generation=generation,
            )


@dataclass(frozen=True)
class PublisherSettings:
    """See the settings `events_...`; `endpoint` and `replay_endpoint` are ZMQ's."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = "kv@{node}@{model}"
    form: str = "map"
    hashes: str = "int"


class PublisherStatus(msgspec.Struct, frozen=True):
    """What the publisher does, since its start; `error` says why it does nothing.

    `endpoint` and `replay_endpoint` are as they were bound. `held`: chunks that are
    published; `waiting`: those that are not published yet; `undescribed` were published as a bare
    hash, `skipped` not at all. `restarts`: how often all was taken back and published again.
    `dropped` messages did not fit before a subscriber that was too slow.
    """

    endpoint: str
    replay_endpoint: str
    topic: str
    format: str
    hashes: str
    pid: int
    streams: int = 0
    held: int = 0
    waiting: int = 0
    messages: int = 0
    undescribed: int = 0
    skipped: int = 0
    restarts: int = 0
    dropped: int = 0
    replays: int = 0
    error: str = ""
