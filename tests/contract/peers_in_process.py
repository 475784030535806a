"""Nodes in one process: real pools, readers and fetchers, over a transport whose sources misbehave.

Each call is encoded and answered in a thread, as it would be between two processes, and the bytes
that arrive can't be written to, like those of Ray's object store.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    Epoch,
    Generation,
    Key,
    Namespace,
    NodeId,
    Refusal,
    Slot,
)
from raykv.engine.fetches import fetch_request
from raykv.engine.remote import FetchOrder
from raykv.engine.requests import Replica
from raykv.node.fetch import FetchService
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import Bytes, PeerError
from raykv.node.read import ReadService
from raykv.node.slots import ChunkName, SlotState
from raykv.protocol.messages import (
    FetchRequest,
    FetchResult,
    Handle,
    ReadReply,
    ReadRequest,
    decode,
    encode,
)

PAGE = SLOT_ALIGNMENT
NAMESPACE = Namespace("model")
LONG_S = 10.0
"""Longer than anything in these tests takes."""
SLACK_S = 2.0
"""For threads that have to wait for a core."""

Answer = tuple[ReadReply, Bytes]


class SourceDiedError(Exception):
    """The call has failed, and its answer is lost."""


def unaltered(reply: ReadReply, data: Bytes) -> Answer:
    return reply, data


def flip_bit(reply: ReadReply, data: Bytes) -> Answer:
    """In the last byte."""
    changed = data.copy()
    changed[-1] ^= 1
    return reply, changed


def truncate(reply: ReadReply, data: Bytes) -> Answer:
    return reply, data[:-1]


def lengthen(reply: ReadReply, data: Bytes) -> Answer:
    return reply, data.repeat(2)


def add_refusal(reply: ReadReply, data: Bytes) -> Answer:
    refusals = [*reply.refusals, int(Refusal.STALE)]
    return msgspec.structs.replace(reply, refusals=refusals), data


def drop_refusals(reply: ReadReply, data: Bytes) -> Answer:
    return msgspec.structs.replace(reply, refusals=[]), data


def drop_checksums(reply: ReadReply, data: Bytes) -> Answer:
    return msgspec.structs.replace(reply, checksums=[]), data


def invent_refusal(reply: ReadReply, data: Bytes) -> Answer:
    """A number that this version knows nothing of."""
    unknown = [99] * len(reply.refusals)
    return msgspec.structs.replace(reply, refusals=unknown, checksums=[]), data[:0]


@dataclass
class Faults:
    """What a source does when it is asked: by default what it should.

    Its answer leaves when `gate` is open and `delay_s` have passed. `dies_after_read`: it copies
    out, then nobody gets the answer.
    """

    is_unreachable: bool = False
    is_silent: bool = False
    dies_after_read: bool = False
    delay_s: float = 0.0
    gate: threading.Event | None = None
    alter: Callable[[ReadReply, Bytes], Answer] = unaltered


class Network:
    """The `PeerTransport` of all its nodes; counts what goes through it."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.reads: list[tuple[str, ReadRequest]] = []
        self.read_at: list[float] = []
        self.most_under_way = 0
        self._num_under_way = 0
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._gates_open = threading.Event()
        self._threads = ThreadPoolExecutor(64)
        self._calls: list[Future[tuple[bytes, Bytes]]] = []

    def node(self, node_id: str, *, slab_bytes: int = 1 << 20, epoch: int = 7) -> Node:
        """A new node; `slab_bytes` is how many of one slot size lie together, eight times."""
        made = Node(self, node_id, Epoch(epoch), PoolGeometry(8 * slab_bytes, slab_bytes))
        self.nodes[node_id] = made
        return made

    def begin(self, call: Callable[[], FetchResult]) -> Future[FetchResult]:
        """Call in another thread."""
        return self._threads.submit(call)

    def num_reads(self, node: Node) -> int:
        """How often a node was asked so far, answer or not."""
        with self._lock:
            return sum(node_id == node.node_id for node_id, _ in self.reads)

    def start_read(self, node_id: str, request: ReadRequest) -> PendingCall:
        """See `PeerTransport.start_read`."""
        node = self.nodes[node_id]
        with self._lock:
            self.reads.append((node_id, request))
            self.read_at.append(time.monotonic())
        if node.faults.is_unreachable:
            raise PeerError(f"node {node_id}: there is none")
        call: Future[tuple[bytes, Bytes]] = Future()
        if not node.faults.is_silent:
            call = self._threads.submit(self._answer, node, node.faults, encode(request))
        with self._lock:
            self._calls.append(call)
        self.count_under_way(1)
        return PendingCall(self, node_id, call)

    def count_under_way(self, change: int) -> None:
        with self._lock:
            self._num_under_way += change
            self.most_under_way = max(self.most_under_way, self._num_under_way)

    def _answer(self, node: Node, faults: Faults, raw: bytes) -> tuple[bytes, Bytes]:
        """In a thread of the source."""
        reply, data = node.reader.read(decode(raw, ReadRequest))
        while faults.gate is not None and not faults.gate.wait(0.01):
            if self._gates_open.is_set():
                break
        self._closing.wait(faults.delay_s)
        if faults.dies_after_read:
            raise SourceDiedError
        reply, data = faults.alter(reply, data)
        data.flags.writeable = False
        return encode(reply), data

    def open_gates(self) -> None:
        """Those of all nodes, for good."""
        self._gates_open.set()

    def settle(self) -> None:
        """Wait until every answer has left its source, wanted or not."""
        for call in self._calls:
            if call.running() or call.done():
                call.exception(LONG_S)

    def close(self) -> None:
        """End all threads, then check what must hold when nothing is under way."""
        self._closing.set()
        self.open_gates()
        self._threads.shutdown()
        for node in self.nodes.values():
            node.close()


