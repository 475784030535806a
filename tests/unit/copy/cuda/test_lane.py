"""The copies of a GPU's KV cache, with a driver that does everything as late and badly as CUDA may.

No GPU is needed, and none is tested: that the real calls do what the driver's protocol says is for
the tests marked `gpu`.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from typing import NoReturn

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.ids import Direction
from raykv.copy.cuda.backend import CUDABackend
from raykv.copy.cuda.batches import Route, batches, cut
from raykv.copy.cuda.driver import Copies, SourceOrder
from raykv.copy.cuda.lane import Device, Limits, Place
from raykv.copy.engine import SPAN_BYTES, StopSign
from raykv.copy.plan import CopyRuns
from raykv.memory.cuda.driver import CUDAError
from tests.fixtures.copy.memories import carried_out
from tests.fixtures.cuda.copies import Compute, FakeDriver, always
from tests.house import ROOT

STORE, LOAD = Direction.STORE, Direction.LOAD
NEVER = StopSign()
PAGE = 64
NUM_BLOCKS = 40
SMALL = Limits(batch_bytes=4 * PAGE, batch_runs=3, staging_bytes=2 * PAGE)
"""A copy of some blocks takes several batches."""


class LostError(Exception):
    """In a NodeActor the process would have ended."""


def lose(error: CUDAError) -> NoReturn:
    raise LostError(str(error))


class Memory:
    """A KV cache and a pool full of random bytes, and a device that copies between them."""

    def __init__(
        self,
        driver: FakeDriver,
        limits: Limits = SMALL,
        route: Route = Route.BATCH,
        compute_event: int | None = None,
    ) -> None:
        random = np.random.default_rng(7)
        self.kv, self.pool = (random.integers(0, 256, NUM_BLOCKS * PAGE, np.uint8) for _ in "kp")
        for side in (self.kv, self.pool):
            driver.register(side.ctypes.data, side.nbytes)
        self.driver = driver
        self.device = Device(driver, limits, lose, always(route))
        place = Place(self.kv.ctypes.data, self.pool.ctypes.data, compute_event)
        self.backend = CUDABackend(self.device, place)

    def copy(self, direction: Direction, runs: CopyRuns, stop: StopSign = NEVER) -> bool:
        return carried_out(self.backend, direction, runs, stop)

    def arrives(self, direction: Direction, runs: CopyRuns) -> bool:
        """Whether a copy of the runs does what it should, and nothing else."""
        expected = self.after(direction, runs)
        return self.copy(direction, runs) and self.now == expected

    def after(self, direction: Direction, runs: CopyRuns) -> tuple[bytes, bytes]:
        """KV cache and pool as they should be after a copy."""
        kv, pool = self.kv.copy(), self.pool.copy()
        for at, there, size in zip(runs.kv, runs.pool, runs.size, strict=True):
            if direction is STORE:
                pool[there : there + size] = kv[at : at + size]
            else:
                kv[at : at + size] = pool[there : there + size]
        return kv.tobytes(), pool.tobytes()

    @property
    def now(self) -> tuple[bytes, bytes]:
        return self.kv.tobytes(), self.pool.tobytes()


def runs_of(blocks: list[int], page: int = PAGE) -> CopyRuns:
    """Blocks of the KV cache, one behind the other in the pool."""
    kv = np.array(blocks, np.int64) * page
    size = np.full(len(blocks), page, np.int64)
    return CopyRuns(kv, np.cumsum(size) - size, size)


SCATTERED = runs_of([5, 3, 30, 7, 20, 9, 38, 11, 13, 1, 34])


def fill(side: npt.NDArray[np.uint8], value: int) -> None:
    side[:] = value


block_lists = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS, unique=True)
limits_ = st.builds(
    Limits,
    batch_bytes=st.sampled_from([1, PAGE, 5 * PAGE, 1 << 20]),
    batch_runs=st.integers(1, 9),
    cut_bytes=st.sampled_from([8, 3 * PAGE, 1 << 20]),
    staging_bytes=st.sampled_from([8, PAGE, 3 * PAGE]),
    in_flight=st.integers(1, 4),
)


@settings(deadline=None, max_examples=150)
@given(
    blocks=block_lists,
    page=st.sampled_from([1, 8, 12, PAGE]),
    direction=st.sampled_from(Direction),
    route=st.sampled_from(Route),
    limits=limits_,
    seed=st.integers(0, 999),
)
def test_copy_of_any_blocks_has_arrived_when_it_returns(
    blocks: list[int], page: int, direction: Direction, route: Route, limits: Limits, seed: int
) -> None:
    memory = Memory(FakeDriver(seed), limits, route)
    runs = runs_of(blocks, page)
    assert memory.arrives(direction, runs)
    assert memory.driver.num_pending == 0
    memory.device.close()
    assert not memory.driver.streams
    assert memory.driver.num_allocations == 0


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("route", Route)
def test_store_takes_what_the_step_before_has_computed(route: Route, seed: int) -> None:
    driver = FakeDriver(seed)
    compute = Compute(driver)
    memory = Memory(driver, route=route, compute_event=compute.event)
    compute.launch(lambda: fill(memory.kv, 77))
    assert memory.copy(STORE, SCATTERED)
    assert set(memory.pool[: SCATTERED.num_bytes]) == {77}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("route", Route)
def test_load_is_not_overwritten_by_the_step_before(route: Route, seed: int) -> None:
    """That may still zero the blocks, or write those of a request that has ended."""
    driver = FakeDriver(seed)
    compute = Compute(driver)
    memory = Memory(driver, route=route, compute_event=compute.event)
    compute.launch(lambda: fill(memory.kv, 0))
    loaded = memory.pool[: SCATTERED.num_bytes].reshape(-1, PAGE).copy()
    assert memory.copy(LOAD, SCATTERED)
    driver.run_all()
    assert np.array_equal(memory.kv.reshape(-1, PAGE)[SCATTERED.kv // PAGE], loaded)


def test_event_that_is_recorded_again_and_again_does_not_hold_up_a_copy() -> None:
    """The worker records it at each step: a copy waits for the step before it, not for later."""
    driver = FakeDriver()
    compute = Compute(driver)
    memory = Memory(driver, compute_event=compute.event)
    compute.launch(lambda: fill(memory.kv, 77))
    steps = 0

    class Stepping(StopSign):
        def __call__(self) -> bool:
            nonlocal steps
            steps += 1
            compute.launch(lambda: None)
            return False

    assert memory.copy(STORE, SCATTERED, Stepping())
    assert steps > 1
    assert set(memory.pool[: SCATTERED.num_bytes]) == {77}


@contextmanager
def frozen(driver: FakeDriver, stream: int) -> Iterator[None]:
    """What the stream was given is not carried out meanwhile."""
    driver.streams[stream].is_frozen = True
    yield
    driver.streams[stream].is_frozen = False


class StopAfter(StopSign):
    """Is set from the n-th look on."""

    def __init__(self, looks: int) -> None:
        super().__init__()
        self.looks = looks

    def __call__(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def submissions(driver: FakeDriver) -> int:
    return sum(call.num_copies for call in driver.calls if call.name != "allocate")


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("looks", [0, 1, 5])
def test_copy_that_is_stopped_while_it_waits_for_compute_leaves_nothing_behind(
    direction: Direction, looks: int
) -> None:
    driver = FakeDriver()
    compute = Compute(driver)
    memory = Memory(driver, compute_event=compute.event)
    compute.launch(lambda: None)
    before = memory.now
    with frozen(driver, compute.stream):
        assert not memory.copy(direction, SCATTERED, StopAfter(looks))
        assert submissions(driver) == 0
    driver.run_all()
    assert memory.now == before


def test_worker_whose_step_takes_long_holds_up_no_other_worker() -> None:
    driver = FakeDriver()
    slow, fast = Compute(driver), Compute(driver)
    memory = Memory(driver, Limits(compute_s=0.5), compute_event=slow.event)
    place = Place(memory.kv.ctypes.data, memory.pool.ctypes.data, fast.event)
    other = CUDABackend(memory.device, place)
    expected = memory.after(STORE, SCATTERED)
    with frozen(driver, slow.stream):
        slow.launch(lambda: None)
        with pytest.raises(CUDAError, match=r"not finished the step .* given up"):
            memory.copy(STORE, SCATTERED)
        assert submissions(driver) == 0
        assert carried_out(other, STORE, SCATTERED, NEVER)
    assert memory.now == expected


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("looks", range(6))
@pytest.mark.parametrize("seed", range(3))
def test_stopped_copy_has_written_whole_batches_only_and_writes_nothing_later(
    route: Route, looks: int, seed: int
) -> None:
    driver = FakeDriver(seed)
    memory = Memory(driver, route=route)
    before, whole = memory.pool.copy(), memory.after(STORE, SCATTERED)
    stopped = memory.copy(STORE, SCATTERED, StopAfter(looks)) is False
    assert stopped == (memory.now != whole)
    assert driver.num_pending == 0
    # Four pages take one way: two by two, or three and one.
    ends = [0, 2, 4, 6, 8, 10, 11] if route is Route.GATHER else [0, 3, 4, 7, 8, 11]
    done = ends[min(max(looks - 1, 0), len(ends) - 1)] * PAGE
    assert memory.pool.tobytes() == whole[1][:done] + before[done:].tobytes()


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("direction", Direction)
def test_next_part_is_on_its_way_before_one_is_answered_for(
    route: Route, direction: Direction
) -> None:
    memory = Memory(FakeDriver(), route=route)
    whole = runs_of([3, 9, 5, 30, 1, 12, 7])
    expected = memory.after(direction, whole)
    ends = [0, 2, 3, 6, 7]
    parts = [CopyRuns(whole.kv[a:b], whole.pool[a:b], whole.size[a:b]) for a, b in pairwise(ends)]
    begun: list[int] = []

    def taken() -> Iterator[CopyRuns]:
        for number, part in enumerate(parts):
            begun.append(number)
            yield part

    seen = []
    with closing(memory.backend.copy_each(direction, taken(), NEVER)) as answers:
        for done in answers:
            assert done
            seen.append(len(begun))
    assert seen == [2, 3, 4, 4]
    assert memory.now == expected


def test_parts_that_nobody_waits_for_any_more_have_arrived_when_the_generator_is_closed() -> None:
    memory = Memory(FakeDriver())
    parts = [runs_of([block]) for block in (3, 9, 5)]
    with closing(memory.backend.copy_each(STORE, parts, NEVER)) as answers:
        assert next(answers)
    assert memory.driver.num_pending == 0
    # The lane is free again.
    assert memory.copy(LOAD, SCATTERED)


def test_stop_between_parts_leaves_those_behind_without_a_true_answer() -> None:
    memory = Memory(FakeDriver())
    parts = [runs_of([block]) for block in (3, 9, 5, 7)]
    stop = StopAfter(2)
    answers = []
    for done in memory.backend.copy_each(STORE, parts, stop):
        answers.append(done)
        # Whoever hears of it gives the slots away.
        assert done or memory.driver.num_pending == 0
    assert answers[-1] is False
    assert answers.count(False) == 1
    assert len(answers) < len(parts)


class Watching(FakeDriver):
    """Notes the most copies that were submitted and not carried out."""

    most = 0

    def copy_batch(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        super().copy_batch(stream, copies, order)
        waiting = sum(len(steps) for steps in self.streams[stream].work)
        self.most = max(self.most, waiting)


def test_as_many_batches_are_on_their_way_as_the_limits_say() -> None:
    driver = Watching()
    in_flight, batch_runs = 2, 3
    memory = Memory(driver, Limits(batch_runs=batch_runs, in_flight=in_flight))
    runs = runs_of(list(range(0, NUM_BLOCKS, 2)))
    assert memory.copy(STORE, runs)
    events = in_flight + 1
    assert batch_runs < driver.most <= in_flight * batch_runs + events


def test_part_of_a_job_is_gathered_at_once() -> None:
    assert Limits().staging_bytes >= SPAN_BYTES


def test_first_batch_of_a_copy_is_small_and_no_other_one() -> None:
    driver = FakeDriver()
    memory = Memory(driver, Limits(first_bytes=2 * PAGE, batch_bytes=4 * PAGE), route=Route.BATCH)
    parts = [runs_of(list(range(0, 16, 2))), runs_of(list(range(16, 32, 2)))]
    assert list(memory.backend.copy_each(STORE, parts, StopSign())) == [True, True]
    assert [call.num_copies for call in driver.calls_of("copy_batch")] == [2, 4, 2, 4, 4]


def failures_of(route: Route) -> list[tuple[str, int]]:
    """Every call of a copy, which may fail: its name, and the how many-th of that name it is."""
    driver = FakeDriver(3)
    memory = Memory(driver, route=route, compute_event=driver.make_event())
    first = {name: len(driver.calls_of(name)) for name in {call.name for call in driver.calls}}
    assert memory.copy(STORE, SCATTERED)
    return [
        (name, number)
        for name in sorted({call.name for call in driver.calls} - {"allocate"})
        for number in range(first.get(name, 0), len(driver.calls_of(name)))
    ]


FAILURES = [(route, *call) for route in Route for call in failures_of(route)]


@pytest.mark.parametrize(("route", "name", "number"), FAILURES)
def test_call_that_fails_is_refused_with_nothing_on_its_way(
    route: Route, name: str, number: int
) -> None:
    """Or the process would end: where it can't be known whether something is on its way."""
    driver = FakeDriver(3)
    memory = Memory(driver, route=route, compute_event=driver.make_event())
    driver.fail_at[name, number] = "cudaErrorLaunchFailure"
    with pytest.raises((CUDAError, LostError), match="cudaErrorLaunchFailure") as raised:
        memory.copy(STORE, SCATTERED)
    if raised.type is LostError:
        assert name in ("is_done", "record")
        return
    left, before = driver.num_pending, memory.now
    # The wait for compute may be left, with the event behind it.
    assert left <= 2
    assert left == 0 or submissions(driver) == 0
    driver.run_all()
    assert memory.now == before
    expected = memory.after(LOAD, SCATTERED)
    assert memory.copy(LOAD, SCATTERED)
    assert memory.copy(STORE, SCATTERED)
    assert memory.now == expected


