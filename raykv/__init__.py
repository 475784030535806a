"""RayKV: vLLM's KV cache in the RAM of a Ray cluster."""

from __future__ import annotations

import logging
import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from raykv.base.version import __version__

if TYPE_CHECKING:
    from raykv.client.capacity import Plan
    from raykv.client.cluster import Cluster, clear, connect, events, hidden_states
    from raykv.node.states.file import HiddenStates, cleanup_hidden_states, load_hidden_states
    from raykv.prompts.block_hashes import PromptTraits
    from raykv.protocol.events import (
        BlockRemoved,
        BlockStored,
        CacheCleared,
        Event,
        EventsMissed,
        LifeBegan,
        NodeJoined,
        NodeLost,
    )
    from raykv.protocol.reader import Chunk, PromptLookup
    from raykv.serve.plan import plan
    from raykv.stream.replay import Replay

if "ipykernel" in sys.modules:
    # Notebooks print in red what Ray says where ipywidgets are missing, and what torchvision says
    # without its compiled part, when they are imported. Nothing here needs either.
    warnings.filterwarnings("ignore", "IProgress not found")
    warnings.filterwarnings("ignore", "Failed to load image Python extension")
    logging.getLogger("ray.widgets.util").setLevel(logging.WARNING)

_CLIENT = ("Cluster", "clear", "connect", "events", "hidden_states")
_EVENTS = (
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "Event",
    "EventsMissed",
    "LifeBegan",
    "NodeJoined",
    "NodeLost",
)

_OTHERS = {
    "Chunk": "raykv.protocol.reader",
    "HiddenStates": "raykv.node.states.file",
    "Plan": "raykv.client.capacity",
    "PromptLookup": "raykv.protocol.reader",
    "PromptTraits": "raykv.prompts.block_hashes",
    "Replay": "raykv.stream.replay",
    "cleanup_hidden_states": "raykv.node.states.file",
    "load_hidden_states": "raykv.node.states.file",
    "plan": "raykv.serve.plan",
}

__all__ = [
    "BlockRemoved",
    "BlockStored",
    "CacheCleared",
    "Chunk",
    "Cluster",
    "Event",
    "EventsMissed",
    "HiddenStates",
    "LifeBegan",
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
        from raykv.client import cluster

        return getattr(cluster, name)
    if name in _EVENTS:
        from raykv.protocol import events

        return getattr(events, name)
    if name in _OTHERS:
        return getattr(import_module(_OTHERS[name]), name)
    raise AttributeError(f"module 'raykv' has no attribute {name!r}")
