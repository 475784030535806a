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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.known.members import EngineLife

COMING_S = 2.0
"""As long as a request waits by default for chunks that are being stored, see
`Settings.lookup_s`."""

MOST_COMING = 65_536
MOST_OF_AN_ENGINE = 4096

MOST_PLACES = 64
"""Of an engine, that end its announcements."""


@dataclass(slots=True, eq=False)
class _Announcement:
    """Chunks that were announced together, and have not come yet."""

    engine: EngineLife
    places: frozenset[NodeId]
    namespace: Namespace
    keys: dict[Key, None]
    until: float


Announcements = dict[_Announcement, None]
"""In the order in which they end."""


class Coming:
    """See the module's docstring. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._announced: Announcements = {}
        self._of: dict[EngineLife, Announcements] = {}
        self._by_key: dict[Namespace, dict[Key, _Announcement]] = {}

    def announce(
        self,
        engine: EngineLife,
        places: Iterable[NodeId],
        namespace: Namespace,
        keys: Sequence[Key],
        now: float,
    ) -> None:
        """An engine stores chunks at its places, from now on."""
        self._end(namespace, keys)
        if not keys:
            return
        at = frozenset(islice(places, MOST_PLACES))
        new = _Announcement(engine, at, namespace, dict.fromkeys(keys), now + COMING_S)
        self._by_key.setdefault(namespace, {}).update(dict.fromkeys(keys, new))
        self._announced[new] = None
        of_engine = self._of.setdefault(engine, {})
        of_engine[new] = None
        num_keys = sum(len(each.keys) for each in of_engine)
        self._forget_oldest(of_engine, num_keys - MOST_OF_AN_ENGINE)
        self._forget_oldest(self._announced, len(self) - MOST_COMING)

    def _forget_oldest(self, announced: Announcements, count: int) -> None:
        while count > 0:
            oldest = next(iter(announced))
            keys = list(islice(oldest.keys, count))
            self._end(oldest.namespace, keys)
            count -= len(keys)

    def of_others(
        self, namespace: Namespace, keys: Sequence[Key], engine: EngineLife, now: float
    ) -> list[int]:
        """Which of the keys another engine stores: their numbers."""
        announced = self._by_key.get(namespace, {})
        if announced.keys().isdisjoint(keys):
            return []
        found = zip(keys, map(announced.get, keys), strict=True)
        return [
            at
            for at, (_, each) in enumerate(found)
            if each is not None and each.engine != engine and now < each.until
        ]

    def came(self, node_id: NodeId, namespace: Namespace, keys: Sequence[Key]) -> None:
        """A node has chunks in RAM."""
        announced = self._by_key.get(namespace, {})
        some = announced.keys() & keys
        self._end(namespace, [key for key in some if node_id in announced[key].places])

    def end(self, engine: EngineLife) -> None:
        """An engine is gone."""
        for each in list(self._of.get(engine, ())):
            self._end(each.namespace, list(each.keys))

    def expire(self, now: float) -> None:
        """Forget what has not come in time."""
        while self._announced:
            oldest = next(iter(self._announced))
            if now < oldest.until:
                return
            self._end(oldest.namespace, list(oldest.keys))

    def _end(self, namespace: Namespace, keys: Sequence[Key]) -> None:
        """End the announcements of these keys, if there are any."""
        announced = self._by_key.get(namespace, {})
        for key in announced.keys() & keys:
            one = announced.pop(key)
            del one.keys[key]
            if not one.keys:
                self._forget(one)
        if not announced:
            self._by_key.pop(namespace, None)

    def _forget(self, announcement: _Announcement) -> None:
        del self._announced[announcement]
        of_engine = self._of[announcement.engine]
        del of_engine[announcement]
        if not of_engine:
            del self._of[announcement.engine]

    def __len__(self) -> int:
        return sum(map(len, self._by_key.values()))

    def check(self) -> None:
        """Assert the invariants; for tests."""
        by_key = {
            (namespace, key): each
            for namespace, announced in self._by_key.items()
            for key, each in announced.items()
        }
        assert by_key == {
            (each.namespace, key): each for each in self._announced for key in each.keys
        }
        assert all(self._by_key.values())
        assert {(engine, each) for engine, own in self._of.items() for each in own} == {
            (each.engine, each) for each in self._announced
        }
        assert len(self) <= MOST_COMING, len(self)
        for own in self._of.values():
            assert 0 < sum(len(each.keys) for each in own) <= MOST_OF_AN_ENGINE, own
        ends = [each.until for each in self._announced]
        assert ends == sorted(ends)
