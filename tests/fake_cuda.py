"""CUDA's memory management over plain memory: allocations, handles and events cross processes.

A handle names a process and a descriptor there, so that another process can open it while the
first one lives, and what it has opened outlives that one. Refused is what CUDA refuses: handles of
this very process, memory that was not made to be shared, GPUs that are not visible, pinning twice.
Streams run when a test says so: until then an event that was recorded on them is not over.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raykv.base.ids import Direction
from raykv.copy.cpu import CPUBackend
from raykv.copy.engine import CopyBackend, StopSign
from raykv.copy.plan import CopyRuns
from raykv.copy.rows import RowCopier
from raykv.memory.cuda.driver import DriverError, Extent
from raykv.memory.region import Region

GPU = "00112233-4455-6677-8899-aabbccddeeff"
OTHER_GPU = "ffeeddcc-bbaa-9988-7766-554433221100"
PAGE = mmap.PAGESIZE

_HANDLE = struct.Struct("<8sqqq")
_MEMORY, _EVENT = b"fake-mem", b"fake-evt"
EVENT_NAME = "fake-event"
KV_NAME = "fake-gpu-kv"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_FIXED = 0x10


def _map(fd: int, num_bytes: int, address: int | None = None) -> int:
    kind = mmap.MAP_SHARED | (_FIXED if address else 0)
    rights = mmap.PROT_READ | mmap.PROT_WRITE
    if fd < 0:
        kind, rights = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0
    found = _libc.mmap(address, num_bytes, rights, kind, fd, 0)
    if found == ctypes.c_void_p(-1).value:
        raise DriverError(f"no mapping of {num_bytes} bytes")
    return int(found)


def _memfd(num_bytes: int) -> int:
    fd = os.memfd_create(KV_NAME, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return fd


@dataclass(frozen=True)
class _Block:
    """An allocation, or one mapped piece of memory."""

    extent: Extent
    device: str
    fd: int
    is_mapped: bool
    is_shareable: bool


@dataclass
class FakeStream:
    """Work of a GPU that has been queued, and waits for `run`."""

    queued: list[Callable[[], None]] = field(default_factory=list)
    submitted: int = 0
    events: list[ctypes.Array[ctypes.c_int64]] = field(default_factory=list)

    def submit(self, work: Callable[[], None]) -> None:
        self.queued.append(work)
        self.submitted += 1

    def run(self) -> None:
        for work in self.queued:
            work()
        self.queued.clear()
        for event in self.events:
            event[1] = self.submitted


class FakeCuda:
    """CUDA in one process; counts what is open. `fail_at` refuses the n-th call from now on."""

    def __init__(self, visible: tuple[str, ...] = (GPU,), *, opens_own: bool = True) -> None:
        self.visible = visible
        self.opens_own = opens_own
        self.calls: list[str] = []
        self.fail_at: int | None = None
        self.refused: set[str] = set()
        self.blocks: list[_Block] = []
        self.streams: dict[int, FakeStream] = {}
        self.opened: list[int] = []
        self.mapped: dict[int, int] = {}
        self.events: dict[int, Region] = {}
        self.registered: dict[int, int] = {}

    @property
    def num_open(self) -> int:
        """Memory of others and events that are open."""
        return len(self.opened) + len(self.mapped) + len(self.events)

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at is not None:
            self.fail_at -= 1
        if self.fail_at == 0 or name in self.refused:
            raise DriverError(f"{name} was refused")

    def _see(self, device: str) -> None:
        if device not in self.visible:
            raise DriverError(f"this process does not see GPU {device}, only {self.visible}")

    # What torch does

    def allocate(
        self,
        num_bytes: int,
        device: str = GPU,
        pieces: list[int] | None = None,
        *,
        is_shareable: bool = True,
    ) -> int:
        """An ordinary allocation, or one that is mapped in pieces."""
        sizes = pieces or [num_bytes]
        assert sum(sizes) == num_bytes, (sizes, num_bytes)
        assert not any(size % PAGE for size in sizes), sizes
        base = start = _map(-1, num_bytes)
        for size in sizes:
            fd = _memfd(size)
            _map(fd, size, start)
            extent = Extent(start, size)
            self.blocks.append(_Block(extent, device, fd, pieces is not None, is_shareable))
            start += size
        return base

    def stream(self, number: int = 7) -> FakeStream:
        return self.streams.setdefault(number, FakeStream())

    def end(self) -> None:
        """What happens when the process ends."""
        for block in self.blocks:
            os.close(block.fd)
            _libc.munmap(block.extent.base, block.extent.num_bytes)
        self.blocks.clear()

    # MemoryDriver

    def devices(self) -> list[str]:
        return list(self.visible)

    def _block(self, address: int) -> _Block:
        for block in self.blocks:
            if block.extent.base <= address < block.extent.end:
                return block
        raise DriverError(f"no GPU memory at {address:#x}")

    def device_of(self, address: int) -> str:
        self._call("device_of")
        return self._block(address).device

    def is_ipc_capable(self, address: int) -> bool:
        self._call("is_ipc_capable")
        return not self._block(address).is_mapped

    def extent(self, address: int) -> Extent:
        self._call("extent")
        return self._block(address).extent

    def export_memory(self, base: int) -> bytes:
        self._call("export_memory")
        block = self._block(base)
        if block.is_mapped or block.extent.base != base:
            raise DriverError("no handle of that")
        raw = _HANDLE.pack(_MEMORY, os.getpid(), block.fd, block.extent.num_bytes)
        return raw.ljust(64, b"\0")

    def export_fd(self, base: int) -> int:
        self._call("export_fd")
        block = self._block(base)
        if not block.is_shareable or block.extent.base != base:
            raise DriverError("that memory was not made to be shared")
        return os.dup(block.fd)

    def create_event(self, device: str) -> int:
        self._call("create_event")
        self._see(device)
        region = Region.anonymous(PAGE, EVENT_NAME)
        self.events[region.address] = region
        return region.address

    def export_event(self, event: int) -> bytes:
        self._call("export_event")
        fd = self.events[event].fd
        return _HANDLE.pack(_EVENT, os.getpid(), fd, PAGE).ljust(64, b"\0")

    def record_event(self, event: int, stream: int) -> None:
        self._call("record_event")
        words = event_words(event)
        words[0] = self.stream(stream).submitted
        self.stream(stream).events.append(words)

    def _received(self, handle: bytes, kind: bytes) -> tuple[int, int]:
        """A descriptor of what a handle names, and its size."""
        found, pid, fd, num_bytes = _HANDLE.unpack(handle[: _HANDLE.size])
        if found != kind or len(handle) != 64:
            raise DriverError("that is no handle")
        if pid == os.getpid() and not self.opens_own:
            raise DriverError("a handle of this very process")
        try:
            return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC), num_bytes
        except OSError as error:
            raise DriverError(f"its process is gone: {error.strerror}") from error

    def open_memory(self, device: str, handle: bytes) -> Extent:
        self._call("open_memory")
        self._see(device)
        fd, num_bytes = self._received(handle, _MEMORY)
        address = _map(fd, num_bytes)
        os.close(fd)
        self.opened.append(address)
        return Extent(address, num_bytes)

    def close_memory(self, device: str, address: int) -> None:
        self._call("close_memory")
        self._see(device)
        self.opened.remove(address)
        size = next((size for start, size in mapped_ranges() if start == address), 0)
        _libc.munmap(address, size)

    def map_fds(self, device: str, fds: list[int], sizes: list[int]) -> int:
        self._call("map_fds")
        self._see(device)
        if any(os.fstat(fd).st_size < size for fd, size in zip(fds, sizes, strict=True)):
            raise DriverError("a piece is smaller than was said")
        base = start = _map(-1, sum(sizes))
        for fd, size in zip(fds, sizes, strict=True):
            start = _map(fd, size, start) + size
        self.mapped[base] = sum(sizes)
        return base

    def unmap_fds(self, device: str, address: int, sizes: list[int]) -> None:
        self._call("unmap_fds")
        assert self.mapped.pop(address) == sum(sizes)
        _libc.munmap(address, sum(sizes))

    def open_event(self, device: str, handle: bytes) -> int:
        self._call("open_event")
        self._see(device)
        fd, num_bytes = self._received(handle, _EVENT)
        region = Region.received(fd, num_bytes)
        self.events[region.address] = region
        return region.address

    def destroy_event(self, device: str, event: int) -> None:
        self._call("destroy_event")
        self.events.pop(event).close()

    def register_host(self, device: str, address: int, num_bytes: int) -> None:
        self._call("register_host")
        self._see(device)
        for start, size in self.registered.items():
            if start < address + num_bytes and address < start + size:
                raise DriverError("it is pinned already")
        self.registered[address] = num_bytes

    def unregister_host(self, device: str, address: int) -> None:
        self._call("unregister_host")
        del self.registered[address]


def mapped_ranges() -> list[tuple[int, int]]:
    """Address and size of each mapping of this process."""
    with open("/proc/self/maps") as file:  # noqa: PTH123
        ranges = [line.split(maxsplit=1)[0].split("-") for line in file]
    return [(int(start, 16), int(end, 16) - int(start, 16)) for start, end in ranges]


def event_words(event: int) -> ctypes.Array[ctypes.c_int64]:
    """How far the event's stream was told to go when it was recorded, and how far it has got."""
    return (ctypes.c_int64 * 2).from_address(event)


class FakeCudaBackend(CPUBackend):
    """Waits for the event, as a copy stream does, then copies."""

    def __init__(self, kv_address: int, pool_address: int, event: int | None) -> None:
        super().__init__(kv_address, pool_address, RowCopier())
        self._event = event

    def copy(
        self, direction: Direction, runs: CopyRuns, first: int, last: int, stop: StopSign
    ) -> bool:
        if self._event is not None:
            words = event_words(self._event)
            target = words[0]
            while words[1] < target:
                if stop():
                    return False
                time.sleep(0.001)
        return super().copy(direction, runs, first, last, stop)


def make_backend(
    device: str, kv_address: int, pool_address: int, compute_event: int | None
) -> CopyBackend:
    """As `raykv.copy.cuda.backend.backend`."""
    assert device in (GPU, OTHER_GPU)
    return FakeCudaBackend(kv_address, pool_address, compute_event)
