"""Who gathers small pages of a KV cache into one buffer of the device, and scatters them.

A Triton kernel where Triton can be imported, else torch's index operations: both launch on the
stream that they are given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("raykv.copy")

Addresses = npt.NDArray[np.uint64]
CPU = "cpu"
"""A device of the tests."""

WORD_BYTES = 8
"""Addresses and sizes of pages are multiples of it."""


class PageMover(Protocol):
    """Copies pages within a device."""

    name: str

    def move(self, stream: int, to: Addresses, source: Addresses, size: Addresses) -> None:
        """Submit the copies; all numbers are multiples of `WORD_BYTES`."""


class TritonMover:
    """Moves pages with the kernel; `on_stream` makes a stream torch's current one."""

    name = "Triton"

    def __init__(
        self, device: str, on_stream: Callable[[int], AbstractContextManager[Any]]
    ) -> None:
        """Import the kernel.

        Raises:
            ImportError: there is no Triton.
        """
        import torch

        from raykv.copy.cuda.kernel import launch

        self._torch, self._launch = torch, launch
        self._device, self._on_stream = device, on_stream

    def move(self, stream: int, to: Addresses, source: Addresses, size: Addresses) -> None:
        with self._on_stream(stream):
            columns = self._torch.from_numpy(np.stack((to, source, size)).view(np.int64))
            if self._device != CPU:
                # A copy of more than 64 KiB of pageable memory waits for all before it. torch
                # keeps page-locked memory, and uses none again before the stream has read it.
                columns = columns.pin_memory()
            self._launch(*columns.to(self._device, non_blocking=True))


class IndexMover:
    """Moves pages with torch: `view` gives a tensor of 64-bit words over memory at an address."""

    name = "torch"

    def __init__(
        self,
        device: str,
        on_stream: Callable[[int], AbstractContextManager[Any]],
        view: Callable[[int, int], Any],
    ) -> None:
        import torch

        self._torch = torch
        self._device, self._on_stream, self._view = device, on_stream, view

    def move(self, stream: int, to: Addresses, source: Addresses, size: Addresses) -> None:
        with self._on_stream(stream):
            grain = int(np.gcd.reduce(np.concatenate((to - to.min(), source - source.min(), size))))
            targets, rows_to = self._rows(to, size, grain)
            sources, rows_from = self._rows(source, size, grain)
            targets[rows_to] = sources[rows_from]

    def _rows(self, addresses: Addresses, size: Addresses, grain: int) -> tuple[Any, Any]:
        """All memory that is touched in rows of `grain` bytes, and which rows, in order."""
        begin = int(addresses.min())
        end = int((addresses + size).max())
        counts = (size // grain).astype(np.int64)
        first = ((addresses - begin) // grain).astype(np.int64)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = self._torch.from_numpy(np.repeat(first, counts) + within)
        memory = self._view(begin, (end - begin) // WORD_BYTES)
        return memory.view(-1, grain // WORD_BYTES), rows.to(self._device, non_blocking=True)


def best_mover(device: int) -> PageMover | None:
    """The best that this process has for a GPU; None without torch for CUDA."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    name = f"cuda:{device}"

    def on_stream(stream: int) -> Any:
        return torch.cuda.stream(torch.cuda.ExternalStream(stream, device=name))

    try:
        return TritonMover(name, on_stream)
    except ImportError as error:
        logger.info("pages are moved by torch, because Triton can't be imported: %s", error)
    return IndexMover(name, on_stream, lambda address, words: cuda_view(name, address, words))


def cuda_view(device: str, address: int, num_words: int) -> Any:
    """A tensor over memory that torch did not allocate."""
    import torch

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012  # the protocol's name for it
            "shape": (num_words,),
            "typestr": "<i8",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }

    return torch.as_tensor(Memory(), device=device)
