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

import msgspec
import pytest
import xxhash

import raykv.node.fetch
import raykv.node.read
from raykv.base.ids import ChunkName, Generation, Key, Refusal, Slot
from raykv.cluster.breaker import Pauses
from raykv.protocol.columns import Handles, Keys, LostReplicas
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.peer import ReadReply, ReadRequest
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    LONG_S,
    NAMESPACE,
    PAGE,
    Answer,
    Faults,
    Network,
    Node,
    add_refusal,
    assert_nothing_there,
    assert_right,
    being_overwritten,
    being_stored,
    cleared,
    content,
    drop_checksums,
    drop_refusals,
    flip_bit,
    given_up,
    invent_refusal,
    landed,
    lengthen,
    of_other_namespace,
    overwritten,
    refusals,
    stored_anew,
    truncate,
    within,
)
from tests.fixtures.waiting import wait_until

NONE = Refusal.NONE


def question(source: Node, *names: ChunkName) -> ReadRequest:
    return ReadRequest(
        PROTOCOL_VERSION,
        NAMESPACE,
        source.epoch,
        Handles(
            Keys.of([name.key for name in names]),
            [name.slot for name in names],
            [name.generation for name in names],
        ),
        [name.slot_bytes for name in names],
    )


def read(source: Node, *names: ChunkName) -> tuple[list[Refusal], bytes]:
    reply, data = source.reader.read(question(source, *names))
    assert reply.node_epoch == source.epoch
    return reasons(reply), data.tobytes()


def reasons(reply: ReadReply) -> list[Refusal]:
    return [Refusal(number) for number in reply.refusals]


def changed(
    name: ChunkName, *, generation: int = 0, slot: int = 0, key: Key | None = None
) -> ChunkName:
    """Differences to `name`, and another key."""
    return ChunkName(
        name.namespace,
        key or name.key,
        Slot(name.slot + slot),
        Generation(name.generation + generation),
        name.slot_bytes,
    )


# What a source sends


def test_chunks_of_several_sizes_come_back_to_back_in_the_order_of_the_question(
    source: Node,
) -> None:
    names = [source.store(key(i), pages * PAGE) for i, pages in enumerate([1, 3, 1, 16, 3])]
    names.reverse()
    refused, data = read(source, *names)
    assert refused == [Refusal.NONE] * 5
    assert data == b"".join(content(name) for name in names)


def test_chunk_that_is_refused_leaves_no_gap(source: Node) -> None:
    first, second, third = (source.store(key(i)) for i in range(3))
    refused, data = read(source, first, changed(second, generation=1), third)
    assert refused == [Refusal.NONE, Refusal.STALE, Refusal.NONE]
    assert data == content(first) + content(third)


def test_checksums_are_those_of_the_chunks_that_follow(source: Node) -> None:
    first, second, third = (source.store(key(i), 2 * PAGE) for i in range(3))
    asked = question(source, first, changed(second, generation=-1), third)
    reply, _ = source.reader.read(asked)
    expected = [xxhash.xxh3_64(content(name)).intdigest() for name in (first, third)]
    assert reply.checksums == expected


def test_no_checksums_are_computed_if_nobody_wants_them(source: Node) -> None:
    name = source.store(key(0))
    asked = msgspec.structs.replace(question(source, name), with_checksums=False)
    reply, data = source.reader.read(asked)
    assert reply.checksums == []
    assert data.tobytes() == content(name)


def test_the_same_chunk_twice_in_a_question_comes_twice(source: Node) -> None:
    name = source.store(key(0))
    assert read(source, name, name) == ([Refusal.NONE] * 2, content(name) * 2)


def test_empty_question_has_an_empty_answer(source: Node) -> None:
    assert read(source) == ([], b"")


REFUSED: dict[str, tuple[Callable[[Node, ChunkName], ChunkName], Refusal]] = {
    "overwritten": (overwritten, Refusal.STALE),
    "stored anew": (stored_anew, Refusal.STALE),
    "being overwritten": (being_overwritten, Refusal.STALE),
    "being stored": (being_stored, Refusal.WRITING),
    "given up": (given_up, Refusal.STALE),
    "cleared": (cleared, Refusal.STALE),
    "earlier generation": (lambda _, name: changed(name, generation=-1), Refusal.STALE),
    "later generation": (lambda _, name: changed(name, generation=1), Refusal.STALE),
    "other key": (lambda _, name: changed(name, key=key(1)), Refusal.STALE),
    "other namespace": (of_other_namespace, Refusal.STALE),
    "slot never used": (lambda _, name: changed(name, slot=9), Refusal.STALE),
    "slot behind the pool": (lambda _, name: changed(name, slot=1 << 30), Refusal.STALE),
}


