"""A NodeActor and the scheduler actor: what the node has, and what the directory knows."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import Stamp
from raykv.protocol.columns import MAX_GROUPS, MAX_NUMBER, MAX_POOL_BYTES, MAX_ROWS
from raykv.protocol.engine import Naming
from raykv.protocol.listing import ListingPart, Position
from raykv.protocol.measures import BreakerReport
from raykv.protocol.named.columns import Count, Named, NamedKeys, Text
from raykv.protocol.named.place import NOTHING_ORDERED, EngineHello
from raykv.protocol.node import NodeStats
from raykv.protocol.sessions import SessionNews

MOST_ENGINES = 1024
"""Of one node."""

MOST_NAMESPACES = 256
"""That one message names."""

PAUSE_MS = (10, 1000)
"""Between two reports, at least and at most."""


class ReportedEngine(msgspec.Struct, frozen=True):
    """An engine that a node introduces, and its counters since its start; the rest as in `Tell`."""

    hello: EngineHello
    counters: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)] = {}
    breakers: BreakerReport = BreakerReport()
    heard: Stamp = NOTHING_ORDERED
    weights: Count = 0


class SessionsWord(msgspec.Struct, frozen=True, array_like=True):
    """What is said of a session of a namespace, without its chunks."""

    namespace: Named
    news: SessionNews


class Report(msgspec.Struct, frozen=True):
    """A NodeActor's heartbeat, with the next part of its listing.

    Args:
        version: of the protocol.
        node_id: Ray's.
        life: of the NodeActor and its listing.
        seq: rises with each.
        part: of the listing, from where the directory has read; None: it has all, or the node has
            not been told how far it has read.
        orders: the number of the latest orders that the node has seen.
        heard: up to which number it has taken marks; see `Marks`.
        words_heard: up to which number it has taken words about sessions.
        pool_bytes: of the pool.
        slab_bytes: of its slabs.
        stats: counters and gauges.
        engines: all that are here.
        spaces: READY chunks, by namespace.
        tenant_bytes: of the pool, by tenant.
        pinned_bytes: of the pool;
        pinned_chunks: that these are.
        sessions: what its engines have said of sessions since the last report that was answered.
        is_leaving: the node drains.
        pid: of the NodeActor.
        hostname: of its host.
        raykv_version: here.
    """

    version: int
    node_id: Named
    life: Annotated[int, msgspec.Meta(ge=1, le=MAX_NUMBER)]
    seq: Count
    part: ListingPart | None = None
    orders: Stamp = NOTHING_ORDERED
    heard: Count = 0
    words_heard: Count = 0
    pool_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_POOL_BYTES)] = 0
    slab_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_POOL_BYTES)] = 0
    stats: NodeStats = NodeStats()
    engines: Annotated[list[ReportedEngine], msgspec.Meta(max_length=MOST_ENGINES)] = []
    spaces: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)] = {}
    tenant_bytes: Annotated[dict[Text, Count], msgspec.Meta(max_length=MAX_ROWS)] = {}
    pinned_bytes: Count = 0
    pinned_chunks: Count = 0
    sessions: Annotated[list[SessionsWord], msgspec.Meta(max_length=MAX_ROWS)] = []
    is_leaving: bool = False
    pid: Count = 0
    hostname: Text = ""
    raykv_version: Text = ""

    def __post_init__(self) -> None:
        if self.part is not None and self.part.end.life != self.life:
            raise ValueError("a part of another life's listing")
        if not 0 <= min(self.orders) <= max(self.orders) <= MAX_NUMBER:
            raise ValueError(f"orders of number {self.orders}")


class Marks(msgspec.Struct, frozen=True, array_like=True):
    """Of which chunks of a node other nodes have a copy that is kept, so that its own are spare.

    A mark is worth something only for a chunk that has not changed since number `known` of the
    node's listing, and only as long as the directory's life is the same. Marks come again until
    the node has heard of `number`. `kept`: chunks that are not spare any more. `forget`: all that
    was marked before is not spare any more.
    """

    number: Count = 0
    known: Count = 0
    spare: NamedKeys = NamedKeys()
    kept: NamedKeys = NamedKeys()
    forget: bool = False


class ReportAnswer(msgspec.Struct, frozen=True):
    """Answer to `Report`.

    Args:
        life: of the scheduler actor.
        position: how far the directory has read the node's listing.
        orders: the number of the orders that are in force; who is behind asks for the document.
        wants_orders: the node has seen orders that the scheduler actor does not know: they are to
            be sent to it.
        marks: see there.
        pause_ms: so long the node waits before the next report at least.
        alone: namespaces of the node's engines of which no other node has engines or chunks.
        left: namespaces that had engines, and have none any more.
        words: of sessions that this node has named, what was said at other nodes;
        words_number: of the last of them.
        namings: what weights of the node's engines are called, by the life of the EngineCore: of
            those that have not heard it.
    """

    life: int
    position: Position = Position()
    orders: Stamp = NOTHING_ORDERED
    wants_orders: bool = False
    marks: Marks = Marks()
    pause_ms: Annotated[int, msgspec.Meta(ge=PAUSE_MS[0], le=PAUSE_MS[1])] = PAUSE_MS[0]
    alone: Annotated[list[Text], msgspec.Meta(max_length=MOST_NAMESPACES)] = []
    left: Annotated[list[Text], msgspec.Meta(max_length=MOST_NAMESPACES)] = []
    words: Annotated[list[SessionsWord], msgspec.Meta(max_length=MAX_GROUPS)] = []
    words_number: Count = 0
    namings: Annotated[dict[Count, Naming], msgspec.Meta(max_length=MOST_ENGINES)] = {}
