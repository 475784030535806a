"""What the chunks of a namespace are: its KV groups, and the short text in which they are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
