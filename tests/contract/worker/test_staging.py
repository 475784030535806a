"""KV that can't be mapped, through staging memory, against a NodeService in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.base.ids import Direction, Namespace, Refusal
from raykv.node.service import NodeService
from raykv.protocol.copies import CopyResult
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine
from tests.fixtures.node.links import changed, result_of
from tests.fixtures.node.local import LocalNode
from tests.fixtures.waiting import wait_until

pytest.importorskip("torch")

import torch

from raykv.worker.staging import StagedLink, StagingMemory

PAGES = (256, 512)
NUM_BLOCKS = 64
BLOCKS_PER_CHUNK = 2
SLOT_BYTES = 4096
STAGING_BLOCKS = 6
LIFE = 41
"""Of the engine."""


class Device:
    """KV tensors of two layers that can't be mapped, each block with bytes of its own."""

    def __init__(self, device: str) -> None:
        self.tensors = [
            torch.randint(-128, 127, (NUM_BLOCKS, page), dtype=torch.int8).to(device)
            for page in PAGES
        ]

    @property
    def kv_caches(self) -> Any:
        return SimpleNamespace(
            tensors=[SimpleNamespace(tensor=tensor) for tensor in self.tensors],
            group_data_refs=[[SimpleNamespace(tensor_idx=i) for i in range(len(PAGES))]],
        )

    def block(self, number: int) -> list[Any]:
        return [tensor[number].clone() for tensor in self.tensors]


@pytest.fixture
def service() -> Iterator[NodeService]:
    node = LocalNode(64, SLOT_BYTES, num_slabs=4)
    node.start()
    core = CoreLine(node.name, LIFE, {0: SLOT_BYTES})
    core.wait()
    yield node.service
    core.end()
    node.stop()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return Device(request.param)


def staged_link(
    service: NodeService, device: Device, life: int = LIFE, rank: int = 0, num_ranks: int = 1
) -> Any:
    memory = StagingMemory(device.kv_caches, [0], BLOCKS_PER_CHUNK, STAGING_BLOCKS * sum(PAGES))
    staged = StagedLink(rank, memory, LinkSettings())
    target = LinkTarget(service.socket_name, "e", life, "ns", num_ranks, {0: SLOT_BYTES})
    staged.set_target(target)
    wait_until(lambda: staged.node_life == service.keeper.life, 10.0, "the link attaches")
    return staged


@pytest.fixture
def link(service: NodeService, device: Device) -> Iterator[Any]:
    made = staged_link(service, device)
    yield made
    made.close(5.0)


def store(link: Any, chunks: list[int], blocks: list[int], job_id: int) -> CopyResult:
    link.submit(request(Direction.STORE, chunks, blocks, job_id))
    return result_of(link, job_id)


def load(link: Any, chunks: list[int], blocks: list[int], job_id: int) -> CopyResult:
    link.submit(request(Direction.LOAD, chunks, blocks, job_id))
    return result_of(link, job_id)


def request(direction: Direction, chunks: list[int], blocks: list[int], job_id: int) -> JobRequest:
    parts = [blocks[i : i + BLOCKS_PER_CHUNK] for i in range(0, len(blocks), BLOCKS_PER_CHUNK)]
    keys = [numbered_key(chunk) for chunk in chunks]
    return JobRequest(named_job(direction, keys, parts, job_id=job_id))


def store_eight(link: Any) -> None:
    """Chunks 0 to 7, of blocks 0 to 15."""
    for chunk in range(8):
        stored = store(link, [chunk], [2 * chunk, 2 * chunk + 1], 10 + chunk)
        assert stored.failed_chunks == []


def assert_blocks(device: Device, numbers: Sequence[int], expected: Sequence[Any]) -> None:
    """Each block has the pages that are expected, layer by layer."""
    for number, pages in zip(numbers, expected, strict=True):
        for found, wanted in zip(device.block(number), pages, strict=True):
            assert torch.equal(found, wanted)


def test_stored_blocks_come_back_in_other_blocks(link: Any, device: Device) -> None:
    before = [device.block(number) for number in (4, 9, 2, 3)]
    link.submit(request(Direction.STORE, [0, 1], [4, 9, 2, 3], 1))
    # The blocks may be reused at once: their bytes have left.
    for tensor in device.tensors:
        tensor[torch.tensor([4, 9, 2, 3])] = 0
    assert result_of(link, 1).failed_chunks == []
    result = load(link, [0, 1], [20, 21, 22, 23], 2)
    assert result.failed_chunks == []
    assert result.num_bytes == 4 * sum(PAGES)
    assert_blocks(device, range(20, 24), before)


def test_load_larger_than_staging_memory_is_made_in_parts(link: Any, device: Device) -> None:
    store_eight(link)
    untouched = [device.block(number) for number in range(16)]
    assert load(link, list(range(8)), list(range(30, 46)), 30).failed_chunks == []
    assert_blocks(device, range(30, 46), untouched)


