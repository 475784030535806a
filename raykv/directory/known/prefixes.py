"""How much of prompts the nodes have: what a router of requests asks, and what it is told; pure.

The answer has one number for each prompt and node instead of a row for each chunk and copy. Which
chunks of a prompt a node has are the bits of one number, the first chunk's the lowest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from raykv.directory.known.holdings import Held
from raykv.prompts.prefixes import loadable_of
from raykv.protocol import descriptions, reader

ANYWHERE = ""
"""Has what any node has."""


def prefix_page(query: reader.PrefixQuery, found: Sequence[Held]) -> reader.PrefixPage:
    """The answer to `query`, given which nodes have each of its keys."""
    groups = descriptions.parse_groups(query.chunks)
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
        [loadable_of(groups, [part.get(name, 0) for part in parts]) for name in (*nodes, ANYWHERE)]
        for parts in by_prompt
    ]
    return reader.PrefixPage(
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
            bits[name] = bits.get(name, 0) | (1 << len(run)) - 1 << at
        at += len(run)
    return bits
