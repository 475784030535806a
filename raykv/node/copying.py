"""From a queued job to copied chunks: each is admitted, copied with others, and reported to the
pool.

    admit some chunks ──► copy them ──► each of them: READY, or a refusal ──► the next ones
            │ refused         ▲
            └──► left out     └── before it: loads go first; a device has them before the end of
                                  those in front of them is awaited

The loads of a message are admitted when it comes (`Jobs.announce`), stores as the copy gets
to them.

Invariants, whatever goes wrong:

1. Bytes of a chunk move only between its admission and its end (`PoolKeeper.end_chunks`). What has
   not ended here is ended by who carried the job out (`AdmittedJob.under_way`), exactly once.
2. The cancel word and the worker's death are looked at before every run of a copy, and again
   before chunks become READY, or some count as loaded.
3. A chunk that is refused is left out and spoils no other. A copy that is stopped, or of which a
   call fails, spoils the chunks that are copied with it and those behind them.
4. No byte of what a slot held before is in a READY chunk: what a store leaves out of it is zero.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing

from raykv.base.ids import Direction, Refusal, Slot, group_of
from raykv.copy.engine import HOST, HOST_SPAN_BYTES, SPAN_BYTES
from raykv.copy.plan import CopyRuns, JobPlan, PlanError
from raykv.copy.rows import RowCopier
from raykv.node.attached import QueuedJob
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.pool.jobs import AdmittedJob
from raykv.protocol.worker import JobResults

FIRST_BYTES = 8 << 20
"""Of the chunks that are admitted before a device has anything to copy; it takes 0.15 ms for them,
in which the next ones are admitted."""


class Copying:
    """Carries out jobs, one at a time in each thread that calls.

    Args:
        keeper: the pool.
        integrity: compares some of what is loaded.
        rows: copies within the host's memory.
        give_way: lets loads go first; called before each part of a copy.
    """

    def __init__(
        self,
        keeper: PoolKeeper,
        integrity: Integrity,
        rows: RowCopier,
        give_way: Callable[[QueuedJob], None],
    ) -> None:
        self._keeper = keeper
        self._integrity = integrity
        self._rows = rows
        self._give_way = give_way

    def carry_out(self, queued: QueuedJob) -> int:
        """Copy what a job is about; what fails is refused. Returns the bytes copied.

        Raises:
            PlanError: the job is malformed; nothing was copied.
            Exception: a copy failed; chunks that were not refused may or may not have been copied.
        """
        if queued.stop():
            queued.admitted.refuse_rest(Refusal.CANCELLED)
            return 0
        job = queued.admitted
        plan = queued.worker.planner.plan(job.job)
        _check_sizes(queued, plan)
        copy = self._copy_by_layer if job.job.by_layer else self._copy_in_parts
        num_bytes = copy(queued, plan)
        # It was stopped before.
        left = [at for at, found in enumerate(job.chunks) if found is None or at in job.under_way]
        self._end(queued, left, done=False)
        return num_bytes

    def _copy_in_parts(self, queued: QueuedJob, plan: JobPlan) -> int:
        num_bytes = 0
        # Chunks of the parts that the back end has taken, until they end.
        begun: deque[list[int]] = deque()
        backend = queued.worker.backend(self._keeper.pool.address, self._rows)
        parts = self._parts(queued, plan, begun)
        with closing(backend.copy_each(queued.direction, parts, queued.stop)) as answers:
            for done in answers:
                if not begun:
                    # It was stopped before anything was asked for.
                    break
                ended = begun.popleft()
                if self._end(queued, ended, done):
                    num_bytes += sum(map(plan.bytes_of, ended))
        return num_bytes

    def _parts(
        self, queued: QueuedJob, plan: JobPlan, begun: deque[list[int]]
    ) -> Iterator[CopyRuns]:
        """The parts to copy; `begun` gets the chunks of each. They are admitted when the back end
        asks for their part.
        """
        is_host_store = queued.lane == (HOST, Direction.STORE)
        most_bytes = HOST_SPAN_BYTES if is_host_store else SPAN_BYTES
        part_bytes = min(FIRST_BYTES, most_bytes)
        last = 0
        while (first := last) < len(plan.ends):
            end = part_bytes + (plan.ends[first - 1] if first else 0)
            last = max(first + 1, bisect_right(plan.ends, end, first))
            part_bytes = most_bytes
            admitted = self._admit(queued, range(first, last))
            if admitted:
                self._give_way(queued)
                begun.append(admitted)
                slots = _slots_of(queued.admitted, admitted)
                yield plan.runs(admitted, slots, self._keeper.geometry.slab_bytes)

    def _copy_by_layer(self, queued: QueuedJob, plan: JobPlan) -> int:
        """Copy all chunks layer by layer; the worker learns of each layer."""
        job = queued.admitted
        admitted = self._admit(queued, range(len(job.keys)))
        if not admitted:
            return 0
        backend = queued.worker.backend(self._keeper.pool.address, self._rows)
        layers = plan.layers(admitted, _slots_of(job, admitted), self._keeper.geometry.slab_bytes)
        done = True
        with closing(backend.copy_each(queued.direction, layers, queued.stop)) as answers:
            for number, done in enumerate(answers, start=1):
                if done:
                    queued.worker.send(JobResults([], {job.job.job_id: number}))
        return sum(map(plan.bytes_of, admitted)) if self._end(queued, admitted, done) else 0

    def _admit(self, queued: QueuedJob, chunks: Sequence[int]) -> list[int]:
        """Chunks whose bytes may be copied now; the others have their refusals."""
        job = queued.admitted
        if not job.is_load:
            self._keeper.begin_chunks(job, chunks)
            admitted = [at for at in chunks if at in job.under_way]
            self._blank(queued, admitted)
            return admitted
        for at in [at for at in chunks if at in job.under_way]:
            refusal = self._integrity.objection(job.under_way[at], queued.stop)
            if refusal:
                self._keeper.end_chunks(job, (at,), ok=False)
                job.chunks[at] = refusal
        return [at for at in chunks if at in job.under_way]

    def _blank(self, queued: QueuedJob, chunks: Sequence[int]) -> None:
        """Overwrite what the store of admitted chunks leaves as it was: blocks that are not there
        in this rank's part of the slot, and behind the last rank's part what no rank has.
        """
        job, hello, planner = queued.admitted, queued.worker.hello, queued.worker.planner
        for at in chunks:
            if not planner.is_whole(job.blocks[at]):
                for offset, size in planner.left_out(job.job, at, job.under_way[at].slot).tolist():
                    ctypes.memset(self._keeper.pool.address + offset, 0, size)
        if hello.rank < hello.num_ranks - 1:
            return
        sizes = hello.slot_bytes
        ends = {group_id: planner.chunk_bytes(group_id, hello.num_ranks) for group_id in sizes}
        # Mostly slots end there, too.
        for at in chunks if ends != sizes else ():
            record = job.under_way[at]
            end = ends[group_of(record.key)]
            if end < record.slot_bytes:
                self._keeper.bytes_of(record)[end:] = 0

    def _end(self, queued: QueuedJob, chunks: Sequence[int], done: bool) -> bool:
        """End admitted chunks, whose copy is done or was stopped; False: they have failed."""
        ok = done and not queued.stop()
        self._keeper.end_chunks(queued.admitted, chunks, ok=ok)
        if not ok:
            for at in chunks:
                queued.admitted.chunks[at] = Refusal.CANCELLED
        return ok


def _slots_of(job: AdmittedJob, numbers: Sequence[int]) -> list[Slot]:
    """The slots of chunks of a job that were admitted."""
    return [job.under_way[at].slot for at in numbers]


def _check_sizes(queued: QueuedJob, plan: JobPlan) -> None:
    """Refuse a job whose chunks do not have the size of the slots that the engine has named.

    Raises:
        PlanError: with the sizes.
    """
    sizes, known = queued.admitted.sizes, queued.worker.hello.slot_bytes
    for group_id in plan.groups if sizes else ():
        if sizes.get(group_id) != known[group_id]:
            raise PlanError(
                f"slots of KV group {group_id} have {sizes.get(group_id)} bytes for the engine, "
                f"and {known[group_id]} for its worker"
            )
