"""How much of prompts the nodes have: what a router of requests asks, and what it is told.

The answer has one number for each prompt and node instead of a row for each chunk and replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import Any

import numpy as np

from raykv.protocol.descriptions import ChunkGroup, parse_groups
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.reader import PrefixPage, PrefixQuery

MAX_NODES_OF_A_KEY = 32
"""Nodes named per chunk, which bounds what an answer costs. The others look as if they lacked the
chunk: a little less is sent there.
"""


def prefix_page(
    query: PrefixQuery,
    nodes: Sequence[str],
    key_index: Sequence[int],
    node_index: Sequence[int],
) -> PrefixPage:
    """The answer to `query`, given the replicas that there are: rows as in `WherePage`."""
    groups = parse_groups(query.chunks)
    # One more row: whether any node has it.
    there = np.zeros((len(nodes) + 1, len(query.keys)), dtype=np.bool_)
    there[np.asarray(node_index, np.int64), np.asarray(key_index, np.int64)] = True
    there[-1] = there[:-1].any(axis=0)
    rows, first = [], 0
    for at in range(0, len(query.counts), len(groups)):
        parts = {}
        for group, count in zip(groups, query.counts[at : at + len(groups)], strict=True):
            parts[group.group] = there[:, first : first + count]
            first += count
        rows.append(_loadable(groups, parts, len(nodes) + 1))
    return PrefixPage(
        PROTOCOL_VERSION,
        [str(node) for node in nodes],
        [int(tokens) for row in rows for tokens in row[:-1]],
        [int(row[-1]) for row in rows],
    )


def _loadable(groups: Sequence[ChunkGroup], parts: dict[int, Any], num_rows: int) -> list[int]:
    """`loadable_tokens` of one prompt for all rows at once; `parts` by group, a column a chunk."""
    step = lcm(*(group.tokens for group in groups))
    longest = min(parts[group.group].shape[1] * group.tokens for group in groups) // step
    ends = np.arange(1, longest + 1) * step
    reaches = np.ones((num_rows, longest), dtype=np.bool_)
    for group in groups:
        counts = ends // group.tokens
        needed = counts if group.window is None else np.minimum(group.window, counts)
        reaches &= _runs(parts[group.group])[:, counts - 1] >= needed
    # The last end that is reached, by row.
    found = np.where(reaches, ends, 0).max(axis=1, initial=0)
    return [int(tokens) for tokens in found]


def _runs(part: Any) -> Any:
    """How many columns without a gap end with each column, by row."""
    columns = np.arange(part.shape[1])
    gaps = np.maximum.accumulate(np.where(part, -1, columns), axis=1)
    return columns - gaps
