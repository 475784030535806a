"""RayKV in a model's `kv_transfer_config`, and what a replica fills in."""

from __future__ import annotations

import sys
from copy import deepcopy
from typing import Any

import pytest
import ray.serve

from raykv import serve
from raykv.base.errors import SettingError, VersionError
from raykv.serve.transfer import fill_in, with_raykv

EXTRA = "kv_connector_extra_config"
OURS = {"kv_connector": "RayKVConnector", "kv_role": "kv_both"}
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def several(*connectors: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", EXTRA: {"connectors": list(connectors)}}


def test_model_without_connector_gets_raykv_that_recomputes() -> None:
    assert with_raykv(None, {"pool_bytes": "8GiB"}, "model 'm'") == {
        **OURS,
        "kv_load_failure_policy": "recompute",
        EXTRA: {"pool_bytes": "8GiB"},
    }


def test_what_the_model_says_beats_settings_of_all() -> None:
    given = {**OURS, "kv_role": "kv_consumer", EXTRA: {"transport": "nixl"}}
    found = with_raykv(given, {"transport": "ray", "pool_bytes": 1 << 30}, "model 'm'")
    assert found["kv_role"] == "kv_consumer"
    assert found[EXTRA] == {"transport": "nixl", "pool_bytes": 1 << 30}
    with pytest.raises(SettingError, match=r"model 'm': .*polcy"):
        with_raykv(None, {"eviction_polcy": "lru"}, "model 'm'")


def test_one_of_several_connectors_gets_settings_and_the_others_stay() -> None:
    given = several(NIXL, {"kv_connector": "RayKVConnector"})
    before = deepcopy(given)
    found = with_raykv(given, {"pool_bytes": 1 << 30}, "model 'm'")
    assert found["kv_load_failure_policy"] == "recompute"
    assert found[EXTRA]["connectors"] == [NIXL, {**OURS, EXTRA: {"pool_bytes": 1 << 30}}]
    assert given == before


def test_child_of_several_connectors_is_filled_in_through_a_shallow_copy() -> None:
    transfer = with_raykv(several(OURS), {}, "model 'm'")
    (child,) = transfer[EXTRA]["connectors"]
    # Ray hands a backend the parent's entries and the child's, in a new mapping.
    fill_in({**transfer, **child}, "10.0.0.1:6379", "ab")
    assert child[EXTRA] == {"ray_address": "10.0.0.1:6379", "node_id": "ab"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("RayKVConnector", "must be a mapping, not 'RayKVConnector'"),
        (NIXL, "kv_connector is 'NixlConnector': name RayKVConnector beside it"),
        (several(NIXL), "none of the `connectors` of MultiConnector is RayKVConnector: add"),
        (several(), "none of the `connectors`"),
        (several("RayKVConnector"), "one of the `connectors` must be a mapping"),
        ({**OURS, EXTRA: ["pool_bytes"]}, f"{EXTRA} must be a mapping"),
        ({**OURS, EXTRA: {"pool_byte": 1}}, "model 'm': unknown setting"),
        (several({**OURS, EXTRA: {"pool_bytes": "much"}}), "pool_bytes"),
        ({"kv_load_failure_policy": "fail"}, "kv_load_failure_policy is 'fail'"),
    ],
)
def test_impossible_configuration_is_refused_for_the_model(given: Any, said: str) -> None:
    with pytest.raises(SettingError) as refused:
        with_raykv(given, {}, "model 'm'")
    assert said in str(refused.value)
    assert str(refused.value).startswith("model 'm': ")


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"ray_address": "10.0.0.1:6379", "node_id": "ab"}),
        ({"node_id": "cd"}, {"node_id": "cd", "ray_address": "10.0.0.1:6379"}),
        ({"ray_address": "10.9.9.9:6379"}, {"ray_address": "10.9.9.9:6379"}),
    ],
)
def test_replica_fills_in_what_is_not_set_and_names_no_node_of_another_cluster(
    own: dict[str, str], expected: dict[str, str]
) -> None:
    transfer: dict[str, Any] = {"kv_connector": "RayKVConnector", EXTRA: dict(own)}
    fill_in(transfer, "10.0.0.1:6379", "ab")
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer[EXTRA] == expected
    if not own:
        bare: dict[str, Any] = {"kv_connector": "RayKVConnector"}
        fill_in(bare, "10.0.0.1:6379", "ab")
        assert bare == transfer


@pytest.mark.parametrize(
    "gone",
    [
        "ray.serve.llm",
        "ray.llm._internal.serve.engines.vllm.kv_transfer.base",
        "ray.llm._internal.serve.engines.vllm.kv_transfer.factory",
    ],
)
def test_missing_or_moved_llm_package_is_one_sentence(
    gone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [each for each in sys.modules if each.startswith(("ray.llm", "ray.serve.llm"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "raykv.serve.llm", raising=False)
    monkeypatch.delattr(ray.serve, "llm", raising=False)  # there once any test imported it
    monkeypatch.setitem(sys.modules, gone, None)
    with pytest.raises(VersionError) as refused:
        serve.build_openai_app({"llm_configs": []})
    said = str(refused.value)
    assert gone in said
    assert "its extra llm" in said
    assert "raykv.serve.build_app" in said
