"""From a copy job to runs of bytes: which pages go where.

A chunk's slot holds one part per rank, each part one region per layer, each region the chunk's
blocks in order. A canonical chunk has one region per layer for all ranks, of canonical pages, and
each rank copies the fragments of them that it has. Runs that are adjacent on both sides are merged,
also from one chunk's slot into the next one; none goes on over the end of a slab, where pieces of
page-locked memory may meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from raykv.base.ids import GROUP_BYTES, SLOT_ALIGNMENT, Blocks, Direction, Key, Slot, group_of
from raykv.memory.canonical import Fragments, clipped, fragments_of, shares
from raykv.memory.handles import part_bytes
from raykv.protocol import columns, copies, worker

Column = npt.NDArray[np.int64]

NO_SLABS = 1 << 62
"""Bytes of a slab where memory outside of the pool has no slabs: no offset reaches it."""


_NO_ROWS = np.empty((3, 0), np.int64)


class PlanError(ValueError):
    """A job names blocks or groups that the KV cache does not have."""


@dataclass(frozen=True)
class CopyRuns:
    """Runs of bytes: offsets in the KV memory and in the pool, and sizes; one row per run.

    Slabs of the pool begin at multiples of `slab_bytes`; no run goes on over the end of one.
    """

    kv: Column
    pool: Column
    size: Column
    slab_bytes: int = NO_SLABS

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of all runs."""
        return int(np.add.reduce(self.size))

    def some(self, part: slice | Column) -> CopyRuns:
        """A part of the rows."""
        return CopyRuns(self.kv[part], self.pool[part], self.size[part], self.slab_bytes)


@dataclass(frozen=True)
class _Group:
    """How a block of a KV group is copied: columns with one entry per fragment of its pages.

    `offset` is the fragment's place in block 0 of the KV cache, `base` in the first block of a
    chunk's slot; the next block is `stride` and `pitch` further on. `per_layer` fragments of a
    layer follow each other, where all `num_layers` have as many; else both are 1.
    """

    offset: Column
    stride: Column
    size: Column
    base: Column
    pitch: Column
    num_blocks: int
    per_layer: int
    num_layers: int

    @cached_property
    def block_bytes(self) -> int:
        """Of all fragments of a block."""
        return int(self.size.sum())


class Planner:
    """Plans the jobs of one worker, whose layout it was made for."""

    def __init__(self, layout: worker.KVLayout, rank: int) -> None:
        self._blocks_per_chunk = layout.blocks_per_chunk
        # Of a rank's pages of a chunk, and of all canonical ones where a group has such.
        self._part_bytes: dict[int, int] = {}
        self._canonical_bytes: dict[int, int] = {}
        self._tensors: dict[int, list[worker.TensorLayout]] = {}
        # What is copied of a block, by direction: of what several ranks have each stores a share.
        self._groups: dict[Direction, dict[int, _Group]] = {way: {} for way in Direction}
        for index, group_id in enumerate(layout.group_ids):
            self._part_bytes[group_id] = part_bytes(layout, index)
            if layout.canonical.groups:
                maps = _maps(layout, index)
                pages = sum(page.page_bytes for page in maps)
                self._canonical_bytes[group_id] = pages * layout.blocks_per_chunk
            self._tensors[group_id] = [layout.tensors[i] for i in layout.groups[index]]
            for way in Direction:
                self._groups[way][group_id] = _group(layout, index, rank, way)

    def is_whole(self, blocks: Blocks) -> bool:
        """Whether these are all blocks of a chunk."""
        return blocks.length == self._blocks_per_chunk

    def left_out(self, job: copies.CopyJob, chunk: int, slot: Slot) -> Column:
        """Where in the pool this rank's part of the blocks would be that one chunk of a store does
        not have, as [[offset, size], …].
        """
        group = self._groups[Direction.STORE][group_of(Key(job.keys[chunk]))]
        first, end = job.first_block[chunk], job.first_block[chunk] + job.num_blocks[chunk]
        places = np.concatenate([np.arange(first), np.arange(end, self._blocks_per_chunk)])
        start = slot * SLOT_ALIGNMENT + group.base
        offsets = start[:, None] + group.pitch[:, None] * places
        sizes = np.broadcast_to(group.size[:, None], offsets.shape)
        return np.stack([offsets.ravel(), sizes.ravel()], axis=1)

    def part_bytes(self, group_id: int) -> int:
        """Bytes of this rank's part of a chunk of the group.

        Raises:
            PlanError: there is no such group.
        """
        if group_id not in self._part_bytes:
            raise PlanError(f"no KV group {group_id}; there are {sorted(self._part_bytes)}")
        return self._part_bytes[group_id]

    def chunk_bytes(self, group_id: int, num_ranks: int) -> int:
        """Bytes of a chunk of the group, the parts of all ranks.

        Raises:
            PlanError: there is no such group.
        """
        parts = self.part_bytes(group_id) * num_ranks
        return self._canonical_bytes.get(group_id, parts)

    def layer(self, group_id: int, index: int) -> worker.TensorLayout:
        """Where the pages of one layer of a group are.

        Raises:
            PlanError: there is no such group, or no such layer in it.
        """
        self.part_bytes(group_id)
        tensors = self._tensors[group_id]
        if not 0 <= index < len(tensors):
            raise PlanError(f"no layer {index} in KV group {group_id}: it has {len(tensors)}")
        return tensors[index]

    @staticmethod
    def pages(layer: worker.TensorLayout, block_ids: Sequence[int], to: int) -> CopyRuns:
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
        return CopyRuns(kv, to + count * size, np.full_like(count, size))

    def plan(self, job: copies.CopyJob) -> JobPlan:
        """How a job is carried out.

        Raises:
            PlanError: it points outside of the KV cache, or it is by layer and has chunks of
                several groups.
        """
        groups = _groups_of(job.keys)
        for group_id in set(groups.tolist()):
            self.part_bytes(group_id)
        if job.by_layer and len(set(groups.tolist())) > 1:
            raise PlanError(f"job {job.job_id}: layer by layer, of several KV groups")
        plan = JobPlan(job, groups, self._groups[Direction(job.direction)])
        plan.check(self._blocks_per_chunk)
        return plan


