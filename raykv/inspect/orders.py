"""Orders of eviction for replays: the one of a NodeActor's pool, and others to compare it with.

An order holds no chunk. Invariant: it has exactly the names that were added and neither removed nor
evicted. The chunks of a request are added and touched from its tail, so that the head of a prefix,
without which the rest is worthless, counts as the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from raykv.base.ids import Key, Namespace, Stamp
from raykv.node.pool.order import EvictionOrder
from raykv.node.pool.records import ChunkRecord

N = TypeVar("N", bound=Hashable)


class EvictionPolicy(Protocol[N]):
    """What a replay asks of an order."""

    def add(self, name: N) -> None:
        """A chunk was stored. Adding a name again counts as touching it."""

    def touch(self, name: N) -> None:
        """The chunk was used. A name that is not held is ignored."""

    def evicted(self, name: N) -> None:
        """The chunk was given up for lack of room; an order may remember that it was there.

        A name that is not held is ignored.
        """

    def candidates(self) -> Iterator[N]:
        """All names, the first to give up first. Not valid after a change of the order."""


class LRU(Generic[N]):
    """Least recently used first."""

    def __init__(self) -> None:
        # From least to most recently used.
        self._names: OrderedDict[N, None] = OrderedDict()

    def add(self, name: N) -> None:
        self._names[name] = None
        self._names.move_to_end(name)

    def touch(self, name: N) -> None:
        if name in self._names:
            self._names.move_to_end(name)

    def evicted(self, name: N) -> None:
        self._names.pop(name, None)

    def candidates(self) -> Iterator[N]:
        return iter(self._names)


class NodeOrder:
    """The order of a NodeActor's pool, as one of chunks that have numbers alone."""

    def __init__(self) -> None:
        self._order = EvictionOrder()
        self._records: dict[int, ChunkRecord] = {}

    def add(self, name: int) -> None:
        """See `EvictionPolicy`, for all that follow too."""
        if name in self._records:
            self.touch(name)
            return
        record = ChunkRecord(Namespace(""), Key(name.to_bytes(8, "big")), 1, Stamp(1, 1))
        self._records[name] = record
        self._order.enter([record])

    def touch(self, name: int) -> None:
        if name in self._records:
            self._order.touch([self._records[name]])

    def evicted(self, name: int) -> None:
        record = self._records.pop(name, None)
        if record is not None:
            self._order.leave(record, remember=True)

    def candidates(self) -> Iterator[int]:
        return (int.from_bytes(record.key, "big") for record in self._order)


DEFAULT_POLICY = "node"
"""The one that pools have."""

POLICIES: dict[str, Callable[[], EvictionPolicy[int]]] = {DEFAULT_POLICY: NodeOrder, "lru": LRU}
