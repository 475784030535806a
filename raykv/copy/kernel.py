"""All rows of a copy in one compiled call, with stores that go around the caches.

Why compiled: ctypes costs about a microsecond a run, and libc's memcpy streams only what is larger
than most of the last-level cache, so that a copy page by page reads every target line before it
overwrites it. Streaming (non-temporal) stores save that reading, a third of the traffic, and
leave the engine's data in the caches. Four pages are copied side by side: each is a stream of its
own for the prefetchers, which stop at page boundaries.

To import this module compiles the kernel, or loads it from numba's cache: about a second. Only
`raykv.copy.rows` imports it, in a NodeActor whose first worker with a KV cache in CPU memory has
come: a vLLM CPU worker dies if numba is loaded in its process.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE_BYTES = 64
"""A cache line; a store that streams fills a whole one."""

PAGE_BYTES = 4096
PAGES_AT_ONCE = 4
LINES_AT_ONCE = 2
"""Of each page. With one page at a time 10 to 15 % slower; eight, or four lines, no faster."""

STREAM_FROM_BYTES = 1024
"""From here on streaming won both ways, by 1.2 to 1.8 times; stores of 256 bytes lost by 0.7."""

RUNS_AHEAD = 2
AHEAD_BYTES = 1024
"""The beginnings of scattered runs are fetched before their turn: 1.15 times the speed with pages
of 4 KiB, 1.05 with 16. More of them, or further ahead, gave no more."""

PIECE_BYTES = 1 << 20
"""Between two looks at the stop words: a tenth of a millisecond."""

HAS_STREAMING = platform.machine() in {"x86_64", "AMD64"}
"""Elsewhere memcpy, which knows its machine."""

_I64 = ir.IntType(64)
_LINE = ir.VectorType(_I64, LINE_BYTES // 8)


def _streaming(offsets: list[int]) -> Any:
    """An intrinsic (to, source) that copies the lines at these offsets: all loads, then all stores.

    `to` must be a multiple of `LINE_BYTES`; `source` may be anything.
    """

    def at(builder: Any, address: Any, offset: int) -> Any:
        place = builder.add(address, ir.Constant(_I64, offset))
        return builder.inttoptr(place, _LINE.as_pointer())

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to, source = args
        mark = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
        lines = [builder.load(at(builder, source, offset), align=1) for offset in offsets]
        for line, offset in zip(lines, offsets, strict=True):
            store = builder.store(line, at(builder, to, offset), align=LINE_BYTES)
            store.set_metadata("nontemporal", mark)
        return context.get_dummy_value()

    @intrinsic
    def stream(_typing: Any, to: Any, source: Any) -> Any:
        return types.void(to, source), emit

    return stream


_stream_line = _streaming([0])
_stream_pages = _streaming(
    [
        page * PAGE_BYTES + line * LINE_BYTES
        for page in range(PAGES_AT_ONCE)
        for line in range(LINES_AT_ONCE)
    ]
)


@intrinsic
def _memcpy(_typing: Any, to: Any, source: Any, size: Any) -> Any:
    """libc's memcpy."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(address, byte) for address in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return types.void(to, source, size), emit


@intrinsic
def _prefetch(_typing: Any, address: Any) -> Any:
    """Ask for a line that will be read; any address will do, also one that is not mapped."""

    def emit(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        to_read, into_l2, data = number(0), number(2), number(1)
        builder.call(prefetch, [builder.inttoptr(args[0], byte), to_read, into_l2, data])
        return context.get_dummy_value()

    return types.void(address), emit


@intrinsic
def _fence(_typing: Any) -> Any:
    """What was stored before it, streaming too, is seen by everybody before what follows."""

    def emit(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if HAS_STREAMING:
            # Not LLVM's own fence: that may be a locked instruction, made for ordinary stores.
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse.sfence"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        else:
            builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), emit


@intrinsic
def _word_at(_typing: Any, address: Any) -> Any:
    """The aligned 64-bit word at an address, read from memory each time."""

    def emit(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        place = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(place, "acquire", 8)

    return types.uint64(address), emit


@numba.njit
def _copy_piece(to: int, source: int, size: int) -> None:
    if not HAS_STREAMING or size < STREAM_FROM_BYTES:
        _memcpy(to, source, size)
        return
    done = -to & (LINE_BYTES - 1)
    _memcpy(to, source, done)
    while done + PAGES_AT_ONCE * PAGE_BYTES <= size:
        for line in range(0, PAGE_BYTES, LINES_AT_ONCE * LINE_BYTES):
            _stream_pages(to + done + line, source + done + line)
        done += PAGES_AT_ONCE * PAGE_BYTES
    while done + LINE_BYTES <= size:
        _stream_line(to + done, source + done)
        done += LINE_BYTES
    _memcpy(to + done, source + done, size - done)


@numba.njit
def _is_set(stop: Any) -> bool:
    found = False
    for row in range(len(stop)):
        found |= _word_at(stop[row, 0]) == stop[row, 1]
    return found


_column = types.Array(types.int64, 1, "C", readonly=True)
_words = types.Array(types.uint64, 2, "C", readonly=True)
_int = types.int64
SIGNATURE = types.boolean(_int, _column, _int, _column, _column, _words)


def compiled(function: Callable[..., bool]) -> Callable[..., bool]:
    """Compile, or load what was compiled before.

    numba keeps it in NUMBA_CACHE_DIR, or the package's `__pycache__`, or the user's cache folder;
    where none of them can be written it is compiled anew in each process.
    """
    try:
        return numba.njit(SIGNATURE, nogil=True, cache=True)(function)
    except (RuntimeError, OSError):
        return numba.njit(SIGNATURE, nogil=True)(function)


@compiled
def copy_rows(
    to: int, to_offsets: Any, source: int, source_offsets: Any, sizes: Any, stop: Any
) -> bool:
    """See `raykv.copy.rows.CopyRows` and `StopSign.rows`."""
    for row in range(len(sizes)):
        target, place, left = to + to_offsets[row], source + source_offsets[row], sizes[row]
        later = min(row + RUNS_AHEAD, len(sizes) - 1)
        for offset in range(0, min(sizes[later], AHEAD_BYTES), LINE_BYTES):
            _prefetch(source + source_offsets[later] + offset)
        while True:
            if _is_set(stop):
                _fence()
                return False
            piece = min(left, PIECE_BYTES)
            _copy_piece(target, place, piece)
            left -= piece
            if not left:
                break
            target += piece
            place += piece
    _fence()
    return True
