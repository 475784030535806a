"""What an endless pool would hit: chunks that prompts want, and how many different ones.

Of a chunk that is wanted several times an endless pool computes the first and loads the others: it
hits 1 - different / wanted of them. Chunks of answers are stored too, and wanted for the first time
by the next turn of a conversation: that a pool may hit those even so is not counted.

    engine's thread: note ──► waiting ──► the line's thread: take ──► NodeActor: `Reach.add`

An engine counts anew for each life of its NodeActor, so that both numbers begin with that.

How many are different is estimated from the smallest hashes of all that were seen: the wider apart
they are, the fewer there were. So long as fewer were seen than are kept, the number is exact; then
its relative standard error is 1 / sqrt(16,384) = 0.8 % (K. Beyer et al., On synopses for
distinct-value estimation, 2007). The smallest hashes of two sets are those of their union.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

NUM_KEPT = 1 << 14
"""Hashes that are kept: 128 KiB."""

MAX_WAITING = 4096
"""Requests whose keys were not counted yet; beyond it the oldest are left out of both numbers."""

MAX_HASHES = 4096
"""Hashes in one message: 32 KiB. What is new beyond them comes with the next one."""

MAX_AT_ONCE = 4096
"""Keys after which the rest waits for the next message: the engine's thread waits for Python's lock
meanwhile, a fifth of a millisecond."""

Words = np.ndarray[Any, np.dtype[np.uint64]]

_NONE = np.uint64(2**64 - 1)


class DistinctKeys:
    """How many different keys were seen; see the module's docstring."""

    def __init__(self) -> None:
        # Rising; at the end what stands for none.
        self._smallest: Words = np.full(NUM_KEPT, _NONE)

    @property
    def smallest(self) -> Words:
        """The hashes that are kept, rising."""
        return self._smallest[: np.searchsorted(self._smallest, _NONE)]

    def add(self, keys: Sequence[bytes]) -> Words:
        """See keys, known ones or new ones; the hashes that are kept because of them."""
        return self.merge(np.array([xxhash.xxh3_64_intdigest(key) for key in keys], np.uint64))

    def merge(self, words: Words) -> Words:
        """Take in the hashes of another sketch; returns those that are new here."""
        few = np.unique(words[words < self._smallest[-1]])
        new = few[self._smallest[np.searchsorted(self._smallest, few)] != few]
        both = np.concatenate([self._smallest, new])
        # That merges two runs which rise.
        self._smallest = np.sort(both, kind="stable")[:NUM_KEPT]
        return new

    def estimate(self) -> float:
        """How many different keys were added, to all that were merged."""
        last = self._smallest[-1]
        if last == _NONE:
            return float(len(self.smallest))
        return (NUM_KEPT - 1) * 2.0**64 / float(last)


class WantedKeys:
    """The keys that one engine wants. `note` is for its own thread, `take` for one other thread."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence[bytes]] = deque(maxlen=MAX_WAITING)
        self._life = 0
        self.num_wanted = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._sketch = DistinctKeys()
        self._unsent = self._sketch.smallest

    def note(self, keys: Sequence[bytes]) -> None:
        """A request wants these chunks; the caller changes `keys` no more."""
        self._waiting.append(keys)

    def tell_all_again(self) -> None:
        """A message may have been lost: send the whole sketch next time."""
        self._unsent = self._sketch.smallest

    def take(self, life: int) -> bytes:
        """Count the noted keys; returns what is new in the sketch for the NodeActor of that life.

        `num_wanted` has the count since the engine's start.
        """
        if life != self._life:
            self._life = life
            self._begin_anew()
        keys: list[bytes] = []
        while self._waiting and len(keys) < MAX_AT_ONCE:
            keys += self._waiting.popleft()
        self.num_wanted += len(keys)
        unsent = np.concatenate([self._unsent, self._sketch.add(keys)])
        self._unsent = unsent[MAX_HASHES:]
        return unsent[:MAX_HASHES].astype("<u8").tobytes()


@dataclass(slots=True)
class Reach:
    """How many chunks the engines of one namespace want, and how many different ones."""

    num_wanted: int = 0
    _sketch: DistinctKeys = field(default_factory=DistinctKeys)

    def add(self, num_wanted: int, hashes: bytes) -> None:
        """Add what an engine reports as new; the same hashes again change nothing."""
        self.num_wanted += num_wanted
        if len(hashes) % 8 == 0:
            self._sketch.merge(np.frombuffer(hashes, "<u8"))

    @property
    def num_distinct(self) -> float:
        """Estimate, never above what was wanted: no key is new twice."""
        return min(self._sketch.estimate(), float(self.num_wanted))

    @property
    def hit_ratio(self) -> float:
        """Share of the wanted chunks; 0 before any was wanted."""
        return 1.0 - self.num_distinct / self.num_wanted if self.num_wanted else 0.0
