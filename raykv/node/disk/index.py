"""What is on one node's disk: files of chunks, which of them goes first, and what the directory
knows of it.

                 add                     give_way, damaged, clear
    (written) ────────► listed ────────────────────────────────────► to be deleted
                          │  ▲ give_way: it was read since it was last looked at
                          └──┘

Files are written once. When there is no room, the oldest file goes, unless a chunk of it was read
since the last time: then it has another round ("second chance"). Where tenants have shares, a file
is of one tenant, and `raykv/base/shares.py` says whose oldest file goes.

Every chunk that comes or goes is a numbered change. The directory says up to which number it knows;
what went before it was reported is not reported at all.

Invariants:
1. A name has one entry at most, in a file that is listed.
2. `used_bytes` is the sum of the listed files' sizes.
3. The directory knows each entry or has yet to learn of it; it has yet to learn that a place went
   if it may know that it came.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from raykv.base.clearings import Clearings
from raykv.base.ids import ALL_BLOCKS, NO_GENERATION, Blocks, Generation, Key, Namespace
from raykv.base.shares import NO_SHARE, Share, shareholder
from raykv.protocol.columns import numbered
from raykv.protocol.node import DiskChunks, DiskNews

MAX_GONE = 65_536
"""Places that went and are not reported yet; beyond it the listing begins anew."""

MAX_CHANGES = 256
"""Changes in one page of news, about 20 KiB: it goes with a page of what the pool holds."""

Name = tuple[Namespace, Key]


@dataclass(frozen=True, slots=True)
class DiskChunk:
    """A chunk in a file: its bytes are at [offset, offset + num_bytes).

    `checksum` is XXH3, 64 bit; `generation` is that of the slot that it was written from. `blocks`
    are those that were stored there, the others are zero.
    """

    key: Key
    generation: Generation
    offset: int
    num_bytes: int
    checksum: int
    blocks: Blocks = ALL_BLOCKS


@dataclass(slots=True)
class DiskFile:
    """A file that is listed. `live` has the places of chunks that are not superseded or gone."""

    name: str
    num_bytes: int
    tenant: str = ""
    was_read: bool = False
    live: dict[int, Name] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DiskEntry:
    """Where a chunk is on the disk."""

    place: int
    file: str
    chunk: DiskChunk


class DiskIndex:
    """See the module's docstring. Threads must take turns.

    Args:
        most_bytes: of all files together.
        listing: a number that no earlier life has had.
    """

    def __init__(self, most_bytes: int, listing: int) -> None:
        self.most_bytes = most_bytes
        self.listing = listing
        self.used_bytes = 0
        self.highest_generation = NO_GENERATION
        # Whether files had to go for others.
        self.is_full = False
        # In the order in which they have to go.
        self._files: OrderedDict[str, DiskFile] = OrderedDict()
        # Of files, by tenant.
        self._tenant_bytes: Counter[str] = Counter()
        # By tenant, of all others under ""; empty: nobody has a share.
        self.shares: Mapping[str, Share] = {}
        self._entries: dict[Name, DiskEntry] = {}
        # Files that no chunk is left in.
        self._empty: set[str] = set()
        # Changes that the directory does not know of, by number: a name that came, a place that
        # went.
        self._changes: OrderedDict[int, Name | int] = OrderedDict()
        self._num_gone = 0
        self._last = 0
        # Numbers of this listing that were sent, and that have arrived.
        self._told = 0
        self._heard = 0

    # Looking

    @property
    def num_files(self) -> int:
        """Files that are listed."""
        return len(self._files)

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of tenants' files."""
        return {tenant: count for tenant, count in self._tenant_bytes.items() if tenant and count}

    def __len__(self) -> int:
        """Chunks."""
        return len(self._entries)

    def find(self, namespace: Namespace, key: Key) -> DiskEntry | None:
        """Where a chunk is."""
        return self._entries.get((namespace, key))

    def was_read(self, entry: DiskEntry) -> None:
        """A chunk came back: its file is worth keeping."""
        if (file := self._files.get(entry.file)) is not None:
            file.was_read = True

    # Changes

    def add(
        self,
        name: str,
        num_bytes: int,
        namespace: Namespace,
        chunks: Iterable[DiskChunk],
        tenant: str = "",
    ) -> None:
        """A tenant's file is whole and on the disk. Of two chunks of a name the later generation
        stays.
        """
        assert name not in self._files, name
        file = DiskFile(name, num_bytes, tenant)
        self._files[name] = file
        self.used_bytes += num_bytes
        self._tenant_bytes[tenant] += num_bytes
        for chunk in chunks:
            self.highest_generation = max(self.highest_generation, chunk.generation)
            known = self._entries.get((namespace, chunk.key))
            if known is not None and known.chunk.generation >= chunk.generation:
                continue
            if known is not None:
                self._forget((namespace, chunk.key))
            self._last += 1
            file.live[self._last] = (namespace, chunk.key)
            self._entries[namespace, chunk.key] = DiskEntry(self._last, name, chunk)
            self._changes[self._last] = (namespace, chunk.key)
        if not file.live:
            self._empty.add(name)

    def give_way(self, num_bytes: int, tenant: str = "") -> list[str]:
        """Forget files until `num_bytes` more of a tenant fit; the caller deletes them.

        Nothing is forgotten for what can't fit at all: ask `can_hold` first.
        """
        gone: list[str] = []
        while self._is_over(tenant, num_bytes):
            gone.append(self.drop_oldest(self._holder_of(tenant)))
        while self._files and self.used_bytes + num_bytes > self.most_bytes:
            self.is_full = True
            gone.append(self.drop_oldest(self._next_holder(tenant, num_bytes)))
        return gone

    def _is_over(self, tenant: str, num_bytes: int) -> bool:
        """Whether a tenant that has files would have more than its greatest share."""
        holder = self._holder_of(tenant)
        if holder is None or holder not in self.shares:
            return False
        used = self._used_by(holder)
        return used > 0 and used + num_bytes > self.shares[holder].most * self.most_bytes

    def _holder_of(self, tenant: str) -> str | None:
        """Whose share a tenant's files count to; None if there are no shares."""
        if not self.shares:
            return None
        return tenant if tenant in self.shares else ""

    def _used_by(self, holder: str) -> int:
        if holder:
            return self._tenant_bytes[holder]
        return self.used_bytes - sum(self._tenant_bytes[each] for each in self.shares if each)

    def _next_holder(self, tenant: str, num_bytes: int) -> str | None:
        """Who gives up a file for one of a tenant."""
        if not self.shares:
            return None
        writer = self._holder_of(tenant)
        able = [holder for holder in sorted({"", *self.shares}) if self._used_by(holder)]
        ranks = {}
        for holder in able:
            used = self._used_by(holder) + num_bytes * (holder == writer)
            share = self.shares.get(holder, NO_SHARE)
            ranks[holder] = shareholder(holder, used, share, self.most_bytes, 1).rank(num_bytes)
        return max(able, key=lambda holder: ranks[holder])

    def can_hold(self, num_bytes: int, tenant: str = "") -> bool:
        """Whether a file of that size fits, once others have gone."""
        share = self.shares.get(self._holder_of(tenant) or "", NO_SHARE)
        return num_bytes <= share.most * self.most_bytes

    def drop_oldest(self, holder: str | None = None) -> str:
        """Forget the file that goes first, of a holder of a share if one is named; there is one."""
        names = [
            name
            for name, file in self._files.items()
            if holder is None or self._holder_of(file.tenant) == holder
        ]
        first = names[0]
        for name in names:
            if not self._files[name].was_read:
                first = name
                break
            self._files[name].was_read = False
            self._files.move_to_end(name)
        self.drop_file(first)
        return first

    def drop_file(self, name: str) -> None:
        """A file is gone, with all chunks in it; nothing if it is not listed."""
        file = self._files.pop(name, None)
        if file is None:
            return
        self.used_bytes -= file.num_bytes
        self._tenant_bytes[file.tenant] -= file.num_bytes
        for chunk_name in list(file.live.values()):
            self._forget(chunk_name, file)
        self._empty.discard(name)

    def drop(self, entry: DiskEntry, namespace: Namespace) -> None:
        """A chunk is damaged, or not wanted; its file stays, unless it was the last one in it."""
        if self._entries.get((namespace, entry.chunk.key)) == entry:
            self._forget((namespace, entry.chunk.key))

    def clear(self, cleared: Clearings) -> None:
        """Forget the chunks that are void."""
        for name, entry in list(self._entries.items()):
            if cleared.cover(name[0], entry.chunk.generation):
                self._forget(name)

    def take_empty(self) -> list[str]:
        """Forget the files that no chunk is left in; the caller deletes them."""
        empty, self._empty = sorted(self._empty), set()
        for name in empty:
            self.drop_file(name)
        return empty

    def _forget(self, name: Name, file: DiskFile | None = None) -> None:
        entry = self._entries.pop(name)
        file = file or self._files[entry.file]
        del file.live[entry.place]
        if not file.live:
            self._empty.add(file.name)
        self._changes.pop(entry.place, None)
        if entry.place <= self._told:
            self._last += 1
            self._changes[self._last] = entry.place
            self._num_gone += 1
            if self._num_gone > MAX_GONE:
                # The directory has not answered for long: everything will be reported again.
                self.listing += 1
                self._tell_all()

    # News

    def heard(self, listing: int, number: int) -> None:
        """The directory has taken in all changes of a listing up to a number.

        It knows nothing of another listing: everything is reported.
        """
        if listing != self.listing or not self._heard <= number <= self._told:
            if self._told:
                self._tell_all()
            return
        self._heard = number
        while self._changes and (first := next(iter(self._changes))) <= number:
            self._num_gone -= isinstance(self._changes.pop(first), int)

    def _tell_all(self) -> None:
        self._told = self._heard = self._num_gone = 0
        places = sorted((entry.place, name) for name, entry in self._entries.items())
        self._changes = OrderedDict(places)

    def news(self, most: int = MAX_CHANGES) -> DiskNews:
        """The next changes for the directory; the same again until it has heard of them."""
        page = list(islice(self._changes.items(), most))
        is_last = len(page) == len(self._changes)
        names = [each for _, each in page if not isinstance(each, int)]
        came = [self._entries[each] for each in names]
        namespaces: list[str] = []
        namespace_index = numbered(namespaces, [namespace for namespace, _ in names])
        upto = page[-1][0] if page else self._heard
        self._told = max(self._told, upto)
        return DiskNews(
            listing=self.listing,
            after=self._heard,
            upto=upto,
            came=DiskChunks(
                namespaces=namespaces,
                namespace_index=namespace_index,
                keys=[entry.chunk.key for entry in came],
                places=[entry.place for entry in came],
                generations=[entry.chunk.generation for entry in came],
                slot_bytes=[entry.chunk.num_bytes for entry in came],
            ),
            gone=[each for _, each in page if isinstance(each, int)],
            is_last=is_last,
        )

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self.used_bytes == sum(file.num_bytes for file in self._files.values())
        by_tenant: Counter[str] = Counter()
        for file in self._files.values():
            by_tenant[file.tenant] += file.num_bytes
        assert +by_tenant == +self._tenant_bytes, (by_tenant, self._tenant_bytes)
        live = {
            name: (file.name, place)
            for file in self._files.values()
            for place, name in file.live.items()
        }
        entries = {name: (entry.file, entry.place) for name, entry in self._entries.items()}
        assert live == entries, (live, entries)
        empty = {name for name, file in self._files.items() if not file.live}
        assert empty == self._empty, (empty, self._empty)
        places = {entry.place for entry in self._entries.values()}
        came = {number for number, each in self._changes.items() if not isinstance(each, int)}
        assert came == {place for place in places if place > self._heard}, (came, places)
        assert len(self._changes) - len(came) == self._num_gone, self._num_gone
        assert list(self._changes) == sorted(self._changes), self._changes
