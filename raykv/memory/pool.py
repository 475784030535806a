"""One node's pool of slots: its memory, and, for a pool file, a journal of what is in it.

The journal makes a pool survive its NodeActor, not its host: page cache outlives a killed process
but not a crash, so a journal that another boot of the host wrote is ignored. A slot is struck off
*before* its bytes are overwritten and entered *after* they have arrived; a process that is killed
in between leaves a slot that is not trusted. A journal that is damaged anywhere, or that could not
be written, is not trusted at all: what is missing may be that a slot was struck off. It is set
aside, so that one can find out why.

It also has what was cleared, which a scheduler actor that does not know it learns from here.

An entry has which of the chunk's blocks were stored, and the checksum of its bytes. Nothing here
reads those: that would make the start of a large pool slow. A chunk that was found is compared
before it is first served.
"""

from __future__ import annotations

import logging
import os
import threading
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from raykv.base.clearings import Clearings
from raykv.base.deadlines import NODE_ROOM_LOOK_S
from raykv.base.errors import HandleError
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    ALL_BLOCKS,
    SLOT_ALIGNMENT,
    Blocks,
    ChunkName,
    Generation,
    Key,
    Namespace,
    Seal,
    Slot,
)
from raykv.base.ownership import open_own
from raykv.memory.pages import place_near_gpus, pool_region
from raykv.memory.region import ROOM_CHECK_BYTES, Region

logger = logging.getLogger("raykv.node")

JOURNAL_VERSION = 3
COMPACT_FACTOR = 4
"""The journal is rewritten when it has so many times more records than the pool has chunks."""

