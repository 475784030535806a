"""What changes a model's weights after an engine's start, and how that is noticed. Two places show
it: EngineCore, through which a user's calls reach all workers, and the workers, whose model other
frameworks get hold of and write into. A call that may do anything is judged by what the weights are
before and after it.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

from raykv.vllm.internals.engine import (
    WARM_UP,
    ask_workers,
    connectors_of,
    id_of_configuration,
    models_of,
    worker_class_of,
    wrap,
    wrap_core,
    wrap_load_weights,
)

logger = logging.getLogger("raykv")


class Effect(Enum):
    """The effect of a call on the weights."""

    NONE = "none"
    CHANGES = "changes"
    UNKNOWN = "unknown"


CHANGES = frozenset(
    {
        "finish_weight_update",
        "load_model",
        "reload_weights",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
"""Methods of vLLM's workers: a call of one of them changes the weights."""

HARMLESS = frozenset(
    {
        "check_health",
        "compute_weight_checksums",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "profile",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "wake_up",
    }
)
"""Workers' methods that only read."""

SLEEP = "sleep"
"""From level 2 on the weights are thrown away, and others are loaded later."""

PARTS = 1024
"""Sums of a tensor's parts are compared, so that values that have changed places are seen too."""


def effect_of(
    method: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Effect:
    """What a call of a worker's method, or of a function with a worker, does to the weights."""
    if not isinstance(method, str):
        return Effect.UNKNOWN
    if method in CHANGES:
        return Effect.CHANGES
    if method == SLEEP:
        level = (kwargs or {}).get("level", args[0] if args else 1)
        return Effect.CHANGES if level >= 2 else Effect.NONE
    return Effect.NONE if method in HARMLESS else Effect.UNKNOWN


def checksum(worker: Any) -> str:
    """Digest of all weights of a worker; it runs there and reads each of them once.

    Called by vLLM's `collective_rpc`, which has it take the worker.
    """
    whole = hashlib.sha256()
    for model in models_of(worker):
        for name, tensor in _tensors(model):
            whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            whole.update(_sums(tensor))
    return whole.hexdigest()


def _tensors(model: Any) -> Iterable[tuple[str, Any]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _sums(tensor: Any) -> bytes:
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    wide = torch.int64 if not raw.numel() % 8 and not raw.storage_offset() % 8 else torch.uint8
    values = raw.view(wide)
    whole = values.numel() // PARTS * PARTS
    sums = [values[:whole].view(PARTS, -1).sum(1, dtype=torch.int64)] if whole else []
    sums.append(values[whole:].sum(dtype=torch.int64).reshape(1))
    return bytes(torch.cat(sums).cpu().numpy().tobytes())


# In EngineCore's process


def watch_calls() -> None:
    """From now on connectors learn of users' calls that change weights before the next step,
    through `weights_changed`. A second call changes nothing.
    """
    wrap_core("collective_rpc", _judged)
    for name in (SLEEP, "set_weight_version"):
        wrap_core(name, partial(_told, name))


def _listeners(core: Any) -> list[Any]:
    """Our connectors of an EngineCore."""
    return [each for each in connectors_of(core) if hasattr(each, "weights_changed")]


def _tell(core: Any, what: str) -> None:
    for listener in _listeners(core):
        listener.weights_changed(what)


def _told(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        if name != SLEEP:
            _tell(core, name)
        elif effect_of(name, args, kwargs) is Effect.CHANGES:
            _tell(core, "sleep of level 2")
        return method(core, *args, **kwargs)

    return call


def _judged(method: Any) -> Any:
    @functools.wraps(method)
    def call(
        core: Any,
        called: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        def go() -> Any:
            return method(core, called, timeout, args, kwargs)

        effect = effect_of(called, args, kwargs)
        if effect is Effect.NONE or not _listeners(core):
            return go()
        name = called if isinstance(called, str) else getattr(called, "__name__", "a function")
        if effect is Effect.CHANGES:
            _tell(core, name)
            return go()
        before = _checksums(core)
        try:
            return go()
        finally:
            if before is None or before != _checksums(core):
                _tell(core, name)

    return call


def _checksums(core: Any) -> list[str] | None:
    """Digest of the weights of all workers; None where they cannot be read now."""
    try:
        return ask_workers(core, checksum)
    except Exception as error:
        logger.warning("the weights can't be compared with what they were: %s", error)
        return None


# In a worker's process


class WeightWatch:
    """Whether the weights of a worker's model have changed; `changed` names the first cause."""

    def __init__(self) -> None:
        self.changed = ""

    def note(self, what: str) -> None:
        """They have, or are about to."""
        self.changed = self.changed or what


# By the identity of vLLM's configuration, which a worker and its connector both have.
_watches: dict[int, tuple[Any, WeightWatch]] = {}


def watch_worker(vllm_config: Any) -> WeightWatch:
    """Watch the worker with this configuration, which is at the end of its start."""
    watch = WeightWatch()
    _watches[id(vllm_config)] = (vllm_config, watch)
    worker_class = worker_class_of(vllm_config)
    for name in (*CHANGES, SLEEP):
        wrap(worker_class, name, partial(_noted, name))
    wrap(worker_class, WARM_UP, _watching_model)
    return watch


def _watch_of(worker: Any) -> WeightWatch | None:
    _, watch = _watches.get(id_of_configuration(worker), (None, None))
    return watch


def _noted(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        watch = _watch_of(worker)
        if watch is not None and effect_of(name, args, kwargs) is Effect.CHANGES:
            watch.note(name)
        return method(worker, *args, **kwargs)

    return call


def _watching_model(method: Any) -> Any:
    @functools.wraps(method)
    def call(worker: Any, *args: Any, **kwargs: Any) -> Any:
        done = method(worker, *args, **kwargs)
        watch = _watch_of(worker)
        if watch is not None:
            watch_model(models_of(worker)[0], watch)
        return done

    return call


def watch_model(model: Any, watch: WeightWatch) -> None:
    """Frameworks that train hand a model its new weights without asking vLLM."""
    wrap_load_weights(model, partial(_noted_by, watch))


def _noted_by(watch: WeightWatch, method: Any) -> Any:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        watch.note("load_weights")
        return method(*args, **kwargs)

    return call