def test_every_kind_of_call_was_made_to_fail() -> None:
    assert {name for _, name, _ in FAILURES} == {
        "copy_batch",
        "is_done",
        "move_pages",
        "record",
        "wait_event",
    }


@pytest.mark.parametrize("route", Route)
@pytest.mark.parametrize("direction", Direction)
def test_neighbouring_slots_in_two_pinned_pieces_are_copied(
    direction: Direction, route: Route
) -> None:
    """CUDA refuses one copy over the edge between them."""
    driver = FakeDriver()
    memory = Memory(driver, Limits(), route)
    pool = np.arange(4 * PAGE).astype(np.uint8)
    for piece in range(2):
        driver.register(pool.ctypes.data + piece * 2 * PAGE, 2 * PAGE)
    memory.pool = pool
    place = Place(memory.kv.ctypes.data, pool.ctypes.data, None)
    memory.backend = CUDABackend(memory.device, place)
    at, size = np.array([0, 2 * PAGE]), np.full(2, 2 * PAGE)
    runs = CopyRuns(at, at, size, 2 * PAGE)
    assert memory.arrives(direction, runs)
    start = np.array([0])
    whole = CopyRuns(start, start, np.array([4 * PAGE]))
    with pytest.raises(CUDAError):
        memory.copy(direction, whole)


