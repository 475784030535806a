"""Which of vLLM's blocks belong to which chunk of a copy job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from raykv.base.ids import Direction
from raykv.copy.plan import Planner
from raykv.protocol.columns import Handles, Keys
from raykv.protocol.worker import JobResult, KVLayout, TensorLayout
from raykv.vllm.transfers import PoolSpec, RayKVTransferResult, RayOffloadingWorker, job_request
from raykv.worker.job import JobRequest


class PlayedLink:
    """A line that a test ends jobs of."""

    def __init__(self) -> None:
        self.submitted: list[JobRequest] = []
        self.ended: list[JobResult] = []

    def submit(self, request: JobRequest) -> None:
        self.submitted.append(request)

    def drain(self) -> list[JobResult]:
        ended, self.ended = self.ended, []
        return ended


def worker_of(link: Any, of: KVLayout) -> RayOffloadingWorker:
    return RayOffloadingWorker(link, of)


def layout(blocks_per_chunk: int, *group_ids: int) -> KVLayout:
    """One small tensor with a hundred blocks for each group."""
    return KVLayout(
        "memfd",
        len(group_ids) * 6400,
        blocks_per_chunk,
        [TensorLayout(index * 6400, 100, 64, 64) for index in range(len(group_ids))],
        list(group_ids),
        [[index] for index in range(len(group_ids))],
    )


def request(
    of: KVLayout,
    block_ids: list[int],
    num_chunks: int,
    sizes: Sequence[int] | None = None,
    indices: Sequence[int] = (0,),
    direction: Direction = Direction.STORE,
) -> JobRequest:
    blocks = GPULoadStoreSpec(block_ids, sizes or [len(block_ids)], indices)
    pool = PoolSpec(
        node_epoch=9,
        keys=[b"%d" % i for i in range(num_chunks)],
        slots=list(range(100, 100 + num_chunks)),
        generations=list(range(500, 500 + num_chunks)),
        namespace="changed",
    )
    made = job_request(77, direction, blocks, pool, of)
    assert made.message().namespace == "changed"
    Planner(of, rank=0).plan(made.message())
    return made


def chunks(made: JobRequest) -> list[tuple[int, int, list[int]]]:
    """Group, first block number and block ids of each chunk."""
    rows = []
    start = 0
    for group, first, count in zip(made.groups, made.first_block, made.num_blocks, strict=True):
        rows.append((group, first, made.block_ids[start : start + count]))
        start += count
    assert start == len(made.block_ids)
    return rows


def test_request_has_one_block_for_each_chunk_of_one_block() -> None:
    made = request(layout(1, 0), [7, 3, 9], num_chunks=3)
    assert chunks(made) == [(0, 0, [7]), (0, 0, [3]), (0, 0, [9])]


def test_request_has_the_blocks_of_each_chunk_of_four() -> None:
    made = request(layout(4, 0), [7, 3, 9, 1, 20, 21, 22, 23], num_chunks=2)
    assert chunks(made) == [(0, 0, [7, 3, 9, 1]), (0, 0, [20, 21, 22, 23])]


def test_request_carries_places_epoch_and_direction() -> None:
    made = request(layout(1, 0), [7, 3], num_chunks=2, direction=Direction.LOAD)
    assert made.handles == Handles(Keys.of([b"0", b"1"]), [100, 101], [500, 501])
    assert (made.job_id, made.node_epoch, made.direction) == (77, 9, Direction.LOAD)
    message = made.message()
    assert (message.job_id, message.node_epoch, message.direction) == (77, 9, 1)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        (8, [(0, 0, [1, 2, 3, 4]), (0, 0, [5, 6])]),
        (1, [(0, 1, [1, 2, 3]), (0, 0, [4, 5, 6])]),
        (6, [(0, 2, [1, 2]), (0, 0, [3, 4, 5, 6])]),
        (11, [(0, 3, [1]), (0, 0, [2, 3, 4, 5]), (0, 0, [6])]),
    ],
)
def test_load_begins_inside_of_a_chunk_where_its_first_block_is(
    index: int, expected: list[tuple[int, int, list[int]]]
) -> None:
    made = request(
        layout(4, 0), [1, 2, 3, 4, 5, 6], len(expected), indices=[index], direction=Direction.LOAD
    )
    assert chunks(made) == expected


def test_load_of_a_few_blocks_inside_of_one_chunk_takes_one_chunk() -> None:
    made = request(layout(4, 0), [8, 9], 1, indices=[5], direction=Direction.LOAD)
    assert chunks(made) == [(0, 1, [8, 9])]


def test_request_goes_through_the_groups_in_the_layouts_order() -> None:
    made = request(
        layout(2, 0, 3),
        [1, 2, 3, 50, 51, 52],
        4,
        sizes=[3, 3],
        indices=[0, 1],
        direction=Direction.LOAD,
    )
    assert chunks(made) == [(0, 0, [1, 2]), (0, 0, [3]), (3, 1, [50]), (3, 0, [51, 52])]


def test_request_skips_a_group_without_blocks() -> None:
    made = request(layout(2, 0, 3, 4), [50, 51, 60, 61], 2, sizes=[0, 2, 2], indices=[0, 0, 0])
    assert chunks(made) == [(3, 0, [50, 51]), (4, 0, [60, 61])]


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_request_is_refused_when_blocks_and_chunks_do_not_match(num_chunks: int) -> None:
    with pytest.raises(AssertionError):
        request(layout(4, 0), [1, 2, 3, 4, 5], num_chunks)


def test_request_is_refused_when_the_groups_are_not_those_of_the_layout() -> None:
    with pytest.raises(ValueError, match="zip"):
        request(layout(1, 0, 1), [1], 1)


@pytest.mark.parametrize(
    ("index", "block_ids", "expected"),
    [
        (2, [1, 2], [(0, 2, [1, 2])]),
        (6, [1, 2, 3, 4, 5, 6], [(0, 2, [1, 2]), (0, 0, [3, 4, 5, 6])]),
        (3, [1, 2, 3, 4, 5], [(0, 3, [1]), (0, 0, [2, 3, 4, 5])]),
    ],
)
def test_store_without_the_first_blocks_of_its_first_chunk_says_which_are_there(
    index: int, block_ids: list[int], expected: list[tuple[int, int, list[int]]]
) -> None:
    made = request(layout(4, 0), block_ids, len(expected), indices=[index])
    assert chunks(made) == expected
    assert not made.torn


@pytest.mark.parametrize(
    ("index", "block_ids", "num_chunks"),
    [
        (0, [1, 2, 3], 1),
        (4, [1, 2, 3, 4, 5, 6], 2),
        (2, [1, 2, 3, 4, 5], 2),
        (1, [1, 2], 1),
    ],
)
def test_store_with_a_gap_fails_whichever_chunk_has_it(
    index: int, block_ids: list[int], num_chunks: int
) -> None:
    made = request(layout(4, 0), block_ids, num_chunks, indices=[index])
    assert chunks(made) == []
    assert made.torn.keys == [b"%d" % number for number in range(num_chunks)]
    assert made.torn.generations == list(range(500, 500 + num_chunks))


def test_store_with_a_gap_in_one_group_stores_the_chunks_of_the_others() -> None:
    made = request(
        layout(4, 0, 1, 2),
        [10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 30, 31],
        4,
        sizes=[4, 6, 2],
        indices=[0, 0, 2],
    )
    assert chunks(made) == [(0, 0, [10, 11, 12, 13]), (2, 2, [30, 31])]
    assert made.handles == Handles(Keys.of([b"0", b"3"]), [100, 103], [500, 503])
    assert made.torn == Handles(Keys.of([b"1", b"2"]), [101, 102], [501, 502])


def test_chunks_of_a_store_with_a_gap_are_reported_as_failed() -> None:
    link = PlayedLink()
    worker = worker_of(link, layout(4, 0, 1))
    pool = PoolSpec(node_epoch=9, keys=[b"a", b"b"], slots=[1, 2], generations=[5, 6])
    blocks = GPULoadStoreSpec([1, 2, 3, 4, 7, 8], [4, 2], [0, 0])
    assert worker.submit_store(7, blocks, pool)
    link.ended.append(JobResult(7, 100, 0.1))
    (result,) = worker.get_finished()
    assert isinstance(result, RayKVTransferResult)
    assert [(each.key, each.generation) for each in result.failed] == [(b"b", 6)]
    assert [request.handles.keys for request in link.submitted] == [[b"a"]]


def test_store_of_nothing_but_a_chunk_with_a_gap_is_not_even_sent() -> None:
    link = PlayedLink()
    worker = worker_of(link, layout(4, 0))
    pool = PoolSpec(node_epoch=9, keys=[b"a"], slots=[1], generations=[5])
    assert worker.submit_store(7, GPULoadStoreSpec([1, 2, 3], [3], [0]), pool)
    (result,) = worker.get_finished()
    assert isinstance(result, RayKVTransferResult)
    assert [(each.key, each.generation) for each in result.failed] == [(b"a", 5)]
    assert not link.submitted
