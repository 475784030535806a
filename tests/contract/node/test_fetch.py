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
from dataclasses import replace

import msgspec
import pytest

import raykv.node.fetch
from raykv.base.ids import ChunkName, Epoch, Generation, Namespace, Refusal, Slot
from raykv.engine.remote import FetchOrder
from raykv.node.fetch import MOST_PIECE_BYTES, PIECE_BYTES, WINDOW, piece_bytes
from raykv.node.slots import SlotState
from raykv.protocol.columns import (
    Handle,
    Handles,
    Keys,
    LostReplicas,
    Numbers,
    Replica,
    Replicas,
    Source,
    SourceKind,
)
from raykv.protocol.peer import FetchResult
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.node.peers import (
    LONG_S,
    NAMESPACE,
    PAGE,
    Faults,
    Network,
    Node,
    assert_nothing_there,
    assert_right,
    being_stored,
    cleared,
    content,
    landed,
    of_other_namespace,
    overwritten,
    refusals,
    within,
)
from tests.fixtures.waiting import wait_until

NONE = Refusal.NONE


@pytest.fixture
def one_chunk_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raykv.node.fetch, "PIECE_BYTES", PAGE)
    monkeypatch.setattr(raykv.node.fetch, "MOST_PIECE_BYTES", PAGE)


def state(node: Node, order: FetchOrder) -> SlotState:
    return node.keeper.table.state_of(order.handle.slot)


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
    held = [(source, source.store(key(i), pages * PAGE)) for i, pages in enumerate(SIZES[case])]
    orders = here.orders(*held)
    result = here.fetch(orders)
    num_bytes = sum(order.num_bytes for order in orders)
    assert refusals(result) == [NONE] * len(orders)
    assert result.slots == [order.handle.slot for order in orders]
    assert result.generations == [order.handle.generation for order in orders]
    assert result.node_epoch == here.epoch
    assert result.lost == LostReplicas()
    assert result.num_bytes == here.fetcher.counters.bytes_fetched == num_bytes
    assert source.reader.bytes_sent == num_bytes
    assert here.fetcher.counters.chunks_fetched == len(orders)
    assert_right(here, orders)
    assert here.ready() == {landed(order) for order in orders}
    for _, read in network.reads:
        assert sum(read.slot_bytes) <= piece_bytes(num_bytes) or len(read.handles) == 1


def test_chunks_that_fit_into_one_piece_are_read_with_one_call(
    network: Network, here: Node, source: Node
) -> None:
    orders = here.orders(*((source, source.store(key(i))) for i in range(50)))
    assert refusals(here.fetch(orders)) == [NONE] * 50
    assert network.num_reads(source) == 1


