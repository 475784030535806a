"""Jobs for the NodeActor: how they reach a worker, what they are made of, and how they have ended.

What goes between the two sides of the connector with each step, through vLLM, is here as well.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import msgspec
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

from raykv.base import deadlines
from raykv.base.guard import guarded, report
from raykv.base.ids import Direction, Refusal, Stamp, family_of, part_of
from raykv.engine.lines import WorkerReport
from raykv.protocol import copies, engine, worker
from raykv.protocol.columns import Keys, Numbers
from raykv.vllm.identity.adapters import AdapterUse
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkTarget, WorkerLink


@dataclass
class ChunkSpec(LoadStoreSpec):
    """Chunks by their names; `orders` and `tenant` as in `CopyJob`.

    Without a namespace nothing is loaded or stored.
    """

    keys: list[bytes]
    namespace: str = ""
    orders: Stamp = engine.NOTHING_ORDERED
    tenant: str = ""
    request_id: str = ""


@dataclass(frozen=True)
class JobEnd:
    """How a job has ended on one rank of a `place`; `result` numbers the chunks as they are in
    `keys`. `namespace`: of all places.
    """

    direction: Direction
    namespace: str
    request_id: str
    keys: Keys
    result: copies.CopyResult
    place: int = 0


@dataclass
class RayKVTransferResult(TransferResult):
    """vLLM's result, with what its scheduler's side should know of it; None: nothing.

    `lost_blocks` are those of vLLM's blocks whose load failed.
    """

    end: JobEnd | None = None
    lost_blocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class FlyingJob:
    """A job without a result. `torn`: chunks of a store whose blocks are not all known: they have
    failed and are not sent.
    """

    job: copies.CopyJob
    torn: list[bytes] = field(default_factory=list)
    request_id: str = ""
    place: int = 0

    @property
    def is_load(self) -> bool:
        """Whether it writes into vLLM's blocks."""
        return self.job.direction == Direction.LOAD


def flying_job(
    job_id: int,
    direction: Direction,
    blocks: GPULoadStoreSpec,
    chunks: ChunkSpec,
    layout: worker.KVLayout,
    target: LinkTarget | None = None,
    *,
    by_layer: bool = False,
) -> FlyingJob:
    """Which of vLLM's blocks belong to which chunk; `target`: where it goes, if that is known.

    vLLM lists the blocks group by group; within a group they follow each other in the request,
    beginning at the logical block `block_indices[g]`, which may lie inside of a chunk. Chunks that
    are left out of a store leave no gap in the list, and neither do null blocks: those before the
    first one are told by its index, and where there are others, nobody can say which block belongs
    where. Such a group's chunks are `torn`.
    """
    per_chunk = layout.blocks_per_chunk
    counts: list[int] = []
    firsts: list[int] = []
    torn: list[bool] = []
    columns = zip(layout.group_ids, blocks.group_sizes, blocks.block_indices, strict=True)
    for _, size, index in columns:
        if not size:
            continue
        skip = index % per_chunk
        first = min(size, per_chunk - skip)
        whole, last = divmod(size - first, per_chunk)
        added = [first, *[per_chunk] * whole, *[last] * (last > 0)]
        counts += added
        firsts += [skip, *[0] * (len(added) - 1)]
        # Only whole chunks are stored: their last block is there, or they would not be offered.
        torn += [direction is Direction.STORE and (skip + size) % per_chunk != 0] * len(added)
    keys, block_ids = chunks.keys, blocks.block_ids.tolist()
    assert len(counts) == len(keys), (len(counts), len(keys), job_id)
    lost: list[bytes] = []
    if any(torn):
        lost = [key for key, is_torn in zip(keys, torn, strict=True) if is_torn]
        starts = [0, *accumulate(counts)]
        kept = [at for at, is_torn in enumerate(torn) if not is_torn]
        block_ids = list(chain(*(block_ids[starts[at] : starts[at + 1]] for at in kept)))
        keys = [keys[at] for at in kept]
        counts, firsts = ([each[at] for at in kept] for each in (counts, firsts))
    job = copies.CopyJob(
        job_id,
        int(direction),
        chunks.namespace if target is None else part_of(chunks.namespace, target.part),
        Keys.of(keys),
        Numbers.of(counts),
        Numbers.of(firsts),
        Numbers.of(block_ids),
        chunks.orders,
        chunks.tenant,
        by_layer,
    )
    return FlyingJob(job, lost, chunks.request_id, 0 if target is None else target.place)


