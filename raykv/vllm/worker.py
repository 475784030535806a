"""RayKV on vLLM's worker side: jobs to the NodeActor, and failed loads reported as what they are.

All methods run on the worker's main thread; the link's thread does the talking.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from raykv.actors.job_request import JobRequest
from raykv.actors.link import LinkTarget
from raykv.breaker_types import BreakerReport
from raykv.core.requests import FailedLoad
from raykv.deadlines import LINK_CLOSE_S
from raykv.messages import Handles, JobResult, KVLayout
from raykv.types import Direction, Epoch, Generation, Key, Refusal
from raykv.vllm.adapters import AdapterUse, LoadedAdapters, watch_loads
from raykv.vllm.guard import guarded, report
from raykv.vllm.kv_form import kv_form_of
from raykv.vllm.layered import refuse_layerwise
from raykv.vllm.links import ALL_LAYERS, Link
from raykv.vllm.spec import PoolSpec, RayKVOffloadingSpec
from raykv.vllm.weight_changes import WeightWatch, watch_worker

logger = logging.getLogger("raykv")


@dataclass(frozen=True)
class FailedChunk:
    """One chunk of a job that did not happen, and the vLLM blocks that it was about."""

    key: bytes
    generation: int
    refusal: Refusal
    block_ids: list[int]


@dataclass
class RayKVTransferResult(TransferResult):
    """vLLM's result, with what failed chunk by chunk."""

    direction: Direction = Direction.STORE
    node_epoch: int = 0
    failed: list[FailedChunk] = field(default_factory=list)


