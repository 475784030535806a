"""What a NodeActor's pool does for engines: introductions, what they say, and what they hear."""

from __future__ import annotations

from math import nan

import pytest

from raykv.base.ids import Direction, Refusal, Stamp
from raykv.node.accounts.requests import MOST_RECORDS
from raykv.node.pool.engines import SILENT_S
from raykv.node.pool.index import FRESH_S
from raykv.node.pool.listing import MOST_UNREAD
from raykv.node.pool.owner import FAVOUR_S
from raykv.node.pool.records import Standing
from raykv.protocol.columns import Keys, Texts
from raykv.protocol.engine import (
    NOTHING_ORDERED,
    ChangesAnswer,
    FoundKeys,
    Hints,
    MissRecord,
    Naming,
)
from raykv.protocol.listing import ALL_READ, Position, Where
from raykv.protocol.node import MOST_ENGINES
from raykv.protocol.sessions import SessionWord
from tests.fixtures.node.owned_pool import (
    LIFE,
    PAGE,
    A,
    B,
    OwnedPool,
    begun,
    key,
    pin,
    share,
    stamp,
    where,
)


def read_all(pool: OwnedPool, life: int = 1) -> ChangesAnswer:
    """Read the listing to its end."""
    answer = pool.changes(pool.query(life))
    while answer.part.end.place != ALL_READ:
        answer = pool.changes(pool.query(life, position=answer.part.end))
    return answer


# Introductions


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"slot_bytes": {0: PAGE, 3: 5 * PAGE}}, "KV group 3 takes 20480 bytes, more than a slab"),
        ({"slot_bytes": {0: 0}}, "no slot has that size"),
        ({"slot_bytes": {0: PAGE + 1}}, "no slot has that size"),
        ({"slot_bytes": {}}, "without KV groups"),
    ],
)
def test_engine_whose_chunks_do_not_fit_is_refused(fields: dict[str, int], sentence: str) -> None:
    pool = OwnedPool()
    assert sentence in pool.hello(**fields)  # type: ignore[arg-type]
    pool.node.check()
    assert not pool.report().engines


def test_number_of_engines_is_bounded() -> None:
    pool = OwnedPool()
    assert not any(pool.hello(life) for life in range(1, MOST_ENGINES + 1))
    assert "the most that it takes" in pool.hello(MOST_ENGINES + 1)
    # Those that are here may say it again.
    assert not pool.hello(5, B)
    pool.node.bye(7)
    assert not pool.hello(MOST_ENGINES + 1)


def test_silent_engine_is_gone_and_one_that_is_heard_is_not(pool: OwnedPool) -> None:
    pool.hello(2)
    pool.hello(3)
    (job,) = pool.admit(pool.storing(1))
    pool.wait(SILENT_S - 1)
    pool.tell(2)
    pool.changes(pool.query(3))
    pool.wait(1)
    assert [each.hello.life for each in pool.report().engines] == [2, 3]
    assert not pool.changes(pool.query(1)).is_known
    assert pool.end(job).refusals == bytes([Refusal.POISONED])
    assert pool.store(5) == [Refusal.BAD_HANDLE]
    pool.hello(1)
    assert pool.changes(pool.query(1)).is_known
    assert pool.store(5) == [Refusal.NONE]


def test_engine_that_changes_its_namespace_stores_late_chunks_of_the_earlier_one(
    pool: OwnedPool,
) -> None:
    late = pool.storing(1)
    pool.hello(namespace=B, slot_bytes={0: 2 * PAGE})
    (job,) = pool.admit(late)
    assert begun(job.chunks[0]).slot_bytes == PAGE
    pool.end(job)
    assert pool.held() == [1]
    # An earlier introduction that comes late is mended by the next question.
    pool.hello(namespace=A)
    assert not pool.changes(pool.query(namespace=B)).is_known


# Changes


def test_engine_reads_what_is_there_and_what_has_changed(pool: OwnedPool) -> None:
    pool.store(1, 2)
    answer = read_all(pool)
    assert (answer.is_known, answer.facts.orders) == (True, NOTHING_ORDERED)
    position = answer.part.end
    assert not pool.node.has_changes(pool.query(position=position))
    pool.store(3)
    query = pool.query(position=position)
    assert pool.node.has_changes(query)
    answer = pool.changes(query)
    assert where(answer.part.rows) == {key(3): Where.RAM}
    position = answer.part.end
    assert not pool.node.has_changes(pool.query(position=position))
    # Of its namespace alone.
    pool.hello(2, B)
    pool.store(1, namespace=B, life=2)
    query = pool.query(position=position)
    assert not pool.node.has_changes(query)
    answer = pool.changes(query)
    assert not list(answer.part.rows)
    assert answer.part.end.number == pool.node.index.listing.number