@pytest.mark.parametrize("case", REFUSED)
def test_chunk_is_refused_unless_every_part_of_its_name_fits(source: Node, case: str) -> None:
    spoil, refusal = REFUSED[case]
    named = spoil(source, source.store(key(0)))
    assert read(source, named) == ([refusal], b"")


def test_question_for_another_life_of_the_node_is_refused_whole(source: Node) -> None:
    name = source.store(key(0))
    right = question(source, name, name)
    for wrong in (
        msgspec.structs.replace(right, node_epoch=source.epoch - 1),
        msgspec.structs.replace(right, node_epoch=source.epoch + 1),
        msgspec.structs.replace(right, version=PROTOCOL_VERSION + 1),
    ):
        reply, data = source.reader.read(wrong)
        assert reasons(reply) == [Refusal.BAD_HANDLE] * 2
        assert reply.node_epoch == source.epoch
        assert len(data) == 0


def test_more_than_the_bound_is_refused_unless_it_is_one_chunk(
    source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.read, "MAX_READ_BYTES", 2 * PAGE)
    small = [source.store(key(i)) for i in range(3)]
    large = source.store(key(3), 3 * PAGE)
    assert read(source, *small) == ([Refusal.BAD_HANDLE] * 3, b"")
    assert read(source, *small[:2])[0] == [Refusal.NONE] * 2
    assert read(source, large) == ([Refusal.NONE], content(large))


@pytest.mark.parametrize("pages", [1, 4])
def test_chunk_of_another_size_than_its_slot_is_refused(source: Node, pages: int) -> None:
    first, _ = (source.store(key(i), 2 * PAGE) for i in range(2))
    named = ChunkName(first.namespace, first.key, first.slot, first.generation, pages * PAGE)
    refused, data = read(source, named)
    assert refused[0] is not Refusal.NONE
    assert data == b""


def test_reader_is_gone_when_the_answer_is_there(source: Node) -> None:
    name = source.store(key(0))
    read(source, name, changed(name, generation=1))
    assert source.keeper.table.readers_of(name.slot) == 0
    assert source.reader.reading == 0
    assert source.reader.bytes_sent == PAGE


def test_answer_stays_what_it_was_when_the_slot_is_overwritten(source: Node) -> None:
    name = source.store(key(0))
    _, data = source.reader.read(question(source, name))
    overwritten(source, name)
    assert data.tobytes() == content(name)


