"""The directory as readers look into it: listings of chunks, and where the chunks of a prompt are.

Nothing is kept for a reader, nothing is changed or pinned, and a page looks at a bounded number of
slots, so that a reader never keeps engines waiting. A listing goes through the nodes in the order
of their ids, through each node's slots from the lowest on, and then through its disk, in the order
in which chunks came there.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest

from raykv.base.ids import EngineId, Key, Namespace, NodeId, Slot, group_of
from raykv.base.tenants import OTHERS
from raykv.directory.answers.prefixes import MAX_NODES_OF_A_KEY, prefix_page
from raykv.directory.answers.status import engine_status, node_status
from raykv.directory.disks import Disks, DiskStretch, OnDisk
from raykv.directory.members import Engine, Node
from raykv.directory.pins import Pins
from raykv.directory.table.protocol import ChunkTable, Name, Stretch, Uses
from raykv.protocol.columns import Source, SourceKind, numbered
from raykv.protocol.descriptions import ChunkGroup, parse_groups
from raykv.protocol.engine import AttachEngine
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.reader import (
    DISK,
    MAX_PAGE,
    RAM,
    ChunkPage,
    ChunkQuery,
    PrefixPage,
    PrefixQuery,
    SpacePage,
    WherePage,
    WhereQuery,
)
from raykv.protocol.status import ClusterStatus, NamespaceStatus

MAX_LOOKED_AT = 2048
"""Slots for one page: a few milliseconds."""

MAX_STRETCHES = 16
"""Slabs for one page: each costs something, however few slots it has."""

MAX_REPLICAS = 16_384
"""Rows of one answer to where chunks are."""

MAX_NAMESPACES = 256
"""Namespaces whose engines are remembered; the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class _Introduction:
    """What an engine has said about its namespace."""

    model: str
    slot_bytes: int
    traits: dict[str, str]
    groups: list[ChunkGroup]


