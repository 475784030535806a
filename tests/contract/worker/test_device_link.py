"""KV on a GPU through the real attach path: a fake CUDA, a NodeService here, workers beside it."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from raykv.base.errors import HandleError
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Namespace, NodeId, Refusal
from raykv.memory.cuda.driver import CUDAError
from raykv.memory.cuda.kv import export_kv
from raykv.memory.words import CancelWords
from raykv.node.devices import Devices
from raykv.node.keeper import PoolKeeper
from raykv.node.service import NodeService, boot_life
from raykv.protocol import wire
from raykv.protocol.engine import Welcome
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.worker import TensorLayout
from raykv.worker.handover import DeviceLink
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink
from tests.fixtures.cuda.memory import (
    GPU,
    KV_NAME,
    OTHER_GPU,
    PAGE,
    FakeCuda,
    make_backend,
)
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import CoreLine, lives
from tests.fixtures.node.device_links import (
    BLOCKS_PER_CHUNK,
    LONG_S,
    NUM_BLOCKS,
    NUM_LAYERS,
    PAGE_BYTES,
    PART_BYTES,
    Worker,
    World,
    job_ids,
    make_world,
)
from tests.fixtures.node.links import refusals
from tests.fixtures.node.local import LocalNode
from tests.fixtures.node.raw_hello import RawHello
from tests.fixtures.waiting import wait_until


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world()
    yield made
    made.end()


@pytest.mark.parametrize("is_split", [False, True])
def test_bytes_of_one_engine_come_back_in_another_one(world: World, is_split: bool) -> None:
    first = world.worker(num_ranks=1, seed=1, is_split=is_split)
    second = world.worker(num_ranks=1, seed=2, is_split=is_split)
    source = random.Random(3)
    stored, loaded = (source.sample(range(NUM_BLOCKS), 6) for _ in range(2))
    before = [second.block(number) for number in range(NUM_BLOCKS)]
    assert first.run(Direction.STORE, [0, 1, 2], stored) == []
    assert second.run(Direction.LOAD, [0, 1, 2], loaded) == []
    expected = dict(zip(loaded, (first.block(number) for number in stored), strict=True))
    for number in range(NUM_BLOCKS):
        assert second.block(number) == expected.get(number, before[number])


def test_ranks_on_two_gpus_have_their_parts_in_one_row(world: World) -> None:
    life, job_id = next(lives), next(job_ids)
    ranks = [
        world.worker(device, rank, 2, seed=rank, life=life)
        for rank, device in enumerate((GPU, OTHER_GPU))
    ]
    assert ranks[0].run(Direction.STORE, [5], [1, 2], job_id) == []
    assert ranks[1].run(Direction.LOAD, [5], [8, 9]) == [Refusal.WRITING]
    assert ranks[1].run(Direction.STORE, [5], [1, 2], job_id) == []
    for rank in ranks:
        assert rank.run(Direction.LOAD, [5], [8, 9]) == []
        assert [rank.block(8), rank.block(9)] == [rank.block(1), rank.block(2)]
    assert ranks[0].block(8) != ranks[1].block(8)
    record = world.service.keeper.owner.index.find(Namespace("ns"), numbered_key(5))
    assert record is not None
    pool = world.service.keeper.address_of(record)
    for rank in ranks:
        start = pool + ranks.index(rank) * PART_BYTES
        first_layer = ctypes.string_at(start, BLOCKS_PER_CHUNK * PAGE_BYTES)
        assert first_layer == rank.block(1)[0] + rank.block(2)[0]


def test_replicated_chunk_is_stored_by_one_rank_and_loaded_by_all(world: World) -> None:
    """All of them come as part 0 of 1; only rank 0 is told by vLLM to store."""
    ranks = [world.worker(num_ranks=1, seed=rank) for rank in range(3)]
    assert ranks[0].run(Direction.STORE, [7], [1, 2]) == []
    for rank in ranks:
        assert rank.run(Direction.LOAD, [7], [8, 9]) == []
        assert [rank.block(8), rank.block(9)] == [ranks[0].block(1), ranks[0].block(2)]


def test_store_has_what_was_computed_after_it_was_submitted(world: World) -> None:
    """The job is at the NodeActor long before the GPU has written the bytes."""
    worker = world.worker(num_ranks=1)
    stream = worker.cuda.stream(7)
    stream.submit(lambda: worker.overwrite(1, 0xAB))
    job_id = worker.submit(Direction.STORE, [0], [1, 2])
    wait_until(lambda: world.service.stats().queued_jobs == 0, LONG_S, "the copy waits")
    assert worker.link.drain() == []
    stream.run()
    assert worker.finish(job_id) == []
    assert worker.run(Direction.LOAD, [0], [8, 9]) == []
    assert worker.block(8) == [b"\xab" * PAGE_BYTES] * NUM_LAYERS


def test_stores_that_are_submitted_together_wait_for_one_event(world: World) -> None:
    worker = world.worker(num_ranks=1)
    stream = worker.cuda.stream(7)
    stream.submit(lambda: worker.overwrite(1, 0xAB))
    stream.submit(lambda: worker.overwrite(3, 0xCD))
    numbers = [next(job_ids) for _ in range(2)]
    blocks = ([1, 2], [3, 4])
    worker.link.submit(
        *(
            JobRequest(named_job(Direction.STORE, [numbered_key(at)], [some], job_id=number))
            for at, (number, some) in enumerate(zip(numbers, blocks, strict=True))
        )
    )
    assert worker.cuda.calls.count("record_event") == 1
    # The first one waits for the event, and the other one for the first.
    wait_until(lambda: world.service.stats().queued_jobs == 1, LONG_S, "the copies wait")
    assert worker.link.drain() == []
    stream.run()
    ended: list[int] = []

    def have_ended() -> bool:
        ended.extend(result.job_id for result in worker.link.drain())
        return sorted(ended) == numbers

    wait_until(have_ended, LONG_S, "both end")
    assert worker.run(Direction.LOAD, [0, 1], [8, 9, 10, 11]) == []
    assert worker.block(8) == [b"\xab" * PAGE_BYTES] * NUM_LAYERS
    assert worker.block(10) == [b"\xcd" * PAGE_BYTES] * NUM_LAYERS


def test_load_does_not_run_ahead_of_what_was_queued_before_it(world: World) -> None:
    worker = world.worker(num_ranks=1)
    assert worker.run(Direction.STORE, [0], [1, 2]) == []
    expected = worker.block(1)
    stream = worker.cuda.stream(7)
    # vLLM zeroes blocks before they are used.
    stream.submit(lambda: worker.overwrite(8, 0))
    job_id = worker.submit(Direction.LOAD, [0], [8, 9])
    wait_until(lambda: world.service.stats().queued_jobs == 0, LONG_S, "the copy waits")
    assert worker.link.drain() == []
    stream.run()
    assert worker.finish(job_id) == []
    assert worker.block(8) == expected


@pytest.mark.expects_failures
def test_job_whose_event_is_not_recorded_fails_and_is_not_sent(world: World) -> None:
    worker = world.worker(num_ranks=1)
    worker.cuda.refused = {"record_event"}
    assert worker.run(Direction.STORE, [0], [1, 2]) == [Refusal.COPY_FAILED]
    assert worker.link.drain() == []
    worker.cuda.refused = set()
    assert worker.run(Direction.LOAD, [0], [1, 2]) == [Refusal.NOT_HERE]


def test_worker_that_leaves_is_closed(world: World) -> None:
    worker = world.worker(num_ranks=1)
    assert world.cuda.num_open == 2
    worker.link.close(5.0)
    wait_until(lambda: world.cuda.num_open == 0, LONG_S, "all is closed")


@pytest.mark.parametrize("stage", ["half attached", "attached", "waiting"])
def test_killed_worker_is_closed_at_once(world: World, stage: str) -> None:
    child = world.spawn(stage)
    if stage != "half attached":
        assert any(KV_NAME in line for line in world.mapped)
    if stage == "waiting":
        wait_until(lambda: world.service.stats().queued_jobs == 0, LONG_S, "the copy waits")
    child.kill()
    child.wait(LONG_S)
    world.wait_until_closed()
    # The copy threads are free, and the dead worker's chunk is none.
    heir = world.worker(num_ranks=1)
    assert heir.run(Direction.LOAD, [0], [0, 1]) == [Refusal.NOT_HERE]
    assert heir.run(Direction.STORE, [1], [0, 1]) == []


# The NodeActor can't


def test_worker_attaches_again_to_next_life_of_node(world: World) -> None:
    worker = world.worker(num_ranks=1)
    world.service.stop()
    wait_until(lambda: worker.link.node_life == 0, LONG_S, "the line breaks")
    keeper = PoolKeeper(NodeId("node"), boot_life(), world.service.keeper.geometry)
    devices = Devices(lambda: world.cuda, make_backend)
    again = NodeService(world.service.socket_name, keeper, devices)
    again.start()
    try:
        wait_until(lambda: worker.link.node_life == keeper.life, LONG_S, "it attaches again")
        worker.core.wait()
        worker.service = again
        assert worker.run(Direction.STORE, [0], [1, 2]) == []
        assert worker.run(Direction.LOAD, [0], [8, 9]) == []
        assert worker.block(8) == worker.block(1)
    finally:
        worker.link.close(5.0)
        again.stop()


def attach(service: NodeService, worker: Worker, **changed: Any) -> Welcome:
    """The answer to an attach message with another layout."""
    layout = msgspec.structs.replace(worker.layout, **changed)
    hello = RawHello(PROTOCOL_VERSION, "e", 9, "ns", 0, 1, {0: 2 * PART_BYTES}, layout)
    sock = wire.connect(service.socket_name, LONG_S)
    words = CancelWords.create()
    with sock:
        wire.send_with_fds(sock, hello, [words.region.fd])
        reader, frames = wire.FrameReader(), list[bytes]()
        while not frames:
            frames = reader.feed(sock.recv(1 << 16))
    words.close()
    return msgspec.msgpack.decode(frames[0], type=Welcome)


def test_worker_whose_memory_can_not_be_opened_hears_why(world: World) -> None:
    worker = world.worker(num_ranks=1)
    before = world.cuda.num_open
    strange = "11111111-2222-3333-4444-555555555555"
    answer = attach(world.service, worker, device=strange)
    assert answer.unsuited
    assert f"does not see GPU {strange}" in answer.error
    answer = attach(world.service, worker, handles=[b"x" * 64])
    assert (answer.error, answer.unsuited) == ("that is no handle", True)
    answer = attach(world.service, worker, handles=[b"x" * 5])
    assert "invalid" in answer.error
    assert not answer.unsuited
    assert world.cuda.num_open == before
    assert world.service.stats().num_workers == 1


def test_worker_is_refused_when_its_gpu_can_not_be_copied_from() -> None:
    world = make_world()
    worker = world.worker(num_ranks=1)

    def refuse(*_: object) -> Any:
        raise HandleError("no streams left")

    world.service.devices._make_backend = refuse
    answer = attach(world.service, worker)
    assert answer.unsuited
    assert f"GPU {GPU} can't be copied from: no streams left" in answer.error
    assert world.cuda.num_open == 2
    worker.link.close(5.0)
    world.service.stop()
    worker.end()


def test_engine_goes_on_staged_when_the_node_can_not_map_its_memory(world: World) -> None:
    """Its jobs until then have failed; from then on they go the other way."""
    torch = pytest.importorskip("torch")
    from raykv.worker.staging import StagedLink, StagingMemory

    world.cuda.visible = (OTHER_GPU,)
    cuda = FakeCuda((GPU,))
    base = cuda.allocate(PAGE)
    tensor = TensorLayout(base, NUM_BLOCKS, PAGE_BYTES, PAGE_BYTES)
    exported = export_kv(cuda, [tensor], 1, [0], [[0]])
    kv = torch.randint(-128, 127, (NUM_BLOCKS, PAGE_BYTES), dtype=torch.int8)
    caches = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=kv)], group_data_refs=[[SimpleNamespace(tensor_idx=0)]]
    )
    reasons: list[str] = []

    def staged(reason: str) -> WorkerLink:
        reasons.append(reason)
        return StagedLink(0, StagingMemory(caches, [0], 1, 4 * PAGE_BYTES), LinkSettings())

    direct = DeviceLink(0, exported, LinkSettings(), lambda: 7, staged)
    link: WorkerLink = direct
    name, life, sizes = world.service.socket_name, next(lives), {0: SLOT_ALIGNMENT}
    target = LinkTarget(name, "e", life, "ns", 1, sizes)
    core = CoreLine(name, life, sizes)
    core.wait()

    def submit(direction: Direction, block: int) -> int:
        job = named_job(direction, [numbered_key(0)], [[block]], job_id=next(job_ids))
        link.submit(JobRequest(job))
        return job.job_id

    def run(direction: Direction, block: int) -> list[Refusal]:
        return refusals(link, submit(direction, block), LONG_S)

    link.set_target(target)
    assert run(Direction.STORE, 1) == [Refusal.NODE_LOST]
    wait_until(lambda: bool(direct.unsuited), LONG_S, "the NodeActor has refused")
    # A job that is under way ends where it was.
    late = submit(Direction.STORE, 1)
    assert link.following() is direct
    assert reasons == []
    assert refusals(link, late, LONG_S) == [Refusal.NODE_LOST]
    link = direct.following()
    link.set_target(target)
    assert len(reasons) == 1
    assert f"does not see GPU {GPU}" in reasons[0]
    wait_until(lambda: link.node_life == world.service.keeper.life, LONG_S, "the staged line is up")
    assert run(Direction.STORE, 1) == []
    assert run(Direction.LOAD, 9) == []
    assert torch.equal(kv[9], kv[1])
    assert link.following() is link
    assert len(reasons) == 1
    link.close(5.0)
    core.end()
    cuda.end()


# The pool


def test_pool_is_pinned_from_the_first_worker_on_and_until_the_end(world: World) -> None:
    assert world.service.stats().locked_bytes == 0
    worker = world.worker(num_ranks=1)
    pool_bytes = world.service.keeper.geometry.pool_bytes
    wait_until(
        lambda: world.service.stats().locked_bytes == pool_bytes, LONG_S, "the pool is pinned"
    )
    assert sum(world.cuda.registered.values()) == pool_bytes
    assert min(world.cuda.registered) == world.service.keeper.pool.address
    worker.link.close(5.0)
    wait_until(lambda: world.service.stats().num_workers == 0, LONG_S, "the worker is gone")
    # The next one needs it again.
    assert world.service.stats().locked_bytes == pool_bytes
    world.service.stop()
    assert world.cuda.registered == {}


def test_cuda_is_not_touched_before_a_worker_needs_it() -> None:
    loads: list[str] = []

    def load() -> FakeCuda:
        loads.append("load")
        raise CUDAError("CUDA can't be used here")

    node = LocalNode(devices=Devices(load, make_backend))
    node.start()
    try:
        assert loads == []
        cuda = FakeCuda()
        tensor = TensorLayout(cuda.allocate(PAGE), 4, 512, 512)
        exported = export_kv(cuda, [tensor], 1, [0], [[0]])
        link = DeviceLink(0, exported, LinkSettings(), lambda: 7)
        link.set_target(LinkTarget(node.name, "e", 9, "ns", 1, {0: PAGE}))
        wait_until(lambda: bool(link.unsuited), LONG_S, "the NodeActor has refused")
        assert link.unsuited == "CUDA can't be used here"
        assert loads
        link.close(5.0)
        cuda.end()
    finally:
        node.stop()
