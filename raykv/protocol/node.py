"""A NodeActor: what it is, what it counts, what it reports, and what of its pool outlives it."""

from __future__ import annotations

from typing import Annotated

import msgspec

from raykv.base.ids import Stamp
from raykv.protocol import columns, engine, framing, listing, measures, sessions
from raykv.protocol.columns import MAX_POOL_BYTES, Count, Counts, Named, NamedKeys, Text


class CaptureStats(msgspec.Struct, frozen=True):
    """Counters of a NodeActor since its start, and the bytes of states that are in its memory."""

    num_bytes: int = 0
    captured: int = 0
    bytes_captured: int = 0
    failed: int = 0
    files_written: int = 0
    files_failed: int = 0


class DiskStats(msgspec.Struct, frozen=True):
    """A disk tier since the NodeActor's start; sizes in bytes. `path` empty: there is none.

    `problem`: why nothing is written, in a sentence. `is_full`: it gives up old files for new ones,
    so that only what was used is worth a place.
    `tenant_bytes`: of its files, by tenant, if they have one.
    """

    path: Text = ""
    problem: Text = ""
    most_bytes: int = 0
    used_bytes: int = 0
    num_files: int = 0
    num_chunks: int = 0
    bytes_written: int = 0
    chunks_written: int = 0
    bytes_read: int = 0
    chunks_read: int = 0
    files_evicted: int = 0
    files_damaged: int = 0
    chunks_damaged: int = 0
    writes_failed: int = 0
    is_full: bool = False
    tenant_bytes: Counts = {}


class NodeStats(msgspec.Struct, frozen=True):
    """Counters and gauges of one NodeActor since its start; sizes in bytes.

    `metrics_address`: where Prometheus finds them ("host:port"), empty if nowhere; then
    `metrics_problem` says why, unless they are switched off.
    """

    pool_bytes: int = 0
    prefaulted_bytes: int = 0
    used_bytes: int = 0
    bytes_stored: int = 0
    bytes_loaded: int = 0
    chunks_stored: int = 0
    chunks_loaded: int = 0
    chunks_refused: int = 0
    jobs_cancelled: int = 0
    num_workers: int = 0
    queued_jobs: int = 0
    bytes_fetched: int = 0
    chunks_fetched: int = 0
    fetches_failed: int = 0
    bytes_nixl: int = 0
    bytes_sent: int = 0
    reading: int = 0
    quarantined: int = 0
    breakers: measures.BreakerReport = measures.BreakerReport()
    ranks: Counts = {}
    locked_bytes: int = 0
    metrics_address: Text = ""
    metrics_problem: Text = ""
    disk: DiskStats = DiskStats()
    states: CaptureStats = CaptureStats()
    threads_failed: int = 0


class NodeDescription(framing.Versioned, frozen=True):
    """Where the workers of a node find its NodeActor, what it is, or why it has no pool.

    `nixl`: how other nodes reach its pool through NIXL; empty: they can't.
    """

    raykv_version: str
    node_id: str
    life: int
    socket_name: str
    pool_bytes: int
    slab_bytes: int
    prefaulted_bytes: int
    pid: int
    num_workers: int
    pool_path: str = ""
    stats: NodeStats = NodeStats()
    refusal: str = ""
    nixl: bytes = b""


class Kept(msgspec.Struct, frozen=True):
    """What of a node's pool outlives its NodeActor, in chunks.

    `place`: the folder or file that has it, empty if there is none. `left` chunks are not there;
    `problem` may say why.
    """

    node_id: str
    place: str = ""
    kept: int = 0
    left: int = 0
    problem: str = ""


MOST_ENGINES = 1024
"""Of one node."""

MOST_NAMESPACES = 256
"""That one message names."""

PAUSE_MS = (10, 1000)
"""Between two reports, at least and at most; a node that has much to tell may wait for less."""


class ReportedEngine(msgspec.Struct, frozen=True):
    """An engine that a node introduces, and its counters since its start; the rest as in `Tell`."""

    hello: engine.EngineHello
    counters: Counts = {}
    breakers: measures.BreakerReport = measures.BreakerReport()
    heard: Stamp = engine.NOTHING_ORDERED
    weights: Count = 0


class SessionsWord(msgspec.Struct, frozen=True, array_like=True):
    """What is said of a session of a namespace, without its chunks."""

    namespace: Named
    news: sessions.SessionNews


class Report(framing.Versioned, frozen=True):
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

    node_id: Named
    life: columns.Life
    seq: Count
    part: listing.ListingPart | None = None
    orders: Stamp = engine.NOTHING_ORDERED
    heard: Count = 0
    words_heard: Count = 0
    pool_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_POOL_BYTES)] = 0
    slab_bytes: Annotated[int, msgspec.Meta(ge=0, le=MAX_POOL_BYTES)] = 0
    stats: NodeStats = NodeStats()
    engines: Annotated[list[ReportedEngine], msgspec.Meta(max_length=MOST_ENGINES)] = []
    spaces: Counts = {}
    tenant_bytes: Counts = {}
    pinned_bytes: Count = 0
    pinned_chunks: Count = 0
    sessions: Annotated[list[SessionsWord], msgspec.Meta(max_length=columns.MAX_ROWS)] = []
    is_leaving: bool = False
    pid: Count = 0
    hostname: Text = ""
    raykv_version: Text = ""

    def __post_init__(self) -> None:
        is_own = self.part is None or self.part.end.life == self.life
        columns.require(is_own, "a part of another life's listing")
        columns.check_stamps(self.orders)


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
        pause_ms: the node waits at least this long before the next report.
        alone: namespaces of the node's engines that no other node has engines or chunks of.
        left: namespaces that had engines, and have none any more.
        words: of sessions that this node has named, what was said at other nodes;
        words_number: of the last of them.
        namings: what weights of the node's engines are called, by the life of the EngineCore: of
            those that have not heard it.
    """

    life: int
    position: listing.Position = listing.Position()
    orders: Stamp = engine.NOTHING_ORDERED
    wants_orders: bool = False
    marks: Marks = Marks()
    pause_ms: Annotated[int, msgspec.Meta(ge=0, le=PAUSE_MS[1])] = PAUSE_MS[0]
    alone: Annotated[list[Text], msgspec.Meta(max_length=MOST_NAMESPACES)] = []
    left: Annotated[list[Text], msgspec.Meta(max_length=MOST_NAMESPACES)] = []
    words: Annotated[list[SessionsWord], msgspec.Meta(max_length=columns.MAX_GROUPS)] = []
    words_number: Count = 0
    namings: Annotated[dict[Count, engine.Naming], msgspec.Meta(max_length=MOST_ENGINES)] = {}
