"""The Serve configurations of deploy/serve are what Serve, RayKV and vLLM take."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

import raykv.serve
from raykv.base.settings import load_settings
from raykv.serve.app import build_app
from raykv.serve.arguments import AppArguments, ModelArguments, parse, plan_of
from tests.house import ROOT

FOLDER = ROOT / "deploy" / "serve"
FILES = sorted(FOLDER.glob("*.yaml"))
every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def application(file: Path) -> Any:
    (found,) = ServeDeploySchema.model_validate(yaml.safe_load(file.read_text())).applications
    return found


def own(file: Path) -> bool:
    """Whether it is one of `build_app`'s; the other builders have tests of their own."""
    return bool(application(file).import_path == "raykv.serve:build_app")


def models() -> list[ModelArguments]:
    arguments = [application(file).args for file in FILES if own(file)]
    return [model for args in arguments for model in parse(AppArguments, args).models]


def test_there_is_one_for_each_way_to_serve() -> None:
    names = {file.stem for file in FILES}
    assert {"cpu-trial", "replicas", "autoscaling", "two-models"} <= names
    # Without a GPU, and with the builders of the files that they are named after.
    for name in ("disaggregated", "ray-llm-disaggregated"):
        trial, plain = (
            application(FOLDER / f"{each}.yaml") for each in (f"cpu-trial-{name}", name)
        )
        assert trial.import_path == plain.import_path
        assert set(trial.args) <= set(plain.args)
        assert not re.search("gpu|accelerator_type", json.dumps(trial.args))


@every_file
def test_file_names_a_builder(file: Path) -> None:
    module, _, builder = application(file).import_path.partition(":")
    assert module == "raykv.serve"
    assert builder in dir(raykv.serve)


@pytest.mark.parametrize("file", [*filter(own, FILES)], ids=lambda file: str(file.stem))
def test_file_builds_an_application(file: Path) -> None:
    args = application(file).args
    assert isinstance(build_app(args), Application)
    models = parse(AppArguments, args).models
    changed = {deployment.name for deployment in application(file).deployments}
    assert changed <= {model.deployment_name for model in models} | {"ingress"}
    for model in models:
        plan = plan_of(model, ray_address=None)
        assert load_settings(plan.transfer["kv_connector_extra_config"]).pool_bytes


def test_vllm_knows_all_options() -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import AsyncEngineArgs

    from raykv.serve.vllm_app import parse_flags

    for model in models():
        plan = plan_of(model, ray_address="10.0.0.1:6379")
        args = parse_flags(plan.vllm_args("10.0.0.1:6379")[1:])
        engine_args = AsyncEngineArgs.from_cli_args(args)
        assert engine_args.model == model.model
        assert engine_args.max_model_len == model.engine_args["max_model_len"]
        assert engine_args.kv_transfer_config.kv_connector == "RayKVConnector"


def test_keys_that_vllm_takes_are_known_by_their_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    from raykv.serve.vllm_app import key_digests

    first, second = (hashlib.sha256(key).digest() for key in (b"first", b"second"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert key_digests(["model"]) == []
    assert key_digests(["model", "--api-key", "first", "second"]) == [first, second]
    monkeypatch.setenv("VLLM_API_KEY", "second")
    assert key_digests(["model"]) == [second]
    assert key_digests(["model", "--api-key", "first"]) == [first]
