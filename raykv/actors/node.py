"""NodeActor: owns one node's pool; a thin shell around `NodeService` that reports to the directory.

Guarantees of its calls: each is idempotent. `describe` answers at once; `fetch` and `read` move
bytes in threads of their own and end by the deadline that they are given. One more thread reports
to the scheduler actor: new READY chunks soon, a heartbeat every second, the whole inventory when it
is asked for. Chunks stay reported-to-be until the scheduler actor has answered.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

import msgspec
import ray

import raykv
from raykv.actors import names
from raykv.actors.fetching import FetchService
from raykv.actors.keeper import inventory_of
from raykv.actors.node_service import (
    NodeService,
    ServiceSettings,
    boot_epoch,
    process_id,
)
from raykv.actors.peers import Bytes, ObjectRefTransport
from raykv.actors.reading import ReadService
from raykv.core.geometry import PoolGeometry
from raykv.messages import (
    MAX_KEYS,
    PROTOCOL_VERSION,
    FailedStores,
    FetchRequest,
    Inventory,
    NodeDescription,
    NodeReport,
    NodeReportReply,
    NodeStats,
    ReadRequest,
    decode,
    encode,
)

logger = logging.getLogger("raykv.node")

HEARTBEAT_S = 1.0
"""The scheduler actor forgets a node after five missed ones."""

RPC_DEADLINE_S = 2.0
"""For one report, which is answered in milliseconds. A report to a scheduler actor that has just
died may wait in vain; the next one finds its successor."""

BATCH_PAUSE_S = 0.002
"""New chunks are collected for so long before they are reported."""

MAX_PAGE = MAX_KEYS // 2
"""Chunks per report: with namespace and size columns they stay under 100 KiB."""

BIND_DEADLINE_S = 10.0
"""How long a new life waits for the last one to let go of the socket's name."""


CONCURRENCY = {"fetch": 4, "read": 4}
"""Threads of the actor for each; further calls wait their turn."""


class NodeActor:
    """Runs as the detached Ray actor `node:<node id>`, pinned to that node."""

    def __init__(
        self, node_id: str, socket_name: str, pool_bytes: int, slab_bytes: int, pool_path: str
    ) -> None:
        self._node_id = node_id
        self._socket_name = socket_name
        self._pool_path = pool_path
        settings = ServiceSettings(socket_name, PoolGeometry(pool_bytes, slab_bytes), pool_path)
        self._service = NodeService(settings, boot_epoch())
        self._news = threading.Event()
        keeper, epoch = self._service.keeper, self._service.epoch
        self._reading = ReadService(keeper, epoch)
        self._fetching = FetchService(keeper, epoch, ObjectRefTransport(), self._news.set)
        self._seq = 0
        self._scheduler_epoch = 0
        self._paused = False
        # A report that has not been answered yet; it is sent again as it was.
        self._unanswered: NodeReport | None = None
        self._scheduler: Any = None
        self._start()
        threading.Thread(target=self._report_for_ever, name="raykv-report", daemon=True).start()

    def _start(self) -> None:
        give_up_at = time.monotonic() + BIND_DEADLINE_S
        while True:
            try:
                self._service.start(self._news.set)
                return
            except OSError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.1)

    # Calls

    def describe(self) -> bytes:
        """→ `NodeDescription`."""
        stats = self._stats()
        geometry = self._service.settings.geometry
        return encode(
            NodeDescription(
                version=PROTOCOL_VERSION,
                raykv_version=raykv.__version__,
                node_id=self._node_id,
                epoch=self._service.epoch,
                socket_name=self._socket_name,
                pool_bytes=geometry.pool_bytes,
                slab_bytes=geometry.slab_bytes,
                prefaulted_bytes=stats.prefaulted_bytes,
                pid=process_id(),
                num_workers=stats.num_workers,
                pool_path=self._pool_path,
                stats=stats,
            )
        )

    @ray.method(concurrency_group="fetch")
    def fetch(self, raw: bytes) -> bytes:
        """`FetchRequest` → `FetchResult`: chunks of other nodes into slots of this one."""
        return encode(self._fetching.fetch(decode(raw, FetchRequest)))

    @ray.method(concurrency_group="read")
    def read(self, raw: bytes) -> tuple[bytes, Bytes]:
        """`ReadRequest` → `ReadReply` and the bytes: chunks of this node, for another one."""
        reply, data = self._reading.read(decode(raw, ReadRequest))
        return encode(reply), data

    def _stats(self) -> NodeStats:
        fetched = self._fetching.counters
        return msgspec.structs.replace(
            self._service.stats(),
            bytes_fetched=fetched.bytes_fetched,
            chunks_fetched=fetched.chunks_fetched,
            fetches_failed=fetched.fetches_failed,
            bytes_sent=self._reading.bytes_sent,
            reading=self._reading.reading,
        )

    def inventory(self) -> bytes:
        """→ `Inventory`: every READY chunk."""
        return encode(inventory_of(self._service.keeper.all_held()))

    def check(self) -> bool:
        """Assert the slot table's invariants; for tests."""
        self._service.keeper.table.check()
        return True

    # Reports

    def _report_for_ever(self) -> None:
        while True:
            self._news.wait(HEARTBEAT_S)
            if self._news.is_set():
                self._news.clear()
                time.sleep(BATCH_PAUSE_S)
            try:
                self._report()
            except Exception as error:
                # No scheduler actor now: what it should know stays here until it is back.
                logger.warning("no report to the scheduler actor: %s", _short(error))
                self._scheduler = None
                time.sleep(0.2)

    def _report(self) -> None:
        """Send what is new, page by page, at least one page (the heartbeat)."""
        while True:
            if self._unanswered is None:
                self._seq += 1
                keeper = self._service.keeper
                stored, failed = keeper.take_unreported(MAX_PAGE), keeper.take_failed(MAX_PAGE)
                self._unanswered = self._make_report(stored, failed, self._seq)
            reply = self._call(self._unanswered)
            was_full = len(self._unanswered.stored) == MAX_PAGE
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
            highest_generation=self._service.keeper.highest_generation,
            scheduler_epoch=self._scheduler_epoch,
            stored=stored,
            failed=failed,
            page=page,
            last_page=page == num_pages > 0,
            cleared=self._service.keeper.cleared(),
            paused=self._paused,
            stats=self._stats(),
            pid=process_id(),
            hostname=socket.gethostname(),
            raykv_version=raykv.__version__,
        )

    def _call(self, report: NodeReport) -> NodeReportReply:
        if self._scheduler is None:
            self._scheduler = ray.get_actor(names.SCHEDULER, namespace=names.RAY_NAMESPACE)
        ref = self._scheduler.report.remote(encode(report))
        return decode(ray.get(ref, timeout=RPC_DEADLINE_S), NodeReportReply)

    def _take_reply(self, reply: NodeReportReply) -> None:
        self._scheduler_epoch = max(self._scheduler_epoch, reply.epoch)
        self._paused = reply.paused
        self._service.keeper.clear(reply.cleared)

    def _send_inventory(self) -> None:
        """All READY chunks, for a scheduler actor that has just begun to know this node."""
        chunks = self._service.keeper.all_ready()
        pages = [chunks[i : i + MAX_PAGE] for i in range(0, len(chunks), MAX_PAGE)] or [[]]
        for number, page in enumerate(pages, start=1):
            # What was overwritten meanwhile may have been reported already.
            rest = inventory_of(self._service.keeper.only_ready(page))
            report = self._make_report(rest, FailedStores(), self._seq, number, len(pages))
            self._take_reply(self._call(report))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
