"""What is in the cache: questions about its chunks, pages of answers, and what people get of them.

A listing is asked for page by page, and nothing is kept for it between two pages: a chunk that
stays where it is the whole time is listed exactly once, one that comes or goes meanwhile may be
listed or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

import msgspec

from raykv.base.errors import MessageError
from raykv.base.ids import MAX_KEY_BYTES, Key, group_of
from raykv.protocol.columns import (
    MAX_GROUPS,
    MAX_KEYS,
    MAX_NUMBER,
    MAX_SLOTS,
    Source,
    check_keys,
    check_names,
    check_numbers,
    check_places,
    check_rows,
    require,
)
from raykv.protocol.descriptions import ChunkGroup, parse_groups
from raykv.protocol.engine import MissRecord
from raykv.protocol.status import NamespaceStatus

MAX_PAGE = 1024
"""Chunks in one page: some 80 KiB."""

ORDERS = ("age", "idle", "hits", "size")
"""What chunks may be listed by: the longest there, the longest unused, the most used, the largest
first.
"""

MAX_TEXT = 256
"""Characters of a namespace in a router's question, and of what it says of chunks."""
MAX_CHUNK_TOKENS = 1 << 24

RAM, DISK = TIERS = ("ram", "disk")
"""Where chunks are: in a node's pool, or on its disk."""


class ChunkQuery(msgspec.Struct, frozen=True):
    """A page of a listing is asked for.

    Empty texts and None: all, of every tier. `key` is the beginning of keys. The page has the next
    `limit` chunks at most; with `order` it is for those chunks only that can be among the first
    `limit` of all in that order, and it has all of them out of the slots that it is made from.
    `from_node`, `from_disk` and `from_slot` are where the last page ended: with `from_disk` at a
    place of the node's disk.
    """

    version: int
    namespace: str = ""
    node_id: str = ""
    key: bytes = b""
    group: int | None = None
    order: str = ""
    limit: int = MAX_PAGE
    from_node: str = ""
    from_slot: int = 0
    tier: str = ""
    from_disk: bool = False

    @property
    def place(self) -> tuple[str, bool, int]:
        """Where it goes on; later pages go on later."""
        return self.from_node, self.from_disk, self.from_slot

    @property
    def is_known(self) -> bool:
        """Whether its order and its tier are among those that there are."""
        return self.order in ("", *ORDERS) and self.tier in ("", *TIERS)


def check_chunk_query(query: ChunkQuery) -> None:
    """Refuse an invalid question for chunks with a MessageError."""
    check_names("a name", (query.namespace, query.node_id, query.from_node))
    require(len(query.key) <= MAX_KEY_BYTES, f"a key of {len(query.key)} bytes")
    require(query.is_known, f"the order {query.order!r}, the tier {query.tier!r}")
    check_numbers("a KV group", () if query.group is None else (query.group,), 0, MAX_GROUPS - 1)
    check_numbers("a number of chunks", (query.limit,), 1, MAX_PAGE)
    check_numbers("a slot", (query.from_slot,), 0, MAX_SLOTS - 1)


class ChunkPage(msgspec.Struct):
    """Chunks as columns, filled one after another.

    `node_index` and `namespace_index` point into `nodes` and `namespaces`. `ages` and `idles` are
    seconds since a chunk came to the node and since it was used. `is_on_disk`: it is not in the
    node's pool but on its disk, and its slot is a place there. `tenant_index` points into
    `tenants`, names of whose they are. `from_node`, `from_disk` and `from_slot` ask for the next
    page; there is none if `is_last`.
    """

    version: int
    nodes: list[str] = []
    namespaces: list[str] = []
    models: list[str] = []
    node_index: list[int] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    slots: list[int] = []
    generations: list[int] = []
    slot_bytes: list[int] = []
    ages: list[float] = []
    idles: list[float] = []
    hits: list[int] = []
    is_replicated: list[bool] = []
    is_on_disk: list[bool] = []
    tenants: list[str] = []
    tenant_index: list[int] = []
    from_node: str = ""
    from_slot: int = 0
    from_disk: bool = False
    is_last: bool = True

    @property
    def place(self) -> tuple[str, bool, int]:
        """Where the next page goes on."""
        return self.from_node, self.from_disk, self.from_slot


