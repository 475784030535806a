"""Every struct that crosses a process. Columns, not lists of records; MessagePack on the wire.

All messages are idempotent: a receiver that sees one twice answers the second time as the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, cast

import msgspec

from raykv.base.ids import Blocks, Generation, Slot
from raykv.protocol.descriptions import Descriptions
from raykv.protocol.disk import DiskNews, DiskOrder, DiskStats
from raykv.protocol.hint_types import Hints
from raykv.protocol.kv_types import NOT_CANONICAL, CanonicalPages, KVForm
from raykv.protocol.metric_types import HistogramData, KeySketch
from raykv.protocol.miss_types import MissRecord
from raykv.protocol.state_types import Capture, CaptureStats
from raykv.protocol.told import BreakerReport

PROTOCOL_VERSION = 8
"""Raised with every change of a struct in this module. Both ends compare it when they meet."""

MAX_KEYS = 2048
"""Keys in one page of an exchange: with their columns they stay under Ray's 100 KiB inline limit
(36-byte key, slot, generation: about 50 bytes a key)."""

S = TypeVar("S", bound=msgspec.Struct)


def encode(message: msgspec.Struct) -> bytes:
    """MessagePack bytes of `message`."""
    return msgspec.msgpack.encode(message)


def decode(raw: bytes, kind: type[S]) -> S:
    """The struct in `raw`.

    Raises:
        msgspec.DecodeError: `raw` is not such a struct (`ValidationError` for a wrong type).
    """
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except RecursionError:
        raise msgspec.DecodeError("it is nested too deeply") from None


class Handles(msgspec.Struct, frozen=True, array_like=True):
    """Columns that name chunks at a generation; all have the same length."""

    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


class Handle(msgspec.Struct, frozen=True, gc=False):
    """Where a chunk is: a slot at a generation.

    It crosses no process: the rows of an answer become these. vLLM's scheduler waits for that, and
    a dataclass takes five times as long to make.
    """

    slot: Slot
    generation: Generation


def handles_of(slots: Iterable[int], generations: Iterable[int]) -> Iterator[Handle]:
    """Handles out of two columns of one length."""
    make = cast("Callable[[int, int], Handle]", Handle)
    return map(make, slots, generations)


class Leases(msgspec.Struct, frozen=True, array_like=True):
    """Columns of free slots that an engine may store into."""

    groups: list[int] = []
    slots: list[int] = []
    generations: list[int] = []


class Replicas(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys of a question are: one row per replica, the best source of a key first.

    `key_index` points into the list of keys that was asked, `node_index` into `nodes`, whose
    NodeActors have the epochs `node_epochs`. `pending` lists the keys that an engine is storing
    now. A key that is in neither is nowhere.
    """

    nodes: list[str] = []
    node_epochs: list[int] = []
    key_index: list[int] = []
    node_index: list[int] = []
    slots: list[int] = []
    generations: list[int] = []
    pending: list[int] = []


class LostReplicas(msgspec.Struct, frozen=True, array_like=True):
    """Columns of chunks that a source said it does not have (any more)."""

    nodes: list[str] = []
    keys: list[bytes] = []
    generations: list[int] = []


class AttachEngine(msgspec.Struct, frozen=True):
    """An engine introduces itself to the scheduler actor; also after a restart of that one.

    `slot_bytes` has the slot size of each KV group, in bytes, by group index; `traits` what the
    namespace is a digest of, in short texts, to say why two namespaces differ.
    """

    version: int
    engine_id: str
    node_id: str
    namespace: str
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    leases: Leases = Leases()
    versions: str = ""
    traits: dict[str, str] = {}


class EngineAttached(msgspec.Struct, frozen=True):
    """Answer to `AttachEngine`. With `error` set nothing was attached.

    `capacity` has the number of slots that the node's pool can hold for each KV group,
    `lease_share` the share of the pool for the engine's leases of all groups together (0: as it
    was); `rejected` the slots of declared leases that the engine does not hold. `cleared`: the
    generation up to which the chunks of its namespace are void, wherever they are.
    """

    epoch: int
    node_epoch: int = 0
    capacity: dict[int, int] = {}
    lease_share: float = 0.0
    rejected: list[int] = []
    paused: bool = False
    error: str = ""
    retry: bool = False
    cleared: int = 0


