"""Weights that change while an engine runs: what EngineCore sees of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.v1.engine.core import EngineCore

from raykv.vllm.identity import weight_changes as weights
from raykv.vllm.identity import weight_watch
from raykv.vllm.identity.weight_watch import WeightState, check


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
        self.vllm_config: Any = None
        # What a method of that name does.
        self.before: dict[str, Callable[[], object]] = {}

    def get_model(self) -> Model:
        return self.model

    def get_draft_model(self) -> None:
        """There is none."""

    def apply_model(self, function: Callable[[Model], Any]) -> Any:
        return function(self.model)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
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

    def sleep(self, level: int) -> None:
        self.collective_rpc("sleep", args=(level,))
        self.is_sleeping = True

    def wake_up(self, tags: Any) -> None:
        self.collective_rpc("wake_up", kwargs={"tags": tags})
        self.is_sleeping = False


class Listener:
    """Takes down what it is told."""

    def __init__(self) -> None:
        self.is_asking = False
        self.told: list[str] = []
        self.counts: list[int] = []
        self.contents: list[str | None] = []
        self.labels: list[str] = []
        self.num_dropped = 0
        self.num_listened = 0

    def change(self, what: str) -> None:
        self.is_asking = True
        self.told.append(what)

    def know(self, states: list[WeightState | None]) -> None:
        self.is_asking = False
        self.counts += [state.count for state in states if state is not None]
        self.contents += [state.content for state in states if state is not None]

    def listen(self) -> None:
        self.num_listened += 1

    def label(self, label: str) -> None:
        self.labels.append(label)

    def drop_prefixes(self) -> None:
        self.num_dropped += 1

    def drop_encodings(self) -> None:
        self.told.append("no old encodings")


class Scheduler:
    """Of vLLM, whose prefix cache can be reset while it has no requests."""

    def __init__(self, listener: Listener) -> None:
        self.connector = SimpleNamespace(raykv_weights=listener)
        self.has_requests = False

    def reset_prefix_cache(self, *_arguments: bool) -> bool:
        return not self.has_requests

    def get_kv_connector(self) -> None:
        """0.33 asks at the end of a sleep; None: it has nothing to tell its workers."""

    def add_request(self, _request: Any) -> None:
        """Nothing comes of it."""


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    """EngineCore without an engine; its wrappers are taken off again."""
    for name in WRAPPED:
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))
    weights.watch_calls()
    core: Any = EngineCore.__new__(EngineCore)
    worker = Worker()
    monkeypatch.setattr(weight_watch, "_watches", {})
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=Worker), quant_config=None)
    for name in (*weight_watch.CHANGES, "sleep", "wake_up", "compile_or_warm_up_model"):
        monkeypatch.setattr(Worker, name, worker_method(name), raising=False)
    weight_watch.watch_worker(config)
    worker.vllm_config = config
    worker.compile_or_warm_up_model()
    core.model_executor = Executor(worker)
    core.scheduler = Scheduler(Listener())
    monkeypatch.setattr(EngineCore, "pause_scheduler", lambda *_a, **_k: None)
    monkeypatch.setattr(EngineCore, "resume_scheduler", lambda *_a, **_k: None)
    return core


WRAPPED = (
    *("add_request", "collective_rpc", "reset_encoder_cache", "reset_prefix_cache"),
    *("set_weight_version", "sleep", "wake_up"),
)


def worker_method(name: str) -> Callable[..., str]:
    def method(worker: Worker, *_arguments: Any, **_more: Any) -> str:
        before = worker.before.get(name)
        if before is not None:
            before()
        return name

    return method


def listener(core: Any) -> Listener:
    found: Listener = core.scheduler.connector.raykv_weights
    return found


def told(core: Any) -> list[str]:
    return listener(core).told


def request() -> Any:
    """What EngineCore looks at of a new one."""
    none = dict.fromkeys(("pooling_params", "kv_transfer_params", "ec_transfer_params"))
    return SimpleNamespace(request_id="r", abort_immediately=False, **none)


@pytest.mark.parametrize("name", sorted(weight_watch.CHANGES))
def test_call_for_other_weights_is_told_before_it_runs(core: Any, name: str) -> None:
    seen: list[list[str]] = []
    core.model_executor.worker.before[name] = lambda: seen.append(list(told(core)))
    assert core.collective_rpc(name) == [name]
    assert seen == [[name]]


def test_what_the_weights_are_is_asked_when_vllm_has_written_all(core: Any) -> None:
    model = core.model_executor.worker.model
    core.model_executor.worker.before["reload_weights"] = lambda: change_one_value(model)
    core.collective_rpc("reload_weights")
    assert (listener(core).counts, listener(core).is_asking) == ([1], False)
    assert listener(core).contents == [check(core.model_executor.worker)]


def test_update_in_parts_is_asked_about_at_its_end(core: Any) -> None:
    core.collective_rpc("start_weight_update")
    for _ in range(3):
        core.collective_rpc("update_weights")
    assert listener(core).counts == []
    core.collective_rpc("finish_weight_update")
    assert listener(core).counts == [5]


def test_request_asks_where_nobody_has_yet(core: Any) -> None:
    core.collective_rpc("update_weights")
    core.add_request(request())
    assert listener(core).counts == [1]
    core.add_request(request())
    assert listener(core).counts == [1]
    assert listener(core).num_listened == 2


@pytest.mark.parametrize(
    ("level", "expected"), [(0, []), (1, []), (2, ["sleep of level 2"])], ids=["0", "1", "2"]
)
def test_sleep_is_told_that_throws_the_weights_away(
    core: Any, level: int, expected: list[str]
) -> None:
    core.sleep(level)
    assert told(core) == expected


def test_engine_that_wakes_up_says_what_its_weights_are(core: Any) -> None:
    core.sleep(2)
    core.add_request(request())
    assert listener(core).counts == []
    core.wake_up()
    assert listener(core).counts == [1]


def test_vllms_own_name_of_the_weights_is_told(core: Any) -> None:
    core.set_weight_version("7")
    assert listener(core).labels == ["7"]


@pytest.mark.parametrize("has_requests", [True, False])
def test_reset_of_vllms_own_cache_is_told_if_it_works(core: Any, has_requests: bool) -> None:
    core.scheduler.has_requests = has_requests
    assert core.reset_prefix_cache() is not has_requests
    assert listener(core).num_dropped == (0 if has_requests else 1)


def test_reset_of_vllms_encoder_cache_is_told(core: Any) -> None:
    core.scheduler.has_unfinished_requests = lambda: False
    core.scheduler.reset_encoder_cache = lambda: None
    core.model_executor.reset_encoder_cache = lambda: None
    core.reset_encoder_cache()
    assert listener(core).told == ["no old encodings"]


def test_reset_finds_what_was_written_into_a_workers_model(core: Any) -> None:
    core.model_executor.worker.model.load_weights({"odd": torch.zeros(3)})
    core.reset_prefix_cache()
    assert listener(core).counts == [1]


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
    core.add_request(request())
    assert listener(core).counts == [1]
    # On a CPU the model may compute with copies.
    assert listener(core).contents == [None]


def test_functions_after_one_that_has_changed_the_model_are_not_compared(core: Any) -> None:
    core.collective_rpc("apply_model", args=(change_odd,))
    core.model_executor.worker.__dict__["get_model"] = lambda: pytest.fail("it was read")
    core.collective_rpc("my_own_method")
    del core.model_executor.worker.__dict__["get_model"]
    core.add_request(request())
    assert listener(core).counts == [2]


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
    for name in ("my_own_method", "check_health", "sleep"):
        assert core.collective_rpc(name) == [name]
    assert told(core) == []


def test_sleep_that_throws_the_weights_away_is_told_whoever_calls_it(core: Any) -> None:
    core.collective_rpc("sleep", kwargs={"level": 2})
    assert len(told(core)) == 1


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
    assert ours.raykv_weights.told == ["reload_weights"]
