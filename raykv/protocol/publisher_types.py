"""The publisher of events: how it is set up, and what it says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True)
class PublisherSettings:
    """See the settings `events_...`; `endpoint` and `replay_endpoint` are ZMQ's."""

    endpoint: str
    replay_endpoint: str = ""
    topic: str = "kv@{node}@{model}"
    form: str = "map"
    hashes: str = "int"


class PublisherStatus(msgspec.Struct, frozen=True):
    """What the publisher does, since its start; `error` says why it does nothing.

    `endpoint` and `replay_endpoint` are as they were bound. `held`: chunks that subscribers were
    told of; `waiting`: those that are not told yet; `undescribed` were told as a bare hash,
    `skipped` not at all. `restarts`: how often all was taken back and told again.
    `dropped` messages did not fit before a subscriber that was too slow.
    """

    endpoint: str
    replay_endpoint: str
    topic: str
    format: str
    hashes: str
    pid: int
    streams: int = 0
    held: int = 0
    waiting: int = 0
    messages: int = 0
    undescribed: int = 0
    skipped: int = 0
    restarts: int = 0
    dropped: int = 0
    replays: int = 0
    error: str = ""