class PendingCall:
    """A read of `Network`."""

    def __init__(self, network: Network, node_id: str, call: Future[tuple[bytes, Bytes]]) -> None:
        self._network = network
        self._node_id = node_id
        self._call = call

    def wait(self, timeout_s: float) -> Answer:
        """See `PendingRead.wait`."""
        try:
            raw, data = self._call.result(max(0.0, timeout_s))
            return decode(raw, ReadReply), data
        except (TimeoutError, SourceDiedError) as error:
            raise PeerError(f"node {self._node_id}: {type(error).__name__}") from error
        finally:
            self._network.count_under_way(-1)


@dataclass
class Node:
    """A NodeActor without Ray, and something that grants leases."""

    network: Network
    node_id: str
    epoch: Epoch
    geometry: PoolGeometry
    faults: Faults = field(default_factory=Faults)
    num_told: int = 0

    def __post_init__(self) -> None:
        self.keeper = PoolKeeper(self.geometry, "")
        self.reader = ReadService(self.keeper, self.epoch)
        self.fetcher = FetchService(self.keeper, self.epoch, self.network, self._tell)
        self._generations = itertools.count(1)
        self._slabs = itertools.count()
        self._free: dict[int, list[Slot]] = {}

    def _tell(self) -> None:
        self.num_told += 1

    def close(self) -> None:
        assert self.reader.reading == 0, self.node_id
        self.keeper.table.check()
        self.keeper.pool._region.close()

    # As the scheduler actor and the engines of the node would do it

    def generation(self) -> Generation:
        """Higher than all before."""
        return Generation(next(self._generations))

    def lease(self, num_bytes: int = PAGE, slot: Slot | None = None) -> Handle:
        """A slot that was never granted before, if none is named."""
        if slot is None:
            free = self._free.setdefault(num_bytes, [])
            if not free:
                free += self.geometry.slots_of(next(self._slabs), num_bytes)
            slot = free.pop(0)
        return Handle(slot, self.generation())

    def store(
        self,
        key: Key,
        num_bytes: int = PAGE,
        *,
        at: Handle | None = None,
        namespace: Namespace = NAMESPACE,
        wait_s: float = 0.0,
    ) -> ChunkName:
        """Store the chunk's `content`."""
        at = at or self.lease(num_bytes)
        name = ChunkName(namespace, key, at.slot, at.generation, num_bytes)
        refusal = self.keeper.begin_store(name, 0, 1, wait_s, LONG_S)
        assert refusal is Refusal.NONE, (name, refusal)
        ctypes.memmove(self.keeper.pool.address + name.slot * PAGE, content(name), num_bytes)
        self.keeper.end_store(name, 0, ok=True)
        return name

    def load(self, name: ChunkName) -> bytes | Refusal:
        """The bytes of a READY chunk, else why there are none."""
        refusal = self.keeper.begin_load(name)
        if refusal is not Refusal.NONE:
            return refusal
        try:
            return ctypes.string_at(self.keeper.pool.address + name.slot * PAGE, name.slot_bytes)
        finally:
            self.keeper.end_load(name)

    def ready(self) -> set[ChunkName]:
        """Every READY chunk."""
        with self.keeper.lock:
            return set(self.keeper.table.inventory())

    def replica(self, name: ChunkName) -> Replica:
        return Replica(NodeId(self.node_id), self.epoch, Handle(name.slot, name.generation))

    # Fetches to here

    def order(
        self,
        key: Key,
        *replicas: Replica,
        num_bytes: int = PAGE,
        at: Handle | None = None,
    ) -> FetchOrder:
        """Into a new lease, if none is named."""
        return FetchOrder(key, at or self.lease(num_bytes), num_bytes, replicas)

    def order_of(self, *held: tuple[Node, ChunkName]) -> FetchOrder:
        """Of a chunk that several nodes have, the first one to be asked first."""
        replicas = [node.replica(name) for node, name in held]
        return self.order(held[0][1].key, *replicas, num_bytes=held[0][1].slot_bytes)

    def orders(self, *held: tuple[Node, ChunkName]) -> list[FetchOrder]:
        """Of chunks of which one replica each is known."""
        return [self.order_of(each) for each in held]

    def request(self, orders: list[FetchOrder], deadline_s: float = LONG_S) -> FetchRequest:
        return fetch_request(NAMESPACE, orders, self.epoch, deadline_s)

    def fetch(self, orders: list[FetchOrder], deadline_s: float = LONG_S) -> FetchResult:
        return self.fetcher.fetch(self.request(orders, deadline_s))

    def begin_fetch(
        self, orders: list[FetchOrder], deadline_s: float = LONG_S
    ) -> Future[FetchResult]:
        """In another thread."""
        return self.network.begin(lambda: self.fetch(orders, deadline_s))


