"""A NodeActor and the scheduler actor: reports, descriptions, and what is on the node's disk."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import LAST_EPOCH, MAX_GENERATION, SLOT_ALIGNMENT, Generation, epoch_of
from raykv.protocol.columns import (
    MAX_NUMBER,
    MAX_POOL_BYTES,
    MAX_SLABS,
    Keys,
    check_keys,
    check_names,
    check_numbers,
    check_places,
    check_rows,
    check_sizes,
    require,
)
from raykv.protocol.measures import BreakerReport


class CaptureStats(msgspec.Struct, frozen=True):
    """Counters of a NodeActor since its start, and the bytes of states that are in its memory."""

    num_bytes: int = 0
    captured: int = 0
    bytes_captured: int = 0
    failed: int = 0
    files_written: int = 0
    files_failed: int = 0


class Inventory(msgspec.Struct, frozen=True, array_like=True):
    """Columns of READY chunks on a node; `namespace_index` points into `namespaces`."""

    namespaces: list[str] = []
    namespace_index: list[int] = []
    keys: Keys = Keys()
    slots: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


def _inventory(stored: Inventory, slab_bytes: int) -> None:
    check_keys("keys of stored chunks", stored.keys)
    check_rows(
        "stored chunks", stored.keys, stored.slots, stored.slot_bytes, stored.namespace_index
    )
    check_places("stored chunks", stored.slots, stored.generations)
    check_names("a namespace", stored.namespaces)
    check_numbers("numbers of namespaces", stored.namespace_index, 0, len(stored.namespaces) - 1)
    _sizes_in(stored.slot_bytes, slab_bytes)


class FailedStores(msgspec.Struct, frozen=True, array_like=True):
    """Columns of stores that have overwritten what was there and have not become chunks."""

    slots: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []


def _failed(failed: FailedStores, slab_bytes: int) -> None:
    check_rows("failed stores", failed.slots, failed.slot_bytes)
    check_places("failed stores", failed.slots, failed.generations)
    _sizes_in(failed.slot_bytes, slab_bytes)


def _sizes_in(slot_bytes: Sequence[int], slab_bytes: int) -> None:
    sizes = set(slot_bytes)
    check_sizes(sizes)
    check_numbers("slot sizes", sizes, SLOT_ALIGNMENT, slab_bytes)


class DiskChunks(msgspec.Struct, frozen=True, array_like=True):
    """Columns of chunks that came to a disk; `namespace_index` points into `namespaces`."""

    namespaces: list[str] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    places: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


class DiskStats(msgspec.Struct, frozen=True):
    """A disk tier since the NodeActor's start; sizes in bytes. `path` empty: there is none.

    `problem`: why nothing is written, in a sentence. `is_full`: it gives up old files for new ones,
    so that only what was used is worth a place. `room`: chunks that it takes to be written now.
    `tenant_bytes`: of its files, by tenant, as far as they are somebody's.
    """

    path: str = ""
    problem: str = ""
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
    room: int = 0
    tenant_bytes: dict[str, int] = {}


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
    breakers: BreakerReport = BreakerReport()
    ranks: dict[str, int] = {}
    locked_bytes: int = 0
    metrics_address: str = ""
    metrics_problem: str = ""
    disk: DiskStats = DiskStats()
    states: CaptureStats = CaptureStats()
    threads_failed: int = 0


class NixlEnd(msgspec.Struct, frozen=True):
    """How other nodes reach a NodeActor's pool through NIXL; without `metadata` they can't.

    `address` is where the pool begins in the NodeActor's memory.
    """

    metadata: bytes = b""
    address: int = 0


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
    nixl: NixlEnd = NixlEnd()


class DiskNews(msgspec.Struct, frozen=True):
    """What changed on a disk after number `after` of a listing, up to number `upto`.

    `gone` are places. `is_last`: nothing has changed since. Another `listing` begins anew at 0;
    listing 0 is that of a node without a disk.
    """

    listing: int = 0
    after: int = 0
    upto: int = 0
    came: DiskChunks = DiskChunks()
    gone: list[int] = []
    is_last: bool = True


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


def check_report(report: NodeReport) -> None:
    """Refuse a NodeActor's invalid report with a MessageError."""
    check_names("a name", (report.node_id, report.hostname, report.raykv_version))
    check_names(
        "an address of metrics", (report.stats.metrics_address, report.stats.metrics_problem)
    )
    require(bool(report.node_id), "a node without an id")
    check_numbers("a report's numbers", (report.epoch, report.seq, report.page), 0, MAX_NUMBER)
    slab_bytes, pool_bytes = report.slab_bytes, report.pool_bytes
    is_cut = 0 < slab_bytes <= pool_bytes <= MAX_POOL_BYTES and slab_bytes % SLOT_ALIGNMENT == 0
    require(is_cut, f"a pool of {pool_bytes} bytes in slabs of {slab_bytes}")
    num_slabs = PoolGeometry(pool_bytes, slab_bytes).num_slabs
    require(num_slabs <= MAX_SLABS, f"a pool of {num_slabs} slabs")
    heard = (report.scheduler_epoch, epoch_of(Generation(report.highest_generation)))
    check_numbers("epochs of the scheduler actor", heard, 0, LAST_EPOCH)
    _inventory(report.stored, slab_bytes)
    _failed(report.failed, slab_bytes)
    check_rows("engines on a node", report.stats.ranks)
    check_names("an engine", report.stats.ranks)
    check_rows("cleared namespaces", report.cleared)
    check_names("a namespace", report.cleared)
    check_numbers("generations of clearings", report.cleared.values(), 0, MAX_GENERATION)
    _disk(report)


def _disk(report: NodeReport) -> None:
    came, stats = report.disk.came, report.stats.disk
    check_names("a disk", (stats.path, stats.problem, *came.namespaces))
    check_keys("keys on a disk", came.keys)
    check_rows("chunks on a disk", came.keys, came.slot_bytes, came.namespace_index, came.places)
    check_places("chunks on a disk", came.places, came.generations)
    check_numbers("numbers of namespaces", came.namespace_index, 0, len(came.namespaces) - 1)


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


class Demotions(msgspec.Struct, frozen=True, array_like=True):
    """Columns of chunks that a node's pool gives up.

    `tenant_index` points into `tenants`, labels of those with a quota, of which the first one is
    everybody else's; there is none where nobody has a quota.
    """

    namespaces: list[str] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []
    tenants: list[str] = []
    tenant_index: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def of_tenants(self) -> list[str]:
        """The tenant of each chunk; empty: nobody's in particular."""
        if not self.tenants:
            return [""] * len(self.keys)
        return [self.tenants[index] for index in self.tenant_index]


class DiskOrder(msgspec.Struct, frozen=True):
    """What the directory says to a disk: how much of `listing` it knows, and what to write.

    `shares`: of the disk, by tenant, what is guaranteed and the most; of all others under "".
    """

    listing: int = 0
    heard: int = 0
    demoted: Demotions = Demotions()
    shares: dict[str, tuple[float, float]] = {}


class NodeReportReply(msgspec.Struct, frozen=True):
    """Answer to `NodeReport`. `inventory` asks for all READY chunks; `cleared` as above. `epoch`
    is that of the generations that are granted now.
    """

    epoch: int
    inventory: bool = False
    cleared: dict[str, int] = {}
    paused: bool = False
    disk: DiskOrder = DiskOrder()