def check_chunk_page(page: ChunkPage, query: ChunkQuery) -> None:
    """An answer to `query`, which brings the listing on.

    Raises:
        MessageError: it is invalid.
    """
    check_keys("keys of chunks", page.keys)
    check_rows("chunks", page.keys, page.slots, page.node_index, page.namespace_index, page.hits)
    check_rows("chunks", page.keys, page.slot_bytes, page.ages, page.idles)
    check_rows("chunks", page.keys, page.is_replicated, page.is_on_disk)
    check_rows("chunks", page.keys, page.tenant_index)
    check_numbers("numbers of tenants", page.tenant_index, 0, len(page.tenants) - 1)
    check_places("chunks", page.slots, page.generations)
    check_rows("namespaces", page.namespaces, page.models)
    check_numbers("numbers of nodes", page.node_index, 0, len(page.nodes) - 1)
    check_numbers("numbers of namespaces", page.namespace_index, 0, len(page.namespaces) - 1)
    goes_on = page.is_last or page.place > query.place
    require(goes_on, f"a listing that goes from {query.place} to {page.place}")


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk on a node, as the directory believes; the same chunk may be on others too.

    Attributes:
        key: vLLM's offload key: the block hash, then the KV group index in four bytes.
        model: empty if no engine of the namespace has been seen by this scheduler actor.
        num_bytes: of the slot that it is in.
        age_s: since it came to the node, or the scheduler actor began, whichever is later.
        idle_s: since it was used, or came.
        hits: how often an engine of that node loaded it, or computed it again, since then.
        is_replicated: another node has it too; of a chunk on a disk, or this node in its pool.
        tier: "ram" or "disk". Of a chunk on a disk `slot` is its place there; `age_s` and `idle_s`
            are since it was reported to the scheduler actor, and reads are not counted.
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
    slot: int
    generation: int
    tier: str = RAM
    tenant: str = ""

    @property
    def block_hash(self) -> bytes:
        """vLLM's hash of the tokens up to the end of the chunk."""
        return self.key[:-4]


class WhereQuery(msgspec.Struct, frozen=True):
    """Which nodes have these chunks of a namespace?"""

    version: int
    namespace: str
    keys: list[bytes]


def check_where_query(query: WhereQuery) -> None:
    """Refuse an invalid question of where keys are with a MessageError."""
    check_names("a namespace", (query.namespace,))
    require(len(query.keys) <= MAX_KEYS, f"{len(query.keys)} keys")
    check_keys("keys", query.keys)


class WherePage(msgspec.Struct, frozen=True):
    """Where the first `answered` keys of a question are: a row for each replica.

    `key_index` points into the keys that were asked, `source_index` into `sources`.
    """

    version: int
    answered: int = 0
    sources: list[Source] = []
    key_index: list[int] = []
    source_index: list[int] = []


def check_where_page(page: WherePage, query: WhereQuery) -> None:
    """An answer to `query`.

    Raises:
        MessageError: it is invalid.
    """
    check_numbers("answered keys", (page.answered,), min(1, len(query.keys)), len(query.keys))
    check_rows("replicas", page.key_index, page.source_index)
    check_numbers("numbers of sources", page.source_index, 0, len(page.sources) - 1)
    check_numbers("numbers of keys", page.key_index, 0, page.answered - 1)


class PrefixQuery(msgspec.Struct, frozen=True):
    """How much of the beginnings of some prompts does each node have?

    `chunks` says what the chunks of the namespace are, as its traits do. `keys` are those of all
    chunks, prompt by prompt and group by group; `counts` how many each group of each prompt has.
    """

    version: int
    namespace: str
    chunks: str
    keys: list[bytes]
    counts: list[int]


