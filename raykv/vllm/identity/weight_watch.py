"""A worker's weights: how often they have changed since the engine's start, and what they are now.

                    a call that writes them begins        it has ended
    (as they were) ───────────────────────────► being written ───────────► changed, readable or not

They are named by what lies in the worker's memory, so that two engines that were given the same
weights agree, and one that is given its old weights back has its old name again. It can't be told
what the model computes with

* while an update is under way, or after one that failed;
* if the weights are quantized: what was loaded is rewritten, and part of it is in no tensor;
* if a model on a CPU was written past vLLM: its kernels keep copies in an order of their own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import Any
from uuid import uuid4

from raykv.vllm.internals import engine

logger = logging.getLogger("raykv")


class Effect(Enum):
    """The effect of a call on the weights."""

    NONE = "none"
    CHANGES = "changes"
    UNKNOWN = "unknown"


WHOLE = frozenset({"finish_weight_update", "load_model", "reload_weights", "reset_weights"})
"""Methods of vLLM's workers after which all weights are such as vLLM has made them."""

CHANGES = WHOLE | {"start_draft_weight_update", "start_weight_update", "update_weights"}
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

DISCARD = "discard"
"""Gives back the memory of what it is told, which `sleep` does with all."""

WAKE_UP = "wake_up"
"""After it there is memory again, of what it is told or of all."""

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


def _digest_of(tensors: Iterable[tuple[str, Any]]) -> str:
    whole = hashlib.sha256()
    for name, tensor in tensors:
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        whole.update(_sums(tensor))
    return whole.hexdigest()


def _tensors(worker: Any) -> Iterator[tuple[str, Any]]:
    """All weights; what comes of those that a CPU's kernels have in an order of their own."""
    for model in engine.models_of(worker):
        probes = dict(engine.cpu_probes(model))
        for name, tensor in chain(model.named_parameters(), model.named_buffers()):
            if tensor.numel() or name.rpartition(".")[0] not in probes:
                yield name, tensor
        yield from probes.items()


def _sums(tensor: Any) -> bytes:
    import torch

    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    wide = torch.int64 if not raw.numel() % 8 and not raw.storage_offset() % 8 else torch.uint8
    values = raw.view(wide)
    whole = values.numel() // PARTS * PARTS
    sums = [values[:whole].view(PARTS, -1).sum(1, dtype=torch.int64)] if whole else []
    sums.append(values[whole:].sum(dtype=torch.int64).reshape(1))
    return bytes(torch.cat(sums).cpu().numpy().tobytes())


@dataclass(frozen=True)
class WeightState:
    """What a worker says of its weights.

    `watch` is its name and `count` how often they have changed since the start, last by `what`.
    `content` names them, and `first` those of the start; None if that can't be told, and both are
    empty before the first change. `is_open`: an update is under way, and will end.
    """

    watch: str
    count: int = 0
    what: str = ""
    content: str | None = ""
    first: str | None = ""
    is_open: bool = False


class WeightWatch:
    """See the module's docstring; of one worker, on its main thread."""

    def __init__(self, worker: Any = None) -> None:
        self.name = uuid4().hex
        self.count = 0
        self.what = ""
        # Known at the end of the worker's start.
        self.worker = worker
        # Called before the worker's memory is given back, for a while or for good.
        self.before_sleep: Callable[[], object] = lambda: None
        self._first: str | None = ""
        # Whether the weights have no memory: it must not be touched.
        self.is_asleep = False
        self._is_open = False
        self._has_failed = False
        # Past vLLM, since vLLM has last written all weights.
        self._is_written_past = False
        self._depth = 0
        # What they are, and after how many changes that was found.
        self._found: tuple[int, str | None] = (-1, None)

    def note(self, what: str) -> None:
        """Code outside of vLLM is about to write weights, unless vLLM calls it."""
        self.count_change(what)
        self._is_written_past = self._is_written_past or not self._depth

    def note_afterwards(self, what: str) -> None:
        """Code outside of vLLM has written weights since `check` was called."""
        if self._found[0] < 0:
            self._found = 0, None
        self.note(what)
        self._is_written_past = True

    def count_change(self, what: str) -> None:
        """A call of that name is about to change them."""
        if not self.count:
            self._first = self._content()
        self.count += 1
        self.what = what

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """vLLM's own method of that name runs."""
        self.count_change(what)
        had_failed, self._has_failed = self._has_failed, True
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        is_whole = what in WHOLE
        self._is_open = not is_whole
        self._has_failed = had_failed and not is_whole
        self._is_written_past = self._is_written_past and not is_whole

    def check(self) -> str:
        """Digest of what lies in memory, whether or not it is what the model computes with.

        Raises:
            RuntimeError: the worker sleeps.
        """
        self._refuse_asleep()
        tensors = list(_tensors(self.worker))
        found = _digest_of(tensors)
        if self._found[0] != self.count:
            # Later ones may find what has been written meanwhile.
            self._found = self.count, found if self._is_readable(tensors) else None
        return found

    def state(self) -> WeightState:
        """What the weights are now; reads all of them once after each change.

        Raises:
            RuntimeError: the worker sleeps.
        """
        self._refuse_asleep()
        content: str | None = ""
        if self.count:
            content = None if self._is_open else self._content()
        return WeightState(self.name, self.count, self.what, content, self._first, self._is_open)

    def _content(self) -> str | None:
        if self._found[0] != self.count:
            self._found = self.count, None
            try:
                self._refuse_asleep()
                tensors = list(_tensors(self.worker))
                if self._is_readable(tensors):
                    self._found = self.count, _digest_of(tensors)
            except Exception as error:
                logger.warning("the weights can't be read: %s", error)
        return self._found[1]

    def _refuse_asleep(self) -> None:
        if self.is_asleep:
            raise RuntimeError("the worker sleeps: its weights have no memory until it wakes up")

    def _is_readable(self, tensors: Iterable[tuple[str, Any]]) -> bool:
        if self._has_failed or engine.is_quantized(self.worker):
            return False
        found = [tensor for _, tensor in tensors]
        if any(each.is_meta or not each.numel() for each in found):
            return False
        return not (self._is_written_past and any(each.device.type == "cpu" for each in found))


