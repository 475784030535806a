"""The copies with a KV cache of a real model's shape, on a GPU and in the same words on a fake one.

The tests marked `gpu` need an NVIDIA GPU, torch for CUDA and nothing else: no vLLM, no Ray.
`pytest -m gpu tests/gpu` runs them; without a GPU they are skipped.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import pytest

from raykv.base.geometry import MAX_SLAB_BYTES
from raykv.base.ids import SLOT_ALIGNMENT, Direction, Slot
from raykv.copy.cuda.backend import CUDABackend, backend
from raykv.copy.cuda.batches import Route
from raykv.copy.cuda.driver import CUDADriver
from raykv.copy.cuda.lane import Device, Limits, Place
from raykv.copy.cuda.pages import mover_of
from raykv.copy.engine import SPAN_BYTES, CopyBackend, StopSign
from raykv.copy.plan import CopyRuns, JobPlan, Planner
from raykv.lab.bench.report import Options
from raykv.memory.cuda.driver import CUDAError
from raykv.memory.words import Word
from raykv.protocol.worker import KVLayout, TensorLayout
from tests.fixtures.copy.memories import carried_out
from tests.fixtures.cuda.copies import Compute, FakeDriver, WithoutWait, always
from tests.fixtures.jobs import named_job
from tests.fixtures.keys import named_key

torch = pytest.importorskip("torch")

STORE, LOAD = Direction.STORE, Direction.LOAD
NEVER = StopSign()
KIB, MIB = 1 << 10, 1 << 20

NUM_LAYERS = 32
LLAMA_PAGE = 16 * 2 * 8 * 128 * 2
"""Llama 8B, one layer: 16 tokens, keys and values, 8 heads of 128 numbers of 2 bytes."""

HYBRID_PAGE = 4 * KIB
BLOCKS_PER_CHUNK = 4
LONG_KERNEL_CYCLES = 1_000_000_000
"""About half a second."""


def has_gpu() -> bool:
    has_device = Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
    has_package = importlib.util.find_spec("cuda") is not None
    return has_device and has_package and bool(torch.cuda.is_available())


needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not has_gpu(), reason="there is no GPU here")]


def lose(error: CUDAError) -> NoReturn:
    raise AssertionError(error)


class WithoutWaitOnGPU(CUDADriver):
    """The mistake that the compute event is there for."""

    def wait_event(self, stream: int, event: int) -> None:
        pass


class FakeRig:
    """In this process's memory. `event` is the worker's compute event."""

    num_blocks = 24

    def __init__(self, *, waits: bool) -> None:
        self.driver: FakeDriver = FakeDriver() if waits else WithoutWait()
        self._compute = Compute(self.driver)
        self.event = self._compute.event

    def make_kv(self, num_bytes: int) -> Any:
        kv = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8)
        self.driver.register(kv.data_ptr(), num_bytes)
        return kv

    def make_pool(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        pool = np.zeros(num_bytes, np.uint8)
        self.driver.register(pool.ctypes.data, num_bytes)
        return pool

    def launch(self, act: Callable[[], object]) -> None:
        """A long kernel on the compute stream, then `act`, then the event."""
        self._compute.launch(act)

    def finish(self) -> None:
        self.driver.run_all()

    def close(self) -> None:
        self.finish()


class GPURig:
    """On the first GPU."""

    num_blocks = 256

    def __init__(self, *, waits: bool) -> None:
        kind = CUDADriver if waits else WithoutWaitOnGPU
        self.driver: CUDADriver = kind(first_uuid())
        self._compute = torch.cuda.Stream()
        self._event = torch.cuda.Event(interprocess=True)
        self._event.record(self._compute)
        self.event = int(self._event.cuda_event)

    def make_kv(self, num_bytes: int) -> Any:
        kv = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device="cuda")
        torch.cuda.synchronize()
        return kv

    def make_pool(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        pool: npt.NDArray[np.uint8] = torch.zeros(
            num_bytes, dtype=torch.uint8, pin_memory=True
        ).numpy()
        return pool

    def launch(self, act: Callable[[], object]) -> None:
        with torch.cuda.stream(self._compute):
            torch.cuda._sleep(LONG_KERNEL_CYCLES)
            act()
            self._event.record(self._compute)

    def finish(self) -> None:
        torch.cuda.synchronize()

    def close(self) -> None:
        self.finish()


def first_uuid() -> str:
    return str(torch.cuda.get_device_properties(0).uuid)


AnyRig = FakeRig | GPURig
RIGS: dict[str, type[FakeRig] | type[GPURig]] = {"fake": FakeRig, "gpu": GPURig}
every_rig = pytest.mark.parametrize("rig", ["fake", pytest.param("gpu", marks=needs_gpu)])


class Cache:
    """A KV cache of all layers and a pool, on a rig; everything is compared on the host."""

    def __init__(self, rig: AnyRig, page: int, route: Route) -> None:
        self.page, self.num_blocks = page, rig.num_blocks
        self.num_chunks = self.num_blocks // (2 * BLOCKS_PER_CHUNK)
        chunk_bytes = NUM_LAYERS * BLOCKS_PER_CHUNK * page
        self.kv = rig.make_kv(NUM_LAYERS * self.num_blocks * page)
        self.pool = rig.make_pool(self.num_chunks * chunk_bytes)
        self.device = Device(rig.driver, Limits(), lose, always(route))
        place = Place(self.kv.data_ptr(), self.pool.ctypes.data, rig.event)
        self.backend: CopyBackend = CUDABackend(self.device, place)
        stride = self.num_blocks * page
        tensors = [
            TensorLayout(layer * stride, self.num_blocks, page, page) for layer in range(NUM_LAYERS)
        ]
        layout = KVLayout(
            "cuda", len(self.kv), BLOCKS_PER_CHUNK, tensors, [0], [list(range(NUM_LAYERS))]
        )
        self._planner = Planner(layout, 0)
        self.chunk_pages = chunk_bytes // SLOT_ALIGNMENT

    def plan(self, blocks: list[int], direction: Direction) -> JobPlan:
        count = len(blocks) // BLOCKS_PER_CHUNK
        parts = [
            blocks[chunk * BLOCKS_PER_CHUNK : (chunk + 1) * BLOCKS_PER_CHUNK]
            for chunk in range(count)
        ]
        return self._planner.plan(named_job(direction, [named_key("k")] * count, parts))

    def runs(self, plan: JobPlan, chunks: Sequence[int]) -> CopyRuns:
        slots = [Slot(chunk * self.chunk_pages) for chunk in chunks]
        return plan.runs(chunks, slots, MAX_SLAB_BYTES)

    def copy(
        self,
        blocks: list[int],
        direction: Direction,
        stop: StopSign = NEVER,
        left_out: int | None = None,
    ) -> bool:
        """Some chunks at a time, as a NodeActor does; without the one that it has refused."""
        plan = self.plan(blocks, direction)
        chunks = [chunk for chunk in range(len(plan.ends)) if chunk != left_out]
        at_once = max(1, SPAN_BYTES // plan.bytes_of(0))
        parts = (
            self.runs(plan, chunks[first : first + at_once])
            for first in range(0, len(chunks), at_once)
        )
        return all(carried_out(self.backend, direction, runs, stop) for runs in parts)

    def on_host(self) -> npt.NDArray[np.uint8]:
        """The KV cache as [layer, block, byte]."""
        raw: npt.NDArray[np.int8] = self.kv.cpu().numpy()
        return raw.view(np.uint8).reshape(NUM_LAYERS, self.num_blocks, self.page).copy()

    def in_pool(self) -> npt.NDArray[np.uint8]:
        """The pool as [chunk, layer, block in the chunk, byte]."""
        return self.pool.reshape(self.num_chunks, NUM_LAYERS, BLOCKS_PER_CHUNK, self.page)


def some_blocks(cache: Cache, seed: int) -> list[int]:
    """Half of the blocks, in random order, with some neighbours among them."""
    order = np.random.default_rng(seed).permutation(cache.num_blocks // 2).tolist()
    pairs = [2 * number + half for number in order for half in (0, 1)]
    return pairs[: cache.num_chunks * BLOCKS_PER_CHUNK]


@pytest.fixture
def made(rig: str) -> Iterator[AnyRig]:
    found = RIGS[rig](waits=True)
    yield found
    found.close()


every_shape = pytest.mark.parametrize("page", [LLAMA_PAGE, HYBRID_PAGE])
every_route = pytest.mark.parametrize("route", Route)


@every_rig
@every_route
@every_shape
def test_bytes_are_equal_both_ways(made: AnyRig, rig: str, route: Route, page: int) -> None:
    cache = Cache(made, page, route)
    before = cache.on_host()
    for seed in range(2):
        blocks = some_blocks(cache, seed)
        assert cache.copy(blocks, STORE)
        chunks = before[:, blocks].reshape(NUM_LAYERS, cache.num_chunks, BLOCKS_PER_CHUNK, page)
        assert np.array_equal(cache.in_pool(), chunks.transpose(1, 0, 2, 3))
        assert np.array_equal(cache.on_host(), before)
        others = some_blocks(cache, seed + 10)
        assert cache.copy(others, LOAD)
        before[:, others] = before[:, blocks]
        assert np.array_equal(cache.on_host(), before)
    cache.device.close()


@every_rig
@every_route
def test_chunk_that_is_left_out_is_not_touched(made: AnyRig, rig: str, route: Route) -> None:
    cache = Cache(made, LLAMA_PAGE, route)
    blocks = some_blocks(cache, 1)
    before = cache.on_host()
    cache.pool[:] = 5
    left_out = cache.num_chunks // 2
    theirs = blocks[left_out * BLOCKS_PER_CHUNK : (left_out + 1) * BLOCKS_PER_CHUNK]
    assert cache.copy(blocks, LOAD, left_out=left_out)
    after = cache.on_host()
    assert np.array_equal(after[:, theirs], before[:, theirs])
    others = sorted(set(blocks) - set(theirs))
    assert (after[:, others] == 5).all()
    cache.device.close()


def stored_after_a_long_kernel(rig: AnyRig, route: Route) -> bool:
    """Whether a store that follows a step at once takes what the step has computed."""
    cache = Cache(rig, LLAMA_PAGE, route)
    # The first copy may compile a kernel for longer than the step takes.
    assert cache.copy(some_blocks(cache, 1), STORE)
    rig.launch(lambda: cache.kv.fill_(77))
    assert cache.copy(some_blocks(cache, 1), STORE)
    is_all = bool((cache.pool == 77).all())
    rig.finish()
    cache.device.close()
    rig.close()
    return is_all


@every_rig
@every_route
def test_store_takes_what_the_step_before_has_computed(rig: str, route: Route) -> None:
    assert stored_after_a_long_kernel(RIGS[rig](waits=True), route)


@every_rig
@every_route
def test_missing_wait_for_compute_is_found_out(rig: str, route: Route) -> None:
    assert not stored_after_a_long_kernel(RIGS[rig](waits=False), route)


@every_rig
def test_load_is_not_overwritten_by_the_step_before(made: AnyRig, rig: str) -> None:
    cache = Cache(made, LLAMA_PAGE, Route.BATCH)
    blocks = some_blocks(cache, 1)
    cache.pool[:] = 5
    made.launch(cache.kv.zero_)
    assert cache.copy(blocks, LOAD)
    made.finish()
    assert (cache.on_host()[:, blocks] == 5).all()
    cache.device.close()


@every_rig
def test_copy_that_is_cancelled_during_the_step_before_writes_nothing(
    made: AnyRig, rig: str
) -> None:
    cache = Cache(made, LLAMA_PAGE, Route.BATCH)
    word = ctypes.c_uint64(0)
    stop = StopSign([Word(ctypes.addressof(word), 1)])
    made.launch(lambda: cache.kv.fill_(77))
    word.value = 1
    assert not cache.copy(some_blocks(cache, 1), STORE, stop)
    assert not cache.pool.any()
    word.value = 0
    assert cache.copy(some_blocks(cache, 1), STORE, stop)
    assert (cache.pool == 77).all()
    cache.device.close()


@every_rig
def test_load_and_store_at_once_do_not_mix(made: AnyRig, rig: str) -> None:
    cache = Cache(made, LLAMA_PAGE, Route.BATCH)
    half = cache.num_chunks // 2
    blocks = some_blocks(cache, 3)
    stored, loaded = blocks[: half * BLOCKS_PER_CHUNK], blocks[half * BLOCKS_PER_CHUNK :]
    before = cache.on_host()
    cache.in_pool()[half:] = 9
    load = cache.runs(cache.plan(blocks, LOAD), range(half, cache.num_chunks))
    ends: list[bool] = []
    thread = threading.Thread(target=lambda: ends.append(cache.copy(stored, STORE)))
    thread.start()
    assert carried_out(cache.backend, LOAD, load, NEVER)
    thread.join(60)
    assert ends == [True]
    kept = before[:, stored].reshape(NUM_LAYERS, half, BLOCKS_PER_CHUNK, cache.page)
    assert np.array_equal(cache.in_pool()[:half], kept.transpose(1, 0, 2, 3))
    assert (cache.on_host()[:, loaded] == 9).all()
    cache.device.close()


class TestOnGPU:
    """What only a GPU has."""

    pytestmark = needs_gpu

    def test_load_passes_a_store_that_waits_for_its_step(self) -> None:
        rig = GPURig(waits=True)
        cache = Cache(rig, LLAMA_PAGE, Route.BATCH)
        place = Place(cache.kv.data_ptr(), cache.pool.ctypes.data, None)
        other_worker = CUDABackend(cache.device, place)
        load = cache.runs(cache.plan(some_blocks(cache, 1), LOAD), range(cache.num_chunks))
        rig.launch(lambda: None)
        store = threading.Thread(target=cache.copy, args=(some_blocks(cache, 2), STORE))
        store.start()
        assert carried_out(other_worker, LOAD, load, NEVER)
        assert store.is_alive()
        store.join(60)
        assert not store.is_alive()
        cache.device.close()
        rig.close()

    def test_mover_moves_pages(self) -> None:
        pytest.importorskip("triton")
        mover = mover_of(0)
        assert mover is not None
        driver = CUDADriver(first_uuid())
        stream, event = driver.make_stream(Direction.LOAD), driver.make_event()
        source = torch.randint(0, 1 << 60, (64, 512), device="cuda")
        to = torch.zeros_like(source)
        torch.cuda.synchronize()
        order = np.random.default_rng(1).permutation(64).astype(np.uint64)
        page = np.uint64(4096)
        size = np.full(64, page)
        pages = np.arange(64, dtype=np.uint64) * page
        mover.move(stream, pages + np.uint64(to.data_ptr()), order * page + source.data_ptr(), size)
        driver.record(event, stream)
        while not driver.is_done(event):
            pass
        assert torch.equal(to.cpu(), source.cpu()[order.astype(np.int64)])

    def test_entry_point_copies(self) -> None:
        rig = GPURig(waits=True)
        cache = Cache(rig, LLAMA_PAGE, Route.BATCH)
        cache.backend = backend(
            first_uuid(), cache.kv.data_ptr(), cache.pool.ctypes.data, rig.event
        )
        rig.launch(lambda: cache.kv.fill_(7))
        assert cache.copy(some_blocks(cache, 1), STORE)
        assert (cache.pool == 7).all()
        rig.close()

    def test_device_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(CUDAError, match="sees no GPU"):
            CUDADriver("3f2504e0-4f89-41d3-9a0c-0305e82c3301")

    def test_memory_that_is_not_there_is_refused(self) -> None:
        with pytest.raises(CUDAError, match="cudaMalloc failed: cudaErrorMemoryAllocation"):
            CUDADriver(first_uuid()).allocate(1 << 50)

    def test_benchmark_runs(self) -> None:
        from tests.bench import copy_cuda, copy_jobs

        result = copy_cuda.run(Options(quick=True, repeats=1))
        assert all(row.median > 0 for row in result.rows)
        assert any(row.subject == copy_jobs.WHOLE for row in result.rows)
