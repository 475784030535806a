"""Fetches between nodes: right bytes or a refusal, in time, whatever the sources do.

Nodes, pools and services are real; `tests/fixtures/node/peers.py` carries the calls and makes
sources fail.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from raykv.base.ids import ALL_BLOCKS, Blocks, Namespace, Refusal, Stamp
from raykv.node.fetch import MOST_PIECE_BYTES, PIECE_BYTES, WINDOW, piece_bytes
from raykv.node.pool.owner import SERIES_S
from raykv.node.pool.records import ChunkRecord, Standing
from raykv.protocol.columns import SourceKind
from raykv.protocol.listing import Where
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    HISTORY,
    LONG_S,
    NAMESPACE,
    PAGE,
    Faults,
    Fetched,
    Network,
    Node,
    Wanted,
    assert_nothing_there,
    assert_right,
    being_stored,
    cleared,
    evicted,
    given_up,
    of_other_size,
    only_in_other_namespace,
    wanted,
    within,
)
from tests.fixtures.waiting import wait_until

NONE = Refusal.NONE


# Bytes

SIZES = {
    "one chunk": [1],
    "more chunks than pieces under way": [1] * 40,
    "two slot sizes": [1, 3, 3, 1, 1, 3],
    "chunks as large as a piece": [PIECE_BYTES // PAGE] * 2,
    "chunks larger than a piece": [5 * 1024] * 3,
    "more chunks than fit into a piece": [1024] * 9,
    "many pieces": [2 * 1024] * 40,
    "a large chunk between small ones": [1, 5 * 1024, 1],
}


@pytest.mark.parametrize("case", SIZES)
def test_bytes_at_the_destination_are_those_of_the_source(network: Network, case: str) -> None:
    source, here = (network.node(name, slab_bytes=96 << 20) for name in ("source", "here"))
    held = [source.store(key(i), pages * PAGE) for i, pages in enumerate(SIZES[case])]
    fetched = here.fetch([wanted(record, source) for record in held])
    num_bytes = sum(record.slot_bytes for record in held)
    assert fetched.refusals == [NONE] * len(held)
    assert fetched.result.num_bytes == here.fetcher.counters["bytes_fetched"] == num_bytes
    assert source.reader.bytes_sent == num_bytes
    assert here.fetcher.counters["chunks_fetched"] == len(held)
    assert_right(here, held)
    assert here.ready() == {record.key for record in held}
    for _, read in source.network.reads:
        assert sum(read.slot_bytes) <= piece_bytes(num_bytes) or len(read.keys) == 1


def test_chunks_that_fit_into_one_piece_are_read_with_one_call(here: Node, source: Node) -> None:
    chunks = [wanted(source.store(key(i)), source) for i in range(50)]
    assert here.fetch(chunks).refusals == [NONE] * 50
    assert source.num_reads == 1


def test_result_says_how_chunks_are_now_and_at_which_number(here: Node, source: Node) -> None:
    record = source.store(key(1), blocks=Blocks(1, 2))
    result = here.fetch([wanted(record, source), Wanted(key(2), (source.source,))]).result
    assert result.number == here.keeper.owner.index.listing.number
    found = {row.key: (row.where, row.blocks) for row in result.rows}
    assert found[key(1)] == (Where.RAM, Blocks(1, 2))
    assert found[key(2)][0] is Where.NOWHERE
    assert (list(result.failed_chunks), result.refusals) == ([1], bytes([Refusal.NOT_HERE]))


@pytest.mark.parametrize("blocks", [ALL_BLOCKS, Blocks(0, 1), Blocks(2, 2)])
def test_stamp_blocks_and_checksum_come_with_the_bytes(
    here: Node, source: Node, blocks: Blocks
) -> None:
    here.order(9)
    record = source.store(key(1), stamp=Stamp(HISTORY, 5), blocks=blocks)
    assert here.fetch([wanted(record, source)]).refusals == [NONE]
    arrived = here.record(record)
    assert (arrived.stamp, arrived.blocks) == (Stamp(HISTORY, 5), blocks)
    assert arrived.checksum == record.checksum


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (PAGE, PIECE_BYTES),
        (WINDOW * PIECE_BYTES, PIECE_BYTES),
        (3 * PIECE_BYTES * WINDOW, 3 * PIECE_BYTES),
        (100 * MOST_PIECE_BYTES, MOST_PIECE_BYTES),
    ],
)
def test_pieces_grow_with_the_fetch_as_long_as_several_are_under_way(
    num_bytes: int, expected: int
) -> None:
    assert piece_bytes(num_bytes) == expected


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_as_many_pieces_are_under_way_as_the_window_allows(here: Node, source: Node) -> None:
    source.faults.gate = threading.Event()
    chunks = [wanted(source.store(key(i)), source) for i in range(12)]
    fetch = here.begin_fetch(chunks)
    wait_until(lambda: source.num_reads == WINDOW, LONG_S, "a full window")
    source.faults.gate.set()
    assert fetch.result(LONG_S).refusals == [NONE] * 12
    assert source.network.most_under_way == WINDOW
    assert source.num_reads == 12
    assert_right(here, chunks)


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_answers_that_overtake_each_other_land_in_their_own_slots(
    here: Node, source: Node, other: Node
) -> None:
    source.faults.delay_s = 0.05
    held = [(node, node.store(key(i))) for i in range(6) for node in (source, other)][::3]
    chunks = [wanted(record, node) for node, record in held]
    assert here.fetch(chunks).refusals == [NONE] * len(chunks)
    assert source.num_reads == other.num_reads == 2
    assert_right(here, chunks)


def begin(here: Node, source: Node, *chunks: Wanted) -> Future[Fetched]:
    """A fetch that reads from a source, whose answer waits for its gate."""
    source.faults.gate = source.faults.gate or threading.Event()
    num_reads = source.num_reads
    fetch = here.begin_fetch(chunks)
    wait_until(lambda: source.num_reads > num_reads, LONG_S, "the read begins")
    return fetch


# Sources that don't have it

GONE: dict[str, tuple[Callable[[Node, ChunkRecord], None], Refusal]] = {
    "evicted": (evicted, Refusal.NOT_HERE),
    "given up": (given_up, Refusal.NOT_HERE),
    "other namespace": (only_in_other_namespace, Refusal.NOT_HERE),
    "cleared": (cleared, Refusal.NOT_HERE),
    "other size": (of_other_size, Refusal.BAD_HANDLE),
    "being stored": (being_stored, Refusal.WRITING),
}
"""What is done to the source, and what it answers."""


@pytest.mark.parametrize("case", GONE)
def test_chunk_that_a_source_does_not_have_takes_no_slot_and_is_read_from_the_next_one(
    here: Node, source: Node, other: Node, case: str
) -> None:
    spoil, refusal = GONE[case]
    record = source.store(key(0))
    spoil(source, record)
    source.store(key(98), namespace=Namespace("more"))
    fetched = here.fetch([wanted(record, source)])
    assert fetched.refusals == [refusal]
    assert fetched.result.num_bytes == here.fetcher.counters["chunks_fetched"] == 0
    assert here.fetcher.counters["fetches_failed"] == 1
    assert_nothing_there(here)
    other.store(key(0))
    assert here.fetch([wanted(record, source, other)]).refusals == [NONE]
    assert_right(here, [record])


def test_one_chunk_that_is_gone_does_not_shift_its_neighbours(
    here: Node, source: Node, other: Node
) -> None:
    held = [source.store(key(i), (1 + i % 2) * PAGE) for i in range(5)]
    source.evict(held[1])
    source.evict(held[3])
    chunks = [wanted(record, source) for record in held]
    chunks[3] = wanted(other.store(key(3), 2 * PAGE), source, other)
    assert here.fetch(chunks).refusals == [NONE, Refusal.NOT_HERE, NONE, NONE, NONE]
    assert_right(here, [chunks[i] for i in (0, 2, 3, 4)])
    assert len(here.records()) == 4


def test_chunk_without_any_source_is_refused(here: Node) -> None:
    assert here.fetch([Wanted(key(0), ())]).refusals == [Refusal.NODE_LOST]
    assert_nothing_there(here)


# What may be here


def test_chunk_that_is_here_already_is_not_fetched_but_was_found(here: Node, source: Node) -> None:
    kept, record = here.store(key(0)), source.store(key(1))
    chunks = [wanted(kept, source), wanted(record, source)]
    hits = kept.hits
    fetched = here.fetch(chunks)
    assert fetched.refusals == [NONE, NONE]
    assert fetched.result.num_bytes == PAGE
    assert kept.hits == hits + 1
    assert [list(read.keys) for _, read in source.network.reads] == [[key(1)]]
    assert_right(here, chunks)


def test_chunk_that_an_engine_stores_meanwhile_counts_as_fetched(here: Node, source: Node) -> None:
    record = source.store(key(0))
    fetch = begin(here, source, wanted(record, source))
    own = here.store(key(0))
    source.network.open_gates()
    assert fetch.result(LONG_S).refusals == [NONE]
    assert here.find(record) is own


def test_chunk_that_an_engine_is_storing_is_left_to_it(here: Node, source: Node) -> None:
    own = here.begin_store(key(0))
    assert here.fetch([wanted(source.store(key(0)), source)]).refusals == [Refusal.WRITING]
    here.keeper.landed(own, ok=False)


def test_chunk_takes_a_slot_when_its_bytes_have_come(here: Node, source: Node) -> None:
    fetch = begin(here, source, wanted(source.store(key(0)), source))
    assert here.records() == []
    source.network.open_gates()
    assert fetch.result(LONG_S).refusals == [NONE]


def test_fetch_into_a_pool_in_which_nothing_may_go_has_no_room(network: Network) -> None:
    here, source = network.node("here", slab_bytes=PAGE), network.node("source")
    held = [here.store(key(100 + i)) for i in range(8)]
    record = source.store(key(0))
    assert here.fetch([wanted(record, source)]).refusals == [Refusal.NO_ROOM]
    assert_right(here, held)
    assert here.find(record) is None


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_chunk_that_was_cleared_here_does_not_come_back(
    here: Node, source: Node, when: str
) -> None:
    chunk = wanted(source.store(key(0)), source)
    if when == "before":
        here.order(2, floors={NAMESPACE: 2})
    fetch = begin(here, source, chunk)
    if when == "meanwhile":
        here.order(2, floors={NAMESPACE: 2})
    source.network.open_gates()
    assert fetch.result(LONG_S).refusals == [Refusal.CLEARED]
    assert_nothing_there(here)


def test_source_with_a_later_copy_is_read_when_that_of_the_first_was_cleared(
    here: Node, source: Node, other: Node
) -> None:
    here.order(2, floors={NAMESPACE: 2})
    chunk = wanted(source.store(key(0)), source, other)
    other.store(key(0), stamp=Stamp(HISTORY, 2))
    assert here.fetch([chunk]).refusals == [NONE]
    assert here.record(chunk).stamp == Stamp(HISTORY, 2)


def test_import_is_a_store_of_the_time_when_it_was_ordered(here: Node, source: Node) -> None:
    source.kind = SourceKind.IMPORT
    here.order(5, floors={NAMESPACE: 4})
    record = source.store(key(0), stamp=Stamp(0, 0))
    assert here.fetch([wanted(record, source)]).refusals == [NONE]
    assert here.record(record).stamp == Stamp(HISTORY, 5)
    # What is cleared while it comes is cleared.
    later = wanted(source.store(key(1), stamp=Stamp(0, 0)), source)
    fetch = begin(here, source, later)
    here.order(6, floors={NAMESPACE: 6})
    source.network.open_gates()
    assert fetch.result(LONG_S).refusals == [Refusal.CLEARED]


def test_late_answer_changes_nothing(here: Node, source: Node) -> None:
    source.faults.gate = threading.Event()
    chunk = wanted(source.store(key(0)), source)
    assert here.fetch([chunk], deadline_s=0.1).refusals == [Refusal.TOO_LATE]
    source.faults.gate.set()
    source.network.settle()
    assert_nothing_there(here)


def test_chunks_of_a_series_stay_until_others_of_it_have_come(here: Node, source: Node) -> None:
    held = [source.store(key(i)) for i in range(3)]
    for record in held[:2]:
        here.fetch([wanted(record, source)], series="import 1", life=0)
    here.fetch([wanted(held[2], source)])
    owner, now = here.keeper.owner, here.keeper.now()

    def standings() -> list[Standing]:
        return [each.standing for each in map(here.find, held) if each is not None]

    assert standings() == [Standing.KEPT, Standing.KEPT, Standing.NORMAL]
    with here.keeper.lock:
        owner.keep_series("import 1", NAMESPACE, [key(9)], now + SERIES_S * 0.7)
        owner.expire(now + SERIES_S * 1.5)
    assert standings() == [Standing.KEPT, Standing.KEPT, Standing.NORMAL]
    with here.keeper.lock:
        owner.expire(now + SERIES_S * 1.8)
    assert standings() == [Standing.NORMAL] * 3


# Fetches of the same chunk


def test_two_fetches_of_a_chunk_share_one_read(here: Node, source: Node) -> None:
    chunk, one_more = (wanted(source.store(key(number)), source) for number in (0, 50))
    first = begin(here, source, chunk)
    # Its read of the other one shows that both were claimed.
    second = begin(here, source, chunk, one_more)
    source.network.open_gates()
    assert first.result(LONG_S).refusals == [NONE]
    fetched = second.result(LONG_S)
    assert fetched.refusals == [NONE, NONE]
    assert fetched.result.num_bytes == PAGE
    assert [list(read.keys) for _, read in source.network.reads] == [[key(0)], [key(50)]]
    assert_right(here, [chunk])


def test_second_fetch_of_a_chunk_is_told_when_the_first_fails(here: Node, source: Node) -> None:
    record, one_more = source.store(key(0)), wanted(source.store(key(50)), source)
    source.evict(record)
    first = begin(here, source, wanted(record, source))
    second = begin(here, source, wanted(record, source), one_more)
    source.network.open_gates()
    assert first.result(LONG_S).refusals == [Refusal.NOT_HERE]
    assert second.result(LONG_S).refusals == [Refusal.NOT_HERE, NONE]
    source.store(key(0))
    assert here.fetch([wanted(record, source)]).refusals == [NONE]
    assert_right(here, [record])


def test_second_fetch_of_a_chunk_keeps_its_own_deadline(here: Node, source: Node) -> None:
    chunk = wanted(source.store(key(0)), source)
    first = begin(here, source, chunk)
    with within(0.2, 0.2):
        assert here.fetch([chunk], 0.2).refusals == [Refusal.TOO_LATE]
    source.network.open_gates()
    assert first.result(LONG_S).refusals == [NONE]
    assert_right(here, [chunk])


def test_chunk_that_is_twice_in_an_order_is_read_once(here: Node, source: Node) -> None:
    chunk = wanted(source.store(key(0)), source)
    fetched = here.fetch([chunk, chunk])
    assert fetched.refusals == [NONE, NONE]
    assert fetched.result.num_bytes == source.reader.bytes_sent == PAGE


def test_same_key_of_another_namespace_is_another_chunk(here: Node, source: Node) -> None:
    chunk = wanted(source.store(key(0)), source)
    first = begin(here, source, chunk)
    source.faults = Faults()
    foreign = wanted(source.store(key(0), namespace=Namespace("other")), source)
    assert here.fetch([foreign]).refusals == [NONE]
    source.network.open_gates()
    assert first.result(LONG_S).refusals == [NONE]
    assert_right(here, [chunk, foreign])


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_fetches_of_several_orders_at_once_give_right_bytes(
    here: Node, source: Node, other: Node
) -> None:
    chosen = random.Random(3)
    for node in (source, other):
        node.faults.delay_s = 0.002
    nodes = [source, other]
    held, _ = ([node.store(key(i)) for i in range(30)] for node in nodes)
    orders = [
        [wanted(record, *chosen.sample(nodes, 2)) for record in chosen.sample(held, 12)]
        for _ in range(40)
    ]
    fetches = [here.begin_fetch(chunks) for chunks in orders]
    for chunks, fetch in zip(orders, fetches, strict=True):
        assert fetch.result(LONG_S).refusals == [NONE] * 12
        assert_right(here, chunks)


def test_no_wrong_bytes_are_ready_whatever_the_source_overwrites_meanwhile(
    here: Node, source: Node
) -> None:
    chosen = random.Random(4)
    held = [source.store(key(i), 8 * PAGE) for i in range(8)]
    stopped = threading.Event()

    def overwrite() -> None:
        for number in itertools.count(8):
            if stopped.is_set():
                return
            source.evict(held[-8])
            held.append(source.store(key(number), 8 * PAGE))
            stopped.wait(0.0005)

    seen: list[Refusal] = []
    with ThreadPoolExecutor(1) as threads:
        overwriting = threads.submit(overwrite)
        for _ in range(150):
            chunks = [wanted(r, source) for r in chosen.sample(held[-16:], min(len(held), 6))]
            fetched = here.fetch(chunks)
            seen += fetched.refusals
            there = [c for c, why in zip(chunks, fetched.refusals, strict=True) if not why]
            assert_right(here, there)
            for record in here.records():
                here.evict(record)
        stopped.set()
        overwriting.result(LONG_S)
    assert seen.count(NONE) > 100
    assert seen.count(Refusal.NOT_HERE) > 100


# Orders that are wrong or empty


@pytest.mark.parametrize("slot_bytes", [0, -PAGE, 1 << 40])
def test_order_of_a_size_that_no_slot_has_is_refused_and_nobody_is_blamed(
    here: Node, source: Node, slot_bytes: int
) -> None:
    record = source.store(key(0))
    wrong = Wanted(key(1), (source.source,), slot_bytes)
    assert here.fetch([wrong, wanted(record, source)]).refusals == [Refusal.BAD_HANDLE, NONE]


def test_order_for_nothing_has_an_empty_result(here: Node) -> None:
    result = here.fetch([]).result
    assert (result.refusals, list(result.rows)) == (b"", [])
    assert result.num_bytes == 0


def test_without_any_time_nothing_is_asked_and_nothing_stays_behind(
    here: Node, source: Node
) -> None:
    with within(0.0, 0.0):
        fetched = here.fetch([wanted(source.store(key(0)), source)], 0.0)
    assert fetched.refusals == [Refusal.TOO_LATE]
    assert source.network.reads == []
    assert_nothing_there(here)


@pytest.mark.parametrize(
    ("kind", "shown"), [(SourceKind.POOL, ["node:gone"]), (SourceKind.IMPORT, [])]
)
def test_import_that_was_interrupted_is_not_shown_as_left_alone(
    network: Network, kind: SourceKind, shown: list[str]
) -> None:
    """Nobody asks it again: it would be shown for ever."""
    away, here = network.node("gone"), network.node("here")
    away.kind = kind
    chunk = wanted(away.store(key(1)), away)
    away.faults.is_unreachable = True
    assert here.fetch([chunk]).refusals == [Refusal.NODE_LOST]
    assert [row.peer for row in here.fetcher.breaker_report().rows] == shown
    # It is left alone all the same while it might be asked.
    away.faults.is_unreachable = False
    assert here.fetch([chunk]).refusals == [Refusal.BREAKER_OPEN]
