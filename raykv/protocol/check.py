"""What no honest peer sends: messages that can be read and yet can't be meant.

A message is looked at as a whole before anything of it is carried out, so that a refused one
changes nothing. All numbers that pass fit into the tables of `raykv/directory`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized

from raykv.base.errors import MessageError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    LAST_EPOCH,
    MAX_GENERATION,
    MAX_KEY_BYTES,
    SLOT_ALIGNMENT,
    Blocks,
    Generation,
    Refusal,
    epoch_of,
)
from raykv.engine.accounts import MAX_NAMES_BYTES
from raykv.protocol.descriptions import Descriptions, is_whole, rows_of
from raykv.protocol.hint_types import Hints
from raykv.protocol.messages import (
    MAX_KEYS,
    AttachEngine,
    EngineAttached,
    FailedStores,
    FetchResult,
    Handles,
    Inventory,
    JobResult,
    KVLayout,
    Leases,
    LostReplicas,
    NodeReport,
    ReadRequest,
    SyncReply,
    SyncRequest,
)
from raykv.protocol.miss_types import CHUNK_NAME_BYTES, MissRecord
from raykv.protocol.operator import (
    MAX_ORDERED,
    MAX_PIN_S,
    MAX_PRIORITY,
    PinOrder,
    PoolWish,
    ReleaseOrder,
    TransferEnd,
    TransferOrder,
)
from raykv.protocol.reader import MAX_PAGE, ChunkPage, ChunkQuery, WherePage, WhereQuery

MAX_ROWS = 1 << 17
"""Of any column; honest ones have a few thousand."""

MAX_NAME = 4096
"""Characters of an id, a namespace or a name for people."""

MAX_SLOTS = 1 << 32
MAX_POOL_BYTES = MAX_SLOTS * SLOT_ALIGNMENT
MAX_SLABS = 1 << 20
MAX_GROUPS = 1 << 16
MAX_BLOCK_TOKENS = 1 << 20
MAX_NUMBER = (1 << 63) - 1

MAX_PIECES = 240
"""Of a GPU's memory that a KV cache lies in. Linux lets 253 descriptors travel with one message."""

MAX_PIECE_BYTES = 1 << 46
CUDA_HANDLE_BYTES = 64
"""Of a handle of memory or of an event: the size that CUDA gives both."""

DEVICE_TEXT = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""A GPU's UUID, as torch writes it too."""

_REFUSALS = frozenset(int(refusal) for refusal in Refusal)


def require(condition: bool, what: str) -> None:
    """Refuse a message if a condition does not hold.

    Raises:
        MessageError: it does not.
    """
    if not condition:
        raise MessageError(f"a message that can't be meant: {what}")


def _numbers(what: str, numbers: Collection[int], least: int, most: int) -> None:
    if numbers:
        low, high = min(numbers), max(numbers)
        require(least <= low and high <= most, f"{what} from {low} to {high}")


def _rows(what: str, first: Sized, *others: Sized) -> None:
    count = len(first)
    require(count <= MAX_ROWS, f"{count} {what}")
    for other in others:
        require(len(other) == count, f"{what}: columns of {count} and {len(other)} rows")


def _keys(what: str, keys: Sequence[bytes]) -> None:
    _rows(what, keys)
    _numbers(f"lengths of {what}", set(map(len, keys)), 1, MAX_KEY_BYTES)


def _names(what: str, names: Iterable[str]) -> None:
    for name in names:
        require(len(name) <= MAX_NAME, f"{what} of {len(name)} characters")


def _places(what: str, slots: Sequence[int], generations: Sequence[int]) -> None:
    _rows(what, slots, generations)
    _numbers(f"slots of {what}", slots, 0, MAX_SLOTS - 1)
    _numbers(f"generations of {what}", generations, 0, MAX_GENERATION)


def _handles(what: str, handles: Handles) -> None:
    _keys(f"keys of {what}", handles.keys)
    _rows(what, handles.keys, handles.slots)
    _places(what, handles.slots, handles.generations)


