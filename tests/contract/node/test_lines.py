"""EngineCores' lines to a NodeService: what they hear, when, and who is gone when one ends."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator

import pytest
from msgspec import structs

import raykv.node.lines
from raykv.base.ids import SLOT_ALIGNMENT, Namespace, Refusal, Stamp
from raykv.node.lines import FETCH_THREADS
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyResult, Fetch
from raykv.protocol.engine import ChangesAnswer, ChangesQuery, EngineHello, Fetched, Tell, Welcome
from raykv.protocol.listing import ALL_READ, Position, Where
from raykv.protocol.operator import OrdersDocument
from raykv.protocol.worker import not_done
from tests.fixtures.keys import numbered_key
from tests.fixtures.node.cores import RawLine, hello_of
from tests.fixtures.node.links import PATIENT, Worker
from tests.fixtures.node.local import LocalNode
from tests.fixtures.waiting import wait_until

PAGE = SLOT_ALIGNMENT
LIFE = 1 << 40
LONG_S = 10.0


@pytest.fixture
def node() -> Iterator[LocalNode]:
    made = LocalNode()
    made.start()
    yield made
    made.stop()


@pytest.fixture
def lines(node: LocalNode) -> Iterator[list[RawLine]]:
    made: list[RawLine] = []
    yield made
    for line in made:
        line.close()


def opened(node: LocalNode, lines: list[RawLine], life: int = LIFE) -> RawLine:
    line = RawLine(node.name)
    lines.append(line)
    line.send(hello_of(life, {0: PAGE}))
    assert line.receive() == Welcome(node.keeper.life)
    return line


@pytest.fixture
def line(node: LocalNode, lines: list[RawLine]) -> RawLine:
    return opened(node, lines)


def asked(line: RawLine, position: Position, most: int = 1024) -> ChangesAnswer:
    line.send(ChangesQuery(LIFE, "ns", position, most))
    return answered(line)


def read(line: RawLine) -> Position:
    """All that the listing has now."""
    position = Position()
    while position.place != ALL_READ:
        position = asked(line, position).part.end
    return position


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is answered for the silence alone."""
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 5 * LONG_S)


def answered(line: RawLine) -> ChangesAnswer:
    message = line.receive()
    assert isinstance(message, ChangesAnswer)
    return message


def is_here(node: LocalNode, life: int = LIFE) -> bool:
    with node.keeper.lock:
        return any(each.hello.life == life for each in node.keeper.owner.engines)


@pytest.mark.usefixtures("quiet")
def test_engine_hears_of_a_chunk_as_soon_as_it_is_stored(node: LocalNode, line: RawLine) -> None:
    position = read(line)
    worker = Worker(node, [PAGE], 1, settings=PATIENT)
    try:
        line.send(ChangesQuery(LIFE, "ns", position))
        assert worker.store([1], [0]) == []
        seen: dict[bytes, Where] = {}
        while Where.RAM not in seen.values():
            answer = answered(line)
            seen |= {row.key: row.where for row in answer.part.rows}
            position = answer.part.end
            line.send(ChangesQuery(LIFE, "ns", position))
        assert seen == {numbered_key(1): Where.RAM}
    finally:
        worker.end()


