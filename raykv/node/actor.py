"""NodeActor: owns one node's pool; a thin shell around `NodeService` that reports to the directory.

Guarantees of its calls: each is idempotent. `describe` answers at once; `fetch` and `read` move
bytes in threads of their own and end by the deadline that they are given. One more thread reports
to the scheduler actor: new READY chunks soon, a heartbeat every second, the whole inventory when it
is asked for. Chunks count as unreported until the scheduler actor has answered.

A NodeActor whose pool does not fit into what limits its memory lives without one: its description
says why, it reports nothing, and from time to time it checks whether the pool fits now. A
constructor that raised would be run again by Ray for ever.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from typing import Any

import msgspec
import ray

from raykv.base.clearings import Clearings
from raykv.base.deadlines import (
    DISK_READ_S,
    GCS_S,
    NODE_BATCH_PAUSE_S,
    NODE_BIND_LOOK_S,
    NODE_BIND_S,
    NODE_HEARTBEAT_S,
    NODE_REPORT_PAUSES_S,
    NODE_REPORT_S,
    NODE_ROOM_GRACE_LOOK_S,
    NODE_ROOM_GRACE_S,
    NODE_ROOM_LOOK_S,
    STATES_READ_S,
)
from raykv.base.errors import MessageError, RayKVError, SettingError, cause_of, first_line
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import MAX_GENERATION
from raykv.base.settings import NodeOptions
from raykv.base.threads import OnFailure, end_process, start_thread, within
from raykv.base.version import __version__
from raykv.cluster import names
from raykv.cluster.breaker import Breakers, Pauses, joined
from raykv.cluster.logs import read_log, set_up_logging
from raykv.memory.limits import pool_objection
from raykv.metrics.server import MetricsServer
from raykv.metrics.table import number, numbers
from raykv.node.devices import see_all_gpus
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.host import host_facts
from raykv.node.keeper import inventory_of
from raykv.node.nixl.agent import NixlAgent, NixlError
from raykv.node.nixl.offers import Offers
from raykv.node.nixl.transport import NixlTransport
from raykv.node.peers import Bytes, ObjectRefTransport, RayPeers, Switch
from raykv.node.read import ReadService
from raykv.node.service import (
    NodeService,
    ServiceSettings,
    boot_epoch,
    process_id,
)
from raykv.node.states.file import HiddenStates
from raykv.protocol.columns import MAX_KEYS, require
from raykv.protocol.findings import HostQuestion
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode, receive
from raykv.protocol.measures import MetricFamily
from raykv.protocol.node import (
    Demotions,
    DiskNews,
    DiskStats,
    FailedStores,
    Inventory,
    Kept,
    NixlEnd,
    NodeDescription,
    NodeReport,
    NodeReportReply,
    NodeStats,
)
from raykv.protocol.peer import FetchRequest, ReadRequest, check_read

logger = logging.getLogger("raykv.node")

HERE = "the NodeActor"

MAX_PAGE = MAX_KEYS // 2
"""Chunks per report: with namespace and size columns they stay under 100 KiB."""


CONCURRENCY = {"fetch": 4, "read": 4, "offer": 2, "host": 1, "demote": 1, "keep": 1, "states": 8}
"""Threads of the actor for each kind of call; further calls wait their turn."""


NO_OPTIONS = NodeOptions()


class NodeActor:
    """Runs as the detached Ray actor `node:<node id>`, pinned to that node."""

    def __init__(
        self,
        node_id: str,
        socket_name: str,
        pool_bytes: int,
        slab_bytes: int,
        pool_path: str,
        options: NodeOptions = NO_OPTIONS,
    ) -> None:
        set_up_logging()
        see_all_gpus()
        self._node_id = node_id
        self._socket_name = socket_name
        self._pool_path = pool_path
        self._settings = ServiceSettings(
            socket_name, PoolGeometry(pool_bytes, slab_bytes), pool_path
        )
        self._news = threading.Event()
        self._seq = 0
        self._scheduler_epoch = 0
        self._paused = False
        # A report that has not been answered yet; it is sent again as it was.
        self._unanswered: NodeReport | None = None
        self._scheduler: Any = None
        # The report thread opens and closes it.
        self._breakers = Breakers(Pauses(*NODE_REPORT_PAUSES_S))
        self._metrics: MetricsServer | None = None
        self._disk_place = options.disk
        self._disk: DiskTier | None = None
        self._transport_wish = options.transport
        self._nixl = NixlEnd()
        self._nixl_reads: NixlTransport | None = None
        # Several threads fetch and read.
        self._measuring = threading.Lock()
        # Why there is no pool; empty as soon as there is one.
        self._refusal = self._open_within(NODE_ROOM_GRACE_S)
        if self._refusal:
            logger.error("no pool on this node: %s", self._refusal)
            start_thread("raykv-room", self._open_later, OnFailure.END_PROCESS)
        if options.metrics is not None:
            try:
                host = ray.util.get_node_ip_address()
                self._metrics = MetricsServer(options.metrics, host, self._families)
            except Exception:
                logger.exception("this node shows no metrics")

    @ray.method(concurrency_group="host")
    def log(self, start: int | None) -> tuple[int, bytes]:
        """A piece of this actor's log; see `read_log`."""
        return read_log(start)

    def _open_within(self, seconds: float) -> str:
        give_up_at = time.monotonic() + seconds
        while (refusal := self._open()) and time.monotonic() < give_up_at:
            time.sleep(NODE_ROOM_GRACE_LOOK_S)
        return refusal

    def _open_later(self) -> None:
        while self._refusal:
            time.sleep(NODE_ROOM_LOOK_S)
            try:
                self._refusal = self._open()
            except Exception as error:
                # A new life, from the beginning.
                logger.exception("the pool can't be opened")
                end_process(f"the pool can't be opened: {first_line(error)}")
        logger.warning("there is room for the pool now")

    def _open(self) -> str:
        """Make the pool and begin to serve; else return why that can't be, in a sentence."""
        pool_bytes = self._settings.geometry.pool_bytes
        refusal = pool_objection(pool_bytes, self._pool_path)
        if refusal:
            return refusal
        try:
            self._service = NodeService(self._settings, boot_epoch())
        except RayKVError as error:
            return str(error)
        keeper, epoch = self._service.keeper, self._service.epoch
        self._reading = ReadService(keeper, epoch)
        is_busy = self._service.is_copying
        if self._disk_place.path:
            self._disk = DiskTier(self._disk_place, keeper, epoch, self._news.set, is_busy)
        disk_reads = None if self._disk is None else self._disk.reads
        peers = RayPeers()
        self._between = Switch(ObjectRefTransport(peers))
        transport = TieredTransport(self._node_id, disk_reads, self._between)
        self._fetching = FetchService(keeper, epoch, transport, self._news.set)
        self._offers = Offers(self._reading)
        try:
            self._start()
        except RayKVError as error:
            self._service.stop()
            return str(error)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
            self._service.stop()
            return f"the pool {self._pool_path} can't be opened: {error}"
        if self._disk is not None:
            self._disk.start()
        if self._transport_wish != "ray":
            start_thread("raykv-nixl", lambda: self._open_nixl(peers), OnFailure.GIVE_UP)
        # The first report is not a heartbeat to wait for: engines can't attach before it.
        self._news.set()
        start_thread("raykv-report", self._report_for_ever, OnFailure.END_PROCESS)
        return ""

    def _open_nixl(self, peers: RayPeers) -> None:
        """Read through NIXL from now on, where others have it, and let them; takes seconds."""
        keeper, epoch = self._service.keeper, self._service.epoch
        pool_bytes = self._settings.geometry.pool_bytes
        try:
            agent = NixlAgent(f"raykv:{self._node_id}:{epoch}")
            agent.register(keeper.pool.address, pool_bytes)
            metadata = agent.metadata()
        except NixlError as error:
            is_wanted = self._transport_wish == "nixl"
            level = logging.WARNING if is_wanted else logging.INFO
            logger.log(level, "chunks of other nodes come through Ray, without NIXL: %s", error)
            return
        start_thread("raykv-offers", self._offers.expire_for_ever, OnFailure.END_PROCESS)
        self._nixl_reads = NixlTransport(agent, peers, ObjectRefTransport(peers))
        self._between.use(self._nixl_reads)
        self._nixl = NixlEnd(metadata, keeper.pool.address)

    def _start(self) -> None:
        give_up_at = time.monotonic() + NODE_BIND_S
        while True:
            try:
                self._service.start(self._news.set)
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                    raise
                time.sleep(NODE_BIND_LOOK_S)

    # Calls

    def describe(self) -> bytes:
        """→ `NodeDescription`; without a pool its sizes are those that it was to have."""
        geometry = self._settings.geometry
        description = NodeDescription(
            version=PROTOCOL_VERSION,
            raykv_version=__version__,
            node_id=self._node_id,
            epoch=0,
            socket_name=self._socket_name,
            pool_bytes=geometry.pool_bytes,
            slab_bytes=geometry.slab_bytes,
            prefaulted_bytes=0,
            pid=process_id(),
            num_workers=0,
            pool_path=self._pool_path,
            refusal=self._refusal,
        )
        if self._refusal:
            return encode(description)
        stats = self._stats()
        return encode(
            msgspec.structs.replace(
                description,
                epoch=self._service.epoch,
                prefaulted_bytes=stats.prefaulted_bytes,
                num_workers=stats.num_workers,
                stats=stats,
                nixl=self._nixl,
            )
        )

    @ray.method(concurrency_group="fetch")
    def fetch(self, raw: bytes) -> bytes:
        """`FetchRequest` → `FetchResult`: chunks of other nodes into slots of this one."""
        self._refuse_without_pool()
        request = receive(raw, FetchRequest, "the engine", HERE)
        result = self._fetching.fetch(request)
        with self._measuring:
            self._service.meter.fetch.observe(result.seconds)
        return encode(result)

    @ray.method(concurrency_group="read")
    def read(self, raw: bytes) -> tuple[bytes, Bytes]:
        """`ReadRequest` → `ReadReply` and the bytes: chunks of this node, for another one."""
        self._refuse_without_pool()
        began = time.monotonic()
        request = receive(raw, ReadRequest, "another NodeActor", HERE)
        if request.from_disk and self._disk is not None:
            check_read(request, self._settings.geometry.slab_bytes)
            # Other threads touch the disk: it may hang.
            reply, data = self._disk.reads.start_read(request).wait(DISK_READ_S)
        else:
            reply, data = self._reading.read(request)
        with self._measuring:
            self._service.meter.reading.observe(time.monotonic() - began)
        return encode(reply), data

    @ray.method(concurrency_group="offer")
    def offer(self, raw: bytes) -> bytes:
        """`ReadRequest` → `Offer`: chunks that another node takes out of the pool itself."""
        self._refuse_without_pool()
        return encode(self._offers.begin(receive(raw, ReadRequest, "another NodeActor", HERE)))

    @ray.method(concurrency_group="offer")
    def end_offer(self, epoch: int, number: int) -> bool:
        """Whether an offer of that life was in force until now; it ends."""
        self._refuse_without_pool()
        return epoch == self._service.epoch and self._offers.end(number)

    def has_hidden_states(self, request_id: str) -> bool:
        """Whether a request of that name is known here, captured or failed."""
        return not self._refusal and self._service.capturing.has(request_id)

    @ray.method(concurrency_group="states")
    def hidden_states(self, request_id: str, deadline_s: float) -> HiddenStates:
        self._refuse_without_pool()
        return self._service.capturing.states(request_id, min(deadline_s, STATES_READ_S))

    def kv_form(self, namespace: str) -> bytes:
        """→ `KVForm`; without groups if no worker of the namespace has reported it in this life."""
        self._refuse_without_pool()
        return encode(self._service.forms.get(namespace))

    @ray.method(concurrency_group="host")
    def host(self, raw: bytes) -> bytes:
        """`HostQuestion` → `HostFacts`."""
        facts = host_facts(decode(raw, HostQuestion), self._pool_path, self._disk_place.path)
        if self._refusal:
            return encode(msgspec.structs.replace(facts, refusal=self._refusal))
        pool = self._service.keeper.pool
        pool_bytes = self._settings.geometry.pool_bytes
        return encode(
            msgspec.structs.replace(
                facts,
                pool_bytes=pool_bytes,
                left_bytes=pool_bytes - pool.prefaulted_bytes,
                is_short=pool.is_short,
            )
        )

    def _refuse_without_pool(self) -> None:
        if self._refusal:
            raise SettingError(self._refusal)

    def _families(self) -> list[MetricFamily]:
        """All series, for a scrape; in a thread of the server."""
        build = numbers("raykv_build_info", {(__version__, "node"): 1})
        if self._refusal:
            return [build, number("raykv_pool_size_bytes", 0)]
        service = self._service
        return [build, *service.meter.families(self._stats(), service.keeper.contents())]

    def _stats(self) -> NodeStats:
        fetched = self._fetching.counters
        metrics = self._metrics
        return msgspec.structs.replace(
            self._service.stats(),
            bytes_fetched=fetched.bytes_fetched,
            chunks_fetched=fetched.chunks_fetched,
            fetches_failed=fetched.fetches_failed,
            bytes_nixl=0 if self._nixl_reads is None else self._nixl_reads.bytes_read,
            bytes_sent=self._reading.bytes_sent,
            reading=self._reading.reading,
            breakers=joined(
                [self._breakers.report(time.monotonic()), self._fetching.breaker_report()]
            ),
            metrics_address="" if metrics is None else metrics.address,
            metrics_problem="" if metrics is None else metrics.problem,
            disk=DiskStats() if self._disk is None else self._disk.stats(),
        )

    def inventory(self) -> bytes:
        """→ `Inventory`: every READY chunk."""
        self._refuse_without_pool()
        return encode(inventory_of(self._service.keeper.all_held()))

    @ray.method(concurrency_group="host")
    def note_clearing(self, cleared: dict[str, int], deadline_s: float) -> bool:
        """Discard namespaces up to generations; False if the disk could not note it in time."""
        if self._refusal:
            return True
        require(all(0 <= each <= MAX_GENERATION for each in cleared.values()), "a clearing")
        self._service.keeper.clear(cleared)
        if self._disk is None:
            return True
        self._disk.clear(cleared)
        return self._disk.wait_for_clearings(deadline_s)

    @ray.method(concurrency_group="demote")
    def demote(self, raw: bytes, deadline_s: float) -> bool:
        """`Demotions`: have chunks written that others are about to take the place of; False if the
        disk has not copied all of them out of their slots in time, or can't be written.
        """
        if self._refusal or self._disk is None:
            return False
        demoted = decode(raw, Demotions)
        return self._disk.demote_now(demoted, deadline_s)

    @ray.method(concurrency_group="keep")
    def keep(self, deadline_s: float) -> bytes:
        """→ `Kept`, when all chunks are on the disk or in the pool file, or the time has passed."""
        if self._refusal:
            return encode(Kept(self._node_id))
        keeper, place, problem = self._service.keeper, self._pool_path, ""
        if self._disk is not None:
            place, left = self._disk_place.path, self._disk.keep(deadline_s)
            problem = self._disk.stats().problem
        elif place:
            left = keeper.wait_for_seals(deadline_s)
        else:
            left = len(keeper.all_held())
        num_chunks = len(keeper.all_held())
        return encode(Kept(self._node_id, place, num_chunks - left, left, problem))

    def check(self) -> bool:
        """Assert the slot table's invariants; for tests."""
        with self._service.keeper.lock:
            self._service.keeper.table.check()
        return True

    # Reports

    def _report_for_ever(self) -> None:
        while True:
            self._news.wait(NODE_HEARTBEAT_S)
            if self._news.is_set():
                self._news.clear()
                time.sleep(NODE_BATCH_PAUSE_S)
            time.sleep(self._breakers.wait_s(names.SCHEDULER, time.monotonic()))
            call = self._breakers.begin(names.SCHEDULER, time.monotonic())
            if call is not None:
                self._report_once(call)

    def _report_once(self, call: int) -> None:
        try:
            self._report()
        except Exception as error:
            # No scheduler actor now: what it should know stays here until it is back.
            self._scheduler = None
            if isinstance(error, MessageError):
                # A report that is refused for its content must not be repeated.
                self._unanswered = None
            reason = first_line(cause_of(error))
            if self._breakers.failed(names.SCHEDULER, call, time.monotonic(), reason):
                logger.warning("no report to the scheduler actor: %s", reason)
            self._news.set()
            return
        if self._breakers.worked(names.SCHEDULER):
            logger.warning("the scheduler actor takes reports again")

    def _report(self) -> None:
        """Send what is new, page by page, at least one page (the heartbeat)."""
        while True:
            if self._unanswered is None:
                self._seq += 1
                keeper = self._service.keeper
                stored, failed = keeper.take_unreported(MAX_PAGE), keeper.take_failed(MAX_PAGE)
                self._unanswered = self._make_report(stored, failed, self._seq)
            reply = self._call(self._unanswered)
            disk = self._unanswered.disk
            has_heard = (reply.disk.listing, reply.disk.heard) == (disk.listing, disk.upto)
            was_full = len(self._unanswered.stored) == MAX_PAGE or (not disk.is_last and has_heard)
            self._unanswered = None
            self._take_reply(reply)
            if reply.inventory:
                self._send_inventory()
            if not was_full:
                return

    def _make_report(
        self,
        stored: Inventory,
        failed: FailedStores,
        seq: int,
        page: int = 0,
        num_pages: int = 0,
    ) -> NodeReport:
        geometry = self._service.settings.geometry
        return NodeReport(
            version=PROTOCOL_VERSION,
            node_id=self._node_id,
            epoch=self._service.epoch,
            seq=seq,
            pool_bytes=geometry.pool_bytes,
            slab_bytes=geometry.slab_bytes,
            highest_generation=self._highest_generation(),
            scheduler_epoch=self._scheduler_epoch,
            stored=stored,
            failed=failed,
            page=page,
            last_page=page == num_pages > 0,
            cleared=self._cleared(),
            paused=self._paused,
            stats=self._stats(),
            pid=process_id(),
            hostname=socket.gethostname(),
            raykv_version=__version__,
            disk=DiskNews() if self._disk is None else self._disk.news(),
        )

    def _highest_generation(self) -> int:
        """The highest ever seen here; the disk's too, as soon as an epoch is known."""
        on_disk = 0
        if self._disk is not None and self._scheduler_epoch:
            on_disk = self._disk.highest_generation
        return max(self._service.keeper.highest_generation, on_disk)

    def _cleared(self) -> dict[str, int]:
        """Floors of the pool and of the disk, where that of an earlier life is known."""
        cleared = Clearings({} if self._disk is None else self._disk.cleared())
        cleared.take(self._service.keeper.cleared())
        return cleared.told

    def _call(self, report: NodeReport) -> NodeReportReply:
        if self._scheduler is None:
            self._scheduler = within(
                GCS_S, lambda: ray.get_actor(names.SCHEDULER, namespace=names.RAY_NAMESPACE)
            )
        ref = self._scheduler.report.remote(encode(report))
        answer = ray.get(ref, timeout=NODE_REPORT_S)
        return receive(answer, NodeReportReply, "the scheduler actor", HERE)

    def _take_reply(self, reply: NodeReportReply) -> None:
        self._scheduler_epoch = max(self._scheduler_epoch, reply.epoch)
        self._paused = reply.paused
        self._service.keeper.clear(reply.cleared)
        if self._disk is not None:
            self._disk.clear(reply.cleared)
            self._disk.take_order(reply.disk)

    def _send_inventory(self) -> None:
        """All READY chunks, for a scheduler actor that has just learned of this node."""
        chunks = self._service.keeper.all_ready()
        pages = [chunks[i : i + MAX_PAGE] for i in range(0, len(chunks), MAX_PAGE)] or [[]]
        for position, page in enumerate(pages, start=1):
            # What was overwritten meanwhile may have been reported already.
            rest = inventory_of(self._service.keeper.only_ready(page))
            report = self._make_report(rest, FailedStores(), self._seq, position, len(pages))
            self._take_reply(self._call(report))
