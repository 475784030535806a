"""Questions to the scheduler actor about chunks, page by page."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import ray

from raykv.base.deadlines import CLIENT_S, LISTING_PAUSE_S
from raykv.base.errors import ClusterError, cause_of, first_line
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.framing import PROTOCOL_VERSION, encode, receive
from raykv.protocol.reader import (
    MAX_PAGE,
    Chunk,
    ChunkPage,
    ChunkQuery,
    WherePage,
    WhereQuery,
    check_chunk_page,
    check_where_page,
    chunks_of,
)

S = TypeVar("S", bound=msgspec.Struct)

MOST_FIRST = MAX_PAGE // 2
"""Chunks that a listing in some order is for: of each page of slots so many may be among them."""


def list_chunks(find: Callable[[], Any], query: ChunkQuery) -> Iterator[Chunk]:
    """The chunks that a query is for, in the order of nodes, tiers and slots.

    Args:
        find: returns the scheduler actor.
        query: the first page's.
    """
    while True:
        page = _ask(find(), "chunks", query, ChunkPage)
        check_chunk_page(page, query)
        yield from chunks_of(page)
        if page.is_last:
            return
        query = msgspec.structs.replace(
            query,
            from_node=page.from_node,
            from_disk=page.from_disk,
            from_slot=page.from_slot,
        )
        time.sleep(LISTING_PAUSE_S)


def nodes_with(
    find: Callable[[], Any], namespace: str, keys: Sequence[bytes]
) -> list[Collection[str]]:
    """The nodes that have each key, and the disks, which have names of their own."""
    found: list[Collection[str]] = []
    while len(found) < len(keys):
        start = len(found)
        query = WhereQuery(PROTOCOL_VERSION, namespace, list(keys[start : start + MAX_KEYS]))
        page = _ask(find(), "where", query, WherePage)
        check_where_page(page, query)
        nodes: list[list[str]] = [[] for _ in range(page.answered)]
        for key, node in zip(page.key_index, page.node_index, strict=True):
            nodes[key].append(page.nodes[node])
        found += nodes
    return found


def _ask(scheduler: Any, method: str, query: msgspec.Struct, kind: type[S]) -> S:
    """Raises:
    ClusterError: the scheduler actor does not answer in time, or refuses.
    """
    try:
        raw = ray.get(getattr(scheduler, method).remote(encode(query)), timeout=CLIENT_S)
    except Exception as error:
        why = first_line(cause_of(error))
        raise ClusterError(f"the scheduler actor does not answer: {why}") from error
    return receive(raw, kind, "the scheduler actor", "this process")
