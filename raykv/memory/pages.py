"""Memory for a pool: the largest pages that can be had, near the machine's GPUs.

All of it is advice that costs nothing when it can't be followed: then a pool has ordinary pages
wherever they are, which is said in the log.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from collections.abc import Collection, Sequence
from enum import Enum
from pathlib import Path

from raykv.base.errors import HandleError
from raykv.memory.region import Region

logger = logging.getLogger("raykv.node")

_HUGE_PAGE_BYTES = 2 << 20
_NVIDIA, _DISPLAY = "0x10de", "0x03"


def placement(gpu_nodes: Collection[int], memory_nodes: Collection[int]) -> list[int]:
    """NUMA nodes for a pool's pages: those of the GPUs that have memory; none: anywhere.

    Args:
        gpu_nodes: NUMA node of each GPU.
        memory_nodes: NUMA nodes that have memory.
    """
    near = sorted(set(gpu_nodes) & set(memory_nodes))
    return near if len(set(memory_nodes)) > 1 else []


class HugePages(Enum):
    """How a pool gets pages larger than usual."""

    NONE = "none"
    TRANSPARENT = "transparent"
    RESERVED = "reserved"


# From the kernel's include/uapi/linux/mempolicy.h.
_MPOL_PREFERRED, _MPOL_INTERLEAVE = 1, 3
_MBIND = {"x86_64": 237, "aarch64": 235}
"""Numbers of the system call, from the kernel's tables."""

_libc = ctypes.CDLL(None, use_errno=True)


def pool_region(num_bytes: int) -> Region:
    """Anonymous memory for a pool whose pages are still untouched."""
    wanted = wanted_pages(num_bytes)
    if wanted is HugePages.RESERVED:
        try:
            return Region.huge(num_bytes, "pool")
        except HandleError as error:
            # Another process took them in between.
            logger.info("the pool gets no reserved huge pages: %s", error)
    region = Region.anonymous(num_bytes, "pool")
    if wanted is HugePages.NONE or not region.advise_huge():
        logger.info(
            "the pool has small pages: neither are %d MiB of huge pages reserved and free "
            "(vm.nr_hugepages), nor has shared memory transparent ones "
            "(/sys/kernel/mm/transparent_hugepage/shmem_enabled)",
            num_bytes >> 20,
        )
    return region


def wanted_pages(num_bytes: int, root: Path = Path("/")) -> HugePages:
    """The largest pages that all of a pool of that size can have on this machine."""
    folder = root / "sys/kernel/mm"
    reserved = folder / f"hugepages/hugepages-{_HUGE_PAGE_BYTES >> 10}kB"
    # Reserved for mappings that have not touched them yet: those are spoken for.
    free = _number(reserved / "free_hugepages") - _number(reserved / "resv_hugepages")
    if num_bytes % _HUGE_PAGE_BYTES == 0 and num_bytes // _HUGE_PAGE_BYTES <= free:
        return HugePages.RESERVED
    modes = _text(folder / "transparent_hugepage/shmem_enabled")
    chosen = modes.partition("[")[2].partition("]")[0]
    is_on = chosen in ("always", "within_size", "advise", "force")
    return HugePages.TRANSPARENT if is_on else HugePages.NONE


def gpu_nodes(root: Path = Path("/")) -> list[int]:
    """NUMA node of each NVIDIA GPU of the machine; what is unknown is left out."""
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        is_gpu = _text(device / "vendor") == _NVIDIA and _text(device / "class")[:4] == _DISPLAY
        node = _text(device / "numa_node")
        if is_gpu and node.isdigit():
            found.append(int(node))
    return found


def memory_nodes(root: Path = Path("/")) -> list[int]:
    """NUMA nodes that have memory."""
    nodes: list[int] = []
    for part in _text(root / "sys/devices/system/node/has_memory").split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            nodes += range(int(first), int(last or first) + 1)
    return nodes


def place_near_gpus(region: Region, root: Path = Path("/")) -> list[int]:
    """Take pages that are touched from now on from the GPUs' NUMA nodes, of several in turn.
    Returns these nodes: none if pages come from anywhere.
    """
    nodes = placement(gpu_nodes(root), memory_nodes(root))
    if nodes and (error := _bind(region, nodes)) is not None:
        logger.info("the pool's memory is not placed near the GPUs: %s", error)
        return []
    return nodes


def _bind(region: Region, nodes: Sequence[int]) -> str | None:
    """None if it worked, else why not."""
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not known how on {platform.machine()}"
    words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    refused = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(region.address),
        ctypes.c_ulong(region.num_bytes),
        ctypes.c_int(_MPOL_INTERLEAVE if len(nodes) > 1 else _MPOL_PREFERRED),
        ctypes.byref(mask),
        # The kernel reads one bit less than it is told.
        ctypes.c_ulong(words * 64 + 1),
        ctypes.c_uint(0),
    )
    return os.strerror(ctypes.get_errno()) if refused else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0
