"""The directory, rebuilt from its event stream: what a router or a notebook follows.

A chunk is removed only at the generation that it is known at or a later one, so a snapshot and the
events that happened while it was taken go together in any case.
"""

from __future__ import annotations

from raykv.event_types import (
    BlockRemoved,
    BlockStored,
    CacheCleared,
    EpochBegan,
    Event,
    EventsMissed,
    NodeJoined,
    NodeLost,
    SnapshotPage,
)
from raykv.types import Generation, Key, Namespace, NodeId, Slot

Place = tuple[NodeId, Namespace, Key]


class Replay:
    """Apply `Event`s in order; `chunks` has slot and generation of what is where."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, int] = {}
        # Epoch and number of the last event that is in here.
        self.place = (0, 0)
        self._chunks: dict[NodeId, dict[tuple[Namespace, Key], tuple[Slot, Generation]]] = {}

    @property
    def chunks(self) -> dict[Place, tuple[Slot, Generation]]:
        """All chunks by node, namespace and key."""
        return {
            (node_id, *name): held
            for node_id, chunks in self._chunks.items()
            for name, held in chunks.items()
        }

    def nodes_with(self, namespace: Namespace, key: Key) -> list[NodeId]:
        """The nodes that have a chunk."""
        return [node for node, chunks in self._chunks.items() if (namespace, key) in chunks]

    def apply(self, event: Event) -> None:
        """Take in the next event. `EventsMissed` changes nothing: take a snapshot then."""
        if not isinstance(event, EventsMissed):
            self.place = (event.epoch, event.seq)
        match event:
            case BlockRemoved():
                self._remove(event)
            case BlockStored():
                held = (Slot(event.slot), Generation(event.generation))
                chunks = self._chunks.setdefault(NodeId(event.node_id), {})
                chunks[Namespace(event.namespace), Key(event.key)] = held
            case EpochBegan():
                self.nodes.clear()
                self._chunks.clear()
            case NodeJoined():
                self.nodes[NodeId(event.node_id)] = event.node_epoch
            case NodeLost():
                self.nodes.pop(NodeId(event.node_id), None)
                self._chunks.pop(NodeId(event.node_id), None)
            case CacheCleared():
                self._clear(event)

    def _remove(self, event: BlockRemoved) -> None:
        chunks = self._chunks.get(NodeId(event.node_id), {})
        name = (Namespace(event.namespace), Key(event.key))
        if name in chunks and chunks[name][1] <= event.generation:
            del chunks[name]

    def _clear(self, event: CacheCleared) -> None:
        for node_id, chunks in self._chunks.items():
            self._chunks[node_id] = {
                name: held
                for name, held in chunks.items()
                if name[0] != event.namespace or held[1] > event.generation
            }

    def load(self, page: SnapshotPage) -> None:
        """Take in a page of a snapshot; the first one after `EpochBegan` or on a new object."""
        self.place = (page.epoch, page.seq)
        if not page.node_id:
            return
        self.nodes[NodeId(page.node_id)] = page.node_epoch
        chunks = self._chunks.setdefault(NodeId(page.node_id), {})
        inventory = page.chunks
        columns = zip(
            inventory.namespace_index,
            inventory.keys,
            inventory.slots,
            inventory.generations,
            strict=True,
        )
        for index, key, slot, generation in columns:
            name = (Namespace(inventory.namespaces[index]), Key(key))
            chunks[name] = (Slot(slot), Generation(generation))
