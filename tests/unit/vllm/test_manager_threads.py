"""vLLM's lock of a manager may be a no-op: one thread calls it and changes what it answers from."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_offload.base import OffloadingManager

from raykv.engine.session import Session, SessionSettings
from raykv.protocol.columns import Leases
from raykv.protocol.engine import SyncReply
from tests.fixtures.engine.scheduler import DEADLINE_S, PlayedScheduler
from tests.fixtures.vllm import NODE_EPOCH, Engine, PlayedRequest
from tests.fixtures.waiting import wait_until

MUTATORS = ("__setitem__", "__delitem__", "clear", "pop", "popitem", "setdefault", "update")


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


def test_exchange_thread_leaves_alone_what_a_step_relies_on() -> None:
    engine, threads, scheduler = Engine(), Threads(), PlayedScheduler()
    view, manager = engine.view, engine.connector._manager
    settings = SessionSettings("engine", "n", "ns", "model", 1, {0: 4096}, heartbeat_s=0.001)
    session = Session(view, scheduler, settings)
    session.attach(DEADLINE_S)
    view._ready = view.loadable = threads.table("ready")
    view._pending = threads.table("pending")
    hooks = {name for name, _ in inspect.getmembers(OffloadingManager, inspect.isfunction)}
    for name in hooks:
        setattr(manager, name, threads.watched(name, getattr(manager, name)))
    engine.hold(0, 1)
    session.start()
    played = 0
    try:

        def is_played() -> bool:
            nonlocal played
            session.drain()
            session.nudge()
            for _ in range(10):
                played += 1
                lease = Leases([0], [100 + played], [100 + played])
                view.apply(SyncReply(1, 1, node_epoch=NODE_EPOCH, granted=lease))
                play(engine, played)
            return len(scheduler.full) > 10

        wait_until(is_played, DEADLINE_S, "the thread has sent what the steps had to tell")
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
