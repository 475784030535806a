"""What an engine says of its requests, and what the user calls its weights."""

from __future__ import annotations

import msgspec

from raykv.base.ids import Stamp, TokenSource
from raykv.base.tenants import is_label
from raykv.protocol.columns import (
    MAX_NUMBER,
    Keys,
    check_keys,
    check_names,
    check_numbers,
    require,
)
from raykv.protocol.named.columns import Count, Text

CHUNK_NAME_BYTES = 8
"""Bytes of a chunk's key in a record. Two of a million chunks share them with a probability of
3e-8.
"""

MAX_NAMES_BYTES = 32 << 10
"""Of chunks' names in the records that wait to be told; further requests have none, or those
of their first chunks."""

MAX_SHOWN_TOKENS = 64
"""Of each part of a prompt that a `Parting` shows."""


class Parting(msgspec.Struct, frozen=True, array_like=True):
    """A prompt shares its first `at` tokens with one that was there, and no more.

    `nearest` is the key of the other's chunk there. If `is_same`, that chunk has the same tokens:
    what differs is the salt, the adapter or the media. `before` are the last tokens that both have;
    then come `own` tokens, and in the other prompt `other` ones: none, unless the server allows it.
    """

    at: int
    nearest: bytes
    is_same: bool = False
    before: list[int] = []
    own: list[int] = []
    other: list[int] = []


def _parting(parting: Parting) -> None:
    check_numbers("a token's place", (parting.at,), 0, MAX_NUMBER)
    check_keys("a chunk of a prompt", [parting.nearest])
    for tokens in (parting.before, parting.own, parting.other):
        require(len(tokens) <= MAX_SHOWN_TOKENS, f"{len(tokens)} tokens of a prompt")
        check_numbers("tokens of a prompt", tokens, 0, MAX_NUMBER)


class MissRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished request. `prompt` = `own` + `loaded` + the sum of `missed`, all in tokens.

    `own` were in vLLM's own cache, `missed` has those that were computed, by `MissReason`.
    `missing` is the key of the chunk that decided over those behind it, empty where none did. Of
    the `loaded` ones `fetched` were on another node, and `disk` on a disk.
    `chunks` are the names of its chunks, of generated tokens too, as far as they are known: the
    first `CHUNK_NAME_BYTES` of each key. A chunk has `chunk_tokens` tokens. `parting`: where the
    prompt leaves the nearest one that was there, if that is known. `tenant`: the label of whose
    request it was, empty if it had none. `ignored`: what it asked for and was not done, with why.
    """

    request_id: str
    prompt: int
    own: int
    loaded: int
    missed: dict[str, int] = {}
    missing: bytes = b""
    chunks: bytes = b""
    chunk_tokens: int = 0
    fetched: int = 0
    disk: int = 0
    parting: Parting | None = None
    tenant: str = ""
    ignored: dict[str, str] = {}


MAX_IGNORED = 8
"""Keys of a request of which it is said that they are ignored."""


def tokens_by_source(record: MissRecord) -> dict[TokenSource, int]:
    """The prompt's tokens; the sum is the prompt's length."""
    return {
        TokenSource.COMPUTED: sum(record.missed.values()),
        TokenSource.OWN_CACHE: record.own,
        TokenSource.SAME_NODE: record.loaded - record.fetched - record.disk,
        TokenSource.OTHER_NODE: record.fetched,
        TokenSource.DISK: record.disk,
    }


def check_record(record: MissRecord) -> None:
    """Refuse what is invalid with a MessageError."""
    check_names("a request's id", (record.request_id,))
    require(len(record.ignored) <= MAX_IGNORED, f"{len(record.ignored)} ignored keys")
    check_names("what a request asked for", [*record.ignored, *record.ignored.values()])
    label = record.tenant
    require(not label or is_label(label), f"a tenant's label of {len(label)} characters")
    num_bytes = len(record.chunks)
    is_cut = num_bytes % CHUNK_NAME_BYTES == 0 and num_bytes <= MAX_NAMES_BYTES
    require(is_cut, f"{num_bytes} bytes of chunks' names")
    check_numbers("tokens of a request", (record.prompt, record.chunk_tokens), 0, MAX_NUMBER)
    if record.parting is not None:
        _parting(record.parting)


class Hints(msgspec.Struct, frozen=True, array_like=True):
    """What requests wish for their prompts' chunks: not to be evicted for so many seconds
    (`pinned`, `pin_s`), or to be evicted after those of lower priority (`favoured`, `priorities`).
    """

    pinned: Keys = Keys()
    pin_s: list[float] = []
    favoured: Keys = Keys()
    priorities: list[int] = []


class Space(msgspec.Struct, frozen=True):
    """A namespace, and what it is a digest of: `traits` as in `EngineHello`."""

    namespace: str
    traits: dict[str, str] = {}


class Naming(msgspec.Struct, frozen=True, array_like=True):
    """What the user calls the weights of an EngineCore, by the order of that number: those that it
    has had since they changed for the `weights`-th time.
    """

    stamp: Stamp
    version: Text
    weights: Count = 0
