"""From a queued job to copied chunks: each is admitted, copied with others, and reported to the
table.

    admit some chunks ──► copy them ──► each of them: READY, or a refusal ──► the next ones
            │ refused         ▲
            └──► left out     └── before it: loads go first; a device has them before the end of
                                  those in front of them is awaited

Invariants, whatever goes wrong:

1. Bytes of a chunk move only between its admission (`PoolKeeper.begin_store`, `begin_load`) and its
   end (`end_store`, `end_load`), and every chunk that was admitted is ended, exactly once.
2. The cancel word and the worker's death are looked at before every run of a copy, and again
   before a chunk becomes READY, or some count as loaded.
3. A chunk that is refused is left out and spoils no other. A copy that is stopped, or of which a
   call fails, spoils the chunks that are copied with it and those behind them.
4. No byte of what a slot held before is in a READY chunk: what a store leaves out of it is zero.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import compress
from operator import not_

from raykv.base.ids import ALL_BLOCKS, SLOT_ALIGNMENT, Direction, Epoch, Refusal
from raykv.copy.engine import HOST, HOST_SPAN_BYTES, SPAN_BYTES
from raykv.copy.plan import CopyRuns, JobPlan
from raykv.copy.rows import RowCopier
from raykv.node.attached import QueuedJob
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.slots import SlotState
from raykv.protocol.worker import JobResults

FIRST_BYTES = 8 << 20
"""Of the chunks that are admitted before a device has anything to copy; it takes 0.15 ms for them,
in which the next ones are admitted."""


@dataclass(frozen=True)
class StoreWaits:
    """`readers_s`: how long the stores of a job may wait for readers of their slots, all together.
    `ranks_s`: how long a chunk waits for its other ranks.
    """

    readers_s: float
    ranks_s: float


@dataclass
class _Progress:
    """How far a job is: chunks that are admitted and have not ended, in order; how many of them
    each part has that the back end has taken; the first chunk that was not looked at yet; and how
    long its stores may still wait for readers.
    """

    wait_s: float
    admitted: deque[int] = field(default_factory=deque)
    begun: deque[int] = field(default_factory=deque)
    first_left: int = 0

    def take(self) -> list[int]:
        """The chunks that have not ended, which somebody ends now."""
        taken = [*self.admitted]
        self.admitted.clear()
        return taken


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
        if queued.job.by_layer:
            return self._copy_by_layer(queued)
        plan = queued.worker.planner.plan(queued.job)
        progress = _Progress(self._waits.readers_s)
        num_bytes = 0
        try:
            backend = queued.worker.backend(self._keeper.pool.address, self._rows)
            parts = self._parts(queued, plan, progress)
            with closing(backend.copy_each(queued.direction, parts, queued.stop)) as answers:
                for done in answers:
                    if not progress.begun:
                        # It was stopped before anything was asked for.
                        break
                    count = progress.begun.popleft()
                    ended = [progress.admitted.popleft() for _ in range(count)]
                    oks = self._end(queued, ended, done)
                    num_bytes += sum(map(plan.bytes_of, compress(ended, oks)))
            # It was stopped before.
            self._end(queued, progress.take(), done=False)
            for chunk in range(progress.first_left, len(queued.job.handles.keys)):
                queued.refusals[chunk] = Refusal.CANCELLED
        finally:
            self._abandon(queued, progress.take())
            self._fail_rest(queued, progress.first_left)
        return num_bytes

    def _fail_rest(self, queued: QueuedJob, first: int) -> None:
        """Have the other ranks of a store that has ended early know it of the chunks that were not
        looked at: else they store their parts, and the slots are lost until the wait for this one
        is over.
        """
        if queued.direction is Direction.STORE and queued.worker.hello.num_ranks > 1:
            for chunk in range(first, len(queued.job.handles.keys)):
                if self._begin_store(queued, chunk, 0.0) is Refusal.NONE:
                    self._end_store(queued, chunk, done=False)

    def _parts(self, queued: QueuedJob, plan: JobPlan, progress: _Progress) -> Iterator[CopyRuns]:
        """The parts to copy. Chunks are admitted when the back end asks for their part."""
        is_host_store = queued.lane == (HOST, Direction.STORE)
        most_bytes = HOST_SPAN_BYTES if is_host_store else SPAN_BYTES
        part_bytes = min(FIRST_BYTES, most_bytes)
        while (first := progress.first_left) < len(plan.ends):
            end = part_bytes + (plan.ends[first - 1] if first else 0)
            progress.first_left = max(first + 1, bisect_right(plan.ends, end, first))
            part_bytes = most_bytes
            admitted = self._admit(queued, range(first, progress.first_left), progress)
            if admitted:
                progress.admitted += admitted
                self._give_way(queued)
                progress.begun.append(len(admitted))
                yield plan.runs(admitted, self._keeper.table.geometry.slab_bytes)

    def _copy_by_layer(self, queued: QueuedJob) -> int:
        """Copy all chunks layer by layer; the worker learns of each layer."""
        job, plan = queued.job, queued.worker.planner.plan(queued.job)
        progress = _Progress(self._waits.readers_s)
        left = self._admit(queued, range(len(job.handles.keys)), progress)
        num_bytes = 0
        try:
            backend = queued.worker.backend(self._keeper.pool.address, self._rows)
            done = True
            slab_bytes = self._keeper.table.geometry.slab_bytes
            layers = plan.layers(left, slab_bytes) if left else iter(())
            with closing(backend.copy_each(queued.direction, layers, queued.stop)) as answers:
                for number, done in enumerate(answers, start=1):
                    if done:
                        queued.worker.send(JobResults([], {job.job_id: number}))
            ended, left = left, []
            num_bytes = sum(map(plan.bytes_of, compress(ended, self._end(queued, ended, done))))
        finally:
            self._abandon(queued, left)
        return num_bytes

    def _admit(self, queued: QueuedJob, chunks: Sequence[int], progress: _Progress) -> list[int]:
        """Admit chunks to the slot table; the others get their refusal."""
        admitted: list[int] = []
        try:
            if queued.direction is Direction.LOAD:
                names = [queued.name(chunk) for chunk in chunks]
                wanted = [queued.blocks(chunk) for chunk in chunks]
                found = self._integrity.begin_loads(names, wanted, queued.stop)
                refused = {
                    c: r for c, r in zip(chunks, found, strict=True) if r is not Refusal.NONE
                }
                queued.refusals.update(refused)
                return [chunk for chunk in chunks if chunk not in refused]
            for chunk in chunks:
                began = time.monotonic()
                refusal = self._begin_store(queued, chunk, progress.wait_s)
                progress.wait_s -= time.monotonic() - began
                if refusal is not Refusal.NONE:
                    queued.refusals[chunk] = refusal
                    continue
                admitted.append(chunk)
                self._blank(queued, chunk)
        except BaseException:
            self._abandon(queued, admitted)
            raise
        return admitted

    def _begin_store(self, queued: QueuedJob, chunk: int, wait_s: float) -> Refusal:
        hello = queued.worker.hello
        return self._keeper.begin_store(
            queued.name(chunk),
            hello.rank,
            hello.num_ranks,
            wait_s,
            self._waits.ranks_s,
            queued.stop,
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

    def _end(self, queued: QueuedJob, chunks: Sequence[int], done: bool) -> list[bool]:
        """End admitted chunks, whose copy is done or was stopped; False: it is refused."""
        if queued.direction is Direction.LOAD:
            oks = [done and not queued.is_cancelled] * len(chunks)
            self._keeper.end_loads(map(queued.name, chunks))
        else:
            oks = [self._end_store(queued, chunk, done) for chunk in chunks]
        for chunk in compress(chunks, map(not_, oks)):
            queued.refusals.setdefault(chunk, Refusal.CANCELLED)
        return oks

    def _end_store(self, queued: QueuedJob, chunk: int, done: bool) -> bool:
        ok = done and not queued.is_cancelled
        name, rank, blocks = queued.name(chunk), queued.worker.hello.rank, queued.blocks(chunk)
        state = self._keeper.end_store(name, rank, ok, None, blocks)
        if ok and state is SlotState.EMPTY:
            queued.refusals[chunk] = Refusal.POISONED
        return ok

    def _abandon(self, queued: QueuedJob, chunks: Sequence[int]) -> None:
        """End admitted chunks of which nobody knows whether they were copied."""
        if queued.direction is Direction.LOAD:
            self._keeper.end_loads(map(queued.name, chunks))
            return
        for chunk in chunks:
            self._end_store(queued, chunk, done=False)
