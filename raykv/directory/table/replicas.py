"""Which nodes have a chunk: the directory's index over the books of all nodes.

Invariant: a node is listed under a name exactly as long as its book holds the chunk.
"""

from __future__ import annotations

from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.table.protocol import Name

_Nodes = tuple[NodeId, ...]


class ReplicaIndex:
    """Most chunks have one replica: a tuple of one costs less than a set."""

    def __init__(self) -> None:
        self._nodes: dict[Namespace, dict[Key, _Nodes]] = {}

    def nodes(self, name: Name) -> _Nodes:
        """The nodes that have the chunk, the one that got it first first."""
        namespace, key = name
        return self._nodes.get(namespace, {}).get(key, ())

    def add(self, name: Name, node_id: NodeId) -> _Nodes:
        """The chunk came to a node; returns all that have it now."""
        namespace, key = name
        keys = self._nodes.setdefault(namespace, {})
        known = keys.get(key, ())
        if node_id not in known:
            keys[key] = known = (*known, node_id)
        return known

    def remove(self, name: Name, node_id: NodeId) -> _Nodes:
        """The chunk went from a node; returns those that still have it."""
        namespace, key = name
        keys = self._nodes.get(namespace, {})
        left = tuple(node for node in keys.get(key, ()) if node != node_id)
        if left:
            keys[key] = left
        elif keys.pop(key, None) is not None and not keys:
            del self._nodes[namespace]
        return left

    def names(self) -> list[Name]:
        """All chunks that are anywhere; for tests."""
        return [(namespace, key) for namespace, keys in self._nodes.items() for key in keys]
