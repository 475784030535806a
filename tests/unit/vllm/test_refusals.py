"""What RayKV can't do yet stops the start with a sentence that names the setting."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raykv.base.errors import SettingError, VersionError
from raykv.vllm.internals.names import check_vllm_version
from tests.fixtures.model_configs import BERT, LLAMA, MIXTRAL

pytest.importorskip("vllm")

from vllm import envs
from vllm.config import KVTransferConfig, PoolerConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import CrossAttentionSpec, UniformTypeKVCacheSpecs

from raykv.protocol.worker import KVLayout
from raykv.vllm import plugin
from raykv.vllm.connector import RayKVConnector, logged_refusals
from raykv.vllm.identity.placement import RankPlace, refuse_launcher, refuse_ranks_elsewhere
from raykv.vllm.internals.arguments import refuse_arguments
from raykv.vllm.spec import refuse_kinds, refuse_unsupported, stores_prompts_alone
from raykv.vllm.transfers import ChunkSpec, RayOffloadingWorker
from tests.fixtures.vllm import ATTENTION, FULL, PROMPT, STATE, WINDOW, kv_cache_config


def config(**fields: Any) -> Any:
    values: dict[str, Any] = {
        "canonical_layout": False,
        "extra_config": {},
        "parallel": SimpleNamespace(pp_size=1),
    }
    return SimpleNamespace(**{**values, **fields})


def test_plain_engine_is_accepted() -> None:
    refuse_unsupported(config())
    shared = SimpleNamespace(pp_size=1, tp_size=2, is_parallelism_agnostic=True)
    refuse_unsupported(config(canonical_layout=True, parallel=shared))
    refuse_launcher(parallel())
    refuse_launcher(parallel(distributed_executor_backend="external_launcher"))
    refuse_ranks_elsewhere([], "here")
    refuse_ranks_elsewhere([RankPlace("here"), RankPlace("here")], "here")


def parallel(**fields: Any) -> Any:
    values = {
        "nnodes_within_dp": 1,
        "distributed_executor_backend": "mp",
        "world_size": 1,
        "pipeline_parallel_size": 1,
    }
    return SimpleNamespace(**{**values, **fields})


def test_vllms_loads_within_the_step_are_refused_before_any_process_starts() -> None:
    given = {"sync_load_budget_bytes": 1 << 20}
    with pytest.raises(SettingError, match=r"sync_load_budget_bytes is not .*layerwise_loads=true"):
        RayKVConnector.requires_piecewise_for_cudagraph(given)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {
                "canonical_layout": True,
                "parallel": SimpleNamespace(pp_size=1, tp_size=3, is_parallelism_agnostic=False),
            },
            "canonical_layout=true can't be had: .*tensor_parallel_size=3",
        ),
    ],
)
def test_unsupported_setting_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(SettingError, match=named):
        refuse_unsupported(config(**fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"distributed_executor_backend": "external_launcher", "world_size": 2},
            "distributed_executor_backend='external_launcher' makes 2 engines",
        ),
    ],
)
def test_engine_that_is_told_to_start_ranks_elsewhere_is_refused(
    fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(SettingError, match=named):
        refuse_launcher(parallel(**fields))


def test_stages_whose_ends_would_not_be_heard_of_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = parallel(distributed_executor_backend="ray", world_size=2, pipeline_parallel_size=2)
    refuse_launcher(stages)
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False, raising=False)
    with pytest.raises(SettingError, match="leave VLLM_USE_RAY_V2_EXECUTOR_BACKEND at 1"):
        refuse_launcher(stages)


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        (["", "there"], "run on Ray node there and RayKV was to use the pool of node here"),
        (["there", "there"], "run on Ray node there and RayKV was to use the pool of node here"),
    ],
)
def test_engine_whose_ranks_say_that_they_are_elsewhere_does_not_start(
    nodes: list[str], named: str
) -> None:
    stopped: list[str] = []
    node = SimpleNamespace(node_id="here")
    runtime = SimpleNamespace(node_id="here", nodes=[node], stop=lambda: stopped.append("here"))
    engine: Any = SimpleNamespace(_runtime=runtime)
    told: dict[Any, Any] = {(0, rank): RankPlace(node) for rank, node in enumerate(nodes)}
    with pytest.raises(SettingError, match=named):
        RayKVConnector.set_xfer_handshake_metadata_pp_aware(engine, told)
    assert stopped == ["here"]


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu", "0.33.0", "0.33.0rc1"])
def test_supported_vllm_is_accepted(version: str) -> None:
    check_vllm_version(version)


@pytest.mark.parametrize("version", ["0.31.4", "0.34.0", "1.32.0", "dev", "3"])
def test_other_vllm_is_refused_with_both_versions(version: str) -> None:
    with pytest.raises(VersionError, match=f"0.32 or 0.33; this is vLLM {version}"):
        check_vllm_version(version)


def test_transfer_takes_arguments_of_later_vllm() -> None:
    """vLLM 0.33 calls `submit_load(..., expedited=False)`."""
    import numpy as np

    submitted: list[Any] = []
    link: Any = SimpleNamespace(submit=submitted.append, node_life=1, drain=list)
    worker = RayOffloadingWorker(link, KVLayout("memfd", 1, 1, [], [0], [[]]))
    blocks: Any = SimpleNamespace(
        block_ids=np.array([3], dtype=np.int32), group_sizes=[1], block_indices=[0]
    )
    assert worker.submit_load(1, ChunkSpec([b"k"], "model"), blocks, expedited=True)
    assert [request.job.block_ids for request in submitted] == [[3]]


def test_start_that_is_stopped_says_why_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingError), logged_refusals():
        raise SettingError("leave it out")
    assert caplog.messages == ["RayKV stops the start of the engine: leave it out"]


def test_kinds_of_kv_that_say_nothing_about_beginnings_are_refused() -> None:
    refuse_kinds(kv_cache_config([FULL, STATE]))
    cross = CrossAttentionSpec(**ATTENTION)
    together = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": FULL, "b": cross})
    with pytest.raises(SettingError, match="vLLM keeps no KV of this engine's prompts"):
        refuse_kinds(kv_cache_config([]))
    for kinds in ([FULL, cross], [together]):
        with pytest.raises(SettingError, match="has an encoder and a decoder"):
            refuse_kinds(kv_cache_config(kinds))
    with pytest.raises(SettingError, match="without enable_prefix_caching=true"):
        refuse_kinds(kv_cache_config([FULL, replace(STATE, mamba_cache_mode="none")]))


def test_of_a_model_whose_answers_see_less_prompts_alone_are_stored() -> None:
    assert stores_prompts_alone(kv_cache_config([FULL, PROMPT]))
    assert not stores_prompts_alone(kv_cache_config([FULL, WINDOW]))
    assert not stores_prompts_alone(None)


OURS = {"kv_connector": "RayKVConnector"}
AMONG = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{**OURS, "kv_role": "kv_both"}]},
}


def parsed(folder: Path, model: dict[str, Any], transfer: dict[str, Any], **arguments: Any) -> Any:
    """What vLLM makes of an engine's arguments, with RayKV's plugin."""
    (folder / "config.json").write_text(json.dumps(model))
    plugin.register()
    return EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **transfer),
        **arguments,
    ).create_engine_config()


@pytest.mark.parametrize("transfer", [OURS, AMONG], ids=["alone", "among others"])
@pytest.mark.parametrize(
    ("model", "arguments", "named"),
    [
        (LLAMA, {"kv_offloading_size": 4.0}, "kv_offloading_size=4.0 turns on vLLM's own"),
        (
            LLAMA,
            {"kv_offloading_size": 4.0, "kv_offloading_backend": "lmcache"},
            "kv_offloading_size=4.0 turns on",
        ),
        (
            MIXTRAL,
            {"enable_return_routed_experts": True},
            "enable_return_routed_experts=True can't be used with RayKV",
        ),
        (
            MIXTRAL,
            {"aux_output_config": {"enable_return_routed_experts": True}},
            "enable_return_routed_experts=True can't be used with RayKV",
        ),
        (BERT, {}, "encodes prompts as a whole and vLLM keeps no KV"),
        (LLAMA, {"runner": "pooling", "pooler_config": {"seq_pooling_type": "MEAN"}}, "=MEAN, "),
        (LLAMA, {"runner": "pooling", "pooler_config": {"seq_pooling_type": "CLS"}}, "=CLS, "),
        (LLAMA, {"runner": "pooling", "pooler_config": {"tok_pooling_type": "STEP"}}, "=STEP"),
    ],
)
def test_what_vllm_has_off_for_a_reason_is_refused_when_arguments_are_parsed(
    model: dict[str, Any],
    arguments: dict[str, Any],
    named: str,
    transfer: dict[str, Any],
    tmp_path: Path,
) -> None:
    if "pooler_config" in arguments:
        from vllm.config import PoolerConfig

        arguments = {**arguments, "pooler_config": PoolerConfig(**arguments["pooler_config"])}
    with pytest.raises(SettingError, match=named):
        parsed(tmp_path, model, transfer, **arguments)


def test_connector_refuses_the_same_where_the_plugin_did_not(tmp_path: Path) -> None:
    pooling = {"runner": "pooling", "pooler_config": PoolerConfig(seq_pooling_type="MEAN")}
    unseen = parsed(tmp_path, LLAMA, {"kv_connector": "ExampleConnector"}, **pooling)
    with pytest.raises(SettingError, match="seq_pooling_type=MEAN"):
        RayKVConnector(unseen, None, kv_cache_config([FULL]))


def test_pooling_of_the_last_token_is_accepted(tmp_path: Path) -> None:
    pooling = {"runner": "pooling", "pooler_config": PoolerConfig(seq_pooling_type="LAST")}
    found = parsed(tmp_path, LLAMA, OURS, **pooling)
    assert found.kv_transfer_config.kv_connector == "RayKVConnector"


def test_engines_without_raykv_are_left_alone(tmp_path: Path) -> None:
    other = {"kv_connector": "ExampleConnector"}
    found = parsed(tmp_path, LLAMA, other, kv_offloading_size=4.0)
    assert found.kv_transfer_config.kv_connector == "OffloadingConnector"


def test_answers_that_must_not_depend_on_the_cache_are_refused_where_vllm_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parsed(tmp_path, LLAMA, OURS)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    refuse_arguments(config)
    # As layers do it with some attention back ends.
    config.cache_config.enable_prefix_caching = False
    with pytest.raises(SettingError, match="VLLM_BATCH_INVARIANT=1"):
        refuse_arguments(config)