# By the identity of vLLM's configuration, which a worker and its connector both have.
_watches: dict[int, tuple[Any, WeightWatch]] = {}


def watch_worker(vllm_config: Any) -> WeightWatch:
    """Watch the worker with this configuration, which is at the end of its start."""
    watch = WeightWatch()
    _watches[id(vllm_config)] = (vllm_config, watch)
    worker_class = engine.worker_class_of(vllm_config)
    for name in (*CHANGES, SLEEP, DISCARD, WAKE_UP):
        engine.wrap(worker_class, name, engine.around(partial(_noted, name)))
    engine.wrap(worker_class, engine.WARM_UP, _watching_model)
    return watch


def watch_of(worker: Any) -> WeightWatch | None:
    """The watch of a worker."""
    _, watch = _watches.get(engine.id_of_configuration(worker), (None, None))
    return watch


def state_of(worker: Any) -> WeightState | None:
    """Say what a worker's weights are; runs there. None: they are not watched."""
    watch = watch_of(worker)
    return None if watch is None else watch.state()


def check(worker: Any) -> str:
    """Digest of all weights of a worker; it runs there and reads each of them once.

    Called by vLLM's `collective_rpc`, which has it take the worker.
    """
    watch = watch_of(worker)
    return _digest_of(_tensors(worker)) if watch is None else watch.check()


def note_afterwards(worker: Any, what: str) -> None:
    """A worker's weights have been written, as `check` says; it runs there."""
    watch = watch_of(worker)
    if watch is not None:
        watch.note_afterwards(what)


def _noted(name: str, method: Any, worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    watch = watch_of(worker)
    if watch is not None and name in (SLEEP, DISCARD, WAKE_UP):
        return _moved(watch, name, method, worker, *args, **kwargs)
    if watch is None or effect_of(name, args, kwargs) is not Effect.CHANGES:
        return method(worker, *args, **kwargs)
    if kwargs.get("is_checkpoint_format") is False:
        # They are copied as they are: the same as if other code did it.
        watch.note(name)
        return method(worker, *args, **kwargs)
    with watch.changing(name):
        return method(worker, *args, **kwargs)


def _moved(
    watch: WeightWatch, name: str, method: Any, worker: Any, *args: Any, **kwargs: Any
) -> Any:
    """A call that gives memory back, or takes some; at a sleep's level 2 the weights are lost."""
    tags = kwargs.get("tags", args[0] if args else None)
    has_weights = name == SLEEP or tags is None or "weights" in tags
    if name == WAKE_UP:
        done = method(worker, *args, **kwargs)
        watch.is_asleep = watch.is_asleep and not has_weights
        return done
    watch.before_sleep()
    if effect_of(name, args, kwargs) is Effect.CHANGES:
        watch.count_change(name)
    watch.is_asleep = watch.is_asleep or has_weights
    return method(worker, *args, **kwargs)


@engine.around
def _watching_model(method: Any, worker: Any, /, *args: Any, **kwargs: Any) -> Any:
    done = method(worker, *args, **kwargs)
    watch = watch_of(worker)
    if watch is not None:
        watch.worker = worker
        watch_model(engine.models_of(worker)[0], watch)
    return done


def watch_model(model: Any, watch: WeightWatch) -> None:
    """Frameworks that train hand a model its new weights without asking vLLM."""
    engine.wrap_load_weights(model, engine.around(partial(_noted_by, watch)))


def _noted_by(watch: WeightWatch, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    watch.note("load_weights")
    return method(*args, **kwargs)
