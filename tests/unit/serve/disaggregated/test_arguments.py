"""Arguments of `build_disaggregated_app`, and the example in deploy/serve."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

pytest.importorskip("ray.serve")

from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from raykv.base.errors import SettingError
from raykv.base.settings import load_settings
from raykv.serve import build_disaggregated_app
from raykv.serve.arguments import ModelArguments, parse, plan_of
from raykv.serve.disaggregated.arguments import DisaggregatedArguments, DisaggregatedModelArguments
from raykv.serve.disaggregated.requests import Handover
from tests.house import ROOT

FOLDER = ROOT / "deploy" / "serve"


def made(**args: Any) -> DisaggregatedModelArguments:
    (model,) = parse(DisaggregatedArguments, {"model": "some/model", **args}).models
    return model


def settings_of(engines: ModelArguments) -> Any:
    extra = plan_of(engines, ray_address=None).transfer["kv_connector_extra_config"]
    return load_settings(extra, environment={})


def test_prefill_engines_store_every_prompt_and_may_pin_it() -> None:
    model = made(raykv={"pool_bytes": "1GiB", "stop_unused_stores": True})
    prefill, decode = settings_of(model.prefill_engines), settings_of(model.decode_engines)
    assert (prefill.stop_unused_stores, prefill.client_hints) == (False, "pin")
    assert (decode.stop_unused_stores, decode.client_hints) == (True, "none")
    assert prefill.pool_bytes == decode.pool_bytes == 1 << 30


def test_each_kind_has_its_own_options_beside_the_common_ones() -> None:
    model = made(
        engine_args={"max_model_len": 100, "max_num_seqs": 1},
        raykv={"pool_bytes": "1GiB"},
        prefill={"engine_args": {"max_num_seqs": 2}, "deployment": {"num_replicas": 3}},
        decode={"raykv": {"pool_bytes": "2GiB"}, "router": {"policy": "round_robin"}},
    )
    prefill, decode = model.prefill_engines, model.decode_engines
    assert prefill.engine_args == {"max_model_len": 100, "max_num_seqs": 2}
    assert decode.engine_args == {"max_model_len": 100, "max_num_seqs": 1}
    assert (prefill.deployment, decode.deployment) == ({"num_replicas": 3}, {})
    assert (prefill.raykv or {})["pool_bytes"] == "1GiB"
    assert (decode.raykv or {})["pool_bytes"] == "2GiB"
    assert decode.router.policy == "round_robin"
    assert (prefill.deployment_name, decode.deployment_name) == ("model-prefill", "model-decode")
    assert prefill.served_names == decode.served_names == ["some/model"]


def test_handover_is_what_the_proxy_decides_by_on_the_other_side_too() -> None:
    given: dict[str, Any] = {"min_prompt_tokens": 5, "pin_s": 0.0, "prefill_deadline_s": 9.0}
    model = made(handover=given, prefill={"deployment": {"num_replicas": 2}})
    assert model.handover == Handover(**given)
    assert parse(DisaggregatedModelArguments, model.model_dump()) == model
    assert made().handover == Handover()


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ({"prefill": {"engine_args": {"dtype": "float16"}}}, "prefill engines can't have .* dtype"),
        (
            {"decode": {"engine_args": {"block_size": 32, "dtype": "x"}}},
            "decode engines can't have their own block_size, dtype",
        ),
        ({"decode": {"raykv": {"blocks_per_chunk": 2}}}, "blocks_per_chunk"),
        ({"decode": {"raykv": {"pool_bites": 2}}}, "pool_bites"),
        ({"raykv": None}, "raykv"),
        ({"prefil": {}}, "prefil"),
        ({"prefill": {"num_replicas": 2}}, "num_replicas"),
        ({"handover": {"min_prompt_tokens": -1}}, "min_prompt_tokens"),
        ({"handover": {"bytes_per_token": 0}}, "bytes_per_token"),
        ({"handover": {"prefill_deadline_s": 0}}, "prefill_deadline_s"),
        ({"handover": {"pin_s": 1e9}}, "pin_s"),
        ({"models": []}, "models"),
        ({"models": [{"model": "a"}, {"model": "b/a"}]}, "two deployments are called"),
        (
            {"models": [{"model": "a"}, {"model": "a", "name": "b"}]},
            "two served models are called 'a'",
        ),
    ],
)
def test_wrong_argument_is_refused_with_its_place(args: dict[str, Any], complaint: str) -> None:
    base = {} if "models" in args else {"model": "some/model"}
    with pytest.raises(SettingError, match=complaint):
        parse(DisaggregatedArguments, {**base, **args})


@pytest.mark.parametrize("name", ["disaggregated", "cpu-trial-disaggregated"])
def test_example_is_an_application_with_both_kinds(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "raykv.serve:build_disaggregated_app"
    assert isinstance(build_disaggregated_app(application.args), Application)
    (model,) = parse(DisaggregatedArguments, application.args).models
    for kind in ("prefill", "decode"):
        engines: ModelArguments = getattr(model, f"{kind}_engines")
        assert settings_of(engines).pool_bytes
        # Kinds of nodes are told apart by a resource; a trial has one node.
        own = engines.deployment["ray_actor_options"].get("resources")
        assert own == (None if name.startswith("cpu") else {kind: 0.001})


def test_question_of_the_trial_is_long_enough_for_the_prefill_engine() -> None:
    text = (FOLDER / "cpu-trial-disaggregated.yaml").read_text()
    (numbers,) = re.findall(r"seq -s ' ' (\d+)", text)
    asked = " ".join(str(each + 1) for each in range(int(numbers)))
    (application,) = yaml.safe_load(text)["applications"]
    (model,) = parse(DisaggregatedArguments, application["args"]).models
    handover = model.handover
    assert len(asked) / handover.bytes_per_token >= 2 * handover.min_prompt_tokens
