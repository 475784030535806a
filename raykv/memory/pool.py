"""One node's pool of slots: its memory, and, for a pool file, a journal of what is in it.

The journal makes a pool survive its NodeActor, not its host: page cache outlives a killed process
but not a crash, so a journal that another boot of the host wrote is ignored. A slot is struck off
*before* its bytes are overwritten and entered *after* they have arrived; a process that is killed
in between leaves a slot that is not trusted. A journal that is damaged anywhere, or that could not
be written, is not trusted at all: what is missing may be that a slot was struck off. It is set
aside, so that one can find out why. One that another version of RayKV wrote is given up.

It also has what was cleared, by history, so that a chunk does not come back that was.

An entry has which of the chunk's blocks were stored, under which orders, and the checksum of its
bytes. Nothing here reads those: that would make the start of a large pool slow. A chunk that was
found is compared before it is first served.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from raykv.base import deadlines, errors, ownership
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import ALL_BLOCKS, SLOT_ALIGNMENT, Blocks, Slot, Stamp
from raykv.memory import pages, region

logger = logging.getLogger("raykv.node")

JOURNAL_VERSION = 4
COMPACT_FACTOR = 4
"""The journal is rewritten when it has this many times as many records as the pool has chunks."""

MAX_SET_ASIDE = 4
"""Damaged journals that are kept beside a pool file; then the oldest goes."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    boot_id: str
    pool_bytes: int
    slab_bytes: int


