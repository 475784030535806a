"""A column of keys or numbers is like a list of them, in one blob."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import MessageError
from raykv.base.ids import MAX_KEY_BYTES
from raykv.protocol import columns
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
    column = columns.Keys.of(keys)
    assert list(column) == keys
    assert len(column) == len(keys)
    assert bool(column) == bool(keys)
    assert [column[at] for at in range(-len(keys), len(keys))] == keys + keys
    assert column == keys
    assert column == columns.Keys.of(iter(keys))
    assert hash(column) == hash(columns.Keys.of(keys))
    assert columns.Keys.of(column) is column


@given(keys=LISTS, first=BOUND, end=BOUND, step=STEP)
def test_part_of_a_column_is_a_column(
    keys: list[bytes], first: int | None, end: int | None, step: int | None
) -> None:
    part = columns.Keys.of(keys)[first:end:step]
    assert isinstance(part, columns.Keys)
    assert list(part) == keys[first:end:step]


@given(lists=st.lists(LISTS, max_size=4))
def test_columns_are_joined_in_their_order(lists: list[list[bytes]]) -> None:
    joined = columns.Keys.joined([columns.Keys.of(keys) for keys in lists])
    assert list(joined) == [key for keys in lists for key in keys]


def test_keys_of_one_length_take_no_more_than_their_bytes() -> None:
    keys = [number.to_bytes(36) for number in range(columns.SPLIT_TOGETHER * 2 + 1)]
    column = columns.Keys.of(keys)
    assert (column.width, column.raw, column.lengths) == (36, b"".join(keys), b"\x24")


def test_column_differs_from_other_keys_and_from_what_is_no_column() -> None:
    column = columns.Keys.of([b"ab", b"cd"])
    assert column != [b"ab", b"ce"]
    assert column != [b"ab"]
    assert column != columns.Keys.of([b"abcd"])
    assert column != 5
    assert columns.Keys() == []
    assert (column.width, columns.Keys.of([b"a", b"bc"]).width) == (2, None)


@pytest.mark.parametrize("at", [2, -3])
def test_key_that_a_column_does_not_have_is_an_error(at: int) -> None:
    with pytest.raises(IndexError):
        columns.Keys.of([b"ab", b"cd"])[at]


@pytest.mark.parametrize("keys", [[b""], [bytes(256)], [b"", b""]])
def test_keys_without_bytes_or_with_too_many_are_an_error(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="bytes"):
        columns.Keys.of(keys)


NUMBERS = st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20)


@given(numbers=NUMBERS, first=BOUND, end=BOUND, step=STEP, more=NUMBERS)
def test_column_of_numbers_is_like_a_list(
    numbers: list[int], first: int | None, end: int | None, step: int | None, more: list[int]
) -> None:
    column = columns.Numbers.of(numbers)
    assert column == numbers
    assert (len(column), bool(column)) == (len(numbers), bool(numbers))
    assert [column[at] for at in range(-len(numbers), len(numbers))] == numbers + numbers
    assert isinstance(column[first:end:step], columns.Numbers)
    assert column[first:end:step] == numbers[first:end:step]
    assert column + more == numbers + more
    assert columns.Numbers.of(column) is column
    assert decode(encode(column), columns.Numbers) == column


def test_numbers_are_in_the_order_of_bytes_that_all_hosts_have() -> None:
    assert columns.Numbers.of([1, -2]).raw == (1).to_bytes(8, "little") + b"\xfe" + b"\xff" * 7


def test_column_of_numbers_that_ends_within_one_is_refused() -> None:
    raw = encode(columns.NamedKeys()).replace(b"\x91\xc4\x00", b"\x91\xc4\x03abc", 1)
    with pytest.raises(MessageError, match="numbers of 8 bytes each in 3 bytes"):
        receive(raw, columns.NamedKeys, "an actor", "an engine")
