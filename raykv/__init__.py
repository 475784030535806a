"""RayKV: vLLM's KV cache in the RAM of a Ray cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raykv.client import Cluster, connect

__version__ = "0.1.0"

__all__ = ["Cluster", "__version__", "connect"]


def __getattr__(name: str) -> Any:
    """Import the client, and with it Ray, only when it is asked for."""
    if name in ("Cluster", "connect"):
        from raykv import client

        return getattr(client, name)
    raise AttributeError(f"module 'raykv' has no attribute {name!r}")
