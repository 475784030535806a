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
    step = lcm(*(each.tokens for each in groups))
    # By group: how many chunks without a gap end with each chunk.
    runs = {each.group: _runs(is_there[each.group]) for each in groups}
    longest = min(len(runs[each.group]) * each.tokens for each in groups)
    for end in range(longest // step * step, 0, -step):
        if all(_reaches_back(each, runs[each.group], end // each.tokens) for each in groups):
            return end
    return 0


def needed_chunks(group: ChunkGroup, chunks: Sequence[T], end: int) -> Sequence[T]:
    """Those of a group's chunks of a prompt that a prefix of so many tokens needs."""
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


def _runs(is_there: Sequence[bool]) -> list[int]:
    found = []
    run = 0
    for there in is_there:
        run = run + 1 if there else 0
        found.append(run)
    return found


def _reaches_back(group: ChunkGroup, runs: Sequence[int], count: int) -> bool:
    needed = count if group.window is None else min(group.window, count)
    return runs[count - 1] >= needed
