"""What chunks have inside: checks, the NodeActor's book, the engine's outbox."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.errors import MessageError
from raykv.protocol.descriptions import (
    Description,
    check_description,
    is_whole,
    pack_tokens,
)
from raykv.stream import descriptions
from raykv.stream.descriptions import ANSWER_BYTES, ROW_BYTES, DescriptionBook, DescriptionOutbox

BLOCK = 4


def inner_hash(number: int, place: int) -> bytes:
    return (number << 32 | place).to_bytes(8, "little")


def description(number: int, namespace: str = "n", num_blocks: int = 1) -> Description:
    tokens = range(number, number + BLOCK * num_blocks)
    return Description(
        namespace=namespace,
        key=number.to_bytes(8, "big") + bytes(4),
        parent=None if number == 0 else (number - 1).to_bytes(8, "big"),
        inner=b"".join(inner_hash(number, each) for each in range(num_blocks - 1)),
        tokens=pack_tokens(tokens),
        block_size=BLOCK,
        model="m",
        kind="full_attention",
        lora="poems" if number % 2 else None,
    )


def size(row: Description) -> int:
    return row.num_bytes + ROW_BYTES


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_come_out_as_they_went_in(tokens: list[int]) -> None:
    row = Description("", bytes(12), None, b"", pack_tokens(tokens), 1)
    assert row.token_ids == tokens


@pytest.mark.parametrize("token", [-1, 2**32])
def test_token_that_has_no_four_bytes_is_refused(token: int) -> None:
    with pytest.raises(OverflowError):
        pack_tokens([token])


def test_block_hashes_end_with_the_key() -> None:
    row = description(5, num_blocks=3)
    assert row.block_hashes == [inner_hash(5, 0), inner_hash(5, 1), row.key[:-4]]


REPLACE = [
    {"key": b""},
    {"key": bytes(4)},
    {"key": bytes(200)},
    {"parent": bytes(200)},
    {"tokens": b"123"},
    {"tokens": pack_tokens(range(3))},
    {"block_size": 0},
    {"block_size": 1 << 30},
    {"inner": b"1"},
    {"inner": bytes(8)},
    {"namespace": "x" * 5000},
    {"model": "x" * 5000},
    {"kind": "x" * 5000},
    {"lora": "x" * 5000},
]


@pytest.mark.parametrize("wrong", REPLACE, ids=repr)
def test_description_that_cant_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    good = description(3)
    check_description(good)
    with pytest.raises(MessageError):
        check_description(msgspec.structs.replace(good, **wrong))


def test_book_tells_what_it_was_told() -> None:
    book = DescriptionBook()
    rows = [description(number) for number in range(3)]
    for row in rows:
        book.add(row)
    keys = [rows[2].key, b"unknown key", rows[0].key]
    assert book.page(keys) == [rows[2], rows[0]]
    assert not book.page(keys, "other")
    book.forget("n")
    assert not book.page(keys)


def test_book_forgets_what_was_not_used_for_longest_when_it_is_full() -> None:
    rows = [description(number) for number in range(2, 5)]
    book = DescriptionBook(most_bytes=sum(map(size, rows)))
    for row in rows:
        book.add(row)
    assert book.find(rows[0].key) == rows[0]
    book.add(description(9))
    book.check()
    assert book.find(rows[1].key) is None
    assert book.find(rows[0].key) == rows[0]


def test_book_keeps_namespaces_apart() -> None:
    book = DescriptionBook()
    short, long = description(4, "short"), description(4, "long", num_blocks=2)
    book.add(short)
    book.add(long)
    assert (book.find(short.key, "short"), book.find(short.key, "long")) == (short, long)
    part = description(4, "short/0.1.ab")
    book.add(part)
    book.forget("short")
    book.check()
    assert book.find(part.key, "short/0.1.ab") is None, "it is a part of it"
    assert (book.find(short.key, "short"), book.find(short.key)) == (None, long)
    book.forget()
    book.check()
    assert not book.num_bytes


def test_answer_has_a_bound_and_always_a_first_row() -> None:
    book = DescriptionBook()
    # Each block has its tokens and a hash.
    long = ANSWER_BYTES * 2 // 5 // (4 * BLOCK + 8)
    rows = [description(number, num_blocks=long) for number in range(1, 4)]
    big = Description("n", b"big key" + bytes(4), None, b"", pack_tokens(range(300_000)), 300_000)
    for row in [*rows, big]:
        book.add(row)
    told = [row.key for row in book.page([row.key for row in rows])]
    assert told == [row.key for row in rows[: len(told)]]
    assert len(told) == 2
    assert len(book.page([big.key])) == 1


@given(st.lists(st.tuples(st.sampled_from(["add", "find", "forget"]), st.integers(0, 20))))
def test_book_keeps_its_bound_whatever_happens(steps: list[tuple[str, int]]) -> None:
    book = DescriptionBook(most_bytes=3000)
    for what, number in steps:
        row = description(number, namespace="ab"[number % 2], num_blocks=1 + number % 3)
        if what == "add":
            book.add(row)
        elif what == "find":
            book.find(row.key)
        else:
            book.forget(row.namespace)
        book.check()


def test_outbox_tells_each_chunk_once_in_pages() -> None:
    outbox = DescriptionOutbox()
    rows = [description(number) for number in range(10)]
    for row in rows:
        assert not outbox.knows("n", row.key)
        outbox.add(row)
        assert outbox.knows("n", row.key)
    told: list[Description] = []
    num_pages = 0
    while outbox.has_news:
        page = outbox.take(3 * rows[1].num_bytes)
        assert 1 <= len(page) <= 4
        told += page
        num_pages += 1
    assert told == rows
    assert num_pages >= 3
    assert all(outbox.knows("n", row.key) for row in rows)


def test_outbox_drops_and_counts_what_would_wait_beyond_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [description(number) for number in range(1, 6)]
    monkeypatch.setattr(descriptions, "WAITING_BYTES", 2 * rows[0].num_bytes)
    outbox = DescriptionOutbox()
    for row in rows:
        outbox.add(row)
    assert outbox.counter_values() == {"descriptions_dropped": 3}
    assert outbox.take() == rows[:2]
    assert not outbox.knows("n", rows[3].key)
    outbox.add(rows[3])
    assert outbox.take() == [rows[3]]


def test_outbox_tells_all_again_to_a_new_scheduler_actor_within_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [description(number) for number in range(1, 6)]
    monkeypatch.setattr(descriptions, "TOLD_BYTES", 3 * size(rows[0]))
    outbox = DescriptionOutbox()
    for row in rows:
        outbox.add(row)
    outbox.take()
    outbox.tell_again()
    outbox.add(description(7))
    assert outbox.take() == [description(7), *rows[2:]]
    assert not outbox.has_news
    outbox.clear()
    outbox.tell_again()
    assert not outbox.has_news


def test_outbox_leaves_out_what_the_scheduler_actor_would_refuse() -> None:
    broken = Description("n", b"key and" + bytes(4), None, b"", pack_tokens([1, 2]), BLOCK)
    assert not is_whole(broken)
    outbox = DescriptionOutbox()
    outbox.add(broken)
    outbox.add(description(1))
    assert outbox.take() == [description(1)]
    assert outbox.counter_values() == {"descriptions_dropped": 1}


def test_outbox_is_busy_while_much_waits() -> None:
    outbox = DescriptionOutbox()
    long = description(1, num_blocks=30_000)
    assert not outbox.is_busy
    outbox.add(long)
    assert outbox.is_busy
    outbox.take()
    assert not outbox.is_busy
