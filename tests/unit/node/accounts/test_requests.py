"""What became of the latest requests of a node's engines."""

from __future__ import annotations

import pytest

from raykv.base.ids import MAX_REQUEST_ID
from raykv.node.accounts import requests
from raykv.node.accounts.requests import MOST_IN_PAGE, MOST_RECORDS, MOST_TOLD, RequestLog
from raykv.protocol.engine import CHUNK_NAME_BYTES, EngineHello, MissRecord

HELLO = EngineHello("e", 1, "a", "model")


def record(request_id: str, num_chunks: int = 0) -> MissRecord:
    return MissRecord(request_id, 8, 0, 0, chunks=bytes(CHUNK_NAME_BYTES) * num_chunks)


def taken(*ids: str, num_chunks: int = 0) -> RequestLog:
    log = RequestLog()
    log.take(HELLO, [record(each, num_chunks) for each in ids], 5.0)
    log.check()
    return log


def found(log: RequestLog, beginning: str) -> list[str]:
    return [each.record.request_id for each in log.find(beginning)]


@pytest.mark.parametrize(
    ("beginning", "expected"),
    [
        ("chatcmpl-ab", ["chatcmpl-abd", "chatcmpl-abc"]),
        ("abc", ["0_cmpl-abc", "chatcmpl-abc"]),
        ("cmpl-abc", ["0_cmpl-abc"]),
        ("0_", ["0_cmpl-abc"]),
        ("bc", []),
        ("mine", ["mine"]),
    ],
)
def test_request_is_found_by_the_beginning_of_its_id(beginning: str, expected: list[str]) -> None:
    log = taken("chatcmpl-abc", "mine", "0_cmpl-abc", "chatcmpl-abd")
    assert found(log, beginning) == expected


def test_request_with_a_very_long_id_is_found_by_all_of_it() -> None:
    log = taken("x" * MAX_REQUEST_ID)
    assert found(log, "x" * (MAX_REQUEST_ID + 9)) == ["x" * MAX_REQUEST_ID]


def test_newest_requests_of_one_beginning_are_told_first_and_no_more_than_so_many() -> None:
    log = taken(*(f"r{number:03}" for number in range(MOST_TOLD + 4)))
    assert found(log, "r")[0] == f"r{MOST_TOLD + 3:03}"
    assert len(found(log, "r")) == MOST_TOLD


def test_pages_have_every_request_once_and_in_order() -> None:
    ids = [f"r{number}" for number in range(2 * MOST_IN_PAGE + 7)]
    log, number, seen = taken(*ids), 0, []
    while number < log.last:
        first, page = log.after(number)
        assert first == number + 1
        seen += [each.record.request_id for each in page]
        number = first + len(page) - 1
    assert seen == ids
    assert log.after(number) == (number + 1, [])
    assert log.after(number + 100) == (number + 1, [])


def test_page_goes_on_at_the_oldest_request_that_is_remembered() -> None:
    log = taken(*(f"r{number}" for number in range(MOST_RECORDS + 10)))
    assert (len(log), log.last) == (MOST_RECORDS, MOST_RECORDS + 10)
    first, page = log.after(0)
    assert first == 11
    assert page[0].record.request_id == "r10"


def test_names_of_chunks_take_a_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MOST_NAMES_BYTES", 10 * CHUNK_NAME_BYTES)
    log = taken("a", "b", "c", num_chunks=4)
    assert found(log, "") == ["c", "b"]
    monkeypatch.setattr(requests, "PAGE_NAMES_BYTES", 5 * CHUNK_NAME_BYTES)
    first, page = log.after(0)
    assert (first, [each.record.request_id for each in page]) == (2, ["b"])


def test_engine_is_remembered_as_it_was_then() -> None:
    log = taken("a")
    log.take(EngineHello("e", 1, "b"), [record("b")], 6.0)
    assert [each.namespace for each in log.find("")] == ["b", "a"]
    assert [each.at for each in log.find("")] == [6.0, 5.0]
