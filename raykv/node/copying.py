"""From a queued job to copied chunks: each is admitted, copied with others, and reported to the
table.

    admit every chunk ──► copy a span ──► each of its chunks: READY, or a refusal ──► next span
          │ refused                  ▲
          └──► left out of its span  └── before it: loads go first; a device has it before the end
                                         of the one in front of it is awaited

Invariants, whatever goes wrong:

1. Bytes of a chunk move only between its admission (`PoolKeeper.begin_store`, `begin_load`) and its
   end (`end_store`, `end_load`), and every chunk that was admitted is ended, exactly once.
2. The cancel word and the worker's death are looked at before every run of a copy, and again for
   each chunk before it becomes READY or counts as loaded.
3. A chunk that is refused is left out and spoils no other. A copy that is stopped, or of which a
   call fails, spoils the chunks of its span and those behind it.
4. No byte of what a slot held before is in a READY chunk: what a store leaves out of it is zero.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass

from raykv.base.ids import ALL_BLOCKS, SLOT_ALIGNMENT, Direction, Epoch, Refusal
from raykv.copy.engine import HOST, CopyBackend
from raykv.copy.plan import CopyRuns
from raykv.copy.rows import RowCopier
from raykv.copy.spans import HOST_SPAN_BYTES, SPAN_BYTES, Span, spans
from raykv.node.attached import QueuedJob
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.slots import SlotState
from raykv.protocol.worker import JobResults


@dataclass(frozen=True)
class StoreWaits:
    """`readers_s`: how long the stores of a job may wait for readers of their slots, all together.
    `ranks_s`: how long a chunk waits for its other ranks.
    """

    readers_s: float
    ranks_s: float


class Copying:
    """Carries out jobs. Several threads may, each with jobs of its own.

    It keeps nothing between two calls: what they share is the slot table, behind the keeper's lock.
    """

    def __init__(
        self,
        keeper: PoolKeeper,
        integrity: Integrity,
        rows: RowCopier,
        epoch: Epoch,
        waits: StoreWaits,
        give_way: Callable[[QueuedJob], None],
    ) -> None:
        self._keeper = keeper
        self._integrity = integrity
        self._rows = rows
        self._epoch = epoch
        self._waits = waits
        self._give_way = give_way

    def carry_out(self, queued: QueuedJob) -> int:
        """Copy what a job is about; `queued.refusals` has what failed. Returns the bytes copied.

        Raises:
            PlanError: the job is malformed; nothing has happened.
            Exception: a copy failed; no chunk is left admitted, and those that are not in
                `queued.refusals` may or may not have been copied.
        """
        if queued.job.node_epoch != self._epoch:
            queued.refuse_rest(Refusal.BAD_HANDLE)
            return 0
        if queued.is_cancelled:
            queued.refuse_rest(Refusal.CANCELLED)
            return 0
        runs = queued.worker.planner.plan(queued.job)
        left = self._admit(queued)
        is_host_store = queued.lane == (HOST, Direction.STORE)
        most_bytes = HOST_SPAN_BYTES if is_host_store else SPAN_BYTES
        slab_bytes = self._keeper.table.geometry.slab_bytes
        num_bytes = 0
        try:
            backend = queued.worker.backend(self._keeper.pool.address, self._rows)
            if queued.job.by_layer:
                return self._copy_by_layer(queued, backend, runs, left)
            begun = deque[Span]()
            parts = self._parts(queued, spans(runs, list(left), slab_bytes, most_bytes), begun)
            with closing(backend.copy_each(queued.direction, parts, queued.stop)) as answers:
                for done in answers:
                    span = begun.popleft()
                    for chunk, chunk_bytes in zip(span.chunks, span.chunk_bytes, strict=True):
                        left.popleft()
                        num_bytes += chunk_bytes if self._end(queued, chunk, done) else 0
            while left:
                # It was stopped before.
                self._end(queued, left.popleft(), done=False)
        finally:
            self._abandon(queued, left)
        return num_bytes

    def _parts(
        self, queued: QueuedJob, some: Iterable[Span], begun: deque[Span]
    ) -> Iterator[CopyRuns]:
        """The parts to copy, each noted as begun when the back end takes it."""
        for span in some:
            self._give_way(queued)
            begun.append(span)
            yield span.runs

    def _copy_by_layer(
        self, queued: QueuedJob, backend: CopyBackend, runs: CopyRuns, left: deque[int]
    ) -> int:
        """Copy the chunks that are `left` layer by layer; the worker learns of each layer."""
        chunks = list(left)
        done = True
        layers = queued.worker.planner.plan_layers(queued.job, chunks) if chunks else []
        with closing(backend.copy_each(queued.direction, layers, queued.stop)) as answers:
            for number, done in enumerate(answers, start=1):
                if done:
                    queued.worker.send(JobResults([], {queued.job.job_id: number}))
        num_bytes = 0
        ends = [0, *runs.chunk_ends.tolist()]
        for chunk in chunks:
            left.popleft()
            if self._end(queued, chunk, done):
                num_bytes += int(runs.size[ends[chunk] : ends[chunk + 1]].sum())
        return num_bytes

    def _admit(self, queued: QueuedJob) -> deque[int]:
        """Admit the job's chunks to the slot table; the others get their refusal."""
        give_up_at = time.monotonic() + self._waits.readers_s
        admitted: deque[int] = deque()
        for chunk in range(len(queued.job.handles.keys)):
            try:
                refusal = self._begin(queued, chunk, give_up_at)
                if refusal is not Refusal.NONE:
                    queued.refusals[chunk] = refusal
                    continue
                admitted.append(chunk)
                if queued.direction is Direction.STORE:
                    self._blank(queued, chunk)
            except BaseException:
                self._abandon(queued, admitted)
                raise
        return admitted

    def _begin(self, queued: QueuedJob, chunk: int, give_up_at: float) -> Refusal:
        name = queued.name(chunk)
        if queued.direction is Direction.LOAD:
            wanted = queued.blocks(chunk)
            return self._integrity.begin_load(name, lambda: queued.is_cancelled, wanted)
        hello = queued.worker.hello
        return self._keeper.begin_store(
            name,
            hello.rank,
            hello.num_ranks,
            give_up_at - time.monotonic(),
            self._waits.ranks_s,
            lambda: queued.is_cancelled,
        )

    def _blank(self, queued: QueuedJob, chunk: int) -> None:
        """Overwrite what the store of an admitted chunk leaves as it was: blocks that are not there
        in this rank's part of the slot, and behind the last rank's part what no rank has.
        """
        worker, group_id = queued.worker, queued.job.groups[chunk]
        if queued.blocks(chunk) != ALL_BLOCKS:
            for offset, size in worker.planner.left_out(queued.job, chunk).tolist():
                ctypes.memset(self._keeper.pool.address + offset, 0, size)
        name, num_ranks = queued.name(chunk), worker.hello.num_ranks
        used = worker.planner.chunk_bytes(group_id, num_ranks)
        if worker.hello.rank == num_ranks - 1 and used < name.slot_bytes:
            place = self._keeper.pool.address + name.slot * SLOT_ALIGNMENT
            ctypes.memset(place + used, 0, name.slot_bytes - used)

    def _end(self, queued: QueuedJob, chunk: int, done: bool) -> bool:
        """End an admitted chunk, whose copy is done or was stopped; False: it is refused."""
        ok = done and not queued.is_cancelled
        self._finish(queued, chunk, ok)
        if not ok:
            queued.refusals.setdefault(chunk, Refusal.CANCELLED)
        return ok

    def _finish(self, queued: QueuedJob, chunk: int, ok: bool) -> None:
        name = queued.name(chunk)
        if queued.direction is Direction.LOAD:
            self._keeper.end_load(name)
            return
        rank, blocks = queued.worker.hello.rank, queued.blocks(chunk)
        state = self._keeper.end_store(name, rank, ok, None, blocks)
        if ok and state is SlotState.EMPTY:
            queued.refusals[chunk] = Refusal.POISONED

    def _abandon(self, queued: QueuedJob, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._finish(queued, chunk, ok=False)
