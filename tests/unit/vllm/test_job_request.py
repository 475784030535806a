"""Which of vLLM's blocks belong to which chunk of a copy job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.kv_offload.base import GPULoadStoreSpec

from raykv.base.ids import Direction, Key, Refusal, Stamp, group_of
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import CopyJob, CopyResult
from raykv.protocol.framing import decode, encode
from raykv.protocol.worker import KVLayout, TensorLayout
from raykv.vllm.transfers import (
    ChunkSpec,
    FlyingJob,
    RayKVTransferResult,
    RayOffloadingWorker,
    flying_job,
)
from raykv.worker.job import JobRequest


class PlayedLink:
    """A line that a test ends jobs of."""

    def __init__(self) -> None:
        self.submitted: list[JobRequest] = []
        self.together: list[list[int]] = []
        self.ended: list[CopyResult] = []

    def submit(self, *requests: JobRequest) -> None:
        self.submitted.extend(requests)
        self.together.append([each.job_id for each in requests])

    def drain(self) -> list[CopyResult]:
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


def name(number: int, group: int = 0) -> Key:
    return Key(b"%d" % number + group.to_bytes(4, "big"))


def request(
    of: KVLayout,
    block_ids: list[int],
    groups: Sequence[int],
    sizes: Sequence[int] | None = None,
    indices: Sequence[int] = (0,),
    direction: Direction = Direction.STORE,
) -> FlyingJob:
    """A job of a chunk in each of these KV groups."""
    blocks = GPULoadStoreSpec(block_ids, sizes or [len(block_ids)], indices)
    keys: list[bytes] = [name(at, group) for at, group in enumerate(groups)]
    chunks = ChunkSpec(keys, "changed", Stamp(3, 4), "ann", "r")
    made = flying_job(77, direction, blocks, chunks, of)
    assert decode(encode(made.job), CopyJob) == made.job
    return made


def chunks(made: FlyingJob) -> list[tuple[int, int, list[int]]]:
    """Group, first block number and block ids of each chunk."""
    rows, job = [], made.job
    start = 0
    for key, first, count in zip(job.keys, job.first_block, job.num_blocks, strict=True):
        rows.append((group_of(Key(key)), first, list(job.block_ids[start : start + count])))
        start += count
    assert start == len(job.block_ids)
    return rows


LOAD, STORE = Direction.LOAD, Direction.STORE


@pytest.mark.parametrize(
    ("direction", "per_chunk", "index", "block_ids", "expected"),
    [
        (STORE, 1, 0, [7, 3, 9], [(0, 0, [7]), (0, 0, [3]), (0, 0, [9])]),
        (STORE, 2, 0, [7, 3, 20, 21], [(0, 0, [7, 3]), (0, 0, [20, 21])]),
        (LOAD, 4, 8, [1, 2, 3, 4, 5, 6], [(0, 0, [1, 2, 3, 4]), (0, 0, [5, 6])]),
        (LOAD, 4, 1, [1, 2, 3, 4, 5, 6], [(0, 1, [1, 2, 3]), (0, 0, [4, 5, 6])]),
        (LOAD, 4, 6, [1, 2, 3, 4, 5, 6], [(0, 2, [1, 2]), (0, 0, [3, 4, 5, 6])]),
        (LOAD, 4, 11, [1, 2, 3, 4, 5, 6], [(0, 3, [1]), (0, 0, [2, 3, 4, 5]), (0, 0, [6])]),
        (LOAD, 4, 5, [8, 9], [(0, 1, [8, 9])]),
        (STORE, 4, 2, [1, 2], [(0, 2, [1, 2])]),
        (STORE, 4, 6, [1, 2, 3, 4, 5, 6], [(0, 2, [1, 2]), (0, 0, [3, 4, 5, 6])]),
        (STORE, 4, 3, [1, 2, 3, 4, 5], [(0, 3, [1]), (0, 0, [2, 3, 4, 5])]),
    ],
)
def test_chunks_have_their_blocks_from_the_first_one_on(
    direction: Direction,
    per_chunk: int,
    index: int,
    block_ids: list[int],
    expected: list[tuple[int, int, list[int]]],
) -> None:
    """The first block of a job may be inside of a chunk."""
    groups = [0] * len(expected)
    made = request(layout(per_chunk, 0), block_ids, groups, indices=[index], direction=direction)
    assert chunks(made) == expected
    assert not made.torn


def test_request_carries_names_orders_tenant_and_direction() -> None:
    job = request(layout(1, 0), [7, 3], [0, 0], direction=Direction.LOAD).job
    assert (job.job_id, job.direction, job.namespace) == (77, 1, "changed")
    assert job.keys == [name(0), name(1)]
    assert (job.orders, job.tenant) == (Stamp(3, 4), "ann")


def test_request_goes_through_the_groups_in_the_layouts_order() -> None:
    made = request(
        layout(2, 0, 3),
        [1, 2, 3, 50, 51, 52],
        [0, 0, 3, 3],
        sizes=[3, 3],
        indices=[0, 1],
        direction=Direction.LOAD,
    )
    assert chunks(made) == [(0, 0, [1, 2]), (0, 0, [3]), (3, 1, [50]), (3, 0, [51, 52])]


def test_request_skips_a_group_without_blocks() -> None:
    made = request(layout(2, 0, 3, 4), [50, 51, 60, 61], [3, 4], sizes=[0, 2, 2], indices=[0, 0, 0])
    assert chunks(made) == [(3, 0, [50, 51]), (4, 0, [60, 61])]


@pytest.mark.parametrize("num_chunks", [1, 3])
def test_request_is_refused_when_blocks_and_chunks_do_not_match(num_chunks: int) -> None:
    with pytest.raises(AssertionError):
        request(layout(4, 0), [1, 2, 3, 4, 5], [0] * num_chunks)


def test_request_is_refused_when_the_groups_are_not_those_of_the_layout() -> None:
    with pytest.raises(ValueError, match="zip"):
        request(layout(1, 0, 1), [1], [0])


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
    made = request(layout(4, 0), block_ids, [0] * num_chunks, indices=[index])
    assert chunks(made) == []
    assert made.torn == [name(number) for number in range(num_chunks)]


def test_store_with_a_gap_in_one_group_stores_the_chunks_of_the_others() -> None:
    made = request(
        layout(4, 0, 1, 2),
        [10, 11, 12, 13, 20, 21, 22, 23, 24, 25, 30, 31],
        [0, 1, 1, 2],
        sizes=[4, 6, 2],
        indices=[0, 0, 2],
    )
    assert chunks(made) == [(0, 0, [10, 11, 12, 13]), (2, 2, [30, 31])]
    assert made.job.keys == [name(0), name(3, 2)]
    assert made.torn == [name(1, 1), name(2, 1)]


def failures(result: Any) -> dict[bytes, Any]:
    """Why chunks have failed, by key, as the scheduler's side hears of it."""
    assert isinstance(result, RayKVTransferResult)
    assert result.end is not None
    assert not result.success
    said = result.end.result
    rows = zip(said.failed_chunks, said.refusals, strict=True)
    return {result.end.keys[at]: refusal for at, refusal in rows}


