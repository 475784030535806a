"""The source's side of a fetch: chunks are copied out of the pool, for another node."""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from raykv.base.ids import (
    ALL_BLOCKS,
    SLOT_ALIGNMENT,
    Blocks,
    ChunkName,
    Epoch,
    Generation,
    Key,
    Namespace,
    Refusal,
    Slot,
)
from raykv.node.keeper import PoolKeeper
from raykv.node.peers import Bytes
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.peer import ReadReply, ReadRequest, check_read

MAX_READ_BYTES = 256 << 20
"""In one read: a bound on the memory that a request can ask for. Single chunks may be larger."""

BUFFER_BYTES = 64 << 20
"""Bytes of each buffer: as much as one read asks for, as a rule."""

MAX_KEPT = 4
"""Buffers that wait for their next use, as many as reads run at a time: 256 MiB at most."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """How the read of one chunk ended, the checksum of its bytes, where that was asked for, and
    which of its blocks were stored.
    """

    refusal: Refusal
    checksum: int = 0
    blocks: Blocks = ALL_BLOCKS


class ReadService:
    """Any thread may read; the slot table keeps writers away from what is being read."""

    def __init__(self, keeper: PoolKeeper, epoch: Epoch) -> None:
        self._keeper = keeper
        self._epoch = epoch
        self._lock = threading.Lock()
        self._scratch = Scratch()
        self.reading = 0
        self.bytes_sent = 0

    def read(self, request: ReadRequest) -> tuple[ReadReply, Bytes]:
        """Copy out what is still there, at its generation, of what is asked for.

        Raises:
            MessageError: the request is invalid.
        """
        check_read(request, self._keeper.table.geometry.slab_bytes)
        with self._lock:
            self.reading += 1
        try:
            reply, data = answer(
                request,
                self._epoch,
                lambda name, to: self._read_one(name, to, with_checksum=request.with_checksums),
                self._scratch.take,
            )
        finally:
            with self._lock:
                self.reading -= 1
        with self._lock:
            self.bytes_sent += len(data)
        return reply, data

    def hold(self, request: ReadRequest) -> tuple[ReadReply, list[ChunkName]]:
        """The answer to a read that leaves the bytes where they are.

        Each chunk that is not refused has a reader from now on, whom the caller has to end.

        Raises:
            MessageError: the request is invalid.
        """
        check_read(request, self._keeper.table.geometry.slab_bytes)
        held: list[ChunkName] = []

        def hold_one(name: ChunkName, _: Bytes) -> ChunkRead:
            found = self._hold_one(name, with_checksum=request.with_checksums)
            if found.refusal is Refusal.NONE:
                held.append(name)
            return found

        try:
            reply, _ = answer(request, self._epoch, hold_one, lambda _: np.empty(0, np.uint8))
        except BaseException:
            self.let_go(held)
            raise
        with self._lock:
            self.bytes_sent += sum(name.slot_bytes for name in held)
        return reply, held

    def let_go(self, held: list[ChunkName]) -> None:
        """The readers that `hold` has registered are done."""
        for name in held:
            self._keeper.end_load(name)

    def _read_one(self, name: ChunkName, to: Bytes, *, with_checksum: bool) -> ChunkRead:
        """Copy a chunk, and compare it with what was stored."""
        refusal = self._keeper.begin_load(name)
        if refusal is not Refusal.NONE:
            return ChunkRead(refusal)
        try:
            ctypes.memmove(to.ctypes.data, self._place_of(name), name.slot_bytes)
            return self._compared(name, to, with_checksum=with_checksum)
        finally:
            self._keeper.end_load(name)

    def _hold_one(self, name: ChunkName, *, with_checksum: bool) -> ChunkRead:
        """Compare a chunk with what was stored; it keeps its reader if it is not refused."""
        found = ChunkRead(self._keeper.begin_load(name))
        if found.refusal is not Refusal.NONE:
            return found
        try:
            place = (ctypes.c_ubyte * name.slot_bytes).from_address(self._place_of(name))
            data = np.frombuffer(memoryview(place), np.uint8)
            found = self._compared(name, data, with_checksum=with_checksum)
        except BaseException:
            self._keeper.end_load(name)
            raise
        if found.refusal is not Refusal.NONE:
            self._keeper.end_load(name)
        return found

    def _place_of(self, name: ChunkName) -> int:
        return self._keeper.pool.address + name.slot * SLOT_ALIGNMENT

    def _compared(self, name: ChunkName, data: Bytes, *, with_checksum: bool) -> ChunkRead:
        """What there is to say of a chunk that has a reader; `data` are its bytes."""
        blocks = self._keeper.blocks_of(name)
        seal = self._keeper.seal_of(name)
        if not with_checksum and (seal is None or seal.is_proven):
            return ChunkRead(Refusal.NONE, blocks=blocks)
        checksum = xxhash.xxh3_64_intdigest(data.data)
        return ChunkRead(self._keeper.settle(name, checksum), checksum, blocks)


def answer(
    request: ReadRequest,
    epoch: int,
    read_one: Callable[[ChunkName, Bytes], ChunkRead],
    take: Callable[[int], Bytes] = lambda num_bytes: np.empty(num_bytes, np.uint8),
) -> tuple[ReadReply, Bytes]:
    """Answer a read, for any holder of chunks.

    Args:
        request: a valid one.
        epoch: of the one that answers.
        read_one: reads a chunk into memory of its size.
        take: gives memory for so many bytes.
    """
    total = sum(request.slot_bytes)
    is_ours = request.version == PROTOCOL_VERSION and request.node_epoch == epoch
    if not is_ours or (total > MAX_READ_BYTES and len(request.handles) > 1):
        refused = [int(Refusal.BAD_HANDLE)] * len(request.handles)
        return ReadReply(epoch, refused), np.empty(0, np.uint8)
    data = take(total)
    refusals: list[int] = []
    checksums: list[int] = []
    partial: dict[int, Blocks] = {}
    end = 0
    for number, name in enumerate(names_of(request)):
        read = read_one(name, data[end : end + name.slot_bytes])
        refusals.append(int(read.refusal))
        if read.refusal is Refusal.NONE:
            end += name.slot_bytes
            checksums.append(read.checksum)
            if read.blocks != ALL_BLOCKS:
                partial[number] = read.blocks
    if not request.with_checksums:
        checksums = []
    return ReadReply(epoch, refusals, checksums, partial), data[:end]


def names_of(request: ReadRequest) -> list[ChunkName]:
    """The chunks that a read asks for."""
    handles = request.handles
    columns = zip(handles.keys, handles.slots, handles.generations, request.slot_bytes, strict=True)
    return [
        ChunkName(Namespace(request.namespace), Key(key), Slot(slot), Generation(generation), size)
        for key, slot, generation, size in columns
    ]


def lent(memory: mmap.mmap, num_bytes: int, home: deque[mmap.mmap]) -> npt.NDArray[np.uint8]:
    """An array over the beginning of `memory`, which goes home when nobody sees it any more."""
    # All arrays over the memory, slices too, keep this one alive.
    owner = (ctypes.c_ubyte * num_bytes).from_buffer(memory)
    weakref.finalize(owner, home.append, memory).atexit = False
    return np.frombuffer(memoryview(owner), np.uint8)


class Scratch:
    """Any thread may take."""

    def __init__(self) -> None:
        # Without a lock: a buffer comes back in whatever thread drops the last reference.
        self._kept: deque[mmap.mmap] = deque(maxlen=MAX_KEPT)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """An array of `num_bytes` bytes with arbitrary content."""
        if not 0 < num_bytes <= BUFFER_BYTES:
            return np.empty(num_bytes, np.uint8)
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = mmap.mmap(-1, BUFFER_BYTES)
        return lent(memory, num_bytes, self._kept)

    @property
    def num_kept(self) -> int:
        """Buffers that nobody uses now."""
        return len(self._kept)
