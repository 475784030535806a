"""What a request's body begins with, in digests: cheap enough to be made for every request.

A body is not parsed, and nothing is tokenised. From its messages or its prompt on, it is cut where
every other body is cut, too: every 256 bytes at first, later at a sixteenth of the way so far.

    0   256  512  ...  4096   4608  ...  8192    9216  ...  bytes

So even the longest prompt has some hundred digests, and what two bodies share is known to a
sixteenth of it. Each digest names all bytes before its end, and the model that is asked. Digests
differ from process to process; they are hints for a router and name no KV.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from raykv.serve.http.exchange import CHAT, MESSAGES, RESPONSES

FIRST_BYTES = 256
PARTS = 16
"""Stretches until their length doubles."""

BYTES_PER_TOKEN = 4.0
"""About, in English text."""

_BEGIN = re.compile(rb'"(?:messages|prompt)"\s*:')
_BEGINS = {
    MESSAGES: re.compile(rb'"(?:messages|system)"\s*:'),
    RESPONSES: re.compile(rb'"(?:input|instructions)"\s*:'),
}
_BILLING = re.compile(rb'"x-anthropic-billing-header[^"]*"')
"""Claude Code writes one that differs with each request, and vLLM leaves it out of the prompt."""

_TRAITS = re.compile(rb'"(?:model|cache_salt)"\s*:\s*"[^"]*"')
_END_BYTES = 1024
"""Of a body's end, in which what stands behind the messages is looked for."""


@dataclass(frozen=True, slots=True)
class Trail:
    """A prompt's first digests; `ends` are where in the prompt each one ends, in tokens.

    `num_tokens` is the whole prompt's length. Both are estimates.
    """

    digests: Sequence[Hashable]
    ends: Sequence[float]
    num_tokens: float

    def unknown(self, number: int) -> float:
        """Tokens behind the first digests."""
        return self.num_tokens - self.ends[number - 1] if number else self.num_tokens

    def tokens(self, numbers: Mapping[str, int], num_tokens: float) -> dict[str, float]:
        """Tokens of the first digests, by how many those are, if the prompt has `num_tokens`."""
        scale = num_tokens / max(1.0, self.num_tokens)
        return {name: scale * self.ends[number - 1] for name, number in numbers.items() if number}


def read_trail(body: bytes, path: str = CHAT) -> Trail:
    """The trail of a body of that route; without messages or a prompt, that of all of it."""
    if path == MESSAGES:
        body = _BILLING.sub(b"", body)
    found = _BEGINS.get(path, _BEGIN).search(body)
    begin = found.start() if found else 0
    traits = _TRAITS.findall(body[:begin]) + _TRAITS.findall(
        body[max(begin, len(body) - _END_BYTES) :]
    )
    digest = hash(tuple(sorted(traits)))
    digests: list[Hashable] = []
    ends: list[float] = []
    for start, end in stretches(len(body) - begin):
        digest = hash((digest, body[begin + start : begin + end]))
        digests.append(digest)
        ends.append(end / BYTES_PER_TOKEN)
    return Trail(digests, ends, (len(body) - begin) / BYTES_PER_TOKEN)


def stretches(num_bytes: int) -> list[tuple[int, int]]:
    """Where stretches begin and end, the whole ones."""
    found, at, size = [], 0, FIRST_BYTES
    while at + size <= num_bytes:
        found.append((at, at + size))
        at += size
        if at >= 2 * PARTS * size:
            size *= 2
    return found