def test_what_is_read_while_the_slot_is_written_is_whole_or_refused(source: Node) -> None:
    """A writer goes from generation to generation; every chunk's content is its own."""
    num_bytes = 256 * PAGE
    names = [source.store(key(0), num_bytes)]
    stopped = threading.Event()

    def write() -> None:
        while not stopped.is_set():
            lease = source.lease(slot=names[0].slot)
            name = ChunkName(
                NAMESPACE, key(lease.generation), lease.slot, lease.generation, num_bytes
            )
            fresh = content(name)
            assert source.keeper.begin_store(name, 0, 1, LONG_S, LONG_S) is Refusal.NONE
            place = source.keeper.pool.address + name.slot * PAGE
            # In parts, so that a reader would see some of them.
            for at in range(0, num_bytes, num_bytes // 16):
                ctypes.memmove(place + at, fresh[at:], num_bytes // 16)
            source.keeper.end_store(name, 0, ok=True)
            names.append(name)

    answers: dict[ChunkName, set[bytes]] = {}
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        give_up_at = time.monotonic() + LONG_S
        while len(names) < 50 and time.monotonic() < give_up_at:
            name = names[-1]
            refused, data = read(source, name)
            if refused == [Refusal.NONE]:
                answers.setdefault(name, set()).add(data)
        stopped.set()
        writing.result(LONG_S)
    assert answers
    assert answers == {name: {content(name)} for name in answers}


def test_many_threads_read_at_once(source: Node) -> None:
    names = [source.store(key(i), (1 + i % 3) * PAGE) for i in range(12)]

    def check(turn: int) -> None:
        asked = names[turn % 12 :] + names[: turn % 12]
        assert read(source, *asked)[1] == b"".join(content(name) for name in asked)

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(check, range(60)))
    assert source.reader.bytes_sent == 60 * 24 * PAGE


# Answers that are wrong


def test_chunk_with_a_flipped_bit_is_never_ready(here: Node, source: Node) -> None:
    source.faults.alter = flip_bit
    orders = here.orders(*((source, source.store(key(i))) for i in range(3)))
    result = here.fetch(orders)
    assert refusals(result) == [NONE, NONE, Refusal.CORRUPT]
    assert result.lost == LostReplicas()
    assert_right(here, orders[:2])
    assert here.ready() == {landed(order) for order in orders[:2]}


def test_flipped_bit_passes_without_checksums(here: Node, source: Node) -> None:
    """What the check is for: nothing else would notice."""
    source.faults.alter = flip_bit
    orders = here.orders((source, source.store(key(0))))
    request = msgspec.structs.replace(here.request(orders), with_checksums=False)
    assert refusals(here.fetcher.fetch(request)) == [NONE]
    loaded = here.load(landed(orders[0]))
    assert isinstance(loaded, bytes)
    assert loaded != content(landed(orders[0]))
    assert loaded[:-1] == content(landed(orders[0]))[:-1]


MALFORMED = {
    "truncated": truncate,
    "too long": lengthen,
    "too many refusals": add_refusal,
    "no refusals": drop_refusals,
    "no checksums": drop_checksums,
    "unknown refusal": invent_refusal,
}
every_malformed = pytest.mark.parametrize("alter", list(MALFORMED.values()), ids=list(MALFORMED))


@every_malformed
def test_malformed_answer_counts_as_none(
    network: Network, here: Node, source: Node, alter: Callable[..., Answer]
) -> None:
    source.faults.alter = alter
    name = source.store(key(0))
    order = here.order_of((source, name))
    result = here.fetch([order])
    assert refusals(result) == [Refusal.NODE_LOST]
    assert result.lost == LostReplicas()
    assert_nothing_there(here, order)
    source.faults = Faults()
    assert refusals(here.fetch(here.orders((source, name)))) == [Refusal.BREAKER_OPEN]
    assert network.num_reads(source) == 1


@every_malformed
def test_next_replica_is_read_after_a_malformed_answer(
    here: Node, source: Node, other: Node, alter: Callable[..., Answer]
) -> None:
    source.faults.alter = alter
    order = here.order_of((source, source.store(key(0))), (other, other.store(key(0))))
    assert refusals(here.fetch([order])) == [NONE]
    assert_right(here, [order])


def test_next_replica_is_read_when_the_first_sends_corrupt_bytes(
    here: Node, source: Node, other: Node
) -> None:
    source.faults.alter = flip_bit
    order = here.order_of((source, source.store(key(0))), (other, other.store(key(0))))
    assert refusals(here.fetch([order])) == [NONE]
    assert_right(here, [order])


# Sources that don't answer

FAILURES = {"unreachable": Faults(is_unreachable=True), "dies": Faults(dies_after_read=True)}


def set_breaker(here: Node, first_s: float, longest_s: float) -> None:
    here.fetcher.breakers.pauses = Pauses(first_s, longest_s)


@pytest.fixture
def one_chunk_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.node.fetch, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(raykv.node.fetch, "MOST_PIECE_BYTES", PAGE)


def pause_s(network: Network, here: Node, source: Node, name: ChunkName) -> float:
    """Have fetches tried until one asks `source`; how long after the read before that was it?"""
    num_reads = network.num_reads(source)

    def is_asked() -> bool:
        here.fetch(here.orders((source, name)))
        return network.num_reads(source) > num_reads

    wait_until(is_asked, LONG_S, "the source is asked again")
    return network.read_at[-1] - network.read_at[-2]


def test_deadline_is_kept_when_the_source_is_silent(here: Node, source: Node) -> None:
    source.faults.is_silent = True
    order = here.order_of((source, source.store(key(0))))
    with within(0.3, 0.3):
        assert refusals(here.fetch([order], deadline_s=0.3)) == [Refusal.TOO_LATE]
    assert_nothing_there(here, order)


def test_what_has_landed_before_the_deadline_is_kept(here: Node, source: Node, other: Node) -> None:
    other.faults.is_silent = True
    orders = here.orders((source, source.store(key(0))), (other, other.store(key(1))))
    assert refusals(here.fetch(orders, deadline_s=0.8)) == [NONE, Refusal.TOO_LATE]
    assert_right(here, orders[:1])


def test_half_of_the_time_is_left_for_the_next_replica(
    here: Node, source: Node, other: Node
) -> None:
    source.faults.is_silent = True
    other.faults.delay_s = 0.2
    order = here.order_of((source, source.store(key(0))), (other, other.store(key(0))))
    with within(0.9, 1.6):
        assert refusals(here.fetch([order], deadline_s=1.6)) == [NONE]
    assert_right(here, [order])


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_half_of_the_time_is_left_however_many_pieces_are_under_way(
    here: Node, source: Node, other: Node
) -> None:
    source.faults.is_silent = True
    other.faults.delay_s = 0.3
    orders = [
        here.order_of((source, source.store(key(i))), (other, other.store(key(i))))
        for i in range(3)
    ]
    assert refusals(here.fetch(orders, deadline_s=2.0)) == [NONE] * 3


@pytest.mark.parametrize("failure", FAILURES)
def test_next_replica_is_read_at_once_when_the_first_fails(
    here: Node, source: Node, other: Node, failure: str
) -> None:
    source.faults = FAILURES[failure]
    order = here.order_of((source, source.store(key(0))), (other, other.store(key(0))))
    with within(0.0, 0.1):
        assert refusals(here.fetch([order])) == [NONE]
    assert_right(here, [order])


@pytest.mark.parametrize("failure", FAILURES)
def test_fetch_ends_at_once_when_its_only_source_fails(
    here: Node, source: Node, failure: str
) -> None:
    source.faults = FAILURES[failure]
    order = here.order_of((source, source.store(key(0))))
    with within(0.0, 0.1):
        assert refusals(here.fetch([order])) == [Refusal.NODE_LOST]
    assert_nothing_there(here, order)


def test_source_that_did_not_answer_is_left_alone(
    network: Network, here: Node, source: Node, other: Node
) -> None:
    source.faults.is_silent = True
    names = source.store(key(0)), other.store(key(0))
    assert refusals(here.fetch(here.orders((source, names[0])), 0.1)) == [Refusal.TOO_LATE]
    source.faults = Faults()
    assert refusals(here.fetch(here.orders((source, names[0])))) == [Refusal.BREAKER_OPEN]
    order = here.order_of((source, names[0]), (other, names[1]))
    assert refusals(here.fetch([order])) == [NONE]
    assert (network.num_reads(source), network.num_reads(other)) == (1, 1)
    assert_right(here, [order])


def test_fetch_from_a_source_that_is_left_alone_is_refused_at_once_and_takes_no_slot(
    network: Network, here: Node, source: Node, caplog: pytest.LogCaptureFixture
) -> None:
    source.faults.is_unreachable = True
    name = source.store(key(0))
    here.fetch(here.orders((source, name)))
    # A reader of the slot: a store would wait for it.
    old = here.store(key(1))
    assert here.keeper.begin_load(old) is NONE
    order = here.order(key(0), source.replica(name), at=here.lease(slot=old.slot))
    with within(0.0, 0.1):
        assert refusals(here.fetch([order])) == [Refusal.BREAKER_OPEN]
    here.keeper.end_load(old)
    assert here.load(old) == content(old)
    assert network.num_reads(source) == 1
    report = here.fetcher.breaker_report()
    assert (report.peers, report.states) == (["node:source"], ["open"])
    assert (report.opened, report.failed, report.refused) == (1, 1, 1)
    assert caplog.text.count("no answer") == 1


def test_chunk_that_is_there_already_needs_no_source(here: Node, source: Node) -> None:
    orders = here.orders((source, source.store(key(0))))
    assert refusals(here.fetch(orders)) == [NONE]
    source.faults.is_unreachable = True
    here.fetch(here.orders((source, source.store(key(1)))))
    assert refusals(here.fetch(orders)) == [NONE]


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_all_chunks_of_the_fetch_that_finds_a_source_back_are_read(
    network: Network, here: Node, source: Node
) -> None:
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    names = [source.store(key(i)) for i in range(6)]
    here.fetch(here.orders((source, names[0])))
    source.faults = Faults(delay_s=0.05)
    network.most_under_way = 0
    assert refusals(here.fetch(here.orders(*((source, name) for name in names)))) == [NONE] * 6
    assert here.fetcher.breaker_report().peers == []


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_one_piece_alone_tries_a_source_that_was_left_alone(
    network: Network, here: Node, source: Node
) -> None:
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    names = [source.store(key(i)) for i in range(3)]
    here.fetch(here.orders((source, names[0])))
    source.faults = Faults(gate=threading.Event())
    before = network.num_reads(source)
    fetch = here.begin_fetch(here.orders(*((source, name) for name in names[:2])))
    wait_until(lambda: network.num_reads(source) > before, LONG_S, "the trial")
    assert refusals(here.fetch(here.orders((source, names[2])))) == [Refusal.BREAKER_OPEN]
    assert network.num_reads(source) == before + 1
    network.open_gates()
    assert refusals(fetch.result(LONG_S)) == [NONE] * 2


def test_trial_that_its_fetch_did_not_wait_for_is_made_again(
    network: Network, here: Node, source: Node, other: Node
) -> None:
    """The fetch is over before the trial's answer is in: that says nothing of the source."""
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    names = source.store(key(0)), other.store(key(1))
    here.fetch(here.orders((source, names[0])))
    source.faults, other.faults = Faults(is_silent=True), Faults(is_silent=True)
    orders = here.orders((other, names[1]), (source, names[0]))
    assert refusals(here.fetch(orders, deadline_s=0.3)) == [Refusal.TOO_LATE] * 2
    source.faults = Faults()
    assert refusals(here.fetch(here.orders((source, names[0])))) == [NONE]


def test_source_is_asked_again_after_a_while(network: Network, here: Node, source: Node) -> None:
    set_breaker(here, 0.3, 100.0)
    source.faults.is_silent = True
    name = source.store(key(0))
    here.fetch(here.orders((source, name)), 0.1)
    source.faults = Faults()
    assert pause_s(network, here, source, name) >= 0.3
    orders = here.orders((source, name))
    assert refusals(here.fetch(orders)) == [NONE]
    assert_right(here, orders)


def test_pause_grows_with_each_failure_up_to_a_bound(
    network: Network, here: Node, source: Node
) -> None:
    set_breaker(here, 0.1, 0.2)
    source.faults.is_unreachable = True
    name = source.store(key(0))
    here.fetch(here.orders((source, name)))
    pauses = [pause_s(network, here, source, name) for _ in range(7)]
    assert pauses[0] >= 0.1
    assert min(pauses[1:]) >= 0.2
    assert pauses[-1] < 3.0  # without the bound: 6.4


def test_one_answer_makes_the_failures_before_it_forgotten(
    network: Network, here: Node, source: Node
) -> None:
    name = source.store(key(0))
    set_breaker(here, 0.0, 0.0)
    source.faults.is_unreachable = True
    for _ in range(6):
        here.fetch(here.orders((source, name)))
    source.faults = Faults()
    assert refusals(here.fetch(here.orders((source, name)))) == [NONE]
    set_breaker(here, 0.1, 100.0)
    source.faults.is_unreachable = True
    here.fetch(here.orders((source, name)))
    assert pause_s(network, here, source, name) < 3.0  # not forgotten: 6.4


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_death_of_a_source_counts_once_however_many_pieces_are_under_way(
    network: Network, here: Node, source: Node
) -> None:
    set_breaker(here, 0.4, 100.0)
    source.faults.dies_after_read = True
    names = [source.store(key(i)) for i in range(3)]
    here.fetch(here.orders(*((source, name) for name in names)))
    assert pause_s(network, here, source, names[0]) < 1.6  # counted three times: 1.6


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_source_that_answers_stays_trusted_when_the_time_of_a_fetch_is_up(
    here: Node, source: Node
) -> None:
    """Three pieces take 0.4 s; the seventh one has 0.2 s."""
    source.faults.delay_s = 0.4
    orders = here.orders(*((source, source.store(key(i))) for i in range(7)))
    assert refusals(here.fetch(orders, deadline_s=1.0))[0] is NONE
    again = here.orders((source, source.store(key(9))))
    assert refusals(here.fetch(again)) == [NONE]


def test_last_source_that_may_be_asked_has_all_of_the_time(
    here: Node, source: Node, other: Node
) -> None:
    other.faults.is_unreachable = True
    names = source.store(key(0)), other.store(key(0))
    assert refusals(here.fetch(here.orders((other, names[1])))) == [Refusal.NODE_LOST]
    source.faults.delay_s = 1.6
    order = here.order_of((source, names[0]), (other, names[1]))
    assert refusals(here.fetch([order], deadline_s=3.0)) == [NONE]
