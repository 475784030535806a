"""What every copy back end promises, against a copy page by page that is written here anew.

A back end joins with one more entry in `MEMORIES`. Both sides are full of random bytes and compared
as a whole, so that a byte beside the right place is found as well.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.geometry import MAX_SLAB_BYTES
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.engine import StopSign
from raykv.copy.plan import CopyRuns, Planner
from raykv.memory.words import Word
from raykv.protocol.worker import KVLayout, TensorLayout
from tests.fixtures.copy.memories import (
    MEMORIES,
    NEVER,
    Bytes,
    Memory,
    carried_out,
)
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import named_key

STORE, LOAD = Direction.STORE, Direction.LOAD

KV_BYTES = 8192
NUM_SLOTS = 6
NUM_BLOCKS = 16


every_backend = pytest.mark.parametrize("kind", MEMORIES)


@dataclass(frozen=True)
class Part:
    """One chunk of a job: blocks of a group, beginning at block `first` of the chunk."""

    group: int
    slot: int
    first: int
    blocks: list[int]


def layout(blocks_per_chunk: int, groups: dict[int, list[tuple[int, int, int]]]) -> KVLayout:
    """Layers are (offset, stride, page), by group."""
    tensors = [layer for layers in groups.values() for layer in layers]
    numbers = iter(range(len(tensors)))
    return KVLayout(
        "memfd",
        KV_BYTES,
        blocks_per_chunk,
        [TensorLayout(offset, NUM_BLOCKS, stride, page) for offset, stride, page in tensors],
        list(groups),
        [[next(numbers) for _ in layers] for layers in groups.values()],
    )


LAYOUTS = {
    "gaps between blocks": layout(1, {0: [(32, 100, 64)]}),
    "layers of several page sizes": layout(4, {0: [(0, 64, 64), (1024, 48, 32), (2048, 17, 1)]}),
}


def part_bytes(of: KVLayout, group: int) -> int:
    layers = of.groups[of.group_ids.index(group)]
    return sum(of.tensors[layer].page_bytes for layer in layers) * of.blocks_per_chunk


def slot_pages(of: KVLayout, num_ranks: int) -> int:
    largest = max(part_bytes(of, group) for group in of.group_ids) * num_ranks
    return -(-largest // SLOT_ALIGNMENT)


def pages(of: KVLayout, parts: list[Part], rank: int) -> Iterator[tuple[int, int, int]]:
    """Every page that a job is about: place in the KV cache, place in the pool, size."""
    for part in parts:
        layer_at = part.slot * SLOT_ALIGNMENT + rank * part_bytes(of, part.group)
        for layer in of.groups[of.group_ids.index(part.group)]:
            tensor = of.tensors[layer]
            for number, block in enumerate(part.blocks, start=part.first):
                kv = tensor.offset + block * tensor.block_stride
                yield kv, layer_at + number * tensor.page_bytes, tensor.page_bytes
            layer_at += of.blocks_per_chunk * tensor.page_bytes


def copied(
    of: KVLayout, parts: list[Part], rank: int, direction: Direction, kv: Bytes, pool: Bytes
) -> tuple[Bytes, Bytes]:
    """KV cache and pool as they should be after the job."""
    kv, pool = kv.copy(), pool.copy()
    for here, there, size in pages(of, parts, rank):
        if direction is STORE:
            pool[there : there + size] = kv[here : here + size]
        else:
            kv[here : here + size] = pool[there : there + size]
    return kv, pool


def runs_of(of: KVLayout, parts: list[Part], rank: int, direction: Direction) -> CopyRuns:
    count = len(parts)
    keys = [named_key("k", part.group) for part in parts]
    blocks, first = [part.blocks for part in parts], [part.first for part in parts]
    plan = Planner(of, rank).plan(named_job(direction, keys, blocks, first=first))
    return plan.runs(range(count), [Slot(part.slot) for part in parts], MAX_SLAB_BYTES)


def fill(memory: Memory, seed: int) -> None:
    random = np.random.default_rng(seed)
    for each in (memory.pool, *memory.kvs):
        each[:] = random.integers(0, 256, len(each), np.uint8)


def some_parts(of: KVLayout) -> list[Part]:
    """Two whole chunks of scattered and neighbouring blocks for each group."""
    count = of.blocks_per_chunk
    blocks = [3, 4, 5, 9, 8, 1, 0, 15]
    places = iter(range(0, NUM_SLOTS * slot_pages(of, 2), slot_pages(of, 2)))
    return [
        Part(group, next(places), 0, blocks[start : start + count])
        for group in of.group_ids
        for start in (0, count)
    ]


@contextmanager
def filled(kind: str, of: KVLayout, seed: int = 1) -> Iterator[Memory]:
    """Memory of two ranks, full of random bytes."""
    with MEMORIES[kind](2, NUM_SLOTS * slot_pages(of, 2) * SLOT_ALIGNMENT, KV_BYTES) as memory:
        fill(memory, seed)
        yield memory


def after_rows(
    memory: Memory, direction: Direction, runs: CopyRuns, first: int, last: int
) -> tuple[Bytes, Bytes]:
    """KV cache of rank 0 and pool as they should be after rows [first, last)."""
    kv, pool = memory.kvs[0].copy(), memory.pool.copy()
    for row in range(first, last):
        here = slice(runs.kv[row], runs.kv[row] + runs.size[row])
        there = slice(runs.pool[row], runs.pool[row] + runs.size[row])
        if direction is STORE:
            pool[there] = kv[here]
        else:
            kv[here] = pool[there]
    return kv, pool


def set_by_row(memory: Memory, direction: Direction, runs: CopyRuns, first: int, row: int) -> Word:
    """A word among the bytes that `row` writes: it is set when `row` has been carried out.

    So it is told exactly after which run a back end has looked, however it looks.
    """
    targets = memory.pool if direction is STORE else memory.kvs[0]
    offsets = runs.pool if direction is STORE else runs.kv
    at = int(offsets[row]) // 8 * 8
    before, after = (
        after_rows(memory, direction, runs, first, last)[direction is STORE][at : at + 8].tobytes()
        for last in (row, row + 1)
    )
    assert before != after
    return Word(targets.ctypes.data + at, int.from_bytes(after, sys.byteorder))


@every_backend
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_copy_looks_before_every_run_and_writes_nothing_after_it_was_stopped(
    kind: str, direction: Direction
) -> None:
    of = LAYOUTS["layers of several page sizes"]
    runs = runs_of(of, some_parts(of), 0, direction)
    count = len(runs.size)
    for first in (0, 2):
        for row in range(first, count - 1):
            with filled(kind, of, seed=row) as memory:
                kv, pool = after_rows(memory, direction, runs, first, row + 1)
                stop = StopSign([set_by_row(memory, direction, runs, first, row)])
                assert not carried_out(
                    memory.backend(0), direction, runs.some(slice(first, count)), stop
                )
                assert np.array_equal(memory.kvs[0], kv)
                assert np.array_equal(memory.pool, pool)


@every_backend
@pytest.mark.parametrize("number", [0, 1])
def test_copy_that_is_stopped_before_it_begins_writes_nothing(kind: str, number: int) -> None:
    """Whichever of the words is set."""
    of = LAYOUTS["gaps between blocks"]
    runs = runs_of(of, some_parts(of), 0, STORE)
    words = (ctypes.c_uint64 * 2)(7, 7)
    stop = StopSign([Word(ctypes.addressof(words) + 8 * i, 7 + (i != number)) for i in range(2)])
    with filled(kind, of) as memory:
        kv, pool = memory.kvs[0].copy(), memory.pool.copy()
        assert not carried_out(memory.backend(0), STORE, runs, stop)
        assert np.array_equal(memory.kvs[0], kv)
        assert np.array_equal(memory.pool, pool)
        words[number] = 0
        assert carried_out(memory.backend(0), STORE, runs, stop)


@every_backend
@pytest.mark.parametrize("direction", [STORE, LOAD])
def test_copy_is_stopped_by_another_thread_while_it_runs(kind: str, direction: Direction) -> None:
    """It would go on for a minute: the same mebibyte, again and again."""
    size = 1 << 20
    some = np.zeros(200_000, np.int64)
    runs = CopyRuns(some, some, some + size)
    word = ctypes.c_uint64(0)
    with MEMORIES[kind](1, size, size) as memory:
        target, source = (memory.pool, memory.kvs[0])[:: 1 if direction is STORE else -1]
        source[:] = 1

        def stop_it() -> None:
            while not target[-1]:
                pass
            word.value = 5

        thread = threading.Thread(target=stop_it)
        thread.start()
        stop = StopSign([Word(ctypes.addressof(word), 5)])
        assert not carried_out(memory.backend(0), direction, runs, stop)
        thread.join()


EDGES = [1, 7, 63, 64, 65, 1023, 1024, 1025, 1024 + 63, 4096, 16383, 16384, 16385, 16384 + 127]
"""Lines, pages and groups of pages of the kernel, and one more or less."""


@st.composite
def long_runs(draw: st.DrawFn) -> CopyRuns:
    """Runs of any size, that begin anywhere."""
    sizes = draw(
        st.lists(st.one_of(st.sampled_from(EDGES), st.integers(1, 50_000)), min_size=1, max_size=6)
    )
    gap = st.integers(0, 130)
    kv: list[int] = []
    pool: list[int] = []
    for places in (kv, pool):
        at = 0
        for each in sizes:
            at += draw(gap)
            places.append(at)
            at += each
    order = list(draw(st.permutations(range(len(sizes)))))
    here, there, size = (np.array(column, np.int64)[order] for column in (kv, pool, sizes))
    return CopyRuns(here, there, size)


@every_backend
@settings(deadline=None, max_examples=60)
@given(runs=long_runs(), direction=st.sampled_from(Direction), seed=st.integers(0, 99))
def test_copy_of_long_runs_keeps_to_their_bytes(
    kind: str, runs: CopyRuns, direction: Direction, seed: int
) -> None:
    ends = [int((column + runs.size).max()) + 100 for column in (runs.pool, runs.kv)]
    with MEMORIES[kind](1, *ends) as memory:
        fill(memory, seed)
        kv, pool = after_rows(memory, direction, runs, 0, len(runs.size))
        assert carried_out(memory.backend(0), direction, runs, NEVER)
        assert np.array_equal(memory.kvs[0], kv)
        assert np.array_equal(memory.pool, pool)


@every_backend
@pytest.mark.parametrize("offset", [0, 1, 64, 4095])
def test_copy_of_a_run_in_pieces_is_whole(kind: str, offset: int) -> None:
    size = 3 * (1 << 20) + 77
    runs = CopyRuns(np.array([5]), np.array([offset]), np.array([size]))
    with MEMORIES[kind](1, size + 8192, size + 8192) as memory:
        fill(memory, offset)
        _, pool = after_rows(memory, STORE, runs, 0, 1)
        assert carried_out(memory.backend(0), STORE, runs, NEVER)
        assert np.array_equal(memory.pool, pool)


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    """Some groups of layers whose tensors lie one behind the other, with gaps of all kinds."""
    groups: dict[int, list[tuple[int, int, int]]] = {}
    at = draw(st.integers(0, 9))
    for group in draw(st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)):
        layers = []
        for _ in range(draw(st.integers(1, 2))):
            page = draw(st.integers(1, 60))
            stride = page + draw(st.sampled_from([0, 0, 1, 16]))
            layers.append((at, stride, page))
            at += NUM_BLOCKS * stride + draw(st.sampled_from([0, 7]))
        groups[group] = layers
    return layout(draw(st.sampled_from([1, 2, 4])), groups)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[KVLayout, list[Part]]:
    """A layout, and chunks of different slots and blocks."""
    of = draw(layouts())
    blocks = draw(st.permutations(range(NUM_BLOCKS)))
    if draw(st.booleans()):
        blocks = sorted(blocks)
    places = draw(st.permutations(range(NUM_SLOTS)))
    parts = []
    for place in places[: draw(st.integers(0, 3))]:
        first = draw(st.integers(0, of.blocks_per_chunk - 1))
        count = draw(st.integers(1, of.blocks_per_chunk - first))
        group = draw(st.sampled_from(of.group_ids))
        parts.append(Part(group, place * slot_pages(of, 2), first, blocks[:count]))
        blocks = blocks[count:]
    return of, parts


@every_backend
@settings(deadline=None, max_examples=150)
@given(
    job=jobs(),
    rank=st.integers(0, 1),
    direction=st.sampled_from(Direction),
    seed=st.integers(0, 99),
)
def test_copy_of_any_job_is_that_of_its_pages(
    kind: str, job: tuple[KVLayout, list[Part]], rank: int, direction: Direction, seed: int
) -> None:
    of, parts = job
    runs = runs_of(of, parts, rank, direction)
    with filled(kind, of, seed) as memory:
        kv, pool = copied(of, parts, rank, direction, memory.kvs[rank], memory.pool)
        assert carried_out(memory.backend(rank), direction, runs, NEVER)
        assert np.array_equal(memory.kvs[rank], kv)
        assert np.array_equal(memory.pool, pool)
        assert runs.num_bytes == sum(size for _, _, size in pages(of, parts, rank))
