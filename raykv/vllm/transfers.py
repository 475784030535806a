"""Jobs for the NodeActor: how they reach a worker, what they are made of, and how they have ended.

What goes between the two sides of the connector with each step, through vLLM, is here as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from raykv.base.deadlines import LINK_CLOSE_S
from raykv.base.guard import guarded, report
from raykv.base.ids import Direction, Refusal
from raykv.engine.requests import FailedLoad
from raykv.protocol.columns import Handles, Keys
from raykv.protocol.measures import BreakerReport
from raykv.protocol.worker import JobResult, KVLayout
from raykv.vllm.identity.adapters import AdapterUse
from raykv.worker.front import Link
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkTarget


@dataclass
class PoolSpec(LoadStoreSpec):
    """Places in the node's pool, as columns with one entry per chunk."""

    node_epoch: int
    keys: list[bytes]
    slots: list[int]
    generations: list[int]
    namespace: str = ""


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
        handles=Handles(Keys.of(pool.keys), pool.slots, pool.generations),
        groups=groups,
        num_blocks=counts,
        first_block=firsts,
        block_ids=blocks.block_ids.tolist(),
        namespace=pool.namespace,
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
    keys = list(handles.keys)
    return Handles(
        Keys.of([keys[chunk] for chunk in chunks]),
        [handles.slots[chunk] for chunk in chunks],
        [handles.generations[chunk] for chunk in chunks],
    )


def transfer_result(request: JobRequest, result: JobResult) -> RayKVTransferResult:
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


def distrusted(request: JobRequest) -> RayKVTransferResult:
    """The result of a load whose bytes are of no use; its chunks are not to blame."""
    chunks = list(range(len(request.handles.keys)))
    refusals = [int(Refusal.CANCELLED)] * len(chunks)
    ended = JobResult(request.job_id, 0, 0.0, chunks, refusals)
    failed = transfer_result(request, ended)
    failed.node_epoch = 0
    return failed


