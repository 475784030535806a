"""An engine's orders for its NodeActor: each ends once and in time, whatever the line does."""

from __future__ import annotations

import random
import threading
from collections import Counter
from functools import partial

import pytest

from raykv.base.deadlines import GRACE_S
from raykv.base.ids import Key
from raykv.base.settings import Settings
from raykv.engine.fetches import MAX_BYTES, MAX_CHUNKS, Fetches, split
from raykv.engine.remote import FetchOrder
from raykv.protocol.columns import Source
from raykv.protocol.copies import CopyResult, Fetch
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from tests.fixtures.engine.scheduler import order

DEADLINE_S = 2.5
NAMESPACE = "ns"


class Engine:
    """Orders, and how they have ended."""

    def __init__(self) -> None:
        self.ended: list[tuple[list[FetchOrder], CopyResult | None]] = []
        settings = Settings(request_deadline_s=DEADLINE_S)
        self.fetches = Fetches(settings)

    def submit(self, *orders: FetchOrder, now: float = 0.0) -> None:
        for part in split(list(orders)):
            ended = partial(self._end, part)
            self.fetches.submit(part, 5, NAMESPACE, now, ended)

    def _end(self, part: list[FetchOrder], result: CopyResult | None) -> None:
        self.ended.append((part, result))

    def sent(self) -> list[Fetch]:
        """What goes over the line now."""
        found: list[Fetch] = []
        while (request := self.fetches.take()) is not None:
            found.append(decode(encode(request), Fetch))
        return found

    @property
    def keys(self) -> Counter[Key]:
        """How often the order of each key has ended."""
        return Counter(each.key for orders, _ in self.ended for each in orders)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def result_of(request: Fetch) -> CopyResult:
    return CopyResult(request.number, 7, 1, num_bytes=4096, seconds=0.5)


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


def test_columns_of_a_request_say_all_that_the_orders_said(engine: Engine) -> None:
    a, b, c = Source("a"), Source("b"), Source("c")
    orders = [
        order(0, a, b, num_bytes=4096, tenant="team"),
        order(1, num_bytes=8192, tenant="team"),
        order(2, b, num_bytes=4096, tenant="team"),
        order(3, a, c, tenant="team"),
    ]
    engine.submit(*orders)
    (request,) = engine.sent()
    found = request.sources.by_key(len(request.keys))
    columns = zip(request.keys, request.slot_bytes, strict=True)
    assert [
        FetchOrder(Key(name), size, (tuple(found.get(i, ())),), request.tenant)
        for i, (name, size) in enumerate(columns)
    ] == orders
    assert request.sources.sources == [a, b, c]
    assert (request.version, request.namespace) == (PROTOCOL_VERSION, NAMESPACE)
    assert (request.life, request.deadline_s) == (5, DEADLINE_S)


def test_largest_request_is_a_small_message(engine: Engine) -> None:
    sources = [Source("a" * 56), Source("b" * 56)]
    engine.submit(*(order((1 << 28) + at, *sources, num_bytes=1 << 17) for at in range(MAX_CHUNKS)))
    (request,) = engine.sent()
    assert len(encode(request)) < 100 * 1024


# Orders that end well


def test_orders_end_with_the_result_of_their_request(engine: Engine) -> None:
    parts = [[order(i) for i in range(3)], [order(3)]]
    for part in ([], *parts):
        engine.submit(*part)
    requests = engine.sent()
    assert len(requests) == len(parts), "no orders make no request"
    assert engine.ended == []
    for number in (1, 0):
        engine.fetches.came(result_of(requests[number]))
        assert engine.ended[-1] == (parts[number], result_of(requests[number]))


# Orders that nobody knows the end of


def test_all_orders_end_without_a_result_when_the_line_breaks_and_the_next_ones_work(
    engine: Engine,
) -> None:
    engine.submit(order(0), order(1))
    (lost,) = engine.sent()
    engine.submit(order(2))
    engine.fetches.lose_all()
    assert engine.ended == [([order(0), order(1)], None), ([order(2)], None)]
    assert engine.sent() == []
    engine.submit(order(3))
    (request,) = engine.sent()
    engine.fetches.came(result_of(lost))
    engine.fetches.came(result_of(request))
    assert engine.ended[2:] == [([order(3)], result_of(request))]


def test_orders_without_an_answer_end_at_deadline_and_grace_and_not_again(engine: Engine) -> None:
    engine.submit(order(0), now=1.0)
    engine.submit(order(1), now=1.5)
    (first, _) = engine.sent()
    engine.fetches.give_up_overdue(1.0 + DEADLINE_S + GRACE_S - 0.01)
    assert engine.ended == []
    engine.fetches.give_up_overdue(1.0 + DEADLINE_S + GRACE_S)
    assert engine.ended == [([order(0)], None)]
    engine.fetches.came(result_of(first))
    engine.fetches.give_up_overdue(1.5 + DEADLINE_S + GRACE_S)
    assert engine.ended == [([order(0)], None), ([order(1)], None)]


def test_orders_that_are_overdue_before_they_are_sent_are_not_sent(engine: Engine) -> None:
    engine.submit(order(0))
    engine.submit(order(1), now=1.0)
    engine.fetches.give_up_overdue(DEADLINE_S + GRACE_S)
    assert [list(request.keys) for request in engine.sent()] == [[order(1).key]]


def test_each_order_ends_exactly_once_whatever_happens(engine: Engine) -> None:
    """The engine orders and gives up while the line sends, answers and breaks."""
    chosen, num_lots = random.Random(5), 400
    is_over = threading.Event()

    def be_the_line() -> None:
        sent: list[Fetch] = []
        while not is_over.is_set():
            sent += engine.sent()
            chosen.shuffle(sent)
            while sent and chosen.random() < 0.7:
                engine.fetches.came(result_of(sent.pop()))
            if chosen.random() < 0.1:
                engine.fetches.lose_all()

    line = threading.Thread(target=be_the_line)
    line.start()
    lots = [[order(number * 4 + i) for i in range(4)] for number in range(num_lots)]
    for number, orders in enumerate(lots):
        engine.submit(*orders, now=float(number))
        engine.fetches.give_up_overdue(number - 3.0 + DEADLINE_S + GRACE_S)
    is_over.set()
    line.join()
    engine.fetches.lose_all()
    assert engine.keys == Counter(each.key for orders in lots for each in orders)
    assert len(engine.ended) == num_lots
