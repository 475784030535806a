"""What is on one node's disk: files of chunks, and which of them goes first.

                 add                     give_way, damaged, clear
    (written) ────────► listed ────────────────────────────────────► to be deleted
                          │  ▲ give_way: it was read since it was last looked at
                          └──┘

Files are written once. When there is no room, the oldest file goes, unless a chunk of it was read
since the last time: then it has another round ("second chance"). Where tenants have shares, a file
is of one tenant, and `raykv/base/shares.py` says whose oldest file goes.

The node's shelf knows in which file each chunk is; it hears of each one that comes or goes.

Invariants:
1. The shelf has a name if and only if it lives in a file that is listed, and in that one.
2. `used_bytes` is the sum of the listed files' sizes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from raykv.base.ids import Namespace
from raykv.base.shares import NO_SHARE, Share, shareholder
from raykv.node.pool.claims import Name
from raykv.node.pool.floors import Floors
from raykv.node.pool.shelf import DiskChunk, Shelf
from raykv.protocol.listing import Reason


@dataclass(slots=True)
class DiskFile:
    """A file that is listed. `live` has the chunks that are not superseded or gone."""

    name: str
    num_bytes: int
    tenant: str = ""
    was_read: bool = False
    live: set[Name] = field(default_factory=set)


class DiskIndex:
    """See the module's docstring. Threads must take turns, under the lock of the pool's owner.

    Args:
        most_bytes: of all files together.
        shelf: of the node's pool.
    """

    def __init__(self, most_bytes: int, shelf: Shelf) -> None:
        self.most_bytes = most_bytes
        self.used_bytes = 0
        self._shelf = shelf
        # In the order in which they have to go.
        self._files: OrderedDict[str, DiskFile] = OrderedDict()
        # Of files, by tenant.
        self._tenant_bytes: Counter[str] = Counter()
        # By tenant, of all others under ""; empty: nobody has a share.
        self.shares: Mapping[str, Share] = {}
        # Files that no chunk is left in.
        self._empty: set[str] = set()

    # Looking

    @property
    def num_files(self) -> int:
        """Files that are listed."""
        return len(self._files)

    @property
    def tenant_bytes(self) -> dict[str, int]:
        """Bytes of tenants' files."""
        return {tenant: count for tenant, count in self._tenant_bytes.items() if tenant and count}

    def was_read(self, name: str) -> None:
        """A chunk of a file came back: that is worth keeping."""
        if (file := self._files.get(name)) is not None:
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
        """A tenant's file is whole and on the disk. Of two chunks of a name the later one stays."""
        assert name not in self._files, name
        file = DiskFile(name, num_bytes, tenant)
        self._files[name] = file
        self.used_bytes += num_bytes
        self._tenant_bytes[tenant] += num_bytes
        for chunk in chunks:
            known = namespace, chunk.key
            self._take(known)
            file.live.add(known)
            self._shelf.put(namespace, chunk, name)
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
            self._shelf.is_full = True
            gone.append(self.drop_oldest(self._next_holder(tenant, num_bytes)))
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
        return tenant if tenant in self.shares else ""

    def _used_by(self, holder: str) -> int:
        if holder:
            return self._tenant_bytes[holder]
        return self.used_bytes - sum(self._tenant_bytes[each] for each in self.shares if each)

    def _next_holder(self, tenant: str, num_bytes: int) -> str:
        """Who gives up a file for one of a tenant; there is a file."""
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
        share = self.shares.get(self._holder_of(tenant), NO_SHARE)
        return num_bytes <= share.most * self.most_bytes

    def drop_oldest(self, holder: str = "") -> str:
        """Forget the file that goes first of a holder of a share, or of all without one; there is
        one.
        """
        files = self._files.items()
        names = [name for name, file in files if self._holder_of(file.tenant) == holder]
        first = names[0]
        for name in names:
            if not self._files[name].was_read:
                first = name
                break
            self._files[name].was_read = False
            self._files.move_to_end(name)
        self.drop_file(first)
        return first

    def drop_file(self, name: str, reason: Reason = Reason.EVICTED) -> None:
        """A file is gone, with all chunks in it; nothing if it is not listed."""
        file = self._files.get(name)
        if file is None:
            return
        for chunk_name in list(file.live):
            self._forget(chunk_name, reason)
        del self._files[name]
        self.used_bytes -= file.num_bytes
        self._tenant_bytes[file.tenant] -= file.num_bytes
        self._empty.discard(name)

    def drop(self, namespace: Namespace, chunk: DiskChunk) -> None:
        """That very copy is damaged; its file stays, unless it was the last one in it."""
        kept = self._shelf.find(namespace, chunk.key)
        if kept is not None and kept.chunk is chunk:
            self._forget((namespace, chunk.key), Reason.DAMAGED)

    def clear(self, floors: Floors) -> None:
        """Forget the chunks that are void."""
        for name in [name for file in self._files.values() for name in file.live]:
            kept = self._shelf.find(*name)
            if kept is not None and floors.is_void(name[0], kept.chunk.stamp):
                self._forget(name, Reason.CLEARED)

    def take_empty(self) -> list[str]:
        """Forget the files that no chunk is left in; the caller deletes them."""
        empty, self._empty = sorted(self._empty), set()
        for name in empty:
            self.drop_file(name)
        return empty

    def _forget(self, name: Name, reason: Reason) -> None:
        self._take(name)
        self._shelf.remove(*name, reason)

    def _take(self, name: Name) -> None:
        """A chunk is not in its file any more, if it is in one."""
        kept = self._shelf.find(*name)
        if kept is None:
            return
        file = self._files[kept.file]
        file.live.remove(name)
        if not file.live:
            self._empty.add(file.name)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self.used_bytes == sum(file.num_bytes for file in self._files.values())
        by_tenant: Counter[str] = Counter()
        for file in self._files.values():
            by_tenant[file.tenant] += file.num_bytes
        assert +by_tenant == +self._tenant_bytes, (by_tenant, self._tenant_bytes)
        live = [(name, file.name) for file in self._files.values() for name in file.live]
        assert len(self._shelf) == len(live)
        for name, file_name in live:
            kept = self._shelf.find(*name)
            assert kept is not None, name
            assert kept.file == file_name, (kept, file_name)
        empty = {name for name, file in self._files.items() if not file.live}
        assert empty == self._empty, (empty, self._empty)