def all_failed(
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


@dataclass
class RayKVWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, with what failed; see `RayOffloadingManager.take_failures`.

    `node_epochs` has the epoch of the NodeActor that each rank reaches, 0 for none; `lines` what
    each says of its breaker, when that has changed. `adapters` have been loaded since the last
    step, by id, with the digests of their contents; empty where the ranks have not loaded the same.
    `weights` says by what they were changed last, and how often, by the worker's name; only while
    the engine does not know it. `barred` are requests that must not
    load any more.
    """

    failed_loads: list[FailedLoad] = field(default_factory=list)
    failed_stores: list[tuple[bytes, int]] = field(default_factory=list)
    node_epochs: dict[int, int] = field(default_factory=dict)
    lines: dict[int, BreakerReport] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)
    weights: dict[str, tuple[int, str]] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RayKVWorkerMetadata:
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
                merged.barred |= part.barred
                merged.weights.update(part.weights)
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
    step. `weights_seen`: how often the weights of each worker had changed when the engine named
    them, by the worker's name.
    """

    target: LinkTarget | None = None
    stranded: list[str] = field(default_factory=list)
    stranded_blocks: list[int] = field(default_factory=list)
    adapters: dict[str, AdapterUse] = field(default_factory=dict)
    beginning: dict[str, AdapterUse] = field(default_factory=dict)
    weights_seen: dict[str, int] = field(default_factory=dict)


class RayOffloadingWorker(OffloadingWorker):
    """Turns vLLM's transfer specs into copy jobs of the node's NodeActor."""

    def __init__(self, link: Link, layout: KVLayout, *, by_layer: bool = False) -> None:
        """Send jobs through `link`; `layout` is that of the memory that the NodeActor maps.

        `by_layer`: loads come layer by layer, and a step waits for them.
        """
        self._layout = layout
        self._link = link
        self._flying: dict[int, JobRequest] = {}
        self._by_layer = by_layer
        # Captures under way, and those that have ended.
        self._captures: set[int] = set()
        self._captured: list[JobResult] = []
        # Loads under way whose bytes are of no use any more.
        self._distrusted: set[int] = set()
        # Results that nobody has asked for yet, of jobs that could not be made up, too.
        self._ended: list[RayKVTransferResult] = []
        # The line has failed in a way that is not understood, and was ended.
        self._is_given_up = False
        # Of the link, not looked at yet.
        self._drained: deque[JobResult] = deque()

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
            assert not self._is_given_up, "the line to the NodeActor has failed"
            request = job_request(job_id, direction, blocks, pool, self._layout)
            if self._by_layer and direction is Direction.LOAD:
                request = replace(request, by_layer=True)
            if request.torn and not request.handles:
                self._ended.append(all_failed(job_id, direction, blocks, pool))
                return True
            self._link.submit(request)
        except Exception:
            report("RayOffloadingWorker.submit")
            self._ended.append(all_failed(job_id, direction, blocks, pool))
        else:
            self._flying[job_id] = request
        return True

    def refuse(
        self, job_id: int, direction: Direction, blocks: GPULoadStoreSpec, pool: LoadStoreSpec
    ) -> None:
        """Let a job fail that must not be; its chunks are not to blame."""
        failed = all_failed(job_id, direction, blocks, pool)
        failed.node_epoch = 0
        self._ended.append(failed)

    def distrust_loads(self) -> None:
        """Have the loads that are under way end as failed, whatever becomes of them."""
        flying = self._flying.items()
        self._distrusted |= {i for i, job in flying if job.direction is Direction.LOAD}

    def submit_capture(self, request: JobRequest) -> None:
        """Have states copied; how that ends comes through `take_captured`."""
        assert not self._is_given_up, "the line to the NodeActor has failed"
        self._captures.add(request.job_id)
        self._link.submit(request)

    def take_captured(self) -> list[JobResult]:
        """Captures that `get_finished` has found to have ended."""
        captured, self._captured = self._captured, []
        return captured

    def get_finished(self) -> list[TransferResult]:
        """See `OffloadingWorker.get_finished`; results are `RayKVTransferResult`.

        Where it raises, `give_up` has what is left of them.
        """
        self._drained += self._link.drain()
        while self._drained:
            self._take_result(self._drained.popleft())
        return [*self._take_ended()]

    def give_up(self) -> list[RayKVTransferResult]:
        """Jobs that have ended, nobody knows how, and that `get_finished` has not reported."""
        try:
            self._drained += self._link.drain()
        except Exception:
            report("RayOffloadingWorker.give_up")
        for result in self._drained:
            self._take_badly(result)
        self._drained.clear()
        return self._take_ended()

    def _take_ended(self) -> list[RayKVTransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def _take_badly(self, result: JobResult) -> None:
        """It has ended, and as what is not known: as a failure."""
        if result.job_id in self._captures:
            self._captured.append(result)
            self._captures.remove(result.job_id)
        if (request := self._flying.pop(result.job_id, None)) is not None:
            self._ended.append(distrusted(request))

    @guarded(_take_badly)
    def _take_result(self, result: JobResult) -> None:
        if result.job_id in self._captures:
            self._captured.append(result)
            self._captures.remove(result.job_id)
            return
        request = self._flying.get(result.job_id)
        if request is None:
            return
        is_wanted = result.job_id not in self._distrusted
        ended = transfer_result(request, result) if is_wanted else distrusted(request)
        self._distrusted.discard(result.job_id)
        self._ended.append(ended)
        del self._flying[result.job_id]

    def finish(self, job_ids: set[int]) -> None:
        """Wait for jobs to end; within the flush deadline and its grace."""
        self._link.finish(job_ids)

    def wait(self, job_ids: set[int]) -> None:
        """See `OffloadingWorker.wait`; ends within the flush deadline and its grace."""
        for is_last in (False, True):
            try:
                self._link.wait(job_ids)
                return
            except Exception:
                report("RayOffloadingWorker.wait")
                if is_last:
                    self._give_up_line()

    def _give_up_line(self) -> None:
        """End the line, for good: then nobody reads or writes vLLM's blocks any more."""
        self._link.close(LINK_CLOSE_S)
        self._is_given_up = True
        self._ended += map(distrusted, self._flying.values())
        self._flying.clear()

    def wait_layers(self, job_ids: Collection[int], count: int) -> None:
        """Wait for so many layers of loads, or their ends; they have their own deadlines."""
        self._link.wait_layers(job_ids, count)

    def is_flying(self, job_id: int) -> bool:
        """Whether the job has no result yet."""
        return job_id in self._flying

    def has(self, job_id: int) -> bool:
        """Whether the job was handed over, and `get_finished` has not reported its end."""
        return self.is_flying(job_id) or any(each.job_id == job_id for each in self._ended)

    def shutdown(self) -> None:
        self._link.close(LINK_CLOSE_S)
