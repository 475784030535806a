"""In which pieces a pool is page-locked for GPUs, and where its pages should be: decisions only.

CUDA refuses a copy whose host side lies partly in one page-locked piece and partly outside. So:

1. Pieces begin and end where slabs do, and no slot crosses a slab (`PoolGeometry`, invariant 1).
2. No piece has more than `MOST_PIECE_BYTES`, unless one slab has.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from raykv.base.geometry import PoolGeometry

MOST_PIECE_BYTES = 64 << 30
"""NVIDIA's drivers from 580 on refuse 512 GiB and more at once; far below it is safe."""

LEAST_PIECE_BYTES = 1 << 30
"""A fraction of a second to page-lock, during which CUDA may keep copies waiting."""

TARGET_PIECES = 256


@dataclass(frozen=True)
class Piece:
    """A part of the pool that is page-locked as a whole, in bytes."""

    offset: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The offset behind it."""
        return self.offset + self.num_bytes


def lock_pieces(geometry: PoolGeometry) -> list[Piece]:
    """All slabs of the pool, in pieces of about equal size, lowest first."""
    wanted = min(max(geometry.pool_bytes // TARGET_PIECES, LEAST_PIECE_BYTES), MOST_PIECE_BYTES)
    size = max(1, wanted // geometry.slab_bytes) * geometry.slab_bytes
    total = geometry.num_slabs * geometry.slab_bytes
    pieces = [Piece(offset, min(size, total - offset)) for offset in range(0, total, size)]
    assert sum(piece.num_bytes for piece in pieces) == total, pieces
    return pieces


class Placing(Enum):
    """The advice that the kernel gets about a pool's pages."""

    ANYWHERE = "anywhere"
    PREFER = "prefer"
    INTERLEAVE = "interleave"


@dataclass(frozen=True)
class Placement:
    """The NUMA nodes on which a pool's pages should be."""

    placing: Placing
    nodes: tuple[int, ...] = ()


def placement(gpu_nodes: Collection[int], memory_nodes: Collection[int]) -> Placement:
    """Near the GPUs: on their NUMA node, or spread over those that have some.

    Args:
        gpu_nodes: NUMA node of each GPU.
        memory_nodes: NUMA nodes that have memory.
    """
    near = tuple(sorted(set(gpu_nodes) & set(memory_nodes)))
    if not near or len(set(memory_nodes)) == 1:
        return Placement(Placing.ANYWHERE)
    return Placement(Placing.PREFER if len(near) == 1 else Placing.INTERLEAVE, near)


class HugePages(Enum):
    """How a pool gets pages larger than usual."""

    NONE = "none"
    TRANSPARENT = "transparent"
    RESERVED = "reserved"


def huge_pages(pool_bytes: int, page_bytes: int, free_pages: int, shared_mode: str) -> HugePages:
    """The largest pages that all of a pool can have.

    Args:
        pool_bytes: size of the pool.
        page_bytes: size of the machine's reserved huge pages.
        free_pages: how many of those nobody uses or has claimed.
        shared_mode: the kernel's word for transparent huge pages in shared memory.
    """
    if pool_bytes % page_bytes == 0 and pool_bytes // page_bytes <= free_pages:
        return HugePages.RESERVED
    if shared_mode in ("always", "within_size", "advise", "force"):
        return HugePages.TRANSPARENT
    return HugePages.NONE
