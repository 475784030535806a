"""RayKV: vLLM's KV cache in the RAM of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.client import Cluster, clear, connect, events
    from raykv.core.replay import Replay
    from raykv.event_types import (
        BlockRemoved,
        BlockStored,
        CacheCleared,
        EpochBegan,
        Event,
        EventsMissed,
        NodeJoined,
        NodeLost,
    )

__version__ = "0.1.0"

_CLIENT = ("Cluster", "clear", "connect", "events")
_EVENTS = (
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "EpochBegan",
    "Event",
    "EventsMissed",
    "NodeJoined",
    "NodeLost",
)

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "Cluster",
    "EpochBegan",
    "Event",
    "EventsMissed",
    "NodeJoined",
    "NodeLost",
    "Replay",
    "__version__",
    "clear",
    "connect",
    "events",
]


def __getattr__(name: str) -> Any:
    """Import the client, and with it Ray, only when it is asked for."""
    if name in _CLIENT:
        from raykv import client

        return getattr(client, name)
    if name in _EVENTS:
        from raykv import event_types

        return getattr(event_types, name)
    if name == "Replay":
        from raykv.core.replay import Replay

        return Replay
    raise AttributeError(f"module 'raykv' has no attribute {name!r}")
