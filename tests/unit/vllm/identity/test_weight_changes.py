"""Weights that change while an engine runs: what is seen of it, and what the engine's view does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.v1.engine.core import EngineCore

from raykv.vllm.identity import weight_changes as weights
from raykv.vllm.identity.weight_changes import Effect, WeightWatch, checksum, effect_of, watch_model


class Model(torch.nn.Module):
    """Two layers and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(0)
        self.large = torch.nn.Parameter(torch.randn(300, 40, generator=made))
        self.odd = torch.nn.Parameter(torch.randn(3, generator=made).bfloat16())
        self.register_buffer("scale", torch.ones(1))

    def load_weights(self, loaded: dict[str, torch.Tensor]) -> set[str]:
        for name, value in loaded.items():
            self.get_parameter(name).data.copy_(value)
        return set(loaded)


class Worker:
    """Of vLLM, in the test's own process."""

    def __init__(self) -> None:
        self.model = Model()

    def get_model(self) -> Model:
        return self.model

    def get_draft_model(self) -> None:
        """There is none."""

    def apply_model(self, function: Callable[[Model], Any]) -> Any:
        return function(self.model)

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments, **_more: name


class Executor:
    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.is_sleeping = False

    def collective_rpc(
        self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> list[Any]:
        call = getattr(self.worker, method) if isinstance(method, str) else method
        bound = () if isinstance(method, str) else (self.worker,)
        return [call(*bound, *args, **(kwargs or {}))]

    def sleep(self, _level: int) -> None:
        self.is_sleeping = True


class Listener:
    def __init__(self) -> None:
        self.told: list[str] = []

    def weights_changed(self, what: str) -> None:
        self.told.append(what)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """EngineCore without an engine; its wrappers are taken off again."""
    for name in ("collective_rpc", "sleep", "set_weight_version"):
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))
    weights.watch_calls()
    core: Any = EngineCore.__new__(EngineCore)
    core.model_executor = Executor(Worker())
    core.scheduler = SimpleNamespace(connector=Listener())
    monkeypatch.setattr(EngineCore, "pause_scheduler", lambda *_a, **_k: None)
    return core


def told(core: Any) -> list[str]:
    names: list[str] = core.scheduler.connector.told
    return names


@pytest.mark.parametrize("name", sorted(weights.CHANGES))
def test_call_for_other_weights_is_told_before_it_runs(core: Any, name: str) -> None:
    core.model_executor.worker.__dict__[name] = lambda: list(told(core))
    assert core.collective_rpc(name) == [[name]]


@pytest.mark.parametrize(
    ("level", "expected"), [(0, []), (1, []), (2, ["sleep of level 2"])], ids=["0", "1", "2"]
)
def test_sleep_is_told_that_throws_the_weights_away(
    core: Any, level: int, expected: list[str]
) -> None:
    core.sleep(level)
    assert told(core) == expected


def test_new_version_of_the_weights_is_told(core: Any) -> None:
    core.set_weight_version("7")
    assert told(core) == ["set_weight_version"]


def change_one_value(model: Model) -> None:
    # As vLLM's loaders do it: past autograd, and past its count of versions.
    model.large.data[17, 3] += 1e-3


def swap_rows(model: Model) -> None:
    model.large.data[[0, 299]] = model.large.data[[299, 0]]


def change_buffer(model: Model) -> None:
    model.get_buffer("scale").mul_(2)


def change_odd(model: Model) -> None:
    model.odd.data[2] = 0


@pytest.mark.parametrize("change", [change_one_value, swap_rows, change_buffer, change_odd])
def test_function_that_changes_the_model_is_told(core: Any, change: Callable[..., None]) -> None:
    core.collective_rpc("apply_model", args=(change,))
    assert told(core) == ["apply_model"]


def test_function_that_changes_it_and_fails_is_told(core: Any) -> None:
    def fail(worker: Worker) -> None:
        change_one_value(worker.model)
        raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        core.collective_rpc(fail)
    assert told(core) == ["fail"]


def test_function_that_only_looks_is_not_told(core: Any) -> None:
    assert core.collective_rpc("apply_model", args=(lambda model: len(model.odd),)) == [3]
    assert core.collective_rpc(lambda _worker: 1) == [1]
    assert core.collective_rpc("my_own_method") == ["my_own_method"]
    assert core.collective_rpc("check_health") == ["check_health"]
    assert told(core) == []


def test_function_in_sleep_is_told_since_nothing_can_be_compared(core: Any) -> None:
    core.sleep(1)
    core.collective_rpc("my_own_method")
    assert told(core) == ["my_own_method"]


def test_engine_without_our_connector_is_left_alone(core: Any) -> None:
    core.scheduler.connector = None
    core.model_executor.worker.__dict__["get_model"] = lambda: pytest.fail("it was read")
    assert core.collective_rpc("my_own_method") == ["my_own_method"]


def test_connector_inside_of_another_one_is_told(core: Any) -> None:
    ours = core.scheduler.connector
    core.scheduler.connector = SimpleNamespace(_connectors=[object(), ours])
    core.collective_rpc("reload_weights")
    assert ours.told == ["reload_weights"]


def test_checksum_is_the_same_for_the_same_weights() -> None:
    assert checksum(Worker()) == checksum(Worker())


def test_function_may_do_anything() -> None:
    assert effect_of(checksum) is Effect.UNKNOWN
    assert effect_of("sleep", (), {"level": 2}) is Effect.CHANGES
    assert effect_of("sleep") is Effect.NONE


def test_weights_that_are_handed_to_the_model_itself_are_seen() -> None:
    watch, model = WeightWatch(), Model()
    watch_model(model, watch)
    assert watch.changed == ""
    assert model.load_weights({"odd": torch.zeros(3)}) == {"odd"}
    assert str(watch.changed) == "load_weights"
    assert not model.odd.any()


def test_worker_s_own_methods_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        def __init__(self, config: Any) -> None:
            self.vllm_config = config

        def reload_weights(self) -> str:
            return "reloaded"

        def sleep(self, level: int = 1) -> int:
            return level

        def compile_or_warm_up_model(self) -> str:
            return "warm"

        def get_model(self) -> Model:
            return model

    model = Model()
    monkeypatch.setattr(weights, "_watches", {})
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=Small))
    other = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=Small))
    watch, unmoved = weights.watch_worker(config), weights.watch_worker(other)
    worker = Small(config)
    assert worker.compile_or_warm_up_model() == "warm"
    assert worker.sleep(1) == 1
    assert watch.changed == ""
    assert worker.reload_weights() == "reloaded"
    model.load_weights({})
    assert str(watch.changed) == "reload_weights"
    assert unmoved.changed == ""
    assert Small(other).sleep(level=2) == 2
    assert str(unmoved.changed) == "sleep"
