"""Memory that is used again and again, for bytes that leave this process.

Fresh memory is several times slower to copy into than memory whose pages are there. Who takes a
buffer needs not give it back: that happens when the last array over it is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

BUFFER_BYTES = 16 << 20
"""Of each buffer: as much as one read asks for, as a rule."""

MAX_KEPT = 8
"""Buffers that wait for their next use: 128 MiB at most."""


class Scratch:
    """Any thread may take."""

    def __init__(self) -> None:
        # Without a lock: what is given back comes from wherever the last reference goes.
        self._kept: deque[mmap.mmap] = deque(maxlen=MAX_KEPT)

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """An array of `num_bytes`, with any content."""
        if not 0 < num_bytes <= BUFFER_BYTES:
            return np.empty(num_bytes, np.uint8)
        try:
            memory = self._kept.pop()
        except IndexError:
            memory = mmap.mmap(-1, BUFFER_BYTES)
        # All arrays over the memory, slices too, keep this one alive.
        owner = (ctypes.c_ubyte * num_bytes).from_buffer(memory)
        weakref.finalize(owner, self._kept.append, memory).atexit = False
        return np.frombuffer(memoryview(owner), np.uint8)

    @property
    def num_kept(self) -> int:
        """Buffers that nobody uses now."""
        return len(self._kept)