def stored(of: KVLayout, sizes: list[int], keys: list[bytes]) -> tuple[list[Any], dict[bytes, Any]]:
    """A store with a gap: keys that were sent, and why the others have failed."""
    link = PlayedLink()
    worker = worker_of(link, of)
    blocks = GPULoadStoreSpec(list(range(sum(sizes))), sizes, [0] * len(sizes))
    assert worker.submit_store(7, blocks, ChunkSpec(keys, "model"))
    sent = [list(each.job.keys) for each in link.submitted]
    if sent:
        link.ended.append(CopyResult(7, 1, 1, num_bytes=100))
    (result,) = worker.get_finished()
    return sent, failures(result)


def test_chunks_of_a_store_with_a_gap_are_reported_as_failed() -> None:
    failed = {b"b": Refusal.COPY_FAILED}
    assert stored(layout(4, 0, 1), [4, 2], [b"a", b"b"]) == ([[b"a"]], failed)


def test_store_of_nothing_but_a_chunk_with_a_gap_is_not_even_sent() -> None:
    assert stored(layout(4, 0), [3], [b"a"]) == ([], {b"a": Refusal.COPY_FAILED})


@pytest.mark.expects_failures
def test_store_of_blocks_that_do_not_match_its_chunks_has_failed() -> None:
    assert stored(layout(4, 0), [5], [b"a"]) == ([], {b"a": Refusal.COPY_FAILED})


