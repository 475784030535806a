"""Where slots can be in a pool: the arithmetic of a NodeActor, and of plans.

A pool is cut into slabs of equal size. A slab holds slots of one size at a time, packed from its
start, so that chunks of several models and KV groups live in one pool without fragmenting it.

Invariants:
1. A slot lies wholly inside one slab, at a multiple of its class's slot size.
2. Slot sizes and slab sizes are multiples of `SLOT_ALIGNMENT`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raykv.base.ids import SLOT_ALIGNMENT, Slot

MAX_SLAB_BYTES = 256 << 20
"""Large enough that the unused rest behind a slab's last slot is a small part of it."""

TARGET_SLABS = 64
"""Slabs of a pool that is small: enough for several slot classes to share it."""


def aligned(num_bytes: int) -> int:
    """`num_bytes` rounded up to `SLOT_ALIGNMENT`."""
    return -(-num_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


@dataclass(frozen=True)
class PoolGeometry:
    """Sizes of one node's pool, in bytes."""

    pool_bytes: int
    slab_bytes: int

    def __post_init__(self) -> None:
        assert self.slab_bytes > 0, self
        assert self.slab_bytes % SLOT_ALIGNMENT == 0, self
        assert self.pool_bytes >= self.slab_bytes, self

    @classmethod
    def for_pool(cls, pool_bytes: int, largest_slot_bytes: int) -> PoolGeometry:
        """Cut `pool_bytes` so that a slab holds slots of `largest_slot_bytes` without a rest, at
        least one.
        """
        slot_bytes = aligned(largest_slot_bytes)
        most_bytes = min(MAX_SLAB_BYTES, pool_bytes // TARGET_SLABS)
        slab_bytes = slot_bytes * max(1, most_bytes // slot_bytes)
        return cls(pool_bytes, min(slab_bytes, pool_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT))

    @property
    def num_slabs(self) -> int:
        """Whole slabs in the pool; a rest at its end is not used."""
        return self.pool_bytes // self.slab_bytes

    def slots_per_slab(self, slot_bytes: int) -> int:
        """How many slots of `slot_bytes` one slab holds; 0 when a slot is larger than a slab."""
        return self.slab_bytes // slot_bytes

    def capacity(self, slot_bytes: int) -> int:
        """Slots of `slot_bytes` in the whole pool, if it held nothing else."""
        return self.num_slabs * self.slots_per_slab(slot_bytes)

    def num_that_fit(self, sizes: Iterable[int]) -> int:
        """How many of the first slots of these sizes the whole pool has room for together."""
        left: dict[int, int] = {}
        num_slabs = num_slots = 0
        for size in map(aligned, sizes):
            if not left.get(size):
                num_slabs += 1
                left[size] = self.slots_per_slab(size)
            if not left[size] or num_slabs > self.num_slabs:
                break
            left[size] -= 1
            num_slots += 1
        return num_slots

    def slab_of(self, slot: Slot) -> int:
        """Index of the slab in which `slot` starts."""
        return slot * SLOT_ALIGNMENT // self.slab_bytes

    def slots_of(self, slab: int, slot_bytes: int) -> list[Slot]:
        """The slots of a slab that holds the class `slot_bytes`, lowest first."""
        first = slab * self.slab_bytes
        count = self.slots_per_slab(slot_bytes)
        return [Slot((first + i * slot_bytes) // SLOT_ALIGNMENT) for i in range(count)]

    def is_place(self, slot: Slot, slot_bytes: int) -> bool:
        """Whether a slot of `slot_bytes` can be at `slot` at all."""
        if slot < 0 or slot_bytes <= 0 or slot_bytes % SLOT_ALIGNMENT:
            return False
        slab = self.slab_of(slot)
        in_slab = slot * SLOT_ALIGNMENT - slab * self.slab_bytes
        fits = in_slab + slot_bytes <= self.slab_bytes
        return slab < self.num_slabs and in_slab % slot_bytes == 0 and fits
