"""Where prompts part: the first token at which a prompt leaves one that was there before it.

Prompts are remembered chunk by chunk, by the chunk before: chunks with the same one before them are
the ways in which prompts have gone on from there. A prompt's first chunk that is not among them has
left the others at the token behind the longest beginning that it shares with one of them.

An engine remembers what went through it, and knows nothing of other engines' prompts.

Invariants:
1. The bytes that are counted are those of the chunks that are remembered, never above the bound.
2. A chunk is forgotten before the one before it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from raykv.protocol.engine import Parting

MEMORY_BYTES = 32 << 20
"""In each engine: some 32,000 chunks of 128 tokens, or 57,000 of 16."""

MAX_CHUNKS = 4096
"""Of one prompt that are looked at: about 0.5 ms of vLLM's scheduler."""

MAX_NEW = 128
"""Chunks of one prompt that are remembered at once: about 0.3 ms of vLLM's scheduler. The rest of a
longer one follows when it comes again."""

MAX_WAYS = 32
"""Ways on from a chunk that are remembered, the latest used; prompts that differ in a date have
many.
"""

CONTEXT_BEFORE, CONTEXT_AFTER = 16, 8
"""Tokens that are shown of a parting."""

ROW_BYTES = 520
"""That Python's objects take for a chunk beside its tokens."""


@dataclass(slots=True)
class _Chunk:
    parent: bytes
    tokens: array[int]
    used_at: int = 0

    @property
    def num_bytes(self) -> int:
        return len(self.tokens) * self.tokens.itemsize + ROW_BYTES


@dataclass(frozen=True)
class PassingPrompt:
    """A prompt, and the answer to it.

    `keys` are those of its whole chunks in order, those of generated tokens too, of `chunk_tokens`
    tokens each. `num_whole` chunks are the prompt's alone, and `num_found` of them were cached.
    """

    keys: Sequence[bytes]
    tokens: Sequence[int]
    chunk_tokens: int
    num_whole: int
    num_found: int

    def chunk(self, at: int) -> array[int]:
        """Tokens of a chunk."""
        return array("I", self.tokens[at * self.chunk_tokens : (at + 1) * self.chunk_tokens])


class Partings:
    """See the module's docstring. For the engine's thread alone."""

    def __init__(self, most_bytes: int = MEMORY_BYTES) -> None:
        self._most_bytes = most_bytes
        # The oldest use first.
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        # By the chunk before (none: empty), the oldest first; only of chunks that are remembered.
        self._ways: dict[bytes, list[bytes]] = {}
        self.num_bytes = 0
        self._num_passed = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def pass_by(self, prompt: PassingPrompt) -> Parting | None:
        """A prompt comes by, and is one of those that were there from now on.

        Returns:
            Where it leaves those before it; None: nowhere, or none is known that it could leave.
        """
        self._num_passed += 1
        keys = prompt.keys[:MAX_CHUNKS]
        known = next((at for at, key in enumerate(keys) if key not in self._chunks), len(keys))
        first = max(known, prompt.num_found)
        is_new = first < min(prompt.num_whole, len(keys))
        parting = self._parting(prompt, keys, first) if is_new else None
        last = min(len(keys), known + MAX_NEW)
        for at in range(known, last):
            self._add(keys[at], keys[at - 1] if at else b"", prompt.chunk(at))
        # So that the beginning is forgotten last.
        for key in reversed(keys[:last]):
            self._chunks.move_to_end(key)
            self._chunks[key].used_at = self._num_passed
        self._forget()
        return parting

    def _parting(self, prompt: PassingPrompt, keys: Sequence[bytes], at: int) -> Parting | None:
        ways = self._ways.get(keys[at - 1] if at else b"", ())
        if not ways:
            return None
        own = prompt.chunk(at)
        nearest = max(reversed(ways), key=lambda way: _num_shared(own, self._chunks[way].tokens))
        other = self._chunks[nearest].tokens
        shared = _num_shared(own, other)
        begin = at * prompt.chunk_tokens + shared
        return Parting(
            at=begin,
            nearest=nearest,
            is_same=shared == len(own),
            before=[*prompt.tokens[max(0, begin - CONTEXT_BEFORE) : begin]],
            own=[*prompt.tokens[begin : begin + CONTEXT_AFTER]],
            other=[*other[shared : shared + CONTEXT_AFTER]],
        )

    def _add(self, key: bytes, parent: bytes, tokens: array[int]) -> None:
        chunk = _Chunk(parent, tokens, self._num_passed)
        self._chunks[key] = chunk
        self.num_bytes += chunk.num_bytes
        ways = self._ways.setdefault(parent, [])
        ways.append(key)
        if len(ways) > MAX_WAYS:
            self._drop(min(ways, key=lambda way: self._chunks[way].used_at))

    def _forget(self) -> None:
        while self.num_bytes > self._most_bytes:
            self._drop(next(iter(self._chunks)))

    def _drop(self, key: bytes) -> None:
        """Forget a chunk and all behind it."""
        going = [key]
        while going:
            name = going.pop()
            chunk = self._chunks.pop(name)
            self.num_bytes -= chunk.num_bytes
            ways = self._ways[chunk.parent]
            ways.remove(name)
            if not ways:
                del self._ways[chunk.parent]
            going += self._ways.get(name, ())

    def check(self) -> None:
        """Assert the invariants; for tests."""
        chunks = self._chunks
        assert self.num_bytes == sum(chunk.num_bytes for chunk in chunks.values())
        assert self.num_bytes <= self._most_bytes, self.num_bytes
        assert all(not each.parent or each.parent in chunks for each in chunks.values())
        ways = sorted(key for keys in self._ways.values() for key in keys)
        assert ways == sorted(chunks), ways


def _num_shared(one: array[int], other: array[int]) -> int:
    """How long a beginning both have."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[:middle] == other[:middle]:
            least = middle
        else:
            most = middle - 1
    return least
