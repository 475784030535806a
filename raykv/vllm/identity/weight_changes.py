"""What changes a model's weights after an engine's start, as EngineCore sees it: a user's calls go
through it to all workers. A call that may do anything is judged by what the weights are before and
after it. What others write into a worker's model is seen there, and told with the next step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from raykv.base.guard import nothing
from raykv.vllm.identity import weight_watch
from raykv.vllm.internals import engine, scheduling
from raykv.vllm.weights import WeightChanges

logger = logging.getLogger("raykv")


def watch_calls() -> None:
    """From now on connectors learn of users' calls that change weights before the next step,
    through the `WeightChanges` that they have as `raykv_weights`. A second call changes nothing.
    """
    engine.wrap_core("collective_rpc", _judged)
    engine.wrap_core(weight_watch.SLEEP, _telling(before=_sleep))
    engine.wrap_core("add_request", _telling(before=_ask_and_listen))
    engine.wrap_core("wake_up", _telling(after=_ask))
    engine.wrap_core("set_weight_version", _telling(after=_label))
    engine.wrap_core("reset_prefix_cache", _telling(after=_drop))
    engine.wrap_core("reset_encoder_cache", _telling(after=_drop_encodings))


def _listeners(core: Any) -> list[WeightChanges]:
    """Those of our connectors of an EngineCore."""
    found = [
        getattr(each, "raykv_weights", None)
        for each in scheduling.connectors_of(getattr(core, "scheduler", None))
    ]
    return [each for each in found if each is not None]


def _tell(core: Any, what: str) -> None:
    for listener in _listeners(core):
        listener.change(what)


def _ask(core: Any, *_called: Any) -> None:
    """Find out what the weights are, while a caller waits for it."""
    if any(each.is_asking for each in _listeners(core)):
        _find_out(core)


def _find_out(core: Any) -> None:
    states = _asked(core, weight_watch.state_of)
    if states is not None:
        for listener in _listeners(core):
            listener.know(states)


def _asked(core: Any, function: Callable[..., Any], *args: Any) -> list[Any] | None:
    """What all workers answer; None where they can't be asked now."""
    try:
        return engine.ask_workers(core, function, *args)
    except Exception as error:
        logger.warning("the workers don't say what their weights are: %s", error)
        return None


Told = Callable[[Any, tuple[Any, ...], Any], None]
"""Gets an EngineCore and a call's arguments: before it those by name too, after it the result."""


def _telling(before: Told = nothing, after: Told = nothing) -> engine.Wrapper:
    """Wraps a method of EngineCore of whose calls connectors are told."""

    @engine.around
    def telling(method: Any, core: Any, /, *args: Any, **kwargs: Any) -> Any:
        before(core, args, kwargs)
        done = method(core, *args, **kwargs)
        after(core, args, done)
        return done

    return telling


def _sleep(core: Any, args: tuple[Any, ...], kwargs: Any) -> None:
    if weight_watch.effect_of(weight_watch.SLEEP, args, kwargs) is weight_watch.Effect.CHANGES:
        _tell(core, "sleep of level 2")


def _ask_and_listen(core: Any, *_called: Any) -> None:
    _ask(core)
    for listener in _listeners(core):
        listener.listen()


def _label(core: Any, args: tuple[Any, ...], _done: Any) -> None:
    for listener in _listeners(core):
        listener.label(args[0])


def _drop(core: Any, _args: tuple[Any, ...], is_done: Any) -> None:
    """Frameworks that train reset the cache when they have written into the workers' models."""
    listeners = _listeners(core)
    if listeners:
        _find_out(core)
    for listener in listeners if is_done else ():
        listener.drop_prefixes()


def _drop_encodings(core: Any, *_called: Any) -> None:
    for listener in _listeners(core):
        listener.drop_encodings()


@engine.around
def _judged(
    method: Any,
    core: Any,
    called: Any,
    timeout: float | None = None,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    def go() -> Any:
        return method(core, called, timeout, args, kwargs)

    effect = weight_watch.effect_of(called, args, kwargs)
    listeners = _listeners(core)
    if effect is weight_watch.Effect.NONE or not listeners:
        return go()
    name = called if isinstance(called, str) else getattr(called, "__name__", "a function")
    if effect is weight_watch.Effect.CHANGES:
        _tell(core, name)
        try:
            return go()
        finally:
            if name in weight_watch.WHOLE:
                _ask(core)
    # Where they are asked in any case, they must not believe what they were told before.
    are_asking = all(each.is_asking for each in listeners)
    before = None if are_asking else _asked(core, weight_watch.check)
    try:
        return go()
    finally:
        if before is None or before != _asked(core, weight_watch.check):
            _asked(core, weight_watch.note_afterwards, name)
            if not are_asking:
                _tell(core, name)
