"""Worth: gives up the chunk from which the fewest hits are to be expected per slot and time.

Names that have been used equally often wait in one queue, oldest first; the first of each queue
are compared by their worth.

            add                 add, touch                 add, touch
   unknown ─────► used once ──────────────► used twice ───────────────► …
      ▲               │ evicted                 │ evicted
      └── trimmed ── ghost, which keeps the number of uses and the time of the last

The worth is learned, not set. From what was used again, ghosts included, the policy learns at which
ages that happens, and for each number of uses how often. The worth of a name at its age is then the
highest rate of hits that any further wait could bring: for each wait, the chance that the name is
used by then, divided by the time that it takes up the slot until it is used or the wait is over.
That is the Gittins index (J. Gittins, "Bandit Processes and Dynamic Allocation Indices", 1979), or
hit density (N. Beckmann and others, "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI
2018). What was learned fades, and before there is anything to learn from, the order is that of LRU.

The head of a prefix has been used as often as its tail at least, and as lately: it stays longer.
Time is counted in uses of any name.

Invariants:
1. A name is in exactly the queue of its number of uses, and each queue is ordered by last use.
2. No ghost is held, and after an eviction there are at most `GHOSTS_PER_NAME` per held name and
   `MOST_GHOSTS` in all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, MutableSequence
from heapq import heapify, heappop, heapreplace
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)

NUM_QUEUES = 8
"""More uses than that tell little more about the next one."""

GHOSTS_PER_NAME = 4
"""A small pool has to remember for longer than it can hold, or it can't tell what comes back."""

MOST_GHOSTS = 262_144
"""About 10 MB for each slot size of a node: a large pool remembers long by itself."""

HALF_LIFE = 16
"""Uses per held name until what was learned counts half."""

DOUBT = 0.3
"""Uses per held name that a queue must have seen before its own chances count half."""

LESSONS = 8
"""How often the worths are worked out again while as many names are used as are held."""

FEWEST_USES = 256
"""Uses between two lessons at least: they must cost little in a small pool, too."""

NUM_AGES = 2 * 48
"""Ages differ by powers of two and the next digit."""

SCRATCH = 4 * (NUM_AGES + 1)
"""Scratch space of a lesson."""

MOST_CHANCE = 0.98
"""Chance that a name is used again: the future is never certain."""


class Worth(Generic[N]):
    """See the module's docstring."""

    def __init__(self) -> None:
        self._now = 0
        # By number of uses less one; each from least to most recently used, with that time.
        self._queues: list[OrderedDict[N, int]] = [OrderedDict() for _ in range(NUM_QUEUES)]
        # In which queue a name is.
        self._places: dict[N, int] = {}
        # By hash, from least to most recently evicted: time of last use * NUM_QUEUES + queue. Two
        # names of one hash would share their past: a harmless mistake.
        self._ghosts: OrderedDict[int, int] = OrderedDict()
        self._lessons = _Lessons()

    def add(self, name: N) -> None:
        ghost = self._ghosts.pop(hash(name), None)
        if name in self._places:
            self.touch(name)
        elif ghost is None:
            self._enter(name, 0)
        else:
            last, place = divmod(ghost, NUM_QUEUES)
            self._use_again(name, place, last)

    def touch(self, name: N) -> None:
        place = self._places.get(name)
        if place is not None:
            self._use_again(name, place, self._queues[place].pop(name))

    def _use_again(self, name: N, place: int, last: int) -> None:
        self._lessons.used_again(place, self._now - last)
        self._enter(name, min(place + 1, NUM_QUEUES - 1))

    def _enter(self, name: N, place: int) -> None:
        self._places[name] = place
        self._queues[place][name] = self._now
        self._now += 1
        self._lessons.used(place, self._now, len(self))

    def remove(self, name: N) -> None:
        place = self._places.pop(name, None)
        if place is not None:
            del self._queues[place][name]

    def evicted(self, name: N) -> None:
        place = self._places.pop(name, None)
        if place is None:
            return
        self._ghosts[hash(name)] = self._queues[place].pop(name) * NUM_QUEUES + place
        while len(self._ghosts) > min(MOST_GHOSTS, GHOSTS_PER_NAME * max(len(self), 1)):
            self._ghosts.popitem(last=False)

    @property
    def num_ghosts(self) -> int:
        """How many names are remembered that are not held."""
        return len(self._ghosts)

    def candidates(self) -> Iterator[N]:
        queues = [iter(queue.items()) for queue in self._queues]
        # Worth, last use, queue, name: the least worth first, then the oldest. No two names have
        # the same last use, so that names are never compared.
        heap: list[tuple[float, int, int, N]] = []
        for place, queue in enumerate(queues):
            for name, last in queue:
                heap.append((self._worth(place, last), last, place, name))
                break
        heapify(heap)
        while heap:
            _, _, place, first = heap[0]
            yield first
            following = next(queues[place], None)
            if following is None:
                heappop(heap)
            else:
                name, last = following
                heapreplace(heap, (self._worth(place, last), last, place, name))

    def _worth(self, place: int, last: int) -> float:
        return self._lessons.worth(place, self._now - last)

    def __len__(self) -> int:
        return len(self._places)


