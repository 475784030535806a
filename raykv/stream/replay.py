"""The directory, rebuilt from its event stream: what a router or a notebook follows.

A chunk is removed only at the generation that it is known at or a later one, so a snapshot and the
events that happened while it was taken go together in any case.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from raykv.base.ids import Generation, Key, Namespace, NodeId, Slot
from raykv.protocol.events import (
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

Place = tuple[NodeId, Namespace, Key]


@dataclass(frozen=True, slots=True)
class Moved:
    """What an event has changed: chunks that are somewhere now, or are not there any more."""

    came: list[Place] = field(default_factory=list)
    went: list[Place] = field(default_factory=list)


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

    def apply(self, event: Event) -> Moved:
        """Take in the next event. `EventsMissed` changes nothing: take a snapshot then."""
        if not isinstance(event, EventsMissed):
            self.place = (event.epoch, event.seq)
        match event:
            case BlockRemoved():
                return self._remove(event)
            case BlockStored():
                return self._store(event)
            case EpochBegan():
                went = list(self.chunks)
                self.nodes.clear()
                self._chunks.clear()
                return Moved(went=went)
            case NodeJoined():
                self.nodes[NodeId(event.node_id)] = event.node_epoch
            case NodeLost():
                node_id = NodeId(event.node_id)
                self.nodes.pop(node_id, None)
                return Moved(went=[(node_id, *name) for name in self._chunks.pop(node_id, {})])
            case CacheCleared():
                return self._clear(event)
        return Moved()

    def _store(self, event: BlockStored) -> Moved:
        node_id, name = NodeId(event.node_id), (Namespace(event.namespace), Key(event.key))
        chunks = self._chunks.setdefault(node_id, {})
        is_new = name not in chunks
        chunks[name] = (Slot(event.slot), Generation(event.generation))
        return Moved(came=[(node_id, *name)]) if is_new else Moved()

    def _remove(self, event: BlockRemoved) -> Moved:
        node_id, name = NodeId(event.node_id), (Namespace(event.namespace), Key(event.key))
        chunks = self._chunks.get(node_id, {})
        if name not in chunks or chunks[name][1] > event.generation:
            return Moved()
        del chunks[name]
        return Moved(went=[(node_id, *name)])

    def _clear(self, event: CacheCleared) -> Moved:
        went = [
            (node_id, *name)
            for node_id, chunks in self._chunks.items()
            for name, held in chunks.items()
            if name[0] == event.namespace and held[1] <= event.generation
        ]
        for node_id, namespace, key in went:
            del self._chunks[node_id][namespace, key]
        return Moved(went=went)

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
