"""The order of eviction: which chunks of one slot size go first.

It is the order of last use, with one correction: a chunk that was stored and not found since counts
as older than it is, by a handicap. A prompt that nobody asks for again then passes through the pool
without taking what is used along with it. What was given up is remembered for a while; when it is
stored again it counts as found.

              stored               found, and each time again
   unknown ───────────► stored ───────────────────────────────► found
      ▲                   │ evicted                    evicted │  ▲
      │    for long       ▼                                    │  │ stored
      └────────────── remembered ◄─────────────────────────────┘  │
                          └───────────────────────────────────────┘

How much handicap is right depends on the room and on what is asked for: without any it is the order
of last use, and with the most a chunk that was found once outlives nearly all that were not. So a
few handicaps are tried on a sample of the names, which has its share of the room, and each is
compared with no handicap, by what only one of the two finds: what both find, such as the head of
all prompts, tells nothing. In doubt there is none, since a sample is of few prompts, and a chunk
that is found without its prefix is worth nothing.

   uses ──► of the sample ──┬──► trial of 0
                            ├──► trial of 1 ───► more, less than 0 finds ──┐
                            ├──► trial of 2 ───► more, less than 0 finds ──┼──► the one in force
                            └──► trial of 16 ──► more, less than 0 finds ──┘

Invariants:
1. A record that has entered and not left is in exactly one queue, or it is pinned.
2. In a queue of used chunks `used` never falls from the first to the last.
3. All that a trial knows is of the sample, and it remembers no more than `REMEMBERED` times the
   chunks that it has room for.
4. When a chunk was given up, no more names are remembered than `REMEMBERED` times the chunks that
   there were lately, at the most.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import gt, lt
from zlib import crc32

from raykv.node.pool.records import NORMAL, ChunkRecord, RecordQueue, Standing

HANDICAPS = (0, 1, 2, 16)
"""In times the chunks that may go, counted in uses. The first, none, is in force at first."""

CLEARLY = 2.0
"""A handicap is used if the chunks that only it finds are this many times those found only without
it.
"""

HALF_LIFE = 16
"""Uses of the sample, for each chunk that it has room for, until what was found counts half."""

LESSON = 16
"""Uses of the sample that are played at once."""

LEAST_SAMPLED, FINEST = 128, 64
"""The sample has room for at most `LEAST_SAMPLED` chunks, or `FINEST` times the number of names to
each sampled one, whichever is more: the larger a pool, the larger is the sample, and the less it
costs for each use.
"""

FORGET = 64
"""The most chunks that there were lately fall by such a part in a lesson: while a prompt takes the
place of others there are fewer for a moment.
"""

REMEMBERED = 2
"""Times the most chunks that there were lately."""

_PLACES = 8
"""In which a name may be remembered."""


class _Memory:
    """Names that were given up, by number, in 36 to 45 bytes each when there are most of them.

    A number is in one of a few places that follow each other, of which two in three or more are
    free; if none is, it is not remembered. It is in a ring as well, which says what is forgotten
    next, unless it was taken, perhaps to come again. Two names of one number share it: harmless.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._numbers, self._at = (array("I", bytes(12 * room + 4 * _PLACES)) for _ in range(2))
        # From `_first` up to `_last`, which count on and on.
        self._ring = array("I", bytes(8 * room))
        self.count = self._first = self._last = 0

    def add(self, number: int, most: int) -> None:
        """Remember a name, and no more than `most`, for which there must be room."""
        numbers, ring, size = self._numbers, self._ring, len(self._ring)
        place = 3 * self.room * number >> 32
        places = numbers[place : place + _PLACES]
        wanted = number if number in places else 0
        if wanted in places:
            place += places.index(wanted)
            numbers[place] = number
            at = self._at[place] = self._last % size
            ring[at] = place
            self._last += 1
            self.count += not wanted
        while self.count > most or self._last - self._first == size:
            at = self._first % size
            self._first += 1
            if numbers[ring[at]] and self._at[ring[at]] == at:
                numbers[ring[at]] = 0
                self.count -= 1

    def take(self, number: int) -> bool:
        """Forget a name; False if it is not remembered."""
        if not self.count:
            return False
        place = 3 * self.room * number >> 32
        places = self._numbers[place : place + _PLACES]
        if number not in places:
            return False
        self._numbers[place + places.index(number)] = 0
        self.count -= 1
        return True


