"""The source's side of a fetch: chunks are copied out of the pool, for another node."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import xxhash

from raykv.actors.keeper import PoolKeeper
from raykv.actors.peers import Bytes
from raykv.actors.scratch import Scratch
from raykv.core.sanity import check_read
from raykv.core.slots import ChunkName
from raykv.messages import PROTOCOL_VERSION, ReadReply, ReadRequest
from raykv.types import SLOT_ALIGNMENT, Epoch, Generation, Key, Namespace, Refusal, Slot

MAX_READ_BYTES = 256 << 20
"""In one read: a bound on the memory that a request can ask for. Single chunks may be larger."""


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
        """Copy out what is asked for, as far as it is still there at its generation.

        Raises:
            MessageError: the request can't be meant.
        """
        check_read(request, self._keeper.table.geometry.slab_bytes)
        num_chunks = len(request.handles)
        total = sum(request.slot_bytes)
        is_ours = request.version == PROTOCOL_VERSION and request.node_epoch == self._epoch
        if not is_ours or (total > MAX_READ_BYTES and num_chunks > 1):
            refused = [int(Refusal.BAD_HANDLE)] * num_chunks
            return ReadReply(self._epoch, refused), np.empty(0, np.uint8)
        with self._lock:
            self.reading += 1
        try:
            return self._read(request, total)
        finally:
            with self._lock:
                self.reading -= 1

    def _read(self, request: ReadRequest, total: int) -> tuple[ReadReply, Bytes]:
        data: Bytes = self._scratch.take(total)
        refusals: list[int] = []
        checksums: list[int] = []
        end = 0
        for name in names_of(request):
            refusal = self._keeper.begin_load(name)
            if refusal is Refusal.NONE:
                refusal = self._copy(name, data[end : end + name.slot_bytes], checksums, request)
            refusals.append(int(refusal))
            if refusal is Refusal.NONE:
                end += name.slot_bytes
        with self._lock:
            self.bytes_sent += end
        return ReadReply(self._epoch, refusals, checksums), data[:end]

    def _copy(
        self, name: ChunkName, to: Bytes, checksums: list[int], request: ReadRequest
    ) -> Refusal:
        """Copy a chunk whose reader we are, and compare it with what was stored."""
        try:
            place = self._keeper.pool.address + name.slot * SLOT_ALIGNMENT
            ctypes.memmove(to.ctypes.data, place, name.slot_bytes)
            seal = self._keeper.seal_of(name)
            if not request.with_checksums and (seal is None or seal.is_proven):
                return Refusal.NONE
            checksum = xxhash.xxh3_64_intdigest(to.data)
            refusal = self._keeper.settle(name, checksum)
        finally:
            self._keeper.end_load(name)
        if refusal is Refusal.NONE and request.with_checksums:
            checksums.append(checksum)
        return refusal


def names_of(request: ReadRequest) -> list[ChunkName]:
    """The chunks that a read asks for."""
    handles = request.handles
    columns = zip(handles.keys, handles.slots, handles.generations, request.slot_bytes, strict=True)
    return [
        ChunkName(Namespace(request.namespace), Key(key), Slot(slot), Generation(generation), size)
        for key, slot, generation, size in columns
    ]
