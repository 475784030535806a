"""The rule that no hook raises: an exception in a connector hook kills vLLM's EngineCore."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger("raykv")

F = TypeVar("F", bound=Callable[..., Any])

failures: Counter[str] = Counter()
"""Exceptions that were swallowed in this process, by hook."""


def guarded(safe: Callable[..., Any]) -> Callable[[F], F]:
    """Answer with `safe(*args)` where the method raises; count it, log the first of each hook.

    `safe` gets the method's own arguments, with `self`, so that it can compensate.
    """

    def decorate(method: F) -> F:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception:
                report(method.__qualname__)
                return safe(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def report(hook: str) -> None:
    """Count an exception that is being handled, and log it the first time."""
    failures[hook] += 1
    if failures[hook] == 1:
        logger.exception("%s failed; the request goes on without RayKV (logged once)", hook)


def nothing(*_args: Any, **_kwargs: Any) -> None:
    """The safe value of hooks without an answer."""
