"""Who uses which namespace: whether others have it, and whether all engines have left it; pure.

              a node introduces an engine          no node does          `LEFT_S` later
  (unknown) ─────────────────────────────► in use ─────────────► resting ─────────────► left
                                              ▲                     │                     │
                                              └─────── a node introduces an engine ───────┘

Invariants:
1. A namespace with engines is neither resting nor left.
"""

from __future__ import annotations

from collections import Counter
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
        # By node: the namespaces of its engines, and of its chunks.
        self._of: dict[NodeId, tuple[Spaces, Spaces]] = {}
        # How many nodes have engines, and engines or chunks.
        self._num_engined: Counter[Namespace] = Counter()
        self._num_used: Counter[Namespace] = Counter()
        # Since when there is no engine, the longest time first.
        self._left: dict[Namespace, float] = {}

    def take(self, node_id: NodeId, engined: Spaces, held: Spaces, now: float) -> None:
        """A node has engines and chunks of these namespaces now."""
        if len(held) > MOST_OF_A_NODE:
            held = frozenset(sorted(held)[:MOST_OF_A_NODE])
        before, held_before = self._of.pop(node_id, NOTHING)
        _move(self._num_engined, before, engined)
        _move(self._num_used, before | held_before, engined | held)
        if engined or held:
            self._of[node_id] = engined, held
        for namespace in engined:
            self._left.pop(namespace, None)
        for namespace in sorted(before - self._num_engined.keys()):
            self._left[namespace] = now
        while len(self._left) > MOST_LEFT:
            del self._left[next(iter(self._left))]

    def lose(self, node_id: NodeId, now: float) -> None:
        """A node is gone."""
        self.take(node_id, NONE, NONE, now)

    def alone(self, node_id: NodeId) -> list[str]:
        """Namespaces of a node's engines that no other node has engines or chunks of."""
        engined, _ = self._of.get(node_id, NOTHING)
        alone = [str(each) for each in sorted(engined) if self._num_used[each] == 1]
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
        assert not self._left.keys() & self._num_engined.keys()
        assert len(self._left) <= MOST_LEFT, len(self._left)
        engined = Counter(each for some, _ in self._of.values() for each in some)
        used = Counter(each for some, held in self._of.values() for each in some | held)
        assert dict(self._num_engined) == engined
        assert dict(self._num_used) == used


def _move(counts: Counter[Namespace], before: Spaces, after: Spaces) -> None:
    """A node is in other namespaces than before."""
    counts.update(after - before)
    for namespace in before - after:
        counts[namespace] -= 1
        if not counts[namespace]:
            del counts[namespace]
