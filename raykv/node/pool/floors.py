"""Which copies are void, by the orders under which they were stored.

A stamp is the number of the orders that an engine knew when it offered a store. It stays with the
bytes wherever they go, and is never raised. A clear is an order: it makes void what was stored
under an earlier number. Numbers count within a history, which begins anew with the store of Ray's
head; what is of another history is older than every clear of the present one.

The floors of one history are `Clearings`: they never fall, and are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from raykv.base.clearings import Clearings
from raykv.base.ids import Namespace, Stamp

MAX_HISTORIES = 8
"""That are remembered; what is of another one is void."""


class Floors:
    """See the module's docstring.

    Args:
        history: the present one.
        known: floors by history, the latest last; of each by namespace.
    """

    def __init__(
        self, history: int = 0, known: Mapping[int, Mapping[str, int]] | None = None
    ) -> None:
        self._floors: dict[int, Clearings] = {}
        for each, floors in (known or {}).items():
            self.begin(each)
            self.take(floors)
        self.begin(history)

    @property
    def history(self) -> int:
        """The present one, the latest."""
        return next(reversed(self._floors))

    def begin(self, history: int) -> None:
        """From now on orders are of that history; its floors, if it is known, stay."""
        self._floors[history] = self._floors.pop(history, Clearings())
        while len(self._floors) > MAX_HISTORIES:
            del self._floors[next(iter(self._floors))]

    def take(self, floors: Mapping[str, int]) -> set[Namespace]:
        """Take in floors of the present history; returns the namespaces of which one rose."""
        return self._floors[self.history].take(floors)

    def is_void(self, namespace: Namespace, stamp: Stamp) -> bool:
        """Whether a copy with that stamp may not be served, nor taken in."""
        floors = self._floors.get(stamp.history)
        if floors is None or stamp.number < floors.of(namespace):
            return True
        if stamp.history == self.history:
            return False
        histories = list(self._floors)
        later = histories[histories.index(stamp.history) + 1 :]
        return any(self._floors[history].of(namespace) for history in later)

    def is_older(self, stamp: Stamp, other: Stamp) -> bool:
        """Whether a clear could make the one void and not the other."""
        histories = [-1, *self._floors]
        one, two = (
            (histories.index(each.history) if each.history in self._floors else 0, each.number)
            for each in (stamp, other)
        )
        return one < two

    @property
    def told(self) -> dict[int, dict[str, int]]:
        """All floors by history, the present one last; a copy."""
        return {history: floors.told for history, floors in self._floors.items()}
