"""What became of a request's prompt tokens: structs that cross processes, as in `messages.py`."""

from __future__ import annotations

import msgspec

CHUNK_NAME_BYTES = 8
"""Of a chunk's key in a record. That any two of a million chunks share a name has a probability of
3e-8."""


class MissRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished request. `prompt` = `own` + `loaded` + the sum of `missed`, all in tokens.

    `own` were in vLLM's own cache, `missed` has those that were computed, by `MissReason`.
    `missing` is the key of the chunk that decided over those behind it, empty where none did. Of
    the `loaded` ones `fetched` were on another node, and `disk` on a disk.
    `chunks` are the names of its chunks, of generated tokens too, as far as they were told: the
    first `CHUNK_NAME_BYTES` of each key. A chunk has `chunk_tokens` tokens.
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


class Explanation(msgspec.Struct, frozen=True):
    """A record as the scheduler actor tells it; `age_s` is since it heard of it."""

    record: MissRecord
    engine_id: str
    node_id: str
    namespace: str
    model: str
    age_s: float


class Explanations(msgspec.Struct, frozen=True):
    """Those of all requests whose ids were asked for, newest first.

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
