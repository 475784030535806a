"""The order of eviction: which chunks of one slot size go first.

It is the order of last use, with one correction: a chunk that was stored and not found since counts
as older than it is, by a handicap. A prompt that nobody asks for again then passes through the pool
without taking what is used along with it. What was given up is remembered for a while; when it is
stored again it counts as found.

The handicap is learned. Two things are compared with what the plain order of last use would have
done, which is played on a sample of the names, to know how old its oldest chunk would be: a chunk
that is found though it is older is a reason for more handicap, and a chunk that is stored again
though it would still be there a reason for less.

Invariants:
1. A record that has entered and not left is in exactly one queue, or it is pinned.
2. In a queue of used chunks `used` never falls from the first to the last.
3. The sample has no more names than its share of the chunks that there is room for.
4. Nothing that is remembered is held, and after chunks have entered there are at most
   `MOST_REMEMBERED`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from zlib import crc32

from raykv.node.pool.records import ChunkRecord, RecordQueue, Standing

LEAST_HANDICAP, FIRST_HANDICAP, MOST_HANDICAP = 0.1, 0.35, 8.0
"""Times the chunks that are held, counted in uses."""

STEP = 25.0
"""By how much one chunk changes the handicap, as a share of it: so much divided by the chunks that
are held. Where a tenth of all that is held speaks for more, it doubles or so."""

HOPE, MOST_HOPED = 0.01, 2.0
"""What a reason is worth for which more handicap might not have been enough, and up to which
handicap it counts.
"""

REMEMBERED = 2
"""Times the chunks that are held."""

MOST_REMEMBERED = 131_072

FEWEST = 64
"""Chunks from which anything can be learned."""

MOST_SAMPLED = 2048
"""Names that are played by last use: what it costs falls with the size of a pool."""


class EvictionOrder:
    """See the module's docstring. Records are given from a prompt's head to its tail, and the head
    counts as used last: without it the rest is worth nothing.
    """

    def __init__(self) -> None:
        self._released, self._spare = RecordQueue(), RecordQueue()
        self._stored, self._found = RecordQueue(), RecordQueue()
        self._kept = RecordQueue()
        # Of what is spare no more: each goes late until it is unmarked.
        self._unmarking: list[RecordQueue] = []
        self._num_entered = self._num_pinned = 0
        # By hash, the oldest first: the time of last use. Two names of one hash share it: harmless.
        self._remembered: OrderedDict[int, int] = OrderedDict()
        # The sample by last use, the oldest first, with that time: names whose hash begins with
        # `_shift` zeros. `_room`: how many chunks there are when it is full.
        self._sample: OrderedDict[int, int] = OrderedDict()
        self._shift = self._room = 0
        self.now = 0
        self._handicap = FIRST_HANDICAP

    def enter(
        self, records: Sequence[ChunkRecord], front: Mapping[RecordQueue, ChunkRecord] | None = None
    ) -> None:
        """Chunks of a prompt have become READY; they were in no order. They go before those in
        `front` of them in the prompt, of which each queue may have one.
        """
        began, remembered = self.now, self._remembered
        for record in reversed(records):
            past = remembered.pop(hash((record.namespace, record.key)), None)
            if past is not None:
                record.hits += 1
                self._came_back(*divmod(past, 2), began)
            self._use(record)
            self._put(record, front)
        if remembered:
            self._room = self._num_entered
            most = min(MOST_REMEMBERED, REMEMBERED * (self._num_entered or 1))
            while len(remembered) > most:
                remembered.popitem(last=False)

    def _came_back(self, used: int, was_found: int, now: int) -> None:
        """A chunk that was given up is stored again."""
        if now - used < self._age_by_use():
            self._learn(-1)
        elif was_found and self._handicap < MOST_HOPED:
            self._learn(HOPE)

    def touch(self, records: Sequence[ChunkRecord]) -> None:
        """Chunks of a prompt that have entered were found; what another node keeps, too, is spare
        all the same.
        """
        age, began = self._age_by_use(), self.now
        for record in reversed(records):
            if record.queue is self._found and began - record.used > age:
                self._learn(1)
            record.hits += 1
            if record.standing is Standing.RELEASED:
                record.standing = Standing.NORMAL
            self._take(record)
            self._use(record)
            self._put(record)

    def stand(self, record: ChunkRecord, standing: Standing) -> None:
        """A chunk that has entered goes sooner or later from now on; that is no use of it, but it
        is the last of those that stand like it.
        """
        if standing is not record.standing or self._is_marked_void(record):
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
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)

    def forget_spares(self) -> None:
        """What was said of spare chunks is void: from now on they go after those that are not,
        until `unmark` has come to them.
        """
        if self._spare.first is not None:
            self._unmarking.append(self._spare)
            self._spare = RecordQueue()

    def unmark(self, most: int) -> int:
        """Up to so many chunks that are spare no more stand like others; returns how many."""
        num_done = 0
        while self._unmarking and num_done < most:
            record = self._unmarking[0].first
            if record is None:
                del self._unmarking[0]
            else:
                self.stand(record, Standing.NORMAL)
                num_done += 1
        return num_done

    def _is_marked_void(self, record: ChunkRecord) -> bool:
        return record.standing is Standing.SPARE and record.queue is not self._spare

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
        yield from self._released
        yield from self._spare
        stored, found = self._stored.first, self._found.first
        handicap = int(self._handicap * self._num_entered)
        while stored is not None or found is not None:
            if found is None or (stored is not None and stored.used - handicap < found.used):
                assert stored is not None
                yield stored
                stored = stored.after
            else:
                yield found
                found = found.after
        for queue in self._unmarking:
            yield from queue
        yield from self._kept

    @property
    def num_remembered(self) -> int:
        """Names that went for lack of room and are remembered."""
        return len(self._remembered)

    @property
    def num_that_go(self) -> int:
        """Chunks that are not pinned."""
        return self._num_entered - self._num_pinned

    def __len__(self) -> int:
        """How many have entered and not left."""
        return self._num_entered

    def _use(self, record: ChunkRecord) -> None:
        self.now += 1
        record.used = self.now
        name = crc32(record.key)
        if not name >> (32 - self._shift):
            self._play(name)

    def _put(
        self, record: ChunkRecord, front: Mapping[RecordQueue, ChunkRecord] | None = None
    ) -> None:
        self._num_entered += 1
        standing = record.standing
        if standing is Standing.NORMAL:
            queue = self._found if record.hits else self._stored
            before = front.get(queue) if front else None
            if before is not None and before.queue is queue:
                record.used = before.used
                queue.insert(record, before)
            else:
                queue.append(record)
        elif standing is Standing.PINNED:
            self._num_pinned += 1
        elif standing is Standing.KEPT:
            self._kept.append(record)
        else:
            (self._spare if standing is Standing.SPARE else self._released).append(record)

    def _take(self, record: ChunkRecord) -> None:
        self._num_entered -= 1
        if record.queue is None:
            self._num_pinned -= 1
        else:
            if self._unmarking and self._is_marked_void(record):
                record.standing = Standing.NORMAL
            record.queue.remove(record)

    def _learn(self, direction: float) -> None:
        if len(self) < FEWEST:
            return
        factor = 1 + direction * min(STEP / len(self), 0.5)
        handicap = self._handicap * factor
        self._handicap = min(max(handicap, LEAST_HANDICAP), MOST_HANDICAP)

    def _play(self, name: int) -> None:
        """A name of the sample is used in it, too."""
        sample, most = self._sample, self._room >> self._shift or 1
        sample[name] = self.now
        sample.move_to_end(name)
        while len(sample) > most:
            sample.popitem(last=False)
        while self._room >> self._shift > MOST_SAMPLED:
            self._shift += 1
            for each in [each for each in self._sample if each >> (32 - self._shift)]:
                del self._sample[each]

    def _age_by_use(self) -> float:
        """How old the oldest chunk would be if all were in the order of last use; infinite until
        that is known.
        """
        if len(self._sample) < max(self._room >> self._shift, 1) or not self._room:
            return inf
        return self.now - next(iter(self._sample.values()))
