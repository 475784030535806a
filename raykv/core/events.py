"""The event log: what happened to the directory, numbered without gaps, as far back as it is kept.

Readers ask for what follows a place and get a page; nothing is kept for them here, so a slow or a
dead one costs nobody anything. The log has a bound: who falls behind it is told so.

Invariants:
1. The log's events have the numbers `first_seq` .. `last_seq`, each once, in the order in which
   the directory changed.
2. The first event of an epoch is EPOCH_BEGAN, with the number 1.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, TypeVar

from raykv.event_types import EventPage
from raykv.types import Epoch, EventKind, Generation, Key, Namespace, NodeId, Slot

N = TypeVar("N", bound=str)

MAX_EVENTS = 131_072
"""Kept by default: about 30 MB. A chunk is two events in its life."""

MAX_PAGE = 1024
"""Events in one page: with 36-byte keys under Ray's 100 KiB inline limit."""


class Entry(NamedTuple):
    """One event; fields that its kind does not have keep their empty values.

    `generation` is the NodeActor's epoch for NODE_JOINED and NODE_LOST.
    """

    kind: EventKind
    node_id: NodeId = NodeId("")
    namespace: Namespace = Namespace("")
    key: Key = Key(b"")
    slot: Slot = Slot(0)
    generation: int = 0


class EventLog:
    """See the module's docstring."""

    def __init__(self, epoch: Epoch, most: int = MAX_EVENTS) -> None:
        self.epoch = epoch
        self._entries: deque[Entry] = deque(maxlen=most)
        self.last_seq = 0
        self._append(Entry(EventKind.EPOCH_BEGAN))

    @property
    def first_seq(self) -> int:
        """Number of the oldest event that is kept."""
        return self.last_seq - len(self._entries) + 1

    def rise_to(self, epoch: Epoch) -> None:
        """The scheduler actor takes a higher epoch: all events count as its.

        A reader that is at the old epoch begins again from the log's start.
        """
        self.epoch = epoch

    def _append(self, entry: Entry) -> None:
        self.last_seq += 1
        self._entries.append(entry)

    def stored(
        self, node_id: NodeId, namespace: Namespace, key: Key, slot: Slot, generation: Generation
    ) -> None:
        """A chunk came to a node."""
        self._append(Entry(EventKind.BLOCK_STORED, node_id, namespace, key, slot, generation))

    def removed(
        self, node_id: NodeId, namespace: Namespace, key: Key, slot: Slot, generation: Generation
    ) -> None:
        """A chunk went from a node."""
        self._append(Entry(EventKind.BLOCK_REMOVED, node_id, namespace, key, slot, generation))

    def node_joined(self, node_id: NodeId, node_epoch: Epoch) -> None:
        """A NodeActor's life was heard of for the first time."""
        self._append(Entry(EventKind.NODE_JOINED, node_id, generation=node_epoch))

    def node_lost(self, node_id: NodeId, node_epoch: Epoch) -> None:
        """A NodeActor's life is over, and with it all that it held."""
        self._append(Entry(EventKind.NODE_LOST, node_id, generation=node_epoch))

    def cleared(self, namespace: Namespace, generation: Generation) -> None:
        """All chunks of a namespace are gone."""
        self._append(
            Entry(EventKind.CACHE_CLEARED, namespace=namespace, generation=int(generation))
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
        skipped = start - self.first_seq
        entries = list(islice(self._entries, skipped, skipped + most))
        nodes = _numbered(entry.node_id for entry in entries)
        namespaces = _numbered(entry.namespace for entry in entries)
        return EventPage(
            epoch=self.epoch,
            first_seq=start,
            last_seq=self.last_seq,
            is_gap=is_gap,
            nodes=[str(name) for name in nodes],
            namespaces=[str(name) for name in namespaces],
            kinds=[int(entry.kind) for entry in entries],
            node_index=[nodes[entry.node_id] for entry in entries],
            namespace_index=[namespaces[entry.namespace] for entry in entries],
            keys=[entry.key for entry in entries],
            slots=[entry.slot for entry in entries],
            generations=[entry.generation for entry in entries],
        )


def _numbered(names: Iterable[N]) -> dict[N, int]:
    return {name: index for index, name in enumerate(dict.fromkeys(names))}
