"""ARC, the adaptive replacement cache: recency and frequency share the room as ghosts advise.

After N. Megiddo and D. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.

                add                    touch
   unknown ───────────► recent ──────────────► frequent
      ▲                   │ evicted              │ evicted
      └───── trimmed ── recent ghost       frequent ghost ── trimmed ─► unknown
                          └────── add ──► frequent ◄── add ──┘

The paper knows the capacity; here the number of held names stands for it. It learns how much of
it `recent` should have: an add of a recent ghost asks for more, one of a frequent ghost for less.

Invariants:
1. A name is in one of the four lists at most.
2. There are no more ghosts than `max_ghosts` allows for the held names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)


class ARC(Generic[N]):
    """See the module's docstring."""

    def __init__(self) -> None:
        # All four from least to most recently used or evicted.
        self._recent: OrderedDict[N, None] = OrderedDict()
        self._frequent: OrderedDict[N, None] = OrderedDict()
        self._recent_ghosts: OrderedDict[N, None] = OrderedDict()
        self._frequent_ghosts: OrderedDict[N, None] = OrderedDict()
        # How many names `recent` should have.
        self._target = 0.0

    def add(self, name: N) -> None:
        if name in self._recent or name in self._frequent:
            self.touch(name)
        elif name in self._recent_ghosts:
            step = len(self._frequent_ghosts) / len(self._recent_ghosts)
            self._target = min(self._target + max(1.0, step), float(len(self)))
            del self._recent_ghosts[name]
            self._frequent[name] = None
        elif name in self._frequent_ghosts:
            step = len(self._recent_ghosts) / len(self._frequent_ghosts)
            self._target = max(self._target - max(1.0, step), 0.0)
            del self._frequent_ghosts[name]
            self._frequent[name] = None
        else:
            self._recent[name] = None

    def touch(self, name: N) -> None:
        if name in self._recent:
            del self._recent[name]
            self._frequent[name] = None
        elif name in self._frequent:
            self._frequent.move_to_end(name)

    def evicted(self, name: N) -> None:
        if name in self._recent:
            del self._recent[name]
            self._recent_ghosts[name] = None
        elif name in self._frequent:
            del self._frequent[name]
            self._frequent_ghosts[name] = None
        self._trim_ghosts()

    def _trim_ghosts(self) -> None:
        """Recent names and their ghosts are as many as all held at most; all ghosts too."""
        held = len(self)
        while self._recent_ghosts and len(self._recent) + len(self._recent_ghosts) > held:
            self._recent_ghosts.popitem(last=False)
        while self._frequent_ghosts and self.num_ghosts > held:
            self._frequent_ghosts.popitem(last=False)

    @property
    def num_ghosts(self) -> int:
        """How many names are remembered that are not held."""
        return len(self._recent_ghosts) + len(self._frequent_ghosts)

    def candidates(self) -> Iterator[N]:
        surplus = max(0, min(len(self._recent), len(self._recent) - int(self._target)))
        yield from islice(self._recent, surplus)
        yield from self._frequent
        yield from islice(self._recent, surplus, None)

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)
