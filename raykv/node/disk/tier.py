"""A node's disk tier: what its pool gives up is written to files, and comes back when it is wanted.

    demote ──► queue ──► copied out of its slot, checked ──► a file is full, or old enough
                            │ the slot has moved on                │
                            └──► (lost; it is computed again)      ▼
                                          copies go first ──► written, listed, reported

One thread opens the folder, writes files and deletes them; reads are in `reads.py`. All take
the state's lock for the index, never while they touch the disk. The writer holds a slot only while
it copies its bytes to memory of its own, so that a slow disk delays no store.

Nothing here raises into the NodeActor: a disk that can't be used is a problem in its statistics.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from raykv.base.clearings import Clearings
from raykv.base.deadlines import (
    DISK_BATCH_S,
    DISK_GIVE_WAY_LOOK_S,
    DISK_GIVE_WAY_S,
    DISK_LOOK_S,
    DISK_RETRY_S,
)
from raykv.base.errors import DiskError
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    ChunkName,
    Epoch,
    Generation,
    Namespace,
    Refusal,
    Slot,
)
from raykv.base.settings import DiskPlace
from raykv.base.shares import Share
from raykv.base.threads import OnFailure, start_thread
from raykv.memory.region import yield_to_others
from raykv.node.disk.chunk_file import ChunkBytes, ChunkFile, read_header, write_chunks
from raykv.node.disk.folder import TierFolder
from raykv.node.disk.reads import OPENING, DiskReads, DiskState
from raykv.node.keeper import PoolKeeper
from raykv.protocol.node import Demotions, DiskNews, DiskOrder, DiskStats

logger = logging.getLogger("raykv.disk")

FILE_BYTES = 32 << 20
"""Bytes of chunks in one file; a larger chunk has a file of its own."""

HEADER_BYTES = 512
"""Bytes of a file's header, and of each chunk's in it, at most."""

TENANT = "tenant"
"""What a file's header calls the label of whose chunks are in it."""

MAX_QUEUED = 2048
"""Chunks that wait to be copied out of the pool; beyond it the directory offers none."""


@dataclass(slots=True)
class _Batch:
    """Chunks of a namespace and a tenant that are copied and wait for their file."""

    began_at: float
    chunks: list[ChunkBytes] = field(default_factory=list)
    num_bytes: int = 0


