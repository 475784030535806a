"""Measures, inside an engine, the time of RayKV's hooks on vLLM's own threads.

`watch` wraps the methods of the connector that vLLM calls; it is meant for an engine whose
EngineCore and worker run in the process itself, where both are the main thread. Ray calls that are
issued on that thread while a hook runs are counted. Of each call it is known how long its thread
was on a processor, how long it waited for one, and how long it collected garbage. What is left is
waiting for locks: the interpreter's own, since a hook takes no other for long.
"""

from __future__ import annotations

import functools
import gc
import os
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

_PARTS = ("seconds", "on_cpu", "in_queue", "in_gc")

_times: dict[str, dict[str, list[float]]] = {part: {} for part in _PARTS}
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
    gc.callbacks.append(_note_collection)


def take() -> dict[str, Any]:
    """Of every call since the last `take`, by hook: its `seconds`, and of them those `on_cpu`,
    `in_queue` for a processor, and `in_gc`. And the Ray calls inside of hooks.
    """
    answer: dict[str, Any] = {what: dict(by_hook) for what, by_hook in _times.items()}
    calls = list(_ray_calls)
    for by_hook in _times.values():
        by_hook.clear()
    _ray_calls.clear()
    return {**answer, "ray_calls": calls}


def _queued_s() -> float:
    """How long this thread has waited for a processor since it began."""
    if getattr(_inside, "schedstat", None) is None:
        _inside.schedstat = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    return int(os.pread(_inside.schedstat, 100, 0).split()[1]) * 1e-9


def _note_collection(phase: str, _info: dict[str, int]) -> None:
    """Garbage is collected by the thread that makes objects."""
    if phase == "start":
        _inside.began = time.perf_counter()
    else:
        now = time.perf_counter()
        _inside.collected = (
            getattr(_inside, "collected", 0.0) + now - getattr(_inside, "began", now)
        )


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "hook", None) is not None:
            return method(*args, **kwargs)
        _inside.hook = name
        _inside.collected = 0.0
        queued = _queued_s()
        began, began_cpu = time.perf_counter(), time.thread_time()
        try:
            return method(*args, **kwargs)
        finally:
            ended_cpu, ended = time.thread_time(), time.perf_counter()
            queued = _queued_s() - queued
            parts = (ended - began, ended_cpu - began_cpu, queued, _inside.collected)
            for part, value in zip(_PARTS, parts, strict=True):
                _times[part].setdefault(name, []).append(value)
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