def test_reader_of_a_quiet_namespace_does_not_fall_behind(pool: OwnedPool) -> None:
    pool.hello(2, B)
    position = read_all(pool).part.end
    number = 0
    while pool.node.index.listing.number <= position.number + MOST_UNREAD:
        assert not pool.node.has_changes(pool.query(position=position))
        number += 1
        pool.store(number, namespace=B, life=2)
    query = pool.query(position=position)
    assert pool.node.has_changes(query)
    assert not pool.node.has_changes(pool.query(position=pool.changes(query).part.end))


def test_question_is_answered_with_as_many_rows_as_it_takes(pool: OwnedPool) -> None:
    pool.store(*range(8))
    answer = pool.changes(pool.query(most=3))
    assert len(answer.part.rows.keys) <= 6
    # With none it is told what holds, and stays where it is.
    query = pool.query(position=answer.part.end, most=0)
    answer = pool.changes(query)
    assert (answer.part.start, answer.part.end) == (query.position, query.position)
    assert not pool.node.has_changes(query)
    pool.order(1, is_paused=True)
    assert pool.node.has_changes(query)


def test_engine_that_is_not_known_hears_so_and_that_nothing_is_here(pool: OwnedPool) -> None:
    pool.store(1)
    query = pool.query(life=9, position=Position(LIFE - 1, 55, ALL_READ, 3))
    assert pool.node.has_changes(query)
    answer = pool.changes(query)
    assert not answer.is_known
    assert answer.part.follows(query.position)
    assert (answer.part.begins, answer.part.end) == (True, Position(LIFE, 0, 0, 3))
    assert not list(answer.part.rows)
    # It goes on from there.
    pool.hello(9)
    assert where(pool.changes(pool.query(9, position=answer.part.end)).part.rows) == {
        key(1): Where.RAM
    }
    # Who reads here already stays where it is.
    query = pool.query(life=8, position=Position(LIFE, 1, 7, 3))
    answer = pool.changes(query)
    assert (answer.part.begins, answer.part.end) == (False, query.position)


@pytest.mark.parametrize(
    "position",
    [
        Position(LIFE, 1 << 40, ALL_READ),
        Position(LIFE, -1, ALL_READ),
        Position(LIFE, 0, -(1 << 62)),
        Position(LIFE, 0, 1 << 62),
        Position(-3, 5, 5, -9),
    ],
)
def test_position_that_nobody_was_given_is_answered(pool: OwnedPool, position: Position) -> None:
    pool.store(1)
    assert pool.node.has_changes(pool.query(position=position))
    answer = pool.changes(pool.query(position=position))
    assert answer.part.end.life == LIFE


def test_what_holds_at_a_place_is_news_once(pool: OwnedPool) -> None:
    position = read_all(pool).part.end
    query = pool.query(position=position)

    def news() -> ChangesAnswer:
        assert pool.node.has_changes(query)
        answer = pool.changes(query)
        assert not pool.node.has_changes(query)
        return answer

    pool.order(3, is_paused=True)
    answer = news()
    assert (answer.facts.orders, answer.facts.is_paused) == (stamp(3), True)
    pool.node.is_leaving = True
    assert news().facts.is_leaving
    pool.answer(alone=[A])
    assert not news().facts.has_peers
    pool.wait(30.0)
    pool.hello()
    assert news().facts.has_peers
    pool.answer(namings={1: Naming(Stamp(1, 5), "v2")})
    assert news().facts.naming == Naming(Stamp(1, 5), "v2")
    pool.tell(heard=Stamp(1, 5))
    assert news().facts.naming is None
    # What a directory says that is behind is no news, nor what is said of another life.
    pool.answer(namings={1: Naming(Stamp(1, 4), "v1"), 2: Naming(Stamp(1, 6), "v3")})
    assert not pool.node.has_changes(query)
    assert pool.changes(query).facts.naming is None
    # Somebody who introduces itself anew is told all.
    pool.hello()
    assert pool.node.has_changes(query)


# What engines say


def test_what_is_nobodys_becomes_the_tenants_that_finds_it(pool: OwnedPool) -> None:
    pool.store(1, 2)
    pool.store(3, tenant="other")
    pool.order(1, shares={"t": share(0.1)})
    pool.found(1, 3, 9, tenant="t")
    both = FoundKeys(Keys.of([key(1), key(1)]), Texts.of(["u", "v"]))
    pool.tell(found=both)
    pool.found(2, tenant="bad\nlabel")
    pool.found(2, tenant="")
    assert pool.report().tenant_bytes == {"t": PAGE, "other": PAGE}


