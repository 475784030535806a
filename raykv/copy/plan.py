"""From a copy job to runs of bytes: which pages go where.

A chunk's slot holds one part per rank, each part one region per layer, each region the chunk's
blocks in order. Runs that are adjacent on both sides are merged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.memory.handles import part_bytes
from raykv.messages import CopyJob, KVLayout
from raykv.types import SLOT_ALIGNMENT

Column = npt.NDArray[np.int64]


class PlanError(ValueError):
    """A job names blocks or groups that the KV cache does not have."""


@dataclass(frozen=True)
class CopyRuns:
    """Runs of bytes: offsets in the KV memory and in the pool, and sizes; one row per run.

    The runs of chunk c are rows [chunk_ends[c - 1], chunk_ends[c]).
    """

    kv: Column
    pool: Column
    size: Column
    chunk_ends: Column

    @property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return int(self.size.sum())


@dataclass(frozen=True)
class _Group:
    """Columns with one entry per layer; `base` is the layer's place in a rank's part."""

    offset: Column
    stride: Column
    page: Column
    base: Column
    num_blocks: int
    part: int


class Planner:
    """Plans the jobs of one worker, whose layout it was made for."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._rank = rank
        self._groups = {
            group_id: _group(layout, index) for index, group_id in enumerate(layout.group_ids)
        }

    def part_bytes(self, group_id: int) -> int:
        """Bytes of this rank's part of a chunk of the group.

        Raises:
            PlanError: there is no such group.
        """
        if group_id not in self._groups:
            raise PlanError(f"no KV group {group_id}; there are {sorted(self._groups)}")
        return self._groups[group_id].part

    def plan(self, job: CopyJob) -> CopyRuns:
        """The runs of all chunks of `job`, chunk by chunk.

        Raises:
            PlanError: the job's columns are inconsistent or point outside of the KV cache.
        """
        self._check(job)
        counts = np.asarray(job.num_blocks, dtype=np.int64)
        rows = []
        start = 0
        for chunk, group_id in enumerate(job.groups):
            group = self._groups[group_id]
            end = start + job.num_blocks[chunk]
            blocks = np.asarray(job.block_ids[start:end], dtype=np.int64)
            places = np.arange(len(blocks), dtype=np.int64) + job.first_block[chunk]
            rows.append(self._chunk(group, job.handles.slots[chunk], blocks, places))
            start = end
        if not rows:
            return CopyRuns(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        assert start == int(counts.sum()), (start, counts)
        ends = np.cumsum([len(row[0]) for row in rows])
        kv, pool, size = (np.concatenate([row[i] for row in rows]) for i in range(3))
        return CopyRuns(kv, pool, size, ends)

    def _check(self, job: CopyJob) -> None:
        num_chunks = len(job.handles.keys)
        columns: list[list[Any]] = [
            job.handles.slots,
            job.handles.generations,
            job.groups,
            job.num_blocks,
            job.first_block,
        ]
        if any(len(column) != num_chunks for column in columns):
            raise PlanError(f"job {job.job_id}: columns of different lengths")
        if sum(job.num_blocks) != len(job.block_ids):
            raise PlanError(f"job {job.job_id}: {len(job.block_ids)} blocks for {job.num_blocks}")
        for group_id, count, first in zip(job.groups, job.num_blocks, job.first_block, strict=True):
            self.part_bytes(group_id)
            if count < 1 or first < 0 or first + count > self._blocks_per_chunk:
                raise PlanError(f"job {job.job_id}: blocks {first}..{first + count} of a chunk")
        most = min((self._groups[g].num_blocks for g in job.groups), default=0)
        if any(not 0 <= block < most for block in job.block_ids):
            raise PlanError(f"job {job.job_id}: a block id outside of 0..{most - 1}")

    def _chunk(
        self, group: _Group, slot: int, blocks: Column, places: Column
    ) -> tuple[Column, Column, Column]:
        """Runs of one chunk, layer by layer, so that neighbouring blocks can be merged."""
        start = slot * SLOT_ALIGNMENT + self._rank * group.part
        kv = (group.offset[:, None] + blocks[None, :] * group.stride[:, None]).ravel()
        pool = (start + group.base[:, None] + places[None, :] * group.page[:, None]).ravel()
        size = np.repeat(group.page, len(blocks))
        return _merged(kv, pool, size)


def _group(layout: KVLayout, index: int) -> _Group:
    tensors = [layout.tensors[i] for i in layout.groups[index]]
    page = np.array([tensor.page_bytes for tensor in tensors], dtype=np.int64)
    regions = page * layout.blocks_per_chunk
    return _Group(
        offset=np.array([tensor.offset for tensor in tensors], dtype=np.int64),
        stride=np.array([tensor.block_stride for tensor in tensors], dtype=np.int64),
        page=page,
        base=np.cumsum(regions) - regions,
        num_blocks=min(tensor.num_blocks for tensor in tensors),
        part=part_bytes(layout, index),
    )


def _merged(kv: Column, pool: Column, size: Column) -> tuple[Column, Column, Column]:
    """Join each run to the one before it where both sides go on without a gap."""
    if len(kv) < 2:
        return kv, pool, size
    joins = (kv[:-1] + size[:-1] == kv[1:]) & (pool[:-1] + size[:-1] == pool[1:])
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    return kv[starts], pool[starts], np.add.reduceat(size, starts)
