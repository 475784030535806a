"""A least-recently-used cache of numbered chunks, fast enough to be simulated by the hundred.

A prompt's chunks are touched together, its last one first, so that it loses its end first and what
is there of a prompt is always a prefix. Room is made in batches, a sixteenth of the capacity each.

Invariant: held + reserved <= capacity, unless all that is held is pinned.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Chunks = Any
"""An array of chunks' numbers, a prompt's from its beginning on."""

_BATCHES = 16


class ChunkCache:
    """Chunks of numbers below `num_chunks`, `capacity` of them at most."""

    def __init__(self, num_chunks: int, capacity: int) -> None:
        self.capacity = capacity
        self.held = 0
        self.reserved = 0
        # When a chunk was used last; 0 if it is not here.
        self._used = np.zeros(num_chunks, np.int32)
        self._pins = np.zeros(num_chunks, np.int16)
        self._clock = 1

    def has(self, chunks: Chunks) -> Any:
        """Whether each chunk is here."""
        return self._used[chunks] > 0

    def prefix(self, chunks: Chunks) -> int:
        """How many of the first chunks are here."""
        return leading(self.has(chunks))

    def put(self, chunks: Chunks) -> None:
        """Use chunks, and insert those that are missing."""
        if not len(chunks):
            return
        self._clock += len(chunks)
        used = self._clock - np.arange(len(chunks), dtype=np.int32)
        there = self.has(chunks)
        missing = len(chunks) - int(np.count_nonzero(there))
        if missing:
            # What is here of the prompt is not what goes for the rest of it.
            self._used[chunks[there]] = used[there]
            self.make_room(missing)
        self._used[chunks] = used
        self.held += missing

    def make_room(self, number: int) -> bool:
        """Evict the least recently used chunks; return whether this many more have room now."""
        excess = self.held + self.reserved + number - self.capacity
        if excess <= 0:
            return True
        free = np.flatnonzero((self._used > 0) & (self._pins == 0))
        leaving = min(len(free), max(excess, self.capacity // _BATCHES))
        if leaving:
            oldest = np.argpartition(self._used[free], leaving - 1)[:leaving]
            self._used[free[oldest]] = 0
            self.held -= leaving
        return leaving >= excess

    def pin(self, chunks: Chunks) -> None:
        """Keep chunks until they are unpinned as often."""
        self._pins[chunks] += 1

    def unpin(self, chunks: Chunks) -> None:
        """See `pin`."""
        self._pins[chunks] -= 1


def leading(flags: Any) -> int:
    """How many of the first flags are true."""
    return len(flags) if flags.all() else int(flags.argmin())
