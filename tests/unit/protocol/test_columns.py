"""A column of keys or numbers is like a list of them, in one blob."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import MessageError
from raykv.base.ids import MAX_KEY_BYTES, Key, Namespace
from raykv.protocol.columns import (
    SPLIT_TOGETHER,
    Keys,
    NamedKeys,
    Numbers,
)
from raykv.protocol.framing import decode, encode, receive

OF_ONE_LENGTH = st.integers(1, MAX_KEY_BYTES).flatmap(
    lambda width: st.lists(st.binary(min_size=width, max_size=width), max_size=200)
)
OF_ANY = st.lists(st.binary(min_size=1, max_size=MAX_KEY_BYTES), max_size=20)
LISTS = st.one_of(OF_ONE_LENGTH, OF_ANY)
BOUND = st.one_of(st.none(), st.integers(-210, 210))
STEP = st.one_of(st.none(), st.sampled_from([-3, -1, 1, 2]))


@given(keys=LISTS)
def test_column_has_the_keys_that_it_was_made_of(keys: list[bytes]) -> None:
    column = Keys.of(keys)
    assert list(column) == keys
    assert len(column) == len(keys)
    assert bool(column) == bool(keys)
    assert [column[at] for at in range(-len(keys), len(keys))] == keys + keys
    assert column == keys
    assert column == Keys.of(iter(keys))
    assert hash(column) == hash(Keys.of(keys))
    assert Keys.of(column) is column


@given(keys=LISTS, first=BOUND, end=BOUND, step=STEP)
def test_part_of_a_column_is_a_column(
    keys: list[bytes], first: int | None, end: int | None, step: int | None
) -> None:
    part = Keys.of(keys)[first:end:step]
    assert isinstance(part, Keys)
    assert list(part) == keys[first:end:step]


@given(lists=st.lists(LISTS, max_size=4))
def test_columns_are_joined_in_their_order(lists: list[list[bytes]]) -> None:
    joined = Keys.joined([Keys.of(keys) for keys in lists])
    assert list(joined) == [key for keys in lists for key in keys]


@given(keys=LISTS)
def test_column_crosses_processes_as_it_is(keys: list[bytes]) -> None:
    names = NamedKeys.of((Namespace("a"), Key(key)) for key in keys)
    assert decode(encode(names), NamedKeys) == names


def test_keys_of_one_length_take_no_more_than_their_bytes() -> None:
    keys = [number.to_bytes(36) for number in range(SPLIT_TOGETHER * 2 + 1)]
    column = Keys.of(keys)
    assert (column.width, column.raw, column.lengths) == (36, b"".join(keys), b"\x24")


def test_column_differs_from_other_keys_and_from_what_is_no_column() -> None:
    column = Keys.of([b"ab", b"cd"])
    assert column != [b"ab", b"ce"]
    assert column != [b"ab"]
    assert column != Keys.of([b"abcd"])
    assert column != 5
    assert Keys() == []
    assert (column.width, Keys.of([b"a", b"bc"]).width) == (2, None)


@pytest.mark.parametrize("at", [2, -3])
def test_key_that_a_column_does_not_have_is_an_error(at: int) -> None:
    with pytest.raises(IndexError):
        Keys.of([b"ab", b"cd"])[at]


@pytest.mark.parametrize("keys", [[b""], [bytes(256)], [b"", b""]])
def test_keys_without_bytes_or_with_too_many_are_an_error(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        Keys.of(keys)


NUMBERS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20)


@given(numbers=NUMBERS, first=BOUND, end=BOUND, step=STEP, more=NUMBERS)
def test_column_of_numbers_is_like_a_list(
    numbers: list[int], first: int | None, end: int | None, step: int | None, more: list[int]
) -> None:
    column = Numbers.of(numbers)
    assert column == numbers
    assert (len(column), bool(column)) == (len(numbers), bool(numbers))
    assert [column[at] for at in range(-len(numbers), len(numbers))] == numbers + numbers
    assert isinstance(column[first:end:step], Numbers)
    assert column[first:end:step] == numbers[first:end:step]
    assert column + more == numbers + more
    assert Numbers.of(column) is column
    assert decode(encode(column), Numbers) == column


def test_numbers_are_in_the_order_of_bytes_that_all_hosts_have() -> None:
    assert Numbers.of([1, -2]).raw == (1).to_bytes(8, "little") + b"\xfe" + b"\xff" * 7


def test_column_of_numbers_that_ends_within_one_is_refused() -> None:
    raw = encode(NamedKeys()).replace(b"\x91\xc4\x00", b"\x91\xc4\x03abc", 1)
    with pytest.raises(MessageError, match="numbers of 8 bytes each in 3 bytes"):
        receive(raw, NamedKeys, "an actor", "an engine")


def test_number_of_more_than_64_bits_is_an_error() -> None:
    with pytest.raises(OverflowError):
        Numbers.of([1 << 63])
