"""What Ray's prefill and decode engines are asked, where KV is handed over through RayKV."""

from __future__ import annotations

from typing import Any

import pytest

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
    ],
)
def test_application_whose_engines_would_go_without_raykv_is_refused_when_it_is_built(
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
