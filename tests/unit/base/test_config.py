"""Settings: where they come from, and that a wrong one names itself."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from raykv.base.errors import SettingError
from raykv.base.parsing import parse_size
from raykv.base.settings import VLLM_KEYS, Settings, load_settings
from raykv.memory.room import check_pool_bytes, default_pool_bytes

SECONDS = [f.name for f in fields(Settings) if f.name.endswith("_s") and "_per_s" not in f.name]


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("512b", 512),
        ("8GiB", 8 << 30),
        ("8gib", 8 << 30),
        (" 8 GiB ", 8 << 30),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        ("2kB", 2_000),
        ("2KiB", 2_048),
        ("1.5g", 3 << 29),
        ("3k", 3 << 10),
        ("7m", 7 << 20),
        ("1t", 1 << 40),
        ("1TB", 10**12),
        ("1TiB", 1 << 40),
        ("0.5kib", 512),
    ],
)
def test_size_is_bytes_in_the_unit_that_is_named(value: Any, size: int) -> None:
    assert parse_size("pool_bytes", value) == size


@pytest.mark.parametrize(
    "value",
    [0, -1, True, None, "", "0", "-5", "8 GiBs", "8 x", "GiB", "1,5g", "0.1b", "1e9", "8G iB", []],
)
def test_size_is_refused_with_name_and_value(value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        parse_size("pool_bytes", value)
    assert f"pool_bytes={value!r}" in str(caught.value)


def test_settings_have_their_defaults_when_nothing_is_said() -> None:
    settings = load_settings({}, {})
    assert settings == Settings()
    assert settings.pool_bytes is None
    assert settings.lease_slots == 1024


def test_settings_come_from_the_extra_config() -> None:
    settings = load_settings({"pool_bytes": "1GiB", "lease_slots": "7", "heartbeat_s": 0.5}, {})
    assert (settings.pool_bytes, settings.lease_slots, settings.heartbeat_s) == (1 << 30, 7, 0.5)


def test_settings_come_from_the_environment() -> None:
    environment = {
        "RAYKV_POOL_BYTES": "2GiB",
        "RAYKV_NODE_ID": "abc",
        "RAYKV_LOAD_DEADLINE_S": "3",
        "RAYKV_LOG_LEVEL": "debug",
        "PATH": "/bin",
    }
    settings = load_settings({}, environment)
    assert (settings.pool_bytes, settings.node_id, settings.load_deadline_s) == (2 << 30, "abc", 3)


def test_extra_config_goes_before_the_environment() -> None:
    settings = load_settings({"lease_slots": 5}, {"RAYKV_LEASE_SLOTS": "6"})
    assert settings.lease_slots == 5


def test_keys_of_vllm_are_left_alone() -> None:
    assert load_settings(dict.fromkeys(VLLM_KEYS, "anything"), {}) == Settings()


@pytest.mark.parametrize(
    ("key", "hint"), [("pool_byte", "'pool_bytes'"), ("block_per_chunk", "'blocks_per_chunk'")]
)
def test_unknown_key_is_refused_with_the_one_that_was_meant(key: str, hint: str) -> None:
    with pytest.raises(SettingError, match=f"unknown setting '{key}'.*did you mean {hint}"):
        load_settings({key: 1}, {})


def test_unknown_key_is_refused_with_all_that_are_known_when_none_is_near() -> None:
    with pytest.raises(SettingError) as caught:
        load_settings({"zzz": 1}, {})
    text = str(caught.value)
    assert all(name in text for name in ("'zzz'", "pool_bytes", "blocks_per_chunk", "heartbeat_s"))


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("sync_load_budget_bytes", "layerwise_loads=true"),
        ("cpu_bytes_to_use", "pool_bytes"),
        ("secondary_tiers", "disk_path"),
        ("store_threshold", "stop_unused_stores"),
    ],
)
def test_setting_of_vllms_own_offloading_is_refused_with_the_one_to_use(
    key: str, answer: str
) -> None:
    with pytest.raises(SettingError, match=f"{key} is not a setting of RayKV: .*{answer}"):
        load_settings({key: 1}, {})


def test_unknown_variable_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingError, match=r"'RAYKV_POOLBYTES'.*did you mean 'RAYKV_POOL_BYTES'"):
        load_settings({}, {"RAYKV_POOLBYTES": "1"})


BAD = [
    ("pool_bytes", "lots"),
    ("pool_path", 5),
    ("disk_path", 1),
    ("disk_bytes", "all"),
    ("disk_free_bytes", "-1"),
    ("ray_address", None),
    ("node_id", 1),
    ("weights_version", 2.0),
    ("eviction_policy", 1),
    ("kv_handover", "teleported"),
    ("staging_bytes", "-1"),
    ("lease_slots", 0),
    ("lease_slots", -3),
    ("lease_slots", "1.5"),
    ("lease_slots", "many"),
    ("lease_slots", True),
    ("fetch_checksums", "perhaps"),
    ("metrics_port", 0),
    ("metrics_port", 65536),
    ("metrics_port", "111111"),
    ("metrics_port", "any"),
    ("metrics_port", True),
    ("metrics_port", -1),
    ("metrics_address", 1),
    ("metrics_sd_path", None),
    ("stop_unused_stores", "sometimes"),
    ("pin_share", 0.8),
    ("pin_share", -0.1),
    ("pin_share", "half"),
    ("pin_share", "nan"),
    ("client_hints", "everything"),
    ("client_hints", True),
    ("fetch_bytes_per_s", 0),
    ("fetch_bytes_per_s", "fast"),
    ("fetch_bytes_per_s", "nan"),
    ("prefill_tokens_per_s", float("inf")),
    ("prefill_tokens_per_s", True),
    ("layerwise_loads", "some"),
    ("durable_stores", 2),
    ("hidden_states_path", 7),
    ("hidden_states_bytes", "some"),
    ("hidden_states_ttl_s", 0),
    ("hidden_states_client_paths", "perhaps"),
    ("describe_chunks", "partly"),
    ("events_endpoint", "localhost:5557"),
    ("events_endpoint", 5557),
    ("events_replay_endpoint", "tcp://"),
    ("events_topic", "kv@{pod}"),
    ("events_topic", "kv@{node!r}"),
    ("events_topic", "kv@{"),
    ("events_topic", "kv@{}"),
    ("events_topic", 1),
    ("events_format", "json"),
    ("events_hashes", "hex"),
    *[(name, bad) for name in SECONDS for bad in (0, -1, "soon", 3600.1, "nan", "inf", None, True)],
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_bad_value_is_refused_with_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        load_settings({key: value}, {})
    assert f"{key}={value!r}" in str(caught.value)


@pytest.mark.parametrize("value", ["auto", "ipc", "staged"])
def test_ways_to_hand_the_kv_cache_over_are_accepted(value: str) -> None:
    assert load_settings({"kv_handover": value}, {}).kv_handover == value


def test_every_setting_refuses_some_value() -> None:
    assert {key for key, _ in BAD} == {f.name for f in fields(Settings)}


def test_bad_variable_is_refused_with_its_own_name() -> None:
    with pytest.raises(SettingError, match="RAYKV_LEASE_SLOTS='x'"):
        load_settings({}, {"RAYKV_LEASE_SLOTS": "x"})


@pytest.mark.parametrize("seconds", [0.001, "2.5", 3600])
def test_seconds_are_accepted_up_to_an_hour(seconds: Any) -> None:
    assert load_settings({"load_deadline_s": seconds}, {}).load_deadline_s == float(seconds)


def test_every_setting_has_a_text_for_its_page() -> None:
    assert all(f.metadata["text"] for f in fields(Settings))


def test_pool_is_accepted_between_one_chunk_and_what_is_free() -> None:
    check_pool_bytes(100, chunk_bytes=100, free_bytes=100, limit="this machine's memory")


def test_pool_is_refused_when_it_is_smaller_than_a_chunk() -> None:
    with pytest.raises(SettingError, match=r"pool_bytes=99 .*\(100 bytes\).*at least 100"):
        check_pool_bytes(99, chunk_bytes=100, free_bytes=1000, limit="x")


def test_pool_is_refused_when_it_is_more_than_what_is_free() -> None:
    with pytest.raises(SettingError, match=r"pool_bytes=1001 .*the box can give.*1000 bytes"):
        check_pool_bytes(1001, chunk_bytes=100, free_bytes=1000, limit="the box")


def test_default_pool_is_a_quarter_of_what_is_free() -> None:
    assert default_pool_bytes(4001) == 1000
