"""Requests that are told to the scheduler actor with their chunks' names, and read page by page."""

from __future__ import annotations

import pytest

from raykv.base.errors import MessageError
from raykv.base.ids import SLOT_ALIGNMENT, EngineId, Namespace, NodeId
from raykv.directory.actor import SchedulerActor
from raykv.directory.answers import misses as miss_log
from raykv.directory.answers.misses import MissLog
from raykv.directory.members import Engine
from raykv.directory.mirror import Mirror
from raykv.engine.accounts import MAX_NAMED, MAX_RECORDS, Accounts
from raykv.protocol.engine import (
    CHUNK_NAME_BYTES,
    MAX_NAMES_BYTES,
    AttachEngine,
    EngineAttached,
    MissRecord,
    SyncRequest,
    check_sync,
)
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import NodeReport
from raykv.protocol.reader import RequestPage


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")[::-1] + bytes(4)


def names(*numbers: int) -> bytes:
    return b"".join(key(number)[:CHUNK_NAME_BYTES] for number in numbers)


# The engine


def closed(accounts: Accounts, request_id: str, num_chunks: int) -> MissRecord:
    accounts.open(request_id, 32 * num_chunks)
    record = accounts.close(request_id, [key(number) for number in range(num_chunks)])
    assert record is not None
    return record


def test_record_names_the_requests_chunks_in_order() -> None:
    record = closed(Accounts(tokens_per_chunk=32), "r", 3)
    assert (record.chunks, record.chunk_tokens) == (names(0, 1, 2), 32)


def test_names_of_one_request_have_a_bound() -> None:
    record = closed(Accounts(), "r", MAX_NAMED + 1)
    assert record.chunks == names(*range(MAX_NAMED))


def test_names_of_waiting_records_have_a_bound_until_they_are_taken() -> None:
    accounts = Accounts()
    records = [closed(accounts, f"r{number}", 1000) for number in range(MAX_RECORDS)]
    sizes = [len(record.chunks) for record in records]
    assert sum(sizes) == MAX_NAMES_BYTES
    assert sizes[0] == 8000
    assert sizes[-1] == 0
    # Those that wait are told in the same message.
    assert len(encode(SyncRequest("e", 1, 1, finished=accounts.take_records()))) < 100 << 10
    assert closed(accounts, "later", 2).chunks == names(0, 1)


# The log


ENGINE = Engine(
    EngineId("e"),
    NodeId("n"),
    Namespace("space"),
    "tiny",
    1,
    {0: SLOT_ALIGNMENT},
    0.0,
    0.0,
    Mirror(None, Namespace("space")),
)


def record(number: int, num_chunks: int = 2) -> MissRecord:
    return MissRecord(f"r{number}", 64, 0, 64, {}, b"", names(*range(num_chunks)), 32)


def log_of(*records: MissRecord) -> MissLog:
    log = MissLog({})
    log.take(ENGINE, records, now=5.0)
    return log


def read(log: MissLog) -> list[str]:
    """All pages, as a client reads them."""
    found: list[str] = []
    after = 0
    while True:
        page = log.page(epoch=1, after=after, now=7.0)
        found += [each.record.request_id for each in page.found]
        after = page.first + len(page.found) - 1
        if not page.found or after >= page.last:
            return found


def test_page_has_what_followed_with_names_and_age() -> None:
    page = log_of(record(1), record(2), record(3)).page(epoch=9, after=1, now=7.0)
    assert (page.epoch, page.first, page.last) == (9, 2, 3)
    assert [each.record.request_id for each in page.found] == ["r2", "r3"]
    assert page.found[0].record.chunks == names(0, 1)
    assert page.found[0].age_s == 2.0


@pytest.mark.parametrize("after", [0, -5])
def test_pages_tell_every_request_once_in_order(after: int) -> None:
    log = log_of(*map(record, range(miss_log.MAX_PAGE * 2 + 3)))
    assert read(log) == [f"r{number}" for number in range(miss_log.MAX_PAGE * 2 + 3)]
    assert log.page(1, after, 7.0).first == 1


def test_nothing_follows_the_newest() -> None:
    page = log_of(record(1)).page(epoch=1, after=1, now=7.0)
    assert (page.found, page.first, page.last) == ([], 2, 1)
    assert log_of(record(1)).page(epoch=1, after=1 << 60, now=7.0).found == []
    assert log_of().page(epoch=1, after=0, now=7.0).found == []


def test_page_stays_small_whatever_its_requests_name() -> None:
    log = log_of(*(record(number, MAX_NAMED) for number in range(40)))
    page = log.page(epoch=1, after=0, now=7.0)
    assert 1 <= len(page.found) < 40
    assert len(encode(page)) < 100 << 10
    assert read(log) == [f"r{number}" for number in range(40)]


def test_log_forgets_the_oldest_by_number_and_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miss_log, "MAX_RECORDS", 3)
    log = log_of(*map(record, range(5)))
    assert read(log) == ["r2", "r3", "r4"]
    assert log.page(1, 0, 7.0).first == 3
    monkeypatch.setattr(miss_log, "MAX_NAMES_BYTES", 5 * CHUNK_NAME_BYTES)
    log.take(ENGINE, [record(9)], now=6.0)
    assert read(log) == ["r4", "r9"]


# The scheduler actor


@pytest.mark.parametrize(
    "bad",
    [
        MissRecord("r", 1, 0, 1, chunks=b"1234567"),
        MissRecord("r", 1, 0, 1, chunks=bytes(MAX_NAMES_BYTES + CHUNK_NAME_BYTES)),
        MissRecord("r", -1, 0, 1),
        MissRecord("r", 1, 0, 1, chunk_tokens=-1),
        MissRecord("r" * 5000, 1, 0, 1),
    ],
)
def test_record_that_can_not_be_meant_is_refused(bad: MissRecord) -> None:
    with pytest.raises(MessageError):
        check_sync(SyncRequest("e", 1, 1, finished=[bad]))


def test_scheduler_actor_tells_requests() -> None:
    actor = SchedulerActor("here", "lru")
    epoch = actor._manager.epoch
    actor.report(encode(NodeReport(PROTOCOL_VERSION, "n", 1, 1, 1 << 20, 1 << 16, 0, 0)))
    message = AttachEngine(PROTOCOL_VERSION, "e", "n", "space", "m", 1, {0: SLOT_ALIGNMENT})
    assert not decode(actor.attach(encode(message)), EngineAttached).error
    actor.sync(encode(SyncRequest("e", epoch, 1, finished=[record(1)])))
    page = decode(actor.requests(0), RequestPage)
    assert [each.record for each in page.found] == [record(1)]
    with pytest.raises(MessageError):
        actor.requests("all")  # type: ignore[arg-type]
