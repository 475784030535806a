"""What a node and the directory tell each other, one report at a time.

            begin                  answered, give_up
  (idle) ───────────► report out ───────────────────► (idle)

Whatever is said may be lost or come twice. The directory answers how far it has read the listing;
marks and words come until a report shows that they were heard; what sessions have said goes along
until a report is answered.

Invariants:
1. An answer counts for the report that is out, and once.
2. A mark is believed of a chunk that has not changed since the directory read of it.
3. Nothing of an earlier life of the directory is believed, nor any mark of one that is silent.
4. What waits to be said is bounded; the oldest is lost first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from math import inf

import msgspec

from raykv.base.ids import Namespace, Stamp
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.records import ChunkState, Standing
from raykv.node.pool.sessions import LocalSessions
from raykv.protocol import engine, node
from raykv.protocol.listing import ALL_READ, ListingPart, Position

MOST_ROWS = 1500
"""Names that have changed, and slots of a page, in one report: a page of them is just below 100 KB,
which Ray takes along with the call."""

MOST_WORDS = 1024
"""Words of sessions that may wait for a report."""

ALONE_S = 30.0
"""How long the last answer says who else has a namespace."""

MARKED_S = 60.0
"""How long marks hold after the last answer of the directory."""

PIECE = 4096
"""Slots that are looked at in one go, and chunks that are unmarked."""

_NOTHING_MORE = (Standing.NORMAL, Standing.SPARE)
"""Standings of chunks without a claim that says more."""


class Reporting:
    """See the module's docstring.

    Args:
        index: of the pool.
        sessions: which hear what was said at other nodes.
    """

    def __init__(self, index: PoolIndex, sessions: LocalSessions) -> None:
        self._index = index
        self._sessions = sessions
        self._seq = 0
        self._out: node.Report | None = None
        self.facts: object = None
        """What the last report said of the node itself; its owner sets it."""
        self._said: deque[node.SessionsWord] = deque(maxlen=MOST_WORDS)
        # Of the directory: its life, how far it has read, and what was heard of it.
        self._life: int | None = None
        self._position: Position | None = None
        self._heard = self._words_heard = 0
        self._told_heard = (0, 0)
        self._answered_at = -inf
        self._alone: frozenset[str] = frozenset()
        self._namings: dict[int, engine.Naming] = {}
        self.newest = Stamp(0, 0)
        """The number of the orders that the directory has."""
        # Namespaces that had engines, and have none any more: as the directory knows, and but for
        # those that are in use here. Of some that have changed, chunks do not stand so yet from a
        # place on.
        self._told_left: frozenset[Namespace] = frozenset()
        self._left: Set[Namespace] = frozenset()
        self._settling: set[Namespace] = set()
        self._settled_to = 0

    # Reports

    def say(self, word: node.SessionsWord) -> None:
        """An engine says something of a session."""
        self._said.append(word)

    def begin(self, facts: node.Report) -> node.Report:
        """The next report, of these facts."""
        assert self._out is None, self._out
        self._seq += 1
        self._out = msgspec.structs.replace(
            facts,
            seq=self._seq,
            part=self._part(),
            heard=self._heard,
            words_heard=self._words_heard,
            sessions=list(self._said),
        )
        self._said.clear()
        self._told_heard = self._heard, self._words_heard
        return self._out

    def _part(self) -> ListingPart | None:
        """The next part for the directory; None if it has all, or has not said how far it is."""
        if self._position is None or self._is_read:
            return None
        return self._index.part_after(self._position, MOST_ROWS)

    @property
    def _is_read(self) -> bool:
        """Whether the directory has all of the listing, or has not said how far it is."""
        position, listing = self._position, self._index.listing
        if position is None:
            return True
        has_all = position.life == listing.life and position.place == ALL_READ
        return has_all and position.number == listing.number

    def has_news(self, facts: object) -> bool:
        """Whether the next report would say something that the last one has not said."""
        is_told = (facts, self._heard, self._words_heard) == (self.facts, *self._told_heard)
        return not is_told or not self._is_read or bool(self._said)

    @property
    def num_unread(self) -> int:
        """Chunks that the directory has not read of, at most: all until it has seen every page."""
        position, listing, index = self._position, self._index.listing, self._index
        num_chunks = index.num_ready + len(index.shelf)
        if position is None or (position.life, position.place) != (listing.life, ALL_READ):
            return num_chunks
        return min(num_chunks, max(0, listing.number - position.number))

    def give_up(self) -> None:
        """No answer to the report that is out will count."""
        if self._out is not None:
            # Older than what was said since.
            waiting = [*self._out.sessions, *self._said]
            self._said.clear()
            self._said.extend(waiting)
        # What it has told may not have come.
        self._out = self.facts = None

    def is_of(self, seq: int) -> bool:
        """Whether an answer is of the report that is out."""
        return self._out is not None and seq == self._out.seq

    # Answers

    def take(self, answer: node.ReportAnswer, now: float) -> None:
        """The answer to the report that is out."""
        assert self._out is not None
        self._out = None
        if answer.life != self._life:
            self._begin_life(answer.life)
        self._answered_at = now
        self._position = answer.position
        self._mark(answer.marks)
        first = answer.words_number - len(answer.words) + 1
        for number, word in enumerate(answer.words, first):
            if number > self._words_heard:
                self._sessions.hear(word, now)
        self._words_heard = max(self._words_heard, answer.words_number)
        self._alone, self._namings = frozenset(answer.alone), answer.namings
        self._told_left = frozenset(map(Namespace, answer.left))
        self.newest = answer.orders

    def _begin_life(self, life: int) -> None:
        if self._life is not None:
            self._index.room.forget_spares()
        self._life, self._heard, self._words_heard = life, 0, 0

    def _mark(self, marks: node.Marks) -> None:
        if marks.number <= self._heard:
            return
        self._heard = marks.number
        if marks.forget:
            self._index.room.forget_spares()
        for name in marks.spare:
            record = self._index.find(*name)
            # Where a claim says more, that counts.
            is_same = record is not None and record.number <= marks.known
            if record is not None and is_same and record.standing in _NOTHING_MORE:
                self._index.stand(record, Standing.SPARE)
        for name in marks.kept:
            record = self._index.find(*name)
            if record is not None and record.standing is Standing.SPARE:
                self._index.stand(record, Standing.NORMAL)

    def expire(self, now: float) -> None:
        """Believe no longer what a directory has said that does not answer."""
        silent_s = now - self._answered_at
        if silent_s >= ALONE_S:
            self._alone = frozenset()
        if MARKED_S <= silent_s < inf:
            self._index.room.forget_spares()

    # Namespaces that are left

    def use(self, used: Set[Namespace]) -> None:
        """These namespaces are in use here: all others that are left are released, and no more."""
        left = self._told_left - used
        changed = left ^ self._left
        if changed:
            self._left = left
            self._index.claims.leave(left)
            self._settling |= changed
            self._settled_to = 0

    def go_on(self) -> None:
        """The next piece of chunks that are released or unmarked, if there are any."""
        self._index.room.unmark(PIECE)
        if not self._settling:
            return
        records, self._settled_to = self._index.places.records_from(self._settled_to, PIECE)
        for record in records:
            if record.state is ChunkState.READY and record.namespace in self._settling:
                self._index.claims.resettle(record)
        if self._settled_to == ALL_READ:
            self._settling.clear()

    # What the directory says of others

    def has_peers(self, namespace: Namespace) -> bool:
        """Whether other nodes have engines or chunks of a namespace, or it is not known."""
        return namespace not in self._alone

    def naming(self, life: int, heard: Stamp) -> engine.Naming | None:
        """What the weights of an EngineCore are called, unless it has heard that, or of later."""
        naming = self._namings.get(life)
        return naming if naming is not None and naming.stamp > heard else None

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._said) <= MOST_WORDS
        assert self._out is None or self._out.seq == self._seq
