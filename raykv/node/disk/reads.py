"""What is on a node's disk, as its threads share it, and the reads from it.

`DISK_READERS` threads read, for this node and for others; who waits for them has a deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field

import msgspec
import numpy as np

from raykv.base.deadlines import DISK_LOOK_S
from raykv.base.errors import ChunkFileError
from raykv.base.ids import ChunkName, Epoch, Refusal
from raykv.base.settings import DiskPlace
from raykv.base.threads import OnFailure, start_thread
from raykv.node.disk.chunk_file import read_chunk
from raykv.node.disk.folder import TierFolder
from raykv.node.disk.index import DiskIndex
from raykv.node.peers import Bytes, PeerError, PeerTransport, PendingRead
from raykv.node.read import ChunkRead, answer
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.node import DiskStats
from raykv.protocol.peer import ReadReply, ReadRequest

logger = logging.getLogger("raykv.disk")

DISK_READERS = 2
MAX_READS = 64
"""Reads that wait for a thread; beyond it they fail at once."""

OPENING = "it is being opened"
"""The problem of a disk tier that has just begun."""

_LISTING = 1


class DiskState:
    """`lock` guards the index and the counters. `folder` comes first, then `is_open`."""

    def __init__(self, place: DiskPlace) -> None:
        self.lock = threading.Lock()
        self.index = DiskIndex(place.most_bytes or 0, _LISTING)
        self.folder: TierFolder | None = None
        self.is_open = False
        self._stats = DiskStats(path=place.path, problem=OPENING)

    @property
    def problem(self) -> str:
        """Why nothing is written; empty if that works."""
        return self._stats.problem

    def has_problem(self, problem: str) -> bool:
        """Note why it does not work, or that it works again; True if that is new."""
        with self.lock:
            is_new = self._stats.problem != problem
            self._stats = msgspec.structs.replace(self._stats, problem=problem)
        return is_new

    def count(self, **more: int) -> None:
        """Add to the counters of `DiskStats`."""
        with self.lock:
            sums = {name: getattr(self._stats, name) + count for name, count in more.items()}
            self._stats = msgspec.structs.replace(self._stats, **sums)

    def stats(self) -> DiskStats:
        """Counters and gauges, but for `room`."""
        with self.lock:
            index = self.index
            return msgspec.structs.replace(
                self._stats,
                most_bytes=index.most_bytes,
                used_bytes=index.used_bytes,
                num_files=index.num_files,
                num_chunks=len(index),
                files_damaged=0 if self.folder is None else self.folder.num_damaged,
                is_full=index.is_full,
                tenant_bytes=index.tenant_bytes,
            )


@dataclass(slots=True)
class _Read:
    request: ReadRequest
    done: threading.Event = field(default_factory=threading.Event)
    answer: tuple[ReadReply, Bytes] | None = None


class DiskReads:
    """Any thread may call."""

    def __init__(self, state: DiskState, epoch: Epoch) -> None:
        self._state = state
        self._epoch = epoch
        self._stopped = threading.Event()
        self._reads: queue.Queue[_Read] = queue.Queue(MAX_READS)

    def start(self) -> None:
        """Begin to read, in threads."""
        for number in range(DISK_READERS):
            name = f"raykv-disk-read-{number}"
            start_thread(name, self._read_for_ever, OnFailure.END_PROCESS)

    def stop(self) -> None:
        """End the threads."""
        self._stopped.set()

    def read(self, request: ReadRequest) -> tuple[ReadReply, Bytes]:
        """Read what is there of what is asked for; in the thread of the caller, unbounded.

        What is damaged is forgotten.
        """
        folder = self._state.folder
        if folder is None or not self._state.is_open:
            refused = [int(Refusal.BAD_HANDLE)] * len(request.handles)
            return ReadReply(self._epoch, refused), np.empty(0, np.uint8)
        reply, data = answer(
            request, self._epoch, lambda name, into: self._read_one(folder, name, into)
        )
        num_chunks = reply.refusals.count(int(Refusal.NONE))
        self._state.count(bytes_read=len(data), chunks_read=num_chunks)
        return reply, data

    def _read_one(self, folder: TierFolder, name: ChunkName, into: Bytes) -> ChunkRead:
        with self._state.lock:
            entry = self._state.index.find(name.namespace, name.key)
        if entry is None or (entry.place, entry.chunk.generation) != (name.slot, name.generation):
            return ChunkRead(Refusal.STALE)
        if entry.chunk.num_bytes != name.slot_bytes:
            return ChunkRead(Refusal.STALE)
        try:
            read_chunk(folder.place_of(entry.file), entry.chunk, into)
        except FileNotFoundError:
            with self._state.lock:
                self._state.index.drop_file(entry.file)
            return ChunkRead(Refusal.STALE)
        except ChunkFileError as error:
            logger.error("a chunk on the disk is not served any more: %s", error)
            with self._state.lock:
                self._state.index.drop(entry, name.namespace)
            self._state.count(chunks_damaged=1)
            return ChunkRead(Refusal.CORRUPT)
        except OSError as error:
            logger.warning("%s can't be read: %s", entry.file, error.strerror)
            return ChunkRead(Refusal.COPY_FAILED)
        with self._state.lock:
            self._state.index.was_read(entry)
        return ChunkRead(Refusal.NONE, entry.chunk.checksum, entry.chunk.blocks)

    def start_read(self, request: ReadRequest) -> PendingRead:
        """Begin a read, in one of the threads.

        Raises:
            PeerError: too many wait already.
        """
        read = _Read(request)
        try:
            self._reads.put_nowait(read)
        except queue.Full:
            raise PeerError("too many reads wait for the disk") from None
        return _PendingDiskRead(read)

    def _read_for_ever(self) -> None:
        while not self._stopped.is_set():
            try:
                read = self._reads.get(timeout=DISK_LOOK_S)
            except queue.Empty:
                continue
            try:
                read.answer = self.read(read.request)
            except Exception:
                logger.exception("a read from the disk failed")
            read.done.set()


class _PendingDiskRead:
    def __init__(self, read: _Read) -> None:
        self._read = read

    def wait(self, timeout_s: float) -> tuple[ReadReply, Bytes]:
        if not self._read.done.wait(max(0.0, timeout_s)):
            raise PeerError("the disk does not answer in time")
        if self._read.answer is None:
            raise PeerError("the disk can't be read")
        return self._read.answer

    def abandon(self) -> None:
        """It is read all the same."""


class TieredTransport:
    """Reads from pools and disks: those of other nodes through `others`, the own disk directly.

    Args:
        node_id: this node's.
        disk: its disk, if it has one.
        others: the way to other nodes.
    """

    def __init__(self, node_id: str, disk: DiskReads | None, others: PeerTransport) -> None:
        self._own = Source(node_id, SourceKind.DISK)
        self._disk = disk
        self._others = others

    def start_read(self, source: Source, request: ReadRequest) -> PendingRead:
        if not source.is_disk:
            return self._others.start_read(source, request)
        request = msgspec.structs.replace(request, from_disk=True)
        if source != self._own:
            return self._others.start_read(source, request)
        if self._disk is None:
            raise PeerError("this node has no disk any more")
        return self._disk.start_read(request)
