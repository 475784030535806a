"""What a worker says of its weights, and which namespace they put their engine in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch

from raykv.vllm.identity import weight_watch
from raykv.vllm.identity.facts import namespace_of
from raykv.vllm.identity.weight_names import WeightNames
from raykv.vllm.identity.weight_watch import WeightState, WeightWatch, watch_model

FACTS = {"weights": "files", "hash_seed": "7", "model": "tiny"}


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


def reload(watch: WeightWatch, value: float) -> WeightState:
    """As vLLM does it, which calls the model."""
    with watch.changing("reload_weights"):
        watch.worker.model.load_weights(value)
    return watch.state()


def test_nothing_is_read_before_weights_change(watch: WeightWatch) -> None:
    watch.worker.get_model = lambda: pytest.fail("it was read")
    assert watch.state() == WeightState(watch.name)


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


def test_weights_are_read_once_after_each_change(watch: WeightWatch) -> None:
    state = reload(watch, 1.0)
    watch.worker.get_model = lambda: pytest.fail("it was read")
    assert watch.state() == state


def test_weights_written_past_vllm_on_a_cpu_are_not_told_until_vllm_writes_all(
    watch: WeightWatch,
) -> None:
    watch.worker.model.load_weights(5.0)
    assert (watch.count, watch.what) == (1, "load_weights")
    assert watch.state().content is None
    with watch.changing("update_weights"):
        pass
    with watch.changing("finish_weight_update"):
        pass
    assert watch.state().content


def test_weights_of_an_update_under_way_are_not_told(watch: WeightWatch) -> None:
    with watch.changing("start_weight_update"):
        pass
    assert watch.state().is_open
    with watch.changing("finish_weight_update"):
        pass
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
    with watch.changing("reload_weights"):
        pass
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


# Names


def state(count: int, content: str | None, watch: str = "w") -> WeightState:
    return WeightState(watch, count, "reload_weights", content, "first")


@pytest.fixture
def names() -> WeightNames:
    return WeightNames(FACTS)


def namespace(names: WeightNames) -> str | None:
    return None if names.space is None else names.space.namespace


def changed(names: WeightNames, *states: WeightState | None) -> str | None:
    names.change()
    assert namespace(names) is None
    names.know(states)
    return namespace(names)


def test_first_weights_have_the_namespace_of_the_start(names: WeightNames) -> None:
    start = namespace_of(FACTS)
    assert namespace(names) == start
    assert changed(names, state(1, "other")) not in (start, None)
    assert changed(names, state(2, "first")) == start


def test_engines_with_the_same_weights_have_the_same_namespace(names: WeightNames) -> None:
    there = changed(names, state(1, "a"), state(3, "b", "w2"))
    assert changed(WeightNames(FACTS), state(7, "a", "x"), state(7, "b", "y")) == there
    assert changed(WeightNames(FACTS), state(7, "b", "x"), state(7, "a", "y")) != there
    assert changed(WeightNames({**FACTS, "model": "other"}), state(1, "a"), state(3, "b")) != there


@pytest.mark.parametrize("states", [[state(1, None)], [state(1, "a"), None]])
def test_weights_that_cant_be_told_have_no_name_until_they_are_given_one(
    names: WeightNames, states: list[WeightState | None]
) -> None:
    assert changed(names, *states) is None
    names.call("v2")
    named = namespace(names)
    assert named not in (None, namespace_of(FACTS))
    assert names.space is not None
    assert names.space.traits["weights_version"] == "v2"
    # A name is of the weights that it was given to.
    assert changed(names, *states) is None
    names.call("v3")
    assert namespace(names) not in (None, named)
    names.call("v2")
    assert namespace(names) == named


def test_vllms_own_name_counts_where_nothing_else_tells(names: WeightNames) -> None:
    assert changed(names, state(1, None)) is None
    names.label("7")
    seven = namespace(names)
    assert seven is not None
    names.label("8")
    assert namespace(names) not in (None, seven)
    there = changed(names, state(2, "a"))
    names.label("7")
    assert namespace(names) == there


def test_users_name_tells_weights_apart_beside_their_content(names: WeightNames) -> None:
    there = changed(names, state(1, "a"))
    names.call("v2")
    assert namespace(names) not in (None, there)
    assert changed(names, state(2, "a")) == there


def test_update_under_way_is_asked_about_again(names: WeightNames) -> None:
    names.change()
    names.know([WeightState("w", 1, "start_weight_update", None, "first", is_open=True)])
    assert names.is_asking
    assert names.space is None


def test_news_are_changes_that_were_not_known(names: WeightNames) -> None:
    assert not names.is_news([state(0, "")])
    assert names.is_news([state(0, ""), state(1, "a", "w2")])
    changed(names, state(2, "a"))
    assert not names.is_news([state(2, "a")])
    # A report of a step may come late.
    assert not names.is_news_of({"w": 1})
    assert names.is_news_of({"w": 3})
