"""Who has which chunk: an engine's questions about other nodes, answered out of their books.

A chunk that an engine is storing is announced before it is there, with the lease that it is stored
at: who asks for it is told to wait. An announcement ends with its lease.

Invariant: a replica that is told is pinned, so that it is not evicted before it can be fetched.
"""

from __future__ import annotations

from collections.abc import Sequence

from raykv.core.members import Engine, Node
from raykv.core.table import ChunkTable, Name
from raykv.messages import Handles, Replicas
from raykv.types import Generation, Key, Namespace, NodeId, Slot

MAX_TOLD = 2
"""Replicas told per key: one to fetch from, and one for when that fails."""

FEW_NODES = 16
"""So many are put in order for every question."""

RANKING_S = 0.5
"""Else the order of their loads is used for so long: nodes report it once a second."""

MAX_ANNOUNCED = 262_144
"""Beyond it the oldest announcements are forgotten: who asks for them is told that they miss."""


class Questions:
    """Args:
    nodes: all nodes, kept up to date by the block manager.
    table: of all their chunks.
    """

    def __init__(self, nodes: dict[NodeId, Node], table: ChunkTable) -> None:
        self._nodes = nodes
        self._table = table
        self._announced: dict[Name, tuple[NodeId, Slot, Generation]] = {}
        # Host names, the least loaded node first.
        self._ranked: dict[NodeId, str] = {}
        self._ranked_at = float("-inf")

    def announce(self, engine: Engine, handles: Handles) -> None:
        """An engine is storing chunks at its leases."""
        columns = zip(handles.keys, handles.slots, handles.generations, strict=True)
        for key, slot, generation in columns:
            name = (engine.namespace, Key(key))
            self._announced.pop(name, None)
            self._announced[name] = (engine.node_id, Slot(slot), Generation(generation))
        if len(self._announced) > MAX_ANNOUNCED:
            self.forget_stale()

    def forget_stale(self) -> None:
        """Drop announcements whose leases have ended, and the oldest above the bound."""
        alive = [name for name in self._announced if self._is_announced(name)]
        self._announced = {name: self._announced[name] for name in alive[-MAX_ANNOUNCED:]}

    def forget_namespace(self, namespace: Namespace) -> None:
        """All its leases have ended."""
        for name in [name for name in self._announced if name[0] == namespace]:
            del self._announced[name]

    def _is_announced(self, name: Name) -> bool:
        announced = self._announced.get(name)
        if announced is None:
            return False
        node_id, slot, generation = announced
        node = self._nodes.get(node_id)
        return node is not None and node.book.lease_at(slot, generation) is not None

    def answer(
        self, engine: Engine, asked: Sequence[bytes], now: float, pinned_until: float
    ) -> Replicas:
        """Where the keys are; those on the engine's own node too."""
        if not asked:
            return Replicas()
        order = self._preference(engine, now)
        found = self._table.ask(engine.namespace, asked, order, MAX_TOLD, pinned_until)
        return Replicas(
            nodes=[str(node_id) for node_id in found.nodes],
            node_epochs=[int(self._nodes[node_id].epoch) for node_id in found.nodes],
            key_index=found.key_index,
            node_index=found.node_index,
            slots=found.slots,
            generations=found.generations,
            pending=[
                position
                for position in found.missing
                if self._is_announced((engine.namespace, Key(asked[position])))
            ],
        )

    def _preference(self, engine: Engine, now: float) -> list[NodeId]:
        """All nodes as sources: the own one, then the same host, then the least loaded."""
        is_late = len(self._nodes) <= FEW_NODES or now - self._ranked_at >= RANKING_S
        if is_late or self._ranked.keys() != self._nodes.keys():
            self._rank(now)
        own = self._nodes.get(engine.node_id)
        hostname = None if own is None else own.hostname
        order = [] if own is None else [own.node_id]
        order += [id_ for id_, name in self._ranked.items() if name == hostname]
        order += [id_ for id_, name in self._ranked.items() if name != hostname]
        # Of the own node's two places the first counts.
        return list(dict.fromkeys(order))

    def _rank(self, now: float) -> None:
        nodes = sorted(
            self._nodes.values(),
            key=lambda node: (node.stats.queued_jobs + node.stats.reading, node.node_id),
        )
        self._ranked = {node.node_id: node.hostname for node in nodes}
        self._ranked_at = now
