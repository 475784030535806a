"""How much of a prompt can be loaded, given which of its chunks are there.

A KV group of full attention needs all chunks of a prefix. One with a sliding window, or with a
recurrent state, needs the last few of them only. What can be loaded ends where every group has what
it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import lcm
from typing import TypeVar

from raykv.base.ids import Key, group_of, in_group
from raykv.protocol.descriptions import ChunkGroup

T = TypeVar("T")


def loadable_tokens(groups: Sequence[ChunkGroup], is_there: Mapping[int, Sequence[bool]]) -> int:
    """Length of the longest prefix that can be loaded, in tokens.

    Args:
        groups: all KV groups.
        is_there: by group, whether each chunk of the prompt is there, from the first on.
    """
    bits = []
    for group in groups:
        # Read as one number of base 2: of 16,384 chunks that takes a tenth of adding them up.
        digits = "".join("01"[has] for has in reversed(is_there[group.group]))
        bits.append(int(digits or "0", 2))
    return loadable_of(groups, bits)


def loadable_of(groups: Sequence[ChunkGroup], bits: Sequence[int]) -> int:
    """`loadable_tokens`; which chunks of a group are there are the bits of a number, the first
    chunk's the lowest.
    """
    step = lcm(*(each.tokens for each in groups))
    longest: list[int] = []
    windows: list[tuple[int, int]] = []
    for group, has in zip(groups, bits, strict=True):
        if group.window is None:
            longest.append(group.tokens * _trailing_ones(has))
        else:
            longest.append(group.tokens * has.bit_length())
            windows.append((group.tokens, _runs(has, group.window)))
    for end in range(min(longest) // step * step, 0, -step):
        if all(runs >> (end // tokens - 1) & 1 for tokens, runs in windows):
            return end
    return 0


def needed_chunks(group: ChunkGroup, chunks: Sequence[T], end: int) -> Sequence[T]:
    """The chunks of a group that a prefix of `end` tokens of a prompt needs."""
    count = end // group.tokens
    first = 0 if group.window is None else max(0, count - group.window)
    return chunks[first:count]


def companions(groups: Sequence[ChunkGroup], keys: Iterable[bytes]) -> list[Key]:
    """What is worth nothing once chunks are gone, without which no prefix can end where they end.

    Keys of one place in a prompt differ in the group only. Without a chunk of full attention none
    of the place's others serves; without one of a window, none of the other windows does, but those
    of full attention are needed for what comes behind.
    """
    found: list[Key] = []
    if len(groups) < 2:
        return found
    windows = {each.group: each.window for each in groups}
    for key in keys:
        gone = group_of(Key(key))
        needs_all = windows.get(gone, 0) is None
        found += [
            in_group(Key(key), group)
            for group, window in windows.items()
            if group != gone and gone in windows and (needs_all or window is not None)
        ]
    return found


def _runs(bits: int, window: int) -> int:
    """The places with which a run of ones of that length ends, or one from the beginning on."""
    # Nothing looks back past the beginning.
    window = min(window, bits.bit_length())
    bits = bits << window | (1 << window) - 1
    length = 1
    while length < window:
        more = min(length, window - length)
        bits &= bits << more
        length += more
    return bits >> window


def _trailing_ones(bits: int) -> int:
    return (~bits & bits + 1).bit_length() - 1
