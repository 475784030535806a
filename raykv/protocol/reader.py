"""What is in the cache: questions about its chunks, pages of answers, and what people get of them.

A node's chunks are asked for page by page, and nothing is kept for it between two pages: a chunk
that stays where it is the whole time is listed exactly once, one that comes or goes meanwhile may
be listed or not.
"""

from __future__ import annotations

from math import lcm
from typing import Annotated

import msgspec

from raykv.base.errors import MessageError
from raykv.base.ids import MAX_KEY_BYTES
from raykv.protocol import columns, descriptions, engine, framing, listing, status

MAX_PAGE = 1024
"""Chunks in one page: some 80 KiB."""

ORDERS = {"age": "age_s", "idle": "idle_s", "hits": "hits", "size": "num_bytes"}
"""Orders of a list of chunks, and the field that each sorts by, largest first."""

MAX_TEXT = 256
"""Characters of a namespace in a router's question, and of what it says of chunks."""
MAX_CHUNK_TOKENS = 1 << 24

KeyCount = Annotated[int, msgspec.Meta(ge=0, le=columns.MAX_KEYS)]

RAM, DISK = TIERS = ("ram", "disk")
"""Where chunks are: in a node's pool, or on its disk."""


class ChunkQuery(framing.Versioned, frozen=True):
    """A page of the chunks of a node is asked for.

    Empty texts and None: all, of every tier. `key` is the beginning of keys. The page has the next
    `limit` chunks at most; with `order` it is for those chunks only that can be among the first
    `limit` of all in that order, and it has all of them out of the places that it is made from.
    `cursor`: where the page before has ended, as that says; empty: from the beginning on.
    """

    namespace: columns.Text = ""
    key: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)] = b""
    group: Annotated[int, msgspec.Meta(ge=0, lt=columns.MAX_GROUPS)] | None = None
    order: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(ORDERS)})?$")] = ""
    limit: Annotated[int, msgspec.Meta(ge=1, le=MAX_PAGE)] = MAX_PAGE
    tier: Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(TIERS)})?$")] = ""
    cursor: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{0,24}\Z")] = ""


class ListedChunk(msgspec.Struct, frozen=True, array_like=True):
    """A row of a page: what is in the pool and on the disk has one.

    `where` is a `Where`. `age_s` and `idle_s` are since a chunk came to the node and since it was
    found, 0 where that is not known. `tenant` is the label of whose it is.
    """

    namespace: columns.Text
    key: columns.KeyBytes
    where: Annotated[int, msgspec.Meta(ge=0, le=int(listing.Where.RAM | listing.Where.DISK))]
    num_bytes: columns.Count
    age_s: float = 0.0
    idle_s: float = 0.0
    hits: columns.Count = 0
    tenant: columns.Text = ""


class ChunkPage(framing.Versioned, frozen=True):
    """Chunks of a node. `cursor` asks for the next page; there is none if it is empty."""

    chunks: Annotated[list[ListedChunk], msgspec.Meta(max_length=columns.MAX_KEYS)] = []
    cursor: columns.Text = ""


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk on a node; the same chunk may be on others too.

    Attributes:
        key: vLLM's offload key: the block hash, then the KV group index in four bytes.
        model: empty if no engine of the namespace is known.
        num_bytes: that it takes of the pool.
        age_s: since it came to the node, or the NodeActor began, whichever is later.
        idle_s: since it was used, or came.
        hits: how often an engine of that node has found it since then.
        is_replicated: another node has it too; of a chunk on a disk, or this node in its pool.
        tier: "ram" or "disk". Of a chunk on a disk `age_s` and `idle_s` are not known, 0.0, and
            reads are not counted.
        tenant: whose it is, "others" if nobody's in particular; of a chunk on a disk it is not
            known, and empty.
    """

    key: bytes
    node_id: str
    namespace: str
    model: str
    group: int
    num_bytes: int
    age_s: float
    idle_s: float
    hits: int
    is_replicated: bool
    tier: str = RAM
    tenant: str = ""

    @property
    def block_hash(self) -> bytes:
        """vLLM's hash of the tokens up to the end of the chunk."""
        return self.key[:-4]


class WhereQuery(framing.Versioned, frozen=True):
    """Which nodes have these chunks of a namespace?"""

    namespace: columns.Text
    keys: Annotated[list[columns.KeyBytes], msgspec.Meta(max_length=columns.MAX_KEYS)]


class WherePage(framing.Versioned, frozen=True):
    """Where the first `answered` keys of a question are."""

    answered: int = 0
    copies: columns.SourceRows = columns.SourceRows()

    def sources(self, query: WhereQuery) -> list[list[columns.Source]]:
        """Those of each key of `query` that is answered.

        Raises:
            MessageError: it is no answer to that.
        """
        num_keys = len(query.keys)
        columns.check_numbers("answered keys", (self.answered,), min(1, num_keys), num_keys)
        found = self.copies.by_key(self.answered)
        return [found.get(at, []) for at in range(self.answered)]


class PrefixQuery(framing.Versioned, frozen=True):
    """How much of the beginnings of some prompts does each node have?

    `chunks` says what the chunks of the namespace are, as its traits do. `keys` are those of all
    chunks, prompt by prompt and group by group; `counts` how many each group of each prompt has.
    """

    namespace: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TEXT)]
    chunks: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    keys: Annotated[list[columns.KeyBytes], msgspec.Meta(max_length=columns.MAX_KEYS)]
    counts: Annotated[list[KeyCount], msgspec.Meta(max_length=columns.MAX_KEYS)]

    def __post_init__(self) -> None:
        counts, num_keys = self.counts, len(self.keys)
        is_whole = len(counts) % len(_groups(self.chunks)) == 0 and sum(counts) == num_keys
        columns.require(is_whole, f"{len(counts)} counts that do not fit {num_keys} keys")


