"""What operators' orders mean for the directory: what was cleared, and what weights are called.

The document itself goes to the nodes by another way; here it is looked at when its number changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from raykv.base.ids import Namespace, Stamp
from raykv.directory.known.document import Orders
from raykv.protocol.engine import NOTHING_ORDERED, Naming
from raykv.protocol.node import ReportedEngine

FIRST_NUMBER = 1
"""Of a history: its floors are those of the histories before."""


class OrdersWatch:
    """See the module's docstring.

    Args:
        orders: see there.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._seen: Stamp | None = None
        self._began_with = orders.stamp
        # When each floor was set; and what weights are called, by the lives of EngineCores.
        self._floors: dict[Namespace, Stamp] = {}
        self._namings: dict[int, Naming] = {}

    @property
    def stamp(self) -> Stamp:
        """The number that is in force."""
        return self._orders.stamp or NOTHING_ORDERED

    def look(self, now: float) -> dict[Namespace, Stamp]:
        """Namespaces that were cleared since the last look, and by which number.

        What the document says with which this life has begun, or a history, is no news.
        """
        document = None if self._orders.stamp == self._seen else self._orders.told(now)
        if document is None:
            return {}
        is_kept = self._seen is None and self._began_with == document.stamp
        self._seen = document.stamp
        self._namings = document.namings
        before = self._floors
        self._floors = {
            Namespace(name): Stamp(document.stamp.history, floor)
            for name, floor in document.floors.items()
        }
        risen = {
            name: floor
            for name, floor in self._floors.items()
            if floor > before.get(name, NOTHING_ORDERED) and floor.number > FIRST_NUMBER
        }
        return {} if is_kept else risen

    def namings(self, engines: Iterable[ReportedEngine]) -> dict[int, Naming]:
        """What weights of engines are called, by the life: of those that have not heard it yet."""
        named = ((each, self._namings.get(each.hello.life)) for each in engines)
        return {
            engine.hello.life: naming
            for engine, naming in named
            if naming is not None and naming.stamp > engine.heard
        }