class _Trial:
    """The order with one handicap, played on the sample: numbers with the time of last use, those
    first that were used or given up first.
    """

    def __init__(self, handicap: int, merit: float = 0.0) -> None:
        # What it has found lately, and the first trial has not, less what only that one has.
        self.handicap, self.merit = handicap, merit
        self.stored: dict[int, int] = {}
        self.found: dict[int, int] = {}
        self.remembered: dict[int, int] = {}

    def play(self, uses: Sequence[tuple[int, int]], room: int, handicap: int) -> list[bool]:
        """Names are asked for, each at its time, and stored where they are not there; returns
        which were.
        """
        stored, found, remembered = self.stored, self.found, self.remembered
        hits: list[bool] = []
        for number, now in uses:
            is_hit = bool(found.pop(number, 0) or stored.pop(number, 0))
            hits.append(is_hit)
            (found if is_hit or remembered.pop(number, 0) else stored)[number] = now
            while len(stored) + len(found) > room:
                queue = stored or found
                if stored and found:
                    used = next(iter(stored.values())) - handicap
                    queue = stored if used < next(iter(found.values())) else found
                first = next(iter(queue))
                remembered[first] = queue.pop(first)
        for number in list(islice(remembered, max(len(remembered) - REMEMBERED * room, 0))):
            del remembered[number]
        return hits


Fronts = Mapping[RecordQueue, ChunkRecord] | None


def _number(record: ChunkRecord) -> int:
    """Of its name: from 1 to 2 ** 32 - 1, far from those of similar keys."""
    return crc32(record.key) * 0x9E3779B1 & 0xFFFFFFFF or 1