def transfer_result(flying: FlyingJob, result: copies.CopyResult) -> RayKVTransferResult:
    """What became of a job, by what the NodeActor says."""
    job, torn = flying.job, flying.torn
    direction = Direction(job.direction)
    lost_blocks: list[int] = []
    if flying.is_load and result.failed_chunks:
        starts, block_ids = [0, *accumulate(job.num_blocks)], list(job.block_ids)
        for at in result.failed_chunks:
            lost_blocks += block_ids[starts[at] : starts[at + 1]]
    keys = job.keys
    if torn:
        failed = result.failed_chunks + range(len(keys), len(keys) + len(torn))
        refusals = result.refusals + bytes([Refusal.COPY_FAILED]) * len(torn)
        keys = Keys.of([*keys, *torn])
        result = msgspec.structs.replace(result, failed_chunks=failed, refusals=refusals)
    has_failed = bool(result.failed_chunks)
    namespace = family_of(job.namespace)
    end = JobEnd(direction, namespace, flying.request_id, keys, result, flying.place)
    return RayKVTransferResult(
        job_id=job.job_id,
        success=not has_failed,
        transfer_size=result.num_bytes,
        transfer_time=result.seconds,
        # Of a load that has come there is nothing to be said.
        end=end if has_failed or not flying.is_load else None,
        lost_blocks=lost_blocks,
    )


def unknown(flying: FlyingJob) -> copies.CopyResult:
    """The result of a job of which nothing is known."""
    return worker.not_done(flying.job.job_id, len(flying.job.keys), Refusal.CANCELLED)


def distrusted(flying: FlyingJob, result: copies.CopyResult) -> copies.CopyResult:
    """The result of a load whose bytes are of no use; what it says of its place holds."""
    return msgspec.structs.replace(
        unknown(flying), life=result.life, number=result.number, rows=result.rows
    )


def all_failed(
    job_id: int, direction: Direction, blocks: GPULoadStoreSpec, chunks: ChunkSpec
) -> RayKVTransferResult:
    """The result of a job that was not made up, or must not be: nothing of it happened."""
    result = worker.not_done(job_id, len(chunks.keys), Refusal.COPY_FAILED)
    keys = Keys.of(chunks.keys)
    end = JobEnd(direction, chunks.namespace, chunks.request_id, keys, result)
    lost = blocks.block_ids.tolist() if direction is Direction.LOAD else []
    return RayKVTransferResult(job_id, False, 0, 0.0, end=end, lost_blocks=lost)


