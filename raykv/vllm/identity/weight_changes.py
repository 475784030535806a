"""What changes a model's weights after an engine's start, as EngineCore sees it: a user's calls go
through it to all workers. A call that may do anything is judged by what the weights are before and
after it. What others write into a worker's model is seen there, and told with the next step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from raykv.vllm.identity.weight_watch import (
    SLEEP,
    WHOLE,
    Effect,
    WeightState,
    check,
    effect_of,
    note_afterwards,
    state_of,
)
from raykv.vllm.internals.engine import ask_workers, wrap_core
from raykv.vllm.internals.scheduling import connectors_of

logger = logging.getLogger("raykv")


class Listener(Protocol):
    """Of our connector on the scheduler's side; all methods are called between steps."""

    @property
    def is_asking(self) -> bool:
        """Whether it wants to know what the weights are, before the next request."""

    def change(self, what: str) -> None:
        """A call of that name changes the weights."""

    def know(self, states: Sequence[WeightState | None]) -> None:
        """What all workers say of their weights."""

    def listen(self) -> None:
        """Hear what the user calls the weights that there are now."""

    def label(self, label: str) -> None:
        """vLLM was given a name for them."""

    def drop_prefixes(self) -> None:
        """vLLM uses no KV any more that was computed before."""

    def drop_encodings(self) -> None:
        """vLLM uses no outputs of encoders any more that were computed before."""


def watch_calls() -> None:
    """From now on connectors learn of users' calls that change weights before the next step,
    through the `Listener` that they have as `raykv_weights`. A second call changes nothing.
    """
    wrap_core("collective_rpc", _judged)
    wrap_core(SLEEP, _sleeping)
    wrap_core("set_weight_version", _labelled)
    wrap_core("wake_up", _asked_afterwards)
    wrap_core("add_request", _asked_before)
    wrap_core("reset_prefix_cache", _dropping)
    wrap_core("reset_encoder_cache", _dropping_encodings)


def _listeners(core: Any) -> list[Listener]:
    """Those of our connectors of an EngineCore."""
    found = [
        getattr(each, "raykv_weights", None)
        for each in connectors_of(getattr(core, "scheduler", None))
    ]
    return [each for each in found if each is not None]


def _tell(core: Any, what: str) -> None:
    for listener in _listeners(core):
        listener.change(what)


def _ask(core: Any) -> None:
    """Find out what the weights are, where somebody waits for it."""
    if any(each.is_asking for each in _listeners(core)):
        _find_out(core)


def _find_out(core: Any) -> None:
    states = _asked(core, state_of)
    if states is not None:
        for listener in _listeners(core):
            listener.know(states)


def _asked(core: Any, function: Callable[..., Any], *args: Any) -> list[Any] | None:
    """What all workers answer; None where they can't be asked now."""
    try:
        return ask_workers(core, function, *args)
    except Exception as error:
        logger.warning("the workers don't say what their weights are: %s", error)
        return None


def _sleeping(method: Any) -> Any:
    @functools.wraps(method)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        if effect_of(SLEEP, args, kwargs) is Effect.CHANGES:
            _tell(core, "sleep of level 2")
        return method(core, *args, **kwargs)

    return call


def _labelled(method: Any) -> Any:
    @functools.wraps(method)
    def call(core: Any, label: str, *args: Any, **kwargs: Any) -> Any:
        done = method(core, label, *args, **kwargs)
        for listener in _listeners(core):
            listener.label(label)
        return done

    return call


def _asked_afterwards(method: Any) -> Any:
    @functools.wraps(method)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        done = method(core, *args, **kwargs)
        _ask(core)
        return done

    return call


def _asked_before(method: Any) -> Any:
    @functools.wraps(method)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        _ask(core)
        for listener in _listeners(core):
            listener.listen()
        return method(core, *args, **kwargs)

    return call


def _dropping(method: Any) -> Any:
    """Frameworks that train call it when they have written into the workers' models."""

    @functools.wraps(method)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        is_done = method(core, *args, **kwargs)
        listeners = _listeners(core)
        if listeners:
            _find_out(core)
        for listener in listeners if is_done else ():
            listener.drop_prefixes()
        return is_done

    return call


def _dropping_encodings(method: Any) -> Any:
    @functools.wraps(method)
    def call(core: Any, *args: Any, **kwargs: Any) -> Any:
        done = method(core, *args, **kwargs)
        for listener in _listeners(core):
            listener.drop_encodings()
        return done

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
        listeners = _listeners(core)
        if effect is Effect.NONE or not listeners:
            return go()
        name = called if isinstance(called, str) else getattr(called, "__name__", "a function")
        if effect is Effect.CHANGES:
            _tell(core, name)
            try:
                return go()
            finally:
                if name in WHOLE:
                    _ask(core)
        if all(each.is_asking for each in listeners):
            # They are asked in any case, and must not believe what they were told before.
            try:
                return go()
            finally:
                _asked(core, note_afterwards, name)
        before = _asked(core, check)
        try:
            return go()
        finally:
            if before is None or before != _asked(core, check):
                _asked(core, note_afterwards, name)
                _tell(core, name)

    return call
