"""A prompt's keys for routing: what was hashed lately is not hashed again.

The turns of a conversation, and prompts with the same instructions, begin alike. Hashes are kept by
stretches of blocks, each under a digest of all tokens up to its end, of what else separates prompts
and of how the engines hash.

Of a prompt with more chunks than may be asked for, its first ones are. Where windows are needed at
its end that would say nothing, so that every second chunk is asked for, or every fourth: a chunk's
key names all tokens before it, as a larger chunk's would.

    chunks         1   2   3   4   5   6   7   8         window of 4
    of two each        1       2       3       4         window of 2

Not thread-safe. Invariant: at most `MOST_STRETCHES` are kept; the longest unused goes first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from raykv.base.ids import Key
from raykv.prompts.block_hashes import PromptTraits, block_hashes, chunk_keys
from raykv.prompts.lookup import PromptScheme
from raykv.protocol.descriptions import ChunkGroup

BLOCKS_OF_A_STRETCH = 16
MOST_STRETCHES = 8192
"""Some 10 MiB: 2 million tokens in blocks of 16."""

MOST_TIMES = 16
"""So much larger are chunks taken to be at most: hashing takes some 2 microseconds a block."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as an engine gets it."""

    tokens: Sequence[int]
    traits: PromptTraits


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """A prompt's length in tokens, and keys of its chunks by KV group.

    `keys` has one of several groups that are alike, and may have larger chunks than there are.
    """

    num_tokens: int
    keys: dict[ChunkGroup, list[Key]]


class PromptHasher:
    """Keys of prompts, for engines that hash as `scheme` says."""

    def __init__(self, scheme: PromptScheme) -> None:
        self.scheme = scheme
        self._known: OrderedDict[bytes, list[bytes]] = OrderedDict()
        # Groups that are alike are stored, and given up, together.
        kinds = {
            (each.tokens, each.window, each.group in scheme.states): each
            for each in reversed(scheme.groups)
        }
        self._groups = sorted(kinds.values(), key=lambda each: each.group)

    def __len__(self) -> int:
        return len(self._known)

    def keys(self, prompt: PromptTokens, most_keys: int) -> PromptKeys:
        """At most `most_keys` keys of a prompt, evenly over the KV groups."""
        usable = self.scheme.most_loaded(len(prompt.tokens))
        groups = self._groups_for(usable, most_keys)
        covered = min(usable, int(most_keys / sum(1 / group.tokens for group in groups)))
        hashes = self._hashes(prompt.tokens[:covered], prompt.traits)
        size = self.scheme.hashing.tokens_per_hash
        keys = {each: chunk_keys(hashes, each.tokens // size, each.group) for each in groups}
        return PromptKeys(len(prompt.tokens), keys)

    def _groups_for(self, num_tokens: int, most_keys: int) -> list[ChunkGroup]:
        """The KV groups, with chunks so large that those of a prompt are few enough.

        A state is at the end of some chunk or other, and is not found in larger ones; and where all
        is needed from the beginning on, the first chunks say more.
        """
        groups, times = self._groups, 1
        if self.scheme.states or all(group.window is None for group in groups):
            return groups
        while times < MOST_TIMES and sum(num_tokens // each.tokens for each in groups) > most_keys:
            times *= 2
            groups = [_larger(each, times) for each in self._groups]
        return groups

    def _hashes(self, tokens: Sequence[int], traits: PromptTraits) -> list[bytes]:
        hashing = self.scheme.hashing
        stretch = BLOCKS_OF_A_STRETCH * hashing.tokens_per_hash
        digest = hashlib.blake2b(repr(traits).encode(), digest_size=16)
        found: list[bytes] = []
        parent: bytes | None = None
        for start in range(0, len(tokens), stretch):
            part = tokens[start : start + stretch]
            if len(part) < stretch:
                found += block_hashes(part, hashing, traits, parent)
                break
            digest.update(array("q", part).tobytes())
            name = digest.digest()
            hashes = self._known.pop(name, None)
            if hashes is None:
                hashes = block_hashes(part, hashing, traits, parent)
            self._known[name] = hashes
            if len(self._known) > MOST_STRETCHES:
                self._known.popitem(last=False)
            found += hashes
            parent = hashes[-1]
        return found


def _larger(group: ChunkGroup, times: int) -> ChunkGroup:
    """The group, as if several of its chunks were one. A window may end within one of these."""
    window = None if group.window is None else max(1, group.window // times)
    return ChunkGroup(group.group, times * group.tokens, window)
