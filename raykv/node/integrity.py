"""Whether a chunk's bytes are still those that were stored: XXH3, made once and compared later.

        stored                   restored from a pool file
          │ in idle time           │ in idle time, or when it is first wanted
          ▼                        ▼
       sealed ◄──────────────── compared ─────► quarantined
          │  ▲                                       ▲
          └──┘ compared: whenever it goes to   │ it differs
               another node, and one local load of   │
               `LOADS_PER_CHECK` ────────────────────┘

A quarantined chunk is gone: its load fails, and the listing says that it was damaged.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import xxhash

from raykv.base.ids import Refusal
from raykv.node.keeper import PoolKeeper
from raykv.node.pool.records import ChunkRecord

LOADS_PER_CHECK = 256
"""One load in this many is compared, chosen at random. A checksum takes about as long as the copy
of the same bytes: 0.4 % more on the average.
"""

PIECE_BYTES = 1 << 20
"""Between two looks at whether something else is more urgent: a tenth of a millisecond."""


class Integrity:
    """Any thread may call.

    Args:
        keeper: of the node's pool.
    """

    def __init__(self, keeper: PoolKeeper) -> None:
        self._keeper = keeper
        self._random = random.Random()

    def objection(self, record: ChunkRecord, is_cancelled: Callable[[], bool]) -> Refusal:
        """Compare a chunk that is to be loaded, and has a reader, if it has to be, or was chosen.

        `CORRUPT`: its bytes have changed. `CANCELLED`: there was no time to find out.
        """
        if not self._must_compare(record):
            return Refusal.NONE
        checksum = self._checksum(record, is_cancelled)
        if checksum is None:
            return Refusal.CANCELLED
        self._keeper.check_bytes(record, checksum)
        # Of one that has gone meanwhile the bytes are still there.
        return Refusal.NONE if record.checksum in (None, checksum) else Refusal.CORRUPT

    def _must_compare(self, record: ChunkRecord) -> bool:
        if not record.is_proven:
            return True
        return self._random.random() * LOADS_PER_CHECK < 1 and record.checksum is not None

    def work(self, is_wanted: Callable[[], bool]) -> bool:
        """Make or compare the checksum of one chunk that waits for it; False if none does.

        Ends early when `is_wanted` says that something else is to be done.
        """
        record = self._keeper.take_unchecked()
        if record is None:
            return False
        try:
            checksum = self._checksum(record, is_wanted)
            if checksum is None:
                self._keeper.put_back(record)
            else:
                self._keeper.check_bytes(record, checksum)
        finally:
            self._keeper.end_read(record)
        return True

    def _checksum(self, record: ChunkRecord, is_cancelled: Callable[[], bool]) -> int | None:
        """Checksum of a chunk's bytes in the pool; the caller is a reader of its slot."""
        data = self._keeper.bytes_of(record).data
        hasher = xxhash.xxh3_64()
        for start in range(0, record.slot_bytes, PIECE_BYTES):
            if is_cancelled():
                return None
            hasher.update(data[start : start + PIECE_BYTES])
        return hasher.intdigest()
