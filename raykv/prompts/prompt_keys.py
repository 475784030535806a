"""A prompt's keys for routing: what was hashed lately is not hashed again.

The turns of a conversation, and prompts with the same instructions, begin alike. Hashes are kept by
stretches of blocks, each under a digest of all tokens up to its end, of what else separates prompts
and of how the engines hash.

Not thread-safe. Invariant: at most `most_stretches` are kept; the longest unused goes first.
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
from raykv.protocol.groups import ChunkGroup

BLOCKS_OF_A_STRETCH = 16
MOST_STRETCHES = 8192
"""Some 10 MiB: 2 million tokens in blocks of 16."""


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """A prompt as an engine gets it."""

    tokens: Sequence[int]
    traits: PromptTraits


@dataclass(frozen=True, slots=True)
class PromptKeys:
    """A prompt's length in tokens, and the keys of its first chunks by KV group."""

    num_tokens: int
    keys: dict[ChunkGroup, list[Key]]


class PromptHasher:
    """Keys of prompts, for engines that hash as `scheme` says."""

    def __init__(self, scheme: PromptScheme, most_stretches: int = MOST_STRETCHES) -> None:
        self.scheme = scheme
        self._most = most_stretches
        self._known: OrderedDict[bytes, list[bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def keys(self, prompt: PromptTokens, most_keys: int) -> PromptKeys:
        """The first keys of a prompt, at most so many, evenly over the KV groups."""
        hashes = self._hashes(prompt.tokens[: self._covered(most_keys)], prompt.traits)
        size = self.scheme.hashing.tokens_per_hash
        keys = {
            group: chunk_keys(hashes, group.tokens // size, group.group)
            for group in self.scheme.groups
        }
        return PromptKeys(len(prompt.tokens), keys)

    def _covered(self, most_keys: int) -> int:
        """The tokens whose chunks have that many keys at most."""
        return int(most_keys / sum(1 / group.tokens for group in self.scheme.groups))

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
            hashes = self._known.get(name)
            if hashes is None:
                hashes = block_hashes(part, hashing, traits, parent)
                self._keep(name, hashes)
            else:
                self._known.move_to_end(name)
            found += hashes
            parent = hashes[-1]
        return found

    def _keep(self, name: bytes, hashes: list[bytes]) -> None:
        self._known[name] = hashes
        if len(self._known) > self._most:
            self._known.popitem(last=False)
