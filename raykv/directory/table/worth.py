"""Worth: gives up the chunk from which the fewest hits are to be expected per slot and time, or
goes by last use, as LRU does, where that has been better lately.

Names wait in queues, oldest first; the first of each queue are compared. A name is of a kind: how
often it was used, and with about how many others the last time, which were those of one prompt. The
tail of a prompt is of a kind of its own until it is used again. Each kind has a queue, and one more
for those of its names that were given up and stored again, and have not been found since.

            add                    add, touch                 add, touch
   unknown ─────► tail, used once ──────────────► used twice ───────────────► …
      ▲               │ evicted                      │ evicted
      └── trimmed ── ghost, which keeps the kind and the time of the last use

Between the two there is a third order, by find: that of last use, but a name that was stored and
not found yet counts as older, by a part of the pool and by as many as may have come with it. What a
prompt brings comes after what it found and would outlive it, but without the head of a prefix the
rest is worthless; and a flood of new chunks leaves most of those in use where they are.

Which of them it goes by is the verdict of `duel.py`. Whenever it does not go by worth, tails that
hardly ever come back go first.

The worth is learned, not set. From what was used again, ghosts included, the policy learns at which
ages that happens: for each size of prompts a curve, and for each kind how far it lies above or
below. The worth of a name at its age is then the highest rate of hits that any further wait could
bring: for each wait, the chance that the name is used by then, divided by the time that it takes up
the slot until it is used or the wait is over. That is the Gittins index (J. Gittins, "Bandit
Processes and Dynamic Allocation Indices", 1979), or hit density (N. Beckmann and others, "LHD:
Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018). What was learned fades.

The head of a prefix has been used as often as its tail at least, and as lately: it stays longer.
Time is counted in uses of any name.

Invariants:
1. A name is in exactly the queue that its uses say, and each queue is ordered by last use.
2. No ghost is held, and after an eviction there are at most `GHOSTS_PER_NAME` per held name and
   `MOST_GHOSTS` in all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, MutableSequence
from heapq import heapify, heappop, heapreplace

from raykv.directory.table.duel import BY_FIND, BY_WORTH, Duel

Name = tuple[str, bytes]

NUM_USES = 4
"""More uses than that tell little more about the next one."""

NUM_SIZES = 9
"""Sizes of prompts differ by powers of two up to 64 chunks, and of four beyond."""

NUM_KINDS = 1 + NUM_USES * NUM_SIZES
"""The first is of tails that were used once; then all sizes of what was used once, and so on."""

NUM_QUEUES = NUM_KINDS + (NUM_USES - 1) * NUM_SIZES
"""One for each kind, and one more for what was stored again, which was used twice or more."""

TAIL = 0

GHOSTS_PER_NAME = 4
"""A small pool has to remember for longer than it can hold, or it can't tell what comes back."""

MOST_GHOSTS = 262_144
"""About 10 MB for each slot size of a node: a large pool remembers long by itself."""

HANDICAP = 4
"""What was stored counts as older, by this part of the pool, than what was found there."""

TAIL_SIZE = 6
"""What a tail counts as, whose size is not known: it should go before most others of its prompt."""

RARELY = 8
"""Tails that come back so many times more rarely than all names are worth no slot."""

HALF_LIFE = 16
"""Uses per held name until what was learned counts half."""

FEW = 30.0
"""Names of a kind that must have come back before its own chances count half."""

FEW_OF_A_SIZE = 500.0
"""Names of a size that must have been used before their own ages count half."""

LESSONS = 8
"""How often the worths are worked out again while as many names are used as are held."""

FEWEST_USES = 1024
"""Uses between two lessons at least: they must cost little in a small pool, too."""

AGES_PER_POWER = 4
"""Ages differ by powers of two and so many steps between them."""

NUM_AGES = AGES_PER_POWER * 32

SCRATCH = 6 * NUM_AGES + 4
"""Scratch space of a lesson."""

MOST_CHANCE = 0.98
"""Chance that a name is used again: the future is never certain."""


