"""What vLLM's EngineCore does and tells no connector: its methods are wrapped in its process.

vLLM empties its own cache before a sleep and with a pause, and has connectors do the same, by the
call that a user's `reset_prefix_cache(reset_connector=True)` makes too. Which of the two it is only
the caller knows.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

logger = logging.getLogger("raykv")

RESETS = "_reset_caches"
"""Of EngineCore, by sleep, pause and the release of the KV cache's memory alone."""

# How many of these calls are under way in this process, on EngineCore's one thread.
_resting = 0


def is_resting() -> bool:
    """Whether vLLM empties caches because the engine is to rest, not because a user wants it."""
    return _resting > 0


def watch_rests() -> None:
    """From now on `is_resting` is right; a second call changes nothing.

    With a vLLM that does this otherwise it stays False: then a rest empties the cache of all
    engines, which is wasteful and right.
    """
    from vllm.v1.engine.core import EngineCore

    method = getattr(EngineCore, RESETS, None)
    if method is None:
        logger.warning(
            "this vLLM rests in an unknown way: sleep and pause empty the cache of all engines"
        )
    elif not hasattr(method, "__wrapped__"):
        setattr(EngineCore, RESETS, _resting_while(method))


def _resting_while(method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        global _resting
        _resting += 1
        try:
            return method(*args, **kwargs)
        finally:
            _resting -= 1

    return call
