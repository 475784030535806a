"""What people learn of a node: of its engines' requests, and of what its pool evicts.

Nothing is decided by it, and a new life of the NodeActor knows nothing of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from raykv.base.departures import Departures
from raykv.base.ids import Key, Namespace, TokenSource
from raykv.metrics import engines, histogram
from raykv.metrics.table import AGE_BOUNDS, NamespaceLabels
from raykv.node.accounts import requests, savings
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord, Standing
from raykv.node.pool.sessions import LocalSessions
from raykv.protocol import columns, descriptions, engine
from raykv.protocol.listing import EVICTIONS, Reason
from raykv.stream.descriptions import DescriptionBook

DESCRIBED_BYTES = 64 << 20
"""Bytes of chunks' descriptions: about 60,000 of 128 tokens."""

MOST_CHANGES = 1024
"""Changes of the listing that are looked at in one go."""


class NodeAccounts:
    """See the module's docstring.

    Args:
        quota_of: the name of a tenant's quota, by its label; all without one share one.
    """

    def __init__(self, quota_of: Callable[[str], str]) -> None:
        self._quota_of = quota_of
        self.requests = requests.RequestLog()
        """Requests of its engines that have ended."""
        self.savings = savings.Savings()
        self.tally = engines.EngineTally()
        self.labels = NamespaceLabels()
        self.descriptions = DescriptionBook(DESCRIBED_BYTES)
        """What is inside of chunks, as engines have said."""
        self.tokens: Counter[tuple[str, TokenSource]] = Counter()
        """Of prompts, by the name of a quota."""
        self.num_evicted: Counter[str] = Counter()
        """Chunks that went since their tenant had more than its share, by the name of its quota."""
        self.ages = histogram.Histogram(AGE_BOUNDS)
        """Of chunks, when they were evicted."""
        # By which sessions chunks were released that were evicted then.
        self._released: Departures[tuple[Namespace, str]] = Departures()
        self._began_at: float | None = None
        # How far the listing and the requests have been read.
        self._number = self._last = 0

    def take(self, hello: engine.EngineHello, tell: engine.Tell, now: float) -> None:
        """What an engine says for the first time."""
        self.tally.take(self.labels[tell.namespace], tell)
        for row in columns.valid(tell.described, descriptions.check_description):
            self.descriptions.add(row)
        finished = columns.valid(tell.finished, engine.check_record)
        self.requests.take(hello, finished, now)
        for record in finished:
            name = self._quota_of(record.tenant)
            for source, tokens in engine.tokens_by_source(record).items():
                self.tokens[name, source] += tokens

    def follow(self, listing: Listing, sessions: LocalSessions, now: float) -> bool:
        """Take in what is new of the pool and of requests, some of it if there is much; returns
        whether there is more. Of changes that the listing does not keep any more nothing is known.
        """
        self._began_at = now if self._began_at is None else self._began_at
        found = listing.since(self._number, MOST_CHANGES)
        changes, self._number = found or ([], listing.number)
        for record, reason in changes:
            if reason not in EVICTIONS or not isinstance(record, ChunkRecord):
                continue
            self._evicted(record, sessions, now, self._began_at)
            if reason is Reason.QUOTA:
                self.num_evicted[self._quota_of(record.tenant)] += 1
        first, ended = self.requests.after(self._last)
        self._last = first + len(ended) - 1
        for each in ended:
            self.savings.take(each, now)
        return self._number < listing.number or self._last < self.requests.last

    def _evicted(
        self, record: ChunkRecord, sessions: LocalSessions, now: float, began_at: float
    ) -> None:
        self.savings.evicted(record.key, record.slot_bytes)
        self.ages.observe(max(0.0, now - max(record.came_at, began_at)))
        is_released = record.standing is Standing.RELEASED
        why = sessions.released((record.namespace, record.key)) if is_released else ""
        if why or self._released.get(record.key) is not None:
            self._released.note([record.key], (record.namespace, why))

    def hint_on(self, namespace: Namespace, key: Key) -> str:
        """What a hint did to a chunk that is missing, a sentence's end; empty: nothing known."""
        known = self._released.get(key)
        return known[1] if known is not None and known[0] == namespace else ""