def test_silence_is_answered_now_and_then(line: RawLine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raykv.base.deadlines.HEARTBEAT_S", 0.2)
    position = read(line)
    began = time.monotonic()
    answer = asked(line, position)
    assert 0.1 < time.monotonic() - began < LONG_S
    assert answer.part.start == answer.part.end == position
    assert answer.is_known


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("is_behind", [True, False], ids=["that is behind", "that lacks nothing"])
def test_query_behind_one_that_takes_no_rows_is_answered_at_once(
    line: RawLine, is_behind: bool
) -> None:
    """The engine does not know whether it lacks anything."""
    position = read(line)
    line.send(ChangesQuery(LIFE, "ns", position, most=0))
    line.send(ChangesQuery(LIFE, "ns", Position() if is_behind else position))
    first, second = answered(line), answered(line)
    assert (first.part.begins, second.part.begins) == (False, is_behind)
    assert (first.has_more, second.has_more) == (True, False)
    assert is_behind or second.part.end == position


@pytest.mark.usefixtures("quiet")
def test_engine_hears_of_orders_at_once(node: LocalNode, line: RawLine) -> None:
    position = read(line)
    line.send(ChangesQuery(LIFE, "ns", position))
    node.keeper.take_orders(OrdersDocument(Stamp(0, 4), is_paused=True), 1.0)
    answer = answered(line)
    assert (answer.facts.orders, answer.facts.is_paused) == (Stamp(0, 4), True)


def test_engine_that_asks_too_much_at_once_loses_its_line(
    line: RawLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.lines, "MOST_QUERIES", 0)
    line.send(ChangesQuery(LIFE, "ns"))
    assert line.receive() is None


def test_what_an_engine_tells_is_heard(node: LocalNode, line: RawLine) -> None:
    line.send(Tell(LIFE, 1, "ns", counters={"steps": 7}))
    asked(line, Position())
    with node.keeper.lock:
        (engine,) = node.keeper.owner.engines
    assert engine.counters == {"steps": 7}


def test_engine_is_here_until_its_last_line_has_ended(
    node: LocalNode, lines: list[RawLine]
) -> None:
    first, second = opened(node, lines), opened(node, lines)
    first.close()
    asked(second, Position())
    assert is_here(node)
    second.close()
    wait_until(lambda: not is_here(node), LONG_S, "it is gone")


def test_engine_in_another_namespace_is_there_with_its_next_hello(
    node: LocalNode, line: RawLine
) -> None:
    line.send(hello_of(LIFE, {0: 2 * PAGE}, "later"))
    assert line.receive() == Welcome(node.keeper.life)
    line.send(ChangesQuery(LIFE, "ns"))
    answer = answered(line)
    assert not answer.is_known
    with node.keeper.lock:
        assert [each.namespace for each in node.keeper.owner.engines] == [Namespace("later")]


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({0: PAGE + 1}, "no slot has that size"),
        ({-1: PAGE}, "the engine sent this NodeActor no EngineHello.*slot_bytes"),
        ({1 << 32: PAGE}, "the engine sent this NodeActor no EngineHello.*slot_bytes"),
    ],
)
def test_refused_engine_hears_why_and_is_not_here(
    node: LocalNode, lines: list[RawLine], sizes: dict[int, int], why: str
) -> None:
    assert re.search(why, refused(node, lines, hello_of(LIFE, sizes)), re.DOTALL)
    assert lines[-1].receive() is None
    assert not is_here(node)


