"""`disk`: what the disk tier writes and reads, beside plain files of as many bytes in its folder.

A write is timed from the moment when the node is told to keep its chunks until the last of their
files is synced; a read-back from the fetch until all chunks are checked and in the pool again. A
plain write is one thread that writes random bytes and syncs: files as large as the tier's, and one
file with one sync at its end. A plain read is one thread that reads the tier's own files into
memory. Both reads once with the page cache as the write has left it, and once without those files
in it, where the system drops them (`POSIX_FADV_DONTNEED`; what is left there is looked at with
`RWF_NOWAIT`).

Loads are what a worker asks for, one job after another without a pause, while the disk rests and
while it writes. The folder is in `RAYKV_DISK_PATH`, else in the temporary folder.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import psutil

from raykv.base.errors import ClusterError
from raykv.base.ids import Direction, Key
from raykv.base.settings import load_settings
from raykv.lab.bench.disk_node import (
    CHUNK_BYTES,
    DEADLINE_S,
    ENGINE,
    DiskNode,
    disk_node,
)
from raykv.lab.bench.named_jobs import SPACE, named_job
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row, Verdict
from raykv.memory.handles import MEMFD
from raykv.memory.region import Region
from raykv.node.disk.tier import FILE_BYTES
from raykv.protocol.worker import KVLayout, TensorLayout
from raykv.worker.job import JobRequest
from raykv.worker.link import LinkSettings, LinkTarget, WorkerLink

Bytes = npt.NDArray[np.uint8]
T = TypeVar("T")

TIER, FILES, ONE_FILE = "disk tier", "plain files, each synced", "one plain file, synced once"
PLAIN_READ = "plain read of the files"
RESTING, WRITING = "disk rests", "disk writes"
WRITE, READ = "write", "read back"
CACHED, DROPPED = "page cache as it is", "page cache dropped"
LOADS = "a load"

NUM_CHUNKS, QUICK_CHUNKS = 256, 32
LOAD_CHUNKS = 16
LEAST_SHARE = 0.8
MOST_SLOWER = 1.25
MOST_LEFT = 0.05
"""Of the files may be in the page cache when it counts as dropped."""

MIB = 1 << 20
LOOK_S = 0.0002
RWF_NOWAIT = getattr(os, "RWF_NOWAIT", 8)


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("disk", BENCHMARKS["disk"].summary)
    num_chunks = QUICK_CHUNKS if options.quick else NUM_CHUNKS
    with ExitStack() as stack:
        place = load_settings({}).disk_path or tempfile.gettempdir()
        Path(place).mkdir(parents=True, exist_ok=True)
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="raykv-bench-", dir=place))
        )
        socket_name = f"raykv-bench-disk-{os.getpid()}"
        node = stack.enter_context(disk_node(folder / "tier", socket_name, num_chunks))
        node.call("open")
        worker = _Worker(socket_name)
        stack.callback(worker.close)
        rounds = _Rounds(folder, node, worker, num_chunks)
        for number in range(1 + options.repeats_or(7)):
            rounds.measure(is_warm_up=not number)
        case = _add_rows(result, rounds)
        _add_verdicts(result, case)
        result.notes.append(f"The folder is on a file system of type {_type_of(folder)}.")
        if rounds.left_in_cache > MOST_LEFT:
            share = f"{100 * rounds.left_in_cache:.0f} %"
            result.notes.append(f"{share} of the files stayed in the page cache: not dropped.")
    return result


class _Rounds:
    """Repeats of all measurements; `values` by case, subject and unit."""

    def __init__(self, folder: Path, node: DiskNode, worker: _Worker, num_chunks: int) -> None:
        self._plain = folder / "plain"
        self._tier = folder / "tier"
        self._node = node
        self._worker = worker
        self.num_chunks = num_chunks
        self._mib = num_chunks * CHUNK_BYTES / MIB
        self._life = int(node.call("life"))
        self._bytes: Bytes = np.random.default_rng(2).integers(0, 256, FILE_BYTES, np.uint8)
        self.values: dict[tuple[str, str, str], list[float]] = {}
        self.left_in_cache = 0.0
        self._is_warm_up = False
        self._round = 0

    def measure(self, *, is_warm_up: bool) -> None:
        """One of each."""
        self._is_warm_up = is_warm_up
        self._round += 1
        self._writes()
        self._reads()
        self._node.call("clear")
        self._loads()
        self._node.call("clear")

    def _note(self, case: str, subject: str, value: float, unit: str = "MiB/s") -> None:
        if not self._is_warm_up:
            self.values.setdefault((case, subject, unit), []).append(value)

    def _writes(self) -> None:
        subjects: dict[str, Callable[[], float]] = {
            FILES: lambda: self._plain_write(is_synced=True),
            ONE_FILE: lambda: self._plain_write(is_synced=False),
            TIER: lambda: float(self._node.call("write")),
        }
        self._node.call("fill")
        # Each goes first in its turn, and none pays for what was deleted before.
        first = self._round % len(subjects)
        for subject in [*subjects, *subjects][first : first + len(subjects)]:
            os.sync()
            took_s = subjects[subject]()
            self._note(WRITE, subject, self._mib / took_s)
            if subject is TIER:
                self._note(WRITE, TIER, self.num_chunks / took_s, "chunks/s")

    def _plain_write(self, *, is_synced: bool) -> float:
        """Seconds; a file of its own for each piece, synced, or one file."""
        self._plain.mkdir()
        try:
            began = time.perf_counter()
            number = done = 0
            wanted = self.num_chunks * CHUNK_BYTES
            while done < wanted:
                piece = self._bytes[: wanted - done]
                number += is_synced
                is_last = done + len(piece) == wanted
                _append(self._plain / str(number), piece, is_synced or is_last)
                done += len(piece)
            return time.perf_counter() - began
        finally:
            shutil.rmtree(self._plain)

    def _reads(self) -> None:
        paths = sorted(self._tier.glob("*/*.safetensors"))
        subjects: dict[str, Callable[[], float]] = {
            TIER: lambda: float(self._node.call("read")),
            PLAIN_READ: lambda: self._plain_read(paths),
        }
        for case in (CACHED, DROPPED):
            for subject, measure in subjects.items():
                if case is DROPPED:
                    for path in paths:
                        _drop(path)
                    self.left_in_cache = max(self.left_in_cache, *map(cached_share, paths))
                took_s = measure()
                self._note(f"{READ}, {case}", subject, self._mib / took_s)
                if subject is TIER:
                    self._note(f"{READ}, {case}", subject, self.num_chunks / took_s, "chunks/s")

    def _plain_read(self, paths: list[Path]) -> float:
        began = time.perf_counter()
        for path in paths:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                at = 0
                while got := os.preadv(fd, [self._bytes.data], at):
                    at += got
            finally:
                os.close(fd)
        return time.perf_counter() - began

    def _loads(self) -> None:
        """The same loads while the disk rests, and while it writes."""
        keys = [Key(each) for each in self._node.call("fill")]
        case = f"{LOADS} of {LOAD_CHUNKS} chunks"

        def load(start: int) -> float:
            return self._worker.load(self._life, keys[start : start + LOAD_CHUNKS])

        starts = range(0, self.num_chunks, LOAD_CHUNKS)
        self._note(case, RESTING, 1e3 * median(load(start) for start in starts), "ms")
        self._node.begin("write")
        took: list[float] = []
        while not self._node.has_result():
            took.append(load(starts[len(took) % len(starts)]))
        self._note(case, WRITING, 1e3 * median(took), "ms")
        self._note(f"{WRITE} while loads run", TIER, self._mib / self._node.result())


class _Worker:
    """One rank of an engine, with room for the chunks of one load."""

    def __init__(self, socket_name: str) -> None:
        size = LOAD_CHUNKS * CHUNK_BYTES
        self._memory = Region.anonymous(size, "raykv-bench")
        tensor = TensorLayout(0, LOAD_CHUNKS, CHUNK_BYTES, CHUNK_BYTES)
        layout = KVLayout(MEMFD, size, 1, [tensor], [0], [[0]])
        settings = LinkSettings(step_deadline_s=DEADLINE_S)
        self._link = WorkerLink(0, layout, [self._memory.fd], settings)
        self._link.set_target(LinkTarget(socket_name, "bench", ENGINE, SPACE, 1, {0: CHUNK_BYTES}))
        self._job_id = 0

    def load(self, life: int, keys: list[Key]) -> float:
        """Seconds for these chunks."""
        self._wait(lambda: self._link.node_life == life)
        self._job_id += 1
        job = JobRequest(named_job(self._job_id, Direction.LOAD, keys, range(len(keys))))
        began = time.perf_counter()
        self._link.submit(job)
        results = self._wait(self._link.drain)
        took_s = time.perf_counter() - began
        if results[0].refusals:
            raise ClusterError(f"a load was refused: {set(results[0].refusals)}")
        return took_s

    def _wait(self, condition: Callable[[], T]) -> T:
        give_up_at = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            if time.monotonic() > give_up_at:
                raise ClusterError(f"a load has not ended within {DEADLINE_S:.0f} s")
            time.sleep(LOOK_S)
        return found

    def close(self) -> None:
        """End the line."""
        self._link.close(5.0)


def _append(path: Path, data: Bytes, is_synced: bool) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        done = 0
        while done < len(data):
            done += os.write(fd, data[done:].data)
        if is_synced:
            os.fsync(fd)
    finally:
        os.close(fd)


def _drop(path: Path) -> None:
    """Drop a file from the page cache, where the system can."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def cached_share(path: Path, samples: int = 64) -> float:
    """How much of a file is in the page cache, by some of its pages; 1 if it is unknown."""
    page = bytearray(1)
    size = path.stat().st_size
    found = 0
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for number in range(samples):
            try:
                os.preadv(fd, [page], size * number // samples, RWF_NOWAIT)
                found += 1
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    return 1.0
    finally:
        os.close(fd)
    return found / samples


def _add_rows(result: Result, rounds: _Rounds) -> str:
    """All rows; returns the case of the loads."""
    for (case, subject, unit), values in rounds.values.items():
        size = f" of {rounds.num_chunks * CHUNK_BYTES // MIB} MiB" if case == WRITE else ""
        result.rows.append(Row(case + size, subject, unit, tuple(values)))
    return next(case for case, _, _ in rounds.values if case.startswith(LOADS))


def _add_verdicts(result: Result, loads: str) -> None:
    write = result.rows[0].case
    pairs = {
        "write: at least 80 % of plain files, each synced": (write, FILES),
        f"{READ}, {DROPPED}: at least 80 % of a plain read": (f"{READ}, {DROPPED}", PLAIN_READ),
    }
    for budget, (case, other) in pairs.items():
        share = _rate(result, case).ratio_to(result.row(case, other))
        result.verdicts.append(Verdict(budget, share, LEAST_SHARE, is_most=False))
    slower = result.row(loads, WRITING).ratio_to(result.row(loads, RESTING))
    budget = "loads take at most 1.25 times as long while the disk writes"
    result.verdicts.append(Verdict(budget, slower, MOST_SLOWER))


def _rate(result: Result, case: str) -> Row:
    """The tier's, in MiB/s."""
    found = [row for row in result.rows if (row.case, row.subject) == (case, TIER)]
    return next(row for row in found if row.unit == "MiB/s")


def _type_of(folder: Path) -> str:
    """Type of the file system that a folder is on."""
    mounts = psutil.disk_partitions(all=True)
    found = [each for each in mounts if folder.resolve().is_relative_to(each.mountpoint)]
    return max(found, key=lambda each: len(each.mountpoint)).fstype if found else "unknown"
