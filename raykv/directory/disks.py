"""Which chunks are on the nodes' disks, as the directory knows it, and what goes there next.

            demote                 take (a node's news)            take, drop, lost, clear
  (in RAM) ────────► to be written ─────────────────────► on disk ───────────────────────► (gone)

What a pool gives up is offered to the disk of its node: its bytes stay in their slot until that is
stored into, and the NodeActor reads them from there if it is in time. Nobody waits for it.

Invariants:
1. A chunk of a disk that is known is listed under its name and under its place, or under neither,
   unless its namespace was cleared a moment ago.
2. A disk is known at the numbers of one listing, in order and without a gap.
3. To lose a disk, or to clear a namespace, takes the same time however many chunks are there: what
   is left of them is not found any more, and goes away some at a time.
4. `places` of a disk are in order, each once, and has those of all its `names`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from raykv.base.clearings import Clearings
from raykv.base.ids import Epoch, Generation, Key, Namespace, NodeId
from raykv.directory.table.protocol import Changes, Name
from raykv.protocol.columns import LostReplicas, Replicas, Source, SourceKind, numbered
from raykv.protocol.node import (
    Demotions,
    DiskNews,
    DiskOrder,
    DiskStats,
    NodeReport,
)

MAX_DEMOTED = 4096
"""Chunks of a node that wait to be offered to its disk; beyond it the oldest are lost."""

MAX_ORDERED = 512
"""Such chunks in one answer: about 40 KiB."""

MAX_SWEPT = 4096
"""Entries of what is gone that one report takes away: 2 to 4 ms."""

MAX_STALE = 1024
"""Places that are listed and gone, beside as many as are there."""


@dataclass(frozen=True, slots=True)
class OnDisk:
    """A chunk on a node's disk; `life` is that of the disk, of all that were ever known.

    `since`: when it was reported to the directory.
    """

    node_id: NodeId
    place: int
    generation: Generation
    life: int
    num_bytes: int
    since: float


@dataclass(frozen=True, slots=True)
class DiskStretch:
    """Chunks among `length` places of a disk, in their order, and the place at which to go on;
    None: there are no more.
    """

    chunks: list[tuple[Name, OnDisk]]
    length: int
    following: int | None


class _Demoted(NamedTuple):
    """A chunk that a pool has given up; `tenant`: whose it was, by label, if that has a quota."""

    namespace: Namespace
    key: Key
    slot: int
    generation: int
    tenant: str


@dataclass(slots=True)
class _Disk:
    """The disk of a NodeActor in one of its lives. `names` by place; `places` may name some that
    are gone.

    `num_demoted` counts all that ever waited in `demoted`.
    """

    epoch: Epoch
    listing: int
    life: int
    heard: int = 0
    names: dict[int, Name] = field(default_factory=dict)
    places: list[int] = field(default_factory=list)
    demoted: deque[_Demoted] = field(default_factory=lambda: deque(maxlen=MAX_DEMOTED))
    num_demoted: int = 0
    stats: DiskStats = field(default_factory=DiskStats)

    def add(self, place: int, name: Name) -> None:
        """A chunk came to a place, which is above all earlier ones if the node is honest."""
        self.names[place] = name
        at = len(self.places)
        if self.places and place <= self.places[-1]:
            at = bisect_left(self.places, place)
        if self.places[at : at + 1] != [place]:
            self.places.insert(at, place)

    def forget_stale(self) -> None:
        """Keep `places` short; takes as long as there are chunks, when so many are gone."""
        if len(self.places) > 2 * len(self.names) + MAX_STALE:
            self.places = [place for place in self.places if place in self.names]


class Disks:
    """See the module's docstring.

    Args:
        label_of: the label of a tenant that has a quota, by number; else empty.
        shares: what tenants are guaranteed of each disk, and the most, by label.
    """

    def __init__(
        self,
        label_of: Callable[[int], str] = lambda _number: "",
        shares: Callable[[], Mapping[str, tuple[float, float]]] = dict,
    ) -> None:
        self._label_of = label_of
        self._shares = shares
        self._disks: dict[NodeId, _Disk] = {}
        self._chunks: dict[Namespace, dict[Key, tuple[OnDisk, ...]]] = {}
        self._lives = 0
        # What is left of disks that are gone, and of namespaces that were cleared.
        self._leaving: deque[_Disk] = deque()
        self._cleared: deque[dict[Key, tuple[OnDisk, ...]]] = deque()

    # Nodes

    def take(self, report: NodeReport, cleared: Clearings, now: float = 0.0) -> DiskOrder:
        """Take in what changed on a node's disk; says how far that is known, and what to write.

        News that do not follow what is known are not taken in: they will be sent again.
        """
        self._sweep(MAX_SWEPT)
        node_id, epoch, news = NodeId(report.node_id), Epoch(report.epoch), report.disk
        disk = self._disks.get(node_id)
        if disk is None or (disk.epoch, disk.listing) != (epoch, news.listing):
            self.lost(node_id)
            if not news.listing:
                return DiskOrder()
            self._lives += 1
            disk = self._disks[node_id] = _Disk(epoch, news.listing, self._lives)
        disk.stats = report.stats.disk
        if news.after == disk.heard:
            self._apply(node_id, disk, news, cleared, now)
        disk.forget_stale()
        return DiskOrder(disk.listing, disk.heard, self._demotions(disk), dict(self._shares()))

    def num_demoted(self, node_id: NodeId) -> int:
        """How many chunks were ever to be offered to a node's disk, as it is known now."""
        disk = self._disks.get(node_id)
        return 0 if disk is None else disk.num_demoted

    def take_demoted(self, node_id: NodeId, since: int) -> Demotions:
        """What waits to be offered to a node's disk since `num_demoted` was that, for somebody who
        carries it there before the next report. All of it, be it as much as a slab of small chunks:
        what is left behind is overwritten.
        """
        disk = self._disks.get(node_id)
        if disk is None:
            return Demotions()
        count = min(len(disk.demoted), disk.num_demoted - since)
        return _columns([disk.demoted.pop() for _ in range(count)][::-1])

    def _apply(
        self,
        node_id: NodeId,
        disk: _Disk,
        news: DiskNews,
        cleared: Clearings,
        now: float,
    ) -> None:
        came = news.came
        # Most chunks are of one size: one number for all of them.
        sizes = {size: size for size in came.slot_bytes}
        columns = zip(
            came.namespace_index,
            came.keys,
            came.places,
            came.generations,
            came.slot_bytes,
            strict=True,
        )
        for index, key, place, generation, size in columns:
            namespace = Namespace(came.namespaces[index])
            if place in disk.names or cleared.cover(namespace, generation):
                continue
            disk.add(place, (namespace, Key(key)))
            keys = self._chunks.setdefault(namespace, {})
            at = Generation(generation)
            found = OnDisk(node_id, place, at, disk.life, sizes[size], now)
            keys[Key(key)] = (*keys.get(Key(key), ()), found)
        for place in news.gone:
            self._drop(disk, place)
        disk.heard = max(disk.heard, news.upto)

    def lost(self, node_id: NodeId) -> None:
        """A node is gone, or what was known of its disk is worth nothing."""
        disk = self._disks.pop(node_id, None)
        if disk is not None:
            self._leaving.append(disk)

    def _sweep(self, most: int) -> None:
        """Take away so many entries of what is gone."""
        while self._leaving and most > 0:
            disk = self._leaving[0]
            if not disk.names:
                self._leaving.popleft()
                continue
            # The last one: to look for the first passes by all that have gone.
            self._forget(disk, *disk.names.popitem())
            most -= 1
        while self._cleared and most > 0:
            keys = self._cleared[0]
            if not keys:
                self._cleared.popleft()
                continue
            _, found = keys.popitem()
            for each in found:
                if self._is_there(each):
                    self._disks[each.node_id].names.pop(each.place, None)
            most -= 1

    def _is_there(self, found: OnDisk) -> bool:
        disk = self._disks.get(found.node_id)
        return disk is not None and disk.life == found.life

    def _drop(self, disk: _Disk, place: int) -> None:
        name = disk.names.pop(place, None)
        if name is not None:
            self._forget(disk, place, name)

    def _forget(self, disk: _Disk, place: int, name: Name) -> None:
        """A chunk is at no place of a disk any more: nor is it under its name."""
        keys = self._chunks.get(name[0], {})
        known = keys.get(name[1])
        if known is None:
            return
        left = tuple(each for each in known if (each.life, each.place) != (disk.life, place))
        if left:
            keys[name[1]] = left
        else:
            del keys[name[1]]
            if not keys:
                del self._chunks[name[0]]

    # What is given up

    def is_open(self, node_id: NodeId) -> bool:
        """Whether a node has a disk that can be written."""
        disk = self._disks.get(node_id)
        return disk is not None and bool(disk.stats.path) and not disk.stats.problem

    def demote(self, node_id: NodeId, evicted: Changes, wanted: Iterable[int]) -> None:
        """A pool has given up chunks; those at `wanted` are nowhere else in RAM.

        They are offered to the node's disk, which is open, if they are not there already; if it is
        full, only what was used.
        """
        disk = self._disks[node_id]
        known = self._chunks.get(evicted.namespace, {})
        keys = list(evicted.keys)
        for at in wanted:
            key = Key(keys[at])
            is_there = any(each.life == disk.life for each in known.get(key, ()))
            if not is_there and (evicted.hits[at] or not disk.stats.is_full):
                handle = evicted.slots[at], evicted.generations[at]
                tenant = self._label_of(evicted.owners[at]) if evicted.owners else ""
                disk.demoted.append(_Demoted(evicted.namespace, key, *handle, tenant))
                disk.num_demoted += 1

    def _demotions(self, disk: _Disk) -> Demotions:
        count = min(len(disk.demoted), disk.stats.room, MAX_ORDERED)
        return _columns([disk.demoted.popleft() for _ in range(count)])

    # Questions

    def find(self, namespace: Namespace, key: Key) -> tuple[OnDisk, ...]:
        """The disks that have a chunk."""
        known = self._chunks.get(namespace, {}).get(key, ())
        return tuple(each for each in known if self._is_there(each)) if known else ()

    def with_sources(
        self, replicas: Replicas, wanted: Iterable[tuple[int, Name]], own: NodeId, most: int
    ) -> Replicas:
        """Replicas, and rows for the disks that have chunks, the node's own first.

        `wanted` has positions and names of keys; rows come behind those of pools.
        """
        rows: list[tuple[int, OnDisk]] = []
        for position, name in wanted:
            found = sorted(self.find(*name), key=lambda each: each.node_id != own)[:most]
            rows += [(position, each) for each in found]
        if not rows:
            return replicas
        sources, node_epochs = list(replicas.sources), list(replicas.node_epochs)
        index = numbered(sources, [Source(each.node_id, SourceKind.DISK) for _, each in rows])
        new = sources[len(node_epochs) :]
        node_epochs += [int(self._disks[NodeId(source.node_id)].epoch) for source in new]
        return Replicas(
            sources,
            node_epochs,
            replicas.key_index + [position for position, _ in rows],
            replicas.source_index + index,
            replicas.slots + [each.place for _, each in rows],
            replicas.generations + [each.generation for _, each in rows],
            replicas.pending,
        )

    def stretch(
        self, node_id: NodeId, first: int, most: int, namespace: Namespace | None
    ) -> DiskStretch:
        """The chunks at the next places of a node's disk, from `first` on; `most` places, which
        may be gone, or of another namespace.
        """
        disk = self._disks.get(node_id)
        if disk is None:
            return DiskStretch([], 0, None)
        at = bisect_left(disk.places, first)
        part = disk.places[at : at + most]
        named = [(place, disk.names[place]) for place in part if place in disk.names]
        chunks = [
            (name, each)
            for place, name in named
            if namespace in (None, name[0])
            for each in self.find(*name)
            if (each.life, each.place) == (disk.life, place)
        ]
        end = at + len(part)
        following = disk.places[end] if end < len(disk.places) else None
        return DiskStretch(chunks, len(part), following)

    def tenant_bytes(self) -> Counter[str]:
        """Bytes of files on all disks, by tenant."""
        found: Counter[str] = Counter()
        for disk in self._disks.values():
            found.update(disk.stats.tenant_bytes)
        return found

    @property
    def num_disks(self) -> int:
        """The number of known disks: no chunk is on more."""
        return len(self._disks)

    def holds_any(self, namespace: Namespace) -> bool:
        """Whether a chunk of the namespace is on any disk, or was a moment ago."""
        return namespace in self._chunks

    def counts(self) -> dict[str, int]:
        """Different chunks by namespace; those of a disk that has just gone may count a while."""
        return {str(name): len(keys) for name, keys in self._chunks.items()}

    def namespaces(self) -> set[Namespace]:
        """The namespaces that have chunks on any disk, or had some a moment ago."""
        return set(self._chunks)

    # Losses

    def drop_lost(self, namespace: Namespace, lost: LostReplicas) -> None:
        """Forget what disks said they do not have."""
        columns = zip(lost.sources, lost.keys, lost.generations, strict=True)
        for source, key, generation in columns:
            node_id = NodeId(source.node_id)
            if not source.is_disk:
                continue
            for each in self.find(namespace, Key(key)):
                if (each.node_id, each.generation) == (node_id, generation):
                    self._drop(self._disks[node_id], each.place)

    def clear(self, namespace: Namespace) -> None:
        """All chunks of the namespace, and what waits to be written of it, are worth nothing."""
        keys = self._chunks.pop(namespace, None)
        if keys:
            self._cleared.append(keys)
        for disk in self._disks.values():
            kept = [row for row in disk.demoted if row.namespace != namespace]
            disk.demoted.clear()
            disk.demoted.extend(kept)

    def drop_cleared(self, cleared: Clearings) -> None:
        """Forget every chunk that is void; takes as long as there are chunks."""
        for disk in self._disks.values():
            for place, name in list(disk.names.items()):
                found = self._chunks.get(name[0], {}).get(name[1], ())
                if any(
                    (each.life, each.place) == (disk.life, place)
                    and cleared.cover(name[0], each.generation)
                    for each in found
                ):
                    self._drop(disk, place)

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        by_name = {
            (each.node_id, each.place, (namespace, key))
            for namespace, keys in self._chunks.items()
            for key, found in keys.items()
            for each in found
            if self._is_there(each)
        }
        cleared = {
            (each.node_id, each.place)
            for keys in self._cleared
            for found in keys.values()
            for each in found
            if self._is_there(each)
        }
        by_place = {
            (node_id, place, name)
            for node_id, disk in self._disks.items()
            for place, name in disk.names.items()
            if (node_id, place) not in cleared
        }
        assert by_name == by_place, by_name ^ by_place
        for disk in self._disks.values():
            assert disk.places == sorted(set(disk.places)), disk.places
            assert disk.names.keys() <= set(disk.places), disk.names.keys() - set(disk.places)


def _columns(rows: Sequence[_Demoted]) -> Demotions:
    namespaces: list[str] = []
    namespace_index = numbered(namespaces, [row.namespace for row in rows])
    tenants, tenant_index = [""], []
    if any(row.tenant for row in rows):
        tenant_index = numbered(tenants, [row.tenant for row in rows])
    return Demotions(
        namespaces=namespaces,
        namespace_index=namespace_index,
        keys=[row.key for row in rows],
        slots=[row.slot for row in rows],
        generations=[row.generation for row in rows],
        tenants=tenants if tenant_index else [],
        tenant_index=tenant_index,
    )
