"""Cancel words: how an engine takes back a copy job that the NodeActor may be running.

The worker sets a job's word; the thread that copies reads it before every run and before it
declares a chunk READY. A message alone would not do: the NodeActor could be between two runs.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from raykv.memory.region import Region

NUM_WORDS = 4096
"""Jobs share a word at this distance. If two such jobs are cancelled, the older one's word is
lost, its cancellation is not acknowledged, and the worker falls back to ending the NodeActor."""


class Word(NamedTuple):
    """An aligned 64-bit word at an address, and the value that says "yes"."""

    address: int
    value: int

    @property
    def is_set(self) -> bool:
        """Whether it has the value now."""
        return ctypes.c_uint64.from_address(self.address).value == self.value


class CancelWords:
    """A page of 64-bit words that a worker writes and its NodeActor reads."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self._words = (ctypes.c_uint64 * NUM_WORDS).from_address(region.address)

    @classmethod
    def create(cls) -> CancelWords:
        """New words, none of them set."""
        return cls(Region.anonymous(NUM_WORDS * 8, "cancel-words"))

    @classmethod
    def received(cls, fd: int) -> CancelWords:
        """The words of the peer that sent `fd`."""
        return cls(Region.received(fd, NUM_WORDS * 8))

    def cancel(self, job_id: int) -> None:
        """Take a job back. An aligned 64-bit store, which is atomic."""
        self._words[job_id % NUM_WORDS] = job_id + 1

    def word(self, job_id: int) -> Word:
        """The word that says whether the job was taken back; valid until `close`."""
        return Word(self.region.address + job_id % NUM_WORDS * 8, job_id + 1)

    def close(self) -> None:
        """Unmap."""
        self.region.close()
