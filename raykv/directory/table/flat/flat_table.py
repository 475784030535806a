"""The table of slots and chunks in flat arrays; see `raykv.directory.table.protocol`.

About 111 bytes a slot, all told.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import Namespace, NodeId
from raykv.directory.table.flat import batches
from raykv.directory.table.flat.arrays import Array
from raykv.directory.table.flat.layout import (
    CLASS,
    HELD,
    NAME,
    NODE,
    NONE,
    RELEASED,
    SPARE,
    STATE,
    TWIN,
)
from raykv.directory.table.flat.node_table import FlatNodeTable
from raykv.directory.table.flat.rows import Rows, until_tick
from raykv.directory.table.protocol import Found
from raykv.protocol.columns import Numbers


class FlatTable:
    """See `raykv.directory.table.protocol.ChunkTable`; `eviction_policy` is `lru` or `worth`."""

    def __init__(self, eviction_policy: str) -> None:
        self._rows = Rows(learns=eviction_policy == "worth")
        self._nodes: dict[NodeId, FlatNodeTable] = {}
        # Node ids by number; None where a number is free.
        self._node_ids: list[NodeId | None] = []
        # Of the last question, and the ranks that follow from it, by the nodes' numbers.
        self._ranked: tuple[NodeId, ...] = ()
        self._ranks: Array = np.empty(0, np.int64)
        # Scratch space for answers: new memory takes a tenth as long as finding everything.
        self._found: Array = np.empty((7, 0), np.int64)

    def add_node(self, node_id: NodeId, geometry: PoolGeometry) -> FlatNodeTable:
        assert node_id not in self._nodes, node_id
        if None not in self._node_ids:
            self._node_ids.append(None)
        number = self._node_ids.index(None)
        self._node_ids[number] = node_id
        self._rows.reserve_node(number)
        self._ranked = ()
        made = self._nodes[node_id] = FlatNodeTable(self._rows, number, geometry)
        return made

    def remove_node(self, node_id: NodeId) -> None:
        """See `ChunkTable.remove_node`; the chunks that others have too go in eviction order."""
        lost = self._nodes.pop(node_id)
        lost.close()
        self._node_ids[lost.number] = None
        self._ranked = ()

    def ask(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        ranked: tuple[NodeId, ...],
        first: Sequence[NodeId],
        most: int,
        until: float | None,
    ) -> Found:
        if not keys:
            return Found([], [], [], [], [], [])
        rows = self._rows
        batch = rows.batch(namespace, keys)
        ranks = self._ranks_of(ranked).copy()
        for position, node_id in enumerate(first):
            ranks[self._nodes[node_id].number] = position - len(first)
        room = max(len(keys) * min(most, len(ranked)), len(keys), len(ranks))
        if self._found.shape[1] < room:
            self._found = np.empty((7, room), np.int64)
        out = self._found
        count, num_missing, num_nodes = batches.ask(
            rows.arrays,
            batch.keys,
            batch.names,
            ranks,
            most,
            0 if until is None else until_tick(until),
            out,
        )
        told = [self._node_ids[number] for number in out[5, :num_nodes].tolist()]
        return Found(
            nodes=[node_id for node_id in told if node_id is not None],
            key_index=Numbers(out[0, :count].tobytes()),
            node_index=Numbers(out[1, :count].tobytes()),
            slots=Numbers(out[2, :count].tobytes()),
            generations=Numbers(out[3, :count].tobytes()),
            missing=out[4, :num_missing].tolist(),
        )

    def _ranks_of(self, ranked: tuple[NodeId, ...]) -> Array:
        if ranked is not self._ranked or not ranked:
            self._ranked = ranked
            self._ranks = np.full(len(self._node_ids), NONE, np.int64)
            numbers = [self._nodes[node_id].number for node_id in ranked]
            self._ranks[numbers] = np.arange(len(ranked))
        return self._ranks

    def set_clock(self, now: float) -> None:
        self._rows.set_clock(now)

    def check(self) -> None:
        rows = self._rows
        heads = {(int(entry) & NONE) - 1 for entry in rows.index if entry}
        seen: set[int] = set()
        for first in heads:
            chain = [first]
            while (twin := int(rows.rows[chain[-1], TWIN])) != NONE:
                chain.append(twin)
            nodes = [int(rows.classes[rows.rows[row, CLASS], NODE]) for row in chain]
            assert len(set(nodes)) == len(nodes), (first, nodes)
            states = {int(rows.rows[row, STATE]) for row in chain}
            ordinary = max(states) >= HELD if len(chain) == 1 else SPARE in states
            assert ordinary or states == {RELEASED}, chain
            assert len(chain) == 1 or states <= {SPARE, RELEASED}, chain
            assert all((rows.rows[row, NAME:] == rows.rows[first, NAME:]).all() for row in chain)
            seen.update(chain)
        held = [row for node in self._nodes.values() for row in node.places()]
        assert sorted(seen) == sorted(held), (seen, held)
        for node in self._nodes.values():
            node.check()
