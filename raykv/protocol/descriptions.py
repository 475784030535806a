"""What is inside of chunks, in tokens, and what the chunks of a namespace are."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from raykv.base.ids import MAX_KEY_BYTES
from raykv.protocol import columns

_TOKEN_BYTES = 4


class Description(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
        return array("I", self.tokens).tolist()

    @property
    def block_hashes(self) -> list[bytes]:
        """vLLM's hashes of the chunk's blocks, in order; the last one names the chunk."""
        last = self.key[:-4]
        inner = self.inner
        # A key that is not vLLM's may be all KV group.
        step = len(last) or 1
        return [*(inner[i : i + step] for i in range(0, len(inner), step)), last]

    @property
    def num_bytes(self) -> int:
        """About how many bytes it takes in memory or in a message."""
        names = len(self.namespace) + len(self.model) + len(self.kind) + len(self.lora or "")
        parent = 0 if self.parent is None else len(self.parent)
        return names + len(self.key) + parent + len(self.inner) + len(self.tokens)


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as `Description.tokens` has them.

    Raises:
        OverflowError: one of them is negative, or takes more than four bytes.
    """
    return array("I", token_ids).tobytes()


class Descriptions(msgspec.Struct, frozen=True, array_like=True):
    """Those of some chunks, in the order in which these were asked for."""

    rows: Annotated[list[Description], msgspec.Meta(max_length=columns.MAX_KEYS)] = []


def check_description(row: Description) -> None:
    """Refuse what is invalid with a MessageError."""
    lengths = [len(row.key), *([] if row.parent is None else [len(row.parent)])]
    columns.check_numbers("lengths of keys", lengths, 1, MAX_KEY_BYTES)
    columns.check_names("a name", (row.namespace, row.model, row.kind, row.lora or ""))
    columns.check_numbers("block sizes", [row.block_size], 1, columns.MAX_BLOCK_TOKENS)
    columns.require(is_whole(row), "a description whose parts don't fit together")


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