@dataclass
class RayKVWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, with what failed; see `RayOffloadingManager.take_failures`.

    `node_epochs` has the epoch of the NodeActor that each rank reaches, 0 for none; `lines` what
    each says of its breaker, when that has changed. `adapters` have been loaded since the last
    step, by id, with the digests of their contents; empty where the ranks have not loaded the same.
    `weights_changed` says by what, once; empty: they have not.
    """

    failed_loads: list[FailedLoad] = field(default_factory=list)
    failed_stores: list[tuple[bytes, int]] = field(default_factory=list)
    node_epochs: dict[int, int] = field(default_factory=dict)
    lines: dict[int, BreakerReport] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)
    weights_changed: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RayKVWorkerMetadata:
        """See `OffloadingWorkerMetadata.aggregate`."""
        assert isinstance(other, OffloadingWorkerMetadata), other
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata), base
        merged = RayKVWorkerMetadata(base.completed_jobs, base.transfer_stats)
        for part in (self, other):
            if isinstance(part, RayKVWorkerMetadata):
                merged.failed_loads += part.failed_loads
                merged.failed_stores += part.failed_stores
                merged.node_epochs.update(part.node_epochs)
                merged.lines.update(part.lines)
                merged.weights_changed = merged.weights_changed or part.weights_changed
                for name, digest in part.adapters.items():
                    same = merged.adapters.get(name, digest) == digest
                    merged.adapters[name] = digest if same else ""
        return merged


@dataclass
class RayKVConnectorMetadata(OffloadingConnectorMetadata):
    """vLLM's metadata, with where the NodeActor is.

    `stranded` are requests that vLLM has put to wait for a load that was never made up; the
    workers report them as failed. `stranded_blocks`: the same where vLLM does not wait.
    `adapters` are those of the requests with jobs; `beginning`: of those computed first in this
    step. `weights_changed`: at some time before this step.
    """

    target: LinkTarget | None = None
    stranded: list[str] = field(default_factory=list)
    stranded_blocks: list[int] = field(default_factory=list)
    adapters: dict[str, AdapterUse] = field(default_factory=dict)
    beginning: dict[str, AdapterUse] = field(default_factory=dict)
    weights_changed: bool = False


class RayOffloadingWorker(OffloadingWorker):
    """Turns vLLM's transfer specs into copy jobs of the node's NodeActor."""

    def __init__(self, link: Link, layout: KVLayout) -> None:
        """Send jobs through `link`; `layout` is that of the memory that the NodeActor maps."""
        self._layout = layout
        self._link = link
        self._flying: dict[int, JobRequest] = {}
        # Loads come layer by layer, and a step waits for them.
        self.by_layer = False
        # Captures under way, and those that have ended.
        self._captures: set[int] = set()
        self._captured: list[JobResult] = []
        # Loads under way whose bytes are of no use any more.
        self._distrusted: set[int] = set()
        # Results of jobs that could not even be made up.
        self._stillborn: list[RayKVTransferResult] = []

    @property
    def layout(self) -> KVLayout:
        """Of the memory that the NodeActor maps."""
        return self._layout

    @property
    def node_epoch(self) -> int:
        """Epoch of the NodeActor that is reached; 0 for none."""
        return self._link.node_epoch

    def breaker_report(self) -> BreakerReport:
        """Whether the NodeActor is left alone."""
        return self._link.breaker_report()

    def set_target(self, target: LinkTarget | None) -> None:
        """Where the NodeActor is; None leaves it as it was."""
        if target is not None:
            self._link.set_target(target)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec, **_later: Any
    ) -> bool:
        """See `OffloadingWorker.submit_store`; always True, failures come as results.

        `_later` takes the arguments that later versions of vLLM add, which have defaults.
        """
        return self._submit(job_id, Direction.STORE, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec, **_later: Any
    ) -> bool:
        """See `OffloadingWorker.submit_load` and, for `_later`, `submit_store`."""
        return self._submit(job_id, Direction.LOAD, dst_spec, src_spec)

    def _submit(
        self, job_id: int, direction: Direction, blocks: GPULoadStoreSpec, pool: LoadStoreSpec
    ) -> bool:
        try:
            assert isinstance(pool, PoolSpec), pool
            request = job_request(job_id, direction, blocks, pool, self._layout)
            if self.by_layer and direction is Direction.LOAD:
                request = replace(request, by_layer=True)
            if request.torn and not request.handles:
                self._stillborn.append(_all_failed(job_id, direction, blocks, pool))
                return True
        except Exception:
            report("RayOffloadingWorker.submit")
            self._stillborn.append(_all_failed(job_id, direction, blocks, pool))
            return True
        self._link.submit(request)
        self._flying[job_id] = request
        return True

    def refuse(
        self, job_id: int, direction: Direction, blocks: GPULoadStoreSpec, pool: LoadStoreSpec
    ) -> None:
        """Let a job fail that must not be; its chunks are not to blame."""
        failed = _all_failed(job_id, direction, blocks, pool)
        failed.node_epoch = 0
        self._stillborn.append(failed)

    def distrust_loads(self) -> None:
        """Have the loads that are under way end as failed, whatever becomes of them."""
        flying = self._flying.items()
        self._distrusted |= {i for i, job in flying if job.direction is Direction.LOAD}

    def submit_capture(self, request: JobRequest) -> None:
        """Have states copied; how that ends comes through `take_captured`."""
        self._captures.add(request.job_id)
        self._link.submit(request)

    def take_captured(self) -> list[JobResult]:
        """Captures that `get_finished` has found to have ended."""
        captured, self._captured = self._captured, []
        return captured

    def get_finished(self) -> list[TransferResult]:
        """See `OffloadingWorker.get_finished`; results are `RayKVTransferResult`."""
        results: list[TransferResult] = list(self._stillborn)
        self._stillborn.clear()
        for result in self._link.drain():
            if result.job_id in self._captures:
                self._captures.remove(result.job_id)
                self._captured.append(result)
                continue
            request = self._flying.pop(result.job_id, None)
            if request is None:
                continue
            if result.job_id in self._distrusted:
                self._distrusted.remove(result.job_id)
                results.append(_distrusted(request))
            else:
                results.append(_transfer_result(request, result))
        return results

    def finish(self, job_ids: set[int]) -> None:
        """Wait for jobs to end; within the flush deadline and its grace."""
        self._link.finish(job_ids)

    def wait(self, job_ids: set[int]) -> None:
        """See `OffloadingWorker.wait`; ends within the flush deadline and its grace."""
        self._link.wait(job_ids)

    def wait_layers(self, job_ids: Collection[int], count: int) -> None:
        """Wait for so many layers of loads, or their ends; they have their own deadlines."""
        self._link.wait_layers(job_ids, count)

    def is_flying(self, job_id: int) -> bool:
        """Whether the job has no result yet."""
        return job_id in self._flying

    def shutdown(self) -> None:
        """See `OffloadingWorker.shutdown`."""
        self._link.close(LINK_CLOSE_S)


def job_request(
    job_id: int,
    direction: Direction,
    blocks: GPULoadStoreSpec,
    pool: PoolSpec,
    layout: KVLayout,
) -> JobRequest:
    """Which of vLLM's blocks belong to which chunk.

    vLLM lists the blocks group by group; within a group they follow each other in the request,
    beginning at the logical block `block_indices[g]`, which may lie inside of a chunk. Chunks that
    are left out of a store leave no gap in the list, and neither do null blocks: those before the
    first one are told by its index, and where there are others, nobody can say which block belongs
    where. Such a group's chunks are `torn`.
    """
    per_chunk = layout.blocks_per_chunk
    groups: list[int] = []
    counts: list[int] = []
    firsts: list[int] = []
    torn: list[bool] = []
    columns = zip(layout.group_ids, blocks.group_sizes, blocks.block_indices, strict=True)
    for group_id, size, index in columns:
        if not size:
            continue
        skip = index % per_chunk
        first = min(size, per_chunk - skip)
        whole, last = divmod(size - first, per_chunk)
        added = [first, *[per_chunk] * whole, *[last] * (last > 0)]
        counts += added
        firsts += [skip, *[0] * (len(added) - 1)]
        groups += [group_id] * len(added)
        # Only whole chunks are stored: their last block is there, or they would not be offered.
        torn += [direction is Direction.STORE and (skip + size) % per_chunk != 0] * len(added)
    assert len(groups) == len(pool.keys), (len(groups), len(pool.keys), job_id)
    whole_job = JobRequest(
        job_id=job_id,
        direction=direction,
        node_epoch=pool.node_epoch,
        handles=Handles(pool.keys, pool.slots, pool.generations),
        groups=groups,
        num_blocks=counts,
        first_block=firsts,
        block_ids=blocks.block_ids.tolist(),
    )
    return _without(whole_job, torn) if any(torn) else whole_job


def _without(request: JobRequest, torn: Sequence[bool]) -> JobRequest:
    """A job but for some of its chunks."""
    starts = [0, *accumulate(request.num_blocks)]
    kept = [chunk for chunk, is_torn in enumerate(torn) if not is_torn]
    block_ids = [request.block_ids[starts[chunk] : starts[chunk + 1]] for chunk in kept]
    return replace(
        request,
        handles=_some(request.handles, kept),
        groups=[request.groups[chunk] for chunk in kept],
        num_blocks=[request.num_blocks[chunk] for chunk in kept],
        first_block=[request.first_block[chunk] for chunk in kept],
        block_ids=[*chain.from_iterable(block_ids)],
        torn=_some(request.handles, [chunk for chunk, is_torn in enumerate(torn) if is_torn]),
    )


def _some(handles: Handles, chunks: Sequence[int]) -> Handles:
    return Handles(
        [handles.keys[chunk] for chunk in chunks],
        [handles.slots[chunk] for chunk in chunks],
        [handles.generations[chunk] for chunk in chunks],
    )


def _use_of(metadata: OffloadingConnectorMetadata, request_id: str) -> AdapterUse | None:
    is_ours = isinstance(metadata, RayKVConnectorMetadata)
    return metadata.adapters.get(request_id) if is_ours else None


def _transfer_result(request: JobRequest, result: JobResult) -> RayKVTransferResult:
    starts = [0, *accumulate(request.num_blocks)] if result.failed_chunks else []
    failed = [
        FailedChunk(
            key=request.handles.keys[chunk],
            generation=request.handles.generations[chunk],
            refusal=Refusal(refusal),
            block_ids=request.block_ids[starts[chunk] : starts[chunk + 1]],
        )
        for chunk, refusal in zip(result.failed_chunks, result.refusals, strict=True)
    ]
    failed += [
        FailedChunk(key, generation, Refusal.COPY_FAILED, [])
        for key, generation in zip(request.torn.keys, request.torn.generations, strict=True)
    ]
    return RayKVTransferResult(
        job_id=result.job_id,
        success=not failed,
        transfer_size=result.num_bytes,
        transfer_time=result.seconds,
        direction=request.direction,
        node_epoch=request.node_epoch,
        failed=failed,
    )


def _distrusted(request: JobRequest) -> RayKVTransferResult:
    """The result of a load whose bytes are of no use; its chunks are not to blame."""
    chunks = list(range(len(request.handles.keys)))
    refusals = [int(Refusal.CANCELLED)] * len(chunks)
    ended = JobResult(request.job_id, 0, 0.0, chunks, refusals)
    failed = _transfer_result(request, ended)
    failed.node_epoch = 0
    return failed


def _all_failed(
    job_id: int, direction: Direction, blocks: GPULoadStoreSpec, pool: Any
) -> RayKVTransferResult:
    """The result of a job that could not be made up: nothing of it happened."""
    keys = list(getattr(pool, "keys", [b""])) or [b""]
    generations = list(getattr(pool, "generations", [0])) or [0]
    every_block = blocks.block_ids.tolist()
    failed = [
        FailedChunk(key, generation, Refusal.COPY_FAILED, every_block)
        for key, generation in zip(keys, generations, strict=True)
    ]
    node_epoch = int(getattr(pool, "node_epoch", 0))
    return RayKVTransferResult(job_id, False, 0, 0.0, direction, node_epoch, failed)


class RayKVConnectorWorker(OffloadingConnectorWorker):
    """vLLM's worker side, which takes failed transfers instead of asserting that there are none."""

    def __init__(self, spec: Any, vllm_config: Any, kv_cache_config: Any) -> None:
        super().__init__(spec, vllm_config, kv_cache_config)
        if isinstance(spec, RayKVOffloadingSpec) and spec.config.parallel.rank == 0:
            spec.tell_form = partial(kv_form_of, vllm_config, kv_cache_config, spec)
        self._meta = RayKVWorkerMetadata()
        self._is_durable = isinstance(spec, RayKVOffloadingSpec) and spec.settings.durable_stores
        self._is_layerwise = isinstance(spec, RayKVOffloadingSpec) and spec.settings.layerwise_loads
        if self._is_layerwise:
            refuse_layerwise(spec.settings, vllm_config, kv_cache_config)
        # With `layerwise_loads`: blocks of loads of this step whose end has not been seen.
        self._unseen: dict[int, list[int]] = {}
        # The layers that have waited for these loads.
        self._waited: set[str] = set()
        self._numbers: dict[str, int] | None = None
        self._reported_epoch = 0
        self._reported_line = BreakerReport()
        # With several KV groups block ids are ambiguous: then whole requests are reported.
        self._by_request = len(kv_cache_config.kv_cache_groups) > 1
        self._invalid_block_ids: set[int] = set()
        self._failed_recving: set[str] = set()
        self._stranded: set[str] = set()
        self._adapters = LoadedAdapters()
        self._weights = WeightWatch()
        self._has_left = False
        # Requests that have ended; what was computed for them may still be offered in this step.
        self._ended: set[str] = set()

    def watch(self, vllm_config: Any) -> None:
        """See from now on what vLLM's worker with this configuration makes of its weights."""
        self._adapters = watch_loads(vllm_config.lora_config)
        self._weights = watch_worker(vllm_config)

    @property
    def _raykv(self) -> RayOffloadingWorker | None:
        worker = self.worker
        return worker if isinstance(worker, RayOffloadingWorker) else None

    def take_metadata(self, metadata: Any) -> None:
        """Learn from this step's metadata where the NodeActor is, and which requests are lost.

        It comes before anything else of the step.
        """
        if isinstance(metadata, RayKVConnectorMetadata):
            if metadata.weights_changed:
                self._weights.note("told by the engine")
            self._leave_if_changed()
            if self._raykv is not None:
                self._raykv.set_target(metadata.target)
            self._stranded.update(metadata.stranded)
            metadata.stranded.clear()
            self._invalid_block_ids.update(metadata.stranded_blocks)
            metadata.stranded_blocks.clear()
            if self._is_layerwise:
                for job_id, load in metadata.load_jobs.items():
                    self._unseen[job_id] = load.dst_spec.block_ids.tolist()
                if self._raykv is not None:
                    self._raykv.by_layer = True
            self._adapters.end(self._ended)
            self._ended.clear()

    def handle_preemptions(self, kv_connector_metadata: OffloadingConnectorMetadata) -> None:
        """See `OffloadingConnectorWorker.handle_preemptions`."""
        if kv_connector_metadata.jobs_to_flush:
            self._refuse_stores(kv_connector_metadata)
        super().handle_preemptions(kv_connector_metadata)

    def start_kv_transfers(self, metadata: OffloadingConnectorMetadata) -> None:
        """See `OffloadingConnectorWorker.start_kv_transfers`."""
        for job_id, job in list(metadata.load_jobs.items()):
            use = _use_of(metadata, job.req_id)
            may_load = use is None or self._adapters.may_load(use)
            if self._raykv is not None and (self._has_left or not may_load):
                del metadata.load_jobs[job_id]
                self._load_jobs[job_id] = job.req_id
                self._raykv.refuse(job_id, Direction.LOAD, job.dst_spec, job.src_spec)
        super().start_kv_transfers(metadata)

    def _leave_if_changed(self) -> None:
        """Once the weights have changed, what was computed before is no good, nor what follows."""
        if self._weights.changed and not self._has_left:
            self._has_left = True
            self._meta.weights_changed = self._weights.changed
            if self._raykv is not None:
                self._raykv.distrust_loads()

    def _refuse_stores(self, metadata: OffloadingConnectorMetadata) -> None:
        """Of requests that were not computed with the weights, and the adapter, of their keys."""
        if not self._is_store_writer or self._raykv is None:
            return
        for job_id, job in list(metadata.store_jobs.items()):
            use = _use_of(metadata, job.req_id)
            may_store = use is None or self._adapters.may_store(job.req_id, use)
            if self._has_left or not may_store:
                del metadata.store_jobs[job_id]
                self._raykv.refuse(job_id, Direction.STORE, job.src_spec, job.dst_spec)

    def prepare_store_kv(self, metadata: OffloadingConnectorMetadata) -> None:
        """See `OffloadingConnectorWorker.prepare_store_kv`.

        With `durable_stores` the stores of this step are not left to the next one, and have ended
        when this returns: in the pool, or failed.
        """
        if isinstance(metadata, RayKVConnectorMetadata):
            self._adapters.begin(metadata.beginning)
            self._refuse_stores(metadata)
        super().prepare_store_kv(metadata)
        if not self._is_durable or self._raykv is None or not self._unsubmitted_store_jobs:
            return
        jobs = list(self._unsubmitted_store_jobs)
        self._unsubmitted_store_jobs.clear()
        for job_id, blocks, pool in jobs:
            self._raykv.submit_store(job_id, blocks, pool)
        self._raykv.finish({job_id for job_id, _, _ in jobs})

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """See `OffloadingConnectorWorker.get_finished`; every job ends, failed or not."""
        self._ended |= finished_req_ids
        if self._unseen and self._raykv is not None:
            # What is not there is to be known before anybody sees what was computed with it.
            self._raykv.wait_layers(self._unseen, ALL_LAYERS)
            self._check_that_all_waited()
        received = set(self._stranded)
        self._failed_recving |= self._stranded
        self._stranded.clear()
        for result in self.worker.get_finished() if self.worker is not None else []:
            request_id = self._load_jobs.pop(result.job_id, None)
            self._meta.mark_completed(result.job_id)
            self._take_result(result, request_id)
            self._unseen.pop(result.job_id, None)
            if request_id is not None and not self._is_layerwise:
                received.add(request_id)
        self.end_loads()
        return set(), received

    def wait_for_layer(self, layer_name: str) -> None:
        """Wait until the KV of a layer is there, of all prompts that are being loaded."""
        if not self._unseen:
            return
        self._waited.add(layer_name)
        if not self._unseen.keys() <= self._load_jobs.keys():
            # A load begins behind a layer that wants it: vLLM is not the one that we know.
            self.distrust_loads()
        if self._raykv is not None:
            self._raykv.wait_layers(self._unseen, self._layer_numbers().get(layer_name, ALL_LAYERS))

    def _check_that_all_waited(self) -> None:
        """A layer that does not call the hook was computed with what was not there yet."""
        missing = {*self.kv_cache_config.kv_cache_groups[0].layer_names} - self._waited
        if missing:
            logger.warning(
                "layerwise_loads: %d layers (%s) did not wait for their KV, so that the prompt is "
                "computed anew: leave layerwise_loads out with this model",
                len(missing),
                min(missing),
            )
            self.distrust_loads()

    def _layer_numbers(self) -> dict[str, int]:
        """How many layers of a load are to be there before a layer is computed.

        Empty where the NodeActor's layers are not vLLM's: then all have to be there.
        """
        if self._numbers is None:
            assert self._raykv is not None
            names = self.kv_cache_config.kv_cache_groups[0].layer_names
            is_known = len(self._raykv.layout.groups[0]) == len(names)
            self._numbers = {name: at for at, name in enumerate(names, 1)} if is_known else {}
        return self._numbers

    def distrust_loads(self) -> None:
        """Report as not loaded what is to be loaded in this step, whatever becomes of it."""
        self._invalid_block_ids.update(*self._unseen.values())

    def end_loads(self) -> None:
        """At the end of a step: loads that were never submitted, or whose end got lost, failed."""
        self.distrust_loads()
        for job_id in self._unseen:
            if self._raykv is None or not self._raykv.is_flying(job_id):
                self._load_jobs.pop(job_id, None)
                self._meta.mark_completed(job_id)
        self._unseen.clear()
        self._waited.clear()

    def _distrust_result(self, result: TransferResult, _request_id: str | None) -> None:
        self._invalid_block_ids.update(self._unseen.get(result.job_id, ()))

    @guarded(_distrust_result)
    def _take_result(self, result: TransferResult, request_id: str | None) -> None:
        assert isinstance(result, RayKVTransferResult), result
        stats = self._meta.transfer_stats
        if result.transfer_size and result.transfer_time is not None:
            direction = stats.store if request_id is None else stats.load
            direction.record(result.transfer_size, result.transfer_time)
        if not result.failed:
            return
        if request_id is None:
            self._meta.failed_stores += [(chunk.key, chunk.generation) for chunk in result.failed]
            return
        self._meta.failed_loads += [
            FailedLoad(
                request_id,
                Key(chunk.key),
                Generation(chunk.generation),
                Epoch(result.node_epoch),
                chunk.refusal.is_final,
            )
            for chunk in result.failed
        ]
        if self._by_request:
            self._failed_recving.add(request_id)
        else:
            self._invalid_block_ids.update(*(chunk.block_ids for chunk in result.failed))

    def take_failed_recving(self) -> set[str]:
        """Requests that must be computed anew as a whole."""
        failed, self._failed_recving = self._failed_recving, set()
        return failed

    def take_invalid_block_ids(self) -> set[int]:
        """Blocks that were not loaded."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def build_connector_worker_meta(self) -> RayKVWorkerMetadata | None:
        """See `OffloadingConnectorWorker.build_connector_worker_meta`."""
        base = super().build_connector_worker_meta()
        meta, self._meta = self._meta, RayKVWorkerMetadata()
        if base is not None:
            meta = meta.aggregate(base)
        epoch = 0 if self._raykv is None else self._raykv.node_epoch
        if epoch != self._reported_epoch:
            self._reported_epoch = epoch
            meta.node_epochs[self.spec.config.parallel.rank] = epoch
        self._report_line(meta)
        meta.adapters = self._adapters.take_news()
        is_empty = not (
            meta.completed_jobs
            or meta.failed_loads
            or meta.failed_stores
            or meta.node_epochs
            or meta.lines
            or meta.adapters
            or meta.weights_changed
        )
        return None if is_empty else meta

    def _report_line(self, meta: RayKVWorkerMetadata) -> None:
        """Only when a breaker has opened or closed, not for every further failure."""
        line = BreakerReport() if self._raykv is None else self._raykv.breaker_report()
        known = self._reported_line
        if (line.opened, len(line.peers)) != (known.opened, len(known.peers)):
            self._reported_line = line
            meta.lines[self.spec.config.parallel.rank] = line
