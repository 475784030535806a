"""What is inside of chunks, in tokens, and what the chunks of a namespace are."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from raykv.base.ids import MAX_KEY_BYTES
from raykv.protocol.columns import (
    MAX_BLOCK_TOKENS,
    check_keys,
    check_names,
    check_numbers,
    check_rows,
    numbered,
    require,
)

_TOKEN_BYTES = 4


class Description(msgspec.Struct, frozen=True, gc=False):
    """One chunk in words of vLLM.

    `key` is vLLM's offload key, `parent` the hash of the block before the chunk (None at the
    beginning of a prompt), `inner` the hashes of the chunk's blocks but the last, back to back:
    that one is the key's. `tokens` are unsigned numbers of four bytes, little endian. `kind` is
    vLLM's name for the KV group's kind of attention, `lora` the adapter's name, if there is one.
    """

    namespace: str
    key: bytes
    parent: bytes | None
    inner: bytes
    tokens: bytes
    block_size: int
    model: str = ""
    kind: str = ""
    lora: str | None = None

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the chunk, in order."""
        numbers = array("I", self.tokens)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's hashes of the chunk's blocks, in order; the last one names the chunk."""
        last = self.key[:-4]
        inner = self.inner
        step = len(last)
        return [*(inner[i : i + step] for i in range(0, len(inner), step)), last]

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes in memory or in a message; the names are shared."""
        parent = 0 if self.parent is None else len(self.parent)
        return len(self.key) + parent + len(self.inner) + len(self.tokens)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as `Description.tokens` has them.

    Raises:
        OverflowError: one of them is negative, or takes more than four bytes.
    """
    numbers = array("I", token_ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


class Descriptions(msgspec.Struct, frozen=True, array_like=True):
    """Columns of `Description`s; columns called `…_index` point into `names`, where "" stands for
    no name. A chunk without a parent has an empty one.
    """

    names: list[str] = []
    namespace_index: list[int] = []
    keys: list[bytes] = []
    parents: list[bytes] = []
    inner: list[bytes] = []
    tokens: list[bytes] = []
    block_sizes: list[int] = []
    model_index: list[int] = []
    kind_index: list[int] = []
    lora_index: list[int] = []

    def __len__(self) -> int:
        return len(self.keys)


def check_descriptions(page: Descriptions) -> None:
    """Refuse an invalid page of descriptions with a MessageError."""
    check_keys("keys of descriptions", page.keys)
    check_rows("descriptions", page.keys, page.parents, page.inner, page.tokens)
    check_rows("descriptions", page.keys, page.block_sizes, page.namespace_index, page.model_index)
    check_rows("descriptions", page.keys, page.kind_index, page.lora_index)
    check_names("a name", page.names)
    for index in (page.namespace_index, page.model_index, page.kind_index, page.lora_index):
        check_numbers("numbers of names", index, 0, len(page.names) - 1)
    check_numbers("block sizes", page.block_sizes, 1, MAX_BLOCK_TOKENS)
    check_numbers("lengths of parents", set(map(len, page.parents)), 0, MAX_KEY_BYTES)
    require(all(map(is_whole, rows_of(page))), "a description whose parts don't fit together")


def page_of(rows: Sequence[Description]) -> Descriptions:
    """Descriptions as columns."""
    names: list[str] = []
    return Descriptions(
        namespace_index=numbered(names, [row.namespace for row in rows]),
        keys=[row.key for row in rows],
        parents=[row.parent or b"" for row in rows],
        inner=[row.inner for row in rows],
        tokens=[row.tokens for row in rows],
        block_sizes=[row.block_size for row in rows],
        model_index=numbered(names, [row.model for row in rows]),
        kind_index=numbered(names, [row.kind for row in rows]),
        lora_index=numbered(names, [row.lora or "" for row in rows]),
        names=names,
    )


def rows_of(page: Descriptions) -> Iterator[Description]:
    """The rows of a page that has been checked."""
    names = page.names
    columns = zip(
        page.namespace_index,
        page.keys,
        page.parents,
        page.inner,
        page.tokens,
        page.block_sizes,
        page.model_index,
        page.kind_index,
        page.lora_index,
        strict=True,
    )
    for namespace, key, parent, inner, tokens, size, model, kind, lora in columns:
        yield Description(
            names[namespace],
            key,
            parent or None,
            inner,
            tokens,
            size,
            names[model],
            names[kind],
            names[lora] or None,
        )


def is_whole(row: Description) -> bool:
    """Whether the parts of a description fit together: as many tokens as its blocks have."""
    step = len(row.key) - 4
    if step <= 0 or len(row.inner) % step or len(row.tokens) % _TOKEN_BYTES:
        return False
    num_blocks = len(row.inner) // step + 1
    return len(row.tokens) == num_blocks * row.block_size * _TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """A KV group: the tokens of its chunks, and how many chunks it looks back (None: to the
    beginning).
    """

    group: int
    tokens: int
    window: int | None = None


def groups_text(groups: Sequence[ChunkGroup]) -> str:
    """`groups` in a short text: "0:128" is group 0 with chunks of 128 tokens, "1:128/8" one that
    looks back 8 chunks.
    """
    return " ".join(
        f"{each.group}:{each.tokens}" + ("" if each.window is None else f"/{each.window}")
        for each in groups
    )


def parse_groups(text: str) -> list[ChunkGroup]:
    """What `groups_text` has written.

    Raises:
        ValueError: it is no such text.
    """
    found = []
    for part in text.split():
        group, _, rest = part.partition(":")
        tokens, _, window = rest.partition("/")
        made = ChunkGroup(int(group), int(tokens), int(window) if window else None)
        if made.group < 0 or made.tokens < 1 or (made.window is not None and made.window < 1):
            raise ValueError(f"a KV group {part!r}")
        found.append(made)
    if not found:
        raise ValueError("no KV group")
    return found
