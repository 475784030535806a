"""Whether a chunk's bytes are still those that were stored: XXH3, made once and compared later.

        stored                   restored from a pool file
          │ in idle time           │ in idle time, or when it is first wanted
          ▼                        ▼
       sealed ◄──────────────── compared ─────► quarantined
          │  ▲                                       ▲
          └──┘ compared: whenever it goes to   │ it differs
               another node, and one local load of   │
               `LOADS_PER_CHECK` ────────────────────┘

A quarantined chunk is gone: its load fails like one of a chunk that was overwritten, the directory
learns of it, and the slot is free for a later generation.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence

import xxhash

from raykv.base.ids import SLOT_ALIGNMENT, Blocks, ChunkName, Refusal
from raykv.node.keeper import PoolKeeper

LOADS_PER_CHECK = 256
"""A checksum takes about as long as the copy of the same bytes: 0.4 % more on the average."""

PIECE_BYTES = 1 << 20
"""Between two looks at whether something else is more urgent: a tenth of a millisecond."""


class Integrity:
    """Any thread may call.

    Args:
        keeper: of the node's pool.
        loads_per_check: of so many loads one is compared, chosen at random.
    """

    def __init__(self, keeper: PoolKeeper, loads_per_check: int = LOADS_PER_CHECK) -> None:
        self._keeper = keeper
        self._loads_per_check = loads_per_check
        self._random = random.Random()

    def begin_loads(
        self,
        names: Sequence[ChunkName],
        wanted: Sequence[Blocks],
        is_cancelled: Callable[[], bool],
    ) -> list[Refusal]:
        """Register a reader of some blocks of each chunk, which is compared first if it has to be;
        see `PoolKeeper`.

        `CORRUPT`: its bytes have changed. `CANCELLED`: there was no time to find out.
        """
        refusals = self._keeper.begin_loads(names, wanted)
        reading = {at for at, refusal in enumerate(refusals) if refusal is Refusal.NONE}
        ended = set[int]()
        try:
            for at in reading:
                if self._must_compare(names[at]):
                    refusals[at] = self._compare(names[at], is_cancelled)
                    if refusals[at] is not Refusal.NONE:
                        ended.add(at)
        except BaseException:
            ended = reading
            raise
        finally:
            if ended:
                self._keeper.end_loads(names[at] for at in ended)
        return refusals

    def _compare(self, name: ChunkName, is_cancelled: Callable[[], bool]) -> Refusal:
        checksum = self._checksum(name, is_cancelled)
        return Refusal.CANCELLED if checksum is None else self._keeper.settle(name, checksum)

    def _must_compare(self, name: ChunkName) -> bool:
        is_chosen = self._random.random() * self._loads_per_check < 1
        if not is_chosen and not self._keeper.table.num_unproven:
            return False
        seal = self._keeper.seal_of(name)
        return seal is not None and (is_chosen or not seal.is_proven)

    def work(self, is_wanted: Callable[[], bool]) -> bool:
        """Make or compare the checksum of one chunk that waits for it; False if none does.

        Ends early when `is_wanted` says that something else is to be done.
        """
        name = self._keeper.take_unchecked()
        if name is None:
            return False
        if self._keeper.begin_load(name) is not Refusal.NONE:
            return True
        try:
            checksum = self._checksum(name, is_wanted)
            if checksum is None:
                self._keeper.put_back(name)
            else:
                self._keeper.settle(name, checksum)
        finally:
            self._keeper.end_load(name)
        return True

    def _checksum(self, name: ChunkName, is_cancelled: Callable[[], bool]) -> int | None:
        """Checksum of a chunk's bytes in the pool; the caller is a reader of its slot."""
        place = self._keeper.pool.address + name.slot * SLOT_ALIGNMENT
        data = memoryview((ctypes.c_ubyte * name.slot_bytes).from_address(place)).cast("B")
        hasher = xxhash.xxh3_64()
        for start in range(0, name.slot_bytes, PIECE_BYTES):
            if is_cancelled():
                return None
            hasher.update(data[start : start + PIECE_BYTES])
        return hasher.intdigest()