class JobPlan:
    """The runs of a job's chunks, any of them, at any time; of `Planner.plan`.

    `ends`: bytes of the chunks up to each of them. `groups`: KV groups of its chunks.
    """

    def __init__(self, job: copies.CopyJob, groups: Column, known: Mapping[int, _Group]) -> None:
        self._job_id = job.job_id
        self._first, self._counts = _column(job.first_block), _column(job.num_blocks)
        self._starts = np.cumsum(self._counts) - self._counts
        self._groups, self._blocks = groups, _column(job.block_ids)
        each = list(zip(groups.tolist(), self._counts.tolist(), strict=True))
        self._kinds = [(known[id_], id_, count) for id_, count in sorted(set(each))]
        sizes = {id_: group.block_bytes for group, id_, _ in self._kinds}
        self.ends = list(accumulate(sizes[id_] * count for id_, count in each))

    @property
    def groups(self) -> set[int]:
        return {group_id for _, group_id, _ in self._kinds}

    def check(self, blocks_per_chunk: int) -> None:
        """Whether its blocks are there.

        Raises:
            PlanError: they are not.
        """
        counts, first, blocks = self._counts, self._first, self._blocks
        if counts.sum() != len(blocks):
            raise PlanError(f"job {self._job_id}: {len(blocks)} blocks, not {counts.sum()}")
        wrong = np.flatnonzero((counts < 1) | (first < 0) | (first > blocks_per_chunk - counts))
        if len(wrong):
            chunk = wrong[0]
            raise PlanError(
                f"job {self._job_id}: {counts[chunk]} blocks from {first[chunk]} of chunk {chunk}, "
                f"which has {blocks_per_chunk}"
            )
        most = min((group.num_blocks for group, _, _ in self._kinds), default=0)
        if len(blocks) and not 0 <= blocks.min() <= blocks.max() < most:
            raise PlanError(f"job {self._job_id}: a block id outside of 0..{most - 1}")

    def bytes_of(self, chunk: int) -> int:
        """What is copied of one chunk."""
        return self.ends[chunk] - (self.ends[chunk - 1] if chunk else 0)

    def runs(self, chunks: Sequence[int], at: Sequence[Slot], slab_bytes: int) -> CopyRuns:
        """The runs of some chunks at these slots; the chunks come in any order."""
        rows = [made.reshape(3, -1) for _, made in self._rows_of(chunks, at)]
        return _runs(np.concatenate([_NO_ROWS, *rows], axis=1), slab_bytes)

    def layers(
        self, chunks: Sequence[int], at: Sequence[Slot], slab_bytes: int
    ) -> Iterator[CopyRuns]:
        """The runs of some chunks of a job by layer, for each layer of its KV group; of one layer
        the chunks come in any order.
        """
        kinds = [
            rows.reshape(3, rows.shape[1], group.num_layers, -1)
            for group, rows in self._rows_of(chunks, at)
        ]
        for layer in range(kinds[0].shape[2]):
            rows = [kind[:, :, layer].reshape(3, -1) for kind in kinds]
            yield _runs(np.concatenate(rows, axis=1), slab_bytes)

    def _rows_of(
        self, chunks: Sequence[int], at: Sequence[Slot]
    ) -> Iterator[tuple[_Group, Column]]:
        """Rows of the chunks of each group with as many blocks; see `_rows`."""
        wanted, slots = _column(chunks), _column(at)
        for group, group_id, count in self._kinds:
            is_such = (self._groups[wanted] == group_id) & (self._counts[wanted] == count)
            if is_such.any():
                such = wanted[is_such]
                blocks = self._blocks[self._starts[such, None] + np.arange(count)]
                yield group, _rows(group, slots[is_such], self._first[such], blocks)


