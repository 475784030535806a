"""`disk`: writes to the disk tier and reads from it, compared with plain files of the same size.

A write is timed from the order to keep the pool's chunks until the last of their files is synced; a
read-back from the fetch until all chunks are checked and in the pool again. For a plain write, one
thread writes random bytes into files as large as the tier's, and syncs each. For a plain read, one
thread reads the tier's own files into memory. Before each read the files leave the page cache, if
the system drops them (`POSIX_FADV_DONTNEED`; `RWF_NOWAIT` shows how much is left). The folder is in
`RAYKV_DISK_PATH`, else in the temporary folder.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from raykv.base.errors import ClusterError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import ALL_BLOCKS, Key, Namespace, NodeId, Refusal, Stamp
from raykv.base.settings import DiskPlace, load_settings
from raykv.lab.bench.named_jobs import SPACE, key_of
from raykv.lab.bench.report import Options, Result, alternate
from raykv.lab.waiting import wait
from raykv.node.disk.reads import TieredTransport
from raykv.node.disk.tier import FILE_BYTES, DiskTier
from raykv.node.fetch import FetchService
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import PeerError, PendingRead
from raykv.node.pool.records import ChunkRecord
from raykv.node.service import NodeService, boot_life
from raykv.protocol.columns import Keys, Numbers, Source, SourceKind, SourceRows
from raykv.protocol.copies import Fetch, Read
from raykv.protocol.operator import OrdersDocument

TIER, FILES, PLAIN_READ = "disk tier", "plain files, each synced", "plain read of the files"
WRITE, READ = "write", "read back"
CHUNK_BYTES, SLAB_BYTES, MIB = 2 << 20, 64 << 20, 1 << 20
NUM_CHUNKS, QUICK_CHUNKS = 256, 32
NAMESPACE, NODE = Namespace(SPACE), "bench"
DEADLINE_S = 120.0

ROOM = 1.5
"""Pool size relative to the chunks: with less free room the disk tier writes by itself."""

LEAST_SHARE = 0.8
MOST_LEFT = 0.05
"""Share of the files that may stay in the page cache after it was dropped."""

SAMPLES = 64
"""Pages of a file that are looked for in the page cache."""

RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 8)


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("disk")
    place = load_settings({}).disk_path or tempfile.gettempdir()
    Path(place).mkdir(parents=True, exist_ok=True)
    num_chunks = QUICK_CHUNKS if options.quick else NUM_CHUNKS
    with tempfile.TemporaryDirectory(prefix="raykv-bench-", dir=place) as folder:
        files = PlainFiles(Path(folder), num_chunks)
        tier = BenchTier(Path(folder), num_chunks)
        try:
            subjects = {FILES: files.write, TIER: tier.write}
            result.rows += alternate(WRITE, "MiB/s", subjects, options.repeats_or(7))
            subjects = {
                PLAIN_READ: lambda: files.read(tier.dropped_files()),
                TIER: tier.read,
            }
            result.rows += alternate(READ, "MiB/s", subjects, options.repeats_or(7))
            left = max(map(cached_share, tier.dropped_files()))
        finally:
            tier.stop()
        judge(result)
        result.notes.append(f"The folder is on a file system of type {_type_of(Path(folder))}.")
        if left > MOST_LEFT:
            result.notes.append(f"{100 * left:.0f} % of the files stay in the page cache.")
    return result


def judge(result: Result) -> None:
    """Compare the tier with plain files."""
    for case, other, budget in (
        (WRITE, FILES, "write: at least 80 % of plain files, each synced"),
        (READ, PLAIN_READ, "read back: at least 80 % of a plain read"),
    ):
        result.at_least(LEAST_SHARE, result.ratio(case, TIER, other), budget)


class PlainFiles:
    """Writes and reads of as many bytes as the chunks have, without RayKV; MiB/s."""

    def __init__(self, folder: Path, num_chunks: int) -> None:
        self._folder = folder / "plain"
        self._num_bytes = num_chunks * CHUNK_BYTES
        self._bytes = np.random.default_rng(2).integers(0, 256, FILE_BYTES, np.uint8)

    def write(self) -> float:
        """Write files as large as the tier's, and sync each."""
        os.sync()
        self._folder.mkdir()
        try:
            began = time.perf_counter()
            for number, start in enumerate(range(0, self._num_bytes, FILE_BYTES)):
                with (self._folder / str(number)).open("wb", buffering=0) as file:
                    file.write(self._bytes[: self._num_bytes - start].data)
                    os.fsync(file.fileno())
            return self._num_bytes / MIB / (time.perf_counter() - began)
        finally:
            shutil.rmtree(self._folder)

    def read(self, paths: list[Path]) -> float:
        """Read the files one after the other."""
        began = time.perf_counter()
        for path in paths:
            with path.open("rb", buffering=0) as file:
                while file.readinto(self._bytes.data):
                    pass
        return self._num_bytes / MIB / (time.perf_counter() - began)


