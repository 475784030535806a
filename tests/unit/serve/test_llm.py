"""What Ray's prefill and decode engines are asked, where KV is handed over through RayKV."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.house import ROOT

pytest.importorskip("pyarrow", reason="the extra llm is not installed")
pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def backend() -> Any:
    from raykv.serve.llm import RayKVBackend

    return RayKVBackend(None)


def request(**more: Any) -> Any:
    from ray.llm._internal.serve.core.configs.openai_api_models import ChatCompletionRequest

    chat = [{"role": "user", "content": "hello"}]
    return ChatCompletionRequest(
        model="m", messages=chat, max_completion_tokens=9, stream=True, **more
    )


def test_prefill_engine_computes_one_token_and_is_not_told_that_the_prompt_was(
    backend: Any,
) -> None:
    asked = request(kv_transfer_params={"raykv_prefilled": True, "raykv_store": True})
    prefill = backend.prepare_prefill_request(request=asked, peer=None)
    assert (prefill.max_completion_tokens, prefill.stream) == (1, False)
    assert prefill.kv_transfer_params == {"raykv_store": True}
    plain = backend.prepare_prefill_request(request=request(), peer=None)
    assert plain.kv_transfer_params is None


def test_decode_engine_is_told_that_the_prompt_was_computed_and_no_address(backend: Any) -> None:
    asked = request(kv_transfer_params={"raykv_prefilled": False, "raykv_load": True})
    decode = backend.prepare_decode_request(request=asked, peer=None, prefill_response=object())
    assert (decode.max_completion_tokens, decode.stream) == (9, True)
    assert decode.kv_transfer_params == {"raykv_prefilled": True, "raykv_load": True}
    # What the client sent is as it was.
    assert asked.kv_transfer_params == {"raykv_prefilled": False, "raykv_load": True}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kv_offloading_size": 4}, "model 'm': kv_offloading_size=4 turns on vLLM's own"),
        ({"enable_return_routed_experts": True}, "model 'm': enable_return_routed_experts=True"),
        ({"max_model_length": 9}, "model 'm': engine_kwargs: .*: max_model_length"),
    ],
)
def test_application_that_no_replica_could_serve_is_refused_when_it_is_built(
    backend: Any, arguments: dict[str, Any], said: str
) -> None:
    from raykv import serve
    from raykv.base.errors import SettingError

    model = {"model_loading_config": {"model_id": "m"}, "engine_kwargs": arguments}
    for build, args in (
        (serve.build_openai_app, {"llm_configs": [model]}),
        (serve.build_pd_openai_app, {"prefill_config": model, "decode_config": model}),
    ):
        with pytest.raises(SettingError, match=said):
            build(args)


@pytest.mark.parametrize(("depth", "status"), [(90, 404), (200, 400), (900, 400)])
def test_json_that_is_nested_too_deeply_is_refused_by_rays_ingress(
    backend: Any, depth: int, status: int
) -> None:
    """Less than that goes on, and finds no model."""
    from fastapi.testclient import TestClient
    from ray.llm._internal.serve.core.ingress.ingress import init

    from raykv.serve.llm import LimitedIngress

    app = init()
    app.post("/v1/chat/completions")(LimitedIngress({}, {}).chat)
    deep = "[" * depth + "]" * depth
    body = f'{{"model": "m", "messages": [], "kv_transfer_params": {{"a": {deep}}}}}'
    answer = TestClient(app).post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    assert ("nested deeper" in answer.text) == (status == 400)


@pytest.mark.parametrize("name", ["ray-llm-disaggregated", "cpu-trial-ray-llm-disaggregated"])
def test_example_is_an_application_of_prefill_and_decode_engines(
    backend: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ray.llm._internal.serve.serving_patterns.prefill_decode.builder import PDServingArgs
    from ray.serve.schema import ServeDeploySchema

    from raykv import serve

    # What it builds next asks a Ray cluster.
    monkeypatch.setattr("ray.serve.llm.build_pd_openai_app", PDServingArgs.model_validate)
    monkeypatch.setattr("raykv.serve.models.smollm2", lambda **_: Path("/the/folder"))
    text = (ROOT / "deploy" / "serve" / f"{name}.yaml").read_text()
    (application,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    made: Any = serve.build_pd_openai_app(application.args)
    assert isinstance(made, PDServingArgs)
    for engines in (made.prefill_config, made.decode_config):
        assert engines.engine_kwargs["kv_transfer_config"]["kv_connector"] == "RayKVConnector"
        is_trial = name.startswith("cpu")
        assert engines.accelerator_config.kind == ("cpu" if is_trial else "gpu")
        source = engines.model_loading_config.model_source
        assert source == ("/the/folder" if is_trial else "Qwen/Qwen3-8B")


def test_small_model_goes_by_its_name_without_a_source_too(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from raykv import serve

    monkeypatch.setattr("ray.serve.llm.build_openai_app", lambda args: args["llm_configs"])
    monkeypatch.setattr("raykv.serve.models.smollm2", lambda **_: Path("/the/folder"))
    models = [{"model_loading_config": {"model_id": name}} for name in ("smollm2", "some/model")]
    made: Any = serve.build_openai_app({"llm_configs": models})
    loading = [each.model_loading_config for each in made]
    assert [each.model_id for each in loading] == ["smollm2", "some/model"]
    assert [each.model_source for each in loading] == ["/the/folder", None]
