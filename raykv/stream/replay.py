"""The directory, rebuilt from its event stream: what a router or a notebook follows.

A snapshot has each node's listing, which may be ahead of the directory: events that are in it
already may take it back for a moment, and those that follow bring it on again. A chunk that has
come and gone between two reports of its node while the snapshot was taken may be wrong until its
node tells of it again; that costs a router a guess.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from raykv.base.ids import Key, Namespace, NodeId
from raykv.protocol import events

Place = tuple[NodeId, Namespace, Key]
Name = tuple[Namespace, Key]


@dataclass(frozen=True, slots=True)
class Moved:
    """What an event has changed: chunks that are somewhere now, or are not there any more."""

    came: list[Place] = field(default_factory=list)
    went: list[Place] = field(default_factory=list)


@dataclass(slots=True)
class _ReplayedNode:
    life: int
    names: set[Name] = field(default_factory=set)


class Replay:
    """Applies `Event`s in order; `chunks` has the node of every chunk."""

    def __init__(self) -> None:
        # Life and number of the last event that is in here.
        self.place = (0, 0)
        self._nodes: dict[NodeId, _ReplayedNode] = {}

    @property
    def nodes(self) -> dict[NodeId, int]:
        """The lives of all nodes."""
        return {node_id: node.life for node_id, node in self._nodes.items()}

    @property
    def chunks(self) -> set[Place]:
        """All chunks by node, namespace and key."""
        return {(node_id, *name) for node_id, node in self._nodes.items() for name in node.names}

    def apply(self, event: events.Event) -> Moved:
        """Take in the next event. `EventsMissed` changes nothing: take a snapshot then."""
        if isinstance(event, events.EventsMissed):
            return Moved()
        self.place = (event.life, event.seq)
        if isinstance(event, events.LifeBegan):
            went = list(self.chunks)
            self._nodes.clear()
            return Moved(went=went)
        return self._apply(event) if isinstance(event, events.NodeEvent) else Moved()

    def _apply(self, event: events.NodeEvent) -> Moved:
        node_id = NodeId(event.node_id)
        node = self._nodes.get(node_id)
        if node is not None and event.node_life < node.life:
            return Moved()
        if isinstance(event, events.BlockEvent):
            return Moved() if node is None else self._move(node_id, node, event)
        # The events that follow tell all that the node has.
        if isinstance(event, events.NodeJoined):
            self._nodes[node_id] = _ReplayedNode(event.node_life)
        else:
            self._nodes.pop(node_id, None)
        return Moved(went=[(node_id, *name) for name in node.names] if node else [])

    def _move(self, node_id: NodeId, node: _ReplayedNode, event: events.BlockEvent) -> Moved:
        name = (Namespace(event.namespace), Key(event.key))
        has_come = isinstance(event, events.BlockStored)
        if has_come == (name in node.names):
            return Moved()
        if has_come:
            node.names.add(name)
            return Moved(came=[(node_id, *name)])
        node.names.discard(name)
        return Moved(went=[(node_id, *name)])

    def load(self, node_id: NodeId, life: int, names: Iterable[Name]) -> None:
        """Take in all that a node has."""
        self._nodes[node_id] = _ReplayedNode(life, set(names))
