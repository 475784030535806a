"""vLLM's offloading scheduler after an exception inside of it.

An exception leaves its tables half changed: jobs that are made up but never sent, jobs that have
ended but are waited for, blocks that are free but still read. Here the jobs that are left are the
truth, and all else is derived from them anew. A request whose state may be wrong neither loads nor
stores until it ends.

All of it runs on EngineCore's scheduler thread, for a hook that has failed: plain steps that call
nobody.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)

from raykv.base import guard
from raykv.base.ids import Key
from raykv.vllm.internals.offloading import OffloadJob, SchedulerTables
from raykv.vllm.manager import RayOffloadingManager


class Mender:
    """See the module's docstring.

    Args:
        tables: of vLLM's offloading scheduler.
        manager: ours, below it.
    """

    def __init__(self, tables: SchedulerTables, manager: RayOffloadingManager) -> None:
        self._tables = tables
        self.manager = manager
        # Jobs from this one on have not gone out to the workers.
        self._first_unsent = 0
        self._failures = guard.failures.total()

    def adopt(self, request: Any) -> None:
        """Make a request known that could not be accepted; it neither loads nor stores."""
        self.manager.barred.add(request.request_id)
        self._tables.adopt(request)

    def put_aside(self, request: Any) -> None:
        """A new request has the id of an earlier one, if vLLM leaves ids as clients give them: it
        has nothing of what was allowed to that one, or forbidden.
        """
        earlier = self._tables.put_aside(request)
        if earlier is None:
            return
        if not earlier.is_signaled:
            earlier.is_signaled = True
            self.manager.on_request_finished(earlier.context)
        self.manager.barred.discard(request.request_id)

    def give_up_load(self, request_id: str) -> None:
        """The load of a request that has its blocks already is given up; its tokens are computed.

        Stores may still read some of those blocks, and no table may say so.
        """
        self.manager.barred.add(request_id)
        made_up = self._tables.loads_of(request_id)
        for job_id, job in self._unsent().items():
            if job.request_id == request_id and not job.is_store:
                made_up.append(job_id)
        for job_id in made_up:
            self._drop(job_id)
        self._flush_stores()
        self.mend()

    def give_up_step(
        self, output: Any, *, may_load: bool
    ) -> tuple[OffloadingConnectorMetadata, list[str]]:
        """End a step whose metadata could not be made up. What it was to store is not stored, and
        each copy of a store under way is waited for: its blocks may be loaded into, or computed, in
        this step.

        Returns what goes out with it all the same, loads and stores that are to be waited for, and
        the requests whose loads go to nobody.

        Args:
            output: vLLM's `SchedulerOutput`.
            may_load: whether loads that are made up go out.
        """
        tables = self._tables
        loads = dict(tables.loads) if may_load else {}
        lost = {i: job for i, job in self._unsent().items() if i not in loads}
        for job_id in lost:
            self._drop(job_id)
        # Their blocks may never have been noted, or may belong to others now.
        self.manager.barred.update(output.num_scheduled_tokens)
        for request_id, request in tables.known_requests().items():
            if request.has_blocks and not request.is_signaled:
                self.manager.barred.add(request_id)
        for request_id in tables.ended(output):
            if (known := tables.find(request_id)) is not None:
                known.is_signaled = True
                self.manager.on_request_finished(known.context)
        self._flush_stores()
        self.mend()
        flushed = set(tables.flushed)
        tables.loads, tables.flushed, tables.allocated = {}, set(), set()
        stranded = [job.request_id for job in lost.values() if not job.is_store]
        return OffloadingConnectorMetadata(loads, {}, flushed), stranded

    def end_step(self, output: Any) -> None:
        """The metadata of a step go out."""
        self._first_unsent = self._tables.next_job
        if barred := self.manager.barred:
            barred.difference_update(self._tables.ended(output))
            barred &= self._tables.requests.keys()
        if guard.failures.total() != self._failures:
            self.mend()

    def end_jobs(self, job_ids: Collection[int], failed_loads: Iterable[str]) -> None:
        """Jobs have ended in an unknown way; requests whose load has failed are computed."""
        self.manager.barred.update(failed_loads)
        for job_id in job_ids:
            self._drop(job_id)
            self._tables.fence.pop(job_id, None)
        self.mend()

    def end_reset(self) -> None:
        """A reset was interrupted; what it has begun to clear is not found from now on."""
        self.manager.view.look(time.monotonic())
        self.mend()

    def _unsent(self) -> dict[int, OffloadJob]:
        jobs = self._tables.known_jobs()
        return {job_id: job for job_id, job in jobs.items() if job_id >= self._first_unsent}

    def _drop(self, job_id: int) -> None:
        """Another rank may still be copying: that is waited for before its blocks are reused."""
        job = self._tables.pop_job(job_id)
        if job is not None and job.is_store:
            self._tables.flushed.add(job_id)

    def _flush_stores(self) -> None:
        jobs = self._tables.known_jobs()
        stores = [job_id for job_id, job in jobs.items() if job.is_store]
        self._tables.flushed.update(stores)

    def mend(self) -> None:
        """Derive from the jobs that are left what should have become of everything else."""
        self._failures = guard.failures.total()
        requests, first = self._tables.known_requests(), self._tables.first_job
        for job_id, job in self._tables.known_jobs().items():
            if job_id < first or job.request_id not in requests:
                self._drop(job_id)
        jobs = self._tables.known_jobs()
        for request in requests.values():
            request.jobs.clear()
        for job_id, job in jobs.items():
            requests[job.request_id].jobs.add(job_id)
        for request_id, request in requests.items():
            if request.is_signaled and not request.jobs:
                del self._tables.requests[request_id]
        if self._tables.loading is not None:
            loads = (job.keys for job in jobs.values() if not job.is_store)
            self._tables.loading = set().union(*loads)
        self._tables.fences = self._fences()
        flying = (Key(key) for job in jobs.values() if job.is_store for key in job.keys)
        self.manager.view.keep_stores(flying)

    def _fences(self) -> dict[int, set[int]]:
        """Blocks that stores read and vLLM may give to another request, as vLLM keeps them."""
        fences: dict[int, set[int]] = {}
        requests = self._tables.known_requests()
        for job_id, job in self._tables.known_jobs().items():
            blocks = [*(job.fenced or ())]
            if requests[job.request_id].request.is_finished():
                blocks += job.fenced_at_end or ()
            for block in blocks:
                fences.setdefault(block, set()).add(job_id)
        return fences
