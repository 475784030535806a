"""Whole jobs of `copy_cuda`: what a NodeActor's copy thread takes for one, from the job to
its last byte, beside one `cudaMemcpyAsync` of as many bytes.

It is the NodeActor's own way: some chunks at a time are admitted to the pool, their runs are
planned and submitted, and each of them is ended. Only Ray, the socket that the job came by and the
change of threads are left out. A chunk is one block, of which each layer has a page; the blocks are
anywhere in the KV cache. A job by layer is a load, of which the worker hears layer by layer.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Direction, Namespace, NodeId
from raykv.copy.cuda.backend import CUDABackend
from raykv.copy.cuda.lane import Place
from raykv.copy.engine import CopyBackend
from raykv.copy.rows import RowCopier
from raykv.lab.bench.named_jobs import ORDERED, SPACE, key_of, named_job
from raykv.lab.bench.report import Options, Result, alternate, short
from raykv.memory.cuda import driver as cuda_driver
from raykv.memory.cuda.kv import CUDA_IPC, DeviceKV
from raykv.memory.handles import MEMFD
from raykv.memory.words import CancelWords
from raykv.node.attached import AttachedWorker, QueuedJob
from raykv.node.copying import Copying
from raykv.node.devices import Devices
from raykv.node.integrity import Integrity
from raykv.node.keeper import PoolKeeper
from raykv.node.lanes import CopyLanes
from raykv.node.pool.records import ChunkRecord
from raykv.protocol.copies import CopyJob
from raykv.protocol.engine import EngineHello
from raykv.protocol.listing import Reason
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.worker import AttachWorker, KVLayout, TensorLayout

if TYPE_CHECKING:
    from tests.bench.copy_cuda import DeviceSides

KIB, MIB = 1 << 10, 1 << 20
JOB_BYTES = (26 * MIB, 52 * MIB, 100 * MIB)
QUICK_JOB_BYTES = (2 * MIB, 8 * MIB)
LEAST_JOB_BYTES, MOST_JOB_BYTES = 25 * MIB, 100 * MIB
LEAST_SPEED = 0.85
ENGINE = 1
"""The life of the engine."""

REPEATS, WARM_UPS = 41, 3
"""A job takes a millisecond or two."""

WHOLE, BY_LAYER, BIG = "RayKV, whole job", "RayKV, job by layer", "one cudaMemcpyAsync"
BUDGET = "at least 0.85 of one cudaMemcpyAsync, whole jobs of 25 to 100 MiB"

Lock = Callable[[int, int], Callable[[], None]]
"""Page-locks memory, given its address and bytes, and returns a function that undoes it."""


@dataclass(frozen=True)
class Shape:
    """A model's pages: of Llama 8B in bfloat16, with 16 tokens in a block, 64 KiB in 32 layers."""

    page_bytes: int
    num_layers: int

    @property
    def chunk_bytes(self) -> int:
        return self.page_bytes * self.num_layers


SHAPES = (Shape(64 * KIB, 32), Shape(256 * KIB, 16))


@dataclass(frozen=True)
class JobCase:
    """A job of this many chunks."""

    shape: Shape
    num_chunks: int
    direction: Direction

    @property
    def name(self) -> str:
        verb = self.direction.name.lower()
        page = self.shape.page_bytes // KIB
        return f"job, {verb}, {self.num_bytes // MIB} MiB, pages of {page} KiB"

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.shape.chunk_bytes

    @property
    def is_judged(self) -> bool:
        return LEAST_JOB_BYTES <= self.num_bytes <= MOST_JOB_BYTES


