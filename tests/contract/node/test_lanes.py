"""Jobs in their lanes, through a real NodeService: who waits for whom, and chunks that go together.

GPUs are of two kinds here. In the first a copy waits for the worker's event, which comes when a
test says so; in the second a driver does in memory what CUDA may do, late and in any order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest

import raykv.node.attached
import raykv.node.copying
import raykv.node.lanes
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Namespace, Refusal
from raykv.copy.cuda.backend import CUDABackend
from raykv.copy.cuda.batches import Route
from raykv.copy.cuda.driver import Copies, SourceOrder
from raykv.copy.cuda.lane import Device, Limits, Place
from raykv.copy.engine import HOST, CopyBackend, StopSign
from raykv.copy.plan import CopyRuns
from raykv.copy.rows import CPUBackend
from raykv.memory.cuda.driver import CUDAError
from raykv.node.integrity import Integrity
from raykv.node.service import NodeService
from raykv.protocol.listing import Where
from tests.fixtures.cuda.copies import FakeDriver, always
from tests.fixtures.cuda.memory import GPU, OTHER_GPU, mapped_ranges
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import lives
from tests.fixtures.node.device_links import LONG_S, NUM_LAYERS, PART_BYTES, World, make_world
from tests.fixtures.node.links import PATIENT, Worker, failures
from tests.fixtures.node.local import LocalNode
from tests.fixtures.waiting import wait_until

PAGE = SLOT_ALIGNMENT
STORE, LOAD = Direction.STORE, Direction.LOAD
NOWHERE = Where(0)


@pytest.fixture
def world() -> Iterator[World]:
    made = make_world()
    yield made
    made.end()


def wait_until_all_run(service: NodeService) -> None:
    wait_until(lambda: service.stats().queued_jobs == 0, LONG_S, "no job waits for its turn")


# Lanes


def test_store_whose_event_never_comes_delays_no_load_and_no_store_elsewhere(world: World) -> None:
    slow, fast = world.worker(num_ranks=1, seed=1), world.worker(num_ranks=1, seed=2)
    assert fast.run(STORE, [0, 1], [1, 2, 3, 4]) == []
    slow.cuda.stream(7).submit(lambda: slow.overwrite(1, 0xAB))
    store = slow.submit(STORE, [5], [1, 2])
    wait_until_all_run(world.service)
    for _ in range(3):
        assert fast.run(LOAD, [0, 1], [8, 9, 10, 11]) == []
    assert [fast.block(8), fast.block(11)] == [fast.block(1), fast.block(4)]
    assert world.worker(OTHER_GPU, num_ranks=1, seed=3).run(STORE, [6], [1, 2]) == []
    host_worker = Worker(world.node, [PAGE], 1, settings=PATIENT)
    assert host_worker.store([9], [0]) == []
    host_worker.end()
    assert slow.link.drain() == []
    slow.cuda.stream(7).run()
    assert slow.finish(store) == []
    assert fast.run(LOAD, [5], [12, 13]) == []
    assert fast.block(12) == [b"\xab" * len(page) for page in fast.block(12)]


def test_load_whose_event_never_comes_delays_no_store(world: World) -> None:
    slow, fast = world.worker(num_ranks=1, seed=1), world.worker(num_ranks=1, seed=2)
    assert fast.run(STORE, [0], [1, 2]) == []
    slow.cuda.stream(7).submit(lambda: None)
    load = slow.submit(LOAD, [0], [8, 9])
    wait_until_all_run(world.service)
    assert fast.run(STORE, [1], [3, 4]) == []
    assert slow.link.drain() == []
    slow.cuda.stream(7).run()
    assert slow.finish(load) == []
    assert slow.block(9) == fast.block(2)


def test_store_that_waits_is_cancelled_and_its_lane_goes_on(world: World) -> None:
    slow, fast = world.worker(num_ranks=1, seed=1), world.worker(num_ranks=1, seed=2)
    slow.cuda.stream(7).submit(lambda: None)
    store = slow.submit(STORE, [5, 6], [1, 2, 3, 4])
    wait_until_all_run(world.service)
    next_one = fast.submit(STORE, [7], [1, 2])
    slow.link._words.cancel(store)
    assert slow.finish(store) == [Refusal.CANCELLED] * 2
    assert fast.finish(next_one) == []
    assert fast.run(LOAD, [5, 6], [8, 9, 10, 11]) == [Refusal.NOT_HERE] * 2


def test_threads_of_all_lanes_end_with_the_service(world: World) -> None:
    world.worker(GPU, num_ranks=1, seed=1)
    world.worker(OTHER_GPU, num_ranks=1, seed=2)
    # Two of the same one have no more.
    world.worker(GPU, num_ranks=1, seed=3)
    threads = list(world.service._lanes._threads)
    assert len(threads) == 2 * len({GPU, OTHER_GPU, HOST})
    world.service.stop()
    assert not any(thread.is_alive() for thread in threads)


# Several chunks at once


class Stepping(FakeDriver):
    """Says when a batch was submitted, before it can be carried out."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.on_batch: Callable[[int], None] = lambda _: None

    def copy_batch(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        super().copy_batch(stream, copies, order)
        self.on_batch(len(self.calls_of("copy_batch")))


class Driven:
    """A NodeService whose GPU is the driver; the wait for events is tested above."""

    def __init__(self, limits: Limits, seed: int = 0) -> None:
        self.driver = Stepping(seed)
        self._device = Device(self.driver, limits, never_lost, always(Route.BATCH))
        self._known: set[tuple[int, int]] = set()
        self.world = make_world(make=self._backend)

    def _backend(self, device: str, kv: int, pool: int, event: int | None) -> CopyBackend:
        assert device == GPU
        pool_bytes = self.world.service.keeper.geometry.pool_bytes
        kv_bytes = next(size for start, size in mapped_ranges() if start == kv)
        for memory in ((kv, kv_bytes), (pool, pool_bytes)):
            if memory not in self._known:
                self._known.add(memory)
                self.driver.register(*memory)
        return CUDABackend(self._device, Place(kv, pool, None))

    def batches(self, act: Callable[[], object]) -> list[int]:
        """How many copies each batch has that is submitted meanwhile."""
        before = len(self.driver.calls_of("copy_batch"))
        act()
        return [call.num_copies for call in self.driver.calls_of("copy_batch")[before:]]

    def stream(self, direction: Direction) -> Any:
        return next(each for each in self.driver.streams.values() if each.direction is direction)

    def where(self, chunk: int) -> Where:
        """At this node, as its listing says."""
        keeper = self.world.service.keeper
        with keeper.lock:
            (row,) = keeper.owner.index.rows(Namespace("ns"), [numbered_key(chunk)])
            return row.where

    def is_idle(self) -> bool:
        """Nobody copies to or from a slot."""
        keeper = self.world.service.keeper
        with keeper.lock:
            return not any(record.is_busy for record in keeper.owner.index.places)


def never_lost(error: CUDAError) -> NoReturn:
    raise AssertionError(error)


@pytest.fixture
def driven() -> Iterator[Driven]:
    made = Driven(Limits())
    yield made
    made.world.end()


@pytest.fixture
def chunk_by_chunk() -> Iterator[Driven]:
    """On its way is one chunk at a time: a batch has the runs of one, layer by layer."""
    made = Driven(Limits(batch_runs=NUM_LAYERS, in_flight=1))
    yield made
    made.world.end()


BLOCKS = [8, 9, 1, 2, 4, 5, 12, 13]
"""Of four chunks, each of neighbours: a run for each layer."""


def test_chunks_of_a_job_are_one_batch(driven: Driven) -> None:
    worker = driven.world.worker(num_ranks=1)
    before = [worker.block(number) for number in range(16)]
    store = driven.batches(lambda: worker.run(STORE, [0, 1, 2, 3], BLOCKS))
    assert store == [4 * NUM_LAYERS]
    others = [0, 1, 4, 5, 10, 11, 2, 3]
    load = driven.batches(lambda: worker.run(LOAD, [0, 1, 2, 3], others))
    assert load == [4 * NUM_LAYERS]
    assert [worker.block(number) for number in others] == [before[number] for number in BLOCKS]


@pytest.mark.parametrize(
    ("most_bytes", "chunks"), [(3 * PART_BYTES, [3, 1]), (PART_BYTES - 1, [1, 1, 1, 1])]
)
def test_job_is_copied_in_parts_of_at_most_so_many_bytes_or_of_one_chunk(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, most_bytes: int, chunks: list[int]
) -> None:
    monkeypatch.setattr(raykv.node.copying, "SPAN_BYTES", most_bytes)
    worker = driven.world.worker(num_ranks=1)
    store = driven.batches(lambda: worker.run(STORE, [0, 1, 2, 3], BLOCKS))
    assert store == [count * NUM_LAYERS for count in chunks]


@pytest.fixture
def admitted(driven: Driven, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Two chunks go before the others. A pair for each batch: its number, and how many chunks were
    admitted by then.
    """
    monkeypatch.setattr(raykv.node.copying, "FIRST_BYTES", 2 * PART_BYTES)
    keeper, seen, count = driven.world.service.keeper, list[tuple[int, int]](), [0]
    begin_chunks, objection = keeper.begin_chunks, Integrity.objection

    def counted_stores(job: Any, numbers: Any) -> None:
        count[0] += len(numbers)
        begin_chunks(job, numbers)

    def counted_load(*args: Any) -> Refusal:
        count[0] += 1
        return objection(*args)

    monkeypatch.setattr(keeper, "begin_chunks", counted_stores)
    monkeypatch.setattr(Integrity, "objection", counted_load)
    driven.driver.on_batch = lambda number: seen.append((number, count[0]))
    return seen


def test_first_chunks_of_a_job_are_on_their_way_before_the_others_are_admitted(
    driven: Driven, admitted: list[tuple[int, int]]
) -> None:
    worker = driven.world.worker(num_ranks=1)
    before = [worker.block(number) for number in BLOCKS]
    assert worker.run(STORE, [0, 1, 2, 3], BLOCKS) == []
    assert admitted == [(1, 2), (2, 4)]
    others = [0, 1, 4, 5, 10, 11, 2, 3]
    assert worker.run(LOAD, [0, 1, 2, 3], others) == []
    assert admitted[2:] == [(3, 6), (4, 8)]
    assert [worker.block(number) for number in others] == before


def test_job_cancelled_before_its_last_chunks_were_admitted_ends_with_all_of_them_refused(
    driven: Driven, admitted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.copying, "SPAN_BYTES", PART_BYTES)
    worker = driven.world.worker(num_ranks=1)
    assert cancelled_at(driven, worker, 1) == [Refusal.CANCELLED] * 4
    assert admitted[-1][1] < 4
    assert [driven.where(chunk) for chunk in range(4)] == [NOWHERE] * 4
    # Nobody has touched their slots.
    assert worker.run(STORE, [2, 3], BLOCKS[4:]) == []


def cancelled_at(driven: Driven, worker: Any, batch: int) -> list[Refusal]:
    """A store of four chunks, given up when so many batches are on their way."""
    before, job_id = driven.driver.on_batch, 400

    def cancel(number: int) -> None:
        before(number)
        if number == batch:
            worker.link._words.cancel(job_id)

    driven.driver.on_batch = cancel
    refusals: list[Refusal] = worker.run(STORE, [0, 1, 2, 3], BLOCKS, job_id)
    driven.driver.on_batch = before
    return refusals


class Taken:
    """The lock of a device's lane that somebody else has."""

    def __init__(self) -> None:
        self.is_wanted = threading.Event()

    def acquire(self, timeout: float) -> bool:
        self.is_wanted.set()
        return self.is_wanted.wait(timeout / 100) and False


def cancelled_before_its_turn(
    driven: Driven, worker: Any, monkeypatch: pytest.MonkeyPatch, job_id: int
) -> list[Refusal]:
    """A store of four chunks that the lane has not let in when it is given up."""
    lock = Taken()
    with monkeypatch.context() as patch:
        patch.setattr(driven._device.lanes[STORE], "_lock", lock)
        worker.submit(STORE, [0, 1, 2, 3], BLOCKS, job_id)
        assert lock.is_wanted.wait(LONG_S)
        worker.link._words.cancel(job_id)
        refusals: list[Refusal] = worker.finish(job_id)
        return refusals


def test_chunks_that_one_rank_has_stored_and_the_other_one_gave_up_are_gone_at_once(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the other one never came to them: else they wait for it until they expire."""
    life, job_id = next(lives), 500
    ranks = [driven.world.worker(rank=rank, seed=7, life=life) for rank in (0, 1)]
    assert ranks[1].run(STORE, [0, 1, 2, 3], BLOCKS, job_id) == []
    assert [driven.where(chunk) for chunk in range(4)] == [Where.COMING] * 4
    copies = driven.driver.calls_of("copy_batch")
    refusals = cancelled_before_its_turn(driven, ranks[0], monkeypatch, job_id)
    assert refusals == [Refusal.CANCELLED] * 4
    assert driven.driver.calls_of("copy_batch") == copies
    assert [driven.where(chunk) for chunk in range(4)] == [NOWHERE] * 4


def test_later_chunk_whose_admission_fails_takes_those_that_are_admitted_back(
    driven: Driven, admitted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = driven.world.worker(num_ranks=1)
    assert worker.run(STORE, [0, 1, 2, 3], BLOCKS) == []
    objection = Integrity.objection

    def failing(*args: Any) -> Refusal:
        if admitted[-1][0] > 2:
            raise OSError("planted")
        return objection(*args)

    monkeypatch.setattr(Integrity, "objection", failing)
    assert worker.run(LOAD, [0, 1, 2, 3], BLOCKS) == [Refusal.COPY_FAILED] * 4
    assert driven.driver.num_pending == 0
    assert driven.is_idle()
    monkeypatch.setattr(Integrity, "objection", objection)
    assert worker.run(LOAD, [0, 1, 2, 3], BLOCKS) == []


@pytest.mark.parametrize("here", [0, 1, 3])
def test_chunk_that_is_here_is_left_out_and_splits_no_batch(driven: Driven, here: int) -> None:
    worker = driven.world.worker(num_ranks=1)
    chunks = [0, 1, 2, 3]
    assert worker.run(STORE, [here], [14, 15]) == []
    refusals: list[Refusal] = []
    store = driven.batches(lambda: refusals.extend(worker.run(STORE, chunks, BLOCKS)))
    assert (store, refusals) == ([3 * NUM_LAYERS], [])
    assert worker.run(LOAD, [here], [6, 7]) == []
    assert [worker.block(6), worker.block(7)] == [worker.block(14), worker.block(15)]
    for chunk in set(chunks) - {here}:
        assert worker.run(LOAD, [chunk], [6, 7]) == []
        assert worker.block(6) == worker.block(BLOCKS[2 * chunk])


def test_load_of_a_chunk_that_is_not_there_leaves_its_blocks_alone(driven: Driven) -> None:
    worker = driven.world.worker(num_ranks=1)
    assert worker.run(STORE, [0, 2], [1, 2, 3, 4]) == []
    untouched = [worker.block(10), worker.block(11)]
    refusals: list[Refusal] = []
    load = driven.batches(
        lambda: refusals.extend(worker.run(LOAD, [0, 1, 2], [8, 9, 10, 11, 12, 13]))
    )
    assert (load, refusals) == ([2 * NUM_LAYERS], [Refusal.NOT_HERE])
    assert [worker.block(10), worker.block(11)] == untouched
    assert worker.block(13) == worker.block(4)


def test_store_that_is_cancelled_between_chunks_of_a_batch_leaves_none_ready(
    chunk_by_chunk: Driven,
) -> None:
    driven, worker = chunk_by_chunk, chunk_by_chunk.world.worker(num_ranks=1)
    assert cancelled_at(driven, worker, 2) == [Refusal.CANCELLED] * 4
    assert len(driven.driver.calls_of("copy_batch")) == 2
    assert driven.driver.num_pending == 0
    assert [driven.where(chunk) for chunk in range(4)] == [NOWHERE] * 4
    assert worker.run(LOAD, [0, 1], [0, 1, 2, 3]) == [Refusal.NOT_HERE] * 2


def test_store_that_is_cancelled_after_a_part_makes_no_further_chunk_ready(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.copying, "FIRST_BYTES", PART_BYTES)
    monkeypatch.setattr(raykv.node.copying, "SPAN_BYTES", PART_BYTES)
    worker = driven.world.worker(num_ranks=1)
    end_chunks, job_id = driven.world.service.keeper.end_chunks, 400

    def end_and_cancel(*args: Any, **kwargs: Any) -> None:
        worker.link._words.cancel(job_id)
        end_chunks(*args, **kwargs)

    monkeypatch.setattr(driven.world.service.keeper, "end_chunks", end_and_cancel)
    assert worker.run(STORE, [0, 1, 2], BLOCKS[:6], job_id) == [Refusal.CANCELLED] * 2
    assert [driven.where(chunk) for chunk in range(3)] == [Where.RAM, NOWHERE, NOWHERE]


@pytest.mark.parametrize("way", [STORE, LOAD])
def test_batch_that_fails_leaves_no_chunk_admitted(driven: Driven, way: Direction) -> None:
    worker = driven.world.worker(num_ranks=1)
    assert worker.run(STORE, [0, 1, 2], BLOCKS[:6]) == []
    driven.driver.fail_at["copy_batch", 1] = "cudaErrorInvalidValue"
    chunks = [4, 5, 6] if way is STORE else [0, 1, 2]
    assert worker.run(way, chunks, BLOCKS[:6]) == [Refusal.COPY_FAILED] * 3
    states = [driven.where(chunk) for chunk in chunks]
    assert states == [NOWHERE if way is STORE else Where.RAM] * 3
    assert driven.is_idle()
    assert worker.run(LOAD, [0, 1, 2], BLOCKS[:6]) == []


def test_memory_of_a_worker_killed_during_a_batch_is_unmapped_once_that_has_arrived(
    driven: Driven,
) -> None:
    """Nothing is on its way to or from memory that is mapped no more."""
    worker = driven.world.worker(num_ranks=1)
    stream = driven.stream(Direction.STORE)
    stream.is_frozen = True
    before = driven.world.cuda.num_open
    child = driven.world.spawn("waiting")
    wait_until(lambda: driven.driver.num_pending > 0, LONG_S, "its batch is on its way")
    child.kill()
    child.wait(LONG_S)
    wait_until(lambda: driven.world.service.stats().num_workers == 1, LONG_S, "it is gone")
    # Loads go on meanwhile.
    assert worker.run(LOAD, [0], [0, 1]) == [Refusal.NOT_HERE]
    assert driven.world.cuda.num_open > before
    assert driven.driver.num_pending > 0
    stream.is_frozen = False
    wait_until(lambda: driven.world.cuda.num_open == before, LONG_S, "its memory is unmapped")
    assert driven.driver.num_pending == 0
    assert driven.where(0) is NOWHERE
    assert worker.run(STORE, [1], [0, 1]) == []


# The host's memory


class Gate:
    """What a back end for host memory has done, and what it does before each copy."""

    def __init__(self) -> None:
        self.done: list[Direction] = []
        self.before: Callable[[Direction], None] = lambda _: None


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    made = Gate()

    class Gated(CPUBackend):
        def copy(self, direction: Direction, runs: CopyRuns, stop: StopSign) -> bool:
            made.before(direction)
            done = super().copy(direction, runs, stop)
            made.done.append(direction)
            return done

    monkeypatch.setattr(raykv.node.attached, "CPUBackend", Gated)
    monkeypatch.setattr(raykv.node.copying, "HOST_SPAN_BYTES", 2 * PAGE)
    return made


@pytest.fixture
def two() -> Iterator[Two]:
    node = LocalNode(32, num_slabs=2)
    node.start()
    workers = [Worker(node, [PAGE], 1, settings=PATIENT) for _ in range(2)]
    yield workers[0], workers[1]
    for worker in workers:
        worker.end()
    node.stop()


def test_copies_begin_when_their_jobs_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when a thread looks the next time."""
    monkeypatch.setattr("raykv.base.deadlines.WAKE_S", 4.0)
    node = LocalNode(32, num_slabs=2)
    node.start()
    worker = Worker(node, [PAGE], 1, settings=PATIENT)
    began = time.monotonic()
    assert worker.store([0, 1], [0, 1]) == []
    assert not failures(worker.run(worker.job(Direction.LOAD, [0, 1], [2, 3])))
    assert time.monotonic() - began < 2.0
    worker.end()
    node.stop()


Two = tuple[Worker, Worker]


def in_thread(act: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=act)
    thread.start()
    return thread


def test_load_into_host_memory_is_one_copy_where_a_store_is_several(gate: Gate, two: Two) -> None:
    worker, _ = two
    chunks = [0, 1, 2, 3, 4]
    assert worker.store(chunks, chunks) == []
    assert worker.load(chunks, chunks) == []
    assert gate.done == [STORE, STORE, STORE, LOAD]


def test_load_comes_between_the_spans_of_a_store(
    gate: Gate, two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.lanes, "NODE_GIVE_WAY_S", LONG_S)
    loader, storer = two
    assert loader.store([0, 1], [0, 1]) == []
    loading: list[threading.Thread] = []
    loads, second = threading.Event(), threading.Event()
    overtaken: list[bool] = []
    gate.done.clear()

    def bring_a_load(direction: Direction) -> None:
        if direction is LOAD:
            loads.set()
            wait_until(lambda: bool(gate.done), LONG_S, "the first span is stored")
            overtaken.append(second.wait(0.3))
        elif loading:
            second.set()
        else:
            loading.append(in_thread(lambda: loader.load([0, 1], [0, 1])))
            assert loads.wait(LONG_S)

    gate.before = bring_a_load
    assert storer.store([4, 5, 6, 7], [0, 1, 2, 3]) == []
    loading[0].join(LONG_S)
    assert overtaken == [False]
    assert gate.done == [STORE, LOAD, STORE]


def test_load_without_an_end_keeps_no_store_from_ending_and_none_takes_its_slot(
    gate: Gate, two: Two
) -> None:
    """They are in two threads; the pool keeps them apart."""
    loader, storer = two
    assert loader.store([0], [0]) == []
    before = loader.block(0)
    loads, stored = threading.Event(), threading.Event()

    def hold(direction: Direction) -> None:
        if direction is LOAD:
            loads.set()
            assert stored.wait(LONG_S)

    gate.before = hold
    found: list[list[Refusal]] = []
    loading = in_thread(lambda: found.append(loader.load([0], [1])))
    assert loads.wait(LONG_S)
    assert storer.store([4, 5, 6], [0, 1, 2]) == []
    for first in range(10, 50, 8):
        storer.store(list(range(first, first + 8)), list(range(8)))
    stored.set()
    loading.join(LONG_S)
    assert found == [[]]
    assert loader.block(1) == before
