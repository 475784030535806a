"""What an engine does when its weights change, with vLLM's own offloading scheduler behind it, and
where it goes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from raykv.base.ids import ALL_BLOCKS, Direction, Key, Namespace, Stamp
from raykv.protocol.columns import Keys
from raykv.protocol.copies import CopyResult
from raykv.protocol.engine import Naming, Space
from raykv.protocol.listing import ListedRow, ListedRows, Reason, Where
from raykv.vllm.identity.facts import namespace_of
from raykv.vllm.identity.weight_watch import WeightState
from raykv.vllm.transfers import JobEnd, RayKVWorkerMetadata
from raykv.vllm.weights import WeightChanges
from tests.fixtures.place import QuietSession
from tests.fixtures.vllm import CHUNK, Engine, PlayedRequest, failed_end, key, new_request

FACTS = {"weights": "files", "hash_seed": "7"}


class Session(QuietSession):
    """Takes the view where the engine goes; nobody else knows of it."""

    def __init__(self, engine: Engine) -> None:
        self._view, self._place = engine.view, engine.place
        self.naming: Naming | None = None

    def enter(self, space: Space) -> None:
        self._view.enter(Namespace(space.namespace), time.monotonic())
        self._place.enter(self._view)

    def take_naming(self) -> Naming | None:
        naming, self.naming = self.naming, None
        return naming

    def change_weights(self) -> None:
        self.naming = None


class Changing(Engine):
    """An engine whose weights change."""

    def __init__(self, facts: Mapping[str, str] = FACTS) -> None:
        super().__init__(namespace=namespace_of(dict(facts)))
        manager: Any = self.connector._manager
        self.session = Session(self)
        manager.start(self.session)
        self.weights = WeightChanges(dict(facts), manager, self.connector._tables)
        self.connector.raykv_weights = self.weights
        self.count = 0

    def change(self, content: str | None) -> None:
        self.count += 1
        self.changed(state(self.count, content))

    def changed(self, *states: WeightState | None) -> str | None:
        """Into which namespace it goes with what its workers say."""
        self.weights.change("reload_weights")
        assert namespace(self.weights) is None
        self.weights.know(states)
        return namespace(self.weights)

    def called(self, version: str) -> str | None:
        """Into which it goes with what the user calls its weights."""
        self.session.naming = Naming(Stamp(1, 5), version)
        self.weights.listen()
        return namespace(self.weights)

    def hear(self, **told: Any) -> None:
        """Workers report so with a step."""
        meta = RayKVWorkerMetadata(**told)
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=meta))

    def step(self) -> Any:
        return self.connector.build_connector_meta(SchedulerOutput.make_empty())


def state(count: int, content: str | None, watch: str = "w") -> WeightState:
    return WeightState(watch, count, "reload_weights", content, "first")


def namespace(weights: WeightChanges) -> str | None:
    return None if weights.space is None else weights.space.namespace


def begun(engine: Changing, name: str = "r", own: int = 0) -> tuple[PlayedRequest, int]:
    request = PlayedRequest(name)
    engine.begin(request)
    return request, engine.schedule(request, own)


def test_engine_loads_under_the_name_of_the_weights_that_it_has() -> None:
    engine = Changing()
    engine.hold(0, 1)
    request, loads = begun(engine)
    assert loads == 2 * CHUNK
    engine.end_load(request)
    start = engine.view.namespace
    engine.change("new")
    assert engine.view.namespace != start
    assert begun(engine, "s")[1] == 0
    engine.hold(0)
    request, loads = begun(engine, "t")
    assert loads == CHUNK
    (job,) = engine.step().load_jobs.values()
    assert job.src_spec.namespace == engine.view.namespace
    assert job.req_id == request.request_id
    engine.change("first")
    assert engine.view.namespace == start


def test_request_that_was_there_neither_loads_nor_stores_any_more() -> None:
    engine = Changing()
    request = PlayedRequest()
    engine.begin(request)
    engine.change("new")
    engine.hold(0, 1)
    assert engine.schedule(request) == 0
    manager = engine.connector._manager
    plan = manager.prepare_store(engine.connector._tables.find("r").keys[0], request_context("r"))
    assert plan is not None
    assert not plan.keys_to_store
    assert begun(engine, "later")[1] == 2 * CHUNK


def request_context(name: str) -> Any:
    return SimpleNamespace(req_id=name)


def test_request_that_goes_on_from_vllms_own_kv_of_other_weights_is_barred(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Changing()
    begun(engine, "before")
    engine.change("new")
    engine.hold(1, 2)
    for name in "rs":
        assert begun(engine, name, own=CHUNK)[1] == 0
    assert caplog.text.count("reset_prefix_cache") == 1
    engine.weights.drop_prefixes()
    assert begun(engine, "t", own=CHUNK)[1] == 2 * CHUNK


def stored_at_its_beginning(engine: Changing, name: str, computed: int, **more: Any) -> int:
    """How many jobs store chunks of a request that vLLM begins behind so many tokens, though
    connectors were asked about whole blocks only.
    """
    request = PlayedRequest(name, **more)
    engine.begin(request)
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [new_request(request, ([1, 2, 3, 4, 5, 6],), computed)]
    output.num_scheduled_tokens = {name: request.num_tokens - computed}
    request.num_computed_tokens = computed
    return len(engine.connector.build_connector_meta(output).store_jobs)


@pytest.mark.parametrize(("computed", "stores"), [(0, 1), (CHUNK // 2, 0)])
def test_request_that_goes_on_within_a_block_of_other_weights_stores_nothing(
    computed: int, stores: int
) -> None:
    engine = Changing()
    begun(engine, "before")
    engine.change("new")
    assert stored_at_its_beginning(engine, "r", computed) == stores


def test_request_with_an_image_is_barred_until_outputs_of_old_encoders_are_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Changing()

    def ask(name: str, *images: Any) -> bool:
        request = PlayedRequest(name, mm_features=[*images])
        engine.begin(request)
        engine.schedule(request)
        return name in engine.connector._manager.barred

    assert not ask("before", "image")
    engine.change("new")
    assert ask("r", "image")
    assert ask("s", "other image")
    assert not ask("text")
    assert caplog.text.count("reset_encoder_cache") == 1
    engine.weights.drop_prefixes()
    assert ask("t", "image")
    engine.weights.drop_encodings()
    assert not ask("u", "image")


def test_request_behind_vllms_own_kv_loads_if_that_was_dropped_before_the_change() -> None:
    engine = Changing()
    begun(engine, "before")
    engine.weights.drop_prefixes()
    engine.change("new")
    engine.hold(1, 2)
    assert begun(engine, "r", own=CHUNK)[1] == 2 * CHUNK


def test_engine_without_a_name_for_its_weights_does_nothing_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "raykv")
    engine = Changing()
    engine.hold(0, 1)
    engine.change(None)
    assert engine.view.has_left
    assert begun(engine)[1] == 0
    assert caplog.text.count("can't tell this engine's weights from others") == 1
    engine.weights.label("7")
    assert not engine.view.has_left
    engine.change("first")
    engine.weights.label("8")
    assert engine.view.namespace == namespace_of(FACTS)


def test_engine_without_a_name_for_its_weights_goes_by_the_one_that_the_user_gives_them() -> None:
    engine, other = Changing(), Changing()
    for each in (engine, other):
        each.change(None)
        request = PlayedRequest("waits")
        each.begin(request)
        each.session.naming = Naming(Stamp(1, 5), "v2")
        each.weights.listen()
        assert not each.view.has_left
        each.hold(0, 1)
        assert each.schedule(request) == 0
        assert begun(each, "later")[1] == 2 * CHUNK
    assert engine.view.namespace == other.view.namespace != namespace_of(FACTS)
    engine.change(None)
    assert engine.view.has_left
    engine.session.naming = Naming(Stamp(1, 6), "v3")
    engine.weights.listen()
    assert engine.view.namespace != other.view.namespace


def test_name_that_was_given_before_a_change_is_not_the_new_weights() -> None:
    engine = Changing()
    engine.session.naming = Naming(Stamp(1, 5), "v2")
    engine.change(None)
    engine.weights.listen()
    assert engine.view.has_left


def test_steps_say_of_which_weights_their_jobs_are() -> None:
    engine = Changing()
    assert engine.step().weights_seen == {}
    engine.change("new")
    assert engine.step().weights_seen == {"w": 1}


def test_weights_that_have_not_changed_are_no_news() -> None:
    engine = Changing()
    request = PlayedRequest()
    engine.begin(request)
    engine.weights.know([WeightState("w")])
    engine.hold(0)
    assert engine.schedule(request) == CHUNK


def test_reset_that_follows_a_change_takes_nothing_from_others() -> None:
    engine = Changing()
    engine.change("new")
    engine.hold(0)
    manager = engine.connector._manager
    manager.reset_cache()
    assert not engine.view.is_clearing
    begun(engine)
    manager.reset_cache()
    assert engine.view.is_clearing


def test_ends_of_jobs_of_other_weights_bar_what_did_not_come_and_say_nothing_else() -> None:
    engine = Changing()
    request, _ = begun(engine)
    ends = [
        failed_end(request.request_id, [key(0)], direction=direction) for direction in Direction
    ]
    engine.hear(ends=ends)
    assert engine.view.requests.get(request.request_id).barred == {key(0)}
    assert not engine.view.counters["stores_failed"]


def test_what_ends_of_jobs_of_other_weights_say_is_there_is_not_believed() -> None:
    engine = Changing()
    old = engine.view.namespace
    engine.change("new")
    before = engine.view.query(0).position
    rows = [
        ListedRow(each, Key(key(at)), Where.RAM, ALL_BLOCKS, Reason.STORED)
        for at, each in enumerate((old, engine.view.namespace))
    ]
    result = CopyResult(1, before.life, before.number + 5, ListedRows.of(rows))
    ends = [JobEnd(each, old, "r", Keys.of([key(0)]), result) for each in Direction]
    engine.hear(ends=ends)
    assert not engine.view.loadable


# Names


def test_engines_with_the_same_weights_have_the_same_namespace() -> None:
    def entered(*states: WeightState, **facts: str) -> str | None:
        return Changing({**FACTS, **facts}).changed(*states)

    there = entered(state(1, "a"), state(3, "b", "w2"))
    assert entered(state(7, "a", "x"), state(7, "b", "y")) == there
    assert entered(state(7, "b", "x"), state(7, "a", "y")) != there
    assert entered(state(1, "a"), state(3, "b"), model="other") != there


@pytest.mark.parametrize("states", [[state(1, None)], [state(1, "a"), None]])
def test_weights_that_cant_be_told_have_no_name_until_they_are_given_one(
    states: list[WeightState | None],
) -> None:
    engine = Changing()
    assert engine.changed(*states) is None
    named = engine.called("v2")
    assert named not in (None, namespace_of(FACTS))
    assert engine.weights.space is not None
    assert engine.weights.space.traits["weights_version"] == "v2"
    # A name is of the weights that it was given to.
    assert engine.changed(*states) is None
    assert engine.called("v3") not in (None, named)
    assert engine.called("v2") == named


def test_vllms_own_name_counts_where_nothing_else_tells() -> None:
    engine = Changing()
    assert engine.changed(state(1, None)) is None
    engine.weights.label("7")
    seven = namespace(engine.weights)
    assert seven is not None
    engine.weights.label("8")
    assert namespace(engine.weights) not in (None, seven)
    there = engine.changed(state(2, "a"))
    engine.weights.label("7")
    assert namespace(engine.weights) == there


def test_users_name_tells_weights_apart_beside_their_content() -> None:
    engine = Changing()
    there = engine.changed(state(1, "a"))
    assert engine.called("v2") not in (None, there)
    assert engine.changed(state(2, "a")) == there


def test_update_under_way_is_asked_about_again() -> None:
    weights = Changing().weights
    weights.change("start_weight_update")
    weights.know([WeightState("w", 1, "start_weight_update", None, "first", is_open=True)])
    assert weights.is_asking
    assert weights.space is None


def test_news_are_changes_that_were_not_known() -> None:
    engine = Changing()
    weights, start = engine.weights, engine.view.namespace
    weights.know([state(0, "")])
    assert engine.view.namespace == start
    weights.know([state(0, ""), state(1, "a", "w2")])
    there = engine.view.namespace
    assert there != start
    # A report of a step may come late.
    engine.hear(weights={"w2": (1, "late")})
    assert not engine.view.has_left
    engine.hear(weights={"w2": (2, "load_weights")})
    assert engine.view.has_left
    weights.know([state(0, ""), state(2, "a", "w2")])
    assert (engine.view.has_left, engine.view.namespace) == (False, there)