def cases(options: Options, shape: Shape, side_bytes: int) -> Iterator[JobCase]:
    """All jobs of a shape that fit into memory."""
    for num_bytes in QUICK_JOB_BYTES if options.quick else JOB_BYTES:
        for direction in Direction:
            case = JobCase(shape, -(-num_bytes // shape.chunk_bytes), direction)
            if case.num_bytes <= side_bytes:
                yield case


def page_locking() -> Lock:
    """Return a function that page-locks memory for the first GPU, as a NodeActor does.

    Raises:
        CUDAError: CUDA can't be used here.
    """
    memory = cuda_driver.load()
    device = memory.devices()[0]

    def lock(address: int, num_bytes: int) -> Callable[[], None]:
        memory.register_host(device, address, num_bytes)
        return partial(memory.unregister_host, device, address)

    return lock


class JobSides:
    """A worker with pages of one shape, and a NodeActor's pool with room for one job."""

    def __init__(self, sides: DeviceSides, shape: Shape, pool_bytes: int, lock: Lock) -> None:
        self._sides = sides
        self._shape = shape
        self._num_blocks = sides.num_bytes // shape.chunk_bytes
        self._num_jobs = 0
        self._num_stored = 0
        # One slab, as the pools of nodes have them: larger than a job.
        slot_bytes = shape.chunk_bytes
        size = pool_bytes // slot_bytes * slot_bytes
        self._keeper = PoolKeeper(NodeId("bench"), 1, PoolGeometry(size, size))
        self._keeper.pool.prefault()
        lanes = CopyLanes(self._keeper, lambda queued: None)
        self._copying = Copying(
            self._keeper,
            Integrity(self._keeper),
            RowCopier(),
            lanes.give_way,
        )
        self._keeper.take_orders(OrdersDocument(ORDERED), 0.0)
        self._introduce()
        with ExitStack() as stack:
            stack.callback(lock(self._keeper.pool.address, size))
            here, self._there = socket.socketpair()
            stack.callback(self._there.close)
            stack.callback(here.close)
            self._worker = self._attached(here)
            stack.callback(self._worker.unmap)
            self._close = stack.pop_all().close

    def close(self) -> None:
        """Release everything but the pool's memory, which ends with the process."""
        self._close()

    def _attached(self, sock: socket.socket) -> AttachedWorker:
        shape, count = self._shape, self._num_blocks
        page = shape.page_bytes
        layout = KVLayout(
            kind=CUDA_IPC,
            num_bytes=count * shape.chunk_bytes,
            blocks_per_chunk=1,
            tensors=[
                TensorLayout(layer * count * page, count, page, page)
                for layer in range(shape.num_layers)
            ],
            group_ids=[0],
            groups=[list(range(shape.num_layers))],
            device="a GPU",
        )
        hello = AttachWorker(
            engine_id="bench",
            life=ENGINE,
            namespace=SPACE,
            rank=0,
            num_ranks=1,
            slot_bytes={0: shape.chunk_bytes},
            # What it says of the GPU's memory nobody opens here.
            layout=msgspec.structs.replace(layout, kind=MEMFD, device=""),
        )
        sides = self._sides
        sides.driver.record(sides.event, sides.stream)
        kv = DeviceKV(layout, sides.kv, sides.event, [])
        return AttachedWorker(
            sock, hello, kv, CancelWords.create(), Devices(make_backend=self._backend)
        )

    def _backend(
        self, _device: str, kv_address: int, pool_address: int, event: int | None
    ) -> CopyBackend:
        return CUDABackend(self._sides.device, Place(kv_address, pool_address, event))

    def whole(self, case: JobCase) -> float:
        """GB/s of a job, from the queue to its last chunk's end."""
        return self._speed(case, by_layer=False)

    def by_layer(self, case: JobCase) -> float:
        """GB/s of a job layer by layer."""
        return self._speed(case, by_layer=True)

    def big(self, case: JobCase) -> float:
        """GB/s of one copy of as many bytes between KV cache and pool."""
        return self._sides.big(case, self._keeper.pool.address)

    def _introduce(self) -> None:
        """The engine, before each job: one that says nothing is gone after a while."""
        hello = EngineHello("bench", ENGINE, SPACE, slot_bytes={0: self._shape.chunk_bytes})
        with self._keeper.lock:
            owner = self._keeper.owner
            is_new = not any(owner.engines)
            assert not owner.hello(hello, self._keeper.now()).error
            if is_new:
                owner.jobs.begin_line(ENGINE, 0, 1)

    def _speed(self, case: JobCase, *, by_layer: bool) -> float:
        if case.direction is Direction.LOAD and self._num_stored < case.num_chunks:
            self._carry_out(self._job(Direction.STORE, case.num_chunks, by_layer=False))
        job = self._job(case.direction, case.num_chunks, by_layer=by_layer)
        return case.num_bytes / self._carry_out(job) / 1e9

    def _carry_out(self, job: CopyJob) -> float:
        """Seconds."""
        began = time.perf_counter()
        (admitted,) = self._keeper.owner.jobs.announce(ENGINE, 0, 1, [job], self._keeper.now())
        queued = QueuedJob(self._worker, admitted, began)
        num_bytes = self._copying.carry_out(queued)
        result = self._keeper.owner.jobs.end_job(admitted, num_bytes, 0.0)
        took_s = time.perf_counter() - began
        assert not result.refusals, result.refusals
        assert num_bytes == len(job.keys) * self._shape.chunk_bytes, num_bytes
        with suppress(BlockingIOError):
            while self._there.recv(1 << 16, socket.MSG_DONTWAIT):
                pass
        return took_s

    def _job(self, direction: Direction, num_chunks: int, *, by_layer: bool) -> CopyJob:
        """Make a job: a store begins with an empty pool, a load has the latest stored chunks."""
        self._introduce()
        self._num_jobs += 1
        keys = [key_of(number) for number in range(num_chunks)]
        if direction is Direction.STORE:
            self._empty()
            self._num_stored = num_chunks
        source = np.random.default_rng(num_chunks)
        blocks = source.permutation(self._num_blocks)[:num_chunks].tolist()
        job = named_job(self._num_jobs, direction, keys, blocks)
        return msgspec.structs.replace(job, by_layer=by_layer)

    def _empty(self) -> None:
        """Nothing is in the pool."""
        index = self._keeper.owner.index
        with self._keeper.lock:
            for number in range(self._num_stored):
                record = index.find(Namespace(SPACE), key_of(number))
                if isinstance(record, ChunkRecord):
                    index.drop(record, Reason.EVICTED)


def measure(sides: DeviceSides, options: Options, lock: Lock, result: Result) -> None:
    """Add all jobs' rows, and the verdict, to a result."""
    all_cases = []
    for shape in SHAPES:
        some = list(cases(options, shape, sides.num_bytes))
        if not some:
            continue
        jobs = JobSides(sides, shape, max(case.num_bytes for case in some), lock)
        try:
            for case in some:
                subjects = {WHOLE: partial(jobs.whole, case)}
                if case.direction is Direction.LOAD:
                    subjects[BY_LAYER] = partial(jobs.by_layer, case)
                subjects[BIG] = partial(jobs.big, case)
                repeats = options.repeats_or(REPEATS)
                result.rows += alternate(case.name, "GB/s", subjects, repeats, WARM_UPS)
        finally:
            jobs.close()
        all_cases += some
    judge(result, all_cases)


def judge(result: Result, all_cases: list[JobCase]) -> None:
    """Judge the job that is slowest compared with one copy, and note the slowest by layer."""
    whole, by_layer = (
        {
            case.name: result.ratio(case.name, name, BIG)
            for case in all_cases
            if case.is_judged and (name == WHOLE or case.direction is Direction.LOAD)
        }
        for name in (WHOLE, BY_LAYER)
    )
    if not whole:
        result.notes.append(f"Not judged, for want of such a case: {BUDGET}.")
        return
    worst = min(whole, key=lambda name: whole[name])
    result.at_least(LEAST_SPEED, whole[worst], BUDGET)
    result.notes.append(
        f"The slowest whole job has {short(whole[worst])}: {worst}. The median over all of them is "
        f"{short(median(whole.values()))}."
    )
    if by_layer:
        worst = min(by_layer, key=lambda name: by_layer[name])
        result.notes.append(f"By layer the slowest has {short(by_layer[worst])}: {worst}.")
