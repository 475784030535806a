"""A reader of the directory's events, who polls now and then and folds them."""

from __future__ import annotations

from raykv.base.ids import EventKind, Key, Namespace, NodeId
from raykv.directory.known.directory import Directory
from raykv.directory.known.events import KnownEvent

MOST_READ = 5
"""Events of one page."""


class FoldingReader:
    """It knows what the events say: after a gap nothing is known until a life begins anew."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, int] = {}
        self.chunks: set[tuple[NodeId, Namespace, Key]] = set()
        self.num_gaps = 0
        self.is_whole = True
        self._life = self._seq = 0

    def poll(self, directory: Directory) -> bool:
        """Read some events; returns whether there is nothing left to read."""
        if directory.life != self._life:
            self._life, self._seq = directory.life, 0
            self._begin()
        events, is_gap = directory.events.after(self._seq, MOST_READ)
        if is_gap:
            self.num_gaps += 1
            self.is_whole = False
        for event in events:
            assert event.seq == self._seq + 1 or is_gap, (event, self._seq)
            is_gap = False
            self._seq = event.seq
            self._fold(event)
        return not events

    def _begin(self) -> None:
        self.nodes.clear()
        self.chunks.clear()
        self.is_whole = True

    def _fold(self, event: KnownEvent) -> None:
        name = event.node_id, event.namespace, event.key
        if event.kind is EventKind.LIFE_BEGAN:
            self._begin()
        elif event.kind is EventKind.NODE_JOINED:
            assert not self.is_whole or event.node_id not in self.nodes, event
            self.nodes[event.node_id] = event.life
        elif event.kind is EventKind.NODE_LOST:
            self.nodes.pop(event.node_id, None)
            self.chunks = {each for each in self.chunks if each[0] != event.node_id}
        elif event.kind is EventKind.BLOCK_STORED:
            assert not self.is_whole or name not in self.chunks, event
            self.chunks.add(name)
        elif event.kind is EventKind.BLOCK_REMOVED:
            assert not self.is_whole or name in self.chunks, event
            self.chunks.discard(name)
