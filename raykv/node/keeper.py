"""The pool of one node and its slot table behind one lock: who may touch which bytes now.

Everything that copies (copy threads, readers for other nodes, fetches from them) asks here before
and reports here after. The slot table is touched only here, with `lock` held, so what it has
admitted is what all see. Nobody holds the lock while bytes move.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from raykv.base.deadlines import SLOT_LOOK_S
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    MAX_GENERATION,
    NO_BLOCKS,
    Blocks,
    ChunkName,
    Generation,
    Namespace,
    Refusal,
    Seal,
    Slot,
)
from raykv.memory.pool import Pool
from raykv.node.meter import PoolContents
from raykv.node.slots import Admission, FailedStore, SlotState, SlotTable
from raykv.protocol.columns import Keys, numbered
from raykv.protocol.node import FailedStores, Inventory

logger = logging.getLogger("raykv.node")

MAX_UNREPORTED = 100_000
"""READY chunks that wait for the scheduler actor; beyond it the oldest are not reported. They
come back with the next inventory."""

MAX_UNCHECKED = 65_536
"""Chunks that wait for their checksums to be made, or compared; beyond it the oldest are left out.
They are served all the same, those that were restored compared first."""


class PoolKeeper:
    """Owns the bytes of a node's pool; any thread may call.

    `lock` is notified whenever a slot may have become free. `mutex` is what it locks, for other
    conditions beside it.
    """

    def __init__(self, geometry: PoolGeometry, pool_path: str) -> None:
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)
        self.table = SlotTable(geometry)
        self.pool = Pool(geometry, pool_path)
        self._unreported: deque[ChunkName] = deque(maxlen=MAX_UNREPORTED)
        self._unchecked: deque[ChunkName] = deque(maxlen=MAX_UNCHECKED)
        self._num_quarantined = 0

    def recover(self) -> None:
        """Take back what a pool file holds; nothing of it is read here."""
        with self.lock:
            found = self.pool.recover()
            for namespace, generation in self.pool.cleared.items():
                self.table.discard_namespace(Namespace(namespace), Generation(generation))
            for name, seal in found.items():
                if self.table.restore(name, seal.checksum, seal.blocks):
                    self._unchecked.append(name)
                else:
                    self.pool.strike(name.slot)
                    self._num_quarantined += 1

    # Copies

    def begin_load(self, name: ChunkName, wanted: Blocks = NO_BLOCKS) -> Refusal:
        """Register a reader of some blocks of a chunk; see `SlotTable.begin_load`."""
        return self.begin_loads((name,), (wanted,))[0]

    def begin_loads(self, names: Sequence[ChunkName], wanted: Sequence[Blocks]) -> list[Refusal]:
        """Register a reader of each of some chunks; see `begin_load`."""
        with self.lock:
            return [self.table.begin_load(*each) for each in zip(names, wanted, strict=True)]

    def blocks_of(self, name: ChunkName) -> Blocks:
        """The blocks of a READY chunk that were stored."""
        with self.lock:
            return self.table.blocks_of(name)

    def end_load(self, name: ChunkName) -> None:
        """A reader is done."""
        self.end_loads((name,))

    def end_loads(self, names: Iterable[ChunkName]) -> None:
        """Readers of some chunks are done."""
        with self.lock:
            for name in names:
                self.table.finish_load(name.slot, name.generation)
            self.lock.notify_all()

    def begin_store(
        self,
        name: ChunkName,
        rank: int,
        num_ranks: int,
        wait_s: float,
        expiry_s: float,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> Refusal:
        """Let a rank write its part of a chunk, once the slot's readers have finished.

        Args:
            name: the chunk, and the lease that it is stored at.
            rank: whose part.
            num_ranks: how many parts make the chunk READY.
            wait_s: longest wait for readers and writers of the slot.
            expiry_s: the other ranks have so long to come.
            is_cancelled: asked while waiting.
        """
        give_up_at = time.monotonic() + wait_s
        if not self.pool.may_touch(name.slot, name.slot_bytes):
            return Refusal.COPY_FAILED
        with self.lock:
            expires_at = time.monotonic() + expiry_s
            while True:
                answer = self.table.begin_store(name, rank, num_ranks, expires_at)
                if answer.admission is Admission.GO:
                    # The journal must not list a chunk whose bytes are about to be overwritten.
                    self.pool.forget(name.slot, name.slot_bytes)
                    return Refusal.NONE
                if answer.admission is Admission.REFUSED:
                    return answer.refusal
                if is_cancelled() or time.monotonic() > give_up_at:
                    return Refusal.WRITING
                self.lock.wait(SLOT_LOOK_S)

    def end_store(
        self,
        name: ChunkName,
        rank: int,
        ok: bool,
        checksum: int | None = None,
        blocks: Blocks = ALL_BLOCKS,
    ) -> SlotState:
        """A rank has stopped writing some blocks; READY when its part was the last one.

        `checksum` is that of the whole chunk, where it is known; else it is made later.
        """
        with self.lock:
            state = self.table.finish_store(name.slot, name.generation, rank, ok, blocks)
            if state is SlotState.READY:
                if checksum is None:
                    self._unchecked.append(name)
                else:
                    self._seal(name, checksum)
                self._unreported.append(name)
            self.lock.notify_all()
            return state

    # Checksums

    def _seal(self, name: ChunkName, checksum: int) -> None:
        """A pool file has no chunk without a checksum."""
        if self.table.seal(name, checksum):
            self.pool.remember(name, checksum, self.table.blocks_of(name))

    def settle(self, name: ChunkName, checksum: int) -> Refusal:
        """The bytes of a chunk have that checksum now.

        It is remembered if there was none; if there was another one the chunk is damaged: it is
        quarantined, and the answer is `CORRUPT`. `STALE`: it is gone already.
        """
        with self.lock:
            if not self.table.is_ready(name):
                return Refusal.STALE
            seal = self.table.seal_of(name)
            if seal is None:
                self._seal(name, checksum)
            elif seal.checksum == checksum:
                self.table.prove(name)
            else:
                self._quarantine(name)
                return Refusal.CORRUPT
        return Refusal.NONE

    def _quarantine(self, name: ChunkName) -> None:
        self.table.quarantine(name)
        self.pool.strike(name.slot)
        self._num_quarantined += 1
        logger.error(
            "the bytes of a chunk have changed since it was stored (slot %d, generation %d): it is "
            "not served any more. Is the node's memory in order?",
            name.slot,
            name.generation,
        )

    def seal_of(self, name: ChunkName) -> Seal | None:
        """None for a chunk that has no checksum yet, or is not there."""
        with self.lock:
            return self.table.seal_of(name)

    def take_unchecked(self) -> ChunkName | None:
        """The chunk that has waited longest for a checksum to be made or compared."""
        with self.lock:
            return self._unchecked.popleft() if self._unchecked else None

    def put_back(self, name: ChunkName) -> None:
        """The chunk that `take_unchecked` returned was not checked."""
        with self.lock:
            self._unchecked.appendleft(name)

    def wait_for_seals(self, deadline_s: float) -> int:
        """Wait until every READY chunk has its checksum, which a pool file needs to have it again;
        returns how many have none when the time has passed.
        """
        give_up_at = time.monotonic() + deadline_s
        while True:
            with self.lock:
                names = self.table.inventory()
                count = sum(self.table.seal_of(name) is None for name in names)
            if not count or time.monotonic() > give_up_at:
                return count
            time.sleep(SLOT_LOOK_S)

    @property
    def num_quarantined(self) -> int:
        """Chunks that were damaged, and journals of a pool file that were not believed."""
        return self._num_quarantined + self.pool.num_set_aside

    def contents(self) -> PoolContents:
        """What fills the pool now."""
        with self.lock:
            return PoolContents(self.table.contents(), len(self._unreported))

    # Reports

    def take_unreported(self, most: int) -> Inventory:
        """Chunks that became READY and were not reported yet; they count as reported now."""
        with self.lock:
            names = [self._unreported.popleft() for _ in range(min(most, len(self._unreported)))]
        return inventory_of(names)

    def all_ready(self) -> list[ChunkName]:
        """Every READY chunk; those that wait for a report are in it and need none any more."""
        with self.lock:
            self._unreported.clear()
            return list(self.table.inventory())

    def take_failed(self, most: int) -> FailedStores:
        """Stores that have failed and were not reported yet; they count as reported now."""
        with self.lock:
            failed = self.table.take_failed(most)
        return failed_columns(failed)

    def only_ready(self, names: list[ChunkName]) -> list[ChunkName]:
        """The chunks among `names` that are still there."""
        with self.lock:
            return [name for name in names if self.table.is_ready(name)]

    def ready_at(self, slot: Slot, generation: Generation) -> ChunkName | None:
        """The READY chunk in a slot, if the slot is still at that generation."""
        with self.lock:
            return self.table.ready_at(slot, generation)

    def all_held(self) -> list[ChunkName]:
        """Every READY chunk; changes nothing."""
        with self.lock:
            return list(self.table.inventory())

    def clear(self, cleared: dict[str, int]) -> None:
        """Discard namespaces up to the given generations."""
        with self.lock:
            before = self.table.cleared
            for namespace, generation in cleared.items():
                if generation <= MAX_GENERATION:
                    self.table.discard_namespace(Namespace(namespace), Generation(generation))
            if self.table.cleared != before:
                self.pool.clear(self.table.cleared)

    def cleared(self) -> dict[str, int]:
        """The generation up to which each namespace's chunks were discarded."""
        with self.lock:
            return self.table.cleared

    @property
    def highest_generation(self) -> Generation:
        """The highest generation that a store was ever begun with."""
        return self.table.highest_generation


def inventory_of(names: list[ChunkName]) -> Inventory:
    """`names` as columns."""
    namespaces: list[str] = []
    namespace_index = numbered(namespaces, [name.namespace for name in names])
    return Inventory(
        namespaces=namespaces,
        namespace_index=namespace_index,
        keys=Keys.of([name.key for name in names]),
        slots=[name.slot for name in names],
        generations=[name.generation for name in names],
        slot_bytes=[name.slot_bytes for name in names],
    )


def failed_columns(failed: list[FailedStore]) -> FailedStores:
    """`failed` as columns."""
    return FailedStores(
        slots=[store.slot for store in failed],
        generations=[store.generation for store in failed],
        slot_bytes=[store.slot_bytes for store in failed],
    )
