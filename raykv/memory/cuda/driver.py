"""What RayKV asks of CUDA's memory management, without copies: one protocol for GPU and tests.

Both sides use it: the worker exports the memory that its KV cache lies in, and an event; the
NodeActor opens both, and has the pool's memory page-locked. Devices are named by UUID, because
numbers differ between processes. All calls may come from any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from raykv.base.errors import HandleError


class CUDAError(HandleError):
    """A call of CUDA failed, or can't be made on this machine."""


@dataclass(frozen=True)
class Extent:
    """A range of addresses."""

    base: int
    num_bytes: int

    @property
    def end(self) -> int:
        """The address behind it."""
        return self.base + self.num_bytes


class MemoryDriver(Protocol):
    """All calls raise `CUDAError` when CUDA refuses them; then nothing has changed."""

    def devices(self) -> list[str]:
        """UUIDs of the GPUs that this process sees."""

    # The worker's side; addresses are those of this process.

    def device_of(self, address: int) -> str:
        """UUID of the GPU that memory lies on."""

    def is_ipc_capable(self, address: int) -> bool:
        """Whether `export_memory` can hand the memory over, and not `export_fd` only."""

    def extent(self, address: int) -> Extent:
        """The allocation, or for mapped memory the one mapping, that an address lies in."""

    def export_memory(self, base: int) -> bytes:
        """A handle of the whole allocation that begins there, for another process."""

    def export_fd(self, base: int) -> int:
        """A descriptor of the mapping that begins there; the caller closes it.

        Memory that was not made to be shared has none.
        """

    def create_event(self, device: str) -> int:
        """An event that other processes can open, not recorded yet."""

    def export_event(self, event: int) -> bytes:
        """A handle of an event, for another process."""

    def record_event(self, event: int, stream: int) -> None:
        """Have the event mean all that the stream has been given so far; does not wait."""

    # The NodeActor's side

    def open_memory(self, device: str, handle: bytes) -> Extent:
        """Where an allocation of another process is mapped here; once for each `close_memory`."""

    def close_memory(self, device: str, address: int) -> None:
        """Unmap it."""

    def map_fds(self, device: str, fds: list[int], sizes: list[int]) -> int:
        """Map the memory of descriptors back to back; they may be closed afterwards."""

    def unmap_fds(self, device: str, address: int, sizes: list[int]) -> None:
        """Undo `map_fds`."""

    def open_event(self, device: str, handle: bytes) -> int:
        """An event of another process."""

    def destroy_event(self, device: str, event: int) -> None:
        """Release an event, own or opened."""

    def register_host(self, device: str, address: int, num_bytes: int) -> None:
        """Page-lock memory for the copies of all GPUs, under the context of this one."""

    def unregister_host(self, device: str, address: int) -> None:
        """Undo `register_host`."""
