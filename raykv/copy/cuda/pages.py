"""Who gathers small pages of a KV cache into one buffer of the device, and scatters them.

A Triton kernel does, on the stream that it is given. Where Triton can't be imported, pages are
copied one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger("raykv.copy")

Addresses = npt.NDArray[np.uint64]
CPU = "cpu"
"""A device of the tests."""

WORD_BYTES = 8
"""Addresses and sizes of pages are multiples of it."""


class TritonMover:
    """Moves pages with the kernel; `on_stream` makes a stream torch's current one."""

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
        """Submit the copies; all numbers are multiples of `WORD_BYTES`."""
        with self._on_stream(stream):
            columns = self._torch.from_numpy(np.stack((to, source, size)).view(np.int64))
            if self._device != CPU:
                # A copy of more than 64 KiB of pageable memory waits for all before it. torch
                # keeps page-locked memory, and uses none again before the stream has read it.
                columns = columns.pin_memory()
            self._launch(*columns.to(self._device, non_blocking=True))


def mover_of(device: int) -> TritonMover | None:
    """What moves pages within a GPU; None without torch for CUDA, or Triton."""
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
        logger.info("small pages are copied one by one, for want of Triton: %s", error)
        return None
