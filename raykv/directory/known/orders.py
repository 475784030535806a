"""What operators' orders mean for the directory: what was cleared, and what weights are called.

The document itself goes to the nodes by another way; here it is looked at when its number changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raykv.base.ids import Namespace, Stamp
from raykv.directory.known.document import Orders
from raykv.protocol.named.place import NOTHING_ORDERED
from raykv.protocol.named.report import ReportedEngine

FIRST_NUMBER = 1
"""Of a history: its floors are those of the histories before."""


class _NamedWeights(NamedTuple):
    """`order` is the number at which the version was new."""

    order: str
    version: str


class OrdersWatch:
    """See the module's docstring.

    Args:
        orders: see there.
    """

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._seen: Stamp | None = None
        self._began_with = orders.stamp
        # When each floor was set; and what weights are called, by the beginning of a name.
        self._floors: dict[Namespace, Stamp] = {}
        self._namings: dict[str, _NamedWeights] = {}

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
        self._namings = {
            beginning: self._naming(beginning, version)
            for beginning, version in document.namings.items()
        }
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

    def _naming(self, beginning: str, version: str) -> _NamedWeights:
        known = self._namings.get(beginning)
        if known is not None and known.version == version:
            return known
        return _NamedWeights(str(self.stamp.number), version)

    def namings(self, engines: Iterable[ReportedEngine]) -> dict[str, tuple[str, str]]:
        """What weights of engines are called, by engine: of those that have not heard it yet.

        The longest beginning of an engine's id or namespace counts.
        """
        found = {}
        for engine in engines if self._namings else ():
            named = self._named(engine.hello.engine_id, engine.hello.namespace)
            if named is not None and named.order != engine.heard:
                found[engine.hello.engine_id] = (named.order, named.version)
        return found

    def _named(self, *names: str) -> _NamedWeights | None:
        fitting = [
            each for each in self._namings if each and any(n.startswith(each) for n in names)
        ]
        return self._namings[max(fitting, key=len)] if fitting else None
