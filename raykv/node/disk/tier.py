"""A node's disk tier: what its pool gives up next is written to files, and comes back when wanted.

    shelf ──► copied out of its slot, checked ──► a file is full, or old enough
                │ the bytes have changed                │
                └──► (lost)                             ▼
                                     copies go first ──► written, listed

One thread opens the folder, writes files and deletes them; reads are in `reads.py`. All take the
pool's lock for the shelf, never while they touch the disk. The writer holds a slot only while it
copies its bytes to memory of its own, so that a slow disk delays no store.

What is found in the folder is served once the node has a document of orders, which says what of it
is void; until then it is left alone.

Nothing here raises into the NodeActor: a disk that can't be used is a problem in its statistics.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from raykv.base import deadlines, errors, settings, threads
from raykv.base.ids import Key, Namespace, Refusal
from raykv.memory.region import yield_to_others
from raykv.node.disk import chunk_file, reads
from raykv.node.disk.folder import TierFolder
from raykv.node.keeper import PoolKeeper
from raykv.node.pool.records import ChunkRecord
from raykv.node.pool.shelf import DiskChunk
from raykv.protocol import engine, listing

logger = logging.getLogger("raykv.disk")

# How long chunks wait for others to share a file with: fewer and larger files.
DISK_BATCH_S = 0.5

# How long a file waits for copies to end before it is written anyway.
DISK_GIVE_WAY_S = 1.0

# After a failed write, or while there is no room, before the next attempt.
DISK_RETRY_S = 15.0

# Between two looks for chunks that go next, each of which walks over some thousands of them.
DISK_NEXT_LOOK_S = 0.05


FILE_BYTES = 32 << 20
"""Bytes of chunks in one file; a larger chunk has a file of its own."""

HEADER_BYTES = 512
"""Bytes of a file's header, and of each chunk's in it, at most."""

TENANT = "tenant"
"""What a file's header calls the label of whose chunks are in it."""

COPIED = 256
"""Chunks that have readers at a time, until they are copied, if they are small."""


@dataclass(slots=True)
class _Batch:
    """Chunks of a namespace and a tenant that are copied and wait for their file."""

    began_at: float
    chunks: dict[ChunkRecord, chunk_file.ChunkBytes] = field(default_factory=dict)
    keys: set[Key] = field(default_factory=set)
    num_bytes: int = 0


