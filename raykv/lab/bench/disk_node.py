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
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Refusal,
    Slot,
)
from raykv.base.settings import DiskPlace
from raykv.engine.fetches import fetch_request
from raykv.engine.remote import FetchOrder
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import DiskTier
from raykv.node.fetch import FetchService
from raykv.node.peers import PeerError, PendingRead
from raykv.node.service import NodeService, ServiceSettings, boot_epoch
from raykv.protocol.columns import Handle, Replica, Source, SourceKind
from raykv.protocol.node import Demotions, DiskOrder
from raykv.protocol.peer import ReadRequest

CHUNK_BYTES = 2 << 20
SLAB_BYTES = 64 << 20
NAMESPACE = Namespace("bench")
NODE = "bench"
DEADLINE_S = 120.0
LOOK_S = 0.001


def key_of(number: int) -> Key:
    """A key as long as vLLM's, of KV group 0."""
    return Key(number.to_bytes(32, "big") + bytes(4))


def slot_of(number: int) -> Slot:
    """Where the chunk of that number is."""
    return Slot(number * (CHUNK_BYTES // SLOT_ALIGNMENT))


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
        pool_bytes = -(-num_chunks * CHUNK_BYTES // SLAB_BYTES) * SLAB_BYTES
        geometry = PoolGeometry(pool_bytes, SLAB_BYTES)
        self._service = NodeService(ServiceSettings(socket_name, geometry), boot_epoch())
        self._keeper = self._service.keeper
        place = DiskPlace(folder, most_bytes=8 * pool_bytes, floor_bytes=0)
        epoch = self._service.epoch
        self._tier = DiskTier(place, self._keeper, epoch, is_busy=self._service.is_copying)
        transport = TieredTransport(NODE, self._tier.reads, _Nobody())
        self._fetching = FetchService(self._keeper, epoch, transport)
        self._service.start()
        self._tier.start()
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)
        self._names: list[ChunkName] = []
        self._random = np.random.default_rng(1).integers(0, 256, 2 * CHUNK_BYTES, np.uint8)

    def epoch(self) -> int:
        """Epoch of the pool."""
        return self._service.epoch

    def fill(self) -> tuple[list[bytes], list[int]]:
        """Put new chunks into all slots, with their checksums; their keys and generations."""
        self._names = []
        for number in range(self._num_chunks):
            key, slot = key_of(next(self._numbers)), slot_of(number)
            name = ChunkName(NAMESPACE, key, slot, self._generation(), CHUNK_BYTES)
            if self._keeper.begin_store(name, 0, 1, DEADLINE_S, DEADLINE_S) is not Refusal.NONE:
                raise ClusterError("the pool takes no chunk")
            to = self._keeper.pool.address + slot * SLOT_ALIGNMENT
            start = self._random.ctypes.data + (number * 997) % CHUNK_BYTES
            ctypes.memmove(to, start, CHUNK_BYTES)
            self._keeper.end_store(name, 0, ok=True)
            self._names.append(name)
        self._keeper.wait_for_seals(DEADLINE_S)
        return [name.key for name in self._names], [name.generation for name in self._names]

    def _generation(self) -> Generation:
        return Generation(next(self._generations))

    def write(self) -> float:
        """Seconds until the disk has all chunks that `fill` has made."""
        names = self._names
        demoted = Demotions(
            [str(NAMESPACE)],
            [0] * len(names),
            [name.key for name in names],
            [name.slot for name in names],
            [name.generation for name in names],
        )
        expected = self._tier.stats().chunks_written + len(names)
        began = time.perf_counter()
        self._tier.demote(demoted)
        self._wait(lambda: self._tier.stats().chunks_written >= expected, "the chunks are written")
        return time.perf_counter() - began

    def read(self) -> float:
        """Seconds until all of them are in their slots again."""
        replicas = self._replicas()
        orders = [
            FetchOrder(
                name.key,
                Handle(name.slot, self._generation()),
                CHUNK_BYTES,
                (replicas[name.key],),
            )
            for name in self._names
        ]
        request = fetch_request(NAMESPACE, orders, self._service.epoch, DEADLINE_S)
        began = time.perf_counter()
        result = self._fetching.fetch(request)
        took_s = time.perf_counter() - began
        if any(result.refusals):
            raise ClusterError(f"a fetch from the disk was refused: {set(result.refusals)}")
        return took_s

    def _replicas(self) -> dict[bytes, Replica]:
        """What a directory would learn of the disk."""
        found: dict[bytes, Replica] = {}
        # A directory would know nothing of another listing: report all from the beginning.
        self._tier.take_order(DiskOrder(0, 0))
        while True:
            news = self._tier.news()
            came = news.came
            for key, place, at in zip(came.keys, came.places, came.generations, strict=True):
                handle = Handle(Slot(place), Generation(at))
                found[key] = Replica(Source(NODE, SourceKind.DISK), self._service.epoch, handle)
            if news.is_last:
                return found
            self._tier.take_order(DiskOrder(news.listing, news.upto))

    def open(self) -> None:
        """Wait until the folder is open."""
        self._wait(lambda: not self._tier.stats().problem, "the folder is open")

    def clear(self) -> None:
        """Delete all files."""
        self._tier.clear({NAMESPACE: int(self._names[-1].generation)})
        self._wait(lambda: not self._tier.stats().num_files, "the files are deleted")

    def _wait(self, condition: Any, what: str) -> None:
        give_up_at = time.monotonic() + DEADLINE_S
        while not condition():
            if time.monotonic() > give_up_at:
                problem = self._tier.stats().problem
                raise ClusterError(f"not within {DEADLINE_S:.0f} s: {what} ({problem})")
            threading.Event().wait(LOOK_S)


class _Nobody:
    """The way to other nodes."""

    def start_read(self, source: Source, request: ReadRequest) -> PendingRead:
        raise PeerError(f"there is no node {source.node_id} ({len(request.handles)} chunks)")
