"""vLLM's lock of a manager may be a no-op: one thread calls it and changes what it answers from."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingManager

from raykv.protocol.node import ReportAnswer
from tests.fixtures.engine.place import PlayedPlace, session_at
from tests.fixtures.engine.scheduler import DEADLINE_S, PlayedScheduler
from tests.fixtures.vllm import Engine, PlayedRequest, key
from tests.fixtures.waiting import wait_until

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
    engine, threads, scheduler = Engine(), Threads(), PlayedScheduler()
    view, manager = engine.view, engine.connector._manager
    with PlayedPlace() as place:
        session = session_at(place, scheduler, view)
        session.attach(DEADLINE_S)
        place.pool.report()
        place.pool.answered(ReportAnswer(1, alone=[view.namespace]), time.monotonic())

        def is_alone() -> bool:
            session.drain()
            return not view.remote.has_peers

        wait_until(is_alone, DEADLINE_S, "the engine knows that nobody else has its chunks")
        (at,) = view._places
        at.listed.ready = threads.table("ready")
        view._ready = view.loadable = at.listed.ready
        view._pending = threads.set("pending")
        hooks = {name for name, _ in inspect.getmembers(OffloadingManager, inspect.isfunction)}
        for name in hooks:
            setattr(manager, name, threads.watched(name, getattr(manager, name)))
        place.store(key(0), key(1))
        session.start()
        played = 0
        try:

            def is_played() -> bool:
                nonlocal played
                session.drain()
                session.nudge()
                for _ in range(10):
                    played += 1
                    play(engine, played)
                return len(place.tells) > 10

            wait_until(is_played, DEADLINE_S, "the line has told what the steps had to say")
        finally:
            session.stop(DEADLINE_S)
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