def test_device_that_hangs_ends_the_process() -> None:
    driver = FakeDriver()
    memory = Memory(driver, Limits(hang_s=0.1))
    stream = next(h for h, s in driver.streams.items() if s.direction is Direction.STORE)
    with frozen(driver, stream), pytest.raises(LostError, match="the GPU hangs"):
        memory.copy(STORE, SCATTERED)
    assert driver.num_pending


class BreakingAt(FakeDriver):
    """The device breaks while it carries out the n-th batch; every later call says so."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._left = number

    def copy_batch(self, stream: int, copies: Copies, order: SourceOrder) -> None:
        super().copy_batch(stream, copies, order)
        self._left -= 1
        if not self._left:
            self.broken = "cudaErrorIllegalAddress"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_device_that_breaks_during_a_copy_ends_the_process(number: int) -> None:
    memory = Memory(BreakingAt(number))
    with pytest.raises(LostError, match="cudaErrorIllegalAddress"):
        memory.copy(STORE, SCATTERED)


def test_device_that_broke_before_refuses_a_copy() -> None:
    driver = FakeDriver()
    memory = Memory(driver, compute_event=driver.make_event())
    driver.broken = "cudaErrorIllegalAddress"
    with pytest.raises(CUDAError, match="cudaErrorIllegalAddress"):
        memory.copy(STORE, SCATTERED)
    assert submissions(driver) == 0


def test_process_that_ends_says_why() -> None:
    code = (
        "from raykv.copy.cuda.lane import end_process\n"
        "from raykv.copy.cuda.driver import CUDAError\n"
        "try:\n"
        "    end_process(CUDAError('the GPU hangs'))\n"
        "finally:\n"
        "    print('still here')\n"
    )
    root = ROOT
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -9
    assert "may still be on their way: the GPU hangs" in done.stderr
    assert not done.stdout


def test_small_pages_are_copied_one_by_one_when_staging_memory_cant_be_had(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = FakeDriver()
    driver.fail_at["allocate", 0] = "cudaErrorMemoryAllocation"
    memory = Memory(driver, route=Route.GATHER)
    expected = memory.after(STORE, SCATTERED)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert memory.copy(STORE, SCATTERED)
    assert memory.now == expected
    assert not driver.calls_of("move_pages")
    assert caplog.text.count("lower gpu_memory_utilization") == 1
    memory.device.close()
    assert driver.num_allocations == 0


@pytest.mark.parametrize("direction", Direction)
def test_small_pages_are_copied_one_by_one_when_what_moves_them_fails(
    direction: Direction, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver()
    driver.is_mover_good = False
    memory = Memory(driver, route=Route.GATHER)
    expected = memory.after(direction, SCATTERED)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert memory.copy(direction, SCATTERED)
    assert memory.now == expected
    assert len(driver.calls_of("move_pages")) == 1
    assert caplog.text.count("one by one from now on: no C compiler") == 1


def test_gathered_pages_cross_to_the_host_in_one_piece() -> None:
    limits = Limits(batch_runs=64)
    memory = Memory(FakeDriver(), limits, route=Route.GATHER)
    assert memory.copy(STORE, SCATTERED)
    (moved,) = memory.driver.calls_of("move_pages")
    (crossed,) = memory.driver.calls_of("copy_batch")
    assert (moved.num_copies, crossed.num_copies) == (len(SCATTERED.size), 1)
    assert moved.num_bytes == crossed.num_bytes == SCATTERED.num_bytes


def test_load_passes_a_store_that_is_on_its_way() -> None:
    driver = FakeDriver()
    memory = Memory(driver, Limits(hang_s=300))
    stream = next(h for h, s in driver.streams.items() if s.direction is Direction.STORE)
    store = threading.Thread(target=memory.copy, args=(STORE, runs_of([0])))
    with frozen(driver, stream):
        store.start()
        load = runs_of([5, 7])
        expected = memory.after(LOAD, load)[0]
        assert memory.copy(LOAD, load)
        assert memory.kv.tobytes() == expected
        assert store.is_alive()
    store.join(60)
    assert not store.is_alive()


def test_copy_that_waits_for_another_one_of_its_direction_can_be_stopped() -> None:
    driver = FakeDriver()
    memory = Memory(driver, Limits(hang_s=300))
    stream = next(h for h, s in driver.streams.items() if s.direction is Direction.STORE)
    first = threading.Thread(target=memory.copy, args=(STORE, SCATTERED))
    with frozen(driver, stream):
        first.start()
        while not driver.calls_of("copy_batch"):
            pass
        assert not memory.copy(STORE, SCATTERED, StopAfter(2))
    first.join(60)
    assert not first.is_alive()
    assert len(driver.calls_of("copy_batch")) == 1


def test_copies_of_many_threads_do_not_mix() -> None:
    driver = FakeDriver()
    memory = Memory(driver, SMALL)
    ends: list[bool] = []

    def run(direction: Direction, blocks: list[int]) -> None:
        runs = runs_of(blocks)
        ends.extend(memory.copy(direction, runs) for _ in range(20))

    threads = [
        threading.Thread(target=run, args=(direction, list(range(start, NUM_BLOCKS, 4))))
        for direction in Direction
        for start in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert ends == [True] * 80
    assert driver.num_pending == 0


def test_batches_of_the_usual_limits_are_small() -> None:
    """At 12 GB/s what is on its way has arrived within 10 ms."""
    limits = Limits()
    size = np.full(100, 20 << 20, np.int64)
    runs = CopyRuns(np.cumsum(size), np.cumsum(size), size)
    pieces = cut(runs, limits.cut_bytes)
    largest = max(each.num_bytes for each in batches(pieces, limits.batch_bytes, limits.batch_runs))
    assert largest * limits.in_flight / 12e9 < 0.010


@pytest.mark.parametrize(("mover", "staging_bytes"), [("fake", PAGE - 8), (None, 2 * PAGE)])
def test_pages_are_copied_one_by_one_if_none_fits_the_staging_buffer_or_nothing_moves_them(
    mover: str | None, staging_bytes: int
) -> None:
    limits = Limits(staging_bytes=staging_bytes)
    memory = Memory(FakeDriver(mover=mover), limits, Route.GATHER)
    assert memory.arrives(STORE, SCATTERED)
    assert not memory.driver.calls_of("move_pages")