def _rows(group: _Group, slots: Column, first: Column, blocks: Column) -> Column:
    """Rows of chunks of one group with as many blocks, as [column, chunk, row].

    In a chunk layer by layer, so that neighbouring blocks can be merged; then block by block.

    Args:
        group: the KV group.
        slots: of each chunk.
        first: place in its chunk of each chunk's first block.
        blocks: block ids, [chunk, block].
    """
    num_chunks, count = blocks.shape
    rows = np.empty((3, num_chunks, len(group.size), count), np.int64)
    kv, pool, size = rows
    np.multiply(blocks[:, None, :], group.stride[:, None], out=kv)
    kv += group.offset[:, None]
    # Where the chunk's blocks are in its slot; most jobs have whole chunks.
    within = group.base[:, None] + group.pitch[:, None] * np.arange(count)
    np.add((slots * SLOT_ALIGNMENT)[:, None, None], within, out=pool)
    if first.any():
        pool += first[:, None, None] * group.pitch[:, None]
    size[:] = group.size[:, None]
    if group.per_layer > 1:
        num_layers = len(group.size) // group.per_layer
        by_layer = rows.reshape(3, num_chunks, num_layers, group.per_layer, count)
        rows = by_layer.swapaxes(3, 4)
    return rows.reshape(3, num_chunks, len(group.size) * count)


def _column(numbers: Sequence[int]) -> Column:
    if isinstance(numbers, columns.Numbers):
        return np.frombuffer(numbers.raw, np.int64)
    return np.asarray(numbers, dtype=np.int64)


def _groups_of(keys: columns.Keys) -> Column:
    """The KV group of each key."""
    width = keys.width
    if width is None or width < GROUP_BYTES:
        return _column([group_of(Key(key)) for key in keys])
    ends = np.frombuffer(keys.raw, np.uint8).reshape(-1, width)[:, -GROUP_BYTES:]
    return np.ascontiguousarray(ends).view(">u4").ravel().astype(np.int64)


def _maps(layout: worker.KVLayout, index: int) -> list[worker.PageMap]:
    """The maps of a group's pages; none if these are not canonical."""
    groups = layout.canonical.groups
    return [layout.canonical.maps[number] for number in groups[index]] if groups else []


def _group(layout: worker.KVLayout, index: int, rank: int, direction: Direction) -> _Group:
    """Whole pages in the rank's own part, or fragments of canonical pages. Of these a store has the
    rank's share of what several ranks have.
    """
    tensors = [layout.tensors[i] for i in layout.groups[index]]
    own_pages = [tensor.page_bytes for tensor in tensors]
    if maps := _maps(layout, index):
        begin, pages = 0, _column([page.page_bytes for page in maps])
        pieces = [fragments_of(page) for page in maps]
        if direction is Direction.STORE:
            spans = zip(pieces, shares(maps), strict=True)
            pieces = [clipped(piece, span) for piece, span in spans]
    else:
        begin, pages = rank * part_bytes(layout, index), _column(own_pages)
        zero = np.zeros(1, np.int64)
        pieces = [Fragments(zero, zero, _column([size])) for size in own_pages]
    regions = pages * layout.blocks_per_chunk
    counts = [len(piece.size) for piece in pieces]
    # Of some layers there may be more fragments than of others: then all of them together.
    is_even = len(set(counts)) == 1

    def repeated(column: Column) -> Column:
        return np.repeat(column, counts)

    return _Group(
        offset=repeated(_column([tensor.offset for tensor in tensors]))
        + np.concatenate([piece.own for piece in pieces]),
        stride=repeated(_column([tensor.block_stride for tensor in tensors])),
        size=np.concatenate([piece.size for piece in pieces]),
        base=repeated(np.cumsum(regions) - regions + begin)
        + np.concatenate([piece.whole for piece in pieces]),
        pitch=repeated(pages),
        num_blocks=min(tensor.num_blocks for tensor in tensors),
        per_layer=counts[0] if is_even else 1,
        num_layers=len(tensors) if is_even else 1,
    )


def _runs(rows: Column, slab_bytes: int) -> CopyRuns:
    kv, pool, size = rows
    return merged(CopyRuns(kv, pool, size, slab_bytes))


def merged(runs: CopyRuns) -> CopyRuns:
    """Join each row to the one before it where both sides go on without a gap, in a slab."""
    kv, pool, size = runs.kv, runs.pool, runs.size
    joins = (kv[:-1] + size[:-1] == kv[1:]) & (pool[:-1] + size[:-1] == pool[1:])
    if not joins.any():
        return runs
    joins &= pool[1:] % runs.slab_bytes != 0
    starts = np.flatnonzero(np.concatenate([[True], ~joins]))
    size = np.add.reduceat(size, starts)
    return CopyRuns(kv[starts], pool[starts], size, runs.slab_bytes)
