"""KV caches in the memory of a GPU: exported by the worker, opened by the NodeActor.

    worker:    tensors ─► allocations ─► handles ─┐   event ─► handle ─┐
    NodeActor: addresses ◄── mapped ◄─────────────┘   event ◄──────────┘

Whole allocations are handed over, of which many tensors may share one. Memory that is mapped piece
by piece has no handle: expandable segments, which vLLM is told not to use for the KV cache, and
that of its sleep mode, which is given back and made anew while the engine sleeps.

The event: the worker records it on its compute stream before it submits a job, and the copy waits
for it, so that a store reads what was computed and a load writes after what was queued before it.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, pairwise

import msgspec

from raykv.base.errors import HandleError
from raykv.memory.cuda.driver import CUDAError, Extent, MemoryDriver
from raykv.protocol.worker import MAX_PIECES, NOT_CANONICAL, CanonicalPages, KVLayout, TensorLayout

logger = logging.getLogger("raykv.node")

CUDA_IPC = "cuda-ipc"

CHANGE_ALLOCATOR = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"


class ExportedKV:
    """A worker's KV cache as it is handed over, and its event, which lives as long as the process:
    CUDA forbids to release it while a copy may wait for it.
    """

    def __init__(self, driver: MemoryDriver, layout: KVLayout, event: int) -> None:
        self.layout = layout
        self._driver = driver
        self._event = event

    def record(self, stream: int) -> None:
        """Have copies that are submitted from now on wait for all that `stream` was given so far.

        Takes microseconds and waits for nothing.

        Raises:
            CUDAError: CUDA refused; what is submitted now would not wait.
        """
        self._driver.record_event(self._event, stream)


def export_kv(
    driver: MemoryDriver,
    tensors: Sequence[TensorLayout],
    blocks_per_chunk: int,
    group_ids: list[int],
    groups: list[list[int]],
    canonical: CanonicalPages = NOT_CANONICAL,
) -> ExportedKV:
    """Hand over the memory that tensors of one GPU lie in; their offsets are addresses here.

    How they make chunks: see `KVLayout`.

    Raises:
        HandleError: it can't be handed over; the text says which setting to change.
    """
    devices = {driver.device_of(tensor.offset) for tensor in tensors}
    if len(devices) != 1:
        raise HandleError(f"the KV cache of a worker is on {len(devices)} GPUs, not on one")
    pieces = _pieces(driver, tensors)
    layout = KVLayout(
        kind=CUDA_IPC,
        num_bytes=sum(piece.num_bytes for piece in pieces),
        blocks_per_chunk=blocks_per_chunk,
        tensors=_tensor_layouts(pieces, tensors),
        group_ids=group_ids,
        groups=groups,
        device=devices.pop(),
        piece_bytes=[piece.num_bytes for piece in pieces],
        handles=[driver.export_memory(piece.base) for piece in pieces],
        canonical=canonical,
    )
    return _with_event(driver, layout)


def _pieces(driver: MemoryDriver, tensors: Sequence[TensorLayout]) -> list[Extent]:
    """The allocations that the tensors lie in, in order of their addresses."""
    if not all(driver.is_ipc_capable(tensor.offset) for tensor in tensors):
        raise HandleError(
            "the GPU memory of the KV cache was not made to be shared: start the engine without "
            f"enable_sleep_mode, and {CHANGE_ALLOCATOR}"
        )
    found = {piece.base: piece for piece in (driver.extent(each.offset) for each in tensors)}
    if len(found) > MAX_PIECES:
        raise HandleError(
            f"the KV cache lies in more than {MAX_PIECES} pieces of GPU memory, which is all that "
            "can be handed over"
        )
    return [found[base] for base in sorted(found)]


def _tensor_layouts(pieces: list[Extent], tensors: Sequence[TensorLayout]) -> list[TensorLayout]:
    """Offsets through all pieces, back to back."""
    bases = [piece.base for piece in pieces]
    starts = [0, *accumulate(piece.num_bytes for piece in pieces)]
    layouts = []
    for tensor in tensors:
        index = bisect_right(bases, tensor.offset) - 1
        offset = starts[index] + tensor.offset - bases[index]
        layouts.append(msgspec.structs.replace(tensor, offset=offset))
    return layouts


def _with_event(driver: MemoryDriver, layout: KVLayout) -> ExportedKV:
    event = driver.create_event(layout.device)
    try:
        handle = driver.export_event(event)
    except CUDAError:
        with _logged():
            driver.destroy_event(layout.device, event)
        raise
    return ExportedKV(driver, msgspec.structs.replace(layout, event=handle), event)


class DeviceKV:
    """A worker's KV cache on a GPU, mapped here; see `MemfdKV`.

    `layout` has the worker's tensors at offsets from `address`, wherever their pieces are mapped.
    `compute_event` is to be waited for before the first byte is copied.
    """

    def __init__(
        self, layout: KVLayout, address: int, compute_event: int, undo: list[Callable[[], None]]
    ) -> None:
        """`undo` lets go of what was opened, last first."""
        self.layout = layout
        self.device = layout.device
        self.compute_event = compute_event
        self.address = address
        self._undo = undo

    def populate(self, progress: Callable[[int], bool]) -> None:
        """A GPU's memory is there with its mapping."""

    def close(self) -> None:
        """See `MemfdKV.close`. What CUDA refuses to let go of is logged; the rest goes."""
        while self._undo:
            with _logged():
                self._undo.pop()()


