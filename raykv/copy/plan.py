"""From a copy job to runs of bytes: which pages go where.

A chunk's slot holds one part per rank, each part one region per layer, each region the chunk's
blocks in order. Runs that are adjacent on both sides are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.memory.handles import part_bytes
from raykv.messages import CopyJob, KVLayout
from raykv.types import SLOT_ALIGNMENT

Column = npt.NDArray[np.int64]

MAX_SLOTS = 1 << 32
"""Of a pool; with them all arithmetic stays within 63 bits."""


class PlanError(ValueError):
    """A job names blocks or groups that the KV cache does not have."""


@dataclass(frozen=True)
class CopyRuns:
    """Runs of bytes: offsets in the KV memory and in the pool, and sizes; one row per run.

    The runs of chunk c are rows [chunk_ends[c - 1], chunk_ends[c]). In a span of chunks
    (`raykv.copy.spans`) a "chunk" is what lies in one slab.
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
        kinds = set(zip(job.groups, job.num_blocks, strict=True))
        if not kinds:
            return CopyRuns(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        if len(kinds) > 1:
            return self._plan_kinds(job, kinds)
        ((group_id, count),) = kinds
        slots, first = _column(job.handles.slots), _column(job.first_block)
        rows = self._rows(group_id, slots, first, _column(job.block_ids).reshape(-1, count))
        ends = np.arange(1, len(slots) + 1) * rows.shape[-1]
        return _merged(rows.reshape(3, -1), ends)

    def _plan_kinds(self, job: CopyJob, kinds: set[tuple[int, int]]) -> CopyRuns:
        """Plan chunks of several groups and numbers of blocks: those of one kind together."""
        groups, counts = _column(job.groups), _column(job.num_blocks)
        slots, first = _column(job.handles.slots), _column(job.first_block)
        blocks, starts = _column(job.block_ids), np.cumsum(counts) - counts
        num_rows = counts * _column([len(self._groups[group].page) for group in job.groups])
        ends = np.cumsum(num_rows)
        rows = np.empty((3, ends[-1]), np.int64)
        for group_id, count in kinds:
            chunks = np.flatnonzero((groups == group_id) & (counts == count))
            theirs = blocks[starts[chunks, None] + np.arange(count)]
            some = self._rows(group_id, slots[chunks], first[chunks], theirs)
            rows[:, (ends - num_rows)[chunks, None] + np.arange(some.shape[-1])] = some
        return _merged(rows, ends)

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
        slots = job.handles.slots
        if slots and not 0 <= min(slots) <= max(slots) < MAX_SLOTS:
            raise PlanError(f"job {job.job_id}: slots from {min(slots)} to {max(slots)}")
        for group_id, count, first in zip(job.groups, job.num_blocks, job.first_block, strict=True):
            self.part_bytes(group_id)
            if count < 1 or first < 0 or first + count > self._blocks_per_chunk:
                raise PlanError(f"job {job.job_id}: blocks {first}..{first + count} of a chunk")
        most = min((self._groups[g].num_blocks for g in set(job.groups)), default=0)
        if job.block_ids and not 0 <= min(job.block_ids) <= max(job.block_ids) < most:
            raise PlanError(f"job {job.job_id}: a block id outside of 0..{most - 1}")

    def _rows(self, group_id: int, slots: Column, first: Column, blocks: Column) -> Column:
        """Rows of chunks of one group with as many blocks, as [column, chunk, row].

        In a chunk layer by layer, so that neighbouring blocks can be merged.

        Args:
            group_id: the KV group.
            slots: of each chunk.
            first: place in its chunk of each chunk's first block.
            blocks: block ids, [chunk, block].
        """
        group = self._groups[group_id]
        offset, stride, page, base = (
            column[:, None] for column in (group.offset, group.stride, group.page, group.base)
        )
        place = (first[:, None] + np.arange(blocks.shape[1]))[:, None, :]
        start = (slots * SLOT_ALIGNMENT + self._rank * group.part)[:, None, None]
        rows = np.empty((3, len(slots), len(page), blocks.shape[1]), np.int64)
        kv, pool, size = rows
        np.add(offset, blocks[:, None, :] * stride, out=kv)
        np.add(start + base, place * page, out=pool)
        size[:] = page
        return rows.reshape(3, len(slots), -1)


def _column(numbers: Sequence[int]) -> Column:
    return np.asarray(numbers, dtype=np.int64)


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


def _merged(rows: Column, chunk_ends: Column) -> CopyRuns:
    """Join each row to the one before it where both sides go on without a gap, in a chunk."""
    kv, pool, size = rows
    joins = (kv[:-1] + size[:-1] == kv[1:]) & (pool[:-1] + size[:-1] == pool[1:])
    begins = np.concatenate([[True], ~joins])
    begins[chunk_ends[:-1]] = True
    starts = np.flatnonzero(begins)
    sizes = np.add.reduceat(size, starts)
    return CopyRuns(kv[starts], pool[starts], sizes, np.searchsorted(starts, chunk_ends))
