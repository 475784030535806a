"""Who uses which namespace: whether others have it, and whether all engines have left it; pure.

              a node introduces an engine          no node does          `LEFT_S` later
  (unknown) ─────────────────────────────► in use ─────────────► resting ─────────────► left
                                              ▲                     │                     │
                                              └─────── a node introduces an engine ───────┘

Invariants:
1. A namespace with engines is neither resting nor left.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from raykv.base.ids import Namespace, NodeId
from raykv.protocol.node import MOST_NAMESPACES

LEFT_S = 10.0
"""An engine that comes back within that time has not left."""

MOST_LEFT = 4096
"""Namespaces without engines that are remembered."""

MOST_OF_A_NODE = 4096
"""Namespaces of one node's chunks that count."""

Spaces = AbstractSet[Namespace]
NONE: frozenset[Namespace] = frozenset()
NOTHING = NONE, NONE


class NamespaceUse:
    """See the module's docstring. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        # Of each node: namespaces that it has engines of, and those that it has chunks of.
        self._of: dict[NodeId, tuple[Spaces, Spaces]] = {}
        # Nodes with engines, and nodes with engines or chunks.
        self._engined_at: dict[Namespace, set[NodeId]] = {}
        self._used_at: dict[Namespace, set[NodeId]] = {}
        # Since when there is no engine, the longest time first.
        self._left: dict[Namespace, float] = {}

    def take(self, node_id: NodeId, engined: Spaces, held: Spaces, now: float) -> None:
        """A node has engines and chunks of these namespaces now."""
        if len(held) > MOST_OF_A_NODE:
            held = frozenset(sorted(held)[:MOST_OF_A_NODE])
        before, held_before = self._of.pop(node_id, NOTHING)
        _move(self._engined_at, node_id, before, engined)
        _move(self._used_at, node_id, before | held_before, engined | held)
        if engined or held:
            self._of[node_id] = engined, held
        for namespace in engined:
            self._left.pop(namespace, None)
        for namespace in sorted(before - self._engined_at.keys()):
            self._left[namespace] = now
        while len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def lose(self, node_id: NodeId, now: float) -> None:
        """A node is gone."""
        self.take(node_id, NONE, NONE, now)

    def alone(self, node_id: NodeId) -> list[str]:
        """Namespaces of a node's engines of which no other node has engines or chunks."""
        engined, _ = self._of.get(node_id, NOTHING)
        alone = [str(each) for each in sorted(engined) if len(self._used_at[each]) == 1]
        return alone[:MOST_NAMESPACES]

    def left(self, node_id: NodeId, now: float) -> list[str]:
        """Namespaces of a node's chunks that all engines have left."""
        _, held = self._of.get(node_id, NOTHING)
        left = [
            each for each in sorted(self._left.keys() & held) if now - self._left[each] >= LEFT_S
        ]
        return [str(each) for each in left[:MOST_NAMESPACES]]

    def check(self) -> None:
        """Assert the invariant and bounds; for tests."""
        assert not self._left.keys() & self._engined_at.keys()
        assert len(self._left) <= MOST_LEFT, len(self._left)
        engined = {node_id: some for node_id, (some, _) in self._of.items()}
        used = {node_id: some | held for node_id, (some, held) in self._of.items()}
        for at, of in ((self._engined_at, engined), (self._used_at, used)):
            pairs = {(each, node_id) for each, nodes in at.items() for node_id in nodes}
            assert pairs == {(each, node_id) for node_id, spaces in of.items() for each in spaces}
            assert all(at.values())


def _move(
    nodes_at: dict[Namespace, set[NodeId]], node_id: NodeId, before: Spaces, after: Spaces
) -> None:
    """A node is in other namespaces than before."""
    for namespace in before - after:
        nodes = nodes_at[namespace]
        nodes.discard(node_id)
        if not nodes:
            del nodes_at[namespace]
    for namespace in after - before:
        nodes_at.setdefault(namespace, set()).add(node_id)
