"""List chunks and look up prompts: parts of `raykv.client.cluster.Cluster`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from heapq import nsmallest
from typing import Any

import msgspec

from raykv.base import deadlines
from raykv.base.errors import ClusterError, MessageError
from raykv.base.ids import MAX_KEY_BYTES, Key, group_of
from raykv.base.tenants import OTHERS
from raykv.client.scheduler import Scheduler
from raykv.cluster.ask import ask_each
from raykv.prompts import adapters, block_hashes
from raykv.prompts import lookup as prompts
from raykv.prompts.tokens import tokens_of_chat, tokens_of_text
from raykv.protocol import columns, framing, listing, reader

LONG_KEY = 16
"""A key of at least this many bytes is first looked up as a whole key."""

MOST_FIRST = reader.MAX_PAGE // 2
"""Chunks that a listing in some order is for: this many of each page of places may be among
them."""


def chunks(  # noqa: PLR0913 - what a listing is narrowed by
    scheduler: Scheduler,
    *,
    namespace: str | None = None,
    node: str | None = None,
    key: bytes | str = b"",
    group: int | None = None,
    order: str = "",
    limit: int | None = None,
    tier: str = "",
) -> Iterator[reader.Chunk]:
    """Yield the chunks in pools and on disks, one for each copy, page by page.

    A copy that stays in its place meanwhile is listed exactly once; one that comes, goes or moves
    may be listed or not. A listing changes nothing, and keeps nothing in memory.

    Args:
        namespace: only chunks of this namespace; the beginning of its name suffices.
        node: only on this node; the beginning of its id suffices.
        key: only chunks whose key begins with these bytes or hexadecimal digits.
        group: only of this KV group.
        order: sort by age, idle, hits or size, the largest first; "": pages of all nodes in turn,
            each node's pool before its disk.
        limit: at most this many. An order without a limit holds all of them in memory here.
        tier: only in pools ("ram"), or on disks ("disk").

    Raises:
        ClusterError: RayKV does not run here or does not answer, or an argument is invalid.
    """
    if tier not in ("", *reader.TIERS):
        raise ClusterError(f"tier={tier!r}: chunks are in {' or '.join(reader.TIERS)}")
    if order not in ("", *reader.ORDERS):
        raise ClusterError(f"order={order!r}: chunks can be listed by {', '.join(reader.ORDERS)}")
    if limit is not None and limit < 1:
        raise ClusterError(f"limit={limit}: a listing has at least one chunk")
    wanted = key.hex() if isinstance(key, bytes) else key.lower()
    query = reader.ChunkQuery(
        scheduler.full_namespace(namespace) if namespace else "",
        whole_bytes(wanted),
        group,
        tier=tier,
    )
    # Half a byte is looked at here only.
    is_exact = len(wanted) % 2 == 0
    if order and is_exact and limit is not None and limit <= MOST_FIRST:
        query = msgspec.structs.replace(query, order=order, limit=limit)
    elif limit is not None and not (wanted or query.namespace or tier) and group is None:
        query = msgspec.structs.replace(query, limit=min(limit, reader.MAX_PAGE))
    of = [scheduler.node(node)] if node else None
    found = (chunk for chunk in _listed(scheduler, query, of) if chunk.key.hex().startswith(wanted))
    return _first(found, order, limit)


def _listed(
    scheduler: Scheduler, query: reader.ChunkQuery, of: list[str] | None
) -> Iterator[reader.Chunk]:
    """The chunks of nodes that a query is for, a page of each at a time."""
    models = {space.namespace: space.model for space in scheduler.status().spaces}
    cursors: dict[str, str] | None = None if of is None else dict.fromkeys(of, "")
    while cursors is None or cursors:
        asked = cursors or {}

        def question(node_id: str, actor: Any, asked: Mapping[str, str] = asked) -> Any:
            page = msgspec.structs.replace(query, cursor=asked.get(node_id, ""))
            return actor.ask.remote("chunks", framing.encode(page))

        pages = ask_each(reader.ChunkPage, question, cursors)
        for node_id, page in sorted(pages.items()):
            yield from _chunks_of(scheduler, node_id, page, models)
        if any(page.cursor and page.cursor == asked.get(n) for n, page in pages.items()):
            raise MessageError("a NodeActor sent a page of a listing again and again")
        cursors = {node_id: page.cursor for node_id, page in pages.items() if page.cursor}
        if cursors:
            time.sleep(deadlines.BRIEF_S)


def _chunks_of(
    scheduler: Scheduler, node_id: str, page: reader.ChunkPage, models: Mapping[str, str]
) -> Iterator[reader.Chunk]:
    """The rows of a page; of what is in the pool and on the disk two."""
    by_space: dict[str, list[bytes]] = {}
    for row in page.chunks:
        by_space.setdefault(row.namespace, []).append(row.key)
    sources = {
        (space, key): found
        for space, keys in by_space.items()
        for key, found in zip(keys, scheduler.sources_of(space, keys), strict=True)
    }
    for row in page.chunks:
        known = sources.get((row.namespace, row.key), ())
        is_elsewhere = any(source.node_id != node_id for source in known)
        chunk = reader.Chunk(
            key=row.key,
            node_id=node_id,
            namespace=row.namespace,
            model=models.get(row.namespace, ""),
            group=group_of(Key(row.key)),
            num_bytes=row.num_bytes,
            age_s=row.age_s,
            idle_s=row.idle_s,
            hits=row.hits,
            is_replicated=is_elsewhere,
            tenant=row.tenant or OTHERS,
        )
        if row.where & listing.Where.RAM:
            yield chunk
        if row.where & listing.Where.DISK:
            is_here = bool(row.where & listing.Where.RAM) or columns.Source(node_id) in known
            yield msgspec.structs.replace(
                chunk,
                age_s=0.0,
                idle_s=0.0,
                hits=0,
                is_replicated=is_elsewhere or is_here,
                tier=reader.DISK,
                tenant="",
            )


def chunk(scheduler: Scheduler, key: bytes | str) -> list[reader.Chunk]:
    """Return the copies of the chunk whose key begins with these bytes or hexadecimal digits.

    Raises:
        ClusterError: several keys begin like this, or RayKV does not run here or does not answer.
    """
    wanted = key.hex() if isinstance(key, bytes) else key.lower()
    found: list[reader.Chunk] = []
    whole = whole_bytes(wanted)
    if len(whole) >= LONG_KEY and len(wanted) == 2 * len(whole):
        known = scheduler.status()
        for space in sorted({*known.namespaces, *known.disk_chunks}):
            for source in sorted(scheduler.sources_of(space, [whole])[0]):
                tier = reader.DISK if source.is_disk else reader.RAM
                found += chunks(
                    scheduler, namespace=space, node=source.node_id, key=whole, tier=tier
                )
    found = found or list(chunks(scheduler, key=wanted))
    keys = sorted({chunk.key.hex() for chunk in found})
    if len(keys) > 1:
        raise ClusterError(
            f"{len(keys)} chunks have keys that begin with {wanted!r}: give more digits, as in "
            f"{', '.join(keys[:3])}"
        )
    return sorted(found, key=lambda each: (each.namespace, each.node_id, each.tier != reader.RAM))


def lookup(
    scheduler: Scheduler,
    tokens: Sequence[int] | None = None,
    *,
    text: str | None = None,
    messages: Sequence[Mapping[str, Any]] | None = None,
    model: str | None = None,
    namespace: str | None = None,
    traits: block_hashes.PromptTraits = block_hashes.PLAIN,
) -> reader.PromptLookup:
    """Find where the chunks of a prompt are, and how much of it each node could load.

    Args:
        tokens: the prompt; or
        text: that, as `/v1/completions` takes it; or
        messages: those of a chat, as `/v1/chat/completions` takes them. Text and messages need
            the tokenizer of `model`, by default that of the namespace's engines.
        model: the name that its engines use, or the last part of it.
        namespace: the beginning of its name; needed only if the model has several.
        traits: what separates the prompt from others with the same tokens: salt, adapter.

    Raises:
        ClusterError: RayKV does not run here or does not answer; there is not exactly one such
            namespace; or none of its engines is known.
        SettingError: the engines' hashes can't be made here, or there is no such tokenizer.
    """
    if sum(given is not None for given in (tokens, text, messages)) != 1:
        raise ClusterError("a lookup is for tokens, for a text, or for messages: give one")
    space = prompts.choose_namespace(scheduler.status().spaces, model, namespace)
    seed = os.environ.get("PYTHONHASHSEED")
    scheme = prompts.scheme_of(space, [] if seed is None else [seed])
    if text is not None:
        tokens = tokens_of_text(space.model, text)
    elif messages is not None:
        tokens = tokens_of_chat(space.model, [dict(each) for each in messages])
    assert tokens is not None
    ask = partial(scheduler.sources_of, space.namespace)
    return prompts.look_up(space, scheme, tokens, adapters.named(traits), ask)


def whole_bytes(digits: str) -> bytes:
    """The bytes that hexadecimal digits begin with.

    Raises:
        ClusterError: they are invalid, or too many.
    """
    try:
        whole = bytes.fromhex(digits[: len(digits) // 2 * 2])
        int(digits or "0", 16)
    except ValueError:
        raise ClusterError(f"the key {digits!r} is not in hexadecimal digits") from None
    if len(digits) > 2 * MAX_KEY_BYTES:
        raise ClusterError(f"the key {digits[:16]!r}... has {len(digits)} digits, too many")
    return whole


def _first(found: Iterator[reader.Chunk], order: str, limit: int | None) -> Iterator[reader.Chunk]:
    """The first chunks in an order, in it."""
    if not order:
        for number, chunk in enumerate(found, 1):
            yield chunk
            if number == limit:
                return
    elif limit is None:
        yield from sorted(found, key=partial(_rank, order))
    else:
        yield from nsmallest(limit, found, key=partial(_rank, order))


def _rank(order: str, chunk: reader.Chunk) -> tuple[float, str, bytes, str]:
    most_first = -getattr(chunk, reader.ORDERS[order])
    return most_first, chunk.namespace, chunk.key, chunk.node_id
