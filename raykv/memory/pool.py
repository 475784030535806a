"""One node's pool of slots: its memory, and, for a pool file, a journal of what is in it.

The journal makes a pool survive its NodeActor, not its host: page cache outlives a killed process
but not a crash, so a journal that another boot of the host wrote is ignored. A slot is struck off
*before* its bytes are overwritten and entered *after* they have arrived; a process that is killed
in between leaves a slot that is not believed. A journal that is damaged anywhere, or that could not
be written, is not believed at all: what is missing may be that a slot was struck off.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from raykv.core.geometry import PoolGeometry
from raykv.core.slots import ChunkName
from raykv.memory.region import Region
from raykv.types import Generation, Key, Namespace, Slot

logger = logging.getLogger("raykv.node")

JOURNAL_VERSION = 1
COMPACT_FACTOR = 4
"""The journal is rewritten when it has so many times more records than the pool has chunks."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    boot_id: str
    pool_bytes: int
    slab_bytes: int


class _Record(msgspec.Struct, frozen=True, array_like=True):
    """`slot_bytes` 0 strikes the slot off."""

    slot: int
    slot_bytes: int = 0
    generation: int = 0
    namespace: str = ""
    key: bytes = b""


class Journal:
    """Append-only file of checksummed records beside a pool file."""

    def __init__(self, path: Path, geometry: PoolGeometry) -> None:
        self._path = path
        self._header = _Header(
            JOURNAL_VERSION, _BOOT_ID.read_text().strip(), geometry.pool_bytes, geometry.slab_bytes
        )
        self._entries: dict[int, _Record] = {}
        self._num_records = 0
        self._file = -1

    def open(self) -> list[_Record]:
        """Read what an earlier life left, and start a compact journal with it."""
        self._entries = {record.slot: record for record in self._read()}
        self._rewrite()
        return list(self._entries.values())

    def _read(self) -> Iterator[_Record]:
        """Records of the file; none if it is damaged or not ours."""
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return
        payloads = _payloads(raw)
        try:
            header = msgspec.msgpack.decode(payloads[0], type=_Header) if payloads else None
        except msgspec.DecodeError:
            header = None
        if header != self._header:
            logger.warning(
                "the journal %s is damaged, or not of this boot and pool: starting empty",
                self._path,
            )
            return
        entries: dict[int, _Record] = {}
        for payload in payloads[1:]:
            record = msgspec.msgpack.decode(payload, type=_Record)
            entries.pop(record.slot, None)
            if record.slot_bytes:
                entries[record.slot] = record
        yield from entries.values()

    def _rewrite(self) -> None:
        temporary = self._path.with_suffix(".new")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, b"".join(map(_framed, [self._header, *self._entries.values()])))
        except OSError:
            os.close(fd)
            raise
        temporary.replace(self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file = fd
        self._num_records = len(self._entries)

    def enter(self, record: _Record) -> None:
        """The slot's bytes have arrived."""
        self._entries[record.slot] = record
        self._append(record)

    def strike(self, slot: Slot) -> None:
        """The slot's bytes are about to change; nothing is written if it was not entered."""
        if self._entries.pop(slot, None) is not None:
            self._append(_Record(slot))

    def strike_where(self, condition: Callable[[_Record], bool]) -> None:
        """Strike off all slots whose entry meets a condition."""
        for record in list(self._entries.values()):
            if condition(record):
                self.strike(Slot(record.slot))

    def _append(self, record: _Record) -> None:
        if self._file < 0:
            return
        try:
            _write_all(self._file, _framed(record))
            self._num_records += 1
            if self._num_records > COMPACT_FACTOR * (len(self._entries) + 1024):
                self._rewrite()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Go on without a journal; the next life begins with an empty pool."""
        logger.warning("the journal %s can't be written: %s", self._path, error.strerror)
        os.ftruncate(self._file, 0)
        os.close(self._file)
        self._file = -1


def _write_all(fd: int, raw: bytes) -> None:
    """A disk that is almost full takes a part and says so; then the next write raises."""
    while raw:
        raw = raw[os.write(fd, raw) :]


def _framed(struct: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(struct)
    head = len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little")
    return head + payload


def _payloads(raw: bytes) -> list[bytes]:
    """All payloads; none if any of them is damaged."""
    payloads = []
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        checksum = int.from_bytes(raw[at + 4 : at + 8], "little")
        payload = raw[at + 8 : at + 8 + size]
        if not 0 < size == len(payload) or zlib.crc32(payload) != checksum:
            return []
        payloads.append(payload)
        at += 8 + size
    return payloads


class Pool:
    """Memory of a node's slots. Calls other than `prefault` are made under the owner's lock."""

    def __init__(self, geometry: PoolGeometry, pool_path: str) -> None:
        self._geometry = geometry
        self._journal: Journal | None = None
        self._stopped = threading.Event()
        self.prefaulted_bytes = 0
        # Slot size of each slab of a pool file that has been stored into.
        self._slab_sizes: dict[int, int] = {}
        if pool_path:
            path = Path(pool_path)
            self._region = Region.in_file(path, geometry.pool_bytes)
            self._journal = Journal(path.with_name(path.name + ".journal"), geometry)
        else:
            self._region = Region.anonymous(geometry.pool_bytes, "pool")

    @property
    def address(self) -> int:
        """Where the pool is mapped in this process."""
        return self._region.address

    def recover(self) -> list[ChunkName]:
        """Chunks that an earlier life of the NodeActor left in the pool file."""
        if self._journal is None:
            return []
        records = [
            record
            for record in self._journal.open()
            if self._geometry.is_place(Slot(record.slot), record.slot_bytes)
        ]
        self._slab_sizes = {self._slab_of(record): record.slot_bytes for record in records}
        return [
            ChunkName(
                Namespace(record.namespace),
                Key(record.key),
                Slot(record.slot),
                Generation(record.generation),
                record.slot_bytes,
            )
            for record in records
        ]

    def remember(self, name: ChunkName) -> None:
        """A chunk is READY."""
        if self._journal is not None:
            record = _Record(name.slot, name.slot_bytes, name.generation, name.namespace, name.key)
            self._journal.enter(record)

    def forget(self, slot: Slot, slot_bytes: int) -> None:
        """A slot's bytes are about to change; its slab holds slots of `slot_bytes` from now on."""
        if self._journal is None:
            return
        slab = self._geometry.slab_of(slot)
        if self._slab_sizes.get(slab, slot_bytes) != slot_bytes:
            self._journal.strike_where(lambda record: self._slab_of(record) == slab)
        self._slab_sizes[slab] = slot_bytes
        self._journal.strike(slot)

    def _slab_of(self, record: _Record) -> int:
        return self._geometry.slab_of(Slot(record.slot))

    def forget_namespace(self, namespace: Namespace, up_to: Generation) -> None:
        """A namespace was cleared up to a generation."""
        if self._journal is not None:
            self._journal.strike_where(
                lambda record: record.namespace == namespace and record.generation <= up_to
            )

    def prefault(self) -> None:
        """Touch all pages; runs in a thread of its own until done or stopped."""
        self._region.prefault(self._progress)

    def _progress(self, done: int) -> bool:
        self.prefaulted_bytes = done
        return not self._stopped.is_set()

    def stop(self) -> None:
        """End the prefaulting. The memory goes with the process."""
        self._stopped.set()
