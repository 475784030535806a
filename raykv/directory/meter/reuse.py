"""Whether storing pays: chunks loaded beside chunks stored, by namespace, over all its engines.

The scheduler actor counts and informs each engine with every answer; the engine chooses.

What is loaded counts as the chunks of all KV groups that its tokens have: a prefix needs few of
windows and states, and saves computing all of them. See `ReuseGauge` for what is decided.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from raykv.base.ids import Namespace
from raykv.directory.members import Engine, Node
from raykv.node.pool.engines import ReuseGauge
from raykv.protocol.descriptions import ChunkGroup


class ReuseGauges:
    """The gauges of all namespaces."""

    def __init__(self) -> None:
        self._gauges: defaultdict[Namespace, ReuseGauge] = defaultdict(ReuseGauge)

    def count(
        self,
        engine: Engine,
        node: Node,
        counters: Mapping[str, int],
        groups: Sequence[ChunkGroup],
        num_nodes: int,
    ) -> None:
        """Take in the counters of an engine on a node, of the KV groups as far as they are known;
        `num_nodes` nodes have engines.
        """
        if not counters:
            return

        def more(name: str) -> int:
            return counters.get(name, 0) - engine.counters.get(name, 0)

        stored, loaded = more("chunks_stored"), more("chunks_loaded")
        if groups:
            loaded = round(more("loaded_tokens") * sum(1 / each.tokens for each in groups))
        sizes = engine.slot_bytes.values()
        num_slots = node.book.table.geometry.pool_bytes * len(sizes) // sum(sizes)
        # All those pools are assumed to be equally large.
        self._gauges[engine.namespace].count(stored, loaded, num_nodes * num_slots)

    def store_share(self, namespace: Namespace) -> int:
        """One request in so many should store."""
        return self._gauges[namespace].store_share