class PoolEntry(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A slot has a chunk, with that checksum, which was stored under orders of that number."""

    slot: int
    slot_bytes: int
    namespace: str
    key: bytes
    checksum: int
    stamp: Stamp
    blocks: Blocks = ALL_BLOCKS


class _Struck(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """What a slot has is not to be believed."""

    slot: int


class _Floors(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What was cleared, by history and namespace; the last record of these counts."""

    floors: dict[int, dict[str, int]]


_Record = PoolEntry | _Struck | _Floors


class _DamagedError(ValueError):
    """A journal that cannot be trusted, with the reason."""


class Journal:
    """Append-only file of checksummed records beside a pool file."""

    def __init__(self, path: Path, geometry: PoolGeometry) -> None:
        self._path = path
        self._geometry = geometry
        self._entries: dict[int, PoolEntry] = {}
        self._num_records = 0
        self._file = -1
        self.num_set_aside = 0
        self.floors: dict[int, dict[str, int]] = {}
        """What was cleared, by history, the latest last, in earlier lives too."""

    @property
    def _header(self) -> _Header:
        boot_id, geometry = _BOOT_ID.read_text().strip(), self._geometry
        return _Header(JOURNAL_VERSION, boot_id, geometry.pool_bytes, geometry.slab_bytes)

    def open(self) -> list[PoolEntry]:
        """Read what an earlier life left, the oldest first, and start a compact journal with it.

        Raises:
            HandleError: it can't be written, or an invalid one is in the way.
        """
        try:
            self._entries = self._read()
        except (ValueError, msgspec.MsgspecError, PermissionError, RecursionError) as error:
            logger.warning("the journal %s is invalid: %s", self._path, error)
            try:
                self._set_aside()
            except OSError as failure:
                raise errors.HandleError(
                    f"the journal {self._path} is invalid ({error}) and can't be set aside: "
                    f"{failure.strerror}. Remove it, or set another pool_path"
                ) from failure
        try:
            self._rewrite()
        except OSError as error:
            raise errors.HandleError(
                f"the journal {self._path} can't be written: {error.strerror}"
            ) from error
        return list(self._entries.values())

    def _read(self) -> dict[int, PoolEntry]:
        """Entries of the file by slot; none if there is no file, the host has booted since, or
        another version wrote it.

        What was cleared is remembered in any case that can be read.

        Raises:
            ValueError: it is damaged, or of another pool.
            msgspec.MsgspecError: it has something else than a journal has.
        """
        try:
            with os.fdopen(ownership.open_own(self._path, os.O_RDONLY), "rb") as file:
                payloads = _payloads(file.read())
        except FileNotFoundError:
            return {}
        if not payloads:
            logger.info("the journal %s was given up: starting empty", self._path)
            return {}
        header = msgspec.msgpack.decode(payloads[0], type=_Header)
        expected = self._header
        if header.version != expected.version:
            logger.warning(
                "the journal %s is given up: it is of version %d, and this RayKV writes version "
                "%d: starting empty",
                *(self._path, header.version, expected.version),
            )
            return {}
        if msgspec.structs.replace(header, boot_id=expected.boot_id) != expected:
            raise _DamagedError(f"it is of another pool, {header}, not {expected}")
        entries: dict[int, PoolEntry] = {}
        floors: dict[int, dict[str, int]] = {}
        for payload in payloads[1:]:
            record = msgspec.msgpack.decode(payload, type=_Record)
            if isinstance(record, _Floors):
                floors = record.floors
                continue
            entries.pop(record.slot, None)
            if isinstance(record, PoolEntry):
                entries[record.slot] = record
        self.floors = floors
        if header != expected:
            logger.info("the host has booted since %s was written: starting empty", self._path)
            return {}
        return entries

    def _set_aside(self) -> None:
        """Keep the file under another name; of many the latest ones."""
        self.num_set_aside += 1
        name = f"{self._path.name}.quarantined-"
        places = [self._path.with_name(f"{name}{number}") for number in range(1, MAX_SET_ASIDE + 1)]
        free = [place for place in places if not place.exists()]
        place = free[0] if free else min(places, key=lambda old: old.stat().st_mtime_ns)
        self._path.replace(place)
        logger.warning("it is kept as %s; its chunks are not served", place)

    def _rewrite(self) -> None:
        temporary = self._path.with_suffix(".new")
        fd = ownership.open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            records = [self._header, _Floors(self.floors), *self._entries.values()]
            _write_all(fd, b"".join(map(_framed, records)))
        except OSError:
            os.close(fd)
            raise
        temporary.replace(self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file = fd
        self._num_records = len(self._entries)

    def keep_floors(self, floors: Mapping[int, Mapping[str, int]]) -> None:
        """All that was cleared, by history, the latest last; they never fall, and a later life
        knows them too.
        """
        told = {history: dict(each) for history, each in floors.items()}
        if list(told.items()) != list(self.floors.items()):
            self.floors = told
            self._append(_Floors(told))

    def enter(self, entry: PoolEntry) -> None:
        """The slot's bytes have arrived, and have the entry's checksum."""
        self._entries.pop(entry.slot, None)
        self._entries[entry.slot] = entry
        self._append(entry)

    def strike(self, slot: int) -> None:
        """The slot's bytes are about to change; nothing is written if it was not entered."""
        if self._entries.pop(slot, None) is not None:
            self._append(_Struck(slot))

    def strike_where(self, condition: Callable[[PoolEntry], bool]) -> None:
        """Strike off all slots whose entry meets a condition."""
        for entry in list(self._entries.values()):
            if condition(entry):
                self.strike(entry.slot)

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
    """All payloads.

    Raises:
        _DamagedError: one of them is damaged.
    """
    payloads = []
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        checksum = int.from_bytes(raw[at + 4 : at + 8], "little")
        payload = raw[at + 8 : at + 8 + size]
        if not 0 < size == len(payload) or zlib.crc32(payload) != checksum:
            raise _DamagedError(f"it is damaged at byte {at} of {len(raw)}")
        payloads.append(payload)
        at += 8 + size
    return payloads


class Pool:
    """Memory of a node's slots. Calls other than `prefault` are made under the owner's lock."""

    def __init__(self, geometry: PoolGeometry, pool_path: str) -> None:
        self._geometry = geometry
        self.has_journal = bool(pool_path)
        """Whether it is a pool file."""
        # Of memory alone nothing is entered.
        self.journal = Journal(Path(f"{Path(pool_path)}.journal"), geometry)
        self._stopped = threading.Event()
        self.prefaulted_bytes = 0
        self.is_short = False
        # Slot size of each slab of a pool file that has been stored into.
        self._slab_sizes: dict[int, int] = {}
        if pool_path:
            self._region = region.Region.in_file(Path(pool_path), geometry.pool_bytes)
        else:
            self._region = pages.pool_region(geometry.pool_bytes)
        pages.place_near_gpus(self._region)
        # Where the pool is mapped in this process.
        self.address = self._region.address

    def recover(self) -> list[PoolEntry]:
        """Chunks that an earlier life of the NodeActor left in the pool file, and what it knew of
        their bytes, the oldest first.

        Whether a chunk can be where it says, and has the bytes, is for the caller to find out.
        """
        if not self.has_journal:
            return []
        entries = self.journal.open()
        self._slab_sizes = {self._geometry.slab_of(Slot(e.slot)): e.slot_bytes for e in entries}
        return entries

    def forget(self, slot: Slot, slot_bytes: int) -> None:
        """A slot's bytes are about to change; its slab holds slots of `slot_bytes` from now on."""
        slab = self._geometry.slab_of(slot)
        if self._slab_sizes.get(slab, slot_bytes) != slot_bytes:
            self.journal.strike_where(lambda each: self._geometry.slab_of(Slot(each.slot)) == slab)
        self._slab_sizes[slab] = slot_bytes
        self.journal.strike(slot)

    def prefault(self, has_room: Callable[[], bool] = lambda: True) -> None:
        """Touch all pages; runs in a thread of its own until done or stopped.

        Where `has_room` says no, or no page can be had, it waits until there is room again.
        Meanwhile `is_short` is set, and nothing may be stored where no page has been touched.
        """
        has_said_so = False
        while True:
            self._region.prefault(
                lambda done: self._progress(done, has_room), self.prefaulted_bytes
            )
            if self.prefaulted_bytes == self._geometry.pool_bytes or self._stopped.is_set():
                break
            self.is_short = True
            if not has_said_so:
                has_said_so = True
                logger.warning(
                    "memory is short: %d of the pool's %d bytes are touched, and no more are until "
                    "some memory is free again; `raykv doctor` names the limit",
                    self.prefaulted_bytes,
                    self._geometry.pool_bytes,
                )
            while not self._stopped.wait(deadlines.SELDOM_S) and not has_room():
                pass
        self.is_short = False

    def _progress(self, done: int, has_room: Callable[[], bool]) -> bool:
        self.prefaulted_bytes = done
        if done % region.ROOM_CHECK_BYTES == 0:
            self.is_short = not has_room()
        return not self.is_short and not self._stopped.is_set()

    def may_touch(self, slot: Slot, slot_bytes: int) -> bool:
        """Whether a slot's pages are there, or may be touched now."""
        return not self.is_short or slot * SLOT_ALIGNMENT + slot_bytes <= self.prefaulted_bytes

    def stop(self) -> None:
        """End the prefaulting. The memory goes with the process."""
        self._stopped.set()

    def close(self) -> None:
        """Give up the memory of a pool that is not in use yet."""
        self._region.close()
