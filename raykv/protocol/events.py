"""The event stream: what happens to the directory, and the pages in which it crosses processes.

Every event has a place, (`life`, `seq`): the scheduler actor's life, and a number that rises by
one without gaps. Replaying all events of a life gives the directory; a life begins with
`LifeBegan`, an empty directory. `raykv.stream.replay.Replay` does it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from raykv.base.ids import EventKind
from raykv.protocol import columns as checked
from raykv.protocol import framing, listing
from raykv.protocol.columns import MAX_KEYS, Count, Keys, Numbers, Texts

MOST_EVENTS = 1024
"""In one page: with 36-byte keys under Ray's 100 KiB inline limit."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """What all events have. `life`: of the scheduler actor. `time`: in Unix seconds, to about a
    second; 0.0: it is not known.
    """

    life: int
    seq: int
    time: float = 0.0


class LifeBegan(Event, frozen=True, kw_only=True, tag=True):
    """A scheduler actor began with an empty directory: forget everything, it is published anew."""


class NodeEvent(Event, frozen=True, kw_only=True):
    """What events of nodes have: the node's life, and the number of its listing at which it was."""

    node_id: str
    node_life: int
    number: int


class NodeJoined(NodeEvent, frozen=True, kw_only=True, tag=True):
    """A NodeActor reported for the first time, or its listing began anew: it has nothing yet."""


class NodeLost(NodeEvent, frozen=True, kw_only=True, tag=True):
    """A NodeActor went silent or was restarted: nothing that it had is there any more."""


class BlockEvent(NodeEvent, frozen=True, kw_only=True):
    """What `BlockStored` and `BlockRemoved` have.

    `key` is vLLM's offload key: the block hash, then the KV group index in four bytes.
    """

    namespace: str
    key: bytes

    @property
    def block_hash(self) -> bytes:
        """vLLM's hash of the tokens up to the end of the chunk."""
        return self.key[:-4]

    @property
    def group(self) -> int:
        """vLLM's KV group index."""
        return int.from_bytes(self.key[-4:], "big")


class BlockStored(BlockEvent, frozen=True, kw_only=True, tag=True):
    """A node has a chunk, in RAM or on its disk, and had it in neither."""


class BlockRemoved(BlockEvent, frozen=True, kw_only=True, tag=True):
    """A node does not have a chunk any more."""


class CacheCleared(Event, frozen=True, kw_only=True, tag=True):
    """What was stored in a namespace before number `floor` of the orders' `history` is void, on all
    nodes; an empty namespace: in all. The chunks themselves go by `BlockRemoved`.
    """

    namespace: str
    history: int
    floor: int


class EventsMissed(Event, frozen=True, kw_only=True, tag=True):
    """Not in the log but made by its reader: the events before (`life`, `seq`) are not kept.

    What was known before may be wrong: take a `snapshot`, and read on from its place. `missed` is
    the number of events that are missing; None if that can't be said.
    """

    missed: int | None = None


class EventPage(framing.Versioned, frozen=True):
    """A stretch of the event log, as columns; see `raykv.directory.known.events`.

    Args:
        version: of the protocol.
        life: of the scheduler actor.
        first_seq: number of the first row.
        last_seq: the log's newest number.
        is_gap: it does not follow on what was asked for.
        nodes: "" for none.
        namespaces: likewise.
        kinds: of the rows, an `EventKind` each.
        keys: of chunks; of other events `KEYLESS`.
        lives: of the nodes; of CACHE_CLEARED the history.
        numbers: of the nodes' listings; of CACHE_CLEARED the floor.
        ages_ms: how long ago each happened; empty: that is not known.

    Raises:
        ValueError: columns of different lengths, or a row that is none. From `receive` that is a
            MessageError.
    """

    life: Count
    first_seq: Count
    last_seq: Count
    is_gap: bool = False
    nodes: Texts = Texts()
    namespaces: Texts = Texts()
    kinds: bytes = b""
    keys: Keys = Keys()
    lives: Numbers = Numbers()
    numbers: Numbers = Numbers()
    ages_ms: Numbers = Numbers()

    def __post_init__(self) -> None:
        columns = (self.kinds, self.nodes, self.namespaces, self.lives, self.numbers)
        checked.check_column(self.keys, *columns, *([self.ages_ms] if self.ages_ms else []))
        checked.check_numbers("kinds of events", self.kinds, 0, max(EventKind))

    def __len__(self) -> int:
        return len(self.kinds)


KEYLESS = b"\0"
"""Stands in a page for the key of events that are of no chunk."""


class ListingQuery(framing.Versioned, frozen=True):
    """Ask a NodeActor for the next part of its listing, of all namespaces, up to `most` rows."""

    position: listing.Position = listing.Position()
    most: Annotated[int, msgspec.Meta(ge=1, le=MAX_KEYS)] = MAX_KEYS


def events_of(page: EventPage, now: float = 0.0) -> Iterator[Event]:
    """The rows of a page as events; they have times if `now` says when it came, in Unix seconds."""
    ages = page.ages_ms if now and page.ages_ms else [None] * len(page)
    columns = zip(
        page.kinds,
        page.nodes,
        page.namespaces,
        page.keys,
        page.lives,
        page.numbers,
        ages,
        strict=True,
    )
    for row, (kind, node, namespace, key, life, number, age) in enumerate(columns):
        place = {"life": page.life, "seq": page.first_seq + row}
        if age is not None:
            place["time"] = round(now - age / 1000, 3)
        of_node = {"node_id": node, "node_life": life, "number": number}
        yield _event(EventKind(kind), place, of_node, namespace, key)


def _event(
    kind: EventKind, place: dict[str, Any], of_node: dict[str, Any], namespace: str, key: bytes
) -> Event:
    match kind:
        case EventKind.LIFE_BEGAN:
            return LifeBegan(**place)
        case EventKind.NODE_JOINED:
            return NodeJoined(**place, **of_node)
        case EventKind.NODE_LOST:
            return NodeLost(**place, **of_node)
        case EventKind.CACHE_CLEARED:
            history, floor = of_node["node_life"], of_node["number"]
            return CacheCleared(**place, namespace=namespace, history=history, floor=floor)
        case EventKind.BLOCK_STORED:
            return BlockStored(**place, **of_node, namespace=namespace, key=key)
        case EventKind.BLOCK_REMOVED:
            return BlockRemoved(**place, **of_node, namespace=namespace, key=key)


@dataclass(frozen=True)
class PublisherSettings:
    """What is published, and where: what `raykv publish start` is given.

    `endpoint` and `replay_endpoint` are ZMQ's. `form` is how vLLM writes events now (`map`), or
    did before June 2026 (`array`); `hashes` are the low 64 bits of block hashes (`int`) or whole
    (`bytes`).
    """

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
