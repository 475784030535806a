"""From a copy job to runs of bytes: which pages go where.

A chunk's slot holds one part per rank, each part one region per layer, each region the chunk's
blocks in order. A canonical chunk has one region per layer for all ranks, of canonical pages, and
each rank copies the fragments of them that it has. Runs that are adjacent on both sides are merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from raykv.base.ids import ALL_BLOCKS, SLOT_ALIGNMENT, Blocks, Direction
from raykv.memory.canonical import clipped, fragments_of, shares
from raykv.memory.handles import part_bytes
from raykv.protocol.worker import CopyJob, KVLayout, TensorLayout

Column = npt.NDArray[np.int64]

MAX_SLOTS = 1 << 32
"""Slots of a pool; with them all arithmetic stays within 63 bits."""


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
    """How a block of a KV group is copied: columns with one entry per fragment of its pages.

    `offset` is the fragment's place in block 0 of the KV cache, `base` in the first block of a
    chunk's slot; the next block is `stride` and `pitch` further on. `per_layer` fragments of a
    layer follow each other, where all have as many; else it is 1.
    """

    offset: Column
    stride: Column
    size: Column
    base: Column
    pitch: Column
    num_blocks: int
    per_layer: int = 1

    @cached_property
    def block_bytes(self) -> int:
        """Of all fragments of a block."""
        return int(self.size.sum())


@dataclass(frozen=True)
class _ChunkSizes:
    """Sizes of a chunk of a KV group: a rank's pages, and all canonical pages if it has such."""

    part: int
    whole: int | None


