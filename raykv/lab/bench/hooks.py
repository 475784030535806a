"""Measures, inside of an engine, what RayKV's hooks take on vLLM's own threads.

`watch` wraps the methods of the connector that vLLM calls; it is meant for an engine whose
EngineCore and worker run in the process itself, where both are the main thread. Ray calls that are
issued on that thread while a hook runs are counted.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from typing import Any

SCHEDULER_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
)

WORKER_HOOKS = (
    "handle_preemptions",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)

_times: dict[str, list[float]] = {}
_ray_calls: list[str] = []
_inside = threading.local()


def watch() -> None:
    """Wrap the hooks and Ray's calls; before the engine is made."""
    import ray
    from ray.actor import ActorMethod

    from raykv.vllm.connector import RayKVConnector

    for side, names in (("scheduler", SCHEDULER_HOOKS), ("worker", WORKER_HOOKS)):
        for name in names:
            method = getattr(RayKVConnector, name, None)
            if method is not None:
                setattr(RayKVConnector, name, _timed(f"{side}: {name}", method))
    ActorMethod.remote = _counted("ActorMethod.remote", ActorMethod.remote)
    ray.get = _counted("ray.get", ray.get)


def take() -> dict[str, Any]:
    """Seconds of every call by hook since the last `take`, and the Ray calls inside of hooks."""
    answer = {"seconds": {name: list(some) for name, some in _times.items()}}
    calls = list(_ray_calls)
    _times.clear()
    _ray_calls.clear()
    return {**answer, "ray_calls": calls}


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "hook", None) is not None:
            return method(*args, **kwargs)
        _inside.hook = name
        began = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            _times.setdefault(name, []).append(time.perf_counter() - began)
            _inside.hook = None

    return call


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        hook = getattr(_inside, "hook", None)
        if hook is not None:
            _ray_calls.append(f"{name} in {hook}")
        return function(*args, **kwargs)

    return call