def test_one_engine_too_many_is_refused(
    node: LocalNode, lines: list[RawLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raykv.protocol.node.MOST_ENGINES", 1)
    opened(node, lines)
    assert "connected already" in refused(node, lines, hello_of(LIFE + 1, {0: PAGE}))
    assert is_here(node)


def refused(node: LocalNode, lines: list[RawLine], hello: EngineHello) -> str:
    """Why an engine may not be here."""
    lines.append(RawLine(node.name))
    lines[-1].send(hello)
    answer = lines[-1].receive()
    assert isinstance(answer, Welcome)
    return answer.error


# Fetches


class Fetching:
    """Carries out what is ordered when it may."""

    def __init__(self) -> None:
        self.begun: list[Fetch] = []
        self.may_end = threading.Event()

    def __call__(self, order: Fetch) -> CopyResult:
        self.begun.append(order)
        assert self.may_end.wait(LONG_S)
        return CopyResult(order.number, 7, 1, num_bytes=PAGE)

    def wait_for(self, number: int) -> None:
        """Until so many have begun."""
        wait_until(lambda: len(self.begun) == number, LONG_S, "they run")

    def fill(self, line: RawLine, life: int = LIFE) -> None:
        """Give each thread a fetch."""
        for number in range(FETCH_THREADS):
            line.send(fetch_of(number, life))
            self.wait_for(number + 1)


@pytest.fixture
def fetching() -> Iterator[Fetching]:
    made = Fetching()
    yield made
    made.may_end.set()


@pytest.fixture
def fetcher(fetching: Fetching) -> Iterator[LocalNode]:
    made = LocalNode(fetch=fetching)
    made.start()
    yield made
    fetching.may_end.set()
    made.stop()


def fetch_of(number: int, life: int = LIFE) -> Fetch:
    keys = Keys.of([numbered_key(number)])
    return Fetch(number, life, "ns", keys, Numbers.of([PAGE]))


def test_fetches_have_their_results_and_hold_up_no_other_answer(
    fetcher: LocalNode, fetching: Fetching, lines: list[RawLine]
) -> None:
    line = opened(fetcher, lines)
    orders = [fetch_of(number) for number in range(FETCH_THREADS + 3)]
    fetching.fill(line)
    for order in orders[FETCH_THREADS:]:
        line.send(order)
    assert asked(line, Position()).is_known
    whole_s = orders[0].deadline_s
    begun = [structs.replace(each, deadline_s=whole_s) for each in fetching.begun]
    assert begun == orders[:FETCH_THREADS], "in order, and no more at a time"
    assert all(0.0 < each.deadline_s < whole_s for each in fetching.begun), "what is left of it"
    fetching.may_end.set()
    results = [line.receive() for _ in orders]
    assert all(isinstance(each, Fetched) for each in results)
    ended = [each.result for each in results if isinstance(each, Fetched)]
    expected = [CopyResult(order.number, 7, 1, num_bytes=PAGE) for order in orders]
    assert sorted(ended, key=lambda result: result.job_id) == expected


def test_fetches_that_find_the_queue_full_are_refused_at_once(
    fetching: Fetching, lines: list[RawLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.node.lines, "MOST_FETCHES", 1)
    node = LocalNode(fetch=fetching)
    node.start()
    try:
        line = opened(node, lines)
        fetching.fill(line)
        line.send(fetch_of(FETCH_THREADS))
        line.send(fetch_of(99))
        refused = not_done(99, 1, Refusal.QUEUE_FULL)
        assert line.receive() == Fetched(refused)
    finally:
        fetching.may_end.set()
        node.stop()


def test_fetch_that_has_waited_longer_than_its_deadline_is_not_begun(
    fetcher: LocalNode, fetching: Fetching, lines: list[RawLine]
) -> None:
    line = opened(fetcher, lines)
    fetching.fill(line)
    line.send(structs.replace(fetch_of(FETCH_THREADS), deadline_s=0.05))
    # The line's answers come in order: it has the order by now.
    assert asked(line, Position()).is_known
    time.sleep(0.1)
    fetching.may_end.set()
    results = [line.receive() for _ in range(FETCH_THREADS + 1)]
    late = Fetched(not_done(FETCH_THREADS, 1, Refusal.TOO_LATE))
    assert results.count(late) == 1
    assert len(fetching.begun) == FETCH_THREADS


def test_fetch_of_an_engine_that_has_gone_is_not_begun(
    fetcher: LocalNode, fetching: Fetching, lines: list[RawLine]
) -> None:
    gone, stays = opened(fetcher, lines), opened(fetcher, lines, LIFE + 1)
    fetching.fill(stays, LIFE + 1)
    gone.send(fetch_of(50))
    assert asked(gone, Position()).is_known
    gone.close()
    wait_until(lambda: not is_here(fetcher), LONG_S, "it is gone")
    stays.send(fetch_of(51, LIFE + 1))
    fetching.may_end.set()
    results = [stays.receive() for _ in range(FETCH_THREADS + 1)]
    assert all(isinstance(each, Fetched) for each in results)
    assert 50 not in [order.number for order in fetching.begun]


def test_engine_that_orders_for_another_life_loses_its_line(
    fetcher: LocalNode, fetching: Fetching, lines: list[RawLine]
) -> None:
    line = opened(fetcher, lines)
    line.send(fetch_of(1, LIFE + 1))
    assert line.receive() is None
    assert not fetching.begun
