"""How KV lies in a chunk: what an engine tells once, so that others can read its chunks."""

from __future__ import annotations

import msgspec


class ElementOrder(msgspec.Struct, frozen=True, array_like=True):
    """Where the elements of K, or of V, are in a page: a block of one layer on one rank.

    The element of head h, token t and dimension d is number heads[h] + tokens[t] + dims[d] of the
    page, counted in elements. Head h is the rank's h-th.
    """

    heads: list[int] = []
    tokens: list[int] = []
    dims: list[int] = []


class GroupForm(msgspec.Struct, frozen=True):
    """Of a KV group, whose layers have pages of one form; in a chunk they follow in this order.

    With `refusal` set, a sentence, its chunks can't be read as tensors, and nothing else is told.
    """

    layers: list[str] = []
    dtype: str = ""
    page_bytes: int = 0
    keys: ElementOrder = ElementOrder()
    values: ElementOrder = ElementOrder()
    refusal: str = ""


class KVForm(msgspec.Struct, frozen=True):
    """Of a namespace: its groups by KV group index, and what chunks of all groups share.

    A chunk has a part per rank; a part has a region per layer, a region `blocks_per_chunk` pages.
    `head_copies` ranks that follow each other have the same heads. `slot_bytes` by KV group index.
    Canonical chunks have the form of an engine of one rank, whoever has stored them.
    """

    num_ranks: int = 1
    head_copies: int = 1
    blocks_per_chunk: int = 1
    slot_bytes: dict[int, int] = {}
    groups: dict[int, GroupForm] = {}


class PageMap(msgspec.Struct, frozen=True, array_like=True):
    """Where the bytes of a rank's page are in the canonical page, that of an engine of one rank.

    Columns, one entry per run: fragment i of run r is `sizes[r]` bytes that begin in the rank's
    page at own[r] + i * own_strides[r], in the canonical one at whole[r] + i * whole_strides[r],
    for i below counts[r]. `page_bytes` are the canonical page's. `num_writers` ranks hold the same
    bytes; this one is number `writer` among them.
    """

    page_bytes: int
    own: list[int]
    whole: list[int]
    sizes: list[int]
    counts: list[int]
    own_strides: list[int]
    whole_strides: list[int]
    num_writers: int = 1
    writer: int = 0


class CanonicalPages(msgspec.Struct, frozen=True):
    """The maps of a worker; without any its chunks have a part for each rank.

    `groups[g]` has, for each tensor of the g-th KV group of the layout, a number of `maps`.
    """

    maps: list[PageMap] = []
    groups: list[list[int]] = []


NOT_CANONICAL = CanonicalPages()
