"""Snapshots of the directory for readers of the event stream, page by page.

A snapshot is the list of the places where something was held when it began; each page reports what
is held there now, and the events since its beginning do the rest. A page can be asked for again.
Only a few snapshots are kept, and the oldest goes first: a reader that dawdles begins anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raykv.base.ids import NodeId
from raykv.directory.members import Node
from raykv.protocol.columns import Keys, numbered
from raykv.protocol.events import SnapshotPage
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.node import Inventory

MAX_OPEN = 4
"""Each keeps four bytes a chunk, or as many more as the table of chunks makes of it."""

MAX_PAGE = 1024
"""Chunks in one page."""

_POSITION_BITS = 40


@dataclass(frozen=True, slots=True)
class _Snapshot:
    epoch: int
    seq: int
    parts: list[tuple[NodeId, int, Sequence[Any]]]


class Snapshots:
    """The open ones."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, _Snapshot] = OrderedDict()
        self._counter = 0

    def begin(self, epoch: int, seq: int, nodes: list[Node]) -> int:
        """Start a snapshot at a place of the event log; returns the cursor of its first page."""
        self._counter += 1
        parts = [(node.node_id, int(node.epoch), node.book.table.places()) for node in nodes]
        self._open[self._counter] = _Snapshot(epoch, seq, parts)
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return self._counter << _POSITION_BITS

    def forget(self) -> None:
        """All of them; their readers begin anew."""
        self._open.clear()

    def page(self, cursor: int, nodes: dict[NodeId, Node]) -> SnapshotPage:
        """The page at a cursor; with an error if its snapshot is not kept any more."""
        number, position = cursor >> _POSITION_BITS, cursor & ((1 << _POSITION_BITS) - 1)
        snapshot = self._open.get(number)
        if snapshot is None:
            what = "the snapshot is not kept any more: begin anew"
            return SnapshotPage(PROTOCOL_VERSION, 0, 0, 0, error=what)
        skipped = 0
        for node_id, node_epoch, places in snapshot.parts:
            # A node without chunks has one page too.
            room = max(1, len(places))
            if position < skipped + room:
                first = position - skipped
                page = places[first : first + MAX_PAGE]
                return SnapshotPage(
                    PROTOCOL_VERSION,
                    snapshot.epoch,
                    snapshot.seq,
                    cursor + max(1, len(page)),
                    str(node_id),
                    node_epoch,
                    _held(page, nodes.get(node_id), node_epoch),
                )
            skipped += room
        seq = snapshot.seq
        return SnapshotPage(PROTOCOL_VERSION, snapshot.epoch, seq, cursor, is_last=True)


def _held(places: Sequence[Any], node: Node | None, node_epoch: int) -> Inventory:
    """What the node, in that life, holds at places now."""
    if node is None or node.epoch != node_epoch:
        return Inventory()
    held = node.book.table.held_at(places)
    namespaces: list[str] = []
    return Inventory(
        namespace_index=numbered(namespaces, held.namespaces),
        namespaces=namespaces,
        keys=Keys.of(held.keys),
        slots=held.slots,
        generations=held.generations,
        slot_bytes=held.slot_bytes,
    )
