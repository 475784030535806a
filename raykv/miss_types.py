"""What became of a request's prompt tokens: structs that cross processes, as in `messages.py`."""

from __future__ import annotations

import msgspec


class MissRecord(msgspec.Struct, frozen=True, array_like=True):
    """One finished request. `prompt` = `own` + `loaded` + the sum of `missed`, all in tokens.

    `own` were in vLLM's own cache, `missed` has those that were computed, by `MissReason`.
    `missing` is the key of the chunk that decided over those behind it, empty where none did. Of
    the `loaded` ones `fetched` were on another node.
    """

    request_id: str
    prompt: int
    own: int
    loaded: int
    missed: dict[str, int] = {}
    missing: bytes = b""
    fetched: int = 0


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