class SyncRequest(msgspec.Struct, frozen=True):
    """One exchange of an engine with the scheduler actor.

    `seq` rises by one for each new message; the same `seq` again is a repetition and gets the same
    answer. `wanted` has the number of slots asked for by KV group. `touched` lists keys, least
    recently used first. `pinned` keys are about to be loaded. `dropped` names chunks that the
    NodeActor refused, `lost` those that another node's refused. `asked` keys are not on this node:
    who has them? `announced` chunks are being stored at the leases that are named. `clear` is the
    number of the engine's latest reset that is not confirmed yet (0: none): the namespace is
    emptied everywhere. With `idle` set the answer carries no changes and no grants: the engine has
    not taken in the earlier ones. `finished` requests, and what became of their tokens.
    `breakers`: whom the engine leaves alone. `hints`: what requests wish for their chunks.
    `latencies`: of the engine since its start, by what was measured. `wanted_keys`: what is new of
    the sketch of the chunks that its requests have wanted; their number is among the counters.
    `described`: what is inside of chunks.
    """

    engine_id: str
    epoch: int
    seq: int
    wanted: dict[int, int] = {}
    touched: list[bytes] = []
    pinned: list[bytes] = []
    released: Leases = Leases()
    dropped: Handles = Handles()
    lost: LostReplicas = LostReplicas()
    asked: list[bytes] = []
    announced: Handles = Handles()
    clear: int = 0
    idle: bool = False
    counters: dict[str, int] = {}
    finished: list[MissRecord] = []
    breakers: BreakerReport = BreakerReport()
    hints: Hints = Hints()
    latencies: dict[str, HistogramData] = {}
    wanted_keys: KeySketch = KeySketch()
    described: Descriptions = Descriptions()


class SyncReply(msgspec.Struct, frozen=True):
    """Answer to `SyncRequest`: changes of the engine's mirror, in order, then new leases.

    With `attach` set the actor does not know the engine (it restarted, or the engine's session
    expired): attach again. `reset` comes before a snapshot: forget the mirror first. `void`: the
    namespace was cleared, earlier leases and stores are worth nothing. `cleared` is the highest
    `clear` that was carried out. `more` says that further changes are waiting. `replicas` answers
    the request's `asked`. `has_peers`: another node or engine may have chunks of this namespace.
    `store_share`: one request of so many should store, since little of what is stored is loaded.
    `lease_share`: as in `EngineAttached`; 0: as before.
    `refined`: tokens of `finished` requests that were not NEVER_STORED, but missed for that reason.
    """

    epoch: int
    seq: int
    node_epoch: int = 0
    attach: bool = False
    reset: bool = False
    void: bool = False
    cleared: int = 0
    more: bool = False
    paused: bool = False
    stored: Handles = Handles()
    removed: Handles = Handles()
    granted: Leases = Leases()
    replicas: Replicas = Replicas()
    has_peers: bool = False
    store_share: int = 1
    lease_share: float = 0.0
    refined: dict[str, int] = {}


# Engine scheduler -> its NodeActor, and NodeActor -> NodeActor


class FetchRequest(msgspec.Struct, frozen=True):
    """Have chunks of other nodes copied into leased slots of this one.

    `handles` are the chunks and their leases here, `slot_bytes` their sizes. The source rows are
    columns like those of `Replicas`; the first row of a chunk is tried first.
    """

    version: int
    namespace: str
    node_epoch: int
    handles: Handles
    slot_bytes: list[int]
    sources: Replicas
    deadline_s: float
    with_checksums: bool = True


class FetchResult(msgspec.Struct, frozen=True):
    """How a fetch ended: a `Refusal` per chunk, and where it is now if it is `NONE`.

    That is another slot than the one asked for when someone else had begun to fetch it there.
    `lost` names what sources said they do not have.
    """

    node_epoch: int
    refusals: list[int]
    slots: list[int]
    generations: list[int]
    num_bytes: int = 0
    seconds: float = 0.0
    lost: LostReplicas = LostReplicas()


class ReadRequest(msgspec.Struct, frozen=True):
    """Read chunks out of a NodeActor's pool, or from its disk, for another NodeActor."""

    version: int
    namespace: str
    node_epoch: int
    handles: Handles
    slot_bytes: list[int]
    with_checksums: bool = True
    from_disk: bool = False


class ReadReply(msgspec.Struct, frozen=True):
    """A `Refusal` per chunk, and the checksums (XXH3, 64 bit) of those that follow as bytes.

    The bytes of all chunks that were not refused come with it, back to back, in order. `partial`
    has those of which only some blocks were stored, by their numbers in the question: the other
    blocks are zero, and are not to be loaded.
    """

    node_epoch: int
    refusals: list[int]
    checksums: list[int] = []
    partial: dict[int, Blocks] = {}


# NodeActor <-> scheduler actor


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """Columns of READY chunks on a node; `namespace_index` points into `namespaces`."""

    namespaces: list[str] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


class FailedStores(msgspec.Struct, frozen=True, array_like=True):
    """Columns of stores that have overwritten what was there and have not become chunks."""

    slots: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []


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
    bytes_sent: int = 0
    reading: int = 0
    quarantined: int = 0
    breakers: BreakerReport = BreakerReport()
    ranks: dict[str, int] = {}
    locked_bytes: int = 0
    metrics_address: str = ""
    metrics_problem: str = ""
    disk: DiskStats = DiskStats()
    states: CaptureStats = CaptureStats()
    threads_failed: int = 0


