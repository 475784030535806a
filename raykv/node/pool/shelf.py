"""Which chunks are on the node's disk, in which files, and which are written there next.

                next_to_write, unwritten             end_write
    (READY) ────────────────────────────► being written ────────► on the disk ────► (none)
                                             │ cleared, damaged          file goes, cleared,
                                             │ or replaced               damaged
                                             └────────► (none)

The disk is a second place in the row of a name. The disk tier says which files it has written, and
deletes those that are to go.

                 add                   give_way, drop_file, take_empty
    (written) ────────► listed ────────────────────────────────────────► to be deleted
                          │  ▲ give_way: it was read since it was last looked at
                          └──┘

Files are written once. When there is no room, the oldest file goes, unless a chunk of it was read
since the last time: then it has another round ("second chance"). Where tenants have shares, a file
is of one tenant, and `raykv/base/shares.py` says whose oldest file goes.

Chunks are written before they go: of the chunks that go next as many as two steps of an engine
store, once there is no free room for that many. What has not been written in time is lost. What is
released is written, too: a session that is over may come back. What is spare another node has. A
disk that is full takes only what was found since it was stored: else prompts that are never asked
for again would take the place of what is asked for.

Invariants:
1. What the shelf has is in the listing as on the disk, and every change of that is numbered.
2. A record that is being written was READY when that began, and has a reader until its bytes are
   copied. Its copy counts if it is READY at the end, or was evicted or moved.
3. Each chunk on the disk has a place that no other one has, for readers of the listing in pages.
4. Each chunk on the disk lives in one file, which is listed; a file in which none lives is empty.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from raykv.base.ids import ALL_BLOCKS, Blocks, Key, Namespace, Stamp
from raykv.base.shares import NO_SHARE, Share, shareholder, to_give_up
from raykv.node.pool.floors import Floors
from raykv.node.pool.listing import Listing
from raykv.node.pool.places import Places
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.node.pool.room import NOBODY, Room
from raykv.protocol.listing import ALL_READ, Reason

RESERVE = 2048
"""Chunks that go next and are on the disk already: two steps of 8,192 tokens, in chunks of 16, of
two KV groups.
"""

RESERVED_PART = 4
"""The reserve has at most one byte of a pool in this many."""


@dataclass(frozen=True, slots=True)
class DiskChunk:
    """A chunk in a file: its bytes are at [offset, offset + num_bytes).

    `checksum` is XXH3, 64 bit; `stamp` is of the orders under which the bytes were stored. `blocks`
    are those that were stored, the others are zero.
    """

    key: Key
    stamp: Stamp
    offset: int
    num_bytes: int
    checksum: int
    blocks: Blocks = ALL_BLOCKS


class ShelvedChunk(msgspec.Struct, eq=False, gc=False):
    """A chunk on the disk.

    Args:
        namespace: see `Namespace`.
        key: see `Key`.
        chunk: what it is.
        file: that it is in.
        place: see `Shelf.page`.
        number: of the listing, when it last changed.
    """

    namespace: Namespace
    key: Key
    chunk: DiskChunk
    file: DiskFile
    place: int
    number: int = 0


@dataclass(slots=True, eq=False)
class DiskFile:
    """A file that is listed. `live` has the chunks that are not superseded or gone."""

    name: str
    num_bytes: int
    tenant: str = ""
    was_read: bool = False
    live: dict[ShelvedChunk, None] = field(default_factory=dict)


class Shelf:
    """See the module's docstring. The lock of the pool's owner guards it.

    Args:
        listing: where changes are numbered.
        floors: what is void.
        room: which chunks go next.
        places: of all chunks in RAM.
    """

    def __init__(self, listing: Listing, floors: Floors, room: Room, places: Places) -> None:
        self._listing = listing
        self._floors = floors
        self._room = room
        self._places = places
        self._chunks: dict[Namespace, dict[Key, ShelvedChunk]] = {}
        # By place; places that nothing has are used again.
        self._by_place: list[ShelvedChunk | None] = []
        self._free: list[int] = []
        # Files in the order in which they have to go, those that no chunk is left in, and the bytes
        # of each tenant's.
        self._files: OrderedDict[str, DiskFile] = OrderedDict()
        self._empty: set[str] = set()
        self._tenant_bytes: Counter[str] = Counter()
        self.most_bytes = 0
        """Of all files together; the disk says it."""
        self.shares: Mapping[str, Share] = {}
        """By tenant; that of all others is under `NOBODY`. Empty if there are no shares."""
        # Records that are being written, and whether each has gone well meanwhile.
        self._writing: dict[ChunkRecord, bool] = {}
        self.is_full = False
        """Whether files have had to go for others."""
        # When nothing was left to be written: the listing's number, and that of uses.
        self._done_at = (-1, -1)

    # Looking

    def find(self, namespace: Namespace, key: Key) -> ShelvedChunk | None:
        """A chunk on the disk."""
        return self._chunks.get(namespace, {}).get(key)

    def has_any(self, namespace: Namespace) -> bool:
        """Whether chunks of a namespace are on the disk."""
        return namespace in self._chunks

    def __len__(self) -> int:
        return len(self._by_place) - len(self._free)

    def page(self, place: int, most: int) -> tuple[list[ShelvedChunk], int]:
        """Chunks from a place on, of at most `most` places, and the place to go on at; at the end
        that is `ALL_READ`. A walk meets each chunk that stays once.
        """
        end = place + most
        found = [each for each in self._by_place[place:end] if each is not None]
        return found, end if end < len(self._by_place) else ALL_READ

    # Files

    @property
    def num_files(self) -> int:
        """Files that are listed."""
        return len(self._files)

    @property
    def used_bytes(self) -> int:
        """Of all files that are listed."""
        return self._tenant_bytes.total()

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of tenants' files."""
        return {tenant: count for tenant, count in self._tenant_bytes.items() if tenant and count}

    def add(
        self,
        name: str,
        num_bytes: int,
        namespace: Namespace,
        chunks: Iterable[DiskChunk],
        tenant: str = "",
    ) -> None:
        """A tenant's file is whole and on the disk. Of two chunks of a name the later one stays."""
        assert name not in self._files, name
        file = self._files[name] = DiskFile(name, num_bytes, tenant)
        self._tenant_bytes[tenant] += num_bytes
        for chunk in chunks:
            self._put(namespace, chunk, file)
        if not file.live:
            self._empty.add(name)

    def _put(self, namespace: Namespace, chunk: DiskChunk, file: DiskFile) -> None:
        """A chunk is in a file; the same again changes nothing in the listing."""
        kept, before = self.find(namespace, chunk.key), None
        if kept is None:
            place = self._free.pop() if self._free else len(self._by_place)
            kept = ShelvedChunk(namespace, chunk.key, chunk, file, place)
            self._by_place[place : place + 1] = [kept]
            self._chunks.setdefault(namespace, {})[chunk.key] = kept
        else:
            before = kept.chunk
            self._take_out(kept)
            kept.chunk, kept.file = chunk, file
        file.live[kept] = None
        if before is None or _facts(before) != _facts(chunk):
            self._listing.changed(kept, Reason.STORED)

    def _take_out(self, kept: ShelvedChunk) -> None:
        """A chunk is not in its file any more."""
        del kept.file.live[kept]
        if not kept.file.live:
            self._empty.add(kept.file.name)

    def remove(self, namespace: Namespace, key: Key, reason: Reason) -> None:
        """A chunk is not on the disk any more; nothing if it was not."""
        chunks = self._chunks.get(namespace, {})
        kept = chunks.pop(key, None)
        if kept is None:
            return
        if not chunks:
            del self._chunks[namespace]
        self._take_out(kept)
        self._by_place[kept.place] = None
        self._free.append(kept.place)
        self._listing.changed(kept, reason)

    def damaged(self, namespace: Namespace, chunk: DiskChunk) -> None:
        """That very copy is damaged."""
        kept = self.find(namespace, chunk.key)
        if kept is not None and kept.chunk is chunk:
            self.remove(namespace, chunk.key, Reason.DAMAGED)

    def clear(self) -> None:
        """Remove the chunks that are void."""
        known = [each for each in self._by_place if each is not None]
        for kept in known:
            if self._floors.is_void(kept.namespace, kept.chunk.stamp):
                self.remove(kept.namespace, kept.key, Reason.CLEARED)

    def was_read(self, name: str) -> None:
        """A chunk of a file came back: that is worth keeping."""
        if (file := self._files.get(name)) is not None:
            file.was_read = True

    def drop_file(self, name: str, reason: Reason = Reason.EVICTED) -> None:
        """A file is gone, with all chunks in it; nothing if it is not listed."""
        file = self._files.get(name)
        if file is None:
            return
        for kept in list(file.live):
            self.remove(kept.namespace, kept.key, reason)
        del self._files[name]
        self._tenant_bytes[file.tenant] -= file.num_bytes
        self._empty.discard(name)

    def take_empty(self) -> list[str]:
        """Forget the files that no chunk is left in; the caller deletes them."""
        empty = sorted(self._empty)
        for name in empty:
            self.drop_file(name)
        return empty

    def can_hold(self, num_bytes: int, tenant: str = "") -> bool:
        """Whether a file of that size fits, once others have gone."""
        share = self.shares.get(self._holder_of(tenant), NO_SHARE)
        return num_bytes <= share.most * self.most_bytes

    def give_way(self, num_bytes: int, tenant: str = "") -> list[str]:
        """Forget files until `num_bytes` more of a tenant fit; the caller deletes them.

        Nothing is forgotten for what can't fit at all: ask `can_hold` first.
        """
        gone: list[str] = []
        while self._is_over(tenant, num_bytes):
            gone.append(self._drop_oldest(self._holder_of(tenant)))
        while self._files and self.used_bytes + num_bytes > self.most_bytes:
            self.is_full = True
            gone.append(self._drop_oldest(self._next_holder(tenant, num_bytes)))
        return gone

    def _is_over(self, tenant: str, num_bytes: int) -> bool:
        """Whether a tenant that has files would have more than its greatest share."""
        holder = self._holder_of(tenant)
        if holder not in self.shares:
            return False
        used = self._used_by(holder)
        return used > 0 and used + num_bytes > self.shares[holder].most * self.most_bytes

    def _holder_of(self, tenant: str) -> str:
        """Whose share a tenant's files count to."""
        return tenant if tenant in self.shares else NOBODY

    def _used_by(self, holder: str) -> int:
        if holder != NOBODY:
            return self._tenant_bytes[holder]
        own = (self._tenant_bytes[each] for each in self.shares if each != NOBODY)
        return self.used_bytes - sum(own)

    def _next_holder(self, tenant: str, num_bytes: int) -> str:
        """Who gives up a file for one of a tenant; there is a file."""
        writer = self._holder_of(tenant)
        holdings = [
            shareholder(
                holder,
                self._used_by(holder) + num_bytes * (holder == writer),
                self.shares.get(holder, NO_SHARE),
                self.most_bytes,
                1,
            )
            for holder in sorted({NOBODY, *self.shares})
            if self._used_by(holder)
        ]
        (first,) = to_give_up(holdings, max(1, num_bytes), 1, may_go_below=True)
        return first

    def _drop_oldest(self, holder: str) -> str:
        """Forget the file that goes first of a holder of a share; there is one."""
        files = [f for f in self._files.values() if self._holder_of(f.tenant) == holder]
        first = files[0]
        for file in files:
            if not file.was_read:
                first = file
                break
            file.was_read = False
            self._files.move_to_end(file.name)
        self.drop_file(first.name)
        return first.name

    # What the disk writes

    def next_to_write(self, most: int) -> list[ChunkRecord]:
        """Up to `most` of the chunks that go next and are not on the disk, and what goes along with
        them, each with a reader; `end_write` is for each.
        """
        now = self._listing.number, self._room.num_uses
        if self._done_at == now:
            return []
        found = list(islice(filter(self._is_wanted, self._going()), most))
        if len(found) < most:
            self._done_at = now
        found += filter(self._is_wanted, self._room.companions_of(found))
        return self._begin(found)

    def _is_wanted(self, record: ChunkRecord) -> bool:
        if record.standing is Standing.SPARE or record.is_written or record in self._writing:
            return False
        return bool(record.hits or not self.is_full) and self._is_unwritten(record)

    def _going(self) -> list[ChunkRecord]:
        """The reserve, once less room than that is free."""
        count, used = self._room.num_entered, self._room.all_used
        if not count:
            return []
        pool_bytes = self._places.geometry.pool_bytes
        reserved = min(pool_bytes // RESERVED_PART, used * RESERVE // count)
        if pool_bytes - used >= reserved:
            return []
        return self._room.next_to_go(count * reserved // used)

    def unwritten(self, place: int, most: int) -> tuple[list[ChunkRecord], int]:
        """READY chunks that are not on the disk, of at most `most` slots from a place on, and the
        place to go on at, as in `Places.records_from`.
        """
        records, following = self._places.records_from(place, most)
        return [each for each in records if self._is_unwritten(each)], following

    def write_all(self, place: int, most: int) -> tuple[list[ChunkRecord], int]:
        """`unwritten` but for what is being written, each with a reader; `end_write` ends each."""
        records, following = self.unwritten(place, most)
        return self._begin([each for each in records if each not in self._writing]), following

    def _begin(self, records: list[ChunkRecord]) -> list[ChunkRecord]:
        for record in records:
            record.readers += 1
            self._writing[record] = False
        return records

    def _is_unwritten(self, record: ChunkRecord) -> bool:
        if record.state is not ChunkState.READY:
            return False
        kept = self.find(record.namespace, record.key)
        return (
            kept is None
            or not kept.chunk.blocks.has(record.blocks)
            or self._floors.is_older(kept.chunk.stamp, record.stamp)
        )

    def left(self, record: ChunkRecord) -> None:
        """A READY chunk has gone, and nothing is wrong with it."""
        if record in self._writing:
            self._writing[record] = True

    def end_write(self, record: ChunkRecord, *, is_written: bool) -> bool:
        """A write has ended, long after its reader; returns whether the copy on the disk counts.

        What was not written is tried again.
        """
        has_left = self._writing.pop(record)
        if not is_written:
            self._done_at = (-1, -1)
            return False
        record.is_written = True
        is_good = has_left or record.state is ChunkState.READY
        return is_good and not self._floors.is_void(record.namespace, record.stamp)

    def refuse(self, record: ChunkRecord) -> None:
        """A chunk that was to be written has no place on the disk: it is not tried again."""
        del self._writing[record]
        record.is_written = True

    def check(self) -> None:
        """Assert the invariants; for tests."""
        placed = {each.place: each for each in self._by_place if each is not None}
        known = [each for chunks in self._chunks.values() for each in chunks.values()]
        assert len(known) == len(placed) == len(self)
        for namespace, chunks in self._chunks.items():
            assert chunks, namespace
            for key, chunk in chunks.items():
                assert (chunk.namespace, chunk.key) == (namespace, key), chunk
                assert placed[chunk.place] is chunk, chunk
        assert not {each.place for each in known}.intersection(self._free)
        by_tenant: Counter[str] = Counter()
        for file in self._files.values():
            by_tenant[file.tenant] += file.num_bytes
        assert +by_tenant == +self._tenant_bytes, (by_tenant, self._tenant_bytes)
        live = [each for file in self._files.values() for each in file.live]
        assert set(live) == set(known)
        for each in live:
            assert self._files[each.file.name] is each.file, each
            assert each in each.file.live, each
        empty = {name for name, file in self._files.items() if not file.live}
        assert empty == self._empty, (empty, self._empty)


def _facts(chunk: DiskChunk) -> tuple[Blocks, Stamp, int]:
    """What readers of the listing are told of a chunk, in whatever file it is."""
    return chunk.blocks, chunk.stamp, chunk.num_bytes
