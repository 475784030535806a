"""Which copies are void, by the orders under which they were stored.

A stamp is the number of the orders that an engine knew when it offered a store. It stays with the
bytes wherever they go, and is never raised. A clear is an order: it makes void what was stored
under an earlier number. Numbers count within a history, which begins anew with the store of Ray's
head; what is of another history is older than every clear of the present one.

The floors of one history are `Clearings`: they never fall, and are bounded.

Before its first orders a node is in `NO_HISTORY`, which each life has anew: after all that its disk
knows, before the first history of which it hears. Nobody is told of that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from raykv.base.clearings import Clearings
from raykv.base.ids import Namespace, Stamp

MAX_HISTORIES = 8
"""That are remembered; what is of another one is void."""


NO_HISTORY = 0
"""Of what was stored before anybody knew of orders."""


class Floors:
    """See the module's docstring.

    Args:
        history: the present one.
    """

    def __init__(self, history: int = NO_HISTORY) -> None:
        self._floors: dict[int, Clearings] = {}
        self.begin(history)

    def begin(self, history: int) -> None:
        """From now on orders are of that history; its floors, if it is known, stay."""
        self.history = history
        self._floors[history] = self._floors.pop(history, Clearings())
        self._forget_first()

    def learn(self, known: Mapping[int, Mapping[str, int]]) -> set[Namespace]:
        """Take in what a disk or a pool file has kept, by history, the latest last; returns the
        namespaces of which a floor rose. Histories that it does not know are later ones.
        """
        histories = [each for each in dict.fromkeys([*known, *self._floors]) if each != NO_HISTORY]
        if NO_HISTORY in self._floors:
            own = list(self._floors)
            begun = own[own.index(NO_HISTORY) + 1 :]
            first = min(map(histories.index, begun), default=len(histories))
            histories.insert(first, NO_HISTORY)
        self._floors = {each: self._floors.get(each, Clearings()) for each in histories}
        risen = [self._floors[each].take(known.get(each, {})) for each in histories]
        self._forget_first()
        return set().union(*risen)

    def _forget_first(self) -> None:
        while len(self._floors) > MAX_HISTORIES:
            del self._floors[next(each for each in self._floors if each != self.history)]

    def take(self, floors: Mapping[str, int]) -> set[Namespace]:
        """Take in floors of the present history; returns the namespaces of which one rose."""
        return self._floors[self.history].take(floors)

    def is_void(self, namespace: Namespace, stamp: Stamp) -> bool:
        """Whether a copy with that stamp may not be served, nor taken in."""
        history, number = stamp
        floors = self._floors.get(history)
        if floors is None or number < floors.of(namespace):
            return True
        if history == self.history:
            return False
        histories = list(self._floors)
        later = histories[histories.index(stamp.history) + 1 :]
        return any(self._floors[history].of(namespace) for history in later)

    def is_void_of_earlier(self, namespace: Namespace, stamp: Stamp) -> bool:
        """`is_void` of a copy that an earlier life has left: what that one had stored before its
        first orders may be older than any clear.
        """
        if stamp.history == NO_HISTORY:
            return any(floors.of(namespace) for floors in self._floors.values())
        return self.is_void(namespace, stamp)

    def is_older(self, stamp: Stamp, other: Stamp) -> bool:
        """Whether a clear could make the one void and not the other."""
        if stamp == other:
            return False
        histories = [-1, *self._floors]
        one, two = (
            (histories.index(each.history) if each.history in self._floors else 0, each.number)
            for each in (stamp, other)
        )
        return one < two

    @property
    def told(self) -> dict[int, dict[str, int]]:
        """All floors by history, the present one last; a copy."""
        return {
            history: floors.told
            for history, floors in self._floors.items()
            if history != NO_HISTORY
        }
