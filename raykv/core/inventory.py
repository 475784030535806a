"""What a NodeActor reports to hold, taken into the directory's book of its pool."""

from __future__ import annotations

from collections.abc import Mapping

from raykv.core.book import Chunk, Name
from raykv.core.members import Node, rows
from raykv.messages import FailedStores, Inventory, NodeReport
from raykv.types import NO_GENERATION, Generation, Namespace, Slot


def take_inventory(node: Node, report: NodeReport, cleared: Mapping[Namespace, Generation]) -> None:
    """One page of all READY chunks; slots that an engine has declared stay leased to it, unless the
    page has the very chunk that was stored there.
    """
    if node.inventory_complete:
        return
    for (namespace, key), chunk in rows(report.stored):
        if chunk.generation <= cleared.get(namespace, NO_GENERATION):
            continue
        node.book.end_older_lease(chunk)
        lease = node.book.leases.get(chunk.slot)
        if lease is not None and lease.generation == chunk.generation:
            del node.book.leases[chunk.slot]
        elif lease is not None or not node.book.claim_place(chunk):
            continue
        node.book.hold((namespace, key), chunk)
    node.inventory_complete = report.last_page
    # What was reported before is in it.
    node.last_seq = max(node.last_seq, report.seq)


def take_stored(node: Node, stored: Inventory, cleared: Mapping[Namespace, Generation]) -> None:
    """Hold what was stored: at its lease, or in a slot that is free.

    The lease may be unknown here: its engine has not declared it since this actor began, or was
    given up. What was stored may have come over chunks that are still believed in.
    """
    strange: list[tuple[Name, Chunk]] = []
    for name, chunk in rows(stored):
        is_void = chunk.generation <= cleared.get(name[0], NO_GENERATION)
        if node.book.lease_at(chunk.slot, chunk.generation) is None:
            if not is_void:
                strange.append((name, chunk))
            continue
        del node.book.leases[chunk.slot]
        if is_void:
            node.book.release(chunk)
            continue
        node.book.hold(name, chunk)
    node.book.drop_overwritten(chunk for _, chunk in strange)
    for name, chunk in strange:
        node.book.end_older_lease(chunk)
        held = node.book.find(*name)
        if held is None or held.generation < chunk.generation:
            node.book.adopt(name, chunk)
        else:
            node.book.outlive(chunk)


def take_failed(node: Node, failed: FailedStores) -> None:
    """Forget what was overwritten by a store that has failed.

    Only what was stored into a lease from before this actor began can be still believed in.
    """
    columns = zip(failed.slots, failed.generations, failed.slot_bytes, strict=True)
    writes = [Chunk(Slot(slot), Generation(gen), size) for slot, gen, size in columns]
    node.book.drop_overwritten(chunk for chunk in writes if not node.book.is_settled(chunk))
    for chunk in writes:
        node.book.end_older_lease(chunk)
