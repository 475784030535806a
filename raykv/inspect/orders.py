"""Orders of eviction for replays: the one of a NodeActor's pool, and others to compare it with.

An order holds no chunk. Invariant: it has exactly the chunks that were added and not evicted. Those
of a request are added and touched from its tail, so that the head of a prefix, without which the
rest is worthless, counts as the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from raykv.base.ids import Key, Namespace, Stamp
from raykv.node.pool.order import EvictionOrder
from raykv.node.pool.records import ChunkRecord


class LRU:
    """Least recently used first."""

    def __init__(self) -> None:
        # From least to most recently used.
        self._names: OrderedDict[int, None] = OrderedDict()

    def add(self, name: int) -> None:
        """A chunk was stored that the order does not have."""
        self._names[name] = None

    def touch(self, name: int) -> None:
        """A chunk of the order was used."""
        self._names.move_to_end(name)

    def evicted(self, name: int) -> None:
        """A chunk of the order was given up for lack of room."""
        del self._names[name]

    def candidates(self) -> Iterator[int]:
        """All chunks, the first to give up first. Not valid after a change of the order."""
        return iter(self._names)


class NodeOrder:
    """The order of a NodeActor's pool, as one of chunks that have numbers alone."""

    def __init__(self) -> None:
        self._order = EvictionOrder()
        self._records: dict[int, ChunkRecord] = {}

    def add(self, name: int) -> None:
        """See `LRU`, for all that follow too."""
        record = ChunkRecord(Namespace(""), Key(name.to_bytes(8, "big")), 1, Stamp(1, 1))
        self._records[name] = record
        self._order.enter([record])

    def touch(self, name: int) -> None:
        self._order.touch([self._records[name]])

    def evicted(self, name: int) -> None:
        self._order.leave(self._records.pop(name), remember=True)

    def candidates(self) -> Iterator[int]:
        return (int.from_bytes(record.key, "big") for record in self._order)


Policy = LRU | NodeOrder

DEFAULT_POLICY = "node"
"""The one that pools have."""

POLICIES: dict[str, Callable[[], Policy]] = {DEFAULT_POLICY: NodeOrder, "lru": LRU}
