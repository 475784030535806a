"""RayKV: vLLM's KV cache in the RAM of a Ray cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.block_hashes import PromptTraits
    from raykv.captured import HiddenStates, cleanup_hidden_states, load_hidden_states
    from raykv.catalog_types import Chunk, PromptLookup
    from raykv.client import Cluster, clear, connect, events, hidden_states
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
    from raykv.plan_types import Plan
    from raykv.sizing import plan

__version__ = "0.1.0"

_CLIENT = ("Cluster", "clear", "connect", "events", "hidden_states")
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

_OTHERS = {
    "Chunk": "catalog_types",
    "HiddenStates": "captured",
    "Plan": "plan_types",
    "PromptLookup": "catalog_types",
    "PromptTraits": "block_hashes",
    "Replay": "core.replay",
    "cleanup_hidden_states": "captured",
    "load_hidden_states": "captured",
    "plan": "sizing",
}

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "Chunk",
    "Cluster",
    "EpochBegan",
    "Event",
    "EventsMissed",
    "HiddenStates",
    "NodeJoined",
    "NodeLost",
    "Plan",
    "PromptLookup",
    "PromptTraits",
    "Replay",
    "__version__",
    "cleanup_hidden_states",
    "clear",
    "connect",
    "events",
    "hidden_states",
    "load_hidden_states",
    "plan",
]


def __getattr__(name: str) -> Any:
    """Import the client, and with it Ray, only when it is asked for."""
    if name in _CLIENT:
        from raykv import client

        return getattr(client, name)
    if name in _EVENTS:
        from raykv import event_types

        return getattr(event_types, name)
    if name in _OTHERS:
        return getattr(import_module(f"raykv.{_OTHERS[name]}"), name)
    raise AttributeError(f"module 'raykv' has no attribute {name!r}")
