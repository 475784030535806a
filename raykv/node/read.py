"""The source's side of a fetch: chunks are copied out of the pool, for another node."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.base.ids import NO_BLOCKS, Blocks, Key, Namespace, Refusal, Stamp
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import Bytes
from raykv.node.pool.records import ChunkRecord
from raykv.protocol import columns, engine
from raykv.protocol.copies import Read, ReadReply
from raykv.protocol.listing import ListedRow, ListedRows, Reason, Where

MAX_READ_BYTES = 256 << 20
"""In one read: a bound on the memory that a request can ask for. Single chunks may be larger."""

BUFFER_BYTES = 64 << 20
"""Bytes of a buffer: as much as one read asks for, as a rule."""

MOST_BUFFERS = 4
"""As many as reads run at a time: 256 MiB at most."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """How the read of one chunk ended; of one that was not refused, the orders under which it was
    stored, the checksum of its bytes, and which blocks are there.
    """

    refusal: Refusal
    stamp: Stamp = engine.NOTHING_ORDERED
    checksum: int = 0
    blocks: Blocks = NO_BLOCKS


class ReadService:
    """Any thread may read; readers of records keep writers away from what is being read."""

    def __init__(self, keeper: PoolKeeper) -> None:
        self.keeper = keeper
        self._lock = threading.Lock()
        self._buffers = Buffers(MOST_BUFFERS)
        self.reading = 0
        self.bytes_sent = 0

    def read(self, request: Read) -> tuple[ReadReply, Bytes]:
        """Copy out the wanted chunks that are here.

        Raises:
            MessageError: the request is invalid.
        """
        found, reply = self._begin(request)
        with self._lock:
            self.reading += 1
        try:
            reads, data = self._copy_all(found)
        finally:
            with self._lock:
                self.reading -= 1
        with self._lock:
            self.bytes_sent += len(data)
        return _with_reads(reply, reads), data

    def _begin(self, request: Read) -> tuple[list[ChunkRecord | Refusal], ReadReply]:
        """Register readers, and say how all chunks are at that moment."""
        columns.check_numbers("slot sizes", request.slot_bytes, 1, self.keeper.geometry.slab_bytes)
        namespace, keys = Namespace(request.namespace), [Key(key) for key in request.keys]
        with self.keeper.lock:
            found: list[ChunkRecord | Refusal] = [Refusal.BAD_HANDLE] * len(keys)
            if _is_answered(request):
                found = self.keeper.begin_read(namespace, keys, request.slot_bytes)
            life, number, rows = self.keeper.owner.state_of(namespace, keys)
        return found, ReadReply(life, number, b"", rows)

    def _copy_all(self, found: Sequence[ChunkRecord | Refusal]) -> tuple[list[ChunkRead], Bytes]:
        """Copies of what was admitted, back to back; the readers end."""
        held = [each for each in found if isinstance(each, ChunkRecord)]
        reads, end = [], 0
        try:
            data = self._take(sum(each.slot_bytes for each in held))
            for each in found:
                if isinstance(each, Refusal):
                    reads.append(ChunkRead(each))
                    continue
                to = data[end : end + each.slot_bytes]
                to[:] = self.keeper.bytes_of(each)
                reads.append(self._compared(each, to))
                end += 0 if reads[-1].refusal else each.slot_bytes
        finally:
            self.keeper.end_read(*held)
        return reads, data[:end]

    def _take(self, num_bytes: int) -> Bytes:
        with self._lock:
            data = self._buffers.take(num_bytes)
        return np.empty(num_bytes, np.uint8) if data is None else data

    def hold(self, request: Read) -> tuple[ReadReply, list[ChunkRecord]]:
        """The answer to a read that leaves the bytes where they are.

        Each chunk that is not refused has a reader from now on, whom the caller has to end.

        Raises:
            MessageError: the request is invalid.
        """
        found, reply = self._begin(request)
        held = [each for each in found if isinstance(each, ChunkRecord)]
        try:
            reads = [
                ChunkRead(each)
                if isinstance(each, Refusal)
                else self._compared(each, self.keeper.bytes_of(each))
                for each in found
            ]
        except BaseException:
            self.keeper.end_read(*held)
            raise
        good: list[ChunkRecord] = []
        damaged: list[ChunkRecord] = []
        for each, read in zip(found, reads, strict=True):
            if isinstance(each, ChunkRecord):
                (damaged if read.refusal else good).append(each)
        self.keeper.end_read(*damaged)
        with self._lock:
            self.bytes_sent += sum(record.slot_bytes for record in good)
        return _with_reads(reply, reads), good

    def _compared(self, record: ChunkRecord, data: Bytes) -> ChunkRead:
        """Compare a chunk that has a reader with its checksum; `data` are its bytes."""
        checksum = xxhash.xxh3_64_intdigest(data.data)
        refusal = self.keeper.check_bytes(record, checksum)
        return ChunkRead(refusal, record.stamp, checksum, record.blocks)


def answer(
    request: Read,
    read_one: Callable[[Key, Bytes], ChunkRead],
    life: int = 1,
    number: int = 0,
) -> tuple[ReadReply, Bytes]:
    """Answer a read, for a holder of chunks that is no pool.

    Args:
        request: a valid one.
        read_one: reads a chunk into memory of the size that it is to have.
        life: of the one that answers.
        number: of its listing.
    """
    reads, end = [ChunkRead(Refusal.BAD_HANDLE)] * len(request.keys), 0
    data = np.empty(sum(request.slot_bytes) if _is_answered(request) else 0, np.uint8)
    if _is_answered(request):
        for at, (key, size) in enumerate(zip(request.keys, request.slot_bytes, strict=True)):
            reads[at] = read_one(Key(key), data[end : end + size])
            end += 0 if reads[at].refusal else size
    rows = ListedRows.of(
        ListedRow(Namespace(request.namespace), Key(key), Where.DISK, read.blocks, Reason.STORED)
        for key, read in zip(request.keys, reads, strict=True)
        if not read.refusal
    )
    return _with_reads(ReadReply(life, number, b"", rows), reads), data[:end]


def _is_answered(request: Read) -> bool:
    """Whether a read asks for one chunk, or for few enough bytes."""
    return len(request.keys) == 1 or sum(request.slot_bytes) <= MAX_READ_BYTES


def _with_reads(reply: ReadReply, reads: Sequence[ChunkRead]) -> ReadReply:
    sent = [each for each in reads if not each.refusal]
    return ReadReply(
        reply.life,
        reply.number,
        bytes(each.refusal for each in reads),
        reply.rows,
        [each.checksum for each in sent],
        columns.Numbers.of(each.stamp.history for each in sent),
        columns.Numbers.of(each.stamp.number for each in sent),
    )


def blocks_in(reply: ReadReply) -> dict[Key, Blocks]:
    """Which blocks are there of the chunks that came."""
    return {row.key: row.blocks for row in reply.rows}


def lent(memory: mmap.mmap, num_bytes: int, home: deque[mmap.mmap]) -> npt.NDArray[np.uint8]:
    """An array over the beginning of `memory`, which goes home with the last view of it."""
    # All arrays over the memory, slices too, keep this one alive.
    owner = (ctypes.c_ubyte * num_bytes).from_buffer(memory)
    weakref.finalize(owner, home.append, memory).atexit = False
    return np.frombuffer(memoryview(owner), np.uint8)


class Buffers:
    """Memory for reads, of `BUFFER_BYTES` each. A buffer comes back with the last view of its
    bytes, in any thread. Callers of `take` take turns.

    Args:
        most: how many are made.
        prepare: called once for each, with its address and size.
    """

    def __init__(self, most: int, prepare: Callable[[int, int], None] | None = None) -> None:
        self._left = most
        self._prepare = prepare
        # Without a lock: what comes back may come at any time.
        self._free: deque[mmap.mmap] = deque()

    def take(self, num_bytes: int) -> Bytes | None:
        """An array of `num_bytes` bytes with arbitrary content; None if that is too large, or all
        buffers are in use. Raises what `prepare` raises.
        """
        if not 0 < num_bytes <= BUFFER_BYTES:
            return None
        try:
            memory = self._free.pop()
        except IndexError:
            if not self._left:
                return None
            memory = mmap.mmap(-1, BUFFER_BYTES)
            if self._prepare is not None:
                self._prepare(np.frombuffer(memory, np.uint8).ctypes.data, BUFFER_BYTES)
            self._left -= 1
        return lent(memory, num_bytes, self._free)