class Catalog:
    """Answers people, routers and exports: where chunks and prompts are.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        engines: the same of engines.
        table: the chunks of all nodes.
        disks: the chunks on their disks.
        name_of: what people call the tenant of a number.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        engines: Mapping[EngineId, Engine],
        table: Callable[[], ChunkTable],
        disks: Disks,
        name_of: Callable[[int], str] = lambda _number: OTHERS,
    ) -> None:
        self._nodes = nodes
        self._engines = engines
        self._name_of = name_of
        self._table = table
        self._disks = disks
        self._introductions: OrderedDict[Namespace, _Introduction] = OrderedDict()

    def introduced(self, message: AttachEngine) -> None:
        """An engine has been attached: what it said of its namespace outlives it."""
        namespace = Namespace(message.namespace)
        size = max(message.slot_bytes.values(), default=0)
        try:
            groups = parse_groups(message.traits.get("chunks", ""))
        except ValueError:
            groups = []
        self._introductions[namespace] = _Introduction(message.model, size, message.traits, groups)
        self._introductions.move_to_end(namespace)
        if len(self._introductions) > MAX_NAMESPACES:
            self._introductions.popitem(last=False)

    def groups_of(self, namespace: Namespace) -> list[ChunkGroup]:
        """The KV groups of a namespace, as its engines have said; empty if they have not."""
        known = self._introductions.get(namespace)
        return [] if known is None else known.groups

    def slot_bytes_of(self, namespace: Namespace) -> int:
        """Of a chunk's slot, as its engines have said; 0 if they have not."""
        known = self._introductions.get(namespace)
        return 0 if known is None else known.slot_bytes

    # Sums

    def status(self, base: ClusterStatus, now: float, pins: Pins) -> ClusterStatus:
        """`base` with nodes, engines and namespaces."""
        return ClusterStatus(
            address=base.address,
            epoch=base.epoch,
            raykv_version=base.raykv_version,
            paused=base.paused,
            nodes=[node_status(node, now, pins) for node in self._nodes.values()],
            engines=[
                engine_status(engine, self._nodes.get(engine.node_id), now)
                for engine in self._engines.values()
            ],
            namespaces=self.counts(),
            spaces=self.namespaces(),
            disk_chunks=self._disks.counts(),
            waiting=base.waiting,
            tenants=base.tenants,
        )

    def counts(self) -> dict[str, int]:
        """Chunks by namespace, replicas counted each."""
        found: dict[str, int] = {}
        for node in self._nodes.values():
            for name, count in node.book.table.sizes().items():
                found[name] = found.get(name, 0) + count
        return found

    def namespaces(self) -> list[NamespaceStatus]:
        """Namespaces with chunks, even if only on disks, or with engines."""
        counts = self.counts()
        engines: dict[str, int] = {}
        for engine in self._engines.values():
            engines[engine.namespace] = engines.get(engine.namespace, 0) + 1
        return [
            self._status(Namespace(name), counts.get(name, 0), engines.get(name, 0))
            for name in sorted({*counts, *engines, *self._disks.namespaces()})
        ]

    def _status(self, name: Namespace, chunks: int, engines: int) -> NamespaceStatus:
        known = self._introductions.get(name)
        if known is None:
            return NamespaceStatus(name, chunks=chunks, engines=engines)
        return NamespaceStatus(
            name, known.model, chunks, chunks * known.slot_bytes, engines, known.traits
        )

    # Listings

    def page(self, query: ChunkQuery, now: float) -> ChunkPage:
        """The chunks that a query asks for, from where it goes on."""
        page = ChunkPage(PROTOCOL_VERSION)
        names = sorted(self._nodes) if not query.node_id else [NodeId(query.node_id)]
        at = bisect_left(names, query.from_node)
        is_disk, slot = query.tier == DISK, 0
        if names[at : at + 1] == [query.from_node]:
            is_disk, slot = query.from_disk or is_disk, query.from_slot
        left = MAX_LOOKED_AT
        for _ in range(MAX_STRETCHES):
            room = min(left, query.limit if query.order else query.limit - len(page.keys))
            is_full = query.order and len(page.keys) + query.limit > MAX_PAGE
            if at >= len(names) or room <= 0 or is_full:
                break
            most = left if query.order else room
            add = self._add_from_disk if is_disk else self._add_from_pool
            length, following = add(page, names[at], slot, most, query, now)
            left -= length
            if following is not None:
                slot = following
            elif is_disk or query.tier == RAM:
                at, is_disk, slot = at + 1, query.tier == DISK, 0
            else:
                is_disk, slot = True, 0
        page.is_last = at >= len(names)
        if not page.is_last:
            page.from_node, page.from_disk, page.from_slot = names[at], is_disk, slot
        page.models = [self._model(Namespace(name)) for name in page.namespaces]
        return page

    def _add_from_pool(
        self, page: ChunkPage, name: NodeId, first: int, most: int, query: ChunkQuery, now: float
    ) -> tuple[int, int | None]:
        """Add chunks of a stretch of slots; says how many slots, and where to go on."""
        node = self._nodes.get(name)
        if node is None:
            return 0, None
        stretch: Stretch = node.book.table.places_from(Slot(first), most, _space(query))
        self._add(page, node, list(stretch.places), query, now)
        return stretch.length, stretch.following

    def _add_from_disk(
        self, page: ChunkPage, name: NodeId, first: int, most: int, query: ChunkQuery, now: float
    ) -> tuple[int, int | None]:
        """The same for a stretch of places of the node's disk."""
        stretch = self._stretch_of_disk(name, first, most, query)
        chunks = [each for each in stretch.chunks if _is_wanted(each[0][1], query)]
        if query.order and len(chunks) > query.limit:
            chosen = _first_ones(_uses_on_disk(chunks), query.order, query.limit)
            chunks = [chunks[at] for at in chosen]
        page.node_index += numbered(page.nodes, [str(name)] * len(chunks))
        page.namespace_index += numbered(page.namespaces, [space for (space, _), _ in chunks])
        page.keys += [key for (_, key), _ in chunks]
        page.slots += [found.place for _, found in chunks]
        page.generations += [found.generation for _, found in chunks]
        page.slot_bytes += [found.num_bytes for _, found in chunks]
        ages = [max(0.0, now - found.since) for _, found in chunks]
        page.ages += ages
        page.idles += ages
        page.hits += [0] * len(chunks)
        page.is_replicated += self._are_elsewhere(chunks)
        page.is_on_disk += [True] * len(chunks)
        page.tenant_index += numbered(page.tenants, [""] * len(chunks))
        return stretch.length, stretch.following

    def _stretch_of_disk(
        self, name: NodeId, first: int, most: int, query: ChunkQuery
    ) -> DiskStretch:
        """The next chunks of a disk, or the one that is asked for: keys of a namespace are equally
        long, so that no other key begins so.
        """
        space = _space(query)
        if space is not None and query.key:
            wanted = (space, Key(query.key))
            found = [each for each in self._disks.find(*wanted) if each.node_id == name]
            if found:
                chunks = [(wanted, each) for each in found if each.place >= first]
                return DiskStretch(chunks, len(found), None)
        return self._disks.stretch(name, first, most, space)

    def _are_elsewhere(self, chunks: Sequence[tuple[Name, OnDisk]]) -> list[bool]:
        """Whether some pool has them, or another disk."""
        found = [len(self._disks.find(*name)) > 1 for name, _ in chunks]
        rows: dict[Namespace, list[int]] = {}
        for row, ((space, _), _) in enumerate(chunks):
            rows.setdefault(space, []).append(row)
        for space, own in rows.items():
            keys = [chunks[row][0][1] for row in own]
            for index in self._table().ask(space, keys, tuple(self._nodes), (), 1, None).key_index:
                found[own[index]] = True
        return found

    def _add(
        self, page: ChunkPage, node: Node, places: list[object], query: ChunkQuery, now: float
    ) -> None:
        """Add those chunks at places of a node that are wanted."""
        table = node.book.table
        if places and (query.key or query.group is not None):
            pairs = zip(places, table.held_at(places).keys, strict=True)
            places = [place for place, key in pairs if _is_wanted(Key(key), query)]
        if places and query.order and len(places) > query.limit:
            chosen = _first_ones(table.uses_at(places), query.order, query.limit)
            places = [places[at] for at in chosen]
        if places:
            held, uses = table.held_at(places), table.uses_at(places)
            page.node_index += numbered(page.nodes, [str(node.node_id)] * len(held))
            page.namespace_index += numbered(page.namespaces, held.namespaces)
            page.keys += held.keys
            page.slots += held.slots
            page.generations += held.generations
            page.slot_bytes += held.slot_bytes
            page.ages += [max(0.0, now - at) for at in uses.stored_at]
            page.idles += [max(0.0, now - at) for at in uses.used_at]
            page.hits += uses.hits
            page.is_replicated += uses.is_spare
            page.is_on_disk += [False] * len(held)
            page.tenant_index += numbered(page.tenants, map(self._name_of, uses.owners))

    def _model(self, namespace: Namespace) -> str:
        known = self._introductions.get(namespace)
        return "" if known is None else known.model

    # Prompts

    def where(self, query: WhereQuery) -> WherePage:
        """Which nodes and disks have chunks; of as many keys as an answer has room for."""
        nodes = tuple(self._nodes)
        if not nodes:
            return WherePage(PROTOCOL_VERSION, len(query.keys))
        keys = query.keys[: max(1, MAX_REPLICAS // (len(nodes) + self._disks.num_disks))]
        namespace = Namespace(query.namespace)
        found = self._table().ask(namespace, keys, nodes, (), len(nodes), None)
        pools = [Source(node_id) for node_id in found.nodes]
        key_index, rows = list(found.key_index), [pools[at] for at in found.node_index]
        for index, key in enumerate(keys):
            disks = self._disks.find(namespace, Key(key))
            key_index += [index] * len(disks)
            rows += sorted(Source(each.node_id, SourceKind.DISK) for each in disks)
        sources: list[Source] = []
        source_index = numbered(sources, rows)
        return WherePage(PROTOCOL_VERSION, len(keys), sources, key_index, source_index)

    def prefixes(self, query: PrefixQuery) -> PrefixPage:
        """How much of prompts each node has, in its pool or on its disk."""
        nodes = tuple(self._nodes)
        if not nodes or not query.keys:
            return prefix_page(query, (), (), ())
        space = Namespace(query.namespace)
        found = self._table().ask(space, query.keys, nodes, (), MAX_NODES_OF_A_KEY, None)
        if not self._disks.holds_any(space):
            return prefix_page(query, found.nodes, found.key_index, found.node_index)
        places = {node: at for at, node in enumerate(found.nodes)}
        key_index, node_index = list(found.key_index), list(found.node_index)
        for index, key in enumerate(query.keys):
            for each in self._disks.find(space, Key(key)):
                key_index.append(index)
                node_index.append(places.setdefault(each.node_id, len(places)))
        return prefix_page(query, list(places), key_index, node_index)

    def space_page(self) -> SpacePage:
        """All namespaces, and where their engines are."""
        spaces = self.namespaces()
        nodes: dict[str, set[str]] = {space.namespace: set() for space in spaces}
        for engine in self._engines.values():
            nodes[engine.namespace].add(engine.node_id)
        return SpacePage(
            PROTOCOL_VERSION, spaces, [sorted(nodes[space.namespace]) for space in spaces]
        )


def _space(query: ChunkQuery) -> Namespace | None:
    return Namespace(query.namespace) if query.namespace else None


def _is_wanted(key: Key, query: ChunkQuery) -> bool:
    return key.startswith(query.key) and query.group in (None, group_of(key))


def _uses_on_disk(chunks: Sequence[tuple[Name, OnDisk]]) -> Uses:
    since = [found.since for _, found in chunks]
    sizes = [found.num_bytes for _, found in chunks]
    none = [0] * len(chunks)
    return Uses(sizes, since, since, none, [False] * len(chunks), none)


def _first_ones(uses: Uses, order: str, limit: int) -> list[int]:
    """Positions of the first rows in an order."""
    columns: dict[str, Sequence[float]] = {
        "age": uses.stored_at,
        "idle": uses.used_at,
        "hits": [-count for count in uses.hits],
        "size": [-size for size in uses.slot_bytes],
    }
    return nsmallest(limit, range(len(uses.hits)), key=columns[order].__getitem__)
