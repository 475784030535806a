"""The chunks of weights that nobody has any more: they are given up first, and are kept as long as
there is room, for engines that get their old weights back.

               the last engine has left it for another one
   (in use) ───────────────────────────────────────────────► left ──► its chunks are released
       ▲                                                       │
       └────────────── an engine is there again ───────────────┘      and are as used as they were

A namespace may have very many chunks: they are listed at once, and ordered piece by piece.

Invariants:
1. A namespace with engines is not left.
2. What comes to a namespace that is left is released as it comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raykv.base.ids import EngineId, Namespace, NodeId
from raykv.directory.members import Engine, Node
from raykv.directory.table.protocol import Changes, NodeTable

PIECE = 4096
"""Chunks in one go: some milliseconds."""


@dataclass
class _Task:
    """Places of chunks in a table, in order of their last use, and how far it has come."""

    node_id: NodeId
    table: NodeTable
    namespace: Namespace
    places: Sequence[Any]
    done: int = 0


class Leavings:
    """See the module's docstring.

    Args:
        nodes: by id.
        engines: those that are attached.
    """

    def __init__(self, nodes: Mapping[NodeId, Node], engines: Mapping[EngineId, Engine]) -> None:
        self._nodes = nodes
        self._engines = engines
        self._left: set[Namespace] = set()
        self._tasks: deque[_Task] = deque()

    def changed(self, before: Namespace, now: Namespace) -> None:
        """An engine that was in one namespace is in another one."""
        self.entered(now)
        is_used = any(engine.namespace == before for engine in self._engines.values())
        if not is_used and before not in self._left:
            self._left.add(before)
            self._begin(before)

    def entered(self, namespace: Namespace) -> None:
        """An engine is in a namespace, perhaps again."""
        if namespace in self._left:
            self._left.discard(namespace)
            self._begin(namespace)

    def came(self, node_id: NodeId, changes: Changes) -> None:
        """Chunks have come to a node."""
        if changes.namespace in self._left:
            self._nodes[node_id].book.release(changes.namespace, changes.keys)

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        used = {engine.namespace for engine in self._engines.values()}
        assert not used & self._left, used & self._left

    def _begin(self, namespace: Namespace) -> None:
        self._tasks = deque(task for task in self._tasks if task.namespace != namespace)
        for node_id, node in self._nodes.items():
            table = node.book.table
            places = table.places(namespace)
            uses = table.uses_at(places)
            # Of chunks of one request the tail first, which was used the least.
            order = sorted(range(len(places)), key=lambda at: (uses.used_at[at], uses.hits[at]))
            ordered = [places[at] for at in order]
            if ordered:
                self._tasks.append(_Task(node_id, table, namespace, ordered))
        self.go_on()

    def go_on(self) -> None:
        """Put the next piece into its order, if there is one."""
        if not self._tasks:
            return
        task = self._tasks[0]
        node = self._nodes.get(task.node_id)
        if node is None or node.book.table is not task.table:
            self._tasks.popleft()
            if node is not None:
                self._begin(task.namespace)
            return
        piece = task.places[task.done : task.done + PIECE]
        keys = task.table.held_at(piece, task.namespace).keys
        if task.namespace in self._left:
            task.table.release(task.namespace, keys)
        else:
            task.table.touch(task.namespace, keys)
        task.done += len(piece)
        if task.done >= len(task.places):
            self._tasks.popleft()
