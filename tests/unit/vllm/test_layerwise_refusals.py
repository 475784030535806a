"""`layerwise_loads` stops the start, with a sentence, where it is not known to be right."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from raykv.base.errors import SettingError
from raykv.base.settings import load_settings
from raykv.vllm.connector import RayKVConnector
from raykv.vllm.layered import refuse_layerwise
from raykv.vllm.spec import refuse_non_causal
from tests.fixtures.vllm import ATTENTION, FULL, kv_cache_config, layerwise_config


def groups(*specs: Any) -> Any:
    return kv_cache_config(specs)


def check(vllm_config: Any, kv: Any = None, **settings: Any) -> None:
    refuse_layerwise(load_settings(settings), vllm_config, kv or groups(FULL))


@pytest.mark.parametrize("mode", [None, *(each for each in CUDAGraphMode if each.name != "FULL")])
@pytest.mark.parametrize("is_usual", [False, True])
def test_engine_as_users_run_it_may_load_by_layer(mode: Any, is_usual: bool) -> None:
    check(
        layerwise_config(
            cudagraph_mode=mode, async_scheduling=is_usual, use_v2_model_runner=is_usual
        )
    )


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "pipeline_parallel_size=2"),
        ({"parallel": {"decode_context_parallel_size": 2}}, "decode_context_parallel_size=2"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "prefill_context_parallel_size=2"),
        ({"speculative_config": SimpleNamespace(method="ngram")}, "speculative_config"),
        ({"cudagraph_mode": CUDAGraphMode.FULL}, "cudagraph_mode=FULL .*=FULL_AND_PIECEWISE"),
        ({"policy": "fail"}, "kv_load_failure_policy=fail"),
        ({"cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype=fp8_per_token_head keeps scales"),
        (
            {
                "connector": "RayKVHiddenStatesConnector",
                "speculative_config": SimpleNamespace(method="extract_hidden_states"),
            },
            "hidden states .* use RayKVConnector",
        ),
    ],
)
def test_engine_that_could_give_wrong_tokens_is_refused(changed: Any, said: str) -> None:
    with pytest.raises(SettingError, match=f"layerwise_loads can't be had: .*{said}"):
        check(layerwise_config(**changed))


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(**ATTENTION),
        SlidingWindowSpec(**ATTENTION, sliding_window=32),
        MambaSpec(block_size=16, shapes=((1, 2),), dtypes=(torch.float32,)),
        UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL}),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_model_whose_layers_may_not_wait_is_refused(spec: Any) -> None:
    with pytest.raises(SettingError, match=f"can't be had: .* {type(spec).__name__}, .*leave it"):
        check(layerwise_config(), groups(spec))


def test_model_whose_tokens_depend_on_later_ones_is_refused_with_and_without_it() -> None:
    refuse_non_causal(groups(FULL, SlidingWindowSpec(**ATTENTION, sliding_window=32)))
    spec = FullAttentionSpec(**ATTENTION, non_causal=True)
    together = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": spec})
    for some in (groups(spec), groups(FULL, spec), groups(together)):
        with pytest.raises(SettingError, match="depends on tokens behind it"):
            refuse_non_causal(some)


@pytest.mark.parametrize("count", [0, 2])
def test_model_with_several_groups_is_refused(count: int) -> None:
    with pytest.raises(SettingError, match=f"can't be had: .* {count} KV groups"):
        check(layerwise_config(), groups(*[FULL] * count))


def test_durable_stores_beside_it_are_refused() -> None:
    with pytest.raises(SettingError, match="can't be had: with durable_stores"):
        check(layerwise_config(), durable_stores=True)


def test_vllm_keeps_its_graphs_of_decoding() -> None:
    asks = RayKVConnector.requires_piecewise_for_cudagraph
    assert not asks({"layerwise_loads": True})
    assert not asks({})
