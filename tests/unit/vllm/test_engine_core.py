"""What RayKV makes of the calls that vLLM's EngineCore does to its caches."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.engine.core import EngineCore

from raykv.base.ids import Key
from raykv.base.settings import Settings
from raykv.engine.view import EngineView
from raykv.vllm.internals.engine import RESETS, is_resting, watch_rests
from raykv.vllm.manager import RayOffloadingManager
from tests.fixtures.place import CopyingPlace, QuietSession, engine_hello

CHUNK = Key(b"a" * 32 + b"\0\0\0\0")


class Executor:
    """Takes what EngineCore sends to the workers."""

    is_sleeping = False

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_more: None


class Scheduler:
    """Resets its connector's manager, as vLLM's scheduler does."""

    def __init__(self, manager: RayOffloadingManager) -> None:
        self._manager = manager

    def reset_prefix_cache(self, _running: bool = False, reset_connector: bool = False) -> bool:
        if reset_connector:
            self._manager.reset_cache()
        return True

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_more: False


@pytest.fixture
def view() -> EngineView:
    view, place = EngineView(Settings(request_deadline_s=5.0)), CopyingPlace()
    place.join(view, engine_hello())
    place.hold(view, [CHUNK])
    return view


@pytest.fixture
def core(view: EngineView, monkeypatch: pytest.MonkeyPatch) -> EngineCore:
    """EngineCore without an engine."""
    monkeypatch.setattr(EngineCore, RESETS, getattr(EngineCore, RESETS))
    watch_rests()
    core = EngineCore.__new__(EngineCore)
    manager: Any = RayOffloadingManager(view)
    manager.start(QuietSession())
    core.scheduler = Scheduler(manager)
    core.model_executor = Executor()
    core.mm_receiver_cache = None
    return core


@pytest.mark.parametrize("rest", ["sleep", "pause_scheduler"])
def test_rest_leaves_the_chunks_of_the_namespace(
    core: EngineCore, view: EngineView, rest: str
) -> None:
    getattr(core, rest)()
    assert CHUNK in view.loadable
    assert not is_resting()


def test_reset_that_the_user_asks_for_clears_the_namespace(
    core: EngineCore, view: EngineView
) -> None:
    core.sleep()
    core.reset_prefix_cache(reset_connector=True)
    assert CHUNK not in view.loadable
    assert view.wanted_clear


def test_rest_that_fails_is_over(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: Any, **_more: Any) -> bool:
        raise RuntimeError("planted")

    monkeypatch.setattr(core.scheduler, "reset_prefix_cache", fail)
    with pytest.raises(RuntimeError):
        core.sleep()
    assert not is_resting()