def test_load_by_layer_is_there_when_its_first_layer_is(link: Any, device: Device) -> None:
    """Also one that is larger than the staging memory, which a store still has a part of."""
    store_eight(link)
    expected = [device.block(number) for number in range(16)]
    link.submit(request(Direction.STORE, [20, 21, 22], list(range(6)), 20))
    load = request(Direction.LOAD, list(range(8)), list(range(30, 46)), 30)
    link.submit(changed(load, by_layer=True))
    assert link.wait_layers([30, 77], 1)
    assert_blocks(device, range(30, 46), expected)
    assert link.wait_layers([30], 2)
    assert result_of(link, 30).failed_chunks == []


def test_load_by_layer_that_finds_no_room_ends_with_its_deadline(link: Any) -> None:
    taken = link._memory.take(STAGING_BLOCKS)
    link._settings = LinkSettings(step_deadline_s=0.05)
    link.submit(request(Direction.LOAD, [0], [4, 5], 1))
    assert link.wait_layers([1], 1)
    link._memory.give_back(taken)
    assert list(result_of(link, 1).refusals) == [Refusal.CANCELLED]


def test_load_that_is_flushed_before_it_had_room_is_cancelled(link: Any) -> None:
    taken = link._memory.take(STAGING_BLOCKS)
    link.submit(request(Direction.LOAD, [0, 1], [4, 5, 6, 7], 1))
    link.wait([1])
    link._memory.give_back(taken)
    assert list(result_of(link, 1).refusals) == [Refusal.CANCELLED] * 2


@pytest.mark.expects_failures
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("refused", [0, 1, 2])
def test_part_that_the_line_does_not_take_has_failed_and_keeps_nothing(
    link: Any, device: Device, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """Of a load in three parts; the others are loaded."""
    store_eight(link)
    there, before = ([device.block(first + n) for n in range(16)] for first in (0, 30))
    submit, parts = WorkerLink.submit, itertools.count()

    def refuse(link: WorkerLink, *jobs: JobRequest) -> None:
        if next(parts) == refused:
            raise RuntimeError("no more jobs")
        submit(link, *jobs)

    with monkeypatch.context() as patches:
        patches.setattr(WorkerLink, "submit", refuse)
        link.submit(request(Direction.LOAD, list(range(8)), list(range(30, 46)), 1))
        assert link.wait_layers([1], 1)
    chunks_a_part = STAGING_BLOCKS // BLOCKS_PER_CHUNK
    failed = [chunk for chunk in range(8) if chunk // chunks_a_part == refused]
    result = result_of(link, 1)
    assert list(result.failed_chunks) == failed
    assert set(result.refusals) == {Refusal.COPY_FAILED}
    expected = [(before if n // BLOCKS_PER_CHUNK in failed else there)[n] for n in range(16)]
    assert_blocks(device, range(30, 46), expected)
    assert link._memory.num_free == STAGING_BLOCKS
    assert load(link, list(range(8)), list(range(30, 46)), 2).failed_chunks == []


def test_chunk_that_is_refused_leaves_its_blocks_alone(link: Any, device: Device) -> None:
    store(link, [0], [0, 1], 1)
    before = device.block(40)
    result = load(link, [5, 0], [40, 41, 42, 43], 2)
    assert result.failed_chunks == [0]
    assert list(result.refusals) == [Refusal.NOT_HERE]
    assert_blocks(device, [40, 42], [before, device.block(0)])


def test_store_without_room_fails_beyond_what_fits(link: Any) -> None:
    result = store(link, list(range(5)), list(range(10)), 1)
    assert result.failed_chunks == [3, 4]
    assert list(result.refusals) == [Refusal.QUEUE_FULL] * 2


def test_rank_that_stores_less_of_a_job_leaves_no_chunk_that_waits_for_it(
    service: NodeService, device: Device
) -> None:
    """Whatever room each rank's staging memory has: both speak of the same job."""
    name, life = service.socket_name, LIFE + 1
    core = CoreLine(name, life, {0: SLOT_BYTES}, num_ranks=2)
    core.wait()
    ranks = [staged_link(service, device, life, rank, num_ranks=2) for rank in range(2)]
    for taken, there in ((4, [0]), (STAGING_BLOCKS, [])):
        held = ranks[1]._memory.take(taken)
        job_id = 50 + taken
        chunks = [taken, taken + 1]
        for link in ranks:
            link.submit(request(Direction.STORE, chunks, list(range(4)), job_id))
        results = [result_of(link, job_id) for link in ranks]
        assert results[1].failed_chunks == ([1] if there else [0, 1])
        with service.keeper.lock:
            index = service.keeper.owner.index
            assert not index.contents()[1]
            found = [index.find(Namespace("ns"), numbered_key(chunk)) for chunk in chunks]
        assert [at for at, record in enumerate(found) if record is not None] == there
        ranks[1]._memory.give_back(held)
    for link in ranks:
        link.close(5.0)
    core.end()


def test_staging_memory_is_free_again_after_every_job(link: Any) -> None:
    for job_id in range(1, 6):
        store(link, [job_id], [0, 1], job_id)
        load(link, [job_id, 60], [2, 3, 4, 5], 100 + job_id)
    assert link._memory.num_free == STAGING_BLOCKS


def test_staging_memory_of_less_than_a_chunk_is_refused(device: Device) -> None:
    with pytest.raises(SettingError, match="staging_bytes=1000 is less than one chunk"):
        StagingMemory(device.kv_caches, [0], BLOCKS_PER_CHUNK, 1000)
