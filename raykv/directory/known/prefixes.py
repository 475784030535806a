"""How much of prompts the nodes have: what a router of requests asks, and what it is told; pure.

The answer has one number for each prompt and node instead of a row for each chunk and copy. Which
chunks of a prompt a node has are the bits of one number, the first chunk's the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import lcm

from raykv.directory.known.holdings import Held
from raykv.protocol.descriptions import ChunkGroup, parse_groups
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.reader import PrefixPage, PrefixQuery

ANYWHERE = ""
"""Has what any node has."""


def prefix_page(query: PrefixQuery, found: Sequence[Held]) -> PrefixPage:
    """The answer to `query`, given which nodes have each of its keys."""
    groups = parse_groups(query.chunks)
    by_prompt: list[list[dict[str, int]]] = []
    first = 0
    for at in range(0, len(query.counts), len(groups)):
        parts = []
        for count in query.counts[at : at + len(groups)]:
            parts.append(_bits(found[first : first + count]))
            first += count
        by_prompt.append(parts)
    nodes = sorted({name for parts in by_prompt for part in parts for name in part} - {ANYWHERE})
    rows = [
        _row(groups, query.counts[at * len(groups) :], parts, [*nodes, ANYWHERE])
        for at, parts in enumerate(by_prompt)
    ]
    return PrefixPage(
        PROTOCOL_VERSION,
        nodes,
        [tokens for row in rows for tokens in row[:-1]],
        [row[-1] for row in rows],
    )


def _bits(found: Sequence[Held]) -> dict[str, int]:
    """Which chunks each node has, and any. Keys in the same places have the same object."""
    bits: dict[str, int] = {}
    at = 0
    for _, same in groupby(found, key=id):
        run = list(same)
        for name in {*(each.node_id for each in run[0]), *([ANYWHERE] if run[0] else [])}:
            bits[name] = bits.get(name, 0) | _ones(len(run)) << at
        at += len(run)
    return bits


def _row(
    groups: Sequence[ChunkGroup],
    counts: Sequence[int],
    parts: Sequence[dict[str, int]],
    names: Sequence[str],
) -> list[int]:
    step = lcm(*(group.tokens for group in groups))
    longest = min(count * group.tokens for group, count in zip(groups, counts, strict=False))
    longest -= longest % step
    return [
        _loadable(groups, [part.get(name, 0) for part in parts], step, longest) for name in names
    ]


def _loadable(groups: Sequence[ChunkGroup], bits: Sequence[int], step: int, longest: int) -> int:
    """`raykv.prompts.prefixes.loadable_tokens` of one prompt on one node."""
    windows: list[tuple[int, int]] = []
    for group, has in zip(groups, bits, strict=True):
        if group.window is None:
            longest = min(longest, _trailing_ones(has) * group.tokens)
        else:
            windows.append((group.tokens, _runs(has, group.window)))
    for end in range(longest // step * step, 0, -step):
        if all(runs >> (end // tokens - 1) & 1 for tokens, runs in windows):
            return end
    return 0


def _runs(bits: int, window: int) -> int:
    """The places with which a run of ones of that length ends, or one from the beginning on."""
    bits = bits << window | _ones(window)
    length = 1
    while length < window:
        more = min(length, window - length)
        bits &= bits << more
        length += more
    return bits >> window


def _trailing_ones(bits: int) -> int:
    return (~bits & bits + 1).bit_length() - 1


def _ones(count: int) -> int:
    return (1 << count) - 1
