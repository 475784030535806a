"""Reads out of other nodes' pools, from both ends.

The source's: which bytes go out, what is refused, and that no chunk is torn. The destination's:
what becomes of wrong answers, late ones and none.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import xxhash

import raykv.node.fetch
import raykv.node.read
from raykv.base.ids import Blocks, Refusal, Stamp
from raykv.cluster.breaker import Pauses
from raykv.node.peers import Bytes
from raykv.node.pool.records import ChunkRecord
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import ReadReply
from raykv.protocol.listing import Where
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    HISTORY,
    LONG_S,
    PAGE,
    STAMP,
    Answer,
    Faults,
    Node,
    Wanted,
    assert_nothing_there,
    assert_right,
    content,
    question,
    wanted,
    within,
)
from tests.fixtures.waiting import wait_until

NONE = Refusal.NONE


def read(source: Node, *records: ChunkRecord) -> tuple[list[Refusal], bytes]:
    reply, data = source.reader.read(question(*records))
    assert reply.life == source.life
    return reasons(reply), data.tobytes()


def reasons(reply: ReadReply) -> list[Refusal]:
    return [Refusal(number) for number in reply.refusals]


# What a source sends


def test_chunks_of_several_sizes_come_back_to_back_in_the_order_of_the_question(
    source: Node,
) -> None:
    records = [source.store(key(i), pages * PAGE) for i, pages in enumerate([1, 3, 1, 16, 3])]
    records.reverse()
    refused, data = read(source, *records)
    assert refused == [NONE] * 5
    assert data == b"".join(content(record) for record in records)
    assert read(source, records[0], records[0]) == ([NONE] * 2, content(records[0]) * 2)
    assert read(source) == ([], b"")


def test_chunk_that_is_refused_leaves_no_gap_in_bytes_checksums_and_stamps(source: Node) -> None:
    stamps = [Stamp(HISTORY, 4), STAMP, Stamp(HISTORY, 6)]
    first, second, third = (
        source.store(key(i), 2 * PAGE, stamp=stamp) for i, stamp in enumerate(stamps)
    )
    source.evict(second)
    reply, data = source.reader.read(question(first, second, third))
    assert reasons(reply) == [NONE, Refusal.NOT_HERE, NONE]
    assert data.tobytes() == content(first) + content(third)
    expected = [xxhash.xxh3_64(content(record)).intdigest() for record in (first, third)]
    assert reply.checksums == expected
    assert list(map(Stamp, reply.histories, reply.stamps)) == [stamps[0], stamps[2]]


def test_rows_say_how_chunks_are_and_which_blocks_came(source: Node) -> None:
    part, gone = source.store(key(0), blocks=Blocks(1, 2)), source.store(key(1))
    source.evict(gone)
    reply, _ = source.reader.read(question(part, gone))
    assert (reply.life, reply.number) == (source.life, source.keeper.owner.index.listing.number)
    assert [(row.key, row.where) for row in reply.rows] == [
        (key(0), Where.RAM),
        (key(1), Where.NOWHERE),
    ]
    assert raykv.node.read.blocks_in(reply)[key(0)] == Blocks(1, 2)


def test_chunk_that_was_stored_anew_is_the_one_that_is_named(source: Node) -> None:
    record = source.store(key(0))
    source.evict(record)
    source.store(key(0))
    assert read(source, record) == ([NONE], content(record))


def test_more_than_the_bound_is_refused_unless_it_is_one_chunk(
    source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.read, "MAX_READ_BYTES", 2 * PAGE)
    small = [source.store(key(i)) for i in range(3)]
    large = source.store(key(3), 3 * PAGE)
    assert read(source, *small) == ([Refusal.BAD_HANDLE] * 3, b"")
    assert read(source, *small[:2])[0] == [NONE] * 2
    assert read(source, large) == ([NONE], content(large))


def test_reader_is_gone_when_the_answer_is_there(source: Node) -> None:
    record, gone = source.store(key(0)), source.store(key(1))
    source.evict(gone)
    read(source, record, gone)
    assert record.readers == 0
    assert source.reader.reading == 0
    assert source.reader.bytes_sent == PAGE


def test_no_reader_is_left_when_a_copy_fails(source: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [source.store(key(number)) for number in range(3)]

    def failing(record: ChunkRecord, checksum: int) -> Refusal:
        if record is records[1]:
            raise OSError("planted")
        return NONE

    monkeypatch.setattr(source.keeper, "check_bytes", failing)
    for method in (source.reader.read, source.reader.hold):
        with pytest.raises(OSError, match="planted"):
            method(question(*records))
        assert [record.readers for record in records] == [0, 0, 0]


def test_answer_stays_what_it_was_when_the_slot_is_overwritten(source: Node) -> None:
    record = source.store(key(0))
    _, data = source.reader.read(question(record))
    source.evict(record)
    assert source.store(key(1)).slot == record.slot
    assert data.tobytes() == content(record)


def test_what_is_read_while_slots_are_written_is_whole_or_refused(source: Node) -> None:
    """A writer stores one chunk after another; every chunk's content is its own."""
    num_bytes = 64 * PAGE
    records = [source.store(key(0), num_bytes)]
    stopped = threading.Event()

    def write() -> None:
        while not stopped.is_set():
            source.evict(records[-1])
            record = source.begin_store(key(len(records)), num_bytes)
            fresh, place = content(record), source.keeper.address_of(record)
            # In parts, so that a reader would see some of them.
            for at in range(0, num_bytes, num_bytes // 16):
                ctypes.memmove(place + at, fresh[at:], num_bytes // 16)
            source.keeper.landed(record, ok=True)
            records.append(record)
            stopped.wait(0.002)

    answers: dict[ChunkRecord, set[bytes]] = {}
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        give_up_at = time.monotonic() + LONG_S
        while len(records) < 50 and time.monotonic() < give_up_at:
            record = records[-1]
            refused, data = read(source, record)
            if refused == [NONE]:
                answers.setdefault(record, set()).add(data)
        stopped.set()
        writing.result(LONG_S)
    assert answers
    assert answers == {record: {content(record)} for record in answers}


def test_many_threads_read_at_once(source: Node) -> None:
    records = [source.store(key(i), (1 + i % 3) * PAGE) for i in range(12)]

    def check(turn: int) -> None:
        asked = records[turn % 12 :] + records[: turn % 12]
        assert read(source, *asked)[1] == b"".join(content(record) for record in asked)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(check, range(60)))
    assert source.reader.bytes_sent == 60 * 24 * PAGE


# Answers that are wrong


def flip_bit(reply: ReadReply, data: Bytes) -> Answer:
    """In the last byte."""
    changed = data.copy()
    changed[-1] ^= 1
    return reply, changed


def test_chunk_with_a_flipped_bit_is_never_ready(here: Node, source: Node) -> None:
    source.faults.alter = flip_bit
    chunks = [wanted(source.store(key(i)), source) for i in range(3)]
    assert here.fetch(chunks).refusals == [NONE, NONE, Refusal.CORRUPT]
    assert_right(here, chunks[:2])
    assert here.ready() == {chunk.key for chunk in chunks[:2]}


def replaced(**fields: Any) -> Callable[..., Answer]:
    return lambda reply, data: (msgspec.structs.replace(reply, **fields), data)


MALFORMED: dict[str, Callable[..., Answer]] = {
    "truncated": lambda reply, data: (reply, data[:-1]),
    "too long": lambda reply, data: (reply, data.repeat(2)),
    "too many refusals": replaced(refusals=bytes([NONE, Refusal.NOT_HERE])),
    "no refusals": replaced(refusals=b""),
    "no checksums": replaced(checksums=[]),
    "no stamps": replaced(stamps=Numbers()),
    "unknown refusal": lambda reply, data: (
        msgspec.structs.replace(reply, refusals=bytes([99]), checksums=[]),
        data[:0],
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_answer_counts_as_none(here: Node, source: Node, case: str) -> None:
    source.faults.alter = MALFORMED[case]
    chunk = wanted(source.store(key(0)), source)
    assert here.fetch([chunk]).refusals == [Refusal.NODE_LOST]
    assert_nothing_there(here)
    source.faults = Faults()
    assert here.fetch([chunk]).refusals == [Refusal.BREAKER_OPEN]
    assert source.num_reads == 1


@pytest.mark.parametrize("alter", [flip_bit, MALFORMED["truncated"]])
def test_next_source_is_read_after_a_wrong_answer(
    here: Node, source: Node, other: Node, alter: Callable[..., Answer]
) -> None:
    source.faults.alter = alter
    chunk = both(source, other)
    assert here.fetch([chunk]).refusals == [NONE]
    assert_right(here, [chunk])


# Sources that don't answer


def both(source: Node, other: Node, number: int = 0) -> Wanted:
    """A chunk that both have, the first one to be asked first."""
    other.store(key(number))
    return wanted(source.store(key(number)), source, other)


FAILURES = {"unreachable": Faults(is_unreachable=True), "dies": Faults(dies_after_read=True)}


def set_breaker(here: Node, first_s: float, longest_s: float) -> None:
    here.fetcher.breakers.pauses = Pauses(first_s, longest_s)


def pause_s(here: Node, source: Node, chunk: Wanted) -> float:
    """Have fetches tried until one asks `source`; how long after the read before that was it?"""
    num_reads = source.num_reads

    def is_asked() -> bool:
        here.fetch([chunk])
        return source.num_reads > num_reads

    wait_until(is_asked, LONG_S, "the source is asked again")
    return source.network.read_at[-1] - source.network.read_at[-2]


def test_deadline_is_kept_when_the_source_is_silent(here: Node, source: Node) -> None:
    source.faults.is_silent = True
    chunk = wanted(source.store(key(0)), source)
    with within(0.3, 0.3):
        assert here.fetch([chunk], deadline_s=0.3).refusals == [Refusal.TOO_LATE]
    assert_nothing_there(here)


def test_what_has_landed_before_the_deadline_is_kept(here: Node, source: Node, other: Node) -> None:
    # Two nodes meet, which may take long on a busy machine.
    here.fetch([wanted(source.store(key(9)), source)])
    other.faults.is_silent = True
    chunks = [wanted(node.store(key(i)), node) for i, node in enumerate((source, other))]
    assert here.fetch(chunks, deadline_s=1.0).refusals == [NONE, Refusal.TOO_LATE]
    assert_right(here, chunks[:1])


def test_source_has_half_of_the_time_while_another_one_may_be_asked_and_else_all(
    here: Node, source: Node, other: Node
) -> None:
    network = source.network
    assert here.fetch([both(source, other)], LONG_S).refusals == [NONE]
    assert 0.0 < network.waits[-1] <= LONG_S / 2
    other.faults.is_unreachable = True
    alone = wanted(other.store(key(9)), other)
    assert here.fetch([alone]).refusals == [Refusal.NODE_LOST]
    assert here.fetch([both(source, other, 1)], LONG_S).refusals == [NONE]
    assert LONG_S / 2 < network.waits[-1] <= LONG_S


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_half_of_the_time_is_left_however_many_pieces_are_under_way(
    here: Node, source: Node, other: Node
) -> None:
    source.faults.is_silent = True
    other.faults.delay_s = 0.3
    chunks = [both(source, other, i) for i in range(3)]
    assert here.fetch(chunks, deadline_s=2.0).refusals == [NONE] * 3


@pytest.mark.parametrize("failure", FAILURES)
def test_fetch_ends_at_once_when_its_source_fails_or_reads_the_next_one(
    here: Node, source: Node, other: Node, failure: str
) -> None:
    set_breaker(here, 0.0, 0.0)
    alone, chunk = wanted(source.store(key(0)), source), both(source, other, 1)
    source.faults = FAILURES[failure]
    with within(0.0, 0.1):
        assert here.fetch([alone]).refusals == [Refusal.NODE_LOST]
    assert_nothing_there(here)
    with within(0.0, 0.1):
        assert here.fetch([chunk]).refusals == [NONE]
    assert_right(here, [chunk])


def test_source_that_did_not_answer_is_left_alone(
    here: Node, source: Node, other: Node, caplog: pytest.LogCaptureFixture
) -> None:
    source.faults.is_silent = True
    alone, chunk = wanted(source.store(key(0)), source), both(source, other, 1)
    assert here.fetch([alone], 0.1).refusals == [Refusal.TOO_LATE]
    source.faults = Faults()
    with within(0.0, 0.1):
        assert here.fetch([alone]).refusals == [Refusal.BREAKER_OPEN]
    assert_nothing_there(here)
    report = here.fetcher.breaker_report()
    assert [(row.peer, row.state) for row in report.rows] == [("node:source", "open")]
    assert (report.opened, report.failed, report.refused) == (1, 1, 1)
    assert caplog.text.count("no answer, other nodes are asked") == 1
    assert here.fetch([chunk]).refusals == [NONE]
    assert (source.num_reads, other.num_reads) == (1, 1)
    assert_right(here, [chunk])


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_all_chunks_of_the_fetch_that_finds_a_source_back_are_read(
    here: Node, source: Node
) -> None:
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    chunks = [wanted(source.store(key(i)), source) for i in range(6)]
    here.fetch(chunks[:1])
    source.faults = Faults(delay_s=0.05)
    source.network.most_under_way = 0
    assert here.fetch(chunks).refusals == [NONE] * 6
    assert here.fetcher.breaker_report().rows == []


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_one_piece_alone_tries_a_source_that_was_left_alone(here: Node, source: Node) -> None:
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    chunks = [wanted(source.store(key(i)), source) for i in range(3)]
    here.fetch(chunks[:1])
    source.faults = Faults(gate=threading.Event())
    before = source.num_reads
    fetch = here.begin_fetch(chunks[:2])
    wait_until(lambda: source.num_reads > before, LONG_S, "the trial")
    assert here.fetch(chunks[2:]).refusals == [Refusal.BREAKER_OPEN]
    assert source.num_reads == before + 1
    source.network.open_gates()
    assert fetch.result(LONG_S).refusals == [NONE] * 2


def test_trial_that_its_fetch_did_not_wait_for_is_made_again(
    here: Node, source: Node, other: Node
) -> None:
    """The fetch is over before the trial's answer is in: that says nothing of the source."""
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    chunks = [wanted(node.store(key(i)), node) for i, node in enumerate((other, source))]
    here.fetch(chunks[1:])
    source.faults, other.faults = Faults(is_silent=True), Faults(is_silent=True)
    assert here.fetch(chunks, deadline_s=0.3).refusals == [Refusal.TOO_LATE] * 2
    source.faults = Faults()
    assert here.fetch(chunks[1:]).refusals == [NONE]


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_trial_that_fails_holds_up_no_chunk_behind_it(
    here: Node, source: Node, other: Node
) -> None:
    set_breaker(here, 0.0, 0.0)
    chunks = [both(source, other, number) for number in range(3)]
    source.faults.is_unreachable = True
    here.fetch([wanted(source.store(key(9)), source)])
    with within(0.0, 0.5):
        assert here.fetch(chunks).refusals == [NONE] * 3
    assert_right(here, chunks)


def test_source_is_asked_again_after_a_while(here: Node, source: Node) -> None:
    set_breaker(here, 0.3, 100.0)
    source.faults.is_silent = True
    chunk = wanted(source.store(key(0)), source)
    here.fetch([chunk], 0.1)
    source.faults = Faults()
    assert pause_s(here, source, chunk) >= 0.3
    again = wanted(source.store(key(1)), source)
    assert here.fetch([again]).refusals == [NONE]
    assert_right(here, [chunk, again])


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_death_of_a_source_counts_once_however_many_pieces_are_under_way(
    here: Node, source: Node
) -> None:
    set_breaker(here, 0.4, 100.0)
    source.faults.dies_after_read = True
    chunks = [wanted(source.store(key(i)), source) for i in range(3)]
    here.fetch(chunks)
    assert pause_s(here, source, chunks[0]) < 1.6  # counted three times: 1.6


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_source_that_answers_stays_trusted_when_the_time_of_a_fetch_is_up(
    here: Node, source: Node
) -> None:
    """Three pieces take 0.4 s; the seventh one has 0.2 s."""
    source.faults.delay_s = 0.4
    chunks = [wanted(source.store(key(i)), source) for i in range(7)]
    assert here.fetch(chunks, deadline_s=1.0).refusals[0] is NONE
    again = wanted(source.store(key(9)), source)
    assert here.fetch([again]).refusals == [NONE]
