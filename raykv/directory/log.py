"""The event log: what happened to the directory, numbered without gaps, as far back as it is kept.

Readers ask for what follows a place and get a page; nothing is kept for them here, so a slow or a
dead one costs nobody anything. The log has a bound: a reader that falls behind learns it.

Invariants:
1. The log's events have the numbers `first_seq` .. `last_seq`, each once, in the order in which
   the directory changed.
2. The first event of an epoch is EPOCH_BEGAN, with the number 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from raykv.base.ids import Epoch, EventKind, Generation, Namespace, NodeId
from raykv.directory.table.protocol import Changes
from raykv.protocol.columns import numbered
from raykv.protocol.events import EventPage
from raykv.protocol.framing import PROTOCOL_VERSION

N = TypeVar("N", bound=str)

MAX_EVENTS = 131_072
"""Kept by default: 30 MB, twice that if each comes alone. A chunk is two events in its life."""

MAX_PAGE = 1024
"""Events in one page: with 36-byte keys under Ray's 100 KiB inline limit."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Events of one kind that follow on each other, as columns.

    What a kind does not have keeps its empty value; the generation is the NodeActor's epoch for
    NODE_JOINED and NODE_LOST.
    """

    kind: EventKind
    node_id: NodeId = NodeId("")
    namespace: Namespace = Namespace("")
    keys: Sequence[bytes] = (b"",)
    slots: Sequence[int] = (0,)
    generations: Sequence[int] = (0,)
    at: float = 0.0

    def __len__(self) -> int:
        return len(self.keys)


class EventLog:
    """See the module's docstring."""

    def __init__(self, epoch: Epoch, most: int = MAX_EVENTS) -> None:
        self.epoch = epoch
        # As of the last call of `set_clock`: events happen a little later.
        self._now = 0.0
        self._most = most
        # The oldest run may begin before the oldest event that is kept.
        self._runs: deque[_Run] = deque()
        self._num_in_runs = 0
        self.last_seq = 0
        self._append(_Run(EventKind.EPOCH_BEGAN))

    @property
    def first_seq(self) -> int:
        """Number of the oldest event that is kept."""
        return self.last_seq - min(self._num_in_runs, self._most) + 1

    def rise_to(self, epoch: Epoch) -> None:
        """The scheduler actor takes a higher epoch: all events count as its.

        A reader that is at the old epoch begins again from the log's start.
        """
        self.epoch = epoch

    def set_clock(self, now: float) -> None:
        """The time, from which the ages of events are told."""
        if not self._now:
            # What came before the first call has just happened.
            self._runs = deque(replace(run, at=now) for run in self._runs)
        self._now = now

    def _append(self, run: _Run) -> None:
        run = replace(run, at=self._now)
        self.last_seq += len(run)
        self._num_in_runs += len(run)
        self._runs.append(run)
        while self._num_in_runs - len(self._runs[0]) >= self._most:
            self._num_in_runs -= len(self._runs.popleft())

    def stored(self, node_id: NodeId, came: Changes) -> None:
        """Chunks came to a node."""
        self._append(_changed(EventKind.BLOCK_STORED, node_id, came))

    def removed(self, node_id: NodeId, went: Changes) -> None:
        """Chunks went from a node."""
        self._append(_changed(EventKind.BLOCK_REMOVED, node_id, went))

    def node_joined(self, node_id: NodeId, node_epoch: Epoch) -> None:
        """A NodeActor's life was heard of for the first time."""
        self._append(_Run(EventKind.NODE_JOINED, node_id, generations=[node_epoch]))

    def node_lost(self, node_id: NodeId, node_epoch: Epoch) -> None:
        """A NodeActor's life is over, and with it all that it held."""
        self._append(_Run(EventKind.NODE_LOST, node_id, generations=[node_epoch]))

    def cleared(self, namespace: Namespace, generation: Generation) -> None:
        """All chunks of a namespace are gone."""
        self._append(
            _Run(EventKind.CACHE_CLEARED, namespace=namespace, generations=[int(generation)])
        )

    def page(self, epoch: Epoch, after: int, most: int = MAX_PAGE) -> EventPage:
        """Up to `most` events that follow (`epoch`, `after`); an empty page when there are none.

        A place in another epoch, or one in the future, is answered from the log's start; one that
        the log no longer reaches back to, from the oldest event. Both are marked as a gap, unless
        the page begins with EPOCH_BEGAN, which says all.
        """
        start = after + 1
        is_known = epoch == self.epoch and after <= self.last_seq
        if not is_known or start < self.first_seq:
            start = self.first_seq
        is_gap = start > 1 and (not is_known or start != after + 1)
        runs = self._between(start, start + most)
        nodes: list[str] = []
        namespaces: list[str] = []
        return EventPage(
            version=PROTOCOL_VERSION,
            epoch=self.epoch,
            first_seq=start,
            last_seq=self.last_seq,
            is_gap=is_gap,
            nodes=nodes,
            namespaces=namespaces,
            kinds=[int(run.kind) for run in runs for _ in range(len(run))],
            node_index=numbered(nodes, [run.node_id for run in runs for _ in range(len(run))]),
            namespace_index=numbered(
                namespaces, [run.namespace for run in runs for _ in range(len(run))]
            ),
            keys=[key for run in runs for key in run.keys],
            slots=[slot for run in runs for slot in run.slots],
            generations=[generation for run in runs for generation in run.generations],
            ages_ms=[int(1000 * (self._now - run.at)) for run in runs for _ in range(len(run))],
        )

    def runs(self, after: int) -> list[_Run]:
        """Everything that is kept and follows a place of this epoch, as columns."""
        return self._between(max(after + 1, self.first_seq), self.last_seq + 1)

    def _between(self, start: int, stop: int) -> list[_Run]:
        """The events with numbers from `start` to before `stop`; most readers are near the end."""
        found: list[_Run] = []
        first = self.last_seq + 1
        for run in reversed(self._runs):
            first -= len(run)
            if first < stop:
                rows = slice(max(start - first, 0), stop - first)
                columns = (run.keys[rows], run.slots[rows], run.generations[rows])
                found.append(_Run(run.kind, run.node_id, run.namespace, *columns, run.at))
            if first <= start:
                break
        return [run for run in reversed(found) if len(run)]


def _changed(kind: EventKind, node_id: NodeId, changes: Changes) -> _Run:
    columns = (changes.keys, changes.slots, changes.generations)
    return _Run(kind, node_id, changes.namespace, *columns)