def _leases(what: str, leases: Leases) -> None:
    _rows(what, leases.groups, leases.slots)
    _numbers(f"KV groups of {what}", leases.groups, 0, MAX_GROUPS - 1)
    _places(what, leases.slots, leases.generations)


def _lost(lost: LostReplicas) -> None:
    _rows("lost chunks", lost.keys, lost.nodes, lost.generations)
    _keys("lost keys", lost.keys)
    _numbers("lost generations", lost.generations, 0, MAX_GENERATION)


# To the scheduler actor


def check_attach(message: AttachEngine) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _names("a name", (message.engine_id, message.node_id, message.namespace, message.model))
    require(bool(message.engine_id), "an engine without an id")
    require(bool(message.namespace), "an engine without a namespace")
    require(0 < message.num_ranks <= MAX_GROUPS, f"{message.num_ranks} ranks")
    require(bool(message.slot_bytes), "an engine without KV groups")
    _numbers("KV groups", message.slot_bytes, 0, MAX_GROUPS - 1)
    _sizes(set(message.slot_bytes.values()))
    _leases("leases", message.leases)


def _sizes(sizes: set[int]) -> None:
    _numbers("slot sizes", sizes, SLOT_ALIGNMENT, MAX_POOL_BYTES)
    require(not any(size % SLOT_ALIGNMENT for size in sizes), f"slot sizes {sizes}")


def check_sync(request: SyncRequest) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _numbers("a message's numbers", (request.seq, request.clear, request.epoch), 0, MAX_NUMBER)
    _rows("wanted KV groups", request.wanted)
    _numbers("wanted leases", request.wanted.values(), 0, MAX_NUMBER)
    for what, keys in (
        ("touched keys", request.touched),
        ("pinned keys", request.pinned),
        ("asked keys", request.asked),
    ):
        _keys(what, keys)
    _leases("released leases", request.released)
    _handles("dropped chunks", request.dropped)
    _handles("announced chunks", request.announced)
    _lost(request.lost)
    _counters(request.counters)
    _hints(request.hints)
    _measured(request)
    check_descriptions(request.described)
    _finished(request.finished)


def _hints(hints: Hints) -> None:
    _keys("keys to pin", hints.pinned)
    _rows("hints", hints.pinned, hints.pin_s)
    for pin_s in hints.pin_s:
        require(0 < pin_s <= MAX_PIN_S, f"a pin for {pin_s} s")
    _keys("keys with a priority", hints.favoured)
    _rows("hints", hints.favoured, hints.priorities)
    _numbers("priorities", hints.priorities, 1, MAX_PRIORITY)


def _measured(request: SyncRequest) -> None:
    _rows("latencies", request.latencies)
    _names("a latency's name", request.latencies)
    for data in request.latencies.values():
        _rows("buckets of a latency", data.counts)
        _numbers("buckets of a latency", data.counts, 0, MAX_NUMBER)
        require(0 <= data.total < math.inf, f"a latency of {data.total} s")
    sketch = request.wanted_keys
    require(len(sketch.registers) == 2 * len(sketch.ranks), "a sketch of two sizes")
    _rows("registers of a sketch", sketch.ranks)


def _finished(records: Sequence[MissRecord]) -> None:
    _rows("requests that have ended", records)
    _names("a request's id", (record.request_id for record in records))
    for record in records:
        num_bytes = len(record.chunks)
        is_cut = num_bytes % CHUNK_NAME_BYTES == 0 and num_bytes <= MAX_NAMES_BYTES
        require(is_cut, f"{num_bytes} bytes of chunks' names")
        _numbers("tokens of a request", (record.prompt, record.chunk_tokens), 0, MAX_NUMBER)


def _counters(counters: Mapping[str, int]) -> None:
    _rows("counters", counters)
    _numbers("counters", counters.values(), 0, MAX_NUMBER)
    _names("a counter's name", counters)