def _groups(text: str) -> list[descriptions.ChunkGroup]:
    try:
        groups = descriptions.parse_groups(text)
    except ValueError as error:
        raise MessageError(f"invalid message: chunks {text!r} ({error})") from error
    names = {group.group for group in groups}
    columns.require(len(names) == len(groups), f"chunks {text!r} with a KV group twice")
    step = lcm(*(group.tokens for group in groups))
    columns.require(
        step <= MAX_CHUNK_TOKENS, f"chunks {text!r}, which end together every {step} tokens"
    )
    return groups


class PrefixPage(framing.Versioned, frozen=True):
    """Tokens that can be loaded, from a prompt's beginning on.

    `tokens` has a row for each prompt, with a number for each of `nodes`; a node that is not there
    has nothing. `anywhere`: by prompt, if what one node lacks is fetched from others.
    """

    nodes: list[str] = []
    tokens: list[int] = []
    anywhere: list[int] = []


def check_prefix_page(page: PrefixPage, num_prompts: int) -> None:
    """Check an answer to a question about `num_prompts` prompts.

    Raises:
        MessageError: it is invalid.
    """
    columns.require(
        len(page.anywhere) == num_prompts, f"an answer for {len(page.anywhere)} prompts"
    )
    is_table = len(page.tokens) == num_prompts * len(page.nodes)
    columns.require(is_table, f"{len(page.tokens)} numbers for {len(page.nodes)} nodes")
    is_number = all(0 <= count <= columns.MAX_NUMBER for count in (*page.tokens, *page.anywhere))
    columns.require(is_number, "invalid numbers of tokens")


class SpacePage(framing.Versioned, frozen=True):
    """The namespaces, and for each the nodes on which it has engines now."""

    spaces: list[status.NamespaceStatus] = []
    engine_nodes: list[list[str]] = []


class PromptChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk of a prompt: its tokens from `first_token` to before `end_token`, and where it is: in
    a pool (`nodes`), on a disk (`disks`, ids of nodes too).

    Of windows and states most are not needed: `is_needed` is what the prefix needs that can be
    loaded now, or the whole prompt and whatever follows it.
    """

    key: bytes
    group: int
    first_token: int
    end_token: int
    nodes: list[str]
    disks: list[str] = []
    is_needed: bool = True


class NodePrefix(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt a node has: `tokens` from its beginning, and how many chunks in all.

    Both are of its pool. `disk_chunks` are on its disk, in its pool too or not, and
    `tokens_with_disk` from the beginning are in one or the other.
    """

    node_id: str
    tokens: int
    chunks: int
    disk_chunks: int = 0
    tokens_with_disk: int = 0


class PromptLookup(msgspec.Struct, frozen=True, kw_only=True):
    """Where the chunks of a prompt are.

    Attributes:
        prompt_tokens: all of them; only whole chunks can be cached.
        cached_tokens: how many from the beginning on can be loaded by an engine that fetches what
            its own pool lacks. vLLM computes the last token of a prompt in any case.
        nodes: all that have any of it, the one with the longest prefix first.
        chunks: all of them, in the order of the prompt, group by group.
        disk_tokens: how many of `cached_tokens` are in no pool, and have to be read from a disk.
    """

    namespace: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    nodes: list[NodePrefix]
    chunks: list[PromptChunk]
    disk_tokens: int = 0

    @property
    def keys(self) -> list[bytes]:
        """The keys of all chunks that it needs, as `Cluster.pin`, `prefetch` and `move` take
        them: of windows and states those at its end, and where it can be loaded now.
        """
        return [chunk.key for chunk in self.chunks if chunk.is_needed]


class Explanation(msgspec.Struct, frozen=True):
    """A record as the NodeActor of its engine tells it; `age_s` is since it heard of it.

    `nearest_is_cached`: whether the node has the chunk `nearest` of the record's parting now.
    `hint`: what a hint of a request did to the chunk that was missing, a sentence's end; empty:
    nothing that is known.
    """

    record: engine.MissRecord
    engine_id: str
    node_id: str
    namespace: str
    model: str
    age_s: float
    nearest_is_cached: bool = False
    hint: str = ""


class Explanations(msgspec.Struct, frozen=True):
    """What became of all requests whose ids were asked for, newest first.

    `num_known` requests are remembered at all.
    """

    found: list[Explanation] = []
    num_known: int = 0


class RequestPage(msgspec.Struct, frozen=True):
    """Requests of a node that have ended, the oldest first; they are numbered from 1 in a life of
    its NodeActor.

    `first` is the number of the first one in `found`, `last` that of the newest that is known.
    """

    life: int
    first: int
    last: int
    found: list[Explanation] = []


class EndedRequests(msgspec.Struct, frozen=True):
    """Requests that have ended, all over the cluster, the oldest first.

    `following` is the place behind those that are in `found`, `last` the one behind all that are
    known: a later question goes on there. While they differ there are more.
    """

    found: list[Explanation] = []
    following: str = ""
    last: str = ""
