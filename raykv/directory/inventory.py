"""What a NodeActor reports to hold, taken into the directory's book of its pool."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from raykv.base.clearings import Clearings
from raykv.base.ids import Generation, Key, Namespace, NodeId, Slot
from raykv.directory.book import PoolBook
from raykv.directory.members import Node
from raykv.directory.table.protocol import Changes, Name, TableChunk
from raykv.protocol.columns import LostReplicas, SourceKind
from raykv.protocol.node import FailedStores, Inventory, NodeReport


@dataclass(frozen=True)
class _Arrived:
    """Chunks of one namespace that came, with their slot sizes."""

    came: Changes
    slot_bytes: list[int]

    def row(self, number: int) -> tuple[Name, TableChunk]:
        came = self.came
        slot, generation = Slot(came.slots[number]), Generation(came.generations[number])
        chunk = TableChunk(slot, generation, self.slot_bytes[number])
        return (came.namespace, Key(came.keys[number])), chunk


def _arrivals(inventory: Inventory) -> Iterator[_Arrived]:
    """The rows of an inventory, from one change of the namespace to the next."""
    start = 0
    for index, rows in groupby(inventory.namespace_index):
        part = slice(start, start + len(list(rows)))
        namespace = Namespace(inventory.namespaces[index])
        columns = inventory.keys[part], inventory.slots[part], inventory.generations[part]
        yield _Arrived(Changes(True, namespace, *columns), inventory.slot_bytes[part])
        start = part.stop


def take_inventory(node: Node, report: NodeReport, cleared: Clearings) -> None:
    """One page of all READY chunks; slots that an engine has declared stay leased to it, unless the
    page has the very chunk that was stored there.
    """
    if node.inventory_complete:
        return
    for arrived in _arrivals(report.stored):
        lowest = cleared.of(arrived.came.namespace)
        if min(arrived.came.generations) > lowest:
            node.book.claim_slabs(arrived.came.slots, arrived.slot_bytes)
        for number in node.book.store(arrived.came, arrived.slot_bytes, lowest, from_free=True):
            name, chunk = arrived.row(number)
            if chunk.generation > lowest:
                _take_held(node.book, name, chunk)
    node.inventory_complete = report.last_page
    # What was reported before is in it.
    node.last_seq = max(node.last_seq, report.seq)


def _take_held(book: PoolBook, name: Name, chunk: TableChunk) -> None:
    """A chunk is on the node: believe it if its slot is free, or leased for it or earlier."""
    book.end_older_lease(chunk)
    lease = book.lease_at(chunk.slot, chunk.generation)
    if lease is not None or book.claim_place(chunk):
        book.hold(name, chunk)


def take_stored(node: Node, stored: Inventory, cleared: Clearings) -> None:
    """Hold what was stored: at its lease, or in a slot that is free.

    The lease may be unknown here: its engine has not declared it since this actor began, or was
    given up. What was stored may have come over chunks that are still believed in, even if it is
    void because its namespace was cleared since.
    """
    strange: list[tuple[Name, TableChunk]] = []
    for arrived in _arrivals(stored):
        lowest = cleared.of(arrived.came.namespace)
        for number in node.book.store(arrived.came, arrived.slot_bytes, lowest, from_free=False):
            name, chunk = arrived.row(number)
            is_void = chunk.generation <= lowest
            if not node.book.is_leased_at(chunk.slot, chunk.generation):
                strange.append((name, chunk))
            elif is_void:
                node.book.table.end_lease(chunk.slot, Generation(chunk.generation + 1))
            else:
                node.book.hold(name, chunk)
    node.book.drop_overwritten(chunk for _, chunk in strange)
    slots: set[Slot] = set()
    slab_sizes: dict[int, int] = {}
    for name, chunk in strange:
        slab = node.book.geometry.slab_of(chunk.slot)
        size = slab_sizes.get(slab, chunk.slot_bytes)
        if chunk.slot in slots or size != chunk.slot_bytes:
            # After a while without reports one may name several lives of a place.
            node.book.drop_overwritten([chunk])
        slots.add(chunk.slot)
        slab_sizes[slab] = chunk.slot_bytes
        node.book.end_older_lease(chunk)
        held = node.book.find(*name)
        is_void = cleared.cover(name[0], chunk.generation)
        if not is_void and (held is None or held.generation < chunk.generation):
            node.book.adopt(name, chunk)
        else:
            node.book.outlive(chunk)


def take_failed(node: Node, failed: FailedStores) -> None:
    """Forget what was overwritten by a store that has failed.

    Only what was stored into a lease from before this actor began can be still believed in.
    """
    columns = zip(failed.slots, failed.generations, failed.slot_bytes, strict=True)
    writes = [TableChunk(Slot(slot), Generation(gen), size) for slot, gen, size in columns]
    node.book.drop_overwritten(chunk for chunk in writes if not node.book.is_settled(chunk))
    for chunk in writes:
        node.book.end_older_lease(chunk)


def drop_lost(nodes: Mapping[NodeId, Node], namespace: Namespace, lost: LostReplicas) -> None:
    """Forget what sources said they do not have, unless it has come there again since."""
    for source, key, generation in zip(lost.sources, lost.keys, lost.generations, strict=True):
        node = nodes.get(NodeId(source.node_id)) if source.kind is SourceKind.POOL else None
        chunk = None if node is None else node.book.find(namespace, Key(key))
        if node is not None and chunk is not None and chunk.generation == generation:
            node.book.drop(namespace, Key(key))
