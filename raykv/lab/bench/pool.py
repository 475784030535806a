"""`pool`: what a NodeActor's index of its pool can do, and what a chunk takes in it.

A pool that is full stores on: each job of 512 chunks finds its room by eviction, all of it under
the lock that copies wait for. There are 64 tenants with shares, and 65,536 chunks are pinned. Bytes
are those of a process that holds nothing else, without the changes that are kept for readers.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Key, Namespace, Refusal, Stamp
from raykv.base.shares import Share
from raykv.lab.bench.footprint import key_of, own_bytes
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.node.pool.floors import Floors
from raykv.node.pool.index import OfferedChunk, PoolIndex, StorePart
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord, Standing

SLOT_BYTES, SLAB_BYTES = 1 << 20, 256 << 20
SPACE = Namespace("space")
JOB_CHUNKS = 512
NUM_TENANTS, NUM_PINNED = 64, 65_536

LEAST_RATE = 50_000
MOST_HELD_MS = 10.0
MOST_CHUNK_BYTES = 450


def made(count: int) -> PoolIndex:
    """An index with room for so many chunks."""
    slabs = -(-count * SLOT_BYTES // SLAB_BYTES)
    geometry = PoolGeometry(slabs * SLAB_BYTES, SLAB_BYTES)
    return PoolIndex(geometry, Listing(1, most=1), Floors(1))


def store(index: PoolIndex, job: int, first: int, owner: int, now: float) -> int:
    """Store the chunks of a job; returns how many found no room."""
    part, stamp, refused = StorePart(1, job), Stamp(1, 1), 0
    chunks = [
        OfferedChunk(SPACE, Key(key_of(number)), SLOT_BYTES, stamp, owner=owner)
        for number in range(first, first + JOB_CHUNKS)
    ]
    for record in index.begin_stores(part, chunks, now, now + 30):
        if isinstance(record, Refusal):
            refused += 1
        else:
            index.end_store(record, 0, ok=True)
    index.end_job(part)
    return refused


def fill(index: PoolIndex, count: int) -> int:
    """Store so many chunks, a tenant's a job; returns how many jobs it took."""
    jobs = count // JOB_CHUNKS
    for job in range(jobs):
        assert not store(index, job, job * JOB_CHUNKS, 1 + job % NUM_TENANTS, 0.0)
    return jobs


def chunk_bytes(count: int) -> float:
    """What an index of so many chunks takes for each."""
    before = own_bytes(os.getpid())
    index = made(count)
    fill(index, count)
    return (own_bytes(os.getpid()) - before) / index.num_ready


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("pool", BENCHMARKS["pool"].summary)
    count = 20_480 if options.quick else 1_048_576
    index = made(count)
    jobs = fill(index, count)
    index.share({tenant: Share(1 / (2 * NUM_TENANTS)) for tenant in range(1, NUM_TENANTS + 1)})
    for number in range(min(NUM_PINNED, count // 16)):
        record = index.find(SPACE, Key(key_of(number * 16)))
        assert isinstance(record, ChunkRecord)
        index.room.order_of(record).stand(record, Standing.PINNED)
    seconds: list[float] = []
    refused = 0
    for job in range(jobs, jobs + (20 if options.quick else 1000)):
        now = time.monotonic()
        refused += store(index, job, job * JOB_CHUNKS, 1 + job % NUM_TENANTS, now)
        seconds.append(time.monotonic() - now)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as process:
        size = process.submit(chunk_bytes, count).result(600.0)
    case = f"{count:,} chunks"
    rate = JOB_CHUNKS * len(seconds) / sum(seconds)
    held = sorted(seconds)[int(0.99 * len(seconds))] * 1e3
    result.rows = [
        Row(case, "stored, each in the room of another", "chunks/s", (rate,)),
        Row(case, "the lock is held for a job, p99", "ms", (held,)),
        Row(case, "memory of a chunk", "bytes", (size,)),
    ]
    result.verdicts = [
        Verdict("a full pool: at least 50,000 chunks/s", rate, LEAST_RATE, is_most=False),
        Verdict("the lock: at most 10 ms for 512 chunks, p99", held, MOST_HELD_MS),
        Verdict("a chunk: at most 450 bytes", size, MOST_CHUNK_BYTES),
        Verdict("a full pool has room for all", float(refused), 0.0),
    ]
    return result