def check_descriptions(page: Descriptions) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _keys("keys of descriptions", page.keys)
    _rows("descriptions", page.keys, page.parents, page.inner, page.tokens)
    _rows("descriptions", page.keys, page.block_sizes, page.namespace_index, page.model_index)
    _rows("descriptions", page.keys, page.kind_index, page.lora_index)
    _names("a name", page.names)
    for index in (page.namespace_index, page.model_index, page.kind_index, page.lora_index):
        _numbers("numbers of names", index, 0, len(page.names) - 1)
    _numbers("block sizes", page.block_sizes, 1, MAX_BLOCK_TOKENS)
    _numbers("lengths of parents", set(map(len, page.parents)), 0, MAX_KEY_BYTES)
    require(all(map(is_whole, rows_of(page))), "a description whose parts don't fit together")


def check_report(report: NodeReport) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _names("a name", (report.node_id, report.hostname, report.raykv_version))
    _names("an address of metrics", (report.stats.metrics_address, report.stats.metrics_problem))
    require(bool(report.node_id), "a node without an id")
    _numbers("a report's numbers", (report.epoch, report.seq, report.page), 0, MAX_NUMBER)
    slab_bytes, pool_bytes = report.slab_bytes, report.pool_bytes
    is_cut = 0 < slab_bytes <= pool_bytes <= MAX_POOL_BYTES and slab_bytes % SLOT_ALIGNMENT == 0
    require(is_cut, f"a pool of {pool_bytes} bytes in slabs of {slab_bytes}")
    num_slabs = PoolGeometry(pool_bytes, slab_bytes).num_slabs
    require(num_slabs <= MAX_SLABS, f"a pool of {num_slabs} slabs")
    heard = (report.scheduler_epoch, epoch_of(Generation(report.highest_generation)))
    _numbers("epochs of the scheduler actor", heard, 0, LAST_EPOCH)
    _inventory(report.stored, slab_bytes)
    _failed(report.failed, slab_bytes)
    _rows("engines on a node", report.stats.ranks)
    _names("an engine", report.stats.ranks)
    _rows("cleared namespaces", report.cleared)
    _names("a namespace", report.cleared)
    _numbers("generations of clearings", report.cleared.values(), 0, MAX_GENERATION)
    _disk(report)


def _disk(report: NodeReport) -> None:
    came, stats = report.disk.came, report.stats.disk
    _names("a disk", (stats.path, stats.problem, *came.namespaces))
    _keys("keys on a disk", came.keys)
    _rows("chunks on a disk", came.keys, came.slot_bytes, came.namespace_index, came.places)
    _places("chunks on a disk", came.places, came.generations)
    _numbers("numbers of namespaces", came.namespace_index, 0, len(came.namespaces) - 1)


def _inventory(stored: Inventory, slab_bytes: int) -> None:
    _keys("keys of stored chunks", stored.keys)
    _rows("stored chunks", stored.keys, stored.slots, stored.slot_bytes, stored.namespace_index)
    _places("stored chunks", stored.slots, stored.generations)
    _names("a namespace", stored.namespaces)
    _numbers("numbers of namespaces", stored.namespace_index, 0, len(stored.namespaces) - 1)
    _sizes_in(stored.slot_bytes, slab_bytes)


def _failed(failed: FailedStores, slab_bytes: int) -> None:
    _rows("failed stores", failed.slots, failed.slot_bytes)
    _places("failed stores", failed.slots, failed.generations)
    _sizes_in(failed.slot_bytes, slab_bytes)


def _sizes_in(slot_bytes: Sequence[int], slab_bytes: int) -> None:
    sizes = set(slot_bytes)
    _sizes(sizes)
    _numbers("slot sizes", sizes, SLOT_ALIGNMENT, slab_bytes)


def check_read(request: ReadRequest, slab_bytes: int) -> None:
    """A read out of a pool that is cut into slabs.

    Raises:
        MessageError: it can't be meant.
    """
    handles = request.handles
    _rows("chunks", handles.keys, handles.slots, handles.generations, request.slot_bytes)
    _numbers("slot sizes", request.slot_bytes, 1, slab_bytes)


def check_partial(partial: Mapping[int, Blocks], num_chunks: int) -> None:
    """What the answer to a read of so many chunks says of those that were stored in part.

    Raises:
        MessageError: it can't be meant.
    """
    _numbers("numbers of partial chunks", partial, 0, num_chunks - 1)
    for blocks in partial.values():
        require(blocks.is_sound, f"a chunk with {blocks.length} blocks from {blocks.first} on")


