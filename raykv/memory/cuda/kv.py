"""KV caches in the memory of a GPU: exported by the worker, opened by the NodeActor.

    worker:    tensors ─► allocations ─► handles, or descriptors ─┐   event ─► handle ─┐
    NodeActor: addresses ◄── mapped ◄─────────────────────────────┘   event ◄──────────┘

Ordinary allocations go by handle ("cuda-ipc"): whole allocations, of which many tensors may share
one. Memory that is mapped piece by piece, like that of expandable segments, goes by descriptor
("cuda-fd"), if its allocator made it to be shared; that of vLLM's sleep mode is not, and is given
back and made anew while the engine sleeps.

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
from raykv.memory.region import close_all
from raykv.protocol.worker import MAX_PIECES, NOT_CANONICAL, CanonicalPages, KVLayout, TensorLayout

logger = logging.getLogger("raykv.node")

CUDA_IPC = "cuda-ipc"
CUDA_FD = "cuda-fd"

CHANGE_ALLOCATOR = "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"


class ExportedKV:
    """A worker's KV cache as it is handed over, and its event. Used by one thread."""

    def __init__(self, driver: MemoryDriver, layout: KVLayout, fds: list[int], event: int) -> None:
        self.layout = layout
        self.fds = fds
        self._driver = driver
        self._event: int | None = event

    def record(self, stream: int) -> None:
        """Have copies that are submitted from now on wait for all that `stream` was given so far.

        Takes microseconds and waits for nothing.

        Raises:
            CUDAError: CUDA refused; what is submitted now would not wait.
        """
        assert self._event is not None, self.layout.device
        self._driver.record_event(self._event, stream)

    def close(self) -> None:
        """Release event and descriptors; a second call does nothing.

        Only once nobody attaches with them any more and no copy can wait for the event: CUDA
        forbids it before. A worker at its end leaves that to the end of its process.
        """
        close_all(self.fds)
        self.fds = []
        event, self._event = self._event, None
        if event is not None:
            with _logged():
                self._driver.destroy_event(self.layout.device, event)


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
    is_ordinary = [driver.is_ipc_capable(piece.base) for piece in pieces]
    if any(is_ordinary) and not all(is_ordinary):
        raise HandleError(
            "the KV cache is partly in ordinary GPU memory and partly in expandable segments: "
            f"{CHANGE_ALLOCATOR}"
        )
    layout = KVLayout(
        kind=CUDA_IPC if all(is_ordinary) else CUDA_FD,
        num_bytes=sum(piece.num_bytes for piece in pieces),
        blocks_per_chunk=blocks_per_chunk,
        tensors=_tensor_layouts(pieces, tensors),
        group_ids=group_ids,
        groups=groups,
        device=devices.pop(),
        piece_bytes=[piece.num_bytes for piece in pieces],
        canonical=canonical,
    )
    if layout.kind == CUDA_IPC:
        handles = [driver.export_memory(piece.base) for piece in pieces]
        return _with_event(driver, msgspec.structs.replace(layout, handles=handles), [])
    return _with_event(driver, layout, _descriptors(driver, pieces))


def _pieces(driver: MemoryDriver, tensors: Sequence[TensorLayout]) -> list[Extent]:
    """The allocations or mappings that the tensors lie in, in order of their addresses."""
    found: dict[int, Extent] = {}
    for tensor in tensors:
        address = tensor.offset
        while address < tensor.end:
            piece = driver.extent(address)
            found[piece.base] = piece
            address = piece.end
            if len(found) > MAX_PIECES:
                raise HandleError(
                    f"the KV cache lies in more than {MAX_PIECES} pieces of GPU memory, which is "
                    f"all that can be handed over: {CHANGE_ALLOCATOR}"
                )
    return [found[base] for base in sorted(found)]


def _tensor_layouts(pieces: list[Extent], tensors: Sequence[TensorLayout]) -> list[TensorLayout]:
    """Offsets through all pieces, back to back: pieces that are neighbours here stay neighbours."""
    bases = [piece.base for piece in pieces]
    starts = [0, *accumulate(piece.num_bytes for piece in pieces)]
    layouts = []
    for tensor in tensors:
        index = bisect_right(bases, tensor.offset) - 1
        offset = starts[index] + tensor.offset - bases[index]
        layouts.append(msgspec.structs.replace(tensor, offset=offset))
    return layouts


def _descriptors(driver: MemoryDriver, pieces: list[Extent]) -> list[int]:
    fds: list[int] = []
    try:
        fds.extend(driver.export_fd(piece.base) for piece in pieces)
    except CUDAError as error:
        close_all(fds)
        raise HandleError(
            f"the GPU memory of the KV cache was not made to be shared ({error}): start the engine "
            f"without enable_sleep_mode, and {CHANGE_ALLOCATOR}"
        ) from error
    return fds


def _with_event(driver: MemoryDriver, layout: KVLayout, fds: list[int]) -> ExportedKV:
    event: int | None = None
    try:
        event = driver.create_event(layout.device)
        handle = driver.export_event(event)
    except CUDAError:
        close_all(fds)
        if event is not None:
            with _logged():
                driver.destroy_event(layout.device, event)
        raise
    return ExportedKV(driver, msgspec.structs.replace(layout, event=handle), fds, event)


class DeviceKV:
    """A worker's KV cache on a GPU, mapped here; see `OpenedKV`.

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
        """See `OpenedKV.close`. What CUDA refuses to let go of is logged; the rest goes."""
        while self._undo:
            with _logged():
                self._undo.pop()()


def open_device_kv(driver: MemoryDriver, layout: KVLayout, fds: list[int]) -> DeviceKV:
    """Open what `export_kv` of another process handed over, a layout that was checked.

    Args:
        driver: CUDA in this process.
        layout: what the worker said.
        fds: what came with it, owned by the callee, also if it fails.

    Raises:
        HandleError: CUDA refuses, or memory and layout don't match; nothing stays open.
    """
    undo: list[Callable[[], None]] = []
    device = layout.device
    try:
        _check_descriptors(layout, len(fds))
        event = driver.open_event(device, layout.event)
        undo.append(partial(driver.destroy_event, device, event))
        if layout.kind == CUDA_FD:
            address = driver.map_fds(device, fds, layout.piece_bytes)
            undo.append(partial(driver.unmap_fds, device, address, layout.piece_bytes))
            return DeviceKV(layout, address, event, undo)
        bases = _open_handles(driver, layout, undo)
        return DeviceKV(_moved(layout, bases), min(bases), event, undo)
    except BaseException:
        DeviceKV(layout, 0, 0, undo).close()
        raise
    finally:
        close_all(fds)


def _check_descriptors(layout: KVLayout, num_fds: int) -> None:
    wanted = len(layout.piece_bytes) if layout.kind == CUDA_FD else 0
    if num_fds != wanted:
        raise HandleError(
            f"a KV cache of kind {layout.kind!r} in {len(layout.piece_bytes)} pieces comes with "
            f"{wanted} descriptors, not {num_fds}"
        )


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
    if layout.kind != CUDA_IPC:
        return
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