class NodeReport(msgspec.Struct, frozen=True):
    """A NodeActor's heartbeat, and the chunks that became READY or failed since the last one.

    `page` counts the pages of an inventory that the scheduler actor asked for, from 1; 0 is a
    plain report. `last_page` ends the inventory. `cleared` has, by namespace, the generation up
    to which the node has discarded chunks (see `base/clearings.py`). `highest_generation` is the
    highest ever seen here, `scheduler_epoch` the highest epoch that a reply has named.
    """

    version: int
    node_id: str
    epoch: int
    seq: int
    pool_bytes: int
    slab_bytes: int
    highest_generation: int
    scheduler_epoch: int
    stored: Inventory = Inventory()
    failed: FailedStores = FailedStores()
    page: int = 0
    last_page: bool = False
    cleared: dict[str, int] = {}
    paused: bool = False
    stats: NodeStats = NodeStats()
    pid: int = 0
    hostname: str = ""
    raykv_version: str = ""
    disk: DiskNews = DiskNews()


class NodeReportReply(msgspec.Struct, frozen=True):
    """Answer to `NodeReport`. `inventory` asks for all READY chunks; `cleared` as above. `epoch`
    is that of the generations that are granted now.
    """

    epoch: int
    inventory: bool = False
    cleared: dict[str, int] = {}
    paused: bool = False
    disk: DiskOrder = DiskOrder()


class NodeDescription(msgspec.Struct, frozen=True):
    """Where the workers of a node find its NodeActor, what it is, or why it has no pool."""

    version: int
    raykv_version: str
    node_id: str
    epoch: int
    socket_name: str
    pool_bytes: int
    slab_bytes: int
    prefaulted_bytes: int
    pid: int
    num_workers: int
    pool_path: str = ""
    stats: NodeStats = NodeStats()
    refusal: str = ""


# Worker <-> NodeActor, on the node's Unix socket


class TensorLayout(msgspec.Struct, frozen=True, array_like=True):
    """One layer's KV tensor in the exported memory; sizes and the offset in bytes.

    Page of block b: [offset + b * block_stride, + page_bytes).
    """

    offset: int
    num_blocks: int
    block_stride: int
    page_bytes: int


class KVLayout(msgspec.Struct, frozen=True):
    """A worker's KV cache as another process sees it.

    `kind` names the protocol that opens it ("memfd", "cuda-ipc", "cuda-fd"). `groups[g]` lists, for
    the g-th KV group in the order of `group_ids`, indices into `tensors`.

    Memory of a GPU comes in pieces, of `piece_bytes` each; offsets count through all of them, back
    to back. `device` is the GPU's UUID. `handles` opens them, one each ("cuda-ipc"); "cuda-fd" has
    a descriptor for each instead. `event` is the handle of the event that the worker records on its
    compute stream before it submits a job. `form`: how KV lies in chunks, for who inspects them.
    `canonical`: where pages are in chunks that any number of ranks shares. Both may say nothing.
    """

    kind: str
    num_bytes: int
    blocks_per_chunk: int
    tensors: list[TensorLayout]
    group_ids: list[int]
    groups: list[list[int]]
    device: str = ""
    piece_bytes: list[int] = []
    handles: list[bytes] = []
    event: bytes = b""
    form: KVForm = KVForm()
    canonical: CanonicalPages = NOT_CANONICAL


class AttachWorker(msgspec.Struct, frozen=True, tag="attach"):
    """First message of a connection; the KV memory and the cancel words come with it as fds."""

    version: int
    engine_id: str
    namespace: str
    rank: int
    num_ranks: int
    slot_bytes: dict[int, int]
    layout: KVLayout


class CopyJob(msgspec.Struct, frozen=True, array_like=True):
    """One store or load. Columns have one entry per chunk, except `block_ids`.

    `num_blocks[c]` of the flat `block_ids` belong to chunk c; the first of them is the chunk's
    block number `first_block[c]` (a load may begin in the middle of a chunk). With `capture` there
    is one chunk in name only: its blocks go to the NodeActor's own memory. `by_layer`: all chunks
    layer by layer, and the worker hears of each layer that is there.
    """

    job_id: int
    direction: int
    node_epoch: int
    handles: Handles
    groups: list[int]
    num_blocks: list[int]
    first_block: list[int]
    block_ids: list[int]
    capture: Capture | None = None
    by_layer: bool = False


class JobBatch(msgspec.Struct, frozen=True, tag="jobs"):
    """Jobs of one engine step, and the ids of jobs that the engine gives up."""

    jobs: list[CopyJob] = []
    cancelled: list[int] = []


WorkerMessage = AttachWorker | JobBatch


class JobResult(msgspec.Struct, frozen=True, array_like=True):
    """How one job ended: `refusals` has a `Refusal` per failed chunk index, the rest happened."""

    job_id: int
    num_bytes: int
    seconds: float
    failed_chunks: list[int] = []
    refusals: list[int] = []


class WorkerAttached(msgspec.Struct, frozen=True, tag="attached"):
    """Answer to `AttachWorker`. With `error` set the NodeActor closes the connection.

    `unsuited`: it can't open the worker's memory, now or later.
    """

    node_epoch: int
    error: str = ""
    unsuited: bool = False


class JobResults(msgspec.Struct, frozen=True, tag="results"):
    """Jobs that ended, in order; and by job how many `layers` of one that goes on are there."""

    results: list[JobResult]
    layers: dict[int, int] = {}


NodeMessage = WorkerAttached | JobResults
