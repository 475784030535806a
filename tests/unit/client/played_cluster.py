"""A scheduler actor and NodeActors that answer at once, for clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import ray

from raykv.client.scheduler import Scheduler
from raykv.cluster import ask
from raykv.protocol.status import ClusterStatus

Methods = dict[str, Callable[..., Any]]


class PlayedActor:
    """Answers by its methods; one that is not there is an actor that does not answer."""

    def __init__(self, methods: Methods) -> None:
        self.methods = methods

    def __getattr__(self, method: str) -> Any:
        return type("Method", (), {"remote": staticmethod(lambda *a: (self, method, a))})


def _get(ref: tuple[PlayedActor, str, tuple[Any, ...]], **_: Any) -> Any:
    actor, method, arguments = ref
    if method not in actor.methods:
        raise ray.exceptions.GetTimeoutError("Get timed out")
    return actor.methods[method](*arguments)


def play(
    patches: pytest.MonkeyPatch, scheduler: Methods, nodes: dict[str, Methods] | None = None
) -> Scheduler:
    """Have this process ask these."""
    actors = {node_id: PlayedActor(methods) for node_id, methods in (nodes or {}).items()}
    patches.setattr(ask, "find_scheduler_actor", lambda: PlayedActor(scheduler))
    patches.setattr(ask, "node_actors", lambda: actors)
    patches.setattr(ask, "find_node_actor", actors.get)
    patches.setattr(ray, "get", _get)
    patches.setattr(ray, "wait", lambda refs, **_: (list(refs), []))
    return Scheduler("here")


def status(**changes: Any) -> ClusterStatus:
    """Of a cluster without anything."""
    return ClusterStatus("here", 1, "1.0", paused=False, **changes)
