"""Which node has which chunk: an engine's questions about others, answered out of their books.

A chunk that an engine is storing is announced before it is there, with the lease that it is stored
at: an engine that asks for it waits. An announcement ends with its lease.

Invariant: a replica that is named in an answer is pinned, so that it is not evicted before it can
be fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from raykv.base.ids import Generation, Key, Namespace, NodeId, Slot
from raykv.directory.disks import Disks
from raykv.directory.inventory import drop_lost
from raykv.directory.members import Engine, Node
from raykv.directory.table.protocol import Changes, ChunkTable, Name
from raykv.protocol.columns import Handles, LostReplicas, Numbers, Replicas, Source

MAX_TOLD = 2
"""Replicas named per key: one to fetch from, and one for when that fails."""

FEW_NODES = 16
"""Up to so many nodes are sorted anew for every question."""

RANKING_S = 0.5
"""Otherwise the order of their loads is used for so long: nodes report it once a second."""

_NEVER = float("-inf")

MAX_ANNOUNCED = 262_144
"""Beyond it the oldest announcements are forgotten: engines that ask for them get a miss."""


class Questions:
    """Answers engines that ask where chunks are.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        table: the chunks of all nodes.
        disks: the chunks on their disks, for those that no pool has.
    """

    def __init__(
        self, nodes: dict[NodeId, Node], table: Callable[[], ChunkTable], disks: Disks
    ) -> None:
        self._nodes = nodes
        self._table = table
        self._disks = disks
        self._announced: dict[Name, tuple[NodeId, Slot, Generation]] = {}
        # The least loaded node first, of all and of each host.
        self._ranked: tuple[NodeId, ...] = ()
        self._of_host: dict[str, list[NodeId]] = {}
        self._ranked_at = _NEVER

    def nodes_changed(self) -> None:
        """A node has come, or gone."""
        self._ranked_at = _NEVER

    def announce(self, engine: Engine, handles: Handles) -> None:
        """An engine is storing chunks at its leases."""
        columns = zip(handles.keys, handles.slots, handles.generations, strict=True)
        for key, slot, generation in columns:
            name = (engine.namespace, Key(key))
            self._announced.pop(name, None)
            self._announced[name] = (engine.node_id, Slot(slot), Generation(generation))
        if len(self._announced) > MAX_ANNOUNCED:
            self.forget_stale()

    def stored(self, namespace: Namespace, keys: Sequence[bytes]) -> None:
        """Chunks are there: nobody has to wait for them."""
        if self._announced:
            for key in keys:
                self._announced.pop((namespace, Key(key)), None)

    @property
    def num_announced(self) -> int:
        """Chunks that somebody was storing when that was looked at last."""
        return len(self._announced)

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
        return node is not None and node.book.is_leased_at(slot, generation)

    def answer(
        self, engine: Engine, asked: Sequence[bytes], now: float, pinned_until: float
    ) -> Replicas:
        """Where the keys are; those on the engine's own node too."""
        if not asked:
            return Replicas()
        first = self._first(engine, now)
        found = self._table().ask(
            engine.namespace, asked, self._ranked, first, MAX_TOLD, pinned_until
        )
        replicas = Replicas(
            sources=[Source(node_id) for node_id in found.nodes],
            node_epochs=[int(self._nodes[node_id].epoch) for node_id in found.nodes],
            key_index=Numbers.of(found.key_index),
            source_index=Numbers.of(found.node_index),
            slots=Numbers.of(found.slots),
            generations=Numbers.of(found.generations),
        )
        keys = list(asked) if found.missing else []
        absent: list[tuple[int, Name]] = []
        for position in found.missing:
            name = (engine.namespace, Key(keys[position]))
            if self._is_announced(name):
                replicas.pending.append(position)
            else:
                absent.append((position, name))
        return self._disks.with_sources(replicas, absent, engine.node_id, MAX_TOLD)

    def gone(self, node_id: NodeId, changes: Changes) -> None:
        """Chunks left a pool: those that were evicted from the last one are offered to its disk."""
        if changes.hits and self._disks.is_open(node_id):
            if self._ranked_at == _NEVER:
                self._rank(_NEVER)
            found = self._table().ask(changes.namespace, changes.keys, self._ranked, (), 1, None)
            self._disks.demote(node_id, changes, found.missing)

    def lost(self, namespace: Namespace, lost: LostReplicas) -> None:
        """Sources have said that they do not have chunks."""
        drop_lost(self._nodes, namespace, lost)
        self._disks.drop_lost(namespace, lost)

    def _first(self, engine: Engine, now: float) -> list[NodeId]:
        """The sources that go before the least loaded: the own node, then those on its host."""
        if len(self._nodes) <= FEW_NODES or now - self._ranked_at >= RANKING_S:
            self._rank(now)
        own = self._nodes.get(engine.node_id)
        if own is None:
            return []
        others = [each for each in self._of_host.get(own.hostname, ()) if each != own.node_id]
        return [own.node_id, *others]

    def _rank(self, now: float) -> None:
        nodes = sorted(
            self._nodes.values(),
            key=lambda node: (node.stats.queued_jobs + node.stats.reading, node.node_id),
        )
        ranked = tuple(node.node_id for node in nodes)
        if ranked != self._ranked:
            # The table keeps what follows from an order as long as it is the same object.
            self._ranked = ranked
        self._of_host = {}
        for node in nodes:
            self._of_host.setdefault(node.hostname, []).append(node.node_id)
        self._ranked_at = now
