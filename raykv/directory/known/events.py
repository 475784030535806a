"""The event log: what happened to the directory, numbered without gaps, as far back as it is kept.

Readers ask for what follows a number, and nothing is kept for them here. The log has a bound: a
reader that falls behind learns it. A chunk comes to a node when it is in RAM or on disk there and
was in neither; what goes from RAM to disk is no event.

Invariants:
1. The log has the numbers `first_seq` .. `last_seq`, each once, in the order in which the directory
   changed.
2. The first event of a life is LIFE_BEGAN, with the number 1.
3. All events of a life, folded, are the directory. CACHE_CLEARED changes nothing of it: what a
   clear makes void goes by each node's own BLOCK_REMOVED.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

from raykv.base.ids import EventKind, Key, Namespace, NodeId
from raykv.directory.known.holdings import MovedChunks

MOST_EVENTS = 131_072
"""Kept by default: some 20 MB, several times that if each comes alone."""


class KnownEvent(NamedTuple):
    """Something happened to the directory, `at` a time of the caller's clock (0.0: not known).

    What a kind does not have keeps its empty value. Of a node's event, `life` and `number` are
    those of its listing; of CACHE_CLEARED the history and number of the floor.
    """

    seq: int
    kind: EventKind
    node_id: NodeId = NodeId("")
    namespace: Namespace = Namespace("")
    key: Key = Key(b"")
    life: int = 0
    number: int = 0
    at: float = 0.0


class EventRing:
    """See the module's docstring."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Events of one kind and report, whose keys alone differ: the first one, and all keys. The
        # oldest run may begin before the oldest event that is kept.
        self._runs: deque[tuple[KnownEvent, Sequence[Key]]] = deque()
        self.last_seq = 0
        # Of all events ever, by `EventKind`.
        self.counts: Counter[int] = Counter()
        self._append(KnownEvent(1, EventKind.LIFE_BEGAN))

    @property
    def first_seq(self) -> int:
        """Number of the oldest event that is kept."""
        return max(1, self.last_seq - self._most + 1)

    def joined(self, node_id: NodeId, life: int, number: int, now: float) -> None:
        """A node is a member, and has nothing yet."""
        kind = EventKind.NODE_JOINED
        self._append(KnownEvent(0, kind, node_id, life=life, number=number, at=now))

    def lost(self, node_id: NodeId, life: int, number: int, now: float) -> None:
        """A node is gone, and with it all that it had."""
        kind = EventKind.NODE_LOST
        self._append(KnownEvent(0, kind, node_id, life=life, number=number, at=now))

    def cleared(self, namespace: Namespace, history: int, floor: int, now: float) -> None:
        """What was stored in a namespace under an earlier number is void."""
        kind = EventKind.CACHE_CLEARED
        self._append(KnownEvent(0, kind, NodeId(""), namespace, Key(b""), history, floor, now))

    def moved(
        self, node_id: NodeId, life: int, number: int, moved: Iterable[MovedChunks], now: float
    ) -> None:
        """Chunks have come to a node, or gone."""
        for each in moved:
            if bool(each.before) != bool(each.after):
                kind = EventKind.BLOCK_STORED if each.after else EventKind.BLOCK_REMOVED
                first = KnownEvent(0, kind, node_id, each.namespace, Key(b""), life, number, now)
                self._append(first, each.keys)

    def after(self, seq: int, most: int) -> tuple[list[KnownEvent], bool]:
        """Up to `most` events after a number; none if nothing has happened since.

        True: these do not follow on that number, which is too old, or was never given.
        """
        start = seq + 1
        if not self.first_seq <= start <= self.last_seq + 1:
            start = self.first_seq
        is_gap = start > 1 and start != seq + 1
        found: list[list[KnownEvent]] = []
        # Most readers are near the end.
        for first, keys in reversed(self._runs):
            rows = range(max(start - first.seq, 0), min(start + most - first.seq, len(keys)))
            found.append([first._replace(seq=first.seq + row, key=keys[row]) for row in rows])
            if first.seq <= start:
                break
        return list(chain.from_iterable(reversed(found))), is_gap

    def _append(self, first: KnownEvent, keys: Sequence[Key] = (Key(b""),)) -> None:
        self._runs.append((first._replace(seq=self.last_seq + 1), keys))
        self.last_seq += len(keys)
        self.counts[first.kind] += len(keys)
        while len(self._runs) > 1 and self._runs[1][0].seq <= self.first_seq:
            self._runs.popleft()

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert self._runs[0][0].seq <= self.first_seq
        events, is_gap = self.after(self.first_seq - 1, self.last_seq)
        assert not is_gap
        assert [each.seq for each in events] == list(range(self.first_seq, self.last_seq + 1))
        assert len(events) <= self._most, len(events)