class EvictionOrder:
    """See the module's docstring. Records are given from a prompt's head to its tail, and the head
    counts as used last: without it the rest is worth nothing.
    """

    def __init__(self) -> None:
        self._released, self._spare, self._stored, self._found = (RecordQueue() for _ in range(4))
        self._kept = [RecordQueue() for _ in range(Standing.KEPT, Standing.PINNED)]
        # Of what is spare no more: each goes late until it is unmarked.
        self._unmarking: list[RecordQueue] = []
        self._num_entered = self._num_pinned = 0
        self._memory = _Memory(1)
        self._trials = [_Trial(each) for each in HANDICAPS]
        # The sample has numbers without the bits of `_rest`; its uses since the last lesson.
        self._handicap = self._rest = 0
        self._uses: list[tuple[int, int]] = []
        # `_room`: the most chunks that there were lately.
        self._room = self.now = 0

    def enter(self, records: Sequence[ChunkRecord], front: Fronts = None) -> None:
        """Chunks of a prompt have become READY; they were in no order. They go before those in
        `front` of them in the prompt, of which each queue may have one.
        """
        for record in reversed(records):
            number = self._use(record)
            record.hits += self._memory.take(number)
            self._put(record, front)
        self._room = max(self._room, self._num_entered)

    def touch(self, records: Sequence[ChunkRecord]) -> None:
        """Chunks of a prompt that have entered were found; what another node keeps, too, is spare
        all the same.
        """
        found = self._found
        for record in reversed(records):
            record.hits += 1
            if record.queue is found:
                found.renew(record)
                self._use(record)
                continue
            if record.standing is Standing.RELEASED:
                record.standing = NORMAL
            self._take(record)
            self._use(record)
            self._put(record)

    def stand(self, record: ChunkRecord, standing: Standing) -> None:
        """A chunk that has entered goes sooner or later from now on; that is no use of it, but it
        is the last of those that stand like it.
        """
        if standing is not record.standing or self._is_marked_void(record):
            self._take(record)
            self.now += 1
            record.used, record.standing = self.now, standing
            self._put(record)

    def leave(self, record: ChunkRecord, *, remember: bool) -> None:
        """A chunk that has entered is gone; `remember` it if it went for lack of room."""
        self._take(record)
        if remember:
            most = REMEMBERED * self._room
            if not most <= self._memory.room <= 1 + 7 * most // 5:
                self._memory = _Memory(1 + 9 * most // 8)
            self._memory.add(_number(record), most)

    def forget_spares(self) -> None:
        """What was said of spare chunks is void: from now on they go after those that are not,
        until `unmark` has come to them.
        """
        if self._spare.first is not None:
            self._unmarking.append(self._spare)
            self._spare = RecordQueue()

    def unmark(self, most: int) -> int:
        """Let up to `most` chunks that are spare no more stand like others; returns how many."""
        records = list(islice(chain.from_iterable(self._unmarking), most))
        for record in records:
            self.stand(record, Standing.NORMAL)
        self._unmarking = [queue for queue in self._unmarking if queue.first is not None]
        return len(records)

    def _is_marked_void(self, record: ChunkRecord) -> bool:
        return record.standing is Standing.SPARE and record.queue is not self._spare

    def first(self, count: int, may_go: Callable[[ChunkRecord], bool]) -> list[ChunkRecord]:
        """Up to `count` chunks that go first, of those that may."""
        return list(islice(filter(may_go, self), count))

    def __iter__(self) -> Iterator[ChunkRecord]:
        """All but those that are pinned, in order. Not valid after a change."""
        yield from self._released
        yield from self._spare
        found, handicap = self._found.first, self._handicap * self.num_that_go
        for stored in self._stored:
            while found is not None and found.used <= stored.used - handicap:
                yield found
                found = found.after
            yield stored
        while found is not None:
            yield found
            found = found.after
        yield from chain.from_iterable((*self._unmarking, *self._kept))

    @property
    def num_that_go(self) -> int:
        """Chunks that are not pinned."""
        return self._num_entered - self._num_pinned

    def __len__(self) -> int:
        """How many have entered and not left."""
        return self._num_entered

    def _use(self, record: ChunkRecord) -> int:
        """A chunk is used now; returns its number."""
        self.now = record.used = self.now + 1
        number = _number(record)
        if not number & self._rest:
            self._uses.append((number, self.now))
            if len(self._uses) == LESSON:
                self._learn()
        return number

    def _learn(self) -> None:
        """Play the sample, go by the best trial, and see to the size of the sample."""
        num = self._room = max(self._num_entered, self._room - 1 - self._room // FORGET)
        room = 1 + num // (self._rest + 1)
        plays = [trial.play(self._uses, room, trial.handicap * num) for trial in self._trials]
        left = 0.5 ** (LESSON / (HALF_LIFE * room))
        for trial, hits in zip(self._trials, plays, strict=True):
            trial.merit *= left
            if hits != plays[0]:
                more, less = sum(map(gt, hits, plays[0])), sum(map(lt, hits, plays[0]))
                trial.merit += more / CLEARLY - less
        self._uses.clear()
        self._handicap = max(self._trials, key=lambda each: each.merit).handicap
        most = max(LEAST_SAMPLED, FINEST * (self._rest + 1))
        if room > most:
            self._rest = 2 * self._rest + 1
            self._trials = [_Trial(each.handicap, each.merit) for each in self._trials]
        elif room < most // 8:
            self._rest //= 2

    def _put(self, record: ChunkRecord, front: Fronts = None) -> None:
        self._num_entered += 1
        standing = record.standing
        if standing is NORMAL:
            queue = self._found if record.hits else self._stored
            before = front.get(queue) if front else None
            if before is not None and before.queue is queue:
                record.used = before.used
                queue.add(record, before)
            else:
                queue.add(record)
        elif standing is Standing.PINNED:
            self._num_pinned += 1
        elif standing >= Standing.KEPT:
            self._kept[standing - Standing.KEPT].add(record)
        else:
            (self._spare if standing is Standing.SPARE else self._released).add(record)

    def _take(self, record: ChunkRecord) -> None:
        self._num_entered -= 1
        queue = record.queue
        if queue is None:
            self._num_pinned -= 1
        else:
            if self._unmarking and self._is_marked_void(record):
                record.standing = NORMAL
            queue.remove(record)