def key(number: int) -> Key:
    """As long as vLLM's, of KV group 0."""
    return Key(number.to_bytes(32, "big") + bytes(4))


def landed(order: FetchOrder) -> ChunkName:
    """What a fetch of `order` stores."""
    return ChunkName(
        NAMESPACE, order.key, order.handle.slot, order.handle.generation, order.num_bytes
    )


def content(name: ChunkName) -> bytes:
    """The bytes of a chunk: as with KV, whoever computes them gets the same."""
    seed = zlib.crc32(name.namespace.encode() + name.key)
    return np.random.default_rng(seed).bytes(name.slot_bytes)


def refusals(result: FetchResult) -> list[Refusal]:
    return [Refusal(number) for number in result.refusals]


def assert_right(here: Node, orders: list[FetchOrder]) -> None:
    for order in orders:
        assert here.load(landed(order)) == content(landed(order))


def assert_nothing_there(here: Node, order: FetchOrder) -> None:
    """Nothing is READY, and the next store goes ahead at once, without waiting for a writer."""
    assert here.ready() == set()
    assert here.keeper.table.state_of(order.handle.slot) is SlotState.EMPTY
    later = here.store(key(77), order.num_bytes, at=here.lease(slot=order.handle.slot))
    assert here.load(later) == content(later)


@contextmanager
def within(least_s: float, most_s: float) -> Iterator[None]:
    """What is done inside takes so long."""
    started = time.monotonic()
    yield
    assert least_s <= time.monotonic() - started < most_s + SLACK_S


# What can happen to a chunk at its source: each returns the name that it is asked for afterwards


def overwritten(source: Node, name: ChunkName) -> ChunkName:
    source.store(key(99), at=source.lease(slot=name.slot))
    return name


def stored_anew(source: Node, name: ChunkName) -> ChunkName:
    """The same bytes, but the handle is an old one."""
    source.store(name.key, at=source.lease(slot=name.slot))
    return name


def being_overwritten(source: Node, name: ChunkName) -> ChunkName:
    lease = source.lease(slot=name.slot)
    begin_write(source, ChunkName(NAMESPACE, key(99), lease.slot, lease.generation, PAGE))
    return name


def being_stored(source: Node, name: ChunkName) -> ChunkName:
    lease = source.lease(slot=name.slot)
    later = replace(name, generation=lease.generation)
    begin_write(source, later)
    return later


def given_up(source: Node, name: ChunkName) -> ChunkName:
    later = being_stored(source, name)
    source.keeper.end_store(later, 0, ok=False)
    return later


def begin_write(source: Node, name: ChunkName) -> None:
    assert source.keeper.begin_store(name, 0, 1, 0.0, LONG_S) is Refusal.NONE


def cleared(source: Node, name: ChunkName) -> ChunkName:
    source.keeper.clear({NAMESPACE: name.generation})
    return name


def of_other_namespace(source: Node, _: ChunkName) -> ChunkName:
    return source.store(key(5), namespace=Namespace("other"))