# From readers


def check_chunk_query(query: ChunkQuery) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _names("a name", (query.namespace, query.node_id, query.from_node))
    require(len(query.key) <= MAX_KEY_BYTES, f"a key of {len(query.key)} bytes")
    require(query.is_known, f"the order {query.order!r}, the tier {query.tier!r}")
    _numbers("a KV group", () if query.group is None else (query.group,), 0, MAX_GROUPS - 1)
    _numbers("a number of chunks", (query.limit,), 1, MAX_PAGE)
    _numbers("a slot", (query.from_slot,), 0, MAX_SLOTS - 1)


def check_where_query(query: WhereQuery) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _names("a namespace", (query.namespace,))
    require(len(query.keys) <= MAX_KEYS, f"{len(query.keys)} keys")
    _keys("keys", query.keys)


# To a reader


def check_chunk_page(page: ChunkPage, query: ChunkQuery) -> None:
    """An answer to `query`, which brings the listing on.

    Raises:
        MessageError: it can't be meant.
    """
    _keys("keys of chunks", page.keys)
    _rows("chunks", page.keys, page.slots, page.node_index, page.namespace_index, page.hits)
    _rows("chunks", page.keys, page.slot_bytes, page.ages, page.idles)
    _rows("chunks", page.keys, page.is_replicated, page.is_on_disk)
    _places("chunks", page.slots, page.generations)
    _rows("namespaces", page.namespaces, page.models)
    _numbers("numbers of nodes", page.node_index, 0, len(page.nodes) - 1)
    _numbers("numbers of namespaces", page.namespace_index, 0, len(page.namespaces) - 1)
    goes_on = page.is_last or page.place > query.place
    require(goes_on, f"a listing that goes from {query.place} to {page.place}")


def check_where_page(page: WherePage, query: WhereQuery) -> None:
    """An answer to `query`.

    Raises:
        MessageError: it can't be meant.
    """
    _numbers("answered keys", (page.answered,), min(1, len(query.keys)), len(query.keys))
    _rows("replicas", page.key_index, page.node_index)
    _numbers("numbers of nodes", page.node_index, 0, len(page.nodes) - 1)
    _numbers("numbers of keys", page.key_index, 0, page.answered - 1)


# From operators


def check_pin(order: PinOrder) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _ordered("a pin", order.pin_id, order.namespace, order.keys)
    require(0 < order.ttl_s <= MAX_PIN_S, f"a pin for {order.ttl_s} s")
    require(order.priority is None or 1 <= order.priority <= MAX_PRIORITY, "a pin's priority")


def check_transfer(order: TransferOrder) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _ordered("a transfer", order.transfer_id, order.namespace, order.keys)
    _names("a node", [order.node_id, order.series_id])
    _sizes(set(order.slot_bytes))
    require(len(order.slot_bytes) in (0, len(set(order.keys))), "sizes that don't fit the chunks")


def check_end(message: TransferEnd) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _names("a name", [message.transfer_id, message.namespace])
    _rows("slots", message.came)
    _lost(message.lost)


def check_release(order: ReleaseOrder) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _ordered("a release", order.node_id, order.namespace, order.keys)


def _ordered(what: str, name: str, namespace: str, keys: Sequence[bytes]) -> None:
    _names(what, [name, namespace])
    require(bool(name and namespace), f"{what} without a name, or a namespace")
    _keys(f"keys of {what}", keys)
    require(0 < len(keys) <= MAX_ORDERED, f"{what} of {len(keys)} chunks")


def check_wish(wish: PoolWish) -> None:
    """Raises:
    MessageError: it can't be meant.
    """
    _names("a name", (wish.on, wish.pool_path, *wish.node_ids, *wish.metrics))
    _rows("nodes", wish.node_ids)
    for size in (wish.pool_bytes, wish.slab_bytes):
        if size is not None:
            require(SLOT_ALIGNMENT <= size <= MAX_POOL_BYTES, f"a pool or a slab of {size} bytes")


