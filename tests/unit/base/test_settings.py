"""Settings: where they come from; whatever they are given, a wrong one names itself."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.errors import SettingError
from raykv.base.parsing import MAX_COUNT, MAX_SIZE, parse_size
from raykv.base.settings import INSTEAD, VLLM_KEYS, Settings, load_settings

SECONDS = [f.name for f in fields(Settings) if f.name.endswith("_s")]


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("512b", 512),
        ("8GiB", 8 << 30),
        # As Kubernetes writes them.
        ("8Gi", 8 << 30),
        ("512Mi", 512 << 20),
        ("64Ki", 64 << 10),
        ("1.5Ti", 3 << 39),
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


def test_settings_come_from_the_extra_config_then_the_environment_then_their_defaults() -> None:
    environment = {
        "RAYKV_POOL_BYTES": "2GiB",
        "RAYKV_STAGING_BYTES": "6",
        "RAYKV_STEP_DEADLINE_S": "3",
        "RAYKV_LOG_LEVEL": "debug",
        "PATH": "/bin",
    }
    settings = load_settings({"staging_bytes": "7", "node_id": "abc"}, environment)
    assert settings == Settings(
        pool_bytes=2 << 30, staging_bytes=7, step_deadline_s=3.0, node_id="abc"
    )
    assert load_settings({}, {}) == Settings()
    assert Settings().pool_bytes is None


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
    assert all(
        name in text for name in ("'zzz'", "pool_bytes", "blocks_per_chunk", "step_deadline_s")
    )


@pytest.mark.parametrize("key", INSTEAD)
def test_setting_of_vllms_own_or_of_earlier_is_refused_with_what_takes_its_place(key: str) -> None:
    assert key not in {f.name for f in fields(Settings)}
    variable = f"RAYKV_{key.upper()}"
    for given_as, extra, environment in ((key, {key: 1}, {}), (variable, {}, {variable: "1"})):
        said = re.escape(f"{given_as} is not a setting of RayKV: {INSTEAD[key]}")
        with pytest.raises(SettingError, match=said):
            load_settings(extra, environment)


def test_unknown_variable_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(SettingError, match=r"'RAYKV_POOLBYTES'.*did you mean 'RAYKV_POOL_BYTES'"):
        load_settings({}, {"RAYKV_POOLBYTES": "1"})


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RAYKV_SERVICE_HOST", "10.96.0.12"),
        ("RAYKV_ENGINES_SERVICE_HOST", "10.96.0.12"),
        ("RAYKV_ENGINES_SERVICE_PORT", "8000"),
        ("RAYKV_ENGINES_SERVICE_PORT_HTTP_2", "8000"),
        ("RAYKV_PORT", "tcp://10.96.0.12:8000"),
        ("RAYKV_METRICS_PORT", "tcp://[fd00::12]:8000"),
        ("RAYKV_ENGINES_PORT", "udp://10.96.0.12:53"),
        ("RAYKV_ENGINES_PORT_8000_TCP", "tcp://10.96.0.12:8000"),
        ("RAYKV_ENGINES_PORT_8000_TCP_PROTO", "tcp"),
        ("RAYKV_ENGINES_PORT_53_UDP_PORT", "53"),
        ("RAYKV_ENGINES_PORT_53_SCTP_ADDR", "10.96.0.12"),
    ],
)
def test_variable_that_kubernetes_sets_for_a_service_is_no_setting(
    variable: str, value: str
) -> None:
    assert load_settings({}, {variable: value}) == Settings()


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RAYKV_METRICS_PORTS", "tcp://10.96.0.12:8000"),
        ("RAYKV_METRICS_PORT", "tcp"),
        ("RAYKV_ENGINES_PORT", "8000"),
        ("RAYKV_ENGINES_SERVICE", "10.96.0.12"),
        ("RAYKV_POOL_BYTES", "tcp://10.96.0.12:8000"),
    ],
)
def test_variable_that_only_resembles_those_of_a_service_is_refused(
    variable: str, value: str
) -> None:
    with pytest.raises(SettingError, match=variable):
        load_settings({}, {variable: value})


BAD = [
    ("window_share", -0.5),
    ("pool_bytes", "lots"),
    ("pool_path", 5),
    ("disk_path", 1),
    ("disk_bytes", "all"),
    ("disk_free_bytes", "-1"),
    ("ray_address", None),
    ("node_id", 1),
    ("weights_version", 2.0),
    ("kv_handover", "teleported"),
    ("transport", "pigeon"),
    ("staging_bytes", "-1"),
    ("always_fetch", "perhaps"),
    ("metrics_port", 0),
    ("metrics_port", 65536),
    ("metrics_address", 1),
    ("stop_unused_stores", "sometimes"),
    ("pin_share", 0.8),
    ("pin_share", -0.1),
    ("pin_share", "nan"),
    ("client_hints", "everything"),
    ("tenant_source", "client"),
    ("layerwise_loads", "some"),
    ("durable_stores", 2),
    ("hidden_states_path", 7),
    ("hidden_states_bytes", "some"),
    ("hidden_states_ttl_s", 0),
    ("hidden_states_client_paths", "perhaps"),
    ("why_miss_text", "some"),
    ("describe_chunks", "partly"),
    ("events_endpoint", "localhost:5557"),
    ("events_endpoint", 5557),
    ("events_endpoint", "tcp://"),
    *[(name, bad) for name in SECONDS for bad in (0, -1, "soon", 3600.1, "nan", "inf", None, True)],
]


@pytest.mark.parametrize(("key", "value"), BAD)
def test_bad_value_is_refused_with_key_and_value(key: str, value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        load_settings({key: value}, {})
    assert f"{key}={value!r}" in str(caught.value)


def test_every_setting_refuses_some_value() -> None:
    assert {key for key, _ in BAD} == {f.name for f in fields(Settings)}


def test_bad_variable_is_refused_with_its_own_name() -> None:
    with pytest.raises(SettingError, match="RAYKV_STAGING_BYTES='x'"):
        load_settings({}, {"RAYKV_STAGING_BYTES": "x"})


@pytest.mark.parametrize("seconds", [0.001, "2.5", 3600])
def test_seconds_are_accepted_up_to_an_hour(seconds: Any) -> None:
    assert load_settings({"step_deadline_s": seconds}, {}).step_deadline_s == float(seconds)


def test_every_setting_has_a_text_for_its_page() -> None:
    assert all(f.metadata["text"] for f in fields(Settings))


NAMES = [f.name for f in fields(Settings)]


HARD: list[Any] = [
    10**400,
    -(10**400),
    10**5000,
    math.nan,
    math.inf,
    -math.inf,
    "nan",
    "inf",
    "1e400",
    "1e400GiB",
    "9" * 400 + "GiB",
    "9" * 5000,
    "0.0000001b",
    "\0",
    "/tmp/a\0b",
    "\ud800",
    "a\nb",
    "x" * 100_000,
    "٣GiB",
    b"8GiB",
    {"a": [1]},
    [[]],
    None,
    True,
    object,
]


TEXTS = st.one_of(
    st.text(max_size=20),
    st.from_regex(r"[0-9.]{1,12}\s?[kKmMgGtTiIbB]{0,3}", fullmatch=True),
    st.sampled_from([value for value in HARD if isinstance(value, str)]),
)


def assert_possible(loaded: Settings) -> None:
    """The values are such as the rest of RayKV can work with."""
    for f in fields(Settings):
        value = getattr(loaded, f.name)
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, str):
            value.encode()
            assert "\0" not in value
        else:
            assert math.isfinite(value)
            assert 0 < value <= max(MAX_SIZE, MAX_COUNT) or f.name.endswith("_share")


def assert_one_sentence(error: SettingError, *named: str) -> None:
    text = str(error)
    assert len(text) < 2000
    assert "\n" not in text
    text.encode()
    for name in named:
        assert name in text


@pytest.mark.parametrize("name", NAMES)
def test_hard_value_is_taken_or_refused_by_name(name: str) -> None:
    for value in HARD:
        try:
            assert_possible(load_settings({name: value}, {}))
        except SettingError as error:
            assert_one_sentence(error, f"{name}=")


@settings(max_examples=100, deadline=None)
@given(name=st.sampled_from(NAMES), value=TEXTS)
def test_any_variable_is_taken_or_refused_by_name(name: str, value: str) -> None:
    variable = f"RAYKV_{name.upper()}"
    try:
        assert_possible(load_settings({}, {variable: value}))
    except SettingError as error:
        assert_one_sentence(error, f"{variable}=")


@settings(max_examples=100, deadline=None)
@given(key=st.one_of(st.text(max_size=200), st.integers(), st.none(), st.binary(max_size=5)))
def test_any_key_is_known_or_refused_by_name(key: Any) -> None:
    try:
        load_settings({key: 1}, {})
    except SettingError as error:
        assert_one_sentence(error, repr(key)[:100] if repr(key).isascii() else "")


def test_deeply_nested_value_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    for name in NAMES:
        with pytest.raises(SettingError, match=f"{name}=a value of type list"):
            load_settings({name: nested}, {})
