"""KV caches that one process exports and another opens.

A protocol with two sides. The worker exports: it says where its KV tensors are (`KVLayout`) and
hands over what opens the memory. The NodeActor opens: it gets addresses to copy from and to. Here
is the memfd kind, for KV in CPU memory; the kind for GPU memory is in `cuda/kv.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from raykv.base.errors import HandleError
from raykv.memory import canonical, kv_form, region
from raykv.memory.cuda.driver import MemoryDriver
from raykv.memory.cuda.kv import CUDA_IPC, DeviceKV, check_pieces, open_device_kv
from raykv.protocol.worker import KVLayout

MEMFD = "memfd"

MAX_KV_BYTES = 1 << 46
MAX_BLOCKS_PER_CHUNK = 1 << 16
"""Beyond what any machine or engine has; with them all arithmetic stays within 63 bits."""


class MemfdKV:
    """KV cache in a memfd of the worker, in the address space of the NodeActor.

    `layout` is the worker's, with offsets that count from `address`.
    """

    def __init__(self, layout: KVLayout, fd: int) -> None:
        """Map `fd`, which is owned by this object from now on.

        Raises:
            HandleError: the memory is smaller than the layout says.
        """
        self.layout = layout
        self._region = region.Region.received(fd, layout.num_bytes)
        self.address = self._region.address

    def populate(self, progress: Callable[[int], bool]) -> None:
        """Fill this process's page table, so that no copy has to wait for each page that it touches
        first; `progress` as in `Region.prefault`. Ends before `close` is called.
        """
        self._region.prefault(progress)

    def close(self) -> None:
        """Unmap; the worker's memory is then no longer held by this process."""
        self._region.close()


OpenedKV = MemfdKV | DeviceKV


def open_kv(layout: KVLayout, fds: list[int], driver: Callable[[], MemoryDriver]) -> OpenedKV:
    """Open what a worker exported. The descriptors are owned by the callee, also if it fails.

    Args:
        layout: what the worker says of its memory.
        fds: what came with it.
        driver: gives access to CUDA; asked for GPU memory only.

    Raises:
        HandleError: the kind is not known here, or memory and layout don't match.
    """
    try:
        check_layout(layout)
        _check_kind(layout, len(fds))
        if layout.kind == MEMFD:
            return MemfdKV(layout, fds.pop())
        check_pieces(layout)
        return open_device_kv(driver(), layout)
    except HandleError:
        region.close_all(fds)
        raise


def _check_kind(layout: KVLayout, num_fds: int) -> None:
    wanted = {MEMFD: 1, CUDA_IPC: 0}
    if layout.kind not in wanted:
        names = ", ".join(map(repr, wanted))
        raise HandleError(f"a KV cache of kind {layout.kind!r} can't be opened; known: {names}")
    if num_fds != wanted[layout.kind]:
        raise HandleError(
            f"a KV cache of kind {layout.kind!r} comes with {wanted[layout.kind]} descriptors, not "
            f"{num_fds}"
        )


def check_layout(layout: KVLayout) -> None:
    """Refuse a layout that points outside of its memory: a copy there would kill the NodeActor.

    Raises:
        HandleError: with what is wrong.
    """
    has_groups = len(layout.groups) == len(set(layout.group_ids)) == len(layout.group_ids)
    if not 1 <= layout.blocks_per_chunk <= MAX_BLOCKS_PER_CHUNK or not has_groups:
        raise HandleError(f"malformed KV layout: {layout}")
    if not 0 < layout.num_bytes <= MAX_KV_BYTES:
        raise HandleError(f"malformed KV layout: a KV cache of {layout.num_bytes} bytes")
    if wrong := kv_form.objection(layout.form):
        raise HandleError(f"malformed form of KV: {wrong}")
    for tensor in layout.tensors:
        sizes_ok = tensor.page_bytes > 0 and tensor.num_blocks > 0
        sizes_ok &= max(tensor.block_stride, tensor.num_blocks) <= MAX_KV_BYTES
        if not sizes_ok or tensor.offset < 0 or tensor.block_stride < tensor.page_bytes:
            raise HandleError(f"malformed KV tensor: {tensor}")
        if tensor.end > layout.num_bytes:
            raise HandleError(f"{tensor} ends at {tensor.end}, outside of {layout.num_bytes} bytes")
    for group in layout.groups:
        if not group:
            raise HandleError("a KV group has no tensor")
        if any(not 0 <= index < len(layout.tensors) for index in group):
            raise HandleError(f"a KV group names a tensor that is not there: {group}")
    pages = [tensor.page_bytes for tensor in layout.tensors]
    if wrong := canonical.objection(
        layout.canonical, layout.groups, pages, layout.blocks_per_chunk
    ):
        raise HandleError(f"malformed canonical pages: {wrong}")


def part_bytes(layout: KVLayout, group_index: int) -> int:
    """Bytes of one rank's part of a chunk of a group (an index into `layout.groups`)."""
    pages = sum(layout.tensors[index].page_bytes for index in layout.groups[group_index])
    return layout.blocks_per_chunk * pages