def check_prefix_query(query: PrefixQuery) -> None:
    """Refuse a router's invalid question with a MessageError."""
    require(0 < len(query.namespace) <= MAX_TEXT, f"a namespace {query.namespace[:MAX_TEXT]!r}")
    require(len(query.keys) <= MAX_KEYS, f"{len(query.keys)} keys")
    is_key = all(0 < len(key) <= MAX_KEY_BYTES for key in query.keys)
    require(is_key, f"keys that are empty, or longer than {MAX_KEY_BYTES} bytes")
    require(len(query.chunks) <= MAX_TEXT, f"chunks described in {len(query.chunks)} letters")
    num_groups = len(_groups(query.chunks))
    counts = query.counts
    require(all(0 <= count <= MAX_KEYS for count in counts), f"counts of keys {counts[:4]}")
    require(len(counts) <= MAX_KEYS, f"{len(counts)} counts of keys")
    is_whole = len(counts) % num_groups == 0 and sum(counts) == len(query.keys)
    require(is_whole, f"{len(counts)} counts that do not fit {len(query.keys)} keys")


def _groups(text: str) -> list[ChunkGroup]:
    try:
        groups = parse_groups(text)
    except ValueError as error:
        raise MessageError(f"invalid message: chunks {text!r} ({error})") from error
    names = {group.group for group in groups}
    require(len(names) == len(groups), f"chunks {text!r} with a KV group twice")
    step = lcm(*(group.tokens for group in groups))
    require(step <= MAX_CHUNK_TOKENS, f"chunks {text!r}, which end together every {step} tokens")
    return groups


class PrefixPage(msgspec.Struct, frozen=True):
    """Tokens that can be loaded, from a prompt's beginning on.

    `tokens` has a row for each prompt, with a number for each of `nodes`; a node that is not there
    has nothing. `anywhere`: by prompt, if what one node lacks is fetched from others.
    """

    version: int
    nodes: list[str] = []
    tokens: list[int] = []
    anywhere: list[int] = []


def check_prefix_page(page: PrefixPage, num_prompts: int) -> None:
    """An answer to a question about so many prompts.

    Raises:
        MessageError: it is invalid.
    """
    require(len(page.anywhere) == num_prompts, f"an answer for {len(page.anywhere)} prompts")
    is_table = len(page.tokens) == num_prompts * len(page.nodes)
    require(is_table, f"{len(page.tokens)} numbers for {len(page.nodes)} nodes")
    is_number = all(0 <= count <= MAX_NUMBER for count in (*page.tokens, *page.anywhere))
    require(is_number, "invalid numbers of tokens")


class SpacePage(msgspec.Struct, frozen=True):
    """The namespaces, and for each the nodes on which it has engines now."""

    version: int
    spaces: list[NamespaceStatus] = []
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
        nodes: those that have any of it, the one with the longest prefix first.
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


def chunks_of(page: ChunkPage) -> Iterator[Chunk]:
    """The rows of a page.

    Raises:
        IndexError, ValueError: its columns don't fit together.
    """
    columns = zip(
        page.node_index,
        page.namespace_index,
        page.keys,
        page.slots,
        page.generations,
        page.slot_bytes,
        page.ages,
        page.idles,
        page.hits,
        page.is_replicated,
        page.is_on_disk,
        page.tenant_index,
        strict=True,
    )
    for row in columns:
        node, namespace, key, slot, generation, size, age, idle, hits, replicated, disk, whose = row
        yield Chunk(
            key=key,
            node_id=page.nodes[node],
            namespace=page.namespaces[namespace],
            model=page.models[namespace],
            group=group_of(Key(key)),
            num_bytes=size,
            age_s=age,
            idle_s=idle,
            hits=hits,
            is_replicated=replicated,
            slot=slot,
            generation=generation,
            tier=DISK if disk else RAM,
            tenant=page.tenants[whose],
        )


class Explanation(msgspec.Struct, frozen=True):
    """A record as the scheduler actor tells it; `age_s` is since it heard of it.

    `nearest_is_cached`: whether a node has the chunk `nearest` of the record's parting now.
    `hint`: what a hint of a request did to the chunk that was missing, a sentence's end; empty:
    nothing that is known.
    """

    record: MissRecord
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
    """Requests that have ended, the oldest first; they are numbered from 1 in an epoch.

    `first` is the number of the first one in `found`, `last` that of the newest that is known.
    """

    epoch: int
    first: int
    last: int
    found: list[Explanation] = []
