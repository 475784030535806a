"""S3-FIFO: queues in which names wait for their turn; only then it matters whether they were used.

After J. Yang and others, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.

             add                 turn, used twice          turn, unused
   unknown ──────► small ────────────────────────► main ────────────────► gone
      ▲              │ turn, not used twice         ▲ ▲    │
      │              ▼                              │ └────┘ turn, used since
      └─ trimmed ─ ghost ──────────── add ──────────┘

The paper knows the capacity; here the number of held names stands for it. A name's turn is when it
is evicted, so `candidates` shows what would go and leaves the moves to `evicted`.

Invariants:
1. A name is in one of the queues at most, and no ghost is held.
2. There are no more ghosts than held names after an eviction.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

N = TypeVar("N", bound=Hashable)

SMALL_SHARE = 0.1
"""Of the held names, in `small`; the paper's value."""

MOST_USES = 3
"""That are counted; the paper's value."""

USES_TO_STAY = 2
"""In `small`, to move to `main`; the paper's value."""


class S3FIFO(Generic[N]):
    """See the module's docstring."""

    def __init__(self) -> None:
        # From first to last come, with the number of uses since.
        self._small: OrderedDict[N, int] = OrderedDict()
        self._main: OrderedDict[N, int] = OrderedDict()
        self._ghosts: OrderedDict[N, None] = OrderedDict()

    def add(self, name: N) -> None:
        if name in self._small or name in self._main:
            self.touch(name)
        elif name in self._ghosts:
            del self._ghosts[name]
            self._main[name] = 0
        else:
            self._small[name] = 0

    def touch(self, name: N) -> None:
        queue = self._small if name in self._small else self._main
        if name in queue:
            queue[name] = min(queue[name] + 1, MOST_USES)

    def evicted(self, name: N) -> None:
        self._settle()
        if self._small.pop(name, None) is not None:
            self._ghosts[name] = None
        self._main.pop(name, None)
        while len(self._ghosts) > len(self):
            self._ghosts.popitem(last=False)

    @property
    def num_ghosts(self) -> int:
        """How many names are remembered that are not held."""
        return len(self._ghosts)

    def _settle(self) -> None:
        """Make the moves that come before the next name goes."""
        while self._main or self._small:
            if self._is_smalls_turn(len(self._small), len(self)):
                if self._small[next(iter(self._small))] < USES_TO_STAY:
                    return
                name, _ = self._small.popitem(last=False)
                self._main[name] = 0
            else:
                if self._main[next(iter(self._main))] == 0:
                    return
                name, uses = self._main.popitem(last=False)
                self._main[name] = uses - 1

    @staticmethod
    def _is_smalls_turn(num_small: int, num_held: int) -> bool:
        return num_small > 0 and (num_small == num_held or num_small >= SMALL_SHARE * num_held)

    def candidates(self) -> Iterator[N]:
        small, main = iter(self._small.items()), iter(self._main.items())
        moved: deque[tuple[N, int]] = deque()
        num_small, num_held = len(self._small), len(self)
        while num_held:
            if self._is_smalls_turn(num_small, num_held):
                name, uses = next(small)
                num_small -= 1
                if uses >= USES_TO_STAY:
                    moved.append((name, 0))
                    continue
            else:
                name, uses = next(main, None) or moved.popleft()
                if uses:
                    moved.append((name, uses - 1))
                    continue
            num_held -= 1
            yield name

    def __len__(self) -> int:
        return len(self._small) + len(self._main)
