"""Floors: below which number of the orders chunks are void, of some namespaces and of all.

The orders' document has them, and NodeActors, disks and pool files keep them. So what was away when
the cache was cleared, or is taken up later, is void wherever it comes to. A floor is that of all
parts of a namespace.

Invariants:
1. `of` never falls, whatever is taken in, in whatever order.
2. A namespace has a floor of its own only if that is above the floor of all namespaces.
3. At most `MAX_NAMESPACES` have one: beyond that, the lowest of these floors becomes that of all.
"""

from __future__ import annotations

from collections.abc import Mapping

from raykv.base.ids import EVERY_NAMESPACE, Namespace, family_of

MAX_NAMESPACES = 256
"""Floors of single namespaces: with them a report stays well under Ray's 100 KiB inline limit."""


class Clearings:
    """Floors by namespace, starting with `first`; see the module's docstring."""

    def __init__(self, first: Mapping[str, int] | None = None) -> None:
        self._floors: dict[Namespace, int] = {}
        self.take(first or {})

    def of(self, namespace: Namespace) -> int:
        """The number below which copies of a namespace are void."""
        every = self._floors.get(EVERY_NAMESPACE, 0)
        return max(every, self._floors.get(family_of(namespace), 0))

    def take(self, told: Mapping[str, int]) -> set[Namespace]:
        """Take in floors by namespace, `EVERY_NAMESPACE` among them; returns what rose."""
        risen = set()
        for name, floor in told.items():
            namespace = family_of(name)
            if floor > self.of(namespace):
                self._floors[namespace] = floor
                risen.add(namespace)
        while len(self._floors.keys() - {EVERY_NAMESPACE}) > MAX_NAMESPACES:
            own = (floor for name, floor in self._floors.items() if name != EVERY_NAMESPACE)
            self._floors[EVERY_NAMESPACE] = min(own)
            risen.add(EVERY_NAMESPACE)
            self._drop_covered()
        if risen:
            self._drop_covered()
        return risen

    def _drop_covered(self) -> None:
        every = self._floors.get(EVERY_NAMESPACE, 0)
        for name, floor in list(self._floors.items()):
            if name != EVERY_NAMESPACE and floor <= every:
                del self._floors[name]

    @property
    def told(self) -> dict[str, int]:
        """All floors, as they stand in messages and files; a copy."""
        return {str(name): int(floor) for name, floor in self._floors.items()}