def check_device_memory(layout: KVLayout) -> None:
    """What a layout says of a GPU's memory; that of CPU memory says nothing of it.

    Raises:
        MessageError: it can't be meant.
    """
    pieces, handles = layout.piece_bytes, layout.handles
    if not layout.kind.startswith("cuda-"):
        is_silent = not (layout.device or pieces or handles or layout.event)
        require(is_silent, f"a KV cache of kind {layout.kind[:MAX_NAME]!r} with GPU memory")
        return
    require(DEVICE_TEXT.fullmatch(layout.device) is not None, "a GPU without a UUID")
    require(1 <= len(pieces) <= MAX_PIECES, f"{len(pieces)} pieces of GPU memory")
    _numbers("sizes of GPU memory", pieces, 1, MAX_PIECE_BYTES)
    require(sum(pieces) == layout.num_bytes, f"{layout.num_bytes} bytes in pieces of {pieces}")
    sizes = {len(layout.event), *map(len, handles)}
    require(sizes == {CUDA_HANDLE_BYTES}, f"handles of GPU memory of {sizes} bytes")
    wanted = len(pieces) if layout.kind == "cuda-ipc" else 0
    require(len(handles) == wanted, f"{len(handles)} handles of {len(pieces)} pieces")


# To an engine


def check_reply(reply: SyncReply, request: SyncRequest, groups: Collection[int]) -> None:
    """An answer to `request` of an engine that has these KV groups.

    Raises:
        MessageError: it can't be meant.
    """
    _handles("stored chunks", reply.stored)
    _handles("removed chunks", reply.removed)
    _leases("granted leases", reply.granted)
    require(set(reply.granted.groups).issubset(groups), "leases of a KV group that is not there")
    require(0 < reply.store_share <= MAX_NUMBER, f"one store of {reply.store_share}")
    _share(reply.lease_share)
    told = reply.replicas
    _rows("replicas", told.key_index, told.node_index)
    _rows("replicas", told.slots, told.key_index)
    _places("replicas", told.slots, told.generations)
    _rows("nodes", told.nodes, told.node_epochs)
    _numbers("numbers of nodes", told.node_index, 0, len(told.nodes) - 1)
    for positions in (told.key_index, told.pending):
        _numbers("numbers of keys", positions, 0, len(request.asked) - 1)


def check_attached(answer: EngineAttached) -> None:
    """What an engine is told that attaches.

    Raises:
        MessageError: it can't be meant.
    """
    _share(answer.lease_share)


def _share(share: float) -> None:
    # Of what is no number nothing is true.
    require(0 <= share <= 1, f"leases of {share} of the pool")


def check_fetched(result: FetchResult, num_chunks: int) -> None:
    """How a fetch of so many chunks has ended.

    Raises:
        MessageError: it can't be meant.
    """
    _rows("fetched chunks", range(num_chunks), result.refusals, result.slots)
    _places("fetched chunks", result.slots, result.generations)
    require(_REFUSALS.issuperset(result.refusals), f"refusals {set(result.refusals)}")
    require(result.num_bytes >= 0 and result.seconds >= 0, f"{result.num_bytes} bytes fetched")
    _lost(result.lost)


def check_failures(failed: Sequence[int], refusals: Sequence[int], num_chunks: int) -> None:
    """Chunks of a copy job that did not happen, and why.

    Raises:
        MessageError: it can't be meant.
    """
    _rows("failed chunks", failed, refusals)
    _numbers("failed chunks", failed, 0, num_chunks - 1)
    require(len(set(failed)) == len(failed), "a chunk that has failed twice")
    require(_REFUSALS.issuperset(refusals), f"refusals {set(refusals)}")


def believable(result: JobResult, num_chunks: int) -> JobResult:
    """A result as it came; if it can't be meant, one that nothing of the job has happened."""
    try:
        check_failures(result.failed_chunks, result.refusals, num_chunks)
    except MessageError:
        every = list(range(num_chunks))
        return JobResult(result.job_id, 0, 0.0, every, [int(Refusal.COPY_FAILED)] * num_chunks)
    return result
