"""What engines have begun to store, so that others may wait for it instead of computing it; pure.

             announce                          its node has it, its engine is gone, `COMING_S` later
  (nothing) ──────────► coming, by one engine ─────────────────────────────────────────► (nothing)
                          ▲                 │
                          └─────────────────┘ announced again, by that engine or another one

It is a hint, never a hit.

Invariants:
1. A chunk is coming from one engine life, the latest that has said so.
2. At most `MOST_COMING` chunks are coming, `MOST_OF_AN_ENGINE` of one engine life: what was
   announced longest ago is forgotten first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from raykv.base.ids import NodeId
from raykv.directory.known.holdings import Name
from raykv.directory.known.members import EngineLife

COMING_S = 2.0
MOST_COMING = 65_536
MOST_OF_AN_ENGINE = 4096

MOST_PLACES = 64
"""Of an engine, that end its announcements."""


class _Announced(NamedTuple):
    engine: EngineLife
    places: frozenset[NodeId]
    until: float


class Coming:
    """See the module's docstring. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        # Both in the order in which announcements end.
        self._announced: dict[Name, _Announced] = {}
        self._names: dict[EngineLife, dict[Name, None]] = {}

    def announce(
        self, engine: EngineLife, places: Iterable[NodeId], names: Iterable[Name], now: float
    ) -> None:
        """An engine stores chunks at its places, from now on."""
        announced = _Announced(engine, frozenset(islice(places, MOST_PLACES)), now + COMING_S)
        for name in names:
            self._end(name)
            self._announced[name] = announced
            own = self._names.setdefault(engine, {})
            own[name] = None
            if len(own) > MOST_OF_AN_ENGINE:
                self._end(next(iter(own)))
            elif len(self._announced) > MOST_COMING:
                self._end(next(iter(self._announced)))

    def is_coming(self, name: Name, engine: EngineLife, now: float) -> bool:
        """Whether another engine stores a chunk."""
        announced = self._announced.get(name)
        return announced is not None and announced.engine != engine and now < announced.until

    def came(self, node_id: NodeId, name: Name) -> None:
        """A node has a chunk in RAM."""
        announced = self._announced.get(name)
        if announced is not None and node_id in announced.places:
            self._end(name)

    def end(self, engine: EngineLife) -> None:
        """An engine is gone."""
        for name in list(self._names.get(engine, ())):
            self._end(name)

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""
        while self._announced:
            name, announced = next(iter(self._announced.items()))
            if now < announced.until:
                return
            self._end(name)

    def _end(self, name: Name) -> None:
        announced = self._announced.pop(name, None)
        if announced is not None:
            own = self._names[announced.engine]
            del own[name]
            if not own:
                del self._names[announced.engine]

    def __len__(self) -> int:
        return len(self._announced)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        pairs = {(each.engine, name) for name, each in self._announced.items()}
        assert pairs == {(engine, name) for engine, own in self._names.items() for name in own}
        assert len(self._announced) <= MOST_COMING, len(self._announced)
        assert all(0 < len(own) <= MOST_OF_AN_ENGINE for own in self._names.values())
        ends = [each.until for each in self._announced.values()]
        assert ends == sorted(ends)