class DiskTier:
    """See the module's docstring. Any thread may call.

    Args:
        place: folder and limits.
        keeper: of the node's pool.
        is_busy: whether copies wait or run, which go first.
    """

    def __init__(
        self,
        place: settings.DiskPlace,
        keeper: PoolKeeper,
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._place = place
        self._keeper = keeper
        self._owner, self._shelf = keeper.owner, keeper.owner.index.shelf
        self._is_busy = is_busy
        self.reads = reads.DiskReads(place, keeper)
        self._lock = keeper.lock
        # The writer's own. Whether the folder's files are listed.
        self._is_open = False
        self._batches: dict[tuple[Namespace, str], _Batch] = {}
        # What was cleared, as it is on the disk, and as it was when the shelf was last looked over.
        self._noted: Mapping[int, Mapping[str, int]] = {}
        self._looked: Mapping[int, Mapping[str, int]] = {}
        # Where `keep` goes on; None: it is done.
        self._keep_at: int | None = None
        self._retry_at = 0.0
        self._wake = threading.Event()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Open the folder and serve, in threads."""
        self.reads.start()
        threads.start_thread("raykv-disk", self._run, threads.OnFailure.END_PROCESS)

    def stop(self) -> None:
        """End the threads; what is not written is lost."""
        self.reads.stop()
        self._stopped.set()
        self._poke()

    def keep_floors(self, floors: Mapping[int, Mapping[str, int]], deadline_s: float) -> bool:
        """Chunks that were cleared are gone at once; wait until it is noted on the disk that they
        were, so that a later life knows it too. False: the time has passed.
        """
        give_up_at = time.monotonic() + deadline_s
        with self._lock:
            self._look_over()
        while not self._has_noted(floors) and time.monotonic() < give_up_at:
            self._poke()
            self._stopped.wait(deadlines.BRIEF_S)
        return self._has_noted(floors)

    def _has_noted(self, floors: Mapping[int, Mapping[str, int]]) -> bool:
        with self._lock:
            # Nothing is served of a folder that could not be had.
            is_away = self.reads.folder is None and self.reads.problem not in ("", reads.OPENING)
            return is_away or self._noted in (floors, self._owner.index.floors.told)

    def _look_over(self) -> Mapping[int, Mapping[str, int]]:
        """Nothing is found any more that was cleared; returns what was, by history."""
        told = self._owner.index.floors.told
        if told != self._looked:
            self._looked = told
            self._shelf.clear()
            self._lock.notify_all()
        return told

    def keep(self, deadline_s: float) -> int:
        """Write all READY chunks that are not on the disk; returns how many of them are not there
        when all has been tried, nothing can be written, or the deadline has passed.
        """
        give_up_at = time.monotonic() + deadline_s
        with self._lock:
            self._keep_at = 0
        while self._is_keeping and time.monotonic() < give_up_at:
            if self.reads.problem not in ("", reads.OPENING):
                break
            self._poke()
            self._stopped.wait(deadlines.LOOK_S)
        with self._lock:
            self._keep_at = None
            return len(self._shelf.unwritten(0, 1 << 62)[0])

    @property
    def _is_keeping(self) -> bool:
        return self._keep_at is not None

    # The writer's thread

    def _run(self) -> None:
        yield_to_others()
        while not self._stopped.is_set():
            try:
                self._round()
            except (OSError, errors.DiskError) as error:
                self._failed(error)
            except Exception as error:
                logger.exception("the disk tier failed")
                self._failed(error)

    def _round(self) -> None:
        wait_s = self._retry_at - time.monotonic()
        folder = self.reads.folder
        if wait_s > 0:
            if folder is not None:
                with suppress(OSError):
                    self._note_floors(folder)
            self._sleep(min(deadlines.WAKE_S, wait_s))
            return
        if folder is None:
            folder = self._claim()
        if self._owner.orders.stamp == engine.NOTHING_ORDERED:
            self._sleep(DISK_NEXT_LOOK_S)
            return
        self._note_floors(folder)
        if not self._is_open:
            self._open(folder)
        if self.reads.problem:
            self._check_floor(folder, 0)
            self.reads.has_problem("")
        self._work(folder)

    def _work(self, folder: TierFolder) -> None:
        """Copy what is to be written next, and write the files that are due."""
        records = self._next_to_copy()
        self._copy_all(records)
        is_last = self._keep_at == listing.ALL_READ and not records
        for whose, batch in list(self._batches.items()):
            is_old = time.monotonic() - batch.began_at >= DISK_BATCH_S
            if is_old or is_last or batch.num_bytes >= FILE_BYTES:
                self._write(folder, *whose, self._batches.pop(whose))
        if is_last:
            with self._lock:
                self._keep_at = None
        elif not records and not self._is_keeping:
            if not self._batches and not self._wake.is_set():
                with self._lock:
                    # Until something may have changed in the pool.
                    self._lock.wait(deadlines.WAKE_S)
            self._sleep(DISK_NEXT_LOOK_S)

    def _next_to_copy(self) -> list[ChunkRecord]:
        """What is to be copied next, no more than one file: some of what goes next, or of all while
        all is kept.
        """
        with self._lock:
            largest = max(self._owner.index.places.classes(), default=1)
            most = min(COPIED, max(1, FILE_BYTES // largest))
            if self._keep_at is None:
                return self._shelf.next_to_write(most)
            if self._keep_at == listing.ALL_READ:
                return []
            records, self._keep_at = self._shelf.write_all(self._keep_at, most)
            return records

    def _sleep(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _poke(self) -> None:
        """Have the writer look at once."""
        self._wake.set()
        with self._lock:
            self._lock.notify_all()

    def _failed(self, error: BaseException) -> None:
        reason = f"{error.strerror or error}" if isinstance(error, OSError) else str(error)
        self._retry_at = time.monotonic() + DISK_RETRY_S
        self.reads.count(writes_failed=1)
        # Nothing waits for a disk that can't be written.
        for whose in list(self._batches):
            self._end(self._batches.pop(whose).chunks, is_written=False)
        if self.reads.has_problem(reason):
            logger.warning("nothing is written to disk_path=%r now: %s", self._place.path, reason)

    def _claim(self) -> TierFolder:
        """Take a folder, and learn what was cleared when a node had it before."""
        folder = TierFolder(Path(self._place.path))
        try:
            floors = folder.read_floors()
        except errors.DiskError:
            folder.close()
            raise
        with self._lock:
            self._noted = floors
            index = self._owner.index
            index.drop_void(index.floors.learn(floors))
            self.reads.folder = folder
        return folder

    def _open(self, folder: TierFolder) -> None:
        """List what is in the folder."""
        found = folder.scan()
        if self._place.most_bytes is None:
            used = sum(file.num_bytes for file in found)
            self._shelf.most_bytes = (used + folder.free_bytes()) // 2
        for file in found:
            self._add(file)
        with self._lock:
            gone = [*self._shelf.give_way(0), *self._shelf.take_empty()]
            self._is_open = True
        folder.delete(*gone)
        logger.info("%s has %d chunks in %d files", folder.path, len(self._shelf), len(found))

    def _note_floors(self, folder: TierFolder) -> None:
        """Note on the disk what was cleared, then delete files in which no chunk is left."""
        with self._lock:
            told = self._look_over()
        try:
            # Their order says which history came before which.
            if list(told.items()) != list(self._noted.items()):
                folder.write_floors(told)
                with self._lock:
                    self._noted = told
        finally:
            # That makes room, if there was no room.
            self._delete_empty(folder)

    def _delete_empty(self, folder: TierFolder) -> None:
        with self._lock:
            empty = self._shelf.take_empty()
        folder.delete(*empty)

    # Writing

    def _copy_all(self, records: Sequence[ChunkRecord]) -> None:
        """Copy chunks out of their slots; each reader ends."""
        left = deque(records)
        try:
            while left:
                self._copy(left[0])
                left.popleft()
        finally:
            for record in left:
                self._keeper.end_read(record)
            self._end(left, is_written=False)

    def _copy(self, record: ChunkRecord) -> None:
        data = self._keeper.bytes_of(record).copy()
        checksum = xxhash.xxh3_64_intdigest(data.data)
        refusal = self._keeper.check_bytes(record, checksum)
        tenant = record.tenant
        whose = record.namespace, tenant if tenant in self._shelf.shares else ""
        batch = self._batches.setdefault(whose, _Batch(time.monotonic()))
        # Whether the chunk has gone since does not matter to the copy.
        is_sound = refusal is Refusal.NONE or record.checksum in (None, checksum)
        if is_sound and record.key not in batch.keys:
            batch.keys.add(record.key)
            batch.chunks[record] = chunk_file.ChunkBytes(
                record.key, record.stamp, checksum, data, record.blocks
            )
            batch.num_bytes += record.slot_bytes
        else:
            self._end([record], is_written=False)
        self._keeper.end_read(record)

    def _end(self, records: Collection[ChunkRecord], *, is_written: bool) -> set[Key]:
        """Writes have ended; returns the keys of the copies that count."""
        with self._lock:
            return {
                record.key
                for record in records
                if self._shelf.end_write(record, is_written=is_written)
            }

    def _write(self, folder: TierFolder, namespace: Namespace, tenant: str, batch: _Batch) -> None:
        """Write a tenant's file, after the copies that wait, and list it."""
        num_bytes = batch.num_bytes + HEADER_BYTES * (1 + len(batch.chunks))
        give_way_until = time.monotonic() + DISK_GIVE_WAY_S
        while self._is_busy() and time.monotonic() < give_way_until:
            self._stopped.wait(deadlines.BRIEF_S)
        try:
            if not self._make_room(folder, num_bytes, tenant):
                with self._lock:
                    for record in batch.chunks:
                        self._shelf.refuse(record)
                return
            path = folder.new_path()
            facts = {TENANT: tenant} if tenant else None
            chunk_file.write_chunks(path, namespace, list(batch.chunks.values()), facts)
            file = chunk_file.read_header(path)
        except BaseException:
            self._end(batch.chunks, is_written=False)
            raise
        with self._lock:
            self._add(file, self._end(batch.chunks, is_written=True))
        self.reads.count(bytes_written=batch.num_bytes, chunks_written=len(batch.chunks))
        self._delete_empty(folder)

    def _make_room(self, folder: TierFolder, num_bytes: int, tenant: str) -> bool:
        """Delete what goes for a file; False: there can't be room for it.

        Raises:
            DiskError: less than the floor would stay free.
        """
        with self._lock:
            if not self._shelf.can_hold(num_bytes, tenant):
                return False
            gone = self._shelf.give_way(num_bytes, tenant)
        folder.delete(*gone)
        self.reads.count(files_evicted=len(gone))
        self._check_floor(folder, num_bytes)
        return True

    def _add(self, file: chunk_file.ChunkFile, keys: Collection[Key] | None = None) -> None:
        """List a file of an earlier life, or of one of this life the chunks with these keys, but
        for what is void, or on the disk and better.
        """
        with self._lock:
            floors = self._owner.index.floors
            is_void = floors.is_void_of_earlier if keys is None else floors.is_void
            chunks = [
                each
                for each in file.chunks
                if (keys is None or each.key in keys)
                and not is_void(file.namespace, each.stamp)
                and not self._has_better(file.namespace, each)
            ]
            tenant = file.facts.get(TENANT, "")
            self._shelf.add(file.path.name, file.num_bytes, file.namespace, chunks, tenant)
            self._lock.notify_all()

    def _has_better(self, namespace: Namespace, chunk: DiskChunk) -> bool:
        """Whether a copy that came to the disk first was stored later, or with more blocks: the
        batches of tenants are written when each is full, or old.
        """
        shelved = self._shelf.find(namespace, chunk.key)
        if shelved is None:
            return False
        kept = shelved.chunk
        if kept.stamp != chunk.stamp:
            return self._owner.index.floors.is_older(chunk.stamp, kept.stamp)
        return kept.blocks != chunk.blocks and kept.blocks.has(chunk.blocks)

    def _check_floor(self, folder: TierFolder, num_bytes: int) -> None:
        """Raise a DiskError if less than the floor would stay free."""
        free_bytes = folder.free_bytes()
        if free_bytes - num_bytes < self._place.floor_bytes:
            raise errors.DiskError(
                f"the file system of {self._place.path} has {free_bytes} bytes free, and "
                f"disk_free_bytes={self._place.floor_bytes} must stay free"
            )
