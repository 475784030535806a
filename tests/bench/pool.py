"""`pool`: decisions of a NodeActor's full pool per second, and memory per chunk.

A pool that is full stores on: each job of 512 chunks finds its room by eviction, all of it under
the lock that copies wait for. There are 64 tenants with shares, and 65,536 chunks are pinned. Bytes
are those of a process that holds nothing else, without the changes that are kept for readers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import ParamSpec, TypeVar

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Direction, Namespace, NodeId
from raykv.base.shares import Share
from raykv.lab.bench.named_jobs import ORDERED
from raykv.lab.bench.report import Options, Result
from raykv.node.pool.owner import NodePool
from raykv.node.pool.records import ChunkRecord, Standing
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyJob
from raykv.protocol.engine import EngineHello
from raykv.protocol.operator import OrdersDocument
from tests.fixtures.keys import random_key

SLOT_BYTES, SLAB_BYTES = 1 << 20, 256 << 20
SPACE, ENGINE = Namespace("space"), 1
JOB_CHUNKS = 512
NUM_TENANTS, NUM_PINNED = 64, 65_536

LEAST_RATE = 50_000
MOST_HELD_MS = 10.0
MOST_CHUNK_BYTES = 450


MEASURED_S = 1800.0
"""Deadline of a measurement in its own process: ten million chunks take minutes."""

Made = TypeVar("Made")
Given = ParamSpec("Given")


def alone(measure: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs) -> Made:
    """Call a function in a new process, which holds nothing else."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(measure, *args, **kwargs).result(MEASURED_S)


def own_bytes(pid: int) -> int:
    """Proportional set size of a process without shared memory."""
    fields = {"Pss_Anon:", "Pss_File:"}
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    rows = [line.split() for line in lines]
    return sum(int(row[1]) for row in rows if row[0] in fields) * 1024


def made(count: int) -> NodePool:
    """Make a pool with room for this many chunks, and an engine of one rank."""
    slabs = -(-count * SLOT_BYTES // SLAB_BYTES)
    pool = NodePool(NodeId("node"), 1, PoolGeometry(slabs * SLAB_BYTES, SLAB_BYTES))
    pool.take_orders(OrdersDocument(ORDERED), 0.0)
    hello = EngineHello("bench", ENGINE, SPACE, slot_bytes={0: SLOT_BYTES})
    assert not pool.hello(hello, 0.0).error
    pool.jobs.begin_line(ENGINE, 0, 1)
    return pool


def job_of(number: int) -> CopyJob:
    """A job of chunks that no other one has, of a tenant's."""
    first = number * JOB_CHUNKS
    ones, zeros = Numbers.of([1] * JOB_CHUNKS), Numbers.of([0] * JOB_CHUNKS)
    return CopyJob(
        1 + number,
        Direction.STORE,
        SPACE,
        Keys.of(random_key(each) for each in range(first, first + JOB_CHUNKS)),
        num_blocks=ones,
        first_block=zeros,
        block_ids=zeros,
        orders=ORDERED,
        tenant=f"tenant{number % NUM_TENANTS}",
    )


def store(pool: NodePool, job: CopyJob, now: float) -> int:
    """Store the chunks of a job; returns how many found no room."""
    (admitted,) = pool.jobs.announce(ENGINE, 0, 1, [job], now)
    pool.begin_chunks(admitted, range(JOB_CHUNKS), now)
    pool.jobs.end_chunks(admitted, range(JOB_CHUNKS), ok=True)
    return len(pool.jobs.end_job(admitted, 0, 0.0).failed_chunks)


def fill(pool: NodePool, count: int) -> int:
    """Store this many chunks, each job for one tenant; return the number of jobs."""
    jobs = count // JOB_CHUNKS
    for number in range(jobs):
        assert not store(pool, job_of(number), 0.0)
    return jobs


def chunk_bytes(count: int) -> float:
    """Measure a pool's memory per chunk with this many chunks."""
    before = own_bytes(os.getpid())
    pool = made(count)
    fill(pool, count)
    return (own_bytes(os.getpid()) - before) / pool.index.num_ready


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("pool")
    count = 20_480 if options.quick else 1_048_576
    pool = made(count)
    jobs = fill(pool, count)
    index = pool.index
    index.share({tenant: Share(1 / (2 * NUM_TENANTS)) for tenant in index.room.used})
    for number in range(min(NUM_PINNED, count // 16)):
        record = index.find(SPACE, random_key(number * 16))
        assert isinstance(record, ChunkRecord)
        index.room.order_of(record).stand(record, Standing.PINNED)
    seconds: list[float] = []
    refused = 0
    for job in range(jobs, jobs + (20 if options.quick else 1000)):
        asked, now = job_of(job), time.monotonic()
        refused += store(pool, asked, now)
        seconds.append(time.monotonic() - now)
    size = alone(chunk_bytes, count)
    case = f"{count:,} chunks"
    rate = JOB_CHUNKS * len(seconds) / sum(seconds)
    held = sorted(seconds)[int(0.99 * len(seconds))] * 1e3
    result.add(case, "stored, each in the room of another", "chunks/s", rate)
    result.add(case, "the lock is held for a job, p99", "ms", held)
    result.add(case, "memory of a chunk", "bytes", size)
    result.at_least(LEAST_RATE, rate, "a full pool: at least 50,000 chunks/s")
    result.at_most(MOST_HELD_MS, held, "the lock: at most 10 ms for 512 chunks, p99")
    result.at_most(MOST_CHUNK_BYTES, size, "a chunk: at most 450 bytes")
    result.at_most(0.0, float(refused), "a full pool has room for all")
    return result
