"""Eviction policies: in which order a node's chunks of one slot size are given up.

A policy orders names; it owns no chunk. Invariant: it holds exactly the names that were added and
neither removed nor evicted. The chunks of a request are added and touched from its tail, so that
the head of a prefix, without which the rest is worthless, counts as the latest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from raykv.directory.table.worth import Worth

N = TypeVar("N", bound=Hashable)


class EvictionPolicy(Protocol[N]):
    """What the block manager asks of a policy."""

    def add(self, name: N, together: int = 0, *, is_tail: bool = False) -> None:
        """A chunk became READY. Adding a name again counts as touching it.

        `together`: how many chunks came with it, itself included; 0: unknown. `is_tail`: it is the
        last of their prompt.
        """

    def touch(self, name: N, together: int = 0) -> None:
        """The chunk was used, with so many `together`. A name that is not held is ignored."""

    def remove(self, name: N) -> None:
        """The chunk is gone, whatever its worth. A name that is not held is ignored."""

    def evicted(self, name: N) -> None:
        """The chunk was given up for lack of room; a policy may remember that it was there.

        A name that is not held is ignored.
        """

    def candidates(self) -> Iterator[N]:
        """All names, the first to give up first. Not valid after a change of the policy."""

    def __len__(self) -> int:
        """How many names are held."""


class LRU(Generic[N]):
    """Least recently used first."""

    def __init__(self) -> None:
        # From least to most recently used.
        self._names: OrderedDict[N, None] = OrderedDict()

    def add(self, name: N, together: int = 0, *, is_tail: bool = False) -> None:
        self._names[name] = None
        self._names.move_to_end(name)

    def touch(self, name: N, together: int = 0) -> None:
        if name in self._names:
            self._names.move_to_end(name)

    def remove(self, name: N) -> None:
        self._names.pop(name, None)

    def evicted(self, name: N) -> None:
        self.remove(name)

    def candidates(self) -> Iterator[N]:
        return iter(self._names)

    def __contains__(self, name: N) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)


POLICIES: dict[str, Callable[[], EvictionPolicy[tuple[str, bytes]]]] = {
    "worth": Worth,
    "lru": LRU,
}
"""Policies by the name that the setting `eviction_policy` uses."""

DEFAULT_POLICY = "worth"
"""The name of the one that is used unless a setting names another."""