class BenchTier:
    """A node's pool with a disk tier, without Ray; MiB/s."""

    def __init__(self, folder: Path, num_chunks: int) -> None:
        self._folder = folder / "tier"
        self._num_chunks = num_chunks
        pool_bytes = -(-int(ROOM * num_chunks * CHUNK_BYTES) // SLAB_BYTES) * SLAB_BYTES
        self._keeper = PoolKeeper(NodeId(NODE), boot_life(), PoolGeometry(pool_bytes, SLAB_BYTES))
        self._service = NodeService(f"raykv-bench-disk-{os.getpid()}", self._keeper)
        place = DiskPlace(str(self._folder), most_bytes=8 * pool_bytes, floor_bytes=0)
        self._tier = DiskTier(place, self._keeper, is_busy=self._service.is_copying)
        self._keeper.keep_floors = self._tier.keep_floors
        transport = TieredTransport(NODE, self._tier.reads, _Nobody())
        self._fetching = FetchService(self._keeper, transport)
        self._service.start()
        self._tier.start()
        self._numbers, self._orders = itertools.count(1), itertools.count(1)
        self._stamp = Stamp(1, 0)
        self._keys: list[Key] = []
        self._random = np.random.default_rng(1).integers(0, 256, 2 * CHUNK_BYTES, np.uint8)
        self._order({})
        wait(lambda: not self._tier.reads.stats().problem, "the folder is open")

    def stop(self) -> None:
        """End its threads."""
        self._tier.stop()
        self._service.stop()

    def _order(self, floors: dict[str, int]) -> None:
        """Put the next orders into force."""
        self._stamp = Stamp(1, next(self._orders))
        document = OrdersDocument(self._stamp, floors)
        taken = lambda: self._keeper.take_orders(document, DEADLINE_S)  # noqa: E731
        wait(taken, "the disk keeps orders")

    def _fill(self) -> None:
        """Clear pool and disk, and put new chunks with their checksums into the pool."""
        self._order({str(NAMESPACE): self._stamp.number + 1})
        wait(lambda: not self._tier.reads.stats().num_files, "the files are deleted")
        keys = [key_of(next(self._numbers)) for _ in range(self._num_chunks)]
        for number, key in enumerate(keys):
            record = self._keeper.land(ChunkRecord(NAMESPACE, key, CHUNK_BYTES, self._stamp))
            if isinstance(record, Refusal):
                raise ClusterError(f"the pool takes no chunk: {record.name}")
            start = self._random.ctypes.data + (number * 997) % CHUNK_BYTES
            ctypes.memmove(self._keeper.address_of(record), start, CHUNK_BYTES)
            self._keeper.landed(record, ok=True)
        self._keeper.wait_for_seals(DEADLINE_S)
        self._keys = keys

    def write(self) -> float:
        """Write new chunks, until all of them are on disk."""
        self._fill()
        os.sync()
        began = time.perf_counter()
        left = self._tier.keep(DEADLINE_S)
        if left:
            problem = self._tier.reads.stats().problem
            raise ClusterError(f"{left} chunks were not written ({problem})")
        return self._rate(began)

    def read(self) -> float:
        """Read the latest chunks back into the pool, which has none of them before."""
        self.dropped_files()
        with self._keeper.lock:
            self._keeper.catalog.drop(NAMESPACE, dict.fromkeys(self._keys, ALL_BLOCKS))
        count = len(self._keys)
        order = Fetch(
            next(self._numbers),
            0,
            NAMESPACE,
            Keys.of(self._keys),
            Numbers.of([CHUNK_BYTES] * count),
            SourceRows.of([[Source(NODE, SourceKind.DISK)]] * count),
            deadline_s=DEADLINE_S,
        )
        began = time.perf_counter()
        result = self._fetching.fetch(order)
        if result.refusals:
            raise ClusterError(f"a fetch from the disk was refused: {set(result.refusals)}")
        return self._rate(began)

    def _rate(self, began: float) -> float:
        return self._num_chunks * CHUNK_BYTES / MIB / (time.perf_counter() - began)

    def dropped_files(self) -> list[Path]:
        """Drop the chunks' files from the page cache, if the system does that, and return them."""
        paths = sorted(self._folder.glob("*/*.safetensors"))
        for path in paths:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return paths


class _Nobody:
    """A transport to no other node."""

    def start_read(self, source: Source, request: Read) -> PendingRead:
        raise PeerError(f"there is no node {source.node_id} ({len(request.keys)} chunks)")


def cached_share(path: Path) -> float:
    """Estimate from some pages how much of a file is in the page cache; 1 if unknown."""
    page = bytearray(1)
    size = path.stat().st_size
    found = 0
    with path.open("rb", buffering=0) as file:
        for number in range(SAMPLES):
            try:
                os.preadv(file.fileno(), [page], size * number // SAMPLES, RWF_NOWAIT)
                found += 1
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    return 1.0
    return found / SAMPLES


def _type_of(folder: Path) -> str:
    mounts = psutil.disk_partitions(all=True)
    found = [each for each in mounts if folder.resolve().is_relative_to(each.mountpoint)]
    return max(found, key=lambda each: len(each.mountpoint)).fstype if found else "unknown"