@dataclass
class RayKVWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's metadata, with how jobs have ended; see `RayOffloadingManager.take_ends`.

    `lines` has what each rank says of its line to the NodeActor, when that has changed. `adapters`
    have been loaded since the last step, by id, with the digests of their contents; empty where the
    ranks have not loaded the same. `weights` says by what they were changed last, and how often, by
    the worker's name; only while the engine does not know it. `barred` are requests that must not
    load any more.
    """

    ends: list[JobEnd] = field(default_factory=list)
    lines: dict[int, WorkerReport] = field(default_factory=dict)
    adapters: dict[int, str] = field(default_factory=dict)
    weights: dict[str, tuple[int, str]] = field(default_factory=dict)
    barred: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RayKVWorkerMetadata:
        assert isinstance(other, RayKVWorkerMetadata), other
        base = super().aggregate(other)
        assert isinstance(base, OffloadingWorkerMetadata), base
        merged = RayKVWorkerMetadata(base.completed_jobs, base.transfer_stats)
        for part in (self, other):
            merged.ends += part.ends
            merged.lines.update(part.lines)
            merged.barred |= part.barred
            merged.weights.update(part.weights)
            for name, digest in part.adapters.items():
                same = merged.adapters.get(name, digest) == digest
                merged.adapters[name] = digest if same else ""
        return merged


@dataclass
class RayKVConnectorMetadata(OffloadingConnectorMetadata):
    """vLLM's metadata, with where the NodeActors of the engine's places are, as far as they are
    known.

    `stranded` are requests that vLLM has put to wait for a load that was never made up; the
    workers report them as failed. `stranded_blocks`: the same where vLLM does not wait.
    `adapters` are those of the requests with jobs; `beginning`: of those computed first in this
    step. `weights_seen`: how often the weights of each worker had changed when the engine named
    them, by the worker's name. `place_lives`: of the NodeActors, as the engine knows them; what
    workers have said of their lines before that were others.
    """

    targets: list[LinkTarget | None] = field(default_factory=list)
    stranded: list[str] = field(default_factory=list)
    stranded_blocks: list[int] = field(default_factory=list)
    adapters: dict[str, AdapterUse] = field(default_factory=dict)
    beginning: dict[str, AdapterUse] = field(default_factory=dict)
    weights_seen: dict[str, int] = field(default_factory=dict)
    place_lives: list[int] = field(default_factory=list)

    def target_of(self, rank: int) -> LinkTarget | None:
        """Return where a rank is to connect; None if that is not known."""
        mine = (each for each in self.targets if each and (not each.ranks or rank in each.ranks))
        return next(mine, None)


class RayOffloadingWorker(OffloadingWorker):
    """Turns vLLM's transfer specs into copy jobs of the node's NodeActor."""

    def __init__(
        self, link: WorkerLink, layout: worker.KVLayout, *, by_layer: bool = False
    ) -> None:
        """Send jobs through `link`. `by_layer`: loads come layer by layer, and a step waits for
        them.
        """
        # Of the memory that the NodeActor maps.
        self.layout = layout
        self._link = link
        self._flying: dict[int, FlyingJob] = {}
        self._by_layer = by_layer
        # Captures that have ended, by request.
        self._captured: dict[str, copies.CopyResult] = {}
        # Loads under way whose bytes are of no use any more.
        self._distrusted: set[int] = set()
        # Results that `get_finished` has not taken yet, also of jobs that could not be made up.
        self._ended: list[RayKVTransferResult] = []
        # The line has failed in a way that is not understood, and was ended.
        self._is_given_up = False
        # Of the link, not looked at yet.
        self._drained: deque[copies.CopyResult] = deque()
        # Of the NodeActor, once it is known.
        self._target: LinkTarget | None = None

    @property
    def namespace(self) -> str:
        """Of all chunks of captures; empty until the NodeActor is known."""
        return "" if self._target is None else self._target.namespace

    @property
    def place(self) -> int:
        """The number of the engine's place where this is."""
        return 0 if self._target is None else self._target.place

    def line_report(self) -> WorkerReport:
        """Which NodeActor is reached, and whether it is left alone."""
        return WorkerReport(self._link.node_life, self._link.breaker_report())

    def set_target(self, target: LinkTarget | None) -> None:
        """Where the NodeActor is; None leaves it as it was."""
        if target is not None:
            self._target = target
            self._link = self._link.following()
            self._link.set_target(target)

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any, **_later: Any
    ) -> bool:
        """See `OffloadingWorker.submit_store`; always True, failures come as results.

        `_later` takes the arguments that later versions of vLLM add, which have defaults.
        """
        return self._submit(Direction.STORE, (job_id, src_spec, dst_spec))

    def submit_stores(self, jobs: Iterable[tuple[int, GPULoadStoreSpec, Any]]) -> None:
        """As `submit_store`, all at once: for their copies the GPU is asked once what is queued."""
        self._submit(Direction.STORE, *jobs)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, **_later: Any
    ) -> bool:
        """See `OffloadingWorker.submit_load` and, for `_later`, `submit_store`."""
        return self._submit(Direction.LOAD, (job_id, dst_spec, src_spec))

    def _submit(self, direction: Direction, *jobs: tuple[int, GPULoadStoreSpec, Any]) -> bool:
        made = [self._make_up(direction, *job) for job in jobs]
        flying = {each.job.job_id: each for each in made if each is not None}
        try:
            if flying:
                # Known before it is handed over: what the link has must not count as refused.
                self._flying.update(flying)
                self._link.submit(*[JobRequest(each.job) for each in flying.values()])
        except Exception:
            self._flying = {i: each for i, each in self._flying.items() if i not in flying}
            report("RayOffloadingWorker.submit")
            for job_id, blocks, chunks in jobs:
                if job_id in flying:
                    self.refuse(job_id, direction, blocks, chunks)
        return True

    def _make_up(
        self, direction: Direction, job_id: int, blocks: GPULoadStoreSpec, chunks: ChunkSpec
    ) -> FlyingJob | None:
        """Make up a job; None if it has ended already."""
        if not chunks.namespace:
            self.refuse(job_id, direction, blocks, chunks)
            return None
        try:
            assert not self._is_given_up, "the line to the NodeActor has failed"
            by_layer = self._by_layer and direction is Direction.LOAD
            flying = flying_job(
                *(job_id, direction, blocks, chunks, self.layout, self._target), by_layer=by_layer
            )
            if flying.torn and not flying.job.keys:
                self._ended.append(transfer_result(flying, copies.CopyResult(job_id, 0, 0)))
                return None
            return flying
        except Exception:
            report("RayOffloadingWorker.submit")
            self.refuse(job_id, direction, blocks, chunks)
            return None

    def refuse(
        self, job_id: int, direction: Direction, blocks: GPULoadStoreSpec, chunks: ChunkSpec
    ) -> None:
        """Let a job fail that must not be done."""
        self._ended.append(all_failed(job_id, direction, blocks, chunks))

    def distrust_loads(self) -> None:
        """Have the loads that are under way end as failed, whatever becomes of them."""
        self._distrusted |= {i for i, flying in self._flying.items() if flying.is_load}

    def submit_capture(self, request: JobRequest) -> None:
        """Have states copied; how that ends comes through `take_captured`."""
        assert not self._is_given_up, "the line to the NodeActor has failed"
        self._link.submit(request)
        self._flying[request.job_id] = FlyingJob(request.job)

    def take_captured(self) -> dict[str, copies.CopyResult]:
        """Captures that `get_finished` has found to have ended, by request."""
        captured, self._captured = self._captured, {}
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
        """End jobs in an unknown way, as failures, that `get_finished` has not reported."""
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

    def _take_badly(self, result: copies.CopyResult) -> None:
        """It has ended, and as what is not known: as a failure."""
        if (flying := self._flying.pop(result.job_id, None)) is not None:
            self._end(flying, unknown(flying) if flying.job.capture is None else result)

    @guarded(_take_badly)
    def _take_result(self, result: copies.CopyResult) -> None:
        flying = self._flying.get(result.job_id)
        if flying is None:
            return
        is_wanted = result.job_id not in self._distrusted
        self._end(flying, result if is_wanted else distrusted(flying, result))
        self._distrusted.discard(result.job_id)
        del self._flying[result.job_id]

    def _end(self, flying: FlyingJob, result: copies.CopyResult) -> None:
        if flying.job.capture is not None:
            self._captured[flying.job.capture.request_id] = result
        else:
            self._ended.append(transfer_result(flying, result))

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
        """End the line for good, so that no copy reads or writes vLLM's blocks any more."""
        self._link.close(deadlines.LEAVE_S)
        self._is_given_up = True
        for flying in self._flying.values():
            self._end(flying, unknown(flying))
        self._flying.clear()

    def wait_layers(self, job_ids: Collection[int], count: int) -> None:
        """Wait for `count` layers of loads, or their ends; loads have their own deadlines."""
        self._link.wait_layers(job_ids, count)

    def is_flying(self, job_id: int) -> bool:
        """Whether the job has no result yet."""
        return job_id in self._flying

    def has(self, job_id: int) -> bool:
        """Whether the job was handed over, and `get_finished` has not reported its end."""
        return self.is_flying(job_id) or any(each.job_id == job_id for each in self._ended)

    def shutdown(self) -> None:
        self._link.close(deadlines.LEAVE_S)
