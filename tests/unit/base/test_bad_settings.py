"""Whatever a setting is given: settings, or one sentence that names it."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.base.errors import SettingError
from raykv.base.parsing import MAX_COUNT, MAX_SIZE
from raykv.base.settings import Settings, load_settings

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
WRITABLE = [value for value in HARD if value != 10**5000]
"""Hypothesis wants to show them."""
TEXTS = st.one_of(
    st.text(max_size=20),
    st.from_regex(r"[0-9.]{1,12}\s?[kKmMgGtTiIbB]{0,3}", fullmatch=True),
    st.sampled_from([value for value in HARD if isinstance(value, str)]),
)
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), TEXTS, st.sampled_from(WRITABLE)
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
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
            assert 0 < value <= max(MAX_SIZE, MAX_COUNT) or f.name.endswith(("_per_s", "_share"))


def assert_one_sentence(error: SettingError, *named: str) -> None:
    text = str(error)
    assert len(text) < 2000
    assert "\n" not in text
    text.encode()
    for name in named:
        assert name in text


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(NAMES), value=JSON)
def test_any_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
    try:
        assert_possible(load_settings({name: value}, {}))
    except SettingError as error:
        assert_one_sentence(error, f"{name}=")


@pytest.mark.parametrize("value", HARD, ids=lambda value: repr(type(value)))
@pytest.mark.parametrize("name", NAMES)
def test_hard_value_is_taken_or_refused_by_name(name: str, value: Any) -> None:
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
