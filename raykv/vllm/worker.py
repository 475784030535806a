"""RayKV on vLLM's worker side: jobs to the NodeActor, and failed loads reported as what they are.

All methods run on the worker's main thread; the link's thread does the talking.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import TransferResult

from raykv.base.guard import guarded
from raykv.base.ids import Direction
from raykv.engine.lines import WorkerReport
from raykv.protocol.measures import BreakerReport
from raykv.vllm import kv_form, transfers
from raykv.vllm.identity import adapters, weight_watch
from raykv.vllm.identity.placement import HostNode
from raykv.vllm.internals.offloading import WorkerTables

logger = logging.getLogger("raykv")

_NOTHING_ENDED = transfers.RayKVWorkerMetadata()

NO_LINE = WorkerReport(0, BreakerReport())
"""Of a worker that reaches no NodeActor."""


class RayKVConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker side, which takes failed transfers instead of asserting that there are none."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        self._vllm = WorkerTables(self)
        self._meta = transfers.RayKVWorkerMetadata()
        self._is_durable = spec.settings.durable_stores
        # The life of the place, as the engine knows it, and how often the line had failed by then;
        # and what was reported of the line, last the life of the place in which it had failed.
        self._place_life = self._failed_before = 0
        self._reported_line = (0, 0, 0, 0, "")
        # Of a rank on a further host than EngineCore's.
        self.host: HostNode | None = None
        # Else a request can't go on from a block that did not come: with several KV groups block
        # ids are ambiguous, and before a window there is nothing. Then it is reported as a whole.
        self._by_request = not kv_form.keeps_every_block(kv_cache_config)
        self._invalid_block_ids: set[int] = set()
        self._failed_recving: set[str] = set()
        self._stranded: set[str] = set()
        # Requests whose load has ended, and jobs that have ended, until vLLM has fetched them.
        self._received: set[str] = set()
        self._results: deque[TransferResult] = deque()
        self._adapters = adapters.LoadedAdapters()
        self._weights = weight_watch.WeightWatch()
        # What of them was noticed, and whether the names of this step's chunks stand for them.
        self._noticed = 0
        self._are_named = True
        # Requests that have ended; what was computed for them may still be offered in this step.
        self._ended: set[str] = set()

    def watch(self, vllm_config: Any) -> None:
        """See from now on what vLLM's worker with this configuration makes of its weights."""
        self._adapters = adapters.watch_loads(vllm_config.lora_config)
        self._weights = weight_watch.watch_worker(vllm_config)
        self._weights.before_sleep = self.store_before_sleep

    @property
    def raykv(self) -> transfers.RayOffloadingWorker | None:
        """RayKV's worker, once there is a KV cache."""
        worker = self.worker
        return worker if isinstance(worker, transfers.RayOffloadingWorker) else None

    def _refuse_step(self, metadata: transfers.RayKVConnectorMetadata) -> None:
        """Do none of the jobs of a step that is not fully known, and wait for none."""
        self._stranded.update(metadata.stranded)
        self._invalid_block_ids.update(metadata.stranded_blocks)
        self.refuse_submissions(metadata)
        self.refuse_stores(metadata)
        metadata.load_jobs.clear()
        metadata.store_jobs.clear()

    @guarded(_refuse_step)
    def take_metadata(self, metadata: transfers.RayKVConnectorMetadata) -> None:
        """Learn from this step's metadata where the NodeActor is, and which requests are lost.

        It comes before anything else of the step.
        """
        self._look_at_weights(metadata.weights_seen)
        if self.raykv is not None:
            self.raykv.set_target(metadata.target_of(self.spec.config.parallel.rank))
        place = 0 if self.raykv is None else self.raykv.place
        place_life = metadata.place_lives[place] if metadata.place_lives else 0
        if place_life != self._place_life:
            self._place_life = place_life
            self._failed_before = self._line_report().breakers.failed
        self._adapters.end(self._ended)
        self._ended.clear()
        self._stranded.update(metadata.stranded)
        self._invalid_block_ids.update(metadata.stranded_blocks)
        metadata.stranded.clear()
        metadata.stranded_blocks.clear()
        self._note_loads(metadata)

    def _note_loads(self, metadata: Any) -> None:
        """The step's loads, before any of them is submitted."""

    def _flush_bare(self, metadata: OffloadingConnectorMetadata) -> None:
        """What has not begun to read the blocks that vLLM is about to reuse does not begin."""
        self._refuse_unsubmitted()
        if metadata.jobs_to_flush and self.raykv is not None:
            late = {i: job for i, job in metadata.store_jobs.items() if i in metadata.jobs_to_flush}
            self.refuse_stores(replace(metadata, store_jobs=late))
            for job_id in late:
                del metadata.store_jobs[job_id]
            self.raykv.wait(metadata.jobs_to_flush)

    @guarded(_flush_bare)
    def handle_preemptions(self, kv_connector_metadata: transfers.RayKVConnectorMetadata) -> None:
        if kv_connector_metadata.jobs_to_flush:
            self._refuse_unfit_stores(kv_connector_metadata)
        if self._vllm.unsubmitted and self.raykv is not None:
            # vLLM would submit them one by one.
            self._submit_left(self.raykv)
        super().handle_preemptions(kv_connector_metadata)

    def _refuse_unsubmitted(self) -> None:
        """Let the stores of the last step fail that have not been submitted."""
        for job_id, blocks, pool in self._vllm.unsubmitted:
            if self.raykv is not None and not self.raykv.has(job_id):
                self.raykv.refuse(job_id, Direction.STORE, blocks, pool)
        self._vllm.unsubmitted.clear()

    @guarded(lambda self: self._refuse_unsubmitted())
    def store_before_sleep(self) -> None:
        """Submit what was left to the next step: the memory that it lies in is about to be given
        back.
        """
        if self.raykv is not None:
            self._store_unsubmitted(self.raykv)

    def _store_unsubmitted(self, worker: transfers.RayOffloadingWorker) -> None:
        worker.finish(self._submit_left(worker))

    def _submit_left(self, worker: transfers.RayOffloadingWorker) -> set[int]:
        """Submit the stores of the last step, which are returned."""
        jobs = self._vllm.unsubmitted
        worker.submit_stores(jobs)
        job_ids = {job_id for job_id, _, _ in jobs}
        jobs.clear()
        return job_ids

    def refuse_submissions(self, metadata: OffloadingConnectorMetadata) -> None:
        """Let all jobs fail that should have been submitted in this step, and were not."""
        self._refuse_unsubmitted()
        for job_id, job in metadata.load_jobs.items():
            self._vllm.loads[job_id] = job.req_id
            if self.raykv is not None and not self.raykv.has(job_id):
                self.raykv.refuse(job_id, Direction.LOAD, job.dst_spec, job.src_spec)

    def refuse_stores(self, metadata: OffloadingConnectorMetadata) -> None:
        """Let all stores fail that are neither submitted nor going to be."""
        waiting = {job_id for job_id, _, _ in self._vllm.unsubmitted}
        for job_id, job in metadata.store_jobs.items():
            if not self._vllm.is_store_writer:
                self._vllm.confirmed.completed_jobs[job_id] = 1
            elif self.raykv is not None and job_id not in waiting and not self.raykv.has(job_id):
                self.raykv.refuse(job_id, Direction.STORE, job.src_spec, job.dst_spec)

    def start_kv_transfers(self, metadata: transfers.RayKVConnectorMetadata) -> None:
        for job_id, job in list(metadata.load_jobs.items()):
            use = metadata.adapters.get(job.req_id)
            may_load = use is None or self._adapters.may_load(use)
            if self.raykv is not None and not (self._are_named and may_load):
                # Last: what is left in it has no end yet.
                self._vllm.loads[job_id] = job.req_id
                self.raykv.refuse(job_id, Direction.LOAD, job.dst_spec, job.src_spec)
                del metadata.load_jobs[job_id]
        super().start_kv_transfers(metadata)

    def _look_at_weights(self, seen: Mapping[str, int]) -> None:
        """Once they have changed, what is being loaded is no good, and what follows has no name
        until the engine knows of it.
        """
        watch = self._weights
        if watch.count != self._noticed:
            self._noticed = watch.count
            if self.raykv is not None:
                self.raykv.distrust_loads()
        self._are_named = seen.get(watch.name, 0) == watch.count
        if not self._are_named:
            self._meta.weights[watch.name] = watch.count, watch.what

    def _refuse_unfit_stores(self, metadata: transfers.RayKVConnectorMetadata) -> None:
        """Of requests that were not computed with the weights, and the adapter, of their keys."""
        if not (metadata.store_jobs and self._vllm.is_store_writer) or self.raykv is None:
            return
        for job_id, job in list(metadata.store_jobs.items()):
            use = metadata.adapters.get(job.req_id)
            may_store = use is None or self._adapters.may_store(job.req_id, use)
            if not (self._are_named and may_store):
                self.raykv.refuse(job_id, Direction.STORE, job.src_spec, job.dst_spec)
                del metadata.store_jobs[job_id]

    def prepare_store_kv(self, metadata: transfers.RayKVConnectorMetadata) -> None:
        """See `OffloadingConnectorWorker.prepare_store_kv`.

        With `durable_stores` the stores of this step are not left to the next one, and have ended
        when this returns: in the pool, or failed. What vLLM offers only after an answer, since it
        has no name before, comes with the next step.
        """
        self._adapters.begin(metadata.beginning)
        self._refuse_unfit_stores(metadata)
        super().prepare_store_kv(metadata)
        if self._is_durable and self.raykv is not None and self._vllm.unsubmitted:
            self._store_unsubmitted(self.raykv)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `OffloadingConnectorWorker.get_finished`; every job ends, failed or not."""
        self._ended |= finished_req_ids
        if self._stranded:
            self._receive_stranded()
        self._results += self.worker.get_finished() if self.worker is not None else []
        while self._results:
            self._take_end(self._results.popleft())
        return set(), self._take_received()

    def end_badly(self) -> set[str]:
        """Take the results of a step that were not understood, as failures; whose loads ended."""
        self._receive_stranded()
        self._results += [] if self.raykv is None else self.raykv.give_up()
        for result in self._results:
            self._take_end_badly(result)
        self._results.clear()
        return self._take_received()

    def _receive_stranded(self) -> None:
        """Requests without a load have received theirs, which has failed."""
        self._received |= self._stranded
        self._failed_recving |= self._stranded
        self._stranded.clear()

    def _take_received(self) -> set[str]:
        received, self._received = self._received, set()
        return received

    def _take_end_badly(self, result: TransferResult) -> None:
        """A job has ended, as what is not known: as a failure. Of a store the NodeActor's listing
        tells.
        """
        self._meta.mark_completed(result.job_id)
        request_id = self._vllm.loads.pop(result.job_id, None)
        if request_id is not None:
            self._end_load_badly(result.job_id, request_id)

    def _end_load_badly(self, job_id: int, request_id: str) -> None:
        del job_id
        self._meta.barred.add(request_id)
        self._failed_recving.add(request_id)
        self._received.add(request_id)

    @guarded(_take_end_badly)
    def _take_end(self, result: TransferResult) -> None:
        request_id = self._vllm.loads.get(result.job_id)
        self._take_result(result, request_id)
        if request_id is not None:
            self._end_load(result.job_id, request_id)
        self._meta.mark_completed(result.job_id)
        self._vllm.loads.pop(result.job_id, None)

    def _end_load(self, job_id: int, request_id: str) -> None:
        del job_id
        self._received.add(request_id)

    def wait_for_layer(self, layer_name: str) -> None:
        """A layer is about to be computed: vLLM waits for loads between steps."""

    def distrust_loads(self) -> None:
        """Report as not loaded what is to be loaded in this step, whatever becomes of it."""

    def _take_result(self, result: TransferResult, request_id: str | None) -> None:
        assert isinstance(result, transfers.RayKVTransferResult), result
        stats = self._meta.transfer_stats
        if result.transfer_size and result.transfer_time is not None:
            direction = stats.store if request_id is None else stats.load
            direction.record(result.transfer_size, result.transfer_time)
        if result.end is not None:
            self._meta.ends.append(result.end)
        if result.success or request_id is None:
            return
        if self._by_request:
            self._failed_recving.add(request_id)
        else:
            self._invalid_block_ids.update(result.lost_blocks)

    def take_failed_recving(self) -> set[str]:
        """Requests that must be computed anew as a whole."""
        failed, self._failed_recving = self._failed_recving, set()
        return failed

    def take_invalid_block_ids(self) -> set[int]:
        """Blocks that were not loaded."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def take_meta(self) -> transfers.RayKVWorkerMetadata | None:
        """What has ended, and what else there was to report; it counts as reported."""
        # Of jobs with which this rank has nothing to do.
        if confirmed := self._vllm.confirmed.completed_jobs:
            self._meta.completed_jobs |= confirmed
            confirmed.clear()
        if self._meta == _NOTHING_ENDED:
            return None
        meta, self._meta = self._meta, transfers.RayKVWorkerMetadata()
        return meta

    @guarded(take_meta)
    def build_connector_worker_meta(self) -> transfers.RayKVWorkerMetadata | None:
        self._report_line(self._meta)
        self._meta.adapters |= self._adapters.take_news()
        return self.take_meta()

    def _line_report(self) -> WorkerReport:
        """With the Ray node of a further host, while there is no line."""
        worker = self.raykv
        line = NO_LINE if worker is None else worker.line_report()
        if self.host is None or line.life:
            return line
        return line._replace(node_id=self.host.now())

    def _report_line(self, meta: transfers.RayKVWorkerMetadata) -> None:
        """Only when it leads elsewhere, a breaker has opened or closed, or it has failed in another
        life of the place, not for every further failure.
        """
        line = self._line_report()
        breakers = line.breakers
        has_failed = breakers.failed > self._failed_before
        refused_by = self._place_life if has_failed else self._reported_line[3]
        gist = line.life, breakers.opened, len(breakers.rows), refused_by, line.node_id
        if gist != self._reported_line:
            meta.lines[self.spec.config.parallel.rank] = line
            self._reported_line = gist
