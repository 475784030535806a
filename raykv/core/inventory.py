"""What a NodeActor reports to hold, taken into the directory's book of its pool."""

from __future__ import annotations

from collections.abc import Mapping

from raykv.core.book import Chunk
from raykv.core.members import Node, rows
from raykv.messages import Inventory, NodeReport
from raykv.types import NO_GENERATION, Generation, Namespace


def take_inventory(node: Node, report: NodeReport, cleared: Mapping[Namespace, Generation]) -> None:
    """One page of all READY chunks; slots that an engine has declared stay leased to it, unless the
    page has the very chunk that was stored there.
    """
    if node.inventory_complete:
        return
    for (namespace, key), chunk in rows(report.stored):
        if chunk.generation <= cleared.get(namespace, NO_GENERATION):
            continue
        lease = node.book.leases.get(chunk.slot)
        if lease is not None and lease.generation == chunk.generation:
            del node.book.leases[chunk.slot]
        elif lease is not None or not node.book.claim_place(chunk):
            continue
        node.book.hold((namespace, key), chunk)
    node.inventory_complete = report.last_page


def take_stored(node: Node, stored: Inventory, cleared: Mapping[Namespace, Generation]) -> None:
    """Hold what was stored at its lease. The rest is not ours to hold, but it may have come over
    chunks of an inventory, which was made up before.
    """
    strange: list[Chunk] = []
    for (namespace, key), chunk in rows(stored):
        if node.book.lease_at(chunk.slot, chunk.generation) is None:
            strange.append(chunk)
            continue
        del node.book.leases[chunk.slot]
        if chunk.generation <= cleared.get(namespace, NO_GENERATION):
            node.book.release(chunk)
            continue
        node.book.hold((namespace, key), chunk)
    node.book.drop_overwritten(strange)
