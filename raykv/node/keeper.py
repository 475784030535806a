"""The bytes of a node's pool and what decides about them, `NodePool`, behind one lock.

Everything that copies (copy threads, readers for other nodes, fetches from them) asks here before
and reports here after. Nobody holds the lock while bytes move.

A pool file: what gets a slot is struck off its journal before anybody writes there, and entered
once it is READY and has a checksum. What an earlier life has left is served from the first document
of orders on, which says what of it is void; without one it is dropped.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from raykv.base import deadlines
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import SLOT_ALIGNMENT, Key, Namespace, NodeId, Refusal, Slot
from raykv.memory.pool import Pool, PoolEntry
from raykv.node.pool import catalog, claims, jobs
from raykv.node.pool.owner import NodePool
from raykv.node.pool.records import ChunkRecord, ChunkState
from raykv.protocol import engine, listing, operator

logger = logging.getLogger("raykv.node")

# How long chunks of a pool file wait for the operators' orders, which say what of them is void.
POOL_FILE_ORDERS_S = 30.0


MAX_UNCHECKED = 65_536
"""Chunks that wait for their checksums to be made, or compared; beyond it the oldest are left out.
They are served all the same, those that were restored compared first."""

ADOPTED = 4096
"""Chunks of a pool file that are taken back in one go."""

KeepFloors = Callable[[Mapping[int, Mapping[str, int]], float], bool]
"""Keep what was cleared, by history; False if that took longer than the deadline."""


class PoolKeeper:
    """See the module's docstring. Any thread may call.

    `lock` is notified whenever a slot, the listing or an answer to engines may have changed. Other
    conditions share its `mutex`.

    Args:
        node_id: Ray's.
        life: of the NodeActor; a later one is higher.
        geometry: of the pool.
        pool_path: of the pool file; empty: memory alone.
        pin_share: part of the pool that pins may take.
    """

    def __init__(
        self,
        node_id: NodeId,
        life: int,
        geometry: PoolGeometry,
        pool_path: str = "",
        *,
        pin_share: float = claims.PIN_SHARE,
    ) -> None:
        self.life = life
        self.geometry = geometry
        self.pool_path = pool_path
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)
        self.pool = Pool(geometry, pool_path)
        self.owner = NodePool(node_id, life, geometry, pin_share=pin_share)
        """What decides; called with `lock` held."""
        self.catalog = catalog.PoolCatalog(self.owner, self.now())
        self.keep_floors: KeepFloors | None = None
        """Of the disk tier, if there is one."""
        self._unchecked: deque[ChunkRecord] = deque(maxlen=MAX_UNCHECKED)
        self._num_quarantined = 0
        # Of the pool file, not served yet, the oldest first; and until when they wait for orders.
        self._restored: list[ChunkRecord] = []
        self._restored_until = 0.0

    def now(self) -> float:
        """The pool's clock, in seconds."""
        return time.monotonic()

    def address_of(self, record: ChunkRecord) -> int:
        """Where a record's bytes are in this process."""
        return self.pool.address + record.slot * SLOT_ALIGNMENT

    def bytes_of(self, record: ChunkRecord) -> npt.NDArray[np.uint8]:
        """A chunk's bytes where they are, [slot_bytes] uint8."""
        place = (ctypes.c_ubyte * record.slot_bytes).from_address(self.address_of(record))
        return np.frombuffer(memoryview(place), np.uint8)

    # Workers' jobs

    def begin_chunks(self, job: jobs.AdmittedJob, numbers: Sequence[int]) -> None:
        """Admit some chunks of a store; see `NodePool.begin_chunks`. `COPY_FAILED`: memory is so
        short that its place can't be touched.
        """
        with self.lock:
            self.owner.begin_chunks(job, numbers, self.now())
            for at in numbers:
                record = job.under_way.get(at)
                if record is not None and not self._open(record):
                    self.owner.jobs.end_chunks(job, (at,), ok=False)
                    job.chunks[at] = Refusal.COPY_FAILED
            self.lock.notify_all()

    def _open(self, record: ChunkRecord) -> bool:
        """A record's bytes are about to be written; False: they can't be."""
        pool = self.pool
        if pool.has_journal:
            pool.forget(record.slot, record.slot_bytes)
        return not pool.is_short or pool.may_touch(record.slot, record.slot_bytes)

    def end_chunks(self, job: jobs.AdmittedJob, numbers: Sequence[int], *, ok: bool) -> None:
        """The copies of these chunks of a job have ended; see `Jobs.end_chunks`."""
        with self.lock:
            self._unchecked += self.owner.jobs.end_chunks(job, numbers, ok=ok)
            self.lock.notify_all()

    # Other nodes

    def land(self, chunk: ChunkRecord) -> ChunkRecord | Refusal:
        """Give a chunk of another node a slot; `landed` ends its write.

        `CLEARED`: it is void here. `HERE`: so is that chunk, and no older. `NO_ROOM`: as much is on
        its way as may be, or nothing may go.
        """
        with self.lock:
            # What another node stored before its first orders may be older than any clear.
            if self.owner.index.floors.is_void_of_earlier(chunk.namespace, chunk.stamp):
                return Refusal.CLEARED
            record = self.owner.landings.land(chunk, self.now())
            if isinstance(record, ChunkRecord) and not self._open(record):
                self.owner.landings.landed(record, ok=False)
                record = Refusal.COPY_FAILED
            self.lock.notify_all()
            return record

    def landed(self, record: ChunkRecord, *, ok: bool, checksum: int | None = None) -> None:
        """The write of a landing chunk has ended.

        Args:
            record: of the chunk.
            ok: all of it was written.
            checksum: of its slot, where that is known.
        """
        with self.lock:
            self.owner.landings.landed(record, ok=ok)
            if record.state is ChunkState.READY:
                if checksum is None:
                    self._unchecked.append(record)
                else:
                    self._seal(record, checksum)
            self.lock.notify_all()

    def begin_read(
        self, namespace: Namespace, keys: Sequence[Key], slot_bytes: Sequence[int]
    ) -> list[ChunkRecord | Refusal]:
        """Let others read whole slots; see `NodePool.begin_read`. `end_read` ends each."""
        with self.lock:
            return self.owner.begin_read(namespace, keys, slot_bytes, self.now())

    def end_read(self, *records: ChunkRecord) -> None:
        """End the reads of some records."""
        with self.lock:
            self.owner.index.end_load(*records)
            self.lock.notify_all()

    # Checksums

    def _seal(self, record: ChunkRecord, checksum: int) -> None:
        """A pool file has no chunk without a checksum."""
        record.checksum = checksum
        if self.pool.has_journal:
            self.pool.journal.enter(
                PoolEntry(
                    record.slot,
                    record.slot_bytes,
                    record.namespace,
                    record.key,
                    checksum,
                    record.stamp,
                    record.blocks,
                )
            )

    def check_bytes(self, record: ChunkRecord, checksum: int) -> Refusal:
        """The bytes of a record, which the caller reads, have that checksum now.

        It is remembered if there was none; if there was another one the chunk is damaged, and not
        served any more: `CORRUPT`. `NOT_HERE`: it has gone meanwhile.
        """
        with self.lock:
            if record.state is not ChunkState.READY:
                return Refusal.NOT_HERE
            if record.checksum is None:
                self._seal(record, checksum)
            elif record.checksum == checksum:
                record.is_proven = True
            else:
                self._quarantine(record)
                return Refusal.CORRUPT
        return Refusal.NONE

    def _quarantine(self, record: ChunkRecord) -> None:
        self.owner.index.drop(record, listing.Reason.DAMAGED)
        self.pool.journal.strike(record.slot)
        self._num_quarantined += 1
        self.lock.notify_all()
        logger.error(
            "the bytes of chunk %s of namespace %s have changed since it was stored: it is not "
            "served any more. Is the node's memory in order?",
            *(record.key.hex(), record.namespace),
        )

    def take_unchecked(self) -> ChunkRecord | None:
        """The chunk that has waited longest for a checksum to be made or compared, with a reader
        for whom the caller calls `end_read`.
        """
        with self.lock:
            while self._unchecked:
                record = self._unchecked.popleft()
                is_done = record.checksum is not None and record.is_proven
                if not is_done and self.owner.index.hold(record):
                    return record
        return None

    def put_back(self, record: ChunkRecord) -> None:
        """The record that `take_unchecked` returned was not checked; its reader is still there."""
        with self.lock:
            self._unchecked.appendleft(record)

    def wait_for_seals(self, deadline_s: float) -> int:
        """Wait until every READY chunk has its checksum, which a pool file needs to have it again;
        returns how many have none when the time has passed.
        """
        give_up_at = time.monotonic() + deadline_s
        while True:
            with self.lock:
                ready = [r for r in self.owner.index.places if r.state is ChunkState.READY]
                left = [record for record in ready if record.checksum is None]
                if not self._unchecked:
                    self._unchecked.extend(left)
            if not left or time.monotonic() > give_up_at:
                return len(left)
            time.sleep(deadlines.LOOK_S)

    @property
    def num_quarantined(self) -> int:
        """Chunks that were damaged, and journals of a pool file that were not believed."""
        return self._num_quarantined + self.pool.journal.num_set_aside

    # The pool file and orders

    def recover(self) -> None:
        """Find what a pool file holds, before anything else is stored; nothing of it is read, nor
        served before `take_orders`.
        """
        with self.lock:
            entries = self.pool.recover()
            self.owner.index.floors.learn(self.pool.journal.floors)
            # A name may be in two slots: the later one counts.
            latest = {(entry.namespace, entry.key): entry for entry in entries}
            chosen = [e for e in entries if latest[e.namespace, e.key] is e]
            records = [_restored(entry) for entry in chosen if entry.blocks.is_sound]
            for entry in entries:
                if latest[entry.namespace, entry.key] is not entry:
                    self.pool.journal.strike(entry.slot)
            refused = set(self.owner.index.places.restore(records))
            for record in refused:
                self.pool.journal.strike(record.slot)
            self._num_quarantined += len(refused) + len(chosen) - len(records)
            self._restored = [record for record in records if record not in refused]
            self._restored_until = self.now() + POOL_FILE_ORDERS_S

    def take_orders(self, document: operator.OrdersDocument, deadline_s: float) -> bool:
        """A document of orders; see `NodePool.take_orders`. What it clears is kept by the pool file
        and the disk when this returns.

        False: the disk has not kept it within the deadline: the node does not show its number yet,
        and calls again.
        """
        with self.lock:
            self.owner.take_orders(document, self.now())
            floors = self.owner.index.floors.told
            self.pool.journal.keep_floors(floors)
            restored = []
            if self.owner.orders.stamp != engine.NOTHING_ORDERED:
                restored, self._restored = self._restored, restored
            self.lock.notify_all()
        for start in range(0, len(restored), ADOPTED):
            some = restored[start : start + ADOPTED]
            with self.lock:
                self.owner.index.adopt(some)
                self._unchecked += [each for each in some if each.state is ChunkState.READY]
                self.lock.notify_all()
        return self.keep_floors is None or self.keep_floors(floors, deadline_s)

    def expire(self) -> None:
        """End what is late or over; about once a second."""
        with self.lock:
            now = self.now()
            self.owner.expire(now)
            if self._restored and now >= self._restored_until:
                logger.warning(
                    "%d chunks of the pool file are dropped: no orders have come for %.0f s, "
                    "so it is unknown what of them was cleared",
                    *(len(self._restored), POOL_FILE_ORDERS_S),
                )
                for record in self._restored:
                    self.pool.journal.strike(record.slot)
                self.owner.index.end_load(*self._restored)
                self._restored = []
            self.lock.notify_all()


def _restored(entry: PoolEntry) -> ChunkRecord:
    """The record of a chunk of a pool file: it has a reader, and is not in the index yet."""
    return ChunkRecord(
        Namespace(entry.namespace),
        Key(entry.key),
        entry.slot_bytes,
        entry.stamp,
        slot=Slot(entry.slot),
        state=ChunkState.VOID,
        blocks=entry.blocks,
        readers=1,
        checksum=entry.checksum,
        is_proven=False,
    )
