"""Accounts of prompt tokens: each token is counted once, under the right heading."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.base.ids import MAX_REQUEST_ID, Key, MissReason
from raykv.engine.accounts import MAX_NAMED, MAX_RECORDS, MAX_WAITING, Accounts, TokenAccount
from raykv.engine.requests import Miss
from raykv.protocol.engine import (
    MAX_NAMES_BYTES,
    MissRecord,
    Tell,
    check_record,
)
from raykv.protocol.framing import decode, encode
from tests.fixtures.keys import chunk_names, hashed_key

CHUNK = 32
EVICTED = Miss(Key(b"first gone\x00\x00\x00\x00"), MissReason.EVICTED)
OTHER, OPTED_OUT = MissReason.OTHER, MissReason.OPTED_OUT


def closed(
    prompt: int,
    own: int = 0,
    loaded: int = 0,
    miss: Miss | None = None,
    otherwise: MissReason = OTHER,
) -> MissRecord:
    """A request whose lookups and load went as vLLM does it."""
    account = TokenAccount(prompt, CHUNK)
    account.look(own, otherwise)
    account.admit(0, loaded, miss)
    if loaded:
        account.admit(own + loaded, 0, None)
    return account.record("r")


def test_prompt_is_split_into_own_loaded_and_the_rest_behind_the_first_missing_chunk() -> None:
    record = closed(prompt=10 * CHUNK + 5, own=2 * CHUNK, loaded=3 * CHUNK, miss=EVICTED)
    assert record == MissRecord(
        "r",
        10 * CHUNK + 5,
        2 * CHUNK,
        3 * CHUNK,
        {"incomplete_chunk": 5, "evicted": 5 * CHUNK},
        EVICTED.key,
        chunk_tokens=CHUNK,
    )


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        ("cmpl-ä 7", "cmpl-ä 7"),
        ("a\x1b[2J\n\ud800", r"a\x1b[2J\n\ud800"),
        ("x" * 100_000, "x" * MAX_REQUEST_ID),
        ("\n" * 100_000, r"\n" * (MAX_REQUEST_ID // 2)),
    ],
)
def test_id_that_a_client_has_chosen_is_printable_and_short_in_a_record(
    sent: str, shown: str
) -> None:
    accounts = Accounts(CHUNK)
    accounts.open(sent, 5)
    accounts.close(sent)
    (record,) = accounts.take_records()
    assert record.request_id == shown
    tell = Tell(1, 1, "ns", finished=[record])
    assert decode(encode(tell), Tell) == tell
    check_record(record)


MISSED_WINDOW = Miss(EVICTED.key, MissReason.NEVER_STORED, known_tokens=6 * CHUNK)


@pytest.mark.parametrize(
    ("course", "missed", "missing"),
    [
        ({"prompt": 4 * CHUNK, "loaded": 4 * CHUNK}, {}, b""),
        ({"prompt": 5}, {"incomplete_chunk": 5}, b""),
        ({"prompt": CHUNK - 1}, {"incomplete_chunk": CHUNK - 1}, b""),
        ({"prompt": 3 * CHUNK + 5, "loaded": 3 * CHUNK}, {"incomplete_chunk": 5}, b""),
        # vLLM's cache is in blocks, several to a chunk: less than one is not looked up.
        (
            {"prompt": 4 * CHUNK, "own": 4 * CHUNK - 16, "otherwise": OPTED_OUT},
            {"incomplete_chunk": 16},
            b"",
        ),
        (
            {"prompt": 4 * CHUNK, "loaded": 3 * CHUNK, "miss": EVICTED},
            {"evicted": CHUNK},
            EVICTED.key,
        ),
        # The last token of a window.
        ({"prompt": 4 * CHUNK, "loaded": 4 * CHUNK - 1}, {"incomplete_chunk": 1}, b""),
        ({"prompt": 4 * CHUNK, "otherwise": OPTED_OUT}, {"opted_out": 4 * CHUNK}, b""),
        ({"prompt": 4 * CHUNK}, {"other": 4 * CHUNK}, b""),
        (
            {"prompt": 10 * CHUNK + 5, "loaded": 2 * CHUNK, "miss": MISSED_WINDOW},
            {"incomplete_chunk": 5, "window_missing": 6 * CHUNK, "never_stored": 2 * CHUNK},
            EVICTED.key,
        ),
        # All that could be loaded is known.
        ({"prompt": 6 * CHUNK, "miss": MISSED_WINDOW}, {"window_missing": 6 * CHUNK}, b""),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, dict) else "",
)
def test_what_is_neither_in_the_own_cache_nor_loaded_has_its_reason(
    course: dict[str, Any], missed: dict[str, int], missing: bytes
) -> None:
    record = closed(**course)
    assert (record.missed, record.missing) == (missed, missing)


def test_later_lookups_before_blocks_are_given_replace_the_earlier_ones() -> None:
    account = TokenAccount(4 * CHUNK, CHUNK)
    account.look(CHUNK, OPTED_OUT)
    account.look(2 * CHUNK, OTHER)
    account.admit(0, CHUNK, EVICTED)
    account.admit(3 * CHUNK, 0, None)
    record = account.record("r")
    assert (record.own, record.loaded, record.missed) == (2 * CHUNK, CHUNK, {"evicted": CHUNK})


def test_load_that_failed_in_part_counts_up_to_where_vllm_goes_on() -> None:
    account = TokenAccount(10 * CHUNK, CHUNK)
    account.look(CHUNK, OTHER)
    account.admit(0, 6 * CHUNK, EVICTED)
    account.failure = MissReason.LOAD_FAILED
    account.admit(3 * CHUNK, 0, None)
    record = account.record("r")
    assert (record.own, record.loaded) == (CHUNK, 2 * CHUNK)
    assert record.missed == {"load_failed": 4 * CHUNK, "evicted": 3 * CHUNK}


def test_full_prompt_of_which_vllm_computes_the_last_token_again_was_loaded() -> None:
    account = TokenAccount(4 * CHUNK, CHUNK)
    account.look(0, OTHER)
    account.admit(0, 4 * CHUNK, None)
    account.admit(4 * CHUNK - 1, 0, None)
    assert account.record("r").loaded == 4 * CHUNK


@pytest.mark.parametrize("begins_to_load", [False, True])
def test_request_that_ended_before_its_turn_is_aborted(begins_to_load: bool) -> None:
    account = TokenAccount(4 * CHUNK, CHUNK)
    account.look(CHUNK, OTHER)
    if begins_to_load:
        account.admit(0, 2 * CHUNK, EVICTED)
    record = account.record("r")
    assert (record.own, record.loaded) == (CHUNK, 0)
    assert (record.missed, record.missing) == ({"aborted": 3 * CHUNK}, b"")


numbers = st.integers(0, 300)
misses = st.none() | st.builds(Miss, st.just(EVICTED.key), st.sampled_from(list(MissReason)))
steps = st.one_of(
    st.tuples(st.just("look"), numbers, st.sampled_from([OTHER, OPTED_OUT])),
    st.tuples(st.just("admit"), numbers, numbers, misses),
    st.tuples(st.just("fail"), st.sampled_from(list(MissReason))),
)


@given(prompt=numbers, chunk=st.integers(1, 64), calls=st.lists(steps, max_size=8))
def test_tokens_add_up_whatever_vllm_does(
    prompt: int, chunk: int, calls: list[tuple[object, ...]]
) -> None:
    account = TokenAccount(prompt, chunk)
    for name, *arguments in calls:
        if name == "fail":
            (account.failure,) = arguments  # type: ignore[assignment]
        else:
            getattr(account, str(name))(*arguments)
    record = account.record("r")
    counts = [record.own, record.loaded, *record.missed.values()]
    assert sum(counts) == record.prompt == prompt
    assert min(counts) >= 0
    assert set(record.missed) <= {str(reason) for reason in MissReason}


# Many requests


def test_totals_are_the_sums_of_the_records() -> None:
    accounts = Accounts(CHUNK)
    for name, own in (("a", 0), ("b", 2 * CHUNK)):
        accounts.open(name, 4 * CHUNK + 1)
        account = accounts.get(name)
        assert account is not None
        account.look(own, OTHER)
        account.admit(0, 0, EVICTED)
        assert accounts.close(name) is not None
    assert accounts.counter_values() == {
        "prompt_tokens": 8 * CHUNK + 2,
        "own_cache_tokens": 2 * CHUNK,
        "loaded_tokens": 0,
        "fetched_tokens": 0,
        "disk_tokens": 0,
        "missed_tokens_evicted": 6 * CHUNK,
        "missed_tokens_incomplete_chunk": 2,
    }
    assert [record.request_id for record in accounts.take_records()] == ["a", "b"]
    assert accounts.take_records() == []


def test_request_is_counted_once_however_often_it_begins_and_ends() -> None:
    accounts = Accounts(CHUNK)
    accounts.open("r", 100)
    account = accounts.get("r")
    accounts.open("r", 7)
    assert accounts.get("r") is account
    first = accounts.close("r")
    assert first is not None
    assert first.prompt == 100
    assert accounts.close("r") is None
    assert accounts.get("r") is None
    assert accounts.has_records
    assert accounts.take_records() == [first]
    assert not accounts.has_records
    counters = accounts.counter_values()
    assert (counters["prompt_tokens"], counters["missed_tokens_aborted"]) == (100, 100)


def test_oldest_records_are_lost_when_too_many_wait_and_messages_are_bounded() -> None:
    accounts = Accounts(CHUNK)
    for number in range(MAX_WAITING + 10):
        accounts.open(f"{number}", 1)
        accounts.close(f"{number}")
    first = accounts.take_records()
    assert [record.request_id for record in first] == [f"{10 + i}" for i in range(MAX_RECORDS)]
    assert accounts.counters["prompt_tokens"] == MAX_WAITING + 10


def recorded(accounts: Accounts, request_id: str, num_chunks: int) -> MissRecord:
    accounts.open(request_id, 32 * num_chunks)
    record = accounts.close(request_id, [hashed_key(number) for number in range(num_chunks)])
    assert record is not None
    return record


@pytest.mark.parametrize(("num_chunks", "num_named"), [(3, 3), (MAX_NAMED + 1, MAX_NAMED)])
def test_record_names_the_requests_first_chunks_in_order(num_chunks: int, num_named: int) -> None:
    record = recorded(Accounts(tokens_per_chunk=32), "r", num_chunks)
    assert (record.chunks, record.chunk_tokens) == (chunk_names(*range(num_named)), 32)


def test_names_of_waiting_records_have_a_bound_until_they_are_taken() -> None:
    accounts = Accounts()
    records = [recorded(accounts, f"r{number}", 1000) for number in range(MAX_RECORDS)]
    sizes = [len(record.chunks) for record in records]
    assert sum(sizes) == MAX_NAMES_BYTES
    assert sizes[0] == 8000
    assert sizes[-1] == 0
    # Those that wait are told in the same message.
    assert len(encode(Tell(1, 1, "ns", finished=accounts.take_records()))) < 100 << 10
    assert recorded(accounts, "later", 2).chunks == chunk_names(0, 1)