def test_what_has_landed_is_reported_and_somebody_is_told(here: Node, source: Node) -> None:
    orders = here.orders(*((source, source.store(key(i), 2 * PAGE)) for i in range(3)))
    here.fetch(orders)
    assert here.num_told > 0
    report = here.keeper.take_unreported(100)
    assert report.keys == [order.key for order in orders]
    assert report.slots == [order.handle.slot for order in orders]
    assert report.generations == [order.handle.generation for order in orders]
    assert report.slot_bytes == [2 * PAGE] * 3
    assert report.namespaces == [NAMESPACE]


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
def test_as_many_pieces_are_under_way_as_the_window_allows(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    orders = here.orders(*((source, source.store(key(i))) for i in range(12)))
    fetch = here.begin_fetch(orders)
    wait_until(lambda: network.num_reads(source) == WINDOW, LONG_S, "a full window")
    source.faults.gate.set()
    assert refusals(fetch.result(LONG_S)) == [NONE] * 12
    assert network.most_under_way == WINDOW
    assert network.num_reads(source) == 12
    assert_right(here, orders)


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_answers_that_overtake_each_other_land_in_their_own_slots(
    network: Network, here: Node, source: Node, other: Node
) -> None:
    source.faults.delay_s = 0.05
    held = [(node, node.store(key(i))) for i in range(6) for node in (source, other)][::3]
    orders = here.orders(*held)
    assert refusals(here.fetch(orders)) == [NONE] * len(orders)
    assert network.num_reads(source) == network.num_reads(other) == 2
    assert_right(here, orders)


# Sources that don't have it

GONE: dict[str, tuple[Callable[[Node, ChunkName], ChunkName], Refusal, bool]] = {
    "overwritten": (overwritten, Refusal.STALE, True),
    "other key": (lambda _, name: name._replace(slot=Slot(name.slot + 1)), Refusal.STALE, True),
    "other namespace": (of_other_namespace, Refusal.STALE, True),
    "cleared": (cleared, Refusal.STALE, True),
    "other epoch": (lambda _, name: name, Refusal.BAD_HANDLE, False),
    "being stored": (being_stored, Refusal.WRITING, False),
}
"""What is done to the source, what it answers, and whether the replica counts as lost."""


def gone(source: Node, case: str) -> Replica:
    """A replica that the source does not have, or not as it is named; there are others."""
    name = source.store(key(0))
    source.store(key(98))
    replica = source.replica(GONE[case][0](source, name))
    if case == "other epoch":
        return msgspec.structs.replace(replica, node_epoch=Epoch(6))
    return replica


@pytest.mark.parametrize("case", GONE)
def test_chunk_that_no_source_has_is_refused_and_its_slot_is_free_again(
    here: Node, source: Node, case: str
) -> None:
    _, refusal, is_lost = GONE[case]
    replica = gone(source, case)
    order = here.order(key(0), replica)
    result = here.fetch([order])
    assert refusals(result) == [refusal]
    lost = LostReplicas([Source("source")], Keys.of([key(0)]), [replica.handle.generation])
    assert result.lost == (lost if is_lost else LostReplicas())
    assert result.num_bytes == here.fetcher.counters.chunks_fetched == 0
    assert here.fetcher.counters.fetches_failed == 1
    assert len(here.keeper.take_unreported(10)) == 0
    assert_nothing_there(here, order)


@pytest.mark.parametrize("case", GONE)
def test_next_replica_is_read_when_the_first_does_not_have_the_chunk(
    here: Node, source: Node, other: Node, case: str
) -> None:
    spare = other.replica(other.store(key(0)))
    order = here.order(key(0), gone(source, case), spare)
    result = here.fetch([order])
    assert refusals(result) == [NONE]
    assert result.lost.sources == ([Source("source")] if GONE[case][2] else [])
    assert_right(here, [order])


def test_one_chunk_that_is_gone_does_not_shift_its_neighbours(
    here: Node, source: Node, other: Node
) -> None:
    names = [source.store(key(i), (1 + i % 2) * PAGE) for i in range(5)]
    overwritten(source, names[1])
    overwritten(source, names[3])
    orders = here.orders(*((source, name) for name in names))
    spare = other.replica(other.store(key(3), 2 * PAGE))
    orders[3] = replace(orders[3], replicas=(*orders[3].replicas, spare))
    result = here.fetch(orders)
    assert refusals(result) == [NONE, Refusal.STALE, NONE, NONE, NONE]
    assert result.lost.keys == [key(1), key(3)]
    assert_right(here, [orders[i] for i in (0, 2, 3, 4)])
    assert state(here, orders[1]) is SlotState.EMPTY


def test_chunk_without_any_replica_is_refused(here: Node) -> None:
    order = here.order(key(0))
    assert refusals(here.fetch([order])) == [Refusal.NODE_LOST]
    assert_nothing_there(here, order)


# The destination's slots


def test_lease_that_is_older_than_what_its_slot_holds_is_refused(
    network: Network, here: Node, source: Node
) -> None:
    old = here.lease()
    kept = here.store(key(1), at=here.lease(slot=old.slot))
    name = source.store(key(0))
    orders = [here.order(key(0), source.replica(name), at=old), *here.orders((source, name))]
    orders[1] = replace(orders[1], key=key(2), replicas=(source.replica(source.store(key(2))),))
    assert refusals(here.fetch(orders)) == [Refusal.STALE, NONE]
    assert here.load(kept) == content(kept)
    assert_right(here, orders[1:])
    assert [read.handles.keys for _, read in network.reads] == [[key(2)]]


def test_place_where_no_slot_can_be_is_refused(here: Node, source: Node) -> None:
    replica = source.replica(source.store(key(0)))
    behind = Handle(here.geometry.slots_of(8, PAGE)[0], Generation(1))
    assert refusals(here.fetch([here.order(key(0), replica, at=behind)])) == [Refusal.BAD_HANDLE]


def test_fetch_waits_for_the_reader_of_its_slot(here: Node, source: Node) -> None:
    old = here.store(key(1))
    assert here.keeper.begin_load(old) is NONE
    replica = source.replica(source.store(key(0)))
    order = here.order(key(0), replica, at=here.lease(slot=old.slot))
    fetch = here.begin_fetch([order])
    with pytest.raises(TimeoutError):
        fetch.result(0.1)
    assert here.load(old) == content(old)
    here.keeper.end_load(old)
    assert refusals(fetch.result(LONG_S)) == [NONE]
    assert_right(here, [order])


def test_fetch_gives_up_a_slot_whose_reader_stays(
    here: Node, source: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.fetch, "FETCH_SLOT_WAIT_S", 0.2)
    old = here.store(key(1))
    assert here.keeper.begin_load(old) is NONE
    replica = source.replica(source.store(key(0)))
    order = here.order(key(0), replica, at=here.lease(slot=old.slot))
    with within(0.2, 0.2):
        assert refusals(here.fetch([order])) == [Refusal.WRITING]
    assert here.load(old) == content(old)
    here.keeper.end_load(old)


def test_chunk_is_not_loaded_while_it_is_fetched(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    order = here.order_of((source, source.store(key(0))))
    fetch = here.begin_fetch([order])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the read begins")
    assert here.load(landed(order)) is Refusal.WRITING
    source.faults.gate.set()
    assert refusals(fetch.result(LONG_S)) == [NONE]
    assert_right(here, [order])


def test_chunk_of_a_namespace_that_is_cleared_meanwhile_is_not_ready(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    order = here.order_of((source, source.store(key(0))))
    fetch = here.begin_fetch([order])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the read begins")
    here.keeper.clear({NAMESPACE: order.handle.generation})
    source.faults.gate.set()
    assert refusals(fetch.result(LONG_S)) == [Refusal.CLEARED]
    assert len(here.keeper.take_unreported(10)) == 0
    assert_nothing_there(here, order)


def test_late_answer_does_not_touch_what_was_stored_since(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    order = here.order_of((source, source.store(key(0))))
    assert refusals(here.fetch([order], deadline_s=0.1)) == [Refusal.TOO_LATE]
    later = here.store(key(1), at=here.lease(slot=order.handle.slot))
    source.faults.gate.set()
    network.settle()
    assert here.load(later) == content(later)
    assert here.ready() == {later}


def test_store_of_an_engine_waits_for_the_fetch_that_has_its_slot(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    order = here.order_of((source, source.store(key(0))))
    fetch = here.begin_fetch([order])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the read begins")
    lease = here.lease(slot=order.handle.slot)
    later = ChunkName(NAMESPACE, key(1), lease.slot, lease.generation, PAGE)
    assert here.keeper.begin_store(later, 0, 1, 0.0, LONG_S) is Refusal.WRITING
    source.faults.gate.set()
    fetch.result(LONG_S)
    assert here.load(here.store(key(1), at=lease)) == content(later)


# Fetches of the same chunk


def begin_second(
    network: Network, here: Node, source: Node
) -> tuple[FetchOrder, Future[FetchResult]]:
    """Begin a fetch of key 0, which another one is reading, and of one more chunk.

    The read of the latter shows that both were claimed.
    """
    orders = here.orders((source, source.store(key(0))), (source, source.store(key(50))))
    num_reads = network.num_reads(source)
    fetch = here.begin_fetch(orders)
    wait_until(lambda: network.num_reads(source) > num_reads, LONG_S, "the second fetch begins")
    return orders[0], fetch


def test_two_fetches_of_a_chunk_share_one_read(network: Network, here: Node, source: Node) -> None:
    source.faults.gate = threading.Event()
    order = here.order_of((source, source.store(key(0))))
    first = here.begin_fetch([order])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the first fetch begins")
    unused, second = begin_second(network, here, source)
    source.faults.gate.set()
    assert refusals(first.result(LONG_S)) == [NONE]
    result = second.result(LONG_S)
    assert refusals(result) == [NONE, NONE]
    assert result.slots[0] == order.handle.slot
    assert result.generations[0] == order.handle.generation
    assert result.num_bytes == PAGE
    assert [read.handles.keys for _, read in network.reads] == [[key(0)], [key(50)]]
    assert state(here, unused) is SlotState.EMPTY
    assert_right(here, [order])


def test_second_fetch_of_a_chunk_is_told_when_the_first_fails(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    first = here.begin_fetch([here.order_of((source, overwritten(source, source.store(key(0)))))])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the first fetch begins")
    unused, second = begin_second(network, here, source)
    source.faults.gate.set()
    assert refusals(first.result(LONG_S)) == [Refusal.STALE]
    assert refusals(second.result(LONG_S)) == [Refusal.STALE, NONE]
    assert state(here, unused) is SlotState.EMPTY
    assert refusals(here.fetch([unused])) == [NONE]
    assert_right(here, [unused])


def test_second_fetch_of_a_chunk_keeps_its_own_deadline(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    name = source.store(key(0))
    order = here.order_of((source, name))
    first = here.begin_fetch([order])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the first fetch begins")
    with within(0.2, 0.2):
        assert refusals(here.fetch(here.orders((source, name)), 0.2)) == [Refusal.TOO_LATE]
    source.faults.gate.set()
    assert refusals(first.result(LONG_S)) == [NONE]
    assert_right(here, [order])


def test_second_fetch_does_not_wait_for_what_the_first_could_not_begin(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    replica = source.replica(source.store(key(0)))
    old = here.lease()
    here.store(key(1), at=here.lease(slot=old.slot))
    more = here.order_of((source, source.store(key(2))))
    first = here.begin_fetch([here.order(key(0), replica, at=old), more])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the first fetch begins")
    source.faults = Faults()
    assert refusals(here.fetch([here.order(key(0), replica)], 0.5)) != [Refusal.TOO_LATE]
    network.open_gates()
    assert refusals(first.result(LONG_S)) == [Refusal.STALE, NONE]


def test_chunk_is_read_anew_when_the_first_fetch_of_it_is_over(
    network: Network, here: Node, source: Node
) -> None:
    name = source.store(key(0))
    orders = here.orders((source, name), (source, name))
    for order in orders:
        result = here.fetch([order])
        assert refusals(result) == [NONE]
        assert result.slots == [order.handle.slot]
    assert network.num_reads(source) == 2
    assert_right(here, orders)


def test_chunk_that_is_twice_in_a_request_is_read_once(
    network: Network, here: Node, source: Node
) -> None:
    name = source.store(key(0))
    orders = here.orders((source, name), (source, name))
    result = here.fetch(orders)
    assert refusals(result) == [NONE, NONE]
    assert result.slots == [orders[0].handle.slot] * 2
    assert result.num_bytes == source.reader.bytes_sent == PAGE


def test_same_key_of_another_namespace_is_another_chunk(
    network: Network, here: Node, source: Node
) -> None:
    source.faults.gate = threading.Event()
    order = here.order_of((source, source.store(key(0))))
    first = here.begin_fetch([order])
    wait_until(lambda: network.num_reads(source) == 1, LONG_S, "the first fetch begins")
    source.faults = Faults()
    foreign = source.store(key(0), namespace=Namespace("other"))
    orders = here.orders((source, foreign))
    request = msgspec.structs.replace(here.request(orders), namespace="other")
    assert refusals(here.fetcher.fetch(request)) == [NONE]
    assert here.load(landed(orders[0])._replace(namespace=foreign.namespace)) == content(foreign)
    network.open_gates()
    assert refusals(first.result(LONG_S)) == [NONE]
    assert_right(here, [order])


@pytest.mark.usefixtures("one_chunk_a_piece")
def test_fetches_of_several_requests_at_once_give_right_bytes(
    here: Node, source: Node, other: Node
) -> None:
    chosen = random.Random(3)
    held = [[(node, node.store(key(i))) for node in (source, other)] for i in range(30)]
    for node in (source, other):
        node.faults.delay_s = 0.002
    requests = [
        [here.order_of(*chosen.sample(each, 2)) for each in chosen.sample(held, 12)]
        for _ in range(40)
    ]
    fetches = [here.begin_fetch(orders) for orders in requests]
    for orders, fetch in zip(requests, fetches, strict=True):
        result = fetch.result(LONG_S)
        assert refusals(result) == [NONE] * 12
        places = zip(orders, result.slots, result.generations, strict=True)
        for order, slot, generation in places:
            place = Handle(Slot(slot), Generation(generation))
            name = landed(replace(order, handle=place))
            assert here.load(name) == content(name)


def test_no_wrong_bytes_are_ready_whatever_the_source_overwrites_meanwhile(
    here: Node, source: Node
) -> None:
    chosen = random.Random(4)
    slots = [source.lease(8 * PAGE).slot for _ in range(8)]
    held = [source.store(key(i), 8 * PAGE, at=source.lease(slot=s)) for i, s in enumerate(slots)]
    stopped = threading.Event()

    def overwrite() -> None:
        for number in itertools.count(8):
            if stopped.is_set():
                return
            at = source.lease(slot=slots[number * 5 % 8])
            held.append(source.store(key(number), 8 * PAGE, at=at, wait_s=LONG_S))
            stopped.wait(0.0005)

    seen: list[Refusal] = []
    targets = [here.lease(8 * PAGE).slot for _ in range(6)]
    with ThreadPoolExecutor(1) as threads:
        overwriting = threads.submit(overwrite)
        for _ in range(150):
            names = chosen.sample(held[-16:], min(len(held), 6))
            orders = [
                here.order(
                    name.key, source.replica(name), num_bytes=8 * PAGE, at=here.lease(slot=slot)
                )
                for name, slot in zip(names, targets, strict=True)
            ]
            result = here.fetch(orders)
            seen += refusals(result)
            there = [o for o, refusal in zip(orders, refusals(result), strict=True) if not refusal]
            assert_right(here, there)
            assert here.ready() == {landed(order) for order in there}
        stopped.set()
        overwriting.result(LONG_S)
    assert seen.count(NONE) > 100
    assert seen.count(Refusal.STALE) > 100


# Requests that are wrong or empty


def test_request_for_another_life_of_the_node_is_refused_whole(
    network: Network, here: Node, source: Node
) -> None:
    orders = here.orders(*((source, source.store(key(i))) for i in range(2)))
    right = here.request(orders)
    for wrong in (
        msgspec.structs.replace(right, version=right.version + 1),
        msgspec.structs.replace(right, node_epoch=here.epoch - 1),
        msgspec.structs.replace(right, node_epoch=here.epoch + 1),
    ):
        result = here.fetcher.fetch(wrong)
        assert refusals(result) == [Refusal.BAD_HANDLE] * 2
        assert result.node_epoch == here.epoch
    assert network.reads == []
    assert refusals(here.fetch(orders)) == [NONE] * 2


def test_request_for_nothing_has_an_empty_result(here: Node) -> None:
    result = here.fetch([])
    assert (result.refusals, result.slots, result.generations) == ([], [], [])
    assert result.num_bytes == here.num_told == 0


@pytest.mark.parametrize("deadline_s", [0.0, -1.0])
def test_without_any_time_nothing_is_asked_and_nothing_stays_behind(
    network: Network, here: Node, source: Node, deadline_s: float
) -> None:
    order = here.order_of((source, source.store(key(0))))
    with within(0.0, 0.0):
        assert refusals(here.fetch([order], deadline_s)) == [Refusal.TOO_LATE]
    assert network.reads == []
    assert_nothing_there(here, order)


@pytest.mark.parametrize(
    "columns",
    [
        {"slot_bytes": []},
        {"handles": Handles(Keys.of([key(0)]))},
        {"sources": Replicas([], [], Numbers.of([0]), Numbers.of([0]))},
    ],
    ids=["sizes", "handles", "sources"],
)
def test_malformed_request_is_refused_and_does_not_raise(
    here: Node, source: Node, columns: dict[str, object]
) -> None:
    orders = here.orders((source, source.store(key(0))))
    request = msgspec.structs.replace(here.request(orders), **columns)
    assert refusals(here.fetcher.fetch(request)) == [Refusal.BAD_HANDLE]


def test_repeated_request_gets_the_same_answer(here: Node, source: Node) -> None:
    """All messages are idempotent."""
    orders = here.orders((source, source.store(key(0))))
    first = here.fetch(orders)
    again = here.fetch(orders)
    assert refusals(first) == refusals(again) == [NONE]
    assert (again.slots, again.generations) == (first.slots, first.generations)


@pytest.mark.parametrize(
    ("kind", "shown"), [(SourceKind.POOL, ["node:gone"]), (SourceKind.IMPORT, [])]
)
def test_import_that_was_interrupted_is_not_shown_as_left_alone(
    network: Network, kind: SourceKind, shown: list[str]
) -> None:
    """Nobody asks it again: it would be shown for ever."""
    away, here = network.node("gone"), network.node("here")
    away.kind = kind
    order = here.order_of((away, away.store(key(1))))
    away.faults.is_unreachable = True
    assert refusals(here.fetch([order])) == [Refusal.NODE_LOST]
    assert here.fetcher.breaker_report().peers == shown
    # It is left alone all the same while it might be asked.
    away.faults.is_unreachable = False
    again = here.order(key(1), away.replica(away.store(key(1))))
    assert refusals(here.fetch([again])) == [Refusal.BREAKER_OPEN]
