"""Whether storing pays: chunks loaded beside chunks stored, by namespace, over all its engines.

        a sample with too few loads
  ALL ─────────────────────────────► SOME (one request in sixteen stores)
   ▲                                   │ a sample with enough loads
   └───────────────────────────────────┘

The scheduler actor counts and informs each engine with every answer; the engine chooses.

A store costs an engine a small part of the time that computing the chunk took; a load saves nearly
all of it. So few loads are enough. What is loaded counts as the chunks of all KV groups that its
tokens have: a prefix needs few of windows and states, and saves computing all of them.

A sample ends when as many chunks were stored as the pools hold, and never before `MIN_SAMPLE`:
until then a chunk had no time to be wanted again. The sums of the last sample count half in the
next one, so that one odd sample does not switch anything for long.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raykv.base.ids import Namespace
from raykv.directory.members import Engine, Node
from raykv.protocol.descriptions import ChunkGroup

LEAST_REUSE = 0.03
"""Loads for each store below which it does not pay: a store costs up to 3 % of computing."""

MIN_SAMPLE = 2048
"""Chunks stored before anything is decided."""

PROBE_SAMPLE = 256
"""Chunks stored before it is decided again, while few are."""

PROBE_LOADS = 64
"""Or loaded: what is asked for again and again is stored once."""

SOME = 16
"""Then one request of so many stores, to notice when reuse begins."""


@dataclass
class ReuseGauge:
    """Whether storing pays in one namespace: one request in `store_share` should store."""

    stored: float = 0.0
    loaded: float = 0.0
    store_share: int = 1
    # Those that are left over from earlier samples.
    _old_stored: float = 0.0
    _old_loaded: float = 0.0

    def count(self, stored: int, loaded: int, capacity: int) -> None:
        """Engines have stored and loaded chunks; `capacity` is how many the pools hold."""
        self.stored += max(0, stored)
        self.loaded += max(0, loaded)
        is_storing_few = self.store_share > 1
        sample = PROBE_SAMPLE if is_storing_few else max(MIN_SAMPLE, capacity)
        has_begun_again = is_storing_few and self.loaded - self._old_loaded >= PROBE_LOADS
        if self.stored - self._old_stored < sample and not has_begun_again:
            return
        self.store_share = 1 if self.loaded >= LEAST_REUSE * self.stored else SOME
        self.stored /= 2
        self.loaded /= 2
        self._old_stored, self._old_loaded = self.stored, self.loaded


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
