"""The duel of three orders of eviction, each simulated on a sample of the names.

A name is in the sample if a hash of its key says so. For each order a shadow holds of the sample
what a pool that gives up by that order would hold; it has room for the sampled share of what the
pool has room for. A name that comes and is either in the shadow of last use alone or in another
order's alone is a point for that order or against it. Points fade.

   used ─► in all shadows ─► in some ─► in none: forgotten
                each gives up one when it is full

Who is in doubt goes by last use. Worth has to lead by more than chance alone would explain; the
order by find, which is not far from last use, has to lead.

Invariants:
1. Each shadow has `room >> shift` names at most once the room is known, and never more than
   `MOST_SAMPLED`.
2. A shadow has no name that is not sampled; `shift` only ever grows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import islice

BY_USE, BY_FIND, BY_WORTH = 0, 1, 2
"""The orders; what the second is, `worth.py` says."""

MOST_SAMPLED = 2048
"""Names in a shadow: what they cost per use falls with the size of a pool."""

DUEL_HALF_LIFE = 64
"""Uses per held name until points count half."""

MARGIN = 0.25
"""Share of the points by which worth has to lead: they come in bunches, a prompt's at a time."""

LEAST_POINTS = 16.0
"""Fewer say nothing."""

PRIME = 2**31 - 1
"""Keys are told apart by their rest; two of one rest share their past: a harmless mistake."""

FACTOR = 0x9E3779B1
"""Close to 2 ** 32 divided by the golden ratio, which spreads successive numbers evenly."""


class Duel:
    """See the module's docstring.

    Args:
        num_kinds: of names.
        worth: of a kind at an age.
        handicap: of a kind that was stored in a pool of a size.
    """

    def __init__(
        self,
        num_kinds: int,
        worth: Callable[[int, int], float],
        handicap: Callable[[int, int], int],
    ) -> None:
        self._worth = worth
        self._handicap = handicap
        self.order = BY_USE
        # By order, against the first.
        self._leads = [0.0, 0.0, 0.0]
        self._num_points = [0.0, 0.0, 0.0]
        # Sampled are the names whose hash begins with that many zeros.
        self._shift = 0
        # How many the pool holds when it is full; 0: not known yet. And the most held at an
        # eviction since the last judgement.
        self._room = 0
        self._most_held = 0
        # The first and the last from least to most recently used; that of worth by kind, with the
        # time. That by find has what counts as the time, and a heap, which has old entries too.
        self._by_use: OrderedDict[int, None] = OrderedDict()
        self._by_find: dict[int, int] = {}
        self._finds: list[tuple[int, int]] = []
        self._by_worth: list[OrderedDict[int, int]] = [OrderedDict() for _ in range(num_kinds)]
        self._places: dict[int, int] = {}

    def used(self, key: bytes, kind: int, now: int) -> None:
        """A name came, or was used, and is of that kind from now on."""
        sample = int.from_bytes(key, "little") % PRIME
        if not is_sampled(sample, self._shift):
            return
        was_found = self._by_find.pop(sample, None) is not None
        place = self._places.pop(sample, None)
        for order, is_there in ((BY_FIND, was_found), (BY_WORTH, place is not None)):
            if is_there != (sample in self._by_use):
                self._leads[order] += 1 if is_there else -1
                self._num_points[order] += 1
        self._by_use.pop(sample, None)
        if place is not None:
            del self._by_worth[place][sample]
        if self._room:
            self._make_room(now)
        self._by_use[sample] = None
        self._by_find[sample] = now if was_found else now - self._handicap(kind, self._room)
        heappush(self._finds, (self._by_find[sample], sample))
        if len(self._finds) > 2 * MOST_SAMPLED + 2 * len(self._by_find):
            self._finds = [(last, name) for name, last in self._by_find.items()]
            heapify(self._finds)
        self._by_worth[kind][sample] = now
        self._places[sample] = kind
        while len(self._by_use) > MOST_SAMPLED:
            self._thin_out()

    def _make_room(self, now: int) -> None:
        room = max(self._room >> self._shift, 1)
        while len(self._by_use) >= room:
            self._by_use.popitem(last=False)
        while len(self._by_find) >= room:
            last, sample = heappop(self._finds)
            if self._by_find.get(sample) == last:
                del self._by_find[sample]
        while len(self._places) >= room:
            self._give_up_by_worth(now)

    def _give_up_by_worth(self, now: int) -> None:
        oldest = [
            (self._worth(kind, now - last), last, sample)
            for kind, names in enumerate(self._by_worth)
            for sample, last in islice(names.items(), 1)
        ]
        _, _, sample = min(oldest)
        del self._by_worth[self._places.pop(sample)][sample]

    def _thin_out(self) -> None:
        """Half of the sample is enough."""
        self._shift += 1
        for sample in [each for each in self._by_use if not is_sampled(each, self._shift)]:
            del self._by_use[sample]
        for sample in [each for each in self._by_find if not is_sampled(each, self._shift)]:
            del self._by_find[sample]
        for sample in [each for each in self._places if not is_sampled(each, self._shift)]:
            del self._by_worth[self._places.pop(sample)][sample]

    def evicted(self, num_held: int) -> None:
        """The pool gave up one of so many names."""
        self._most_held = max(self._most_held, num_held)

    def judge(self, passed: int, num_held: int) -> None:
        """Let points fade by the uses that have `passed`, and say who leads."""
        factor = 0.5 ** (passed / (DUEL_HALF_LIFE * num_held))
        self.order, most = BY_USE, 0.0
        for order in (BY_FIND, BY_WORTH):
            self._leads[order] *= factor
            self._num_points[order] *= factor
            points, lead = max(self._num_points[order], LEAST_POINTS), self._leads[order]
            least = max(MARGIN * points, points**0.5) if order == BY_WORTH else 0.0
            if lead > max(least, most):
                self.order, most = order, lead
        if self._most_held:
            self._room, self._most_held = self._most_held, 0
            while self._room >> self._shift > MOST_SAMPLED:
                self._thin_out()


def is_sampled(sample: int, shift: int) -> bool:
    """Whether the hash of a name begins with so many zeros; compiled by `flat/shadows.py`, too."""
    return (sample * FACTOR & 0xFFFFFFFF) >> (32 - shift) == 0
