"""A node's pool with a disk tier, without Ray, in a process of its own, for `disk`.

The parent calls by name through a pipe; times are taken here, where the bytes are.
"""

from __future__ import annotations

import ctypes
import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from raykv.base.errors import ClusterError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import ALL_BLOCKS, Key, Namespace, NodeId, Refusal, Stamp
from raykv.base.settings import DiskPlace
from raykv.base.threads import OnFailure, start_thread
from raykv.lab.bench.named_jobs import SPACE, key_of
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import PeerError, PendingRead
from raykv.node.service import NodeService, boot_life
from raykv.protocol.columns import Keys, Numbers, Source, SourceKind
from raykv.protocol.copies import Fetch, Read
from raykv.protocol.engine import EngineHello
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.operator import OrdersDocument

CHUNK_BYTES = 2 << 20
SLAB_BYTES = 64 << 20
NAMESPACE = Namespace(SPACE)
NODE = "bench"
DEADLINE_S = 120.0
LOOK_S = 0.001

ENGINE = 1
"""The life of the engine that loads."""

GREETING_S = 5.0
"""An engine that says nothing is gone after a while."""

ROOM = 1.5
"""Times the chunks: with less free room the disk tier writes without being told."""


class DiskNode:
    """The parent's side: `node.call("write")` is `Served.write` there."""

    def __init__(self, folder: Path, socket_name: str, num_chunks: int) -> None:
        here, there = multiprocessing.get_context("spawn").Pipe()
        self._pipe = here
        self._process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(there, str(folder), socket_name, num_chunks), daemon=True
        )
        self._process.start()
        there.close()

    def call(self, name: str) -> Any:
        """Call and wait; a failure there, or one that takes too long, is a ClusterError."""
        self.begin(name)
        return self.result()

    def begin(self, name: str) -> None:
        """Start a call; `result` waits for it."""
        self._pipe.send(name)

    def has_result(self) -> bool:
        """Whether `result` would not wait."""
        return self._pipe.poll()

    def result(self) -> Any:
        """The result of what was begun."""
        if not self._pipe.poll(2 * DEADLINE_S):
            raise ClusterError("the process with the disk tier does not answer")
        try:
            error, answer = self._pipe.recv()
        except EOFError:
            raise ClusterError("the process with the disk tier has ended") from None
        if error:
            raise ClusterError(error)
        return answer

    def stop(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(DEADLINE_S)
        self._process.kill()


@contextmanager
def disk_node(folder: Path, socket_name: str, num_chunks: int) -> Iterator[DiskNode]:
    """Its process ends with the context."""
    node = DiskNode(folder, socket_name, num_chunks)
    try:
        yield node
    finally:
        node.stop()


def serve(pipe: Connection, folder: str, socket_name: str, num_chunks: int) -> None:
    """The child's side, until the parent closes the pipe."""
    served = Served(folder, socket_name, num_chunks)
    while True:
        try:
            name = pipe.recv()
        except EOFError:
            break
        try:
            answer = "", getattr(served, name)()
        except Exception as error:  # noqa: BLE001 - reported to the parent
            answer = f"{type(error).__name__}: {error}", None
        pipe.send(answer)


class Served:
    """A pool of `num_chunks`, and what the parent may call."""

    def __init__(self, folder: str, socket_name: str, num_chunks: int) -> None:
        self._num_chunks = num_chunks
        pool_bytes = -(-int(ROOM * num_chunks * CHUNK_BYTES) // SLAB_BYTES) * SLAB_BYTES
        geometry = PoolGeometry(pool_bytes, SLAB_BYTES)
        self._keeper = keeper = PoolKeeper(NodeId(NODE), boot_life(), geometry)
        self._service = NodeService(socket_name, keeper)
        place = DiskPlace(folder, most_bytes=8 * pool_bytes, floor_bytes=0)
        self._tier = DiskTier(place, keeper, is_busy=self._service.is_copying)
        keeper.keep_floors = self._tier.keep_floors
        self._fetching = FetchService(keeper, TieredTransport(NODE, self._tier.reads, _Nobody()))
        self._service.start()
        self._tier.start()
        self._numbers = itertools.count(1)
        self._orders = itertools.count(1)
        self._keys: list[Key] = []
        self._random = np.random.default_rng(1).integers(0, 256, 2 * CHUNK_BYTES, np.uint8)
        self._order({})
        start_thread("raykv-bench-greeting", self._greet, OnFailure.END_PROCESS)

    def _greet(self) -> None:
        """Be the engine, for as long as the process lives."""
        hello = EngineHello(
            PROTOCOL_VERSION, "bench", ENGINE, NAMESPACE, slot_bytes={0: CHUNK_BYTES}
        )
        while True:
            with self._keeper.lock:
                self._keeper.owner.hello(hello, self._keeper.now())
            time.sleep(GREETING_S)

    def _order(self, floors: dict[str, int]) -> Stamp:
        """The next orders are in force; the number that they have."""
        self._stamp = Stamp(1, next(self._orders))
        document = OrdersDocument(self._stamp, floors)
        self._wait(lambda: self._keeper.take_orders(document, DEADLINE_S), "the disk keeps orders")
        return self._stamp

    def life(self) -> int:
        """Of the node."""
        return self._keeper.life

    def fill(self) -> list[bytes]:
        """Put new chunks into the pool, with their checksums; their keys."""
        self._keys = [key_of(next(self._numbers)) for _ in range(self._num_chunks)]
        for number, key in enumerate(self._keys):
            record = self._keeper.land(NAMESPACE, key, CHUNK_BYTES, self._stamp, ALL_BLOCKS, "")
            if isinstance(record, Refusal):
                raise ClusterError(f"the pool takes no chunk: {record.name}")
            start = self._random.ctypes.data + (number * 997) % CHUNK_BYTES
            ctypes.memmove(self._keeper.address_of(record), start, CHUNK_BYTES)
            self._keeper.landed(record, ok=True)
        self._keeper.wait_for_seals(DEADLINE_S)
        return list(self._keys)

    def write(self) -> float:
        """Seconds until the disk has all chunks that `fill` has made."""
        began = time.perf_counter()
        left = self._tier.keep(DEADLINE_S)
        took_s = time.perf_counter() - began
        if left:
            raise ClusterError(
                f"{left} chunks were not written ({self._tier.reads.stats().problem})"
            )
        return took_s

    def read(self) -> float:
        """Seconds until all of them are in the pool again, which has none of them before."""
        with self._keeper.lock:
            self._keeper.catalog.drop(NAMESPACE, dict.fromkeys(self._keys, ALL_BLOCKS))
        count = len(self._keys)
        order = Fetch(
            PROTOCOL_VERSION,
            next(self._numbers),
            0,
            NAMESPACE,
            Keys.of(self._keys),
            Numbers.of([CHUNK_BYTES] * count),
            [Source(NODE, SourceKind.DISK)],
            Numbers.of(range(count)),
            Numbers.of([0] * count),
            deadline_s=DEADLINE_S,
        )
        began = time.perf_counter()
        result = self._fetching.fetch(order)
        took_s = time.perf_counter() - began
        if result.refusals:
            raise ClusterError(f"a fetch from the disk was refused: {set(result.refusals)}")
        return took_s

    def open(self) -> None:
        """Wait until the folder is open."""
        self._wait(lambda: not self._tier.reads.stats().problem, "the folder is open")

    def clear(self) -> None:
        """Clear the pool, and delete all files."""
        self._order({str(NAMESPACE): self._stamp.number + 1})
        self._wait(lambda: not self._tier.reads.stats().num_files, "the files are deleted")

    def _wait(self, condition: Any, what: str) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > give_up_at:
                problem = self._tier.reads.stats().problem
                raise ClusterError(f"not within {DEADLINE_S:.0f} s: {what} ({problem})")
            threading.Event().wait(LOOK_S)


class _Nobody:
    """The way to other nodes."""

    def start_read(self, source: Source, request: Read) -> PendingRead:
        raise PeerError(f"there is no node {source.node_id} ({len(request.keys)} chunks)")