MAX_SET_ASIDE = 4
"""Damaged journals that are kept beside a pool file; then the oldest goes."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Header(msgspec.Struct, frozen=True, array_like=True):
    version: int
    boot_id: str
    pool_bytes: int
    slab_bytes: int


class _JournalRecord(msgspec.Struct, frozen=True, array_like=True):
    """`slot_bytes` 0 strikes the slot off, or with a generation says up to which one the chunks of
    its namespace were cleared.
    """

    slot: int
    slot_bytes: int = 0
    generation: int = 0
    namespace: str = ""
    key: bytes = b""
    checksum: int = 0
    blocks: Blocks = ALL_BLOCKS

    @property
    def is_clearing(self) -> bool:
        return not self.slot_bytes and self.generation > 0

    @property
    def name(self) -> ChunkName:
        namespace, generation = Namespace(self.namespace), Generation(self.generation)
        return ChunkName(namespace, Key(self.key), Slot(self.slot), generation, self.slot_bytes)


class _DamagedError(ValueError):
    """A journal that cannot be trusted, with the reason."""


class Journal:
    """Append-only file of checksummed records beside a pool file."""

    def __init__(self, path: Path, geometry: PoolGeometry) -> None:
        self._path = path
        self._header = _Header(
            JOURNAL_VERSION, _BOOT_ID.read_text().strip(), geometry.pool_bytes, geometry.slab_bytes
        )
        self._entries: dict[int, _JournalRecord] = {}
        self._clearings = Clearings()
        self._num_records = 0
        self._file = -1
        self.num_set_aside = 0

    def open(self) -> list[_JournalRecord]:
        """Read what an earlier life left, and start a compact journal with it.

        Raises:
            HandleError: it can't be written, or one that is not believed is in the way.
        """
        try:
            self._entries = self._read()
        except (ValueError, msgspec.MsgspecError, PermissionError, RecursionError) as error:
            logger.warning("the journal %s is not believed: %s", self._path, error)
            try:
                self._set_aside()
            except OSError as failure:
                raise HandleError(
                    f"the journal {self._path} is not believed ({error}) and can't be set aside: "
                    f"{failure.strerror}. Remove it, or set another pool_path"
                ) from failure
        try:
            self._rewrite()
        except OSError as error:
            raise HandleError(
                f"the journal {self._path} can't be written: {error.strerror}"
            ) from error
        return list(self._entries.values())

    def _read(self) -> dict[int, _JournalRecord]:
        """Entries of the file by slot; none if there is no file, or the host has booted since.

        What was cleared is remembered in any case.

        Raises:
            ValueError: it is damaged, or of another pool.
            msgspec.MsgspecError: it has something else than a journal has.
        """
        try:
            with os.fdopen(open_own(self._path, os.O_RDONLY), "rb") as file:
                payloads = _payloads(file.read())
        except FileNotFoundError:
            return {}
        if not payloads:
            logger.info("the journal %s was given up: starting empty", self._path)
            return {}
        header = msgspec.msgpack.decode(payloads[0], type=_Header)
        expected = self._header
        if msgspec.structs.replace(header, boot_id=expected.boot_id) != expected:
            raise _DamagedError(f"it is of another pool or version, {header}, not {expected}")
        entries: dict[int, _JournalRecord] = {}
        for payload in payloads[1:]:
            record = msgspec.msgpack.decode(payload, type=_JournalRecord)
            if record.is_clearing:
                self._clearings.take({record.namespace: record.generation})
                continue
            entries.pop(record.slot, None)
            if record.slot_bytes:
                entries[record.slot] = record
        if header != expected:
            logger.info("the host has booted since %s was written: starting empty", self._path)
            return {}
        return {
            slot: record
            for slot, record in entries.items()
            if not self._clearings.cover(Namespace(record.namespace), record.generation)
        }

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
        fd = open_own(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            records = [self._header, *self._floors(), *self._entries.values()]
            _write_all(fd, b"".join(map(_framed, records)))
        except OSError:
            os.close(fd)
            raise
        temporary.replace(self._path)
        if self._file >= 0:
            os.close(self._file)
        self._file = fd
        self._num_records = len(self._entries)

    def _floors(self) -> list[_JournalRecord]:
        floors = self._clearings.told.items()
        return [_JournalRecord(0, generation=floor, namespace=name) for name, floor in floors]

    @property
    def cleared(self) -> dict[str, int]:
        """By namespace, the generation up to which chunks were cleared, in earlier lives too."""
        return self._clearings.told

    def clear(self, cleared: Mapping[str, int]) -> None:
        """Chunks of namespaces up to some generations are not to be believed."""
        if not self._clearings.take(cleared):
            return
        for record in list(self._entries.values()):
            if self._clearings.cover(Namespace(record.namespace), record.generation):
                del self._entries[record.slot]
        for record in self._floors():
            self._append(record)

    def enter(self, record: _JournalRecord) -> None:
        """The slot's bytes have arrived."""
        self._entries[record.slot] = record
        self._append(record)

    def strike(self, slot: Slot) -> None:
        """The slot's bytes are about to change; nothing is written if it was not entered."""
        if self._entries.pop(slot, None) is not None:
            self._append(_JournalRecord(slot))

    def strike_where(self, condition: Callable[[_JournalRecord], bool]) -> None:
        """Strike off all slots whose entry meets a condition."""
        for record in list(self._entries.values()):
            if condition(record):
                self.strike(Slot(record.slot))

    def _append(self, record: _JournalRecord) -> None:
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
        self._journal: Journal | None = None
        self._stopped = threading.Event()
        self.prefaulted_bytes = 0
        self.is_short = False
        self._has_said_so = False
        self.room_poll_s = NODE_ROOM_LOOK_S
        # Slot size of each slab of a pool file that has been stored into.
        self._slab_sizes: dict[int, int] = {}
        if pool_path:
            path = Path(pool_path)
            self._region = Region.in_file(path, geometry.pool_bytes)
            self._journal = Journal(path.with_name(path.name + ".journal"), geometry)
        else:
            self._region = pool_region(geometry.pool_bytes)
        place_near_gpus(self._region)

    @property
    def address(self) -> int:
        """Where the pool is mapped in this process."""
        return self._region.address

    @property
    def num_set_aside(self) -> int:
        """Journals that were not trusted."""
        return 0 if self._journal is None else self._journal.num_set_aside

    def recover(self) -> dict[ChunkName, Seal]:
        """Chunks that an earlier life of the NodeActor left in the pool file, and what it knew of
        their bytes.

        Whether a chunk can be where it says, and has the bytes, is for the caller to find out.
        """
        if self._journal is None:
            return {}
        records = self._journal.open()
        self._slab_sizes = {self._slab_of(record): record.slot_bytes for record in records}
        return {
            record.name: Seal(record.checksum, is_proven=False, blocks=record.blocks)
            for record in records
        }

    def remember(self, name: ChunkName, checksum: int, blocks: Blocks = ALL_BLOCKS) -> None:
        """A chunk is READY with these blocks, and its bytes have that checksum."""
        if self._journal is not None:
            record = _JournalRecord(
                name.slot,
                name.slot_bytes,
                name.generation,
                name.namespace,
                name.key,
                checksum,
                blocks,
            )
            self._journal.enter(record)

    def strike(self, slot: Slot) -> None:
        """What a slot holds must not be believed."""
        if self._journal is not None:
            self._journal.strike(slot)

    def forget(self, slot: Slot, slot_bytes: int) -> None:
        """A slot's bytes are about to change; its slab holds slots of `slot_bytes` from now on."""
        if self._journal is None:
            return
        slab = self._geometry.slab_of(slot)
        if self._slab_sizes.get(slab, slot_bytes) != slot_bytes:
            self._journal.strike_where(lambda record: self._slab_of(record) == slab)
        self._slab_sizes[slab] = slot_bytes
        self._journal.strike(slot)

    def _slab_of(self, record: _JournalRecord) -> int:
        return self._geometry.slab_of(Slot(record.slot))

    def clear(self, cleared: Mapping[str, int]) -> None:
        """Namespaces were cleared up to some generations; a later life knows it too."""
        if self._journal is not None:
            self._journal.clear(cleared)

    @property
    def cleared(self) -> dict[str, int]:
        """The generation up to which each namespace was cleared, in earlier lives too."""
        return {} if self._journal is None else self._journal.cleared

    def prefault(self, has_room: Callable[[], bool] = lambda: True) -> None:
        """Touch all pages; runs in a thread of its own until done or stopped.

        Where `has_room` says no, or no page can be had, it waits until there is room again.
        Meanwhile `is_short` is set, and nothing may be stored where no page has been touched.
        """
        while True:
            self._region.prefault(
                lambda done: self._progress(done, has_room), self.prefaulted_bytes
            )
            if self.prefaulted_bytes == self._geometry.pool_bytes or self._stopped.is_set():
                break
            self.is_short = True
            if not self._has_said_so:
                self._has_said_so = True
                logger.warning(
                    "memory is short: %d of the pool's %d bytes are touched, and no more are until "
                    "some memory is free again; `raykv doctor` names the limit",
                    self.prefaulted_bytes,
                    self._geometry.pool_bytes,
                )
            while not self._stopped.wait(self.room_poll_s) and not has_room():
                pass
        self.is_short = False

    def _progress(self, done: int, has_room: Callable[[], bool]) -> bool:
        self.prefaulted_bytes = done
        if done % ROOM_CHECK_BYTES == 0:
            self.is_short = not has_room()
        return not self.is_short and not self._stopped.is_set()

    def may_touch(self, slot: Slot, slot_bytes: int) -> bool:
        """Whether a slot's pages are there, or may be touched now."""
        return not self.is_short or slot * SLOT_ALIGNMENT + slot_bytes <= self.prefaulted_bytes

    def stop(self) -> None:
        """End the prefaulting. The memory goes with the process."""
        self._stopped.set()
