"""The order of eviction: which chunks of one slot size go first.

It is the order of last use, with one correction: a chunk that was stored and not found since counts
as older than it is, by a handicap. A prompt that nobody asks for again then passes through the pool
without taking what is used along with it. What was given up is remembered for a while; when it is
stored again it counts as found.

The handicap is learned. Two things are compared with what the plain order of last use would have
done, of which the tails of the two queues tell how old its oldest chunk would be: a chunk that is
found though it is older is a reason for more handicap, and a chunk that is stored again though it
would still be there a reason for less.

Invariants:
1. A record that has entered and not left is in exactly one queue, or it is pinned.
2. In a queue of used chunks `used` never falls from the first to the last.
3. Nothing that is remembered is held, and after chunks have entered there are at most
   `MOST_REMEMBERED`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from math import inf

from raykv.node.pool.records import ChunkRecord, RecordQueue, Standing

LEAST_HANDICAP, FIRST_HANDICAP, MOST_HANDICAP = 0.1, 0.35, 8.0
"""Times the chunks that are held, counted in uses."""

STEP = 25.0
"""By how much one chunk changes the handicap, as a share of it: so much divided by the chunks that
are held. Where a tenth of all that is held speaks for more, it doubles or so."""

HOPE = 0.25
"""What a reason is worth for which more handicap might not have been enough."""

REMEMBERED = 2
"""Times the chunks that are held."""

MOST_REMEMBERED = 131_072

FEWEST = 64
"""Chunks from which anything can be learned."""


class EvictionOrder:
    """See the module's docstring. Records are given from a prompt's head to its tail, and the head
    counts as used last: without it the rest is worth nothing.
    """

    def __init__(self) -> None:
        self._first = {Standing.RELEASED: RecordQueue(), Standing.SPARE: RecordQueue()}
        self._stored = RecordQueue()
        self._found = RecordQueue()
        self._kept = RecordQueue()
        self._num_pinned = 0
        # By hash, the oldest first: the time of last use. Two names of one hash share it: harmless.
        self._remembered: OrderedDict[int, int] = OrderedDict()
        self.now = 0
        self._handicap = FIRST_HANDICAP

    def enter(self, records: Sequence[ChunkRecord], before: ChunkRecord | None = None) -> None:
        """Chunks of a prompt have become READY; they were in no order. They go before the chunk
        that was in front of them in the prompt, if it has entered just so.
        """
        age, began = self._age_by_use(), self.now
        for record in reversed(records):
            past = self._remembered.pop(hash((record.namespace, record.key)), None)
            if past is not None:
                record.hits += 1
                used, was_found = divmod(past, 2)
                if began - used < age:
                    self._learn(-1)
                elif was_found:
                    self._learn(HOPE)
            self._use(record)
            self._put(record, before)
        while len(self._remembered) > min(MOST_REMEMBERED, REMEMBERED * max(len(self), 1)):
            self._remembered.popitem(last=False)

    def touch(self, records: Sequence[ChunkRecord]) -> None:
        """Chunks of a prompt that have entered were found."""
        age, began = self._age_by_use(), self.now
        for record in reversed(records):
            if record.queue is self._found and began - record.used > age:
                self._learn(1)
            record.hits += 1
            if record.standing in self._first:
                record.standing = Standing.NORMAL
            self._take(record)
            self._use(record)
            self._put(record)

    def stand(self, record: ChunkRecord, standing: Standing) -> None:
        """A chunk that has entered goes sooner or later from now on; that is no use of it, but it
        is the last of those that stand like it.
        """
        if standing is not record.standing:
            self._take(record)
            self._use(record)
            record.standing = standing
            self._put(record)

    def leave(self, record: ChunkRecord, *, remember: bool) -> None:
        """A chunk that has entered is gone; `remember` it if it went for lack of room."""
        was_found = record.queue is self._found
        self._take(record)
        if remember:
            past = 2 * record.used + was_found
            self._remembered[hash((record.namespace, record.key))] = past

    def first(self, count: int, may_go: Callable[[ChunkRecord], bool]) -> list[ChunkRecord]:
        """Up to `count` chunks that go first, of those that may."""
        found: list[ChunkRecord] = []
        for record in self:
            if len(found) == count:
                break
            if may_go(record):
                found.append(record)
        return found

    def __iter__(self) -> Iterator[ChunkRecord]:
        """All but those that are pinned, in order. Not valid after a change."""
        for queue in self._first.values():
            yield from queue
        stored, found = self._stored.first, self._found.first
        handicap = int(self._handicap * len(self))
        while stored is not None or found is not None:
            if found is None or (stored is not None and stored.used - handicap < found.used):
                assert stored is not None
                yield stored
                stored = stored.after
            else:
                yield found
                found = found.after
        yield from self._kept

    @property
    def num_remembered(self) -> int:
        """Names that went for lack of room and are remembered."""
        return len(self._remembered)

    @property
    def num_that_go(self) -> int:
        """Chunks that are not pinned."""
        return len(self) - self._num_pinned

    def __len__(self) -> int:
        """How many have entered and not left."""
        queues = (*self._first.values(), self._stored, self._found, self._kept)
        return self._num_pinned + sum(map(len, queues))

    def _use(self, record: ChunkRecord) -> None:
        self.now += 1
        record.used = self.now

    def _put(self, record: ChunkRecord, before: ChunkRecord | None = None) -> None:
        if record.standing is Standing.PINNED:
            self._num_pinned += 1
        elif record.standing is Standing.KEPT:
            self._kept.append(record)
        elif record.standing in self._first:
            self._first[record.standing].append(record)
        else:
            queue = self._found if record.hits else self._stored
            if before is not None and before.queue is queue:
                record.used = before.used
                queue.insert(record, before)
            else:
                queue.append(record)

    def _take(self, record: ChunkRecord) -> None:
        if record.queue is None:
            self._num_pinned -= 1
        else:
            record.queue.remove(record)

    def _learn(self, direction: float) -> None:
        if len(self) < FEWEST:
            return
        factor = 1 + direction * min(STEP / len(self), 0.5)
        handicap = self._handicap * factor
        self._handicap = min(max(handicap, LEAST_HANDICAP), MOST_HANDICAP)

    def _age_by_use(self) -> float:
        """How old the oldest chunk would be if all were in the order of last use.

        Of the chunks that are used at one time, each queue still holds those of the last `age`
        uses, its own; together they would be so many per use as there are now.
        """
        if not self._remembered or len(self) < FEWEST:
            return inf
        rate = 0.0
        for queue in (self._stored, self._found):
            if queue.first is not None:
                rate += len(queue) / max(self.now - queue.first.used, 1)
        return (len(self._stored) + len(self._found)) / rate if rate else inf