class _Lessons:
    """What has been learned of uses, and the worths that follow from it.

    The ages at which names are used again differ little between queues and are counted for all of
    them together; how often that happens is counted for each. So a few counts say much.
    """

    def __init__(self) -> None:
        # By queue; all counts fade.
        self._uses = [0.0] * NUM_QUEUES
        self._returns = [0.0] * NUM_QUEUES
        # By index of the age.
        self._ages = [0.0] * NUM_AGES
        self._learned_at = 0
        self._due_at = FEWEST_USES
        # By queue and index of the age; all are equal at first, which makes the order that of LRU.
        self._worths = [0.0] * (NUM_QUEUES * NUM_AGES)
        self._scratch = [0.0] * SCRATCH

    def worth(self, place: int, age: int) -> float:
        """Worth of a name of that age in a queue."""
        return self._worths[place * NUM_AGES + age_index(age)]

    def used_again(self, place: int, age: int) -> None:
        """A name from a queue, or its ghost, was used again at that age."""
        self._returns[place] += 1
        self._ages[age_index(age)] += 1

    def used(self, place: int, now: int, num_held: int) -> None:
        """A name came into a queue."""
        self._uses[place] += 1
        if now >= self._due_at:
            passed = now - self._learned_at
            columns = (self._uses, self._returns, self._ages, self._worths, self._scratch)
            learn(*columns, passed, num_held)
            self._learned_at = now
            self._due_at = now + max(FEWEST_USES, num_held // LESSONS)


# `flat/order.py` compiles both, so they call built-in functions only.


def age_index(age: int) -> int:
    """Two for each power of two."""
    power = 0
    while age >= 4:
        age >>= 1
        power += 1
    return 2 * power + age


def learn(
    uses: MutableSequence[float],
    returns: MutableSequence[float],
    ages: MutableSequence[float],
    worths: MutableSequence[float],
    scratch: MutableSequence[float],
    passed: int,
    num_held: int,
) -> None:
    """Let the counts fade by the uses that have `passed`, and work out the worths from them.

    The best rate of hits from each age on: draw for each age the hits until then over the slot's
    time until then. The best rate from an age on is the steepest line from its point to a later
    one, so to its neighbour on the upper hull of the later points.

    `scratch` has room for the points and the hull, `SCRATCH` values.
    """
    num_ages = len(ages)
    hits, hull = num_ages + 1, 2 * (num_ages + 1)
    factor = 0.5 ** (passed / (HALF_LIFE * num_held))
    # One return, at an age of any size, and one in two uses, before any are known.
    all_uses, all_returns, all_ages = 2.0, 1.0, 1.0
    for place in range(len(uses)):
        uses[place] *= factor
        returns[place] *= factor
        all_uses += uses[place]
        all_returns += returns[place]
    for index in range(num_ages):
        ages[index] *= factor
        all_ages += ages[index]
    doubt = DOUBT * num_held + 1
    for place in range(len(uses)):
        likely = returns[place] + doubt * all_returns / all_uses
        chance = min(likely / (uses[place] + doubt), MOST_CHANCE) / all_ages
        time = hit = 0.0
        for index in range(num_ages):
            scratch[index], scratch[hits + index] = time, hit
            hits_here = chance * (ages[index] + 1 / num_ages)
            width = 1 << max(index // 2 - 1, 0)
            time += width * (1 - hit - hits_here / 2)
            hit += hits_here
        scratch[num_ages], scratch[hits + num_ages] = time, hit
        # Times and hits of the hull's points, the nearest last.
        length = 1
        scratch[hull], scratch[hull + 1] = time, hit
        for index in range(num_ages - 1, -1, -1):
            time, hit = scratch[index], scratch[hits + index]
            last = hull + 2 * length - 2
            steepest = (scratch[last + 1] - hit) / (scratch[last] - time)
            while length >= 2:
                last = hull + 2 * length - 4
                slope = (scratch[last + 1] - hit) / (scratch[last] - time)
                if slope < steepest:
                    break
                steepest = slope
                length -= 1
            worths[place * num_ages + index] = steepest
            scratch[hull + 2 * length], scratch[hull + 2 * length + 1] = time, hit
            length += 1
