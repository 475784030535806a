"""vLLM's transfers as copy jobs of the NodeActor, and what vLLM is told of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import Any

from vllm.v1.kv_offload.base import GPULoadStoreSpec, TransferResult

from raykv.base.ids import Direction, Refusal
from raykv.protocol.columns import Handles
from raykv.protocol.worker import JobResult, KVLayout
from raykv.vllm.spec import PoolSpec
from raykv.worker.job import JobRequest


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
