"""An engine's orders for its NodeActor: each ends once and in time, whatever the actor does."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

import raykv.engine.fetches
from raykv.base.errors import ClusterError
from raykv.base.ids import Key, Refusal
from raykv.cluster import names
from raykv.cluster.breaker import BreakerState, Pauses
from raykv.engine.fetches import (
    MAX_BYTES,
    MAX_CHUNKS,
    FetchClient,
    FetchEnded,
    RayActor,
    fetch_order,
    split,
)
from raykv.engine.remote import FetchOrder
from raykv.protocol.columns import Numbers, Source
from raykv.protocol.copies import CopyResult, Fetch
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from tests.fixtures.engine.scheduler import Actor, order
from tests.fixtures.waiting import wait_until

LONG_S = 10.0
DEADLINE_S = 0.3
NAMESPACE = "ns"
GRACE_S = 0.2
NO_PAUSES = Pauses(0.0, 0.0, 0.0)
"""The breaker refuses nothing."""


class Engine:
    """A client and what was delivered to its engine."""

    def __init__(self, actor: Actor) -> None:
        self.actor = actor
        self.num_found = 0
        self.find: Callable[[], Any] = lambda: actor
        self.ended: list[FetchEnded] = []
        self.connect()

    def connect(
        self,
        *,
        deadline_s: float = LONG_S,
        with_checksums: bool = True,
        pauses: Pauses = NO_PAUSES,
    ) -> None:
        """Begin with a new client, which is not started."""
        self.client = FetchClient(RayActor(self._find), deadline_s, with_checksums=with_checksums)
        self.client.breakers.pauses = pauses

    def _find(self) -> Any:
        self.num_found += 1
        return self.find()

    def start(self) -> None:
        self.client.start(self.ended.append)

    def submit(self, *orders: FetchOrder) -> None:
        self.client.submit(list(orders), 5, NAMESPACE)

    def wait_for_calls(self, num_calls: int) -> None:
        futures = self.actor.futures
        wait_until(lambda: len(futures) >= num_calls, LONG_S, "the NodeActor is called")

    def wait_for_ends(self, num_ends: int) -> list[CopyResult | None]:
        wait_until(lambda: len(self.ended) >= num_ends, LONG_S, "the orders end")
        return [ended.result for ended in self.ended]

    @property
    def keys(self) -> Counter[Key]:
        """How often the order of each key has ended."""
        return Counter(each.key for ended in self.ended for each in ended.orders)


def test_handle_of_an_earlier_connection_is_not_used() -> None:
    connections, actors = [1], [Actor()]

    @contextmanager
    def calling() -> Iterator[int]:
        if not connections:
            raise ClusterError("this engine is not connected to Ray")
        yield connections[-1]

    ended: list[FetchEnded] = []
    client = FetchClient(RayActor(lambda: actors[-1], calling), LONG_S, with_checksums=True)
    client.start(ended.append)
    try:
        client.submit([order(1)], 5, NAMESPACE)
        wait_until(lambda: len(actors[0].futures) == 1, LONG_S, "the first one is called")
        connections.append(2)
        actors.append(Actor())
        client.submit([order(2)], 5, NAMESPACE)
        wait_until(lambda: len(actors[1].futures) == 1, LONG_S, "the second one is called")
        assert len(actors[0].futures) == 1
        connections.clear()
        client.submit([order(3)], 5, NAMESPACE)
        wait_until(lambda: len(ended) == 1, LONG_S, "it fails where there is no connection")
        assert (ended[0].orders, ended[0].result) == ([order(3)], None)
    finally:
        client.stop()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """Nothing is delivered twice, and the thread ends."""
    monkeypatch.setattr("raykv.base.deadlines.FETCH_GRACE_S", GRACE_S)
    monkeypatch.setattr(raykv.engine.fetches, "FETCH_LOOK_S", 0.05)
    made = Engine(Actor())
    yield made
    made.client.stop()
    wait_until(lambda: not is_running(), LONG_S, "the client's thread ends")
    assert set(made.keys.values()) <= {1}


def is_running() -> bool:
    return any(thread.name.startswith("raykv-fetch") for thread in threading.enumerate())


def result_of(request: Fetch) -> CopyResult:
    return CopyResult(request.number, 7, 1, num_bytes=4096, seconds=0.5)


def answer(request: Fetch) -> bytes:
    return encode(result_of(request))


# Requests


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([], []),
        ([1], [1]),
        ([1] * MAX_CHUNKS, [MAX_CHUNKS]),
        ([1] * (2 * MAX_CHUNKS + 1), [MAX_CHUNKS, MAX_CHUNKS, 1]),
        ([MAX_BYTES], [1]),
        ([MAX_BYTES // 2] * 3, [2, 1]),
        ([MAX_BYTES - 1, 1, 1], [2, 1]),
        ([MAX_BYTES + 1] * 2, [1, 1]),
        ([1, MAX_BYTES + 1, 1], [1, 1, 1]),
    ],
)
def test_orders_are_split_by_number_and_by_bytes_and_stay_in_order(
    sizes: list[int], parts: list[int]
) -> None:
    orders = [order(i, num_bytes=size) for i, size in enumerate(sizes)]
    found = list(split(orders))
    assert [len(part) for part in found] == parts
    assert [each for part in found for each in part] == orders


def test_orders_of_different_tenants_are_split() -> None:
    orders = [order(0), order(1, tenant="a"), order(2, tenant="a"), order(3)]
    assert [[*part] for part in split(orders)] == [orders[:1], orders[1:3], orders[3:]]


def test_columns_of_a_request_say_all_that_the_orders_said() -> None:
    a, b, c = Source("a"), Source("b"), Source("c")
    orders = [
        order(0, a, b, num_bytes=4096, tenant="team"),
        order(1, num_bytes=8192, tenant="team"),
        order(2, b, num_bytes=4096, tenant="team"),
        order(3, a, c, tenant="team"),
    ]
    request = decode(encode(fetch_order(NAMESPACE, orders, 5, 2.5)), Fetch)
    found: dict[int, list[Source]] = {i: [] for i in range(len(request.keys))}
    for index, at in zip(request.key_index, request.source_index, strict=True):
        found[index].append(request.sources[at])
    columns = zip(request.keys, request.slot_bytes, strict=True)
    assert [
        FetchOrder(Key(name), size, tuple(found[i]), request.tenant)
        for i, (name, size) in enumerate(columns)
    ] == orders
    assert request.sources == [a, b, c]
    assert (request.version, request.namespace) == (PROTOCOL_VERSION, NAMESPACE)
    assert (request.life, request.deadline_s) == (5, 2.5)


def test_largest_request_stays_under_the_limit_of_inline_arguments() -> None:
    sources = [Source("a" * 56), Source("b" * 56)]
    orders = [order((1 << 28) + at, *sources, num_bytes=1 << 20) for at in range(MAX_CHUNKS)]
    assert len(encode(fetch_order(NAMESPACE, orders, 1 << 62, 10.0))) < 100 * 1024


@pytest.mark.parametrize("with_checksums", [True, False])
def test_request_carries_the_settings_of_the_client(with_checksums: bool, engine: Engine) -> None:
    engine.connect(deadline_s=7.5, with_checksums=with_checksums)
    engine.actor.reply = answer
    engine.start()
    engine.submit(order(0, Source("a")))
    engine.wait_for_ends(1)
    expected = fetch_order(NAMESPACE, [order(0, Source("a"))], 5, 7.5)
    assert engine.actor.requests == [
        msgspec.structs.replace(expected, number=1, with_checksums=with_checksums)
    ]


# Orders that end well


def test_orders_end_with_the_result_of_their_request(engine: Engine) -> None:
    engine.start()
    parts = [[order(i) for i in range(3)], [order(3)]]
    for part in parts:
        engine.submit(*part)
    engine.wait_for_calls(2)
    assert engine.ended == []
    requests, futures = engine.actor.requests, engine.actor.futures
    for number in (1, 0):
        futures[number].set_result(answer(requests[number]))
    engine.wait_for_ends(2)
    for part, request in zip(parts, requests, strict=True):
        assert FetchEnded(part, result_of(request)) in engine.ended
    assert engine.num_found == 1


def test_many_orders_end_in_parts_of_their_own(engine: Engine) -> None:
    engine.actor.reply = answer
    engine.start()
    orders = [order(i) for i in range(MAX_CHUNKS + 10)]
    engine.submit(*orders)
    engine.wait_for_ends(2)
    assert [len(request.keys) for request in engine.actor.requests] == [MAX_CHUNKS, 10]
    assert [each for ended in engine.ended for each in ended.orders] == orders


def test_no_orders_make_no_call(engine: Engine) -> None:
    engine.actor.reply = answer
    engine.start()
    engine.submit()
    engine.submit(order(0))
    engine.wait_for_ends(1)
    assert len(engine.actor.requests) == 1


# Orders that nobody knows the end of


def find_raises(engine: Engine) -> None:
    def find() -> Any:
        raise ConnectionError("no cluster")

    engine.find = find


def find_has_none(engine: Engine) -> None:
    engine.find = lambda: None


def call_raises(engine: Engine) -> None:
    engine.actor.error = ConnectionError("no actor")


def answer_is_not_decodable(engine: Engine) -> None:
    engine.actor.reply = lambda _: b"\xc1"


def answer_is_of_another_kind(engine: Engine) -> None:
    engine.actor.reply = encode


FAILURES = [
    find_raises,
    find_has_none,
    call_raises,
    answer_is_not_decodable,
    answer_is_of_another_kind,
]


@pytest.mark.parametrize("fail", FAILURES)
def test_orders_end_without_a_result_and_the_next_ones_work(
    engine: Engine, fail: Callable[[Engine], None]
) -> None:
    engine.start()
    fail(engine)
    engine.submit(order(0), order(1))
    assert engine.wait_for_ends(1) == [None]
    assert engine.ended[0].orders == [order(0), order(1)]
    engine.actor.error, engine.find, engine.actor.reply = None, lambda: engine.actor, answer
    engine.submit(order(2))
    assert engine.wait_for_ends(2)[1] is not None
    assert engine.num_found == 2


def test_orders_end_without_a_result_when_the_actor_dies(engine: Engine) -> None:
    engine.start()
    engine.submit(order(0))
    engine.submit(order(1))
    engine.wait_for_calls(2)
    engine.actor.futures[0].set_exception(ConnectionError("the actor died"))
    engine.actor.futures[1].cancel()
    assert engine.wait_for_ends(2) == [None, None]
    engine.submit(order(2))
    engine.wait_for_calls(3)
    assert engine.num_found == 2


def test_orders_without_an_answer_end_at_deadline_and_grace_and_not_again(engine: Engine) -> None:
    engine.connect(deadline_s=DEADLINE_S)
    engine.start()
    started = time.monotonic()
    engine.submit(order(0))
    engine.submit(order(1))
    assert engine.wait_for_ends(2) == [None, None]
    assert DEADLINE_S + GRACE_S <= time.monotonic() - started < LONG_S / 2
    engine.actor.futures[0].set_result(answer(engine.actor.requests[0]))
    engine.actor.futures[1].set_exception(ConnectionError("the actor died"))
    assert len(engine.ended) == 2


def test_late_answer_of_one_request_does_not_end_another(engine: Engine) -> None:
    engine.connect(deadline_s=DEADLINE_S)
    engine.start()
    engine.submit(order(0))
    engine.wait_for_ends(1)
    engine.submit(order(1))
    engine.wait_for_calls(2)
    engine.actor.futures[0].set_result(answer(engine.actor.requests[0]))
    assert engine.ended == [FetchEnded([order(0)], None)]
    engine.actor.futures[1].set_result(answer(engine.actor.requests[1]))
    engine.wait_for_ends(2)
    assert engine.ended[1] == FetchEnded([order(1)], result_of(engine.actor.requests[1]))


def test_orders_that_find_the_queue_full_end_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.engine.fetches, "MAX_QUEUED", 2)
    engine.connect()
    engine.actor.reply = answer
    is_found = threading.Event()
    engine.find = lambda: is_found.wait(LONG_S) and engine.actor
    engine.start()
    engine.submit(order(0))
    wait_until(engine.client._queue.empty, LONG_S, "the first order is begun")
    for number in range(1, 5):
        engine.submit(order(number))
    assert engine.ended == [FetchEnded([order(3)], None), FetchEnded([order(4)], None)]
    is_found.set()
    engine.wait_for_ends(5)
    assert [ended.orders for ended in engine.ended[2:]] == [[order(i)] for i in range(3)]
    assert all(ended.result is not None for ended in engine.ended[2:])


def test_orders_end_in_time_when_finding_the_actor_takes_long(engine: Engine) -> None:
    is_found = threading.Event()
    engine.find = lambda: is_found.wait(LONG_S) and engine.actor
    engine.connect(deadline_s=DEADLINE_S)
    engine.start()
    try:
        engine.submit(order(0))
        engine.submit(order(1))
        wait_until(lambda: len(engine.ended) == 2, 4 * (DEADLINE_S + GRACE_S), "both end")
    finally:
        is_found.set()


def test_stop_ends_the_thread_and_what_is_under_way_ends_at_most_once(engine: Engine) -> None:
    engine.start()
    engine.submit(order(0))
    engine.wait_for_calls(1)
    engine.client.stop()
    wait_until(lambda: not is_running(), LONG_S, "the client's thread ends")
    engine.submit(order(1))
    engine.actor.futures[0].set_result(answer(engine.actor.requests[0]))
    assert engine.ended == [FetchEnded([order(0)], result_of(engine.actor.requests[0]))]
    assert len(engine.actor.requests) == 1


# The breaker


def breaker_of(engine: Engine) -> BreakerState:
    return engine.client.breakers.state_of(names.OWN_NODE_FETCHES)


def test_orders_end_at_once_while_the_breaker_is_open(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.connect(pauses=Pauses(LONG_S, LONG_S))
    engine.actor.error = ConnectionError("no actor")
    engine.start()
    engine.submit(order(0))
    assert engine.wait_for_ends(1) == [None]
    engine.actor.error, engine.actor.reply = None, answer
    for number in range(1, 4):
        engine.submit(order(number), order(10 + number))
        refused = engine.ended[-1].result
        assert refused is not None
        assert refused.failed_chunks == Numbers.of([0, 1])
        assert refused.refusals == bytes([Refusal.BREAKER_OPEN]) * 2
        assert engine.ended[-1].orders == [order(number), order(10 + number)]
    assert len(engine.actor.requests) == 1
    report = engine.client.breaker_report(time.monotonic())
    assert (report.peers, report.reasons) == ([names.OWN_NODE_FETCHES], ["ConnectionError"])
    assert (report.opened, report.failed, report.refused) == (1, 1, 3)
    assert caplog.text.count("the NodeActor does not fetch") == 1


def test_one_order_tries_whether_the_node_is_back(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.connect(pauses=Pauses(0.05, 0.05))
    engine.actor.error = ConnectionError("no actor")
    engine.start()
    engine.submit(order(0))
    engine.wait_for_ends(1)
    engine.actor.error = None

    def is_asked() -> bool:
        engine.submit(order(1))
        return len(engine.actor.futures) > 0

    wait_until(is_asked, LONG_S, "the trial")
    assert breaker_of(engine) is BreakerState.HALF_OPEN
    engine.submit(order(2))
    refused = engine.ended[-1].result
    assert refused is not None
    assert refused.refusals == bytes([Refusal.BREAKER_OPEN])
    engine.actor.futures[0].set_result(answer(engine.actor.requests[-1]))
    assert breaker_of(engine) is BreakerState.CLOSED
    assert len(engine.actor.futures) == 1
    assert caplog.text.count("the NodeActor fetches again") == 1
    engine.client.stop()
    engine.ended.clear()


def test_silence_of_the_node_opens_the_breaker(engine: Engine) -> None:
    engine.connect(deadline_s=DEADLINE_S, pauses=Pauses(LONG_S, LONG_S))
    engine.start()
    engine.submit(order(0))
    assert engine.wait_for_ends(1) == [None]
    assert breaker_of(engine) is BreakerState.OPEN
    # A late answer says that it lives.
    engine.actor.futures[0].set_result(answer(engine.actor.requests[0]))
    assert breaker_of(engine) is BreakerState.CLOSED


class MoodyActor(Actor):
    """Some answers and errors come soon, some late, some while the client gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = random.Random(5)
        self.timers: list[threading.Timer] = []

    def future(self) -> Future[bytes]:
        future = super().future()
        delay_s = self.chosen.uniform(0.0, 2 * (DEADLINE_S + GRACE_S))
        self.timers.append(threading.Timer(delay_s, self._end, [future, self.requests[-1]]))
        self.timers[-1].start()
        return future

    def _end(self, future: Future[bytes], request: Fetch) -> None:
        if self.chosen.random() < 0.7:
            future.set_result(answer(request))
        else:
            future.set_exception(ConnectionError("the actor died"))


def test_each_order_ends_exactly_once_whatever_happens(engine: Engine) -> None:
    engine.actor = actor = MoodyActor()

    def find() -> Any:
        """Called anew after each failure."""
        if actor.chosen.random() < 0.2:
            raise ConnectionError("no cluster")
        return actor

    engine.find = find
    engine.connect(deadline_s=DEADLINE_S)
    engine.start()
    lots = [[order(number * 4 + i) for i in range(4)] for number in range(150)]
    for orders in lots:
        engine.submit(*orders)
    engine.wait_for_ends(len(lots))
    for timer in actor.timers:
        timer.join()
    assert engine.keys == Counter(each.key for orders in lots for each in orders)
    assert sum(ended.result is None for ended in engine.ended) > 30
