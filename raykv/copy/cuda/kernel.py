"""Copies of many small pages within a GPU's memory, in Triton.

To import this module needs Triton: `raykv.copy.cuda.pages` does it inside of a function.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

NUM_PROGRAMS = 64
"""Most that run side by side: enough to hide the latency of memory, and few enough to leave most
of a GPU's multiprocessors to the model."""

WORDS_AT_ONCE = 1024
"""Of 8 bytes, by one program. Half as many are a third slower on an H100, with pages of 16 KiB."""


# Triton evaluates all annotations, and takes none but its own.
@triton.jit
def _move(to, source, size, count, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Programs take the pages in turn; the columns hold addresses and bytes as 64-bit numbers."""
    lane = tl.arange(0, WORDS)
    page = tl.program_id(0)
    while page < count:
        target = tl.load(to + page).to(tl.pointer_type(tl.int64))
        where = tl.load(source + page).to(tl.pointer_type(tl.int64))
        words = tl.load(size + page) // 8
        for start in range(0, words, WORDS):
            here = start + lane
            data = tl.load(where + here, mask=here < words, other=0)
            tl.store(target + here, data, mask=here < words)
        page += tl.num_programs(0)


def launch(to: Any, source: Any, size: Any) -> None:
    """Copy pages on torch's current stream.

    Args:
        to: addresses, as a tensor of 64-bit numbers on the device.
        source: the same.
        size: bytes, multiples of 8.
    """
    count = size.numel()
    _move[(min(NUM_PROGRAMS, count),)](to, source, size, count, WORDS=WORDS_AT_ONCE)
