"""Which chunks of a job are copied with one call of a back end: enough to fill a batch. Pure.

A device is waited for at the end of each call, which takes as long as the copy of a small chunk. So
neighbouring chunks of a job go together, without those that were refused, and a run goes on from
one chunk's slot into the next one where both sides do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from raykv.copy.plan import Column, CopyRuns

SPAN_BYTES = 32 << 20
"""What a device gathers at once (`raykv.copy.cuda.lane.Limits`): 1 ms at the speed of PCIe, in
which the next one is submitted. All chunks of a span fail together when its job is cancelled, so it
should not be much larger."""

HOST_SPAN_BYTES = 4 << 20
"""For stores out of the host's memory: half a millisecond, for which they may hold up a load. Loads
wait for nobody: with spans as large as a device's one of 96 MiB takes 0.8 ms less."""


@dataclass(frozen=True)
class Span:
    """Chunks of a job, which all rows of `runs` copy.

    The runs that `runs.chunk_ends` keeps apart are those of slabs here: no run crosses a slab's
    edge, where pieces of page-locked memory may meet.
    """

    chunks: list[int]
    chunk_bytes: list[int]
    runs: CopyRuns


def spans(
    runs: CopyRuns, chunks: Sequence[int], slab_bytes: int, most_bytes: int
) -> Iterator[Span]:
    """Some chunks of a plan in order, in spans of at most `most_bytes`, or of one chunk.

    Args:
        runs: the plan of all chunks.
        chunks: those that are to be copied, in rising order. Each lies within a slab.
        slab_bytes: where the pool has its edges.
        most_bytes: of a span; a chunk that is larger has its own.
    """
    if not chunks:
        return
    only = _as_planned(runs, chunks, slab_bytes, most_bytes)
    if only is not None:
        yield only
        return
    wanted = np.asarray(chunks, np.int64)
    lasts = runs.chunk_ends[wanted]
    firsts = np.where(wanted > 0, runs.chunk_ends[wanted - 1], 0)
    rows = _ranges(firsts, lasts)
    kv, pool, size = runs.kv[rows], runs.pool[rows], runs.size[rows]
    row_ends = np.cumsum(lasts - firsts)
    chunk_bytes = np.diff(np.cumsum(size)[row_ends - 1], prepend=0)
    bounds = _bounds(chunk_bytes, most_bytes)
    span_rows = np.append(0, row_ends)[bounds]
    is_edge = np.concatenate([[True], np.diff(pool // slab_bytes) != 0])
    is_edge[span_rows[:-1]] = True
    begins = is_edge.copy()
    begins[1:] |= (kv[:-1] + size[:-1] != kv[1:]) | (pool[:-1] + size[:-1] != pool[1:])
    starts = np.flatnonzero(begins)
    kv, pool, size = kv[starts], pool[starts], np.add.reduceat(size, starts)
    edges = np.searchsorted(starts, np.flatnonzero(is_edge))
    places = np.searchsorted(starts, span_rows).tolist()
    edges_at = np.searchsorted(edges, places).tolist()
    for number, (chunk, next_chunk) in enumerate(pairwise(bounds)):
        first, last = places[number : number + 2]
        some = slice(first, last)
        ends = np.append(edges[edges_at[number] + 1 : edges_at[number + 1]], last) - first
        yield Span(
            wanted[chunk:next_chunk].tolist(),
            chunk_bytes[chunk:next_chunk].tolist(),
            CopyRuns(kv[some], pool[some], size[some], ends),
        )


def _as_planned(
    runs: CopyRuns, chunks: Sequence[int], slab_bytes: int, most_bytes: int
) -> Span | None:
    """All of them, where they are neighbours that make one span, and no run goes on in the next
    chunk: then their runs are as they were planned; else None.
    """
    first, last = chunks[0], chunks[-1]
    if last - first != len(chunks) - 1:
        return None
    begin = int(runs.chunk_ends[first - 1]) if first else 0
    ends = runs.chunk_ends[first : last + 1]
    some = slice(begin, int(ends[-1]))
    kv, pool, size = runs.kv[some], runs.pool[some], runs.size[some]
    ends = ends - begin
    if len(chunks) > 1 and int(size.sum()) > most_bytes:
        return None
    left, right = ends[:-1] - 1, ends[:-1]
    joins = (kv[left] + size[left] == kv[right]) & (pool[left] + size[left] == pool[right])
    if joins.any():
        return None
    chunk_bytes = np.add.reduceat(size, np.append(0, right)).tolist()
    is_edge = np.append(pool[left] // slab_bytes != pool[right] // slab_bytes, True)
    return Span([*chunks], chunk_bytes, CopyRuns(kv, pool, size, ends[is_edge]))


def _bounds(chunk_bytes: Column, most_bytes: int) -> list[int]:
    """Where spans begin, among the chunks, and where the last one ends."""
    ends = np.cumsum(chunk_bytes)
    bounds, done = [0], 0
    while bounds[-1] < len(ends):
        stop = int(np.searchsorted(ends, done + most_bytes, side="right"))
        bounds.append(max(bounds[-1] + 1, stop))
        done = int(ends[bounds[-1] - 1])
    return bounds


def _ranges(firsts: Column, lasts: Column) -> slice | Column:
    """The rows of some chunks; a slice, which copies nothing, where none is left out."""
    if np.array_equal(firsts[1:], lasts[:-1]):
        return slice(int(firsts[0]), int(lasts[-1]))
    counts = lasts - firsts
    offsets = np.repeat(firsts - (np.cumsum(counts) - counts), counts)
    rows: Column = offsets + np.arange(counts.sum())
    return rows