class Planner:
    """Plans the jobs of one worker, whose layout it was made for."""

    def __init__(self, layout: KVLayout, rank: int) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        self._chunks: dict[int, _ChunkSizes] = {}
        self._tensors: dict[int, list[TensorLayout]] = {}
        # What is copied of a block, by direction: of what several ranks have each stores a share.
        self._groups: dict[Direction, dict[int, _Group]] = {way: {} for way in Direction}
        for index, group_id in enumerate(layout.group_ids):
            self._chunks[group_id] = _chunk(layout, index)
            self._tensors[group_id] = [layout.tensors[i] for i in layout.groups[index]]
            plain = None if layout.canonical.groups else _group(layout, index, rank)
            for way in Direction:
                self._groups[way][group_id] = plain or _canonical_group(layout, index, way)

    def blocks(self, job: CopyJob, chunk: int) -> Blocks:
        """The blocks of one chunk of a job that was planned."""
        first, count = job.first_block[chunk], job.num_blocks[chunk]
        return ALL_BLOCKS if count == self._blocks_per_chunk else Blocks(first, count)

    def left_out(self, job: CopyJob, chunk: int) -> Column:
        """Where in the pool this rank's part of the blocks would be that one chunk of a store does
        not have, as [[offset, size], …].
        """
        group = self._groups[Direction.STORE][job.groups[chunk]]
        first, end = job.first_block[chunk], job.first_block[chunk] + job.num_blocks[chunk]
        places = np.concatenate([np.arange(first), np.arange(end, self._blocks_per_chunk)])
        start = job.handles.slots[chunk] * SLOT_ALIGNMENT + group.base
        offsets = start[:, None] + group.pitch[:, None] * places
        sizes = np.broadcast_to(group.size[:, None], offsets.shape)
        return np.stack([offsets.ravel(), sizes.ravel()], axis=1)

    def part_bytes(self, group_id: int) -> int:
        """Bytes of this rank's part of a chunk of the group.

        Raises:
            PlanError: there is no such group.
        """
        return self._chunk_of(group_id).part

    def chunk_bytes(self, group_id: int, num_ranks: int) -> int:
        """Bytes of a chunk of the group, the parts of all ranks.

        Raises:
            PlanError: there is no such group.
        """
        chunk = self._chunk_of(group_id)
        return chunk.part * num_ranks if chunk.whole is None else chunk.whole

    def _chunk_of(self, group_id: int) -> _ChunkSizes:
        if group_id not in self._chunks:
            raise PlanError(f"no KV group {group_id}; there are {sorted(self._chunks)}")
        return self._chunks[group_id]

    def layer(self, group_id: int, index: int) -> TensorLayout:
        """Where the pages of one layer of a group are.

        Raises:
            PlanError: there is no such group, or no such layer in it.
        """
        self._chunk_of(group_id)
        tensors = self._tensors[group_id]
        if not 0 <= index < len(tensors):
            raise PlanError(f"no layer {index} in KV group {group_id}: it has {len(tensors)}")
        return tensors[index]

    @staticmethod
    def pages(layer: TensorLayout, block_ids: Sequence[int], to: int) -> CopyRuns:
        """The runs that put whole pages of a layer side by side, one for each block.

        Args:
            layer: see `layer`.
            block_ids: whose pages.
            to: where the first one goes, from the pool's beginning; may be outside of it.

        Raises:
            PlanError: a block is outside of the KV cache.
        """
        blocks, count = _column(block_ids), np.arange(len(block_ids), dtype=np.int64)
        if not len(blocks) or not 0 <= blocks.min() <= blocks.max() < layer.num_blocks:
            raise PlanError(f"block ids outside of 0..{layer.num_blocks - 1}")
        size = layer.page_bytes
        kv = layer.offset + blocks * layer.block_stride
        return CopyRuns(kv, to + count * size, np.full_like(count, size), count + 1)

    def plan(self, job: CopyJob) -> CopyRuns:
        """The runs of all chunks of `job`, chunk by chunk.

        Raises:
            PlanError: the job's columns are inconsistent or point outside of the KV cache.
        """
        self.check(job)
        kinds = set(zip(job.groups, job.num_blocks, strict=True))
        if not kinds:
            return CopyRuns(*(np.zeros(0, dtype=np.int64) for _ in range(4)))
        if len(kinds) > 1:
            return self._plan_kinds(job, kinds)
        ((group_id, count),) = kinds
        slots, first = _column(job.handles.slots), _column(job.first_block)
        group = self._groups[Direction(job.direction)][group_id]
        rows = _rows(group, slots, first, _column(job.block_ids).reshape(-1, count))
        ends = np.arange(1, len(slots) + 1) * rows.shape[-1]
        return _merged(rows.reshape(3, -1), ends)

    def plan_layers(self, job: CopyJob, chunks: Sequence[int]) -> Iterator[CopyRuns]:
        """The runs of some chunks of a job by layer, which `check` has let pass; for each layer of
        its KV group.

        The chunks of a plan are theirs, in any order.
        """
        group_id = job.groups[0]
        group = self._groups[Direction(job.direction)][group_id]
        num_layers = len(self._tensors[group_id])
        if len(group.size) != num_layers * group.per_layer:
            # Fragments of canonical pages, of some layers more than of others.
            num_layers = 1
        wanted, counts = _column(chunks), _column(job.num_blocks)
        blocks, starts = _column(job.block_ids), np.cumsum(counts) - counts
        slots, first = _column(job.handles.slots), _column(job.first_block)
        kinds = []
        for count in sorted(set(counts[wanted].tolist())):
            some = wanted[counts[wanted] == count]
            theirs = blocks[starts[some, None] + np.arange(count)]
            rows = _rows(group, slots[some], first[some], theirs)
            kinds.append(rows.reshape(3, len(some), num_layers, -1))
        return (_layer_of(kinds, layer) for layer in range(num_layers))

    def _plan_kinds(self, job: CopyJob, kinds: set[tuple[int, int]]) -> CopyRuns:
        """Plan chunks of several groups and numbers of blocks: those of one kind together."""
        known = self._groups[Direction(job.direction)]
        groups, counts = _column(job.groups), _column(job.num_blocks)
        slots, first = _column(job.handles.slots), _column(job.first_block)
        blocks, starts = _column(job.block_ids), np.cumsum(counts) - counts
        num_rows = counts * _column([len(known[group].size) for group in job.groups])
        ends = np.cumsum(num_rows)
        rows = np.empty((3, ends[-1]), np.int64)
        for group_id, count in kinds:
            chunks = np.flatnonzero((groups == group_id) & (counts == count))
            theirs = blocks[starts[chunks, None] + np.arange(count)]
            some = _rows(known[group_id], slots[chunks], first[chunks], theirs)
            rows[:, (ends - num_rows)[chunks, None] + np.arange(some.shape[-1])] = some
        return _merged(rows, ends)

    def bytes_of(self, job: CopyJob, chunk: int) -> int:
        """What is copied of one chunk of a job that was checked."""
        group = self._groups[Direction(job.direction)][job.groups[chunk]]
        return group.block_bytes * job.num_blocks[chunk]

    def check(self, job: CopyJob) -> None:
        """Whether a job can be planned.

        Raises:
            PlanError: its columns are inconsistent or point outside of the KV cache, or it is by
                layer and has chunks of several groups.
        """
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
        if job.by_layer and len(set(job.groups)) > 1:
            raise PlanError(f"job {job.job_id}: layer by layer, of {len(set(job.groups))} groups")
        known = self._groups[Direction(job.direction)]
        most = min((known[group].num_blocks for group in set(job.groups)), default=0)
        if job.block_ids and not 0 <= min(job.block_ids) <= max(job.block_ids) < most:
            raise PlanError(f"job {job.job_id}: a block id outside of 0..{most - 1}")


