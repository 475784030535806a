"""From copy jobs to runs of bytes, by example."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.plan import CopyRuns, JobPlan, PlanError, Planner
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyJob
from raykv.protocol.worker import KVLayout, TensorLayout
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import named_key

PAGE = 64
SLAB = 64 * SLOT_ALIGNMENT
Run = tuple[int, int, int]


def layout(
    *tensors: tuple[int, int, int, int],
    blocks_per_chunk: int = 1,
    groups: dict[int, list[int]] | None = None,
) -> KVLayout:
    """Tensors are (offset, blocks, stride, page); all of them are group 0 if nothing is said."""
    groups = {0: list(range(len(tensors)))} if groups is None else groups
    return KVLayout(
        "memfd",
        1 << 20,
        blocks_per_chunk,
        [TensorLayout(*tensor) for tensor in tensors],
        list(groups),
        list(groups.values()),
    )


@dataclass(frozen=True)
class PlacedJob:
    """A job, and the slots that its chunks have got."""

    job: CopyJob
    slots: list[Slot]

    def planned(self, planner: Planner) -> PlacedPlan:
        return PlacedPlan(planner.plan(self.job), self.slots)


@dataclass(frozen=True)
class PlacedPlan:
    """The plan of such a job."""

    plan: JobPlan
    slots: list[Slot]

    def runs(self, chunks: Sequence[int], slab_bytes: int) -> CopyRuns:
        return self.plan.runs(chunks, [self.slots[chunk] for chunk in chunks], slab_bytes)

    def layers(self, chunks: Sequence[int], slab_bytes: int) -> Iterator[CopyRuns]:
        return self.plan.layers(chunks, [self.slots[chunk] for chunk in chunks], slab_bytes)

    @property
    def ends(self) -> list[int]:
        return self.plan.ends

    def bytes_of(self, chunk: int) -> int:
        return self.plan.bytes_of(chunk)


def job(
    *chunks: tuple[int, list[int]], first_block: int = 0, groups: list[int] | None = None
) -> PlacedJob:
    """Chunks are (slot, block ids)."""
    keys = [named_key("k", group) for group in groups or [0] * len(chunks)]
    blocks = [blocks for _, blocks in chunks]
    made = named_job(Direction.LOAD, keys, blocks, first=[first_block] * len(chunks))
    return PlacedJob(made, [Slot(slot) for slot, _ in chunks])


def runs_of(of: KVLayout, wanted: PlacedJob, rank: int = 0, slab_bytes: int = SLAB) -> CopyRuns:
    """Of all chunks."""
    return wanted.planned(Planner(of, rank)).runs(range(len(wanted.slots)), slab_bytes)


def rows(runs: CopyRuns) -> list[Run]:
    """Runs as (offset in the KV cache, offset in the pool, size)."""
    return list(zip(runs.kv.tolist(), runs.pool.tolist(), runs.size.tolist(), strict=True))


def plan(of: KVLayout, wanted: PlacedJob, rank: int = 0) -> list[Run]:
    return rows(runs_of(of, wanted, rank))


def test_plan_joins_blocks_that_are_neighbours_on_both_sides() -> None:
    of = layout((0, 10, PAGE, PAGE), blocks_per_chunk=4)
    assert plan(of, job((0, [2, 3, 4, 5]))) == [(2 * PAGE, 0, 4 * PAGE)]
    assert plan(of, job((0, [7, 2, 3, 9]))) == [
        (7 * PAGE, 0, PAGE),
        (2 * PAGE, PAGE, 2 * PAGE),
        (9 * PAGE, 3 * PAGE, PAGE),
    ]


def test_plan_joins_nothing_when_there_are_gaps_between_the_blocks() -> None:
    of = layout((0, 10, 100, PAGE), blocks_per_chunk=2)
    assert plan(of, job((0, [2, 3]))) == [(200, 0, PAGE), (300, PAGE, PAGE)]


def test_plan_handles_layers_that_are_woven_into_each_other() -> None:
    of = layout((0, 4, 160, PAGE), (PAGE, 4, 160, 96))
    assert plan(of, job((0, [1]))) == [(160, 0, 160)]


def test_plan_puts_rank_behind_rank_in_a_slot() -> None:
    of = layout((0, 10, PAGE, PAGE), (640, 10, 32, 32), blocks_per_chunk=4)
    part = 4 * (PAGE + 32)
    assert Planner(of, 0).part_bytes(0) == part
    assert plan(of, job((3, [5])), rank=1) == [
        (5 * PAGE, 3 * SLOT_ALIGNMENT + part, PAGE),
        (640 + 5 * 32, 3 * SLOT_ALIGNMENT + part + 4 * PAGE, 32),
    ]


def test_plan_skips_the_first_blocks_of_a_chunk_when_a_load_begins_inside_of_it() -> None:
    of = layout((0, 10, PAGE, PAGE), blocks_per_chunk=4)
    assert plan(of, job((0, [7, 8]), first_block=2)) == [(7 * PAGE, 2 * PAGE, 2 * PAGE)]


WHOLE_PAGES = layout((0, 10, SLOT_ALIGNMENT, SLOT_ALIGNMENT))


def test_plan_joins_neighbouring_chunks_of_a_slab_and_parts_them_at_its_end() -> None:
    neighbours = job((4, [0]), (5, [1]), (6, [2]), (7, [3]))
    together = runs_of(WHOLE_PAGES, neighbours)
    assert rows(together) == [(0, 4 * SLOT_ALIGNMENT, 4 * SLOT_ALIGNMENT)]
    parted = runs_of(WHOLE_PAGES, neighbours, slab_bytes=6 * SLOT_ALIGNMENT)
    assert rows(parted) == [
        (0, 4 * SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT),
        (2 * SLOT_ALIGNMENT, 6 * SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT),
    ]


def test_chunk_that_is_left_out_parts_its_neighbours() -> None:
    plan = job((4, [0]), (5, [1]), (6, [2]), (7, [3])).planned(Planner(WHOLE_PAGES, 0))
    assert rows(plan.runs([0, 1, 3], SLAB)) == [
        (0, 4 * SLOT_ALIGNMENT, 2 * SLOT_ALIGNMENT),
        (3 * SLOT_ALIGNMENT, 7 * SLOT_ALIGNMENT, SLOT_ALIGNMENT),
    ]


@given(
    slots=st.lists(st.integers(0, 30), unique=True, max_size=8),
    data=st.data(),
    num_slots=st.sampled_from([2, 3, 8]),
)
def test_runs_of_some_chunks_are_their_bytes_and_none_crosses_a_slab(
    slots: list[int], data: st.DataObject, num_slots: int
) -> None:
    """Chunks of one or two blocks, of two groups; the blocks may be neighbours as the slots are."""
    page = SLOT_ALIGNMENT // 2
    of = layout(
        (0, 80, page, page),
        (80 * page, 80, page, page),
        blocks_per_chunk=2,
        groups={0: [0], 1: [1]},
    )
    chunks = []
    for slot in slots:
        block = data.draw(st.sampled_from([2 * slot, 2 * slot, 70]))
        chunks.append((slot, [block, block + 1][: data.draw(st.integers(1, 2))]))
    groups = [data.draw(st.integers(0, 1)) for _ in slots]
    kept = [chunk for chunk in range(len(slots)) if data.draw(st.integers(0, 3))]
    plan = job(*chunks, groups=groups).planned(Planner(of, 0))
    slab_bytes = num_slots * SLOT_ALIGNMENT
    runs = plan.runs(kept, slab_bytes)
    alone = [run for chunk in kept for run in rows(plan.runs([chunk], slab_bytes))]
    assert bytes_of(rows(runs)) == bytes_of(alone)
    assert runs.num_bytes == sum(map(plan.bytes_of, kept))
    found = rows(runs)
    slabs = [pool // slab_bytes for _, pool, _ in found]
    assert slabs == [(pool + size - 1) // slab_bytes for _, pool, size in found]
    assert runs.slab_bytes == slab_bytes
    for (kv, pool, size), (next_kv, next_pool, _) in pairwise(found):
        assert next_pool % slab_bytes == 0 or (kv + size, pool + size) != (next_kv, next_pool)


def bytes_of(some: list[Run]) -> list[tuple[int, int]]:
    return sorted((kv + i, pool + i) for kv, pool, size in some for i in range(0, size, 64))


def test_plan_says_where_the_bytes_of_each_chunk_end() -> None:
    of = layout((0, 10, PAGE, PAGE), blocks_per_chunk=3)
    plan = job((0, [1, 2, 3]), (1, [9, 0, 5]), (2, [4, 5])).planned(Planner(of, 0))
    assert plan.ends == [3 * PAGE, 6 * PAGE, 8 * PAGE]
    assert [plan.bytes_of(chunk) for chunk in range(3)] == [3 * PAGE, 3 * PAGE, 2 * PAGE]
    assert plan.runs(range(3), SLAB).num_bytes == 8 * PAGE


def test_plan_has_all_chunks_that_differ_in_group_and_number_of_blocks() -> None:
    of = layout((0, 10, PAGE, PAGE), (640, 10, 32, 32), blocks_per_chunk=2, groups={0: [0], 5: [1]})
    wanted = job((0, [1, 3]), (1, [2]), (2, [5, 7]), (3, [6]), groups=[0, 5, 0, 0])
    assert set(plan(of, wanted)) == {
        (PAGE, 0, PAGE),
        (3 * PAGE, PAGE, PAGE),
        (640 + 2 * 32, SLOT_ALIGNMENT, 32),
        (5 * PAGE, 2 * SLOT_ALIGNMENT, PAGE),
        (7 * PAGE, 2 * SLOT_ALIGNMENT + PAGE, PAGE),
        (6 * PAGE, 3 * SLOT_ALIGNMENT, PAGE),
    }
    assert wanted.planned(Planner(of, 0)).ends == [128, 160, 288, 352]


WHOLE = job((0, [1, 2]), (1, [3, 4]))


@pytest.mark.parametrize(
    "changed",
    [
        {"block_ids": [1, 2, 3]},
        {"block_ids": [1, 2, 3, 4, 5]},
        {"block_ids": [1, 2, 3, 10]},
        {"block_ids": [1, 2, 3, -1]},
        {"block_ids": [1, 2, 3, 1 << 62]},
        {"keys": Keys.of([named_key("k", 0), named_key("k", 1)])},
        {"keys": Keys.of([named_key("k", 0), b"k"])},
        {"num_blocks": [4, 0]},
        {"num_blocks": [2, 0], "block_ids": [1, 2]},
        {"num_blocks": [0, 0], "block_ids": []},
        {"num_blocks": [3, 1]},
        {"num_blocks": [(1 << 62) - 1] * 2},
        {"first_block": [0, 1]},
        {"first_block": [(1 << 62) - 1, 0]},
    ],
    ids=str,
)
def test_plan_refuses_a_job_that_is_malformed(changed: dict[str, Any]) -> None:
    planner = Planner(layout((0, 10, PAGE, PAGE), blocks_per_chunk=2), 0)
    planner.plan(WHOLE.job)
    columns = {
        name: Numbers.of(value) if isinstance(value, list) else value
        for name, value in changed.items()
    }
    with pytest.raises(PlanError):
        planner.plan(msgspec.structs.replace(WHOLE.job, **columns))


def test_plan_refuses_a_block_that_one_layer_of_the_group_does_not_have() -> None:
    of = layout((0, 10, PAGE, PAGE), (640, 5, PAGE, PAGE))
    plan(of, job((0, [4])))
    with pytest.raises(PlanError, match=r"0\.\.4"):
        plan(of, job((0, [5])))


def test_plan_refuses_a_block_that_one_group_of_the_job_does_not_have() -> None:
    of = layout((0, 10, PAGE, PAGE), (640, 5, PAGE, PAGE), groups={0: [0], 1: [1]})
    plan(of, job((0, [4]), (1, [4]), groups=[0, 1]))
    with pytest.raises(PlanError):
        plan(of, job((0, [4]), (1, [7]), groups=[0, 1]))


def test_part_bytes_names_the_groups_that_there_are() -> None:
    of = layout((0, 10, PAGE, PAGE), groups={2: [0]})
    with pytest.raises(PlanError, match=r"no KV group 1; there are \[2\]"):
        Planner(of, 0).part_bytes(1)


def test_layers_of_a_plan_together_are_the_plan() -> None:
    of = layout((0, 10, PAGE, PAGE), (640, 10, 32, 32), (2000, 10, 100, 48), blocks_per_chunk=3)
    wanted = job((0, [1, 2, 3]), (4, [7, 5]), (6, [9, 0, 4]))
    plan = wanted.planned(Planner(of, 0))

    def of_bytes(runs: list[Run]) -> set[tuple[int, int]]:
        return {(kv + i, pool + i) for kv, pool, size in runs for i in range(size)}

    layers = [rows(each) for each in plan.layers([0, 1, 2], SLAB)]
    assert len(layers) == 3
    assert of_bytes([run for layer in layers for run in layer]) == of_bytes(
        rows(plan.runs(range(3), SLAB))
    )
    for layer, (first, last) in zip(layers, [(0, 640), (640, 960), (2000, 3000)], strict=True):
        assert all(first <= kv < last for kv, _, _ in layer)


def test_layers_of_chunks_of_one_length_need_none_of_another_one() -> None:
    of = layout((0, 10, PAGE, PAGE), blocks_per_chunk=2)
    plan = job((0, [1, 3]), (2, [5])).planned(Planner(of, 0))
    assert [rows(each) for each in plan.layers([1], SLAB)] == [
        [(5 * PAGE, 2 * SLOT_ALIGNMENT, PAGE)]
    ]


def test_layers_of_several_groups_are_refused() -> None:
    of = layout((0, 10, PAGE, PAGE), (640, 10, 32, 32), groups={0: [0], 1: [1]})
    wanted = job((0, [1]), (2, [5]), groups=[0, 1])
    wanted.planned(Planner(of, 0))
    with pytest.raises(PlanError, match="several KV groups"):
        Planner(of, 0).plan(msgspec.structs.replace(wanted.job, by_layer=True))
