"""What is on a node's disk, as its threads share it, and the reads from it.

`DISK_READERS` threads read, for this node and for others; who waits for them has a deadline.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from concurrent.futures import Future

import msgspec

from raykv.base import deadlines, errors, settings, threads
from raykv.base.ids import Key, Namespace, Refusal
from raykv.node.disk.chunk_file import read_chunk
from raykv.node.disk.folder import TierFolder
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import Bytes, PeerError, PeerTransport, PendingRead
from raykv.node.read import ChunkRead, answer
from raykv.protocol import columns, copies, node

logger = logging.getLogger("raykv.disk")

DISK_READERS = 2
MAX_READS = 64
"""Reads that wait for a thread; beyond it they fail at once."""

_Answer = Future[tuple[copies.ReadReply, Bytes]]

OPENING = "it is being opened"
"""The problem of a disk tier that has just begun."""


class DiskReads:
    """Any thread may call. `lock`, that of the pool, guards the shelf and the counters. Nothing is
    read before there is a `folder`.
    """

    def __init__(self, place: settings.DiskPlace, keeper: PoolKeeper) -> None:
        self.lock = keeper.lock
        self._listing = keeper.owner.index.listing
        self._shelf = keeper.owner.index.shelf
        self._shelf.most_bytes = place.most_bytes or 0
        self.folder: TierFolder | None = None
        self.problem = OPENING
        """Why nothing is written; empty if that works."""
        self._path = place.path
        # Of `DiskStats`.
        self._counters: Counter[str] = Counter()
        self._stopped = threading.Event()
        self._reads: queue.Queue[tuple[copies.Read, _Answer]] = queue.Queue(MAX_READS)

    def has_problem(self, problem: str) -> bool:
        """Note why it does not work, or that it works again; True if that is new."""
        with self.lock:
            is_new, self.problem = self.problem != problem, problem
            self.lock.notify_all()
        return is_new

    def count(self, **more: int) -> None:
        """Add to the counters of `DiskStats`."""
        with self.lock:
            self._counters.update(more)

    def stats(self) -> node.DiskStats:
        """Counters and gauges."""
        with self.lock:
            shelf = self._shelf
            return node.DiskStats(
                path=self._path,
                problem=self.problem,
                most_bytes=shelf.most_bytes,
                used_bytes=shelf.used_bytes,
                num_files=shelf.num_files,
                num_chunks=len(shelf),
                files_damaged=0 if self.folder is None else self.folder.num_damaged,
                is_full=shelf.is_full,
                tenant_bytes=shelf.tenant_bytes,
                **self._counters,
            )

    def start(self) -> None:
        """Begin to read, in threads."""
        for number in range(DISK_READERS):
            name = f"raykv-disk-read-{number}"
            threads.start_thread(name, self._read_for_ever, threads.OnFailure.END_PROCESS)

    def stop(self) -> None:
        """End the threads."""
        self._stopped.set()

    def read(self, request: copies.Read) -> tuple[copies.ReadReply, Bytes]:
        """Read what is there of what is asked for; in the thread of the caller, unbounded.

        What is damaged is forgotten.
        """
        with self.lock:
            life, number = self._listing.life, self._listing.number
        namespace = Namespace(request.namespace)
        reply, data = answer(
            request, lambda key, into: self._read_one(namespace, key, into), life, number
        )
        num_chunks = reply.refusals.count(Refusal.NONE)
        self.count(bytes_read=len(data), chunks_read=num_chunks)
        return reply, data

    def _read_one(self, namespace: Namespace, key: Key, into: Bytes) -> ChunkRead:
        folder, lock, shelf = self.folder, self.lock, self._shelf
        with lock:
            kept = shelf.find(namespace, key)
            if folder is None or kept is None:
                return ChunkRead(Refusal.NOT_HERE)
            chunk, file = kept.chunk, kept.file.name
        if chunk.num_bytes != len(into):
            return ChunkRead(Refusal.BAD_HANDLE)
        try:
            read_chunk(folder.path / file, chunk, into)
        except FileNotFoundError:
            with lock:
                shelf.drop_file(file)
                lock.notify_all()
            return ChunkRead(Refusal.NOT_HERE)
        except errors.ChunkFileError as error:
            logger.error("a chunk on the disk is not served any more: %s", error)
            with lock:
                shelf.damaged(namespace, chunk)
                lock.notify_all()
            self.count(chunks_damaged=1)
            return ChunkRead(Refusal.CORRUPT)
        except OSError as error:
            logger.warning("%s can't be read: %s", file, error.strerror)
            return ChunkRead(Refusal.COPY_FAILED)
        with lock:
            shelf.was_read(file)
        return ChunkRead(Refusal.NONE, chunk.stamp, chunk.checksum, chunk.blocks)

    def start_read(self, request: copies.Read) -> PendingRead:
        """Begin a read, in one of the threads.

        Raises:
            PeerError: too many wait already.
        """
        future = _Answer()
        try:
            self._reads.put_nowait((request, future))
        except queue.Full:
            raise PeerError("too many reads wait for the disk") from None
        return _PendingDiskRead(future)

    def _read_for_ever(self) -> None:
        while not self._stopped.is_set():
            try:
                request, future = self._reads.get(timeout=deadlines.WAKE_S)
            except queue.Empty:
                continue
            try:
                future.set_result(self.read(request))
            except Exception as error:
                logger.exception("a read from the disk failed")
                future.set_exception(error)


class _PendingDiskRead:
    def __init__(self, future: _Answer) -> None:
        self._future = future

    def wait(self, timeout_s: float) -> tuple[copies.ReadReply, Bytes]:
        try:
            return self._future.result(max(0.0, timeout_s))
        except TimeoutError:
            raise PeerError("the disk does not answer in time") from None
        except Exception as error:
            raise PeerError("the disk can't be read") from error

    def abandon(self) -> None:
        """It is read all the same."""


class TieredTransport:
    """Reads from pools and disks: those of other nodes through `others`, the own disk directly.

    Args:
        node_id: this node's.
        disk: its disk, if it has one.
        others: the way to other nodes, until `use` says another one.
    """

    def __init__(self, node_id: str, disk: DiskReads | None, others: PeerTransport) -> None:
        self._own = columns.Source(node_id, columns.SourceKind.DISK)
        self._disk = disk
        self._others = others

    def use(self, others: PeerTransport) -> None:
        """Begin reads from other nodes in that way from now on."""
        self._others = others

    def start_read(self, source: columns.Source, request: copies.Read) -> PendingRead:
        if not source.is_disk:
            return self._others.start_read(source, request)
        request = msgspec.structs.replace(request, from_disk=True)
        if source != self._own:
            return self._others.start_read(source, request)
        if self._disk is None:
            raise PeerError("this node has no disk any more")
        return self._disk.start_read(request)
