"""vLLM's lock of a manager may be a no-op: one thread calls it and changes what it answers from."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingManager

from raykv.protocol.node import ReportAnswer
from tests.fixtures.engine.place import EngineAt, PlayedPlace
from tests.fixtures.engine.scheduler import DEADLINE_S
from tests.fixtures.vllm import Engine, PlayedRequest, key

MUTATORS = ("__setitem__", "__delitem__", "clear", "pop", "popitem", "setdefault", "update")
OF_SETS = ("add", "clear", "discard", "pop", "remove", "update")


class Threads:
    """Which threads have called what."""

    def __init__(self) -> None:
        self.seen: dict[str, set[int]] = {}

    def watched(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.seen.setdefault(name, set()).add(threading.get_ident())
            return method(*args, **more)

        return call

    def table(self, name: str) -> dict[Any, Any]:
        """A dictionary whose changes are noted."""
        methods = {each: self.watched(name, getattr(dict, each)) for each in MUTATORS}
        made: dict[Any, Any] = type("Table", (dict,), methods)()
        return made

    def set(self, name: str) -> set[Any]:
        """The same of a set."""
        methods = {each: self.watched(name, getattr(set, each)) for each in OF_SETS}
        made: set[Any] = type("Watched", (set,), methods)()
        return made


def play(engine: Engine, number: int) -> None:
    """A request loads what is there, a chunk is stored, and it ends."""
    request = PlayedRequest(f"r{number}")
    engine.begin(request)
    loads = engine.schedule(request)
    if loads:
        engine.end_load(request)
    manager, context = (
        engine.connector._manager,
        engine.connector._tables.find(f"r{number}").context,
    )
    stored = manager.prepare_store([b"%32d" % number + bytes(4)], context)
    assert stored is not None
    manager.complete_store(stored.keys_to_store, context)
    # Not `finish`: the exchange thread may have taken the record already.
    engine.connector.request_finished_all_groups(request, ([],))
    engine.connector.build_connector_meta(SchedulerOutput.make_empty())


def test_session_leaves_alone_what_a_step_relies_on() -> None:
    engine, threads = Engine(), Threads()
    view, manager = engine.view, engine.connector._manager
    with PlayedPlace() as place, EngineAt(place, view) as at_place:
        at_place.session.attach(DEADLINE_S)
        seq = place.pool.report().seq
        place.pool.answered(ReportAnswer(1, alone=[view.namespace]), time.monotonic(), seq)
        at_place.until(lambda: not view.remote.has_peers, "nobody else has its chunks")
        (at,) = view._places
        at.listed.ready = threads.table("ready")
        view._ready = view.loadable = at.listed.ready
        view._pending = threads.set("pending")
        hooks = {name for name, _ in inspect.getmembers(OffloadingManager, inspect.isfunction)}
        for name in hooks:
            setattr(manager, name, threads.watched(name, getattr(manager, name)))
        place.store(key(0), key(1))
        at_place.session.start()
        numbers = itertools.count()

        def is_played() -> bool:
            for _ in range(10):
                play(engine, next(numbers))
            return len(place.tells) > 10

        at_place.until(is_played, "the line has told what the steps had to say")
    view.check()
    assert {"lookup", "prepare_load", "prepare_store", "on_schedule_end"} <= threads.seen.keys()
    assert {"ready", "pending"} <= threads.seen.keys()
    here = {threading.get_ident()}
    assert not {name: each for name, each in threads.seen.items() if each != here}


def test_lock_can_be_taken_again_by_who_holds_it() -> None:
    manager = Engine().connector._manager
    if not hasattr(OffloadingManager, "lock"):
        pytest.skip("this vLLM takes no lock")
    with manager.lock, manager.lock:
        pass