@pytest.mark.expects_failures
def test_stores_are_sent_together_and_each_that_can_not_be_fails_alone() -> None:
    link = PlayedLink()
    worker = worker_of(link, layout(1, 0))
    stores = {1: [b"a"], 2: [b"b", b"c"], 3: [b"d"], 4: []}
    worker.submit_stores(
        (number, GPULoadStoreSpec([number], [1], [0]), ChunkSpec(keys, "model" if keys else ""))
        for number, keys in stores.items()
    )
    assert link.together == [[1, 3]]
    assert [result.job_id for result in worker.get_finished()] == [2, 4]
    link.ended += [CopyResult(number, 1, 1) for number in (1, 3)]
    assert [(result.job_id, result.success) for result in worker.get_finished()] == [
        (1, True),
        (3, True),
    ]


@pytest.mark.expects_failures
def test_stores_whose_line_fails_have_failed() -> None:
    class FailingLink(PlayedLink):
        def submit(self, *requests: JobRequest) -> None:
            raise OSError(len(requests))

    worker = worker_of(FailingLink(), layout(1, 0))
    blocks = GPULoadStoreSpec([1], [1], [0])
    worker.submit_stores((number, blocks, ChunkSpec([b"a"], "model")) for number in (1, 2))
    ended = worker.get_finished()
    assert [result.job_id for result in ended] == [1, 2]
    assert [set(failures(result)) for result in ended] == [{b"a"}, {b"a"}]
    assert not worker.is_flying(1)


def test_job_is_known_before_its_line_has_it() -> None:
    """Else an exception in between would let it count as refused while its blocks are read."""
    known: list[bool] = []

    class LookingLink(PlayedLink):
        def submit(self, *requests: JobRequest) -> None:
            known.extend(worker.is_flying(each.job_id) for each in requests)

    worker = worker_of(LookingLink(), layout(1, 0))
    blocks = GPULoadStoreSpec([1], [1], [0])
    worker.submit_stores((number, blocks, ChunkSpec([b"a"], "model")) for number in (1, 2))
    assert known == [True, True]


def test_job_without_a_namespace_is_not_even_sent() -> None:
    link = PlayedLink()
    worker = worker_of(link, layout(1, 0))
    blocks = GPULoadStoreSpec([1, 2], [2], [0])
    assert worker.submit_load(7, ChunkSpec([b"a", b"b"]), blocks)
    (result,) = worker.get_finished()
    assert set(failures(result)) == {b"a", b"b"}
    assert result.lost_blocks == [1, 2]
    assert not link.submitted


def test_blocks_of_chunks_that_were_not_loaded_are_lost() -> None:
    link = PlayedLink()
    worker = worker_of(link, layout(2, 0))
    blocks = GPULoadStoreSpec([1, 2, 3, 4, 5], [5], [1])
    assert worker.submit_load(7, ChunkSpec([b"a", b"b", b"c"], "model"), blocks)
    refusals = bytes([Refusal.NOT_HERE])
    link.ended.append(CopyResult(7, 1, 1, failed_chunks=Numbers.of([1]), refusals=refusals))
    (result,) = worker.get_finished()
    assert failures(result) == {b"b": Refusal.NOT_HERE}
    assert result.lost_blocks == [2, 3]