class Worth:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._now = 0
        # Each from least to most recently used, with that time.
        self._queues: list[OrderedDict[Name, int]] = [OrderedDict() for _ in range(NUM_QUEUES)]
        # In which queue a name is.
        self._places: dict[Name, int] = {}
        # By hash, from least to most recently evicted: time of last use * NUM_KINDS + kind. Two
        # names of one hash would share their past: a harmless mistake.
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        # By kind: how many names became of it; and of it, by index of the age, were used again.
        self._uses = [0.0] * NUM_KINDS
        self._returns = [0.0] * (NUM_KINDS * NUM_AGES)
        # By kind and index of the age.
        self._worths = [0.0] * (NUM_KINDS * NUM_AGES)
        self._scratch = [0.0] * SCRATCH
        self._learned_at = 0
        self._due_at = FEWEST_USES
        self._duel = Duel(NUM_KINDS, self._worth, handicap)
        self.gives_up_tails_first = False

    def add(self, name: Name, together: int = 0, *, is_tail: bool = False) -> None:
        ghost = self._ghosts.pop(hash(name), None)
        if name in self._places:
            self.touch(name, together)
        elif ghost is None:
            self._enter(name, TAIL if is_tail and together > 1 else 1 + size_index(together))
        else:
            last, kind = divmod(ghost, NUM_KINDS)
            following = self._use_again(kind, last, together)
            self._enter(name, following + NUM_QUEUES - NUM_KINDS)

    def touch(self, name: Name, together: int = 0) -> None:
        queue = self._places.get(name)
        if queue is not None:
            last = self._queues[queue].pop(name)
            self._enter(name, self._use_again(kind_of(queue), last, together))

    def _use_again(self, kind: int, last: int, together: int) -> int:
        """The kind that a name is of now."""
        self._returns[kind * NUM_AGES + age_index(self._now - last)] += 1
        return next_kind(kind, size_index(together))

    def _enter(self, name: Name, queue: int) -> None:
        self._places[name] = queue
        self._queues[queue][name] = self._now
        kind = kind_of(queue)
        self._duel.used(name[1], kind, self._now)
        self._now += 1
        self._uses[kind] += 1
        if self._now >= self._due_at:
            self._learn()

    def _learn(self) -> None:
        passed, num_held = self._now - self._learned_at, len(self)
        self._duel.judge(passed, num_held)
        uses, returns, scratch = self._uses, self._returns, self._scratch
        learn_ages(uses, returns, scratch, passed, self._now, num_held)
        for first in range(NUM_SIZES + 1):
            step = NUM_KINDS if first == TAIL else NUM_SIZES
            learn_size(uses, returns, scratch, first, step)
            for kind in range(first, NUM_KINDS, step):
                learn_kind(uses, returns, self._worths, scratch, kind)
        self.gives_up_tails_first = are_rare(uses, returns, TAIL)
        self._learned_at = self._now
        self._due_at = self._now + max(FEWEST_USES, num_held // LESSONS)

    def remove(self, name: Name) -> None:
        queue = self._places.pop(name, None)
        if queue is not None:
            del self._queues[queue][name]

    def evicted(self, name: Name) -> None:
        queue = self._places.get(name)
        if queue is None:
            return
        self._duel.evicted(len(self))
        del self._places[name]
        self._ghosts[hash(name)] = self._queues[queue].pop(name) * NUM_KINDS + kind_of(queue)
        while len(self._ghosts) > min(MOST_GHOSTS, GHOSTS_PER_NAME * max(len(self), 1)):
            self._ghosts.popitem(last=False)

    @property
    def goes_by(self) -> int:
        """The order: one of those of `duel.py`."""
        return self._duel.order

    @property
    def num_ghosts(self) -> int:
        """How many names are remembered that are not held."""
        return len(self._ghosts)

    def candidates(self) -> Iterator[Name]:
        queues = [iter(queue.items()) for queue in self._queues]
        # Worth, last use, queue, name: the least worth first, then the oldest.
        heap: list[tuple[float, int, int, Name]] = []
        for number, queue in enumerate(queues):
            for name, last in queue:
                heap.append((*self._rank(number, last), number, name))
                break
        heapify(heap)
        while heap:
            _, _, number, first = heap[0]
            yield first
            following = next(queues[number], None)
            if following is None:
                heappop(heap)
            else:
                name, last = following
                heapreplace(heap, (*self._rank(number, last), number, name))

    def _rank(self, queue: int, last: int) -> tuple[float, int]:
        if self.goes_by == BY_WORTH:
            return self._worth(kind_of(queue), self._now - last), last
        if queue == TAIL and self.gives_up_tails_first:
            return -1.0, last
        if self.goes_by == BY_FIND and not is_found(queue):
            last -= handicap(kind_of(queue), len(self))
        return 0.0, last

    def _worth(self, kind: int, age: int) -> float:
        return self._worths[kind * NUM_AGES + age_index(age)]

    def __len__(self) -> int:
        return len(self._places)


# `flat/order.py` compiles all that follows, so it calls built-in functions only.


def age_index(age: int) -> int:
    """Four for each power of two."""
    power = 0
    while age >= 2 * AGES_PER_POWER:
        age >>= 1
        power += 1
    return AGES_PER_POWER * power + age


def size_index(together: int) -> int:
    """0 if it is not known how many names are used together."""
    size = 0
    while together > 0 and size < NUM_SIZES - 1:
        together >>= 1 if size < 6 else 2
        size += 1
    return size


def kind_of(queue: int) -> int:
    """The kind of the names in a queue."""
    return queue if queue < NUM_KINDS else queue - (NUM_QUEUES - NUM_KINDS)


def next_kind(kind: int, size: int) -> int:
    """What kind a name is of that was of another, or whose ghost was, and is used again.

    If its size is not known now, it is the former one.
    """
    uses = 0
    if kind != TAIL:
        uses = (kind - 1) // NUM_SIZES
        if size == 0:
            size = (kind - 1) % NUM_SIZES
    return 1 + min(uses + 1, NUM_USES - 1) * NUM_SIZES + size


def is_found(queue: int) -> bool:
    """Whether the names in a queue were found since they were stored."""
    return NUM_SIZES < queue < NUM_KINDS


def handicap(kind: int, num_held: int) -> int:
    """How much older names count that were stored and not found since."""
    size = TAIL_SIZE if kind == TAIL else (kind - 1) % NUM_SIZES
    if size == 0:
        return 0
    return num_held // HANDICAP + (1 << (size if size <= 6 else 2 * size - 6))


def are_rare(uses: MutableSequence[float], returns: MutableSequence[float], kind: int) -> bool:
    """Whether names of a kind come back far more rarely than others."""
    num_ages = len(returns) // len(uses)
    all_uses, all_returns, its_returns = 0.0, 0.0, 1.0
    for number in range(len(uses)):
        all_uses += uses[number]
        for index in range(number * num_ages, (number + 1) * num_ages):
            all_returns += returns[index]
            if number == kind:
                its_returns += returns[index]
    return RARELY * its_returns * all_uses < all_returns * uses[kind]


def learn_ages(
    uses: MutableSequence[float],
    returns: MutableSequence[float],
    scratch: MutableSequence[float],
    passed: int,
    now: int,
    num_held: int,
) -> None:
    """Let the counts fade by the uses that have `passed`, and begin a lesson.

    `now` is the age of the counts: what is older than that can't have come back yet, and of what is
    nearly as old, few has. `scratch` gets, by index of the age, the share of the uses that were
    long enough ago, and the chance of all names to be used again at that age.
    """
    num_ages = len(returns) // len(uses)
    half_life = HALF_LIFE * num_held
    factor = 0.5 ** (passed / half_life)
    all_uses = 0.0
    for kind in range(len(uses)):
        uses[kind] *= factor
        all_uses += uses[kind]
    lowest = 0
    for index in range(num_ages):
        width = 1 << max(index // AGES_PER_POWER - 1, 0)
        middle = lowest + width / 2
        lowest += width
        count = 0.0
        for kind in range(len(uses)):
            returns[kind * num_ages + index] *= factor
            count += returns[kind * num_ages + index]
        scratch[index] = scratch[num_ages + index] = 0.0
        if middle < now:
            share = (1 - 0.5 ** ((now - middle) / half_life)) / (1 - 0.5 ** (now / half_life))
            scratch[index] = share
            scratch[num_ages + index] = count / (all_uses * share + FEW)


def learn_size(
    uses: MutableSequence[float],
    returns: MutableSequence[float],
    scratch: MutableSequence[float],
    first: int,
    step: int,
) -> None:
    """Go on with the kinds of one size: every `step`-th from the `first` on.

    `scratch` gets, behind what it has, the chance of such a name at each age, and their sum.
    """
    num_ages = len(returns) // len(uses)
    used = 0.0
    for kind in range(first, len(uses), step):
        used += uses[kind]
    expected = 0.0
    for index in range(num_ages):
        count = FEW_OF_A_SIZE * scratch[num_ages + index]
        for kind in range(first, len(uses), step):
            count += returns[kind * num_ages + index]
        chance = count / (used * scratch[index] + FEW_OF_A_SIZE)
        scratch[2 * num_ages + index] = chance
        expected += scratch[index] * chance
    scratch[3 * num_ages] = expected


def learn_kind(
    uses: MutableSequence[float],
    returns: MutableSequence[float],
    worths: MutableSequence[float],
    scratch: MutableSequence[float],
    kind: int,
) -> None:
    """End a lesson with the worths of a kind.

    Its names come back so many times as often as others of their size. The best rate of hits from
    each age on: draw for each age the hits until then over the slot's time until then. The best
    rate from an age on is the steepest line from its point to a later one, so to its neighbour on
    the upper hull of the later points.
    """
    if uses[kind] == 0:
        return
    num_ages = len(returns) // len(uses)
    chances, times = 2 * num_ages, 3 * num_ages + 1
    hits, hull = 4 * num_ages + 2, 5 * num_ages + 3
    count, total = FEW, 0.0
    for index in range(num_ages):
        count += returns[kind * num_ages + index]
        total += scratch[chances + index]
    factor = count / (uses[kind] * scratch[3 * num_ages] + FEW)
    factor = min(factor, MOST_CHANCE / max(total, 1e-9))
    time = hit = 0.0
    for index in range(num_ages):
        scratch[times + index], scratch[hits + index] = time, hit
        hits_here = factor * scratch[chances + index]
        time += (1 << max(index // AGES_PER_POWER - 1, 0)) * (1 - hit - hits_here / 2)
        hit += hits_here
    scratch[times + num_ages], scratch[hits + num_ages] = time, hit
    # Points of the hull, the nearest last.
    length = 1
    scratch[hull] = num_ages
    for index in range(num_ages - 1, -1, -1):
        time, hit = scratch[times + index], scratch[hits + index]
        last = int(scratch[hull + length - 1])
        steepest = (scratch[hits + last] - hit) / (scratch[times + last] - time)
        while length >= 2:
            last = int(scratch[hull + length - 2])
            slope = (scratch[hits + last] - hit) / (scratch[times + last] - time)
            if slope < steepest:
                break
            steepest = slope
            length -= 1
        worths[kind * num_ages + index] = steepest
        scratch[hull + length] = index
        length += 1