def _rows(group: _Group, slots: Column, first: Column, blocks: Column) -> Column:
    """Rows of chunks of one group with as many blocks, as [column, chunk, row].

    In a chunk layer by layer, so that neighbouring blocks can be merged; then block by block.

    Args:
        group: the KV group.
        slots: of each chunk.
        first: place in its chunk of each chunk's first block.
        blocks: block ids, [chunk, block].
    """
    offset, stride, base, pitch = (
        column[:, None] for column in (group.offset, group.stride, group.base, group.pitch)
    )
    place = (first[:, None] + np.arange(blocks.shape[1]))[:, None, :]
    start = (slots * SLOT_ALIGNMENT)[:, None, None]
    rows = np.empty((3, len(slots), len(group.size), blocks.shape[1]), np.int64)
    kv, pool, size = rows
    np.add(offset, blocks[:, None, :] * stride, out=kv)
    np.add(start + base, place * pitch, out=pool)
    size[:] = group.size[:, None]
    if group.per_layer > 1:
        by_layer = rows.reshape(3, len(slots), -1, group.per_layer, blocks.shape[1])
        rows = by_layer.swapaxes(3, 4)
    return rows.reshape(3, len(slots), -1)


def _layer_of(kinds: Sequence[Column], layer: int) -> CopyRuns:
    """One layer out of rows of chunks, [column, chunk, layer, row] for each kind of chunk."""
    rows = np.concatenate([kind[:, :, layer].reshape(3, -1) for kind in kinds], axis=1)
    lengths = np.concatenate([np.full(kind.shape[1], kind.shape[3]) for kind in kinds])
    return _merged(rows, np.cumsum(lengths))


def _column(numbers: Sequence[int]) -> Column:
    return np.asarray(numbers, dtype=np.int64)


def _chunk(layout: KVLayout, index: int) -> _ChunkSizes:
    maps = layout.canonical.maps
    whole = None
    if layout.canonical.groups:
        pages = sum(maps[number].page_bytes for number in layout.canonical.groups[index])
        whole = pages * layout.blocks_per_chunk
    return _ChunkSizes(part_bytes(layout, index), whole)


def _group(layout: KVLayout, index: int, rank: int) -> _Group:
    """Whole pages, in the rank's own part."""
    tensors = [layout.tensors[i] for i in layout.groups[index]]
    page = _column([tensor.page_bytes for tensor in tensors])
    regions = page * layout.blocks_per_chunk
    return _Group(
        offset=_column([tensor.offset for tensor in tensors]),
        stride=_column([tensor.block_stride for tensor in tensors]),
        size=page,
        base=np.cumsum(regions) - regions + rank * part_bytes(layout, index),
        pitch=page,
        num_blocks=min(tensor.num_blocks for tensor in tensors),
    )


def _canonical_group(layout: KVLayout, index: int, direction: Direction) -> _Group:
    """Fragments of canonical pages; a store has the rank's share of what several ranks have."""
    tensors = [layout.tensors[i] for i in layout.groups[index]]
    maps = [layout.canonical.maps[number] for number in layout.canonical.groups[index]]
    pieces = [fragments_of(page) for page in maps]
    if direction is Direction.STORE:
        pieces = [clipped(piece, span) for piece, span in zip(pieces, shares(maps), strict=True)]
    pages = _column([page.page_bytes for page in maps])
    regions = pages * layout.blocks_per_chunk
    counts = [len(piece.size) for piece in pieces]

    def repeated(column: Column) -> Column:
        return np.repeat(column, counts)

    return _Group(
        offset=repeated(_column([tensor.offset for tensor in tensors]))
        + np.concatenate([piece.own for piece in pieces]),
        stride=repeated(_column([tensor.block_stride for tensor in tensors])),
        size=np.concatenate([piece.size for piece in pieces]),
        base=repeated(np.cumsum(regions) - regions)
        + np.concatenate([piece.whole for piece in pieces]),
        pitch=repeated(pages),
        num_blocks=min(tensor.num_blocks for tensor in tensors),
        per_layer=counts[0] if len(set(counts)) == 1 else 1,
    )


def _merged(rows: Column, chunk_ends: Column) -> CopyRuns:
    """Join each row to the one before it where both sides go on without a gap, in a chunk."""
    kv, pool, size = rows
    joins = (kv[:-1] + size[:-1] == kv[1:]) & (pool[:-1] + size[:-1] == pool[1:])
    if not joins.any():
        return CopyRuns(kv, pool, size, chunk_ends)
    begins = np.concatenate([[True], ~joins])
    begins[chunk_ends[:-1]] = True
    starts = np.flatnonzero(begins)
    sizes = np.add.reduceat(size, starts)
    return CopyRuns(kv[starts], pool[starts], sizes, np.searchsorted(starts, chunk_ends))
