"""Which hidden states stay in a node's memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raykv.node.states.index import CaptureIndex, CaptureState
from raykv.protocol.copies import Capture, capture_objection

TTL_S = 10.0


def kept(index: CaptureIndex, name: str, num_bytes: int, most: int, now: float = 0.0) -> None:
    assert index.admit(name, num_bytes, most, TTL_S, now)
    index.written(name, now)


def names(index: CaptureIndex) -> list[str]:
    """Of all requests that may be known here."""
    return [name for name in "abcd" if name in index]


def capture(**changes: object) -> Capture:
    values: dict[str, object] = {
        "request_id": "a",
        "token_ids": np.arange(5, dtype="<i8").tobytes(),
        "num_states": 2,
        "hidden_size": 8,
        "dtype": "float32",
        "block_tokens": 4,
        "strides": [16, 8, 1],
        "most_bytes": 1000,
        "ttl_s": TTL_S,
        **changes,
    }
    return Capture(**values)  # type: ignore[arg-type]


def test_nothing_changes_while_all_is_still_being_written() -> None:
    index = CaptureIndex()
    assert index.admit("a", 60, 100, TTL_S, 0.0)
    kept(index, "b", 10, 100)
    assert not index.admit("c", 90, 100, TTL_S, 1.0)
    assert "b" in index
    assert index.num_bytes == 70
    index.written("a", 2.0)
    assert index.admit("c", 90, 100, TTL_S, 3.0)
    assert names(index) == ["b", "c"]


def test_request_that_is_larger_than_all_room_is_admitted_alone() -> None:
    index = CaptureIndex()
    kept(index, "a", 10, 100)
    assert index.admit("b", 500, 100, TTL_S, 0.0)
    assert names(index) == ["b"]
    assert not index.admit("c", 1, 100, TTL_S, 0.0)


def test_states_are_forgotten_when_their_time_is_over_but_never_while_they_are_written() -> None:
    index = CaptureIndex()
    kept(index, "a", 10, 100, now=0.0)
    kept(index, "b", 10, 100, now=5.0)
    assert index.admit("c", 10, 100, TTL_S, 0.0)
    index.expire(TTL_S)
    assert names(index) == ["b", "c"]
    index.expire(5.0 + TTL_S)
    assert names(index) == ["c"]
    index.expire(1e6)
    assert names(index) == ["c"]
    index.fail("c", "the disk is full", 1e6)
    assert index.num_bytes == 0
    assert index["c"].reason == "the disk is full"
    index.expire(1e6 + TTL_S)
    assert names(index) == []


def test_failed_request_is_known_by_its_reason_and_takes_no_memory() -> None:
    index = CaptureIndex()
    kept(index, "a", 100, 100)
    index.refuse("b", TTL_S, "no room", 0.0)
    assert index["b"].state is CaptureState.FAILED
    assert index.num_bytes == 100
    index.refuse("a", TTL_S, "again", 0.0)
    assert index["a"].state is CaptureState.KEPT


def test_request_is_found_by_the_name_that_vllm_has_appended_to() -> None:
    index = CaptureIndex()
    names = ["cmpl-1-0-aaaaaaaa", "cmpl-1-1-bbbbbbbb", "cmpl-1-2-0-cccccccc", "job-2-dddddddd"]
    for name in names:
        kept(index, name, 1, 100)
    for name in names:
        assert index.find(name) == [name]
    assert index.find("cmpl-1-1") == [names[1]]
    assert index.find("cmpl-1") == names[:2]
    assert index.find("cmpl-1-2") == [names[2]]
    assert index.find("job-2") == [names[3]]
    # It has not been captured; another one's states are not its own.
    for name in ("job", "cmpl", "cmpl-2", "cmpl-1-0-aaaa"):
        assert index.find(name) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["admit", "written", "fail", "expire"]),
            st.integers(0, 7),
            st.integers(0, 60),
        ),
        max_size=60,
    )
)
def test_bytes_are_those_of_what_is_known_and_never_too_many(
    steps: list[tuple[str, int, int]],
) -> None:
    index, most = CaptureIndex(), 100
    sizes: dict[str, int] = {}
    for now, (step, number, size) in enumerate(steps):
        name = str(number)
        state = index[name].state if name in index else None
        if step == "admit" and state is None:
            if index.admit(name, size, most, TTL_S, now):
                sizes = {other: sizes[other] for other in sizes if other in index}
                sizes[name] = size
        elif step == "written" and state is CaptureState.COMING:
            index.written(name, now)
        elif step == "fail" and state is CaptureState.COMING:
            index.fail(name, "why", now)
            sizes[name] = 0
        elif step == "expire":
            index.expire(now)
            sizes = {other: sizes[other] for other in sizes if other in index}
        assert index.num_bytes == sum(sizes.values()) <= most
        assert len(index) == len(sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float8_e4m3fn"},
        {"strides": [16, 8]},
        {"strides": [16, 8, 0]},
        {"strides": [17, 8, 1]},
        {"num_states": 3},
        {"hidden_size": 0},
        {"block_tokens": 5},
        {"token_ids": b""},
        {"token_ids": bytes(9 * 8)},
        {"token_ids": bytes(5)},
        {"request_id": ""},
        {"path": "x" * 5000},
        {"ttl_s": float("nan")},
        {"ttl_s": 0.0},
        {"most_bytes": -1},
    ],
)
def test_capture_that_cannot_be_meant_is_objected_to(changes: dict[str, object]) -> None:
    page_bytes = 4 * 2 * 8 * 4
    assert capture_objection(capture(), 2, page_bytes) == ""
    assert capture_objection(capture(**changes), 2, page_bytes)