class DiskTier:
    """See the module's docstring. Any thread may call.

    Args:
        place: folder and limits.
        keeper: of the node's pool.
        epoch: of this NodeActor.
        on_news: called when there is something to report.
        is_busy: whether copies wait or run, which go first.
    """

    def __init__(
        self,
        place: DiskPlace,
        keeper: PoolKeeper,
        epoch: Epoch,
        on_news: Callable[[], None] = lambda: None,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._place = place
        self._keeper = keeper
        self._epoch = epoch
        self._on_news = on_news
        self._is_busy = is_busy
        self._state = state = DiskState(place)
        self.reads = DiskReads(state, epoch)
        self._lock, self._index = state.lock, state.index
        # Each with the label of its tenant, if that has a share.
        self._queue: deque[tuple[ChunkName, str]] = deque()
        # Of all that was ever queued, and how many of these left the queue, copied or lost.
        self._num_queued = self._num_left = 0
        # The writer's own.
        self._batches: dict[tuple[Namespace, str], _Batch] = {}
        # How often `keep` has asked that all that is queued be written, and for how many of these
        # it was tried.
        self._flushed = threading.Condition(self._lock)
        self._num_asked = self._num_flushed = 0
        self._clearings = Clearings()
        # Clearings that the writer has not begun to note on the disk, or that are not on it yet.
        self._has_clearings = False
        self._is_noting = False
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Open the folder and serve, in threads."""
        self.reads.start()
        start_thread("raykv-disk", self._run, OnFailure.END_PROCESS)

    def stop(self) -> None:
        """End the threads; what is not written is lost."""
        self.reads.stop()
        self._stopped.set()
        self._wake.set()

    # Exchange with the directory

    def news(self) -> DiskNews:
        """News for the next report."""
        with self._lock:
            return self._index.news() if self._state.is_open else DiskNews()

    def take_order(self, order: DiskOrder) -> None:
        """The directory's answer to a report."""
        with self._lock:
            if self._state.is_open:
                self._index.heard(order.listing, order.heard)
            shares = {tenant: Share(*bounds) for tenant, bounds in order.shares.items()}
            self._index.shares = shares
        if len(order.demoted):
            self.demote(order.demoted)

    def demote(self, demoted: Demotions) -> bool:
        """Have chunks written that the pool gives up, as long as their bytes are there; False if
        too many wait already, so that some of these are lost.
        """
        num_lost = 0
        columns = zip(
            demoted.namespace_index,
            demoted.keys,
            demoted.slots,
            demoted.generations,
            demoted.of_tenants,
            strict=True,
        )
        for index, key, slot, generation, tenant in columns:
            name = self._keeper.ready_at(Slot(slot), Generation(generation))
            is_same = name is not None and name.key == key
            if name is not None and is_same and name.namespace == demoted.namespaces[index]:
                with self._lock:
                    if len(self._queue) < MAX_QUEUED:
                        self._queue.append((name, tenant))
                        self._num_queued += 1
                    else:
                        num_lost += 1
        self._wake.set()
        return not num_lost

    def demote_now(self, demoted: Demotions, deadline_s: float) -> bool:
        """`demote`, and wait until the chunks are copied; False if the time has passed, if some
        were lost, or if nothing can be written now.
        """
        has_room = self.demote(demoted)
        give_up_at = time.monotonic() + deadline_s
        with self._lock:
            wanted = self._num_queued
        while self._num_left < wanted and time.monotonic() < give_up_at:
            self._stopped.wait(DISK_GIVE_WAY_LOOK_S)
        return has_room and self._num_left >= wanted and not self._state.problem

    def clear(self, cleared: Mapping[str, int]) -> None:
        """Chunks of namespaces up to some generations are worth nothing."""
        with self._lock:
            if not self._clearings.take(cleared):
                return
            self._has_clearings = True
            # At once: nothing of it is found any more. The files go later.
            self._index.clear(self._clearings)
        self._wake.set()

    def wait_for_clearings(self, deadline_s: float) -> bool:
        """Wait until all clearings are noted on the disk; False if the time has passed."""
        give_up_at = time.monotonic() + deadline_s
        while not self._is_noted and time.monotonic() < give_up_at:
            self._wake.set()
            self._stopped.wait(DISK_GIVE_WAY_LOOK_S)
        return self._is_noted

    def cleared(self) -> dict[str, int]:
        """The generation up to which each namespace was cleared, in earlier lives too."""
        with self._lock:
            return self._clearings.told

    @property
    def highest_generation(self) -> Generation:
        """The highest one that was ever listed: later ones must be above."""
        with self._lock:
            return self._index.highest_generation

    def stats(self) -> DiskStats:
        """Counters and gauges."""
        return msgspec.structs.replace(
            self._state.stats(), room=max(0, MAX_QUEUED - len(self._queue))
        )

    # Everything at once

    def keep(self, deadline_s: float) -> int:
        """Write all READY chunks that are not on the disk; returns how many of them are not there
        when all has been tried, or the deadline has passed.
        """
        give_up_at = time.monotonic() + deadline_s
        while self._state.problem == OPENING and time.monotonic() < give_up_at:
            self._stopped.wait(DISK_GIVE_WAY_LOOK_S)
        waiting = deque(sorted(self._keeper.all_held(), key=lambda name: name.generation))
        while waiting and time.monotonic() < give_up_at and self._state.is_open:
            with self._lock:
                while waiting and len(self._queue) < MAX_QUEUED:
                    self._queue.append((waiting.popleft(), ""))
                    self._num_queued += 1
            self._wait_for_retry(give_up_at)
            self._flush_now(give_up_at)
        held = self._keeper.all_held()
        with self._lock:
            return sum(self._index.find(name.namespace, name.key) is None for name in held)

    def _flush_now(self, give_up_at: float) -> None:
        """Wait until all that is queued now was tried."""
        with self._flushed:
            self._num_asked += 1
            wanted = self._num_asked
            while self._num_flushed < wanted and time.monotonic() < give_up_at:
                self._wake.set()
                self._flushed.wait(min(DISK_LOOK_S, max(0.0, give_up_at - time.monotonic())))

    def _wait_for_retry(self, give_up_at: float) -> None:
        """Wait after a failed write until one may be tried; what is queued then is lost."""
        give_up_at = min(give_up_at, self._retry_at + DISK_LOOK_S)
        while self._state.problem and time.monotonic() < give_up_at:
            self._stopped.wait(DISK_GIVE_WAY_LOOK_S)

    # The writer's thread

    def _run(self) -> None:
        yield_to_others()
        while not self._stopped.is_set():
            try:
                self._round()
            except (OSError, DiskError) as error:
                self._failed(error)
            except Exception as error:
                logger.exception("the disk tier failed")
                self._failed(error)

    def _round(self) -> None:
        asked = self._num_asked
        if self._retry_at > time.monotonic():
            # Nothing waits for a disk that can't be written.
            self._batches.clear()
            with self._lock:
                self._num_left += len(self._queue)
                self._queue.clear()
            self._end_flush(asked)
            if self._state.is_open and self._has_clearings:
                with suppress(OSError):
                    self._carry_out_clearings()
            self._wake.wait(min(DISK_LOOK_S, max(0.0, self._retry_at - time.monotonic())))
            self._wake.clear()
            return
        if not self._state.is_open:
            self._open()
        self._carry_out_clearings()
        if self._state.problem:
            self._works_again()
        if not self._copy_out(is_flush=asked > self._num_flushed):
            self._end_flush(asked)
            wait_s = DISK_BATCH_S if self._batches else DISK_LOOK_S
            self._wake.wait(wait_s)
            self._wake.clear()

    def _end_flush(self, asked: int) -> None:
        with self._flushed:
            self._num_flushed = max(self._num_flushed, asked)
            self._flushed.notify_all()

    def _failed(self, error: BaseException) -> None:
        reason = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
        self._retry_at = time.monotonic() + DISK_RETRY_S
        self._state.count(writes_failed=1)
        if self._state.has_problem(reason):
            logger.warning("nothing is written to disk_path=%r now: %s", self._place.path, reason)
        self._on_news()

    def _works_again(self) -> None:
        assert self._state.folder is not None
        self._check_floor(self._state.folder, 0)
        self._state.has_problem("")
        self._on_news()

    def _open(self) -> None:
        """Claim a folder and list what is in it."""
        if self._state.folder is None:
            self._state.folder = TierFolder(Path(self._place.path))
        folder = self._state.folder
        cleared = folder.read_cleared()
        with self._lock:
            # Before the files are looked at, which takes a while: others should learn of it first.
            self._clearings.take(cleared)
        found = folder.scan()
        if self._place.most_bytes is None:
            used = sum(file.num_bytes for file in found)
            self._index.most_bytes = (used + folder.room().free_bytes) // 2
        for file in found:
            self._add(file)
        with self._lock:
            gone = [*self._index.give_way(0), *self._index.take_empty()]
            self._state.is_open = True
        for name in gone:
            folder.delete(name)
        logger.info("%s has %d chunks in %d files", folder.path, len(self._index), len(found))

    def _carry_out_clearings(self) -> None:
        """Note on the disk what was cleared, then delete files in which no chunk is left."""
        assert self._state.folder is not None
        with self._lock:
            self._is_noting, self._has_clearings = self._has_clearings, False
        if self._is_noting:
            try:
                self._state.folder.write_cleared(self.cleared())
            except OSError:
                with self._lock:
                    self._has_clearings, self._is_noting = True, False
                # That makes room, if there was no room.
                self._delete_empty(self._state.folder)
                raise
            self._is_noting = False
        self._delete_empty(self._state.folder)

    @property
    def _is_noted(self) -> bool:
        with self._lock:
            return self._state.is_open and not self._has_clearings and not self._is_noting

    def _delete_empty(self, folder: TierFolder) -> None:
        with self._lock:
            empty = self._index.take_empty()
        for name in empty:
            folder.delete(name)

    def _copy_out(self, is_flush: bool) -> bool:
        """Copy one queued chunk, and write the files that are due; False: nothing was queued."""
        with self._lock:
            first = self._queue.popleft() if self._queue else None
        if first is not None:
            try:
                self._copy(*first)
            finally:
                self._num_left += 1
        now = time.monotonic()
        for whose, batch in list(self._batches.items()):
            is_old = now - batch.began_at >= DISK_BATCH_S or (is_flush and first is None)
            if is_old or batch.num_bytes >= FILE_BYTES:
                del self._batches[whose]
                self._write(*whose, batch)
        return first is not None

    def _copy(self, name: ChunkName, tenant: str) -> None:
        """Copy a chunk out of its slot, if it is still there and the disk has no such blocks."""
        with self._lock:
            known = self._index.find(name.namespace, name.key)
        if self._keeper.begin_load(name) is not Refusal.NONE:
            return
        try:
            blocks = self._keeper.blocks_of(name)
            same = known is not None and known.chunk.num_bytes == name.slot_bytes
            if same and known is not None and known.chunk.blocks.has(blocks):
                return
            data = np.empty(name.slot_bytes, np.uint8)
            place = self._keeper.pool.address + name.slot * SLOT_ALIGNMENT
            ctypes.memmove(data.ctypes.data, place, name.slot_bytes)
        finally:
            self._keeper.end_load(name)
        checksum = xxhash.xxh3_64_intdigest(data.data)
        # Whether the slot has moved on since does not matter to the copy.
        if self._keeper.settle(name, checksum) is Refusal.CORRUPT:
            return
        whose = name.namespace, tenant
        batch = self._batches.setdefault(whose, _Batch(time.monotonic()))
        if all(each.key != name.key for each in batch.chunks):
            batch.chunks.append(ChunkBytes(name.key, name.generation, checksum, data, blocks))
            batch.num_bytes += name.slot_bytes

    def _write(self, namespace: Namespace, tenant: str, batch: _Batch) -> None:
        """Write a tenant's file, after the copies that wait, and list it."""
        assert self._state.folder is not None
        num_bytes = batch.num_bytes + HEADER_BYTES * (1 + len(batch.chunks))
        give_way_until = time.monotonic() + DISK_GIVE_WAY_S
        while self._is_busy() and time.monotonic() < give_way_until:
            self._stopped.wait(DISK_GIVE_WAY_LOOK_S)
        with self._lock:
            if not self._index.can_hold(num_bytes, tenant):
                return
            gone = self._index.give_way(num_bytes, tenant)
        for name in gone:
            self._state.folder.delete(name)
        self._state.count(files_evicted=len(gone))
        self._check_floor(self._state.folder, num_bytes)
        path = self._state.folder.new_path()
        write_chunks(path, namespace, batch.chunks, {TENANT: tenant} if tenant else None)
        self._list(path)
        self._state.count(bytes_written=batch.num_bytes, chunks_written=len(batch.chunks))

    def _list(self, path: Path) -> None:
        """A file is there: its chunks can be found from now on."""
        assert self._state.folder is not None
        self._add(read_header(path))
        self._delete_empty(self._state.folder)
        self._on_news()

    def _add(self, file: ChunkFile) -> None:
        """List a file, but for what was cleared."""
        with self._lock:
            covers = self._clearings.cover
            chunks = [c for c in file.chunks if not covers(file.namespace, c.generation)]
            tenant = file.facts.get(TENANT, "")
            self._index.add(file.path.name, file.num_bytes, file.namespace, chunks, tenant)

    def _check_floor(self, folder: TierFolder, num_bytes: int) -> None:
        """Raise a DiskError if less than the floor would stay free."""
        free_bytes = folder.room().free_bytes
        if free_bytes - num_bytes < self._place.floor_bytes:
            raise DiskError(
                f"the file system of {self._place.path} has {free_bytes} bytes free, and "
                f"disk_free_bytes={self._place.floor_bytes} must stay free"
            )
