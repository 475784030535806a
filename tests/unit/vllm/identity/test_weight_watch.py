"""What a worker says of its weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch

from raykv.vllm.identity import weight_watch
from raykv.vllm.identity.weight_watch import WeightState, WeightWatch, watch_model


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.arange(40.0), requires_grad=False)

    def load_weights(self, value: float) -> None:
        self.wide.data.fill_(value)


class Worker:
    """Of vLLM, in the test's own process."""

    def __init__(self, quantized: bool = False) -> None:
        self.model = Model()
        self.vllm_config = SimpleNamespace(quant_config=object() if quantized else None)

    def get_model(self) -> Model:
        return self.model


@pytest.fixture
def worker() -> Worker:
    return Worker()


@pytest.fixture
def watch(worker: Worker) -> WeightWatch:
    watch = WeightWatch(worker)
    watch_model(worker.model, watch)
    return watch


def changed(watch: WeightWatch, call: str) -> None:
    with watch.changing(call):
        """Nothing is written."""


def reload(watch: WeightWatch, value: float) -> WeightState:
    """As vLLM does it, which calls the model."""
    with watch.changing("reload_weights"):
        watch.worker.model.load_weights(value)
    return watch.state()


def test_weights_are_read_once_after_each_change(watch: WeightWatch) -> None:
    read = watch.worker.get_model
    watch.worker.get_model = unread = lambda: pytest.fail("it was read")
    assert watch.state() == WeightState(watch.name), "nothing before the first one"
    watch.worker.get_model = read
    state = reload(watch, 1.0)
    watch.worker.get_model = unread
    assert watch.state() == state


def test_weights_are_named_by_content_and_the_first_ones_are_known_again(
    watch: WeightWatch,
) -> None:
    before = watch.worker.model.wide.data.clone()
    one, two = reload(watch, 1.0), reload(watch, 2.0)
    assert len({one.content, two.content, one.first}) == 3
    assert one.first == two.first
    assert reload(watch, 1.0).content == one.content
    with watch.changing("reload_weights"):
        watch.worker.model.wide.data.copy_(before)
    assert watch.state().content == one.first


def test_workers_with_the_same_weights_say_the_same(watch: WeightWatch) -> None:
    other = WeightWatch(Worker())
    assert reload(other, 3.0).content == reload(watch, 3.0).content


def test_weights_written_past_vllm_on_a_cpu_are_not_told_until_vllm_writes_all(
    watch: WeightWatch,
) -> None:
    watch.worker.model.load_weights(5.0)
    assert (watch.count, watch.what) == (1, "load_weights")
    assert watch.state().content is None
    changed(watch, "update_weights")
    changed(watch, "finish_weight_update")
    assert watch.state().content


def test_weights_of_an_update_under_way_are_not_told(watch: WeightWatch) -> None:
    changed(watch, "start_weight_update")
    assert watch.state().is_open
    changed(watch, "finish_weight_update")
    assert not watch.state().is_open
    assert watch.state().content


def test_weights_of_a_load_that_failed_are_not_told_until_one_works(watch: WeightWatch) -> None:
    with pytest.raises(RuntimeError), watch.changing("reload_weights"):
        raise RuntimeError("planted")
    assert watch.state().content is None
    assert reload(watch, 1.0).content


def test_quantized_weights_are_not_told() -> None:
    assert reload(WeightWatch(Worker(quantized=True)), 1.0).content is None


def test_tensor_that_is_hidden_is_not_told(watch: WeightWatch) -> None:
    with watch.changing("reload_weights"):
        watch.worker.model.wide.data = torch.empty(0)
    assert watch.state().content is None


def test_change_found_afterwards_does_not_make_its_weights_the_first_ones(
    watch: WeightWatch,
) -> None:
    watch.note_afterwards("a function")
    changed(watch, "reload_weights")
    state = watch.state()
    assert state.first is None
    assert state.content


def test_change_found_by_comparison_knows_the_first_weights(watch: WeightWatch) -> None:
    before = watch.check()
    watch.worker.model.wide.data += 1
    assert watch.check() != before
    watch.note_afterwards("a function")
    assert watch.state().first == before


def test_workers_own_methods_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    class Small:
        def __init__(self, config: Any) -> None:
            self.vllm_config = config

        def reload_weights(self, *, is_checkpoint_format: bool = True) -> str:
            return "reloaded"

        def sleep(self, level: int = 1) -> int:
            return level

        def wake_up(self) -> None:
            """It has its memory again."""

        def compile_or_warm_up_model(self) -> str:
            return "warm"

        def get_model(self) -> Model:
            return model

    model = Model()
    monkeypatch.setattr(weight_watch, "_watches", {})
    config, other = (
        SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=Small), quant_config=None)
        for _ in range(2)
    )
    watch, unmoved = weight_watch.watch_worker(config), weight_watch.watch_worker(other)
    worker = Small(config)
    assert worker.compile_or_warm_up_model() == "warm"
    told: list[str] = []
    watch.before_sleep = lambda: told.append("sleeps")
    assert worker.sleep(1) == 1
    assert told == ["sleeps"]
    assert watch.count == 0
    worker.wake_up()
    assert worker.reload_weights() == "reloaded"
    assert (watch.count, watch.what) == (1, "reload_weights")
    assert weight_watch.state_of(worker) == watch.state()
    assert worker.reload_weights(is_checkpoint_format=False) == "reloaded"
    assert watch.state().content is None
    assert unmoved.count == 0
    assert Small(other).sleep(level=2) == 2
    assert unmoved.what == "sleep"


def test_memory_of_a_sleeping_worker_is_not_read_and_stores_come_before_it_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sleepy(Worker):
        vllm_config: Any = SimpleNamespace(quant_config=None)

        def sleep(self, level: int = 1) -> None:
            told.append("sleep")

        def discard(self, tags: tuple[str, ...]) -> None:
            told.append("discard")

        def wake_up(self, tags: list[str] | None = None) -> None:
            told.append("wake_up")

        def compile_or_warm_up_model(self) -> None:
            """Nothing is compiled."""

    told: list[str] = []
    monkeypatch.setattr(weight_watch, "_watches", {})
    worker = Sleepy()
    config = SimpleNamespace(parallel_config=SimpleNamespace(worker_cls=Sleepy), quant_config=None)
    worker.vllm_config = config
    watch = weight_watch.watch_worker(config)
    watch.before_sleep = lambda: told.append("stores")
    worker.compile_or_warm_up_model()
    before = weight_watch.check(worker)
    worker.discard(("kv_cache",))
    assert weight_watch.check(worker) == before
    worker.sleep()
    assert told == ["stores", "discard", "stores", "sleep"]
    for read in (weight_watch.check, weight_watch.state_of):
        with pytest.raises(RuntimeError, match="sleeps"):
            read(worker)
    worker.wake_up(["kv_cache"])
    with pytest.raises(RuntimeError, match="sleeps"):
        weight_watch.check(worker)
    worker.wake_up(["weights"])
    assert weight_watch.check(worker) == before