def open_device_kv(driver: MemoryDriver, layout: KVLayout) -> DeviceKV:
    """Open what `export_kv` of another process handed over, a layout that was checked.

    Args:
        driver: CUDA in this process.
        layout: what the worker said.

    Raises:
        HandleError: CUDA refuses, or memory and layout don't match; nothing stays open.
    """
    undo: list[Callable[[], None]] = []
    device = layout.device
    try:
        event = driver.open_event(device, layout.event)
        undo.append(partial(driver.destroy_event, device, event))
        bases = _open_handles(driver, layout, undo)
        return DeviceKV(_moved(layout, bases), min(bases), event, undo)
    except BaseException:
        DeviceKV(layout, 0, 0, undo).close()
        raise


def _open_handles(
    driver: MemoryDriver, layout: KVLayout, undo: list[Callable[[], None]]
) -> list[int]:
    bases = []
    for handle, size in zip(layout.handles, layout.piece_bytes, strict=True):
        opened = driver.open_memory(layout.device, handle)
        undo.append(partial(driver.close_memory, layout.device, opened.base))
        if opened.num_bytes < size:
            raise HandleError(f"the worker's memory has {opened.num_bytes} bytes, not {size}")
        bases.append(opened.base)
    return bases


def _moved(layout: KVLayout, bases: list[int]) -> KVLayout:
    """The layout with offsets from the lowest of the addresses at which the pieces are mapped."""
    starts = [0, *accumulate(layout.piece_bytes)]
    moved = []
    for tensor in layout.tensors:
        index = bisect_right(starts, tensor.offset) - 1
        offset = tensor.offset - starts[index] + bases[index] - min(bases)
        moved.append(msgspec.structs.replace(tensor, offset=offset))
    return msgspec.structs.replace(layout, tensors=moved)


def check_pieces(layout: KVLayout) -> None:
    """Refuse a layout with a tensor that no mapping can have as a whole.

    Raises:
        HandleError: naming the tensor.
    """
    pieces = list(pairwise([0, *accumulate(layout.piece_bytes)]))
    for tensor in layout.tensors:
        if not any(start <= tensor.offset and tensor.end <= end for start, end in pieces):
            raise HandleError(f"{tensor} is in no single piece of {layout.piece_bytes}")


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    try:
        yield
    except CUDAError as error:
        logger.warning("something of a GPU could not be let go of: %s", error)