def test_requests_pin_and_favour_chunks(pool: OwnedPool) -> None:
    pool.store(1, 2, 3)
    pool.tell(hints=Hints(Keys.of([key(1)]), [50.0], Keys.of([key(2)]), [3]))
    assert pool.standings(1, 2, 3) == [Standing.PINNED, Standing.KEPT_3, Standing.NORMAL]
    # A shorter wish changes nothing, a longer one does.
    pool.tell(hints=Hints(Keys.of([key(1)]), [5.0]))
    pool.wait(20)
    pool.tell()
    assert pool.standing(1) is Standing.PINNED
    pool.tell(hints=Hints(Keys.of([key(1)]), [100.0]))
    for _ in range(3):
        pool.wait(20)
        pool.tell()
    assert pool.standing(1) is Standing.PINNED
    pool.wait(FAVOUR_S)
    assert pool.standings(1, 2) == [Standing.NORMAL] * 2
    # What makes no sense is left out.
    pool.hello()
    keys = Keys.of(map(key, [1, 2, 3]))
    pool.tell(hints=Hints(keys, [nan, -1.0, 1e12], keys, [0, 99, -4]))
    pool.tell(hints=Hints(keys, [], keys, [1, 1, 1, 1, 1]))
    assert pool.standings(1, 2) == [Standing.KEPT] * 2
    pool.tell(hints=Hints(keys, [5.0], Keys.of([b"x" * 200]), [2]))
    assert pool.standing(1) is Standing.PINNED


def test_windows_of_a_place_go_with_what_they_need() -> None:
    pool = OwnedPool()
    pool.hello(slot_bytes={0: PAGE, 1: PAGE}, traits={"chunks": "0:16 1:16/2"})
    assert not pool.hello(2, B, slot_bytes={0: PAGE}, traits={"chunks": "no groups"})
    pool.end(pool.admit(pool.job_of(Direction.STORE, [key(1), key(1, 1)]))[0])
    pool.store(*range(2, 16))
    pool.now += FRESH_S
    pool.found(1, *range(2, 16))
    pool.found(1)
    assert pool.node.index.find(A, key(1, 1)) is not None
    pool.now += FRESH_S
    pool.node.index.stand(pool.record(1), Standing.RELEASED)
    pool.store(50)
    assert 1 not in pool.held()
    assert pool.node.index.find(A, key(1, 1)) is None


def test_request_that_waits_finds_its_chunks_once_and_only_what_it_says_first_counts(
    pool: OwnedPool,
) -> None:
    pool.store(1, 2)
    for _ in range(5):
        pool.found(1)
        pool.now += 1.0
    assert (pool.record(1).hits, pool.record(1).found_at) == (1, 104.0)
    # What was released since is wanted again.
    pool.say(SessionWord.USED, "s", 1)
    pool.say(SessionWord.OVER, "s")
    assert pool.standing(1) is Standing.RELEASED
    pool.found(1)
    assert pool.standing(1) is Standing.NORMAL
    # What was said again, late, by nobody or elsewhere changes nothing.
    hits, said = pool.record(1).hits, pool.seq
    pool.now += FRESH_S
    for seq in (said, said - 1, 0):
        pool.found(1, seq=seq)
    pool.found(1, life=9)
    pool.found(1, namespace=B)
    assert pool.record(1).hits == hits == 2
    pool.found(1)
    assert pool.record(1).hits == 3


def test_priority_gives_way_last_and_lowest_first(pool: OwnedPool) -> None:
    pool.store(*range(16))
    pool.order(1, pins={"high": pin(b"h", priority=9), "low": pin(b"l", priority=1)})
    pool.node.orders.pin_keys(b"h", A, [key(1)])
    pool.node.orders.pin_keys(b"l", A, [key(2)])
    pool.tell(hints=Hints(favoured=Keys.of([key(3)]), priorities=[5]))
    # The highest that was wished counts.
    pool.tell(hints=Hints(favoured=Keys.of([key(3)]), priorities=[2]))
    for first, left in ((100, [1, 2, 3]), (200, [1, 3]), (300, [1])):
        pool.now += 10
        pool.store(*range(first, first + 16 - len(left)))
        assert pool.held() == left


def test_requests_that_have_ended_are_remembered_and_bad_rows_cost_no_others(
    pool: OwnedPool,
) -> None:
    def ended(request: str, **fields: int | bytes) -> MissRecord:
        return MissRecord(request, 5, 2, 3, **fields)  # type: ignore[arg-type]

    pool.tell(finished=[ended("a"), ended("b", chunks=b"odd"), ended("c")])
    _, log = pool.node.accounts.requests.after(0)
    assert [each.record.request_id for each in log] == ["a", "c"]
    pool.tell(finished=[ended(str(number)) for number in range(MOST_RECORDS + 5)])
    assert len(pool.node.accounts.requests) == MOST_RECORDS


# What a report would say


def test_report_is_due_when_it_would_say_something_new(pool: OwnedPool) -> None:
    assert pool.node.has_news
    read = pool.answer(position=Position()).part
    while (part := pool.answer(position=read.end if read else Position()).part) is not None:
        read = part
    assert read is not None
    pool.answer(position=read.end)
    assert not pool.node.has_news
    for change in (
        lambda: pool.store(1),
        lambda: pool.hello(2),
        lambda: pool.tell(heard=Stamp(1, 5)),
        lambda: pool.say(SessionWord.CAME, "s"),
        lambda: pool.order(1),
    ):
        change()
        assert pool.node.has_news
        while pool.node.has_news:
            told = pool.answer(position=read.end)
            read = told.part or read
    pool.store(2)
    pool.report()
    pool.node.reporting.give_up()
    # Nobody knows whether that has come.
    assert pool.node.has_news
