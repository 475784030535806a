"""Arguments of the Serve applications: what a YAML may say, and what is said to the rest."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import SettingError
from raykv.serve.app import build_app
from raykv.serve.arguments import AppArguments, ModelArguments, parse, plan_of, to_flags

MODEL = {"model": "org/some-model-1.5"}
ENGINES = "deployment of some-model-1.5"


def refused(args: Any) -> str:
    """The one sentence for wrong arguments."""
    with pytest.raises(SettingError) as raised:
        build_app(args)
    text = str(raised.value)
    assert text.startswith("arguments of the application: "), text
    assert "\n" not in text
    assert "pydantic" not in text
    return text.removeprefix("arguments of the application: ")


def test_one_model_needs_no_list() -> None:
    alone = parse(AppArguments, {**MODEL, "ingress": {"attempts": 3}})
    listed = parse(AppArguments, {"models": [MODEL], "ingress": {"attempts": 3}})
    assert alone.ingress.attempts == 3
    assert alone == listed
    (model,) = alone.models
    assert (model.deployment_name, model.served_names) == ("some-model-1.5", [MODEL["model"]])


def test_served_names_are_those_that_vllm_will_answer_to() -> None:
    for given_names, expected in (("a", ["a"]), (["a", "b"], ["a", "b"]), (None, [MODEL["model"]])):
        engine_args = {"served_model_name": given_names}
        model = parse(ModelArguments, {**MODEL, "engine_args": engine_args})
        assert model.served_names == expected


def test_arguments_survive_their_way_to_a_replica() -> None:
    args = {**MODEL, "name": "n", "raykv": None, "router": {"policy": "a.b:C", "kwargs": {"x": 1}}}
    model = parse(ModelArguments, args)
    assert parse(ModelArguments, json.loads(json.dumps(model.model_dump()))) == model


@pytest.mark.parametrize(
    ("args", "place", "reason"),
    [
        ({}, "model", "is needed"),
        ({"models": []}, "models", "at least 1 item"),
        ({"models": [MODEL, {**MODEL, "naem": "x"}]}, "models.1.naem", "is an unknown argument"),
        ({**MODEL, "models": [MODEL]}, "model", "is an unknown argument"),
        ({**MODEL, "model": 7}, "model", "valid string, not 7"),
        ({**MODEL, "model": "/"}, "args", "give `name`"),
        ({**MODEL, "name": "a b"}, "name", "not 'a b'"),
        ({**MODEL, "engine_args": ["--x"]}, "engine_args", "not ['--x']"),
        ({**MODEL, "engine_args": {"a b": 1}}, "args", "'a b' is not an option"),
        ({**MODEL, "engine_args": {"x": [[1]]}}, "args", "[1] is an invalid value"),
        ({**MODEL, "raykv": {"pool_byte": "1GiB"}}, "args", "pool_byte"),
        ({**MODEL, "raykv": {"pool_bytes": "many"}}, "args", "many"),
        ({**MODEL, "raykv": "off"}, "raykv", "not 'off'"),
        ({**MODEL, "deployment": {"name": "x"}}, "args", "beside `deployment`"),
        ({**MODEL, "deployment": {"num_replica": 2}}, ENGINES, "num_replica"),
        ({**MODEL, "deployment": {"num_replicas": -1}}, ENGINES, "greater than or equal"),
        ({**MODEL, "ingress": {"max_body_bytes": "big"}}, "ingress.max_body_bytes", "not 'big'"),
        ({**MODEL, "ingress": {"replica_wait_s": float("nan")}}, "ingress.replica_wait_s", "nan"),
        ({**MODEL, "ingress": {"deployment": {"cpus": 1}}}, "ingress.deployment", "cpus"),
        ({**MODEL, "router": {"policy": "round-robin"}}, "router.policy", "'round-robin'"),
        ({**MODEL, "router": {"policy": "raykv.nowhere:X"}}, "router.policy", "raykv.nowhere"),
        ({**MODEL, "router": {"policy": "raykv:NoRouter"}}, "router.policy", "NoRouter"),
        ({"models": [MODEL, MODEL]}, "args", "two deployments are called 'some-model-1.5'"),
        ({"models": [MODEL, {**MODEL, "name": "b"}]}, "args", "two served models are called"),
        ([MODEL], "args", "dictionary"),
        (None, "args", "dictionary"),
    ],
)
def test_wrong_argument_is_refused_with_its_place(args: Any, place: str, reason: str) -> None:
    text = refused(args)
    assert text.startswith((f"{place}: ", f"{place}.")), text
    assert reason in text


def test_all_wrong_places_are_named_at_once() -> None:
    text = refused({"models": [{"model": 1}, {"name": "x"}], "ingress": {"attempts": 0}})
    for place in ("models.0.model: ", "models.1.model: ", "ingress.attempts: "):
        assert place in text


def test_long_wrong_value_is_cut() -> None:
    assert len(refused({**MODEL, "raykv": "x" * 10_000})) < 400


@pytest.mark.parametrize("connector", ["LMCacheConnectorV1", "MultiConnector"])
def test_other_connector_is_refused(connector: str) -> None:
    engine_args = {"kv_transfer_config": {"kv_connector": connector}}
    assert connector in refused({**MODEL, "engine_args": engine_args})


@pytest.mark.parametrize(
    ("engine_args", "reason"),
    [
        ({"max_model_length": 100}, "unrecognized arguments: --max-model-length=100"),
        ({"max_model_len": "long"}, "--max-model-len"),
        ({"enable_auto_tool_choice": True}, "--tool-call-parser"),
    ],
)
def test_flag_that_vllm_refuses_is_refused_before_a_replica_starts(
    engine_args: dict[str, Any], reason: str
) -> None:
    pytest.importorskip("vllm", exc_type=ImportError)
    text = refused({**MODEL, "engine_args": engine_args})
    assert text.startswith("engine_args of some-model-1.5: "), text
    assert reason in text


def test_folder_that_no_node_can_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[dict[str, Any]] = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.nodes", lambda: alive)
    assert refused({"model": "/no/such"}) == "model of such: there is no folder /no/such"
    # Another node may have it: each replica looks on its own.
    alive.append({"Alive": True})
    build_app({"model": "/no/such"})


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    ["model", "models", "name", "raykv", "engine_args", "ingress", "x"]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_anything_is_taken_or_refused_in_one_sentence(args: Any) -> None:
    try:
        parse(AppArguments, args)
    except SettingError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said


# What vLLM is started with


def transfer(args: dict[str, Any]) -> dict[str, Any]:
    model = parse(ModelArguments, args)
    plan = plan_of(model, ray_address="10.0.0.1:6379", node_id="ab" * 28)
    extra: dict[str, Any] = plan.transfer["kv_connector_extra_config"]
    return extra


def test_settings_come_from_raykv_and_replica_and_transfer_config() -> None:
    own = {"kv_transfer_config": {"kv_connector_extra_config": {"blocks_per_chunk": 2}}}
    assert transfer({**MODEL, "engine_args": own, "raykv": {"pool_bytes": "1GiB"}}) == {
        "blocks_per_chunk": 2,
        "pool_bytes": "1GiB",
        "ray_address": "10.0.0.1:6379",
        "node_id": "ab" * 28,
    }


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({"max_model_len": 1024}, ["--max-model-len=1024"]),
        ({"enforce_eager": True}, ["--enforce-eager"]),
        ({"enable_prefix_caching": False}, ["--no-enable-prefix-caching"]),
        ({"dtype": None}, []),
        ({"served_model_name": ["a", "b"]}, ["--served-model-name", "a", "b"]),
        ({"x": {"a": [1, None]}}, ["--x", '{"a": [1, null]}']),
        ({"x": "-1"}, ["--x=-1"]),
        ({"x": 0.5, "y-z": "é"}, ["--x=0.5", "--y-z=é"]),
    ],
)
def test_options_are_flags(options: dict[str, Any], flags: list[str]) -> None:
    assert to_flags(options) == flags


@pytest.mark.parametrize("options", [{"": 1}, {"a b": 1}, {"a=b": 1}, {"a": [[1]]}, {"a": b"x"}])
def test_what_is_no_option_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="option of vLLM"):
        to_flags(options)


# What Serve is told


def test_deployments_have_bounds_and_look_for_hanging_replicas() -> None:
    app = build_app({**MODEL, "deployment": {"num_replicas": 3, "max_ongoing_requests": 7}})
    ingress = app._bound_deployment
    assert ingress.name == "ingress"
    assert ingress.max_queued_requests > 0
    (engine,) = (each._bound_deployment for _, each in ingress.init_args[1])
    assert (engine.name, engine.num_replicas) == ("some-model-1.5", 3)
    assert engine.max_ongoing_requests == 7
    assert engine.max_queued_requests > 0
    assert engine._deployment_config.health_check_period_s <= 1


def test_engines_do_not_give_way_unless_they_are_to() -> None:
    def environments(variables: dict[str, str]) -> list[Any]:
        own = {"runtime_env": {"env_vars": variables}}
        app = build_app({**MODEL, "deployment": {"ray_actor_options": own}})._bound_deployment
        ((_, engine),) = app.init_args[1]
        options = (engine._bound_deployment.ray_actor_options, app.ray_actor_options)
        return [each["runtime_env"]["env_vars"] for each in options]

    kept = {"RAY_worker_niceness": "0"}
    assert environments({"A": "1"}) == [{"A": "1", **kept}, kept]
    assert environments({"RAY_worker_niceness": "7"}) == [{"RAY_worker_niceness": "7"}, kept]


def test_router_of_any_import_path_gets_its_arguments() -> None:
    from raykv.serve.app import router_config

    assert router_config(parse(ModelArguments, MODEL)) is None
    path = "raykv.serve.router.round_robin:RoundRobinRouter"
    for policy in (path, "round_robin"):
        router = {"policy": policy, "kwargs": {"a": 1}}
        mine = router_config(parse(ModelArguments, {**MODEL, "router": router}))
        assert mine.request_router_kwargs == {"a": 1}
        assert mine.request_router_class == path
