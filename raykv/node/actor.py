"""NodeActor: owns one node's pool. What there is put together: the pool, copies, bytes of other
nodes, a disk, reports, and what people ask.

Guarantees of its calls: each is idempotent. `describe` answers at once; `fetch` and `read` move
bytes in threads of their own and end by the deadline that they are given.

A NodeActor whose pool does not fit into what limits its memory lives without one: its description
says why, it reports nothing, and from time to time it checks whether the pool fits now. A
constructor that raised would be run again by Ray for ever.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from typing import Any

import msgspec
import ray

from raykv.base import deadlines, errors, settings, version
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NodeId
from raykv.base.threads import OnFailure, end_process, start_thread
from raykv.cluster.breaker import joined
from raykv.cluster.logs import read_log, set_up_logging
from raykv.cluster.relay import RelayEnds
from raykv.memory.limits import pool_objection
from raykv.metrics.server import MetricsServer
from raykv.metrics.table import number, numbers
from raykv.node import devices, fetch, read, reports
from raykv.node.accounts.desk import QUESTIONS, Desk
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import DiskTier
from raykv.node.host import host_facts
from raykv.node.keeper import PoolKeeper
from raykv.node.nixl import offers, transport
from raykv.node.nixl.agent import NixlAgent, NixlError
from raykv.node.peers import Bytes, RayPeers
from raykv.node.service import NodeService, boot_life
from raykv.node.states.file import HiddenStates
from raykv.protocol import columns, copies, measures, node
from raykv.protocol.findings import HostQuestion
from raykv.protocol.framing import decode, encode, receive

logger = logging.getLogger("raykv.node")

# How long a new NodeActor waits for its predecessor's memory to be freed.
NODE_ROOM_GRACE_S = 3.0

# For a read on behalf of another node, which has a deadline of its own: a network's disk may hang,
# and must not hold up reads of the pool for ever.
DISK_READ_S = 10.0


HERE = "the NodeActor"
OTHER_NODE, OPERATOR = "another NodeActor", "the operator"

CONCURRENCY = {
    "fetch": 2,
    "read": 4,
    "offer": 2,
    "host": 1,
    "keep": 1,
    "states": 8,
    "people": 2,
    "relay": 64,
}
"""Threads of the actor for each kind of call; further calls wait their turn. An engine on another
host takes up to two.
"""

NO_OPTIONS = settings.NodeOptions()


def is_draining(node_id: str) -> bool:
    """Whether Ray is about to take a node away; False where it does not say."""
    try:
        from ray._private import worker

        return node_id in worker.global_worker.gcs_client.get_draining_nodes(
            timeout=deadlines.ANSWER_S
        )
    except Exception as error:
        logger.debug("Ray does not say which nodes drain: %s", errors.first_line(error))
        return False


class NodeActor:
    """Runs as the detached Ray actor `node:<node id>`, pinned to that node."""

    def __init__(
        self,
        node_id: str,
        socket_name: str,
        pool_bytes: int,
        slab_bytes: int,
        pool_path: str,
        options: settings.NodeOptions = NO_OPTIONS,
    ) -> None:
        set_up_logging()
        devices.see_all_gpus()
        self._node_id = node_id
        self._socket_name = socket_name
        self._relayed = RelayEnds(socket_name)
        self._pool_path = pool_path
        self._geometry = PoolGeometry(pool_bytes, slab_bytes)
        self._metrics: MetricsServer | None = None
        self._options = options
        self._disk: DiskTier | None = None
        self._nixl = b""
        self._nixl_reads: transport.NixlTransport | None = None
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
            time.sleep(deadlines.IDLE_LOOK_S)
        return refusal

    def _open_later(self) -> None:
        while self._refusal:
            time.sleep(deadlines.SELDOM_S)
            try:
                self._refusal = self._open()
            except Exception as error:
                # A new life, from the beginning.
                logger.exception("the pool can't be opened")
                end_process(f"the pool can't be opened: {errors.first_line(error)}")
        logger.warning("there is room for the pool now")

    def _open(self) -> str:
        """Make the pool and begin to serve; else return why that can't be, in a sentence."""
        refusal = pool_objection(self._geometry.pool_bytes, self._pool_path)
        if refusal:
            return refusal
        try:
            node_id = NodeId(self._node_id)
            keeper = PoolKeeper(
                *(node_id, boot_life(), self._geometry, self._pool_path),
                pin_share=self._options.pin_share,
            )
            self._service = NodeService(self._socket_name, keeper, fetch=self._fetch)
        except errors.RayKVError as error:
            return str(error)
        self._keeper = keeper
        self._reading = read.ReadService(keeper)
        if self._options.disk.path:
            is_busy = self._service.is_copying
            self._disk = DiskTier(self._options.disk, keeper, is_busy)
            keeper.keep_floors = self._disk.keep_floors
        disk_reads = None if self._disk is None else self._disk.reads
        peers = RayPeers()
        self._transport = TieredTransport(self._node_id, disk_reads, peers)
        self._fetching = fetch.FetchService(keeper, self._transport)
        self._offers = offers.Offers(self._reading)
        self._desk = Desk(self._node_id, keeper)
        self._reports = reports.Reports(keeper, self._stats)
        try:
            self._start()
        except (errors.RayKVError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                raise
            self._service.stop()
            keeper.pool.close()
            is_ours = isinstance(error, errors.RayKVError)
            return str(error) if is_ours else f"the pool {self._pool_path} can't be opened: {error}"
        if self._disk is not None:
            self._disk.start()
        if self._options.transport != "ray":
            start_thread("raykv-nixl", lambda: self._open_nixl(peers), OnFailure.GIVE_UP)
        self._reports.start()
        start_thread("raykv-drain", self._watch_for_drain, OnFailure.END_PROCESS)
        return ""

    def _watch_for_drain(self) -> None:
        """Until Ray drains this node: nothing more is stored here from then on."""
        while not is_draining(self._node_id):
            time.sleep(deadlines.SELDOM_S)
        with self._keeper.lock:
            self._keeper.owner.is_leaving = True
            self._keeper.lock.notify_all()

    def _open_nixl(self, peers: RayPeers) -> None:
        """Read through NIXL from now on, where others have it, and let them; takes seconds."""
        keeper = self._keeper
        try:
            agent = NixlAgent(f"raykv:{self._node_id}:{keeper.life}")
            agent.register(keeper.pool.address, self._geometry.pool_bytes)
            metadata = agent.metadata()
        except NixlError as error:
            is_wanted = self._options.transport == "nixl"
            level = logging.WARNING if is_wanted else logging.INFO
            logger.log(level, "chunks of other nodes come through Ray, without NIXL: %s", error)
            return
        start_thread("raykv-offers", self._offers.expire_for_ever, OnFailure.END_PROCESS)
        self._nixl_reads = transport.NixlTransport(agent, peers, peers)
        self._transport.use(self._nixl_reads)
        self._nixl = metadata

    def _start(self) -> None:
        give_up_at = time.monotonic() + deadlines.PREDECESSOR_S
        while True:
            try:
                self._service.start()
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or time.monotonic() > give_up_at:
                    raise
                time.sleep(deadlines.LOOK_S)

    # Calls

    def describe(self) -> bytes:
        """→ `NodeDescription`; without a pool its sizes are those that it was to have."""
        refusal, geometry = self._refusal, self._geometry
        stats = node.NodeStats() if refusal else self._stats()
        return encode(
            node.NodeDescription(
                raykv_version=version.__version__,
                node_id=self._node_id,
                life=0 if refusal else self._keeper.life,
                socket_name=self._socket_name,
                pool_bytes=geometry.pool_bytes,
                slab_bytes=geometry.slab_bytes,
                prefaulted_bytes=stats.prefaulted_bytes,
                pid=os.getpid(),
                num_workers=stats.num_workers,
                pool_path=self._pool_path,
                stats=stats,
                refusal=refusal,
                nixl=self._nixl,
            )
        )

    @ray.method(concurrency_group="relay")
    def relay_up(self, name: str, at: int, data: bytes) -> bytes:
        """See `RelayEnds.up`."""
        self._refuse_without_pool()
        self._relayed.up(name, at, data)
        return b""

    @ray.method(concurrency_group="relay")
    def relay_down(self, name: str, at: int) -> bytes:
        """See `RelayEnds.down`."""
        self._refuse_without_pool()
        return self._relayed.down(name, at)

    @ray.method(concurrency_group="fetch")
    def fetch(self, raw: bytes) -> bytes:
        """`Fetch` → `CopyResult`: chunks of other nodes into the pool."""
        self._refuse_without_pool()
        return encode(self._fetch(receive(raw, copies.Fetch, OPERATOR, HERE)))

    def _fetch(self, order: copies.Fetch) -> copies.CopyResult:
        result = self._fetching.fetch(order)
        with self._measuring:
            self._service.meter.fetch.observe(result.seconds)
        return result

    @ray.method(concurrency_group="read")
    def read(self, raw: bytes) -> tuple[bytes, Bytes]:
        """`Read` → `ReadReply` and the bytes: chunks of this node, for another one."""
        self._refuse_without_pool()
        began = time.monotonic()
        request = receive(raw, copies.Read, OTHER_NODE, HERE)
        if request.from_disk and self._disk is not None:
            columns.check_numbers("slot sizes", request.slot_bytes, 1, self._geometry.slab_bytes)
            # Other threads touch the disk: it may hang.
            reply, data = self._disk.reads.start_read(request).wait(DISK_READ_S)
        else:
            reply, data = self._reading.read(request)
        with self._measuring:
            self._service.meter.reading.observe(time.monotonic() - began)
        return encode(reply), data

    @ray.method(concurrency_group="offer")
    def offer(self, raw: bytes) -> bytes:
        """`Read` → `Offer`: chunks that another node takes out of the pool itself."""
        self._refuse_without_pool()
        if not self._nixl:
            raise errors.SettingError("NIXL is not open on this node: its pool is read through Ray")
        return encode(self._offers.begin(receive(raw, copies.Read, OTHER_NODE, HERE)))

    @ray.method(concurrency_group="offer")
    def end_offer(self, life: int, number: int) -> bool:
        """Whether an offer of that life was in force until now; it ends."""
        self._refuse_without_pool()
        return life == self._keeper.life and self._offers.end(number)

    def has_hidden_states(self, request_id: str) -> bool:
        """Whether a request of that name is known here, captured or failed."""
        return not self._refusal and self._service.capturing.has(request_id)

    @ray.method(concurrency_group="states")
    def hidden_states(self, request_id: str, deadline_s: float) -> HiddenStates:
        self._refuse_without_pool()
        return self._service.capturing.states(request_id, min(deadline_s, deadlines.READ_S))

    def kv_form(self, namespace: str) -> bytes:
        """→ `KVForm`; without groups if no worker of the namespace has reported it in this life."""
        self._refuse_without_pool()
        return encode(self._service.forms.get(namespace))

    @ray.method(concurrency_group="host")
    def host(self, raw: bytes) -> bytes:
        """`HostQuestion` → `HostFacts`."""
        facts = host_facts(decode(raw, HostQuestion), self._pool_path, self._options.disk.path)
        if self._refusal:
            return encode(msgspec.structs.replace(facts, refusal=self._refusal))
        pool, pool_bytes = self._keeper.pool, self._geometry.pool_bytes
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
            raise errors.SettingError(self._refusal)

    def _families(self) -> list[measures.MetricFamily]:
        """All series, for a scrape; in a thread of the server."""
        build = numbers("raykv_build_info", {(version.__version__, "node"): 1})
        if self._refusal:
            return [build, number("raykv_pool_size_bytes", 0)]
        stats = self._stats()
        with self._keeper.lock:
            return [build, *self._service.meter.families(stats, self._keeper.owner)]

    def _stats(self) -> node.NodeStats:
        metrics = self._metrics
        return msgspec.structs.replace(
            self._service.stats(),
            **self._fetching.counters,
            bytes_nixl=0 if self._nixl_reads is None else self._nixl_reads.bytes_read,
            bytes_sent=self._reading.bytes_sent,
            reading=self._reading.reading,
            breakers=joined([self._reports.breaker_report(), self._fetching.breaker_report()]),
            metrics_address="" if metrics is None else metrics.address,
            metrics_problem="" if metrics is None else metrics.problem,
            disk=node.DiskStats() if self._disk is None else self._disk.reads.stats(),
        )

    # People

    @ray.method(concurrency_group="people")
    def ask(self, question: str, *arguments: Any) -> bytes:
        """A method of `Desk`, one of its `QUESTIONS`, and what that answers."""
        self._refuse_without_pool()
        columns.require(question in QUESTIONS, f"the question {question!r}")
        kind = QUESTIONS[question]
        if kind is not None:
            (raw,) = arguments
            arguments = (receive(raw, kind, OPERATOR, HERE),)
        return encode(getattr(self._desk, question)(*arguments))

    @ray.method(concurrency_group="keep")
    def keep(self, deadline_s: float) -> bytes:
        """→ `Kept`, when all chunks are on the disk or in the pool file, or the time has passed."""
        if self._refusal:
            return encode(node.Kept(self._node_id))
        keeper, place, problem = self._keeper, self._pool_path, ""
        if self._disk is not None:
            place, left = self._options.disk.path, self._disk.keep(deadline_s)
            problem = self._disk.reads.stats().problem
        elif place:
            left = keeper.wait_for_seals(deadline_s)
        else:
            left = self._num_chunks()
        return encode(node.Kept(self._node_id, place, self._num_chunks() - left, left, problem))

    def _num_chunks(self) -> int:
        with self._keeper.lock:
            return self._keeper.owner.index.num_ready
