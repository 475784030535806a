"""What a node and the directory tell each other."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from raykv.base.ids import Namespace, Stamp
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import MEMBERS_S, Orders
from raykv.node.pool.listing import MOST_CHANGES
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.node.pool.reporting import ALONE_S, MARKED_S, MOST_ROWS, MOST_WORDS
from raykv.protocol.columns import NamedKeys
from raykv.protocol.engine import NOTHING_ORDERED
from raykv.protocol.listing import ALL_READ, ListingPart, Position, Where
from raykv.protocol.measures import MAX_BREAKERS, BreakerReport, OpenBreaker
from raykv.protocol.node import Marks, NodeStats, ReportAnswer, SessionsWord
from raykv.protocol.sessions import SessionNews, SessionWord
from tests.fixtures.directory.reporting import sizes
from tests.fixtures.node.owned_pool import (
    LIFE,
    PAGE,
    SLAB,
    WHOLE,
    A,
    B,
    OwnedPool,
    admit,
    key,
    stamp,
    where,
)

SPARE, NORMAL = Standing.SPARE, Standing.NORMAL


@pytest.fixture
def pool(pool: OwnedPool) -> OwnedPool:
    pool.store(1, 2, 3)
    return pool


def names(*numbers: int, namespace: Namespace = A) -> NamedKeys:
    return NamedKeys.of((namespace, key(number)) for number in numbers)


def marks(
    pool: OwnedPool,
    number: int,
    spare: Iterable[int] = (),
    kept: Iterable[int] = (),
    **fields: int | bool,
) -> Marks:
    """Marks by who has read all of the listing."""
    said = {"known": pool.node.index.listing.number, **fields}
    return Marks(number, spare=names(*spare), kept=names(*kept), **said)  # type: ignore[arg-type]


def word(session: str, what: SessionWord = SessionWord.OVER) -> SessionsWord:
    return SessionsWord(A, SessionNews(session, what))


# Reports


def test_directory_is_told_the_listing_from_where_it_has_read(pool: OwnedPool) -> None:
    assert pool.report().part is None
    pool.node.reporting.give_up()
    assert pool.answer(position=Position()).part is None
    first = pool.answer(position=Position()).part
    assert first is not None
    assert where(first.rows) == {key(number): Where.RAM for number in (1, 2, 3)}
    # That answer was that it has read nothing: the same once more.
    second = pool.answer(position=first.end).part
    assert second == first
    assert pool.report().part is None
    pool.node.reporting.give_up()
    pool.store(4)
    part = pool.report().part
    assert part is not None
    assert part.start == first.end
    assert where(part.rows) == {key(4): Where.RAM}


def test_changes_count_as_unread_until_the_directory_says_that_it_has_read_them(
    pool: OwnedPool,
) -> None:
    listing = pool.node.index.listing
    assert pool.node.reporting.num_unread == 3 < listing.number
    pool.answer(position=Position(listing.life, listing.number - 2, ALL_READ))
    assert pool.node.reporting.num_unread == 2
    # What another life has read says nothing, and more than all can't be read.
    pool.answer(position=Position(listing.life + 1, listing.number, ALL_READ))
    assert pool.node.reporting.num_unread == 3
    pool.answer(position=Position(listing.life, listing.number, 2))
    assert pool.node.reporting.num_unread == 3
    # Of a chunk that comes and goes there are many changes.
    pool.answer(position=Position(listing.life, 0, ALL_READ))
    assert pool.node.reporting.num_unread == 3
    pool.answer(position=Position(listing.life, listing.number + 9, ALL_READ))
    assert pool.node.reporting.num_unread == 0


def test_node_of_many_chunks_joins_while_it_goes_on() -> None:
    pages = 40 * 1024
    assert pages > MOST_CHANGES
    pool = OwnedPool(num_slabs=pages // SLAB)
    pool.hello(slot_bytes={0: PAGE})
    node, index = pool.node, pool.node.index
    records = [
        ChunkRecord(A, key(number), PAGE, Stamp(0, 0), blocks=WHOLE) for number in range(pages)
    ]
    for record in records:
        assert index.places.place(record)
        record.readers = 1
    index.adopt(records)
    directory = Directory(5, Orders(None, 8, -MEMBERS_S), node_expiry_s=1e9)
    parts: list[ListingPart] = []
    num_new = 0
    while not parts or node.reporting.num_unread or parts[-1].end.place != ALL_READ:
        pool.now += 4.0
        report = node.report()
        parts += [report.part] if report.part is not None else []
        node.answered(directory.report(report, pool.now), pool.now, report.seq)
        if not parts or parts[-1].end.place != ALL_READ:
            stores = pool.storing(*range(10**6 + num_new, 10**6 + num_new + 500))
            (job,) = admit(node, 1, 0, 1, [stores], pool.now)
            node.jobs.end_chunks(job, range(500), ok=True)
            assert not node.jobs.end_job(job, 0, 0.0).failed_chunks
            num_new += 500
    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert len(parts) <= pages // MOST_ROWS + 5
    assert max(len(part.rows.keys) for part in parts) <= 2 * MOST_ROWS
    assert index.num_ready == pages
    assert sizes(directory._holdings) == {A: pages}
    there = (each for each in index.places if each.state is ChunkState.READY)
    assert all(directory.where(A, [each.key])[0] for each in there)


def test_report_says_what_is_here(pool: OwnedPool) -> None:
    pool.hello(2, B)
    pool.store(5, namespace=B, life=2, tenant="t")
    pool.order(3)
    pool.node.stats, pool.node.is_leaving = NodeStats(queued_jobs=7), True
    report = pool.report()
    assert (report.node_id, report.life, report.orders) == ("n", LIFE, stamp(3))
    assert (report.pool_bytes, report.slab_bytes) == (4 * SLAB * PAGE, SLAB * PAGE)
    assert (report.spaces, report.tenant_bytes) == ({A: 3, B: 1}, {"t": PAGE})
    assert (report.stats.queued_jobs, report.is_leaving) == (7, True)
    assert [each.hello.engine_id for each in report.engines] == ["e1", "e2"]


def test_engine_is_reported_with_what_it_counted_last(pool: OwnedPool) -> None:
    row = OpenBreaker("p", "open", 1, 1.0, "why")
    pool.tell(counters={"x": 5}, breakers=BreakerReport(opened=2), heard=Stamp(1, 5))
    pool.tell(breakers=BreakerReport([row] * (MAX_BREAKERS + 1)), heard=Stamp(1, 5))
    (engine,) = pool.report().engines
    assert (engine.counters, engine.breakers.opened, engine.heard) == ({"x": 5}, 2, (1, 5))


def test_what_sessions_say_goes_along_until_it_was_answered(pool: OwnedPool) -> None:
    pool.say(SessionWord.CAME, "s", 1)
    assert pool.report().sessions == [word("s", SessionWord.CAME)]
    pool.say(SessionWord.OVER, "s")
    pool.node.reporting.give_up()
    report = pool.report()
    assert report.sessions == [word("s", SessionWord.CAME), word("s")]
    pool.say(SessionWord.PAUSED, "t", pause_s=9.0)
    pool.node.answered(ReportAnswer(5), pool.now, report.seq)
    assert [each.news.session for each in pool.report().sessions] == ["t"]


def test_what_sessions_say_is_bounded_and_the_oldest_is_lost(pool: OwnedPool) -> None:
    pool.report()
    for number in range(MOST_WORDS + 3):
        pool.say(SessionWord.CAME, f"s{number}")
        if number == 9:
            pool.node.reporting.give_up()
            pool.report()
    pool.node.reporting.give_up()
    said = pool.report().sessions
    assert len(said) == MOST_WORDS
    assert said[-1].news.session == f"s{MOST_WORDS + 2}"


def test_next_report_comes_after_an_answer_or_is_given_up(pool: OwnedPool) -> None:
    first = pool.report()
    with pytest.raises(AssertionError):
        pool.report()
    pool.node.reporting.give_up()
    second = pool.report()
    assert second.seq > first.seq
    # An answer to the one before, and one that nobody waits for.
    pool.node.answered(ReportAnswer(5, orders=stamp(9)), pool.now, first.seq)
    assert not pool.node.wants_document
    pool.node.answered(ReportAnswer(5, orders=stamp(9)), pool.now, second.seq)
    assert pool.node.wants_document
    pool.node.answered(ReportAnswer(5, orders=stamp(1)), pool.now, second.seq)
    assert pool.node.wants_document
    pool.order(9)
    assert not pool.node.wants_document
    pool.answer(orders=NOTHING_ORDERED)
    assert not pool.node.wants_document


def test_engine_that_knows_later_orders_has_the_document_asked_for_once(pool: OwnedPool) -> None:
    pool.order(3)
    pool.tell(orders=stamp(3))
    assert not pool.node.wants_document
    pool.tell(orders=stamp(9))
    assert pool.node.wants_document
    assert pool.node.has_news
    # Nobody has them: the engine is not believed again.
    pool.order(3)
    assert not pool.node.wants_document


def test_directory_that_is_silent_says_nothing_any_more(pool: OwnedPool) -> None:
    def has_peers() -> bool:
        return pool.changes(pool.query()).facts.has_peers

    assert has_peers()
    pool.answer(alone=[A], marks=marks(pool, 1, spare=[1]))
    assert not has_peers()
    pool.wait(ALONE_S - 1)
    assert not has_peers()
    pool.wait(1)
    assert has_peers()
    pool.wait(MARKED_S - ALONE_S - 1)
    assert pool.standing(1) is SPARE
    pool.wait(1)
    assert pool.standing(1) is NORMAL


# Marks


def test_spare_chunks_go_before_others_and_stay_so_when_they_are_found(pool: OwnedPool) -> None:
    pool.answer(marks=marks(pool, 4, spare=[2, 9]))
    assert pool.standings(1, 2, 3) == [NORMAL, SPARE, NORMAL]
    assert pool.report().heard == 4
    pool.found(2)
    assert pool.standing(2) is SPARE
    pool.now += 10
    pool.store(*range(10, 24))
    assert pool.held()[:2] == [1, 3]


def test_released_chunks_go_before_spare_ones(pool: OwnedPool) -> None:
    pool.answer(marks=marks(pool, 4, spare=[1, 2]))
    pool.say(SessionWord.USED, "s", 1)
    assert pool.standing(1) is SPARE
    pool.say(SessionWord.OVER, "s")
    assert pool.standings(1, 2) == [Standing.RELEASED, SPARE]
    # What somebody wants more is not spare.
    pool.say(SessionWord.PAUSED, "t", 2, 3, pause_s=9.0)
    pool.answer(marks=marks(pool, 5, spare=[3]))
    assert pool.standings(2, 3) == [Standing.KEPT] * 2


def test_mark_counts_for_a_chunk_that_the_directory_knows(pool: OwnedPool) -> None:
    known = pool.node.index.listing.number
    pool.store(4)
    pool.answer(marks=marks(pool, 1, spare=[1, 4], known=known))
    assert pool.standings(1, 4) == [SPARE, NORMAL]
    # Another stay of the chunk is another chunk.
    pool.store(1, orders=(0, 1))
    assert pool.standing(1) is NORMAL
    pool.answer(marks=marks(pool, 2, spare=[1], known=known))
    assert pool.standing(1) is NORMAL


def test_marks_are_heard_once_and_in_order_until_all_are_forgotten(pool: OwnedPool) -> None:
    late = marks(pool, 3, spare=[1])
    pool.answer(marks=late)
    pool.answer(marks=marks(pool, 5, kept=[1]))
    assert pool.standing(1) is NORMAL
    pool.answer(marks=late)
    assert pool.standing(1) is NORMAL
    assert pool.answer(marks=marks(pool, 6, spare=[1, 2])).heard == 5
    pool.answer(marks=marks(pool, 7, forget=True))
    assert pool.standings(1, 2, 3) == [NORMAL] * 3
    # No mark of an earlier life of the directory counts.
    pool.answer(marks=marks(pool, 8, spare=[1, 2]))
    pool.answer(life=6, marks=marks(pool, 2, spare=[3]))
    assert pool.report().heard == 2
    assert pool.standings(1, 2) == [NORMAL] * 2


def test_mark_that_was_forgotten_counts_no_more_before_its_turn_comes() -> None:
    pool = OwnedPool(num_slabs=2048)
    pool.hello(slot_bytes={0: PAGE})
    pool.store(*range(8192))
    many = 6000
    for first in range(0, many, 2000):
        pool.answer(marks=marks(pool, first + 1, spare=range(first, first + 2000)))
    pool.answer(marks=marks(pool, many, forget=True))
    assert pool.standing(many - 1) is SPARE
    pool.now += 10
    # What was never marked goes first.
    pool.store(10_000, 10_001)
    assert all(pool.node.index.find(A, key(number)) for number in range(many))
    # A chunk that is found meanwhile is an ordinary one, and one that is marked anew is spare.
    pool.found(many - 1)
    assert pool.standing(many - 1) is NORMAL
    pool.node.index.room.forget_spares()
    seq = pool.node.report().seq
    again = marks(pool, many + 1, spare=[many - 2, many + 7])
    pool.node.answered(ReportAnswer(5, marks=again), pool.now, seq)
    pool.wait(1)
    pool.wait(1)
    spare = {number for number in range(many + 9) if pool.standing(number) is SPARE}
    assert spare == {many - 2, many + 7}
    pool.answer(marks=marks(pool, many + 2, spare=[5]))
    assert pool.standing(5) is SPARE


# Words, namespaces that are left


def test_words_are_heard_once_by_their_numbers(pool: OwnedPool) -> None:
    pool.say(SessionWord.USED, "s", 1)
    pool.say(SessionWord.USED, "t", 2)
    pool.answer(words=[word("s")], words_number=1)
    assert pool.standings(1, 2) == [Standing.RELEASED, NORMAL]
    pool.say(SessionWord.CAME, "s")
    # The first one comes once more, with another.
    pool.answer(words=[word("s"), word("t")], words_number=2)
    assert pool.standings(1, 2) == [NORMAL, Standing.RELEASED]
    assert pool.report().words_heard == 2


def test_chunks_of_a_namespace_that_is_left_are_released_until_it_is_used_again(
    pool: OwnedPool,
) -> None:
    # An engine that is here counts more than what the directory says.
    pool.answer(left=[A, B])
    assert pool.standing(1) is NORMAL
    pool.node.bye(1)
    pool.hello(2, B)
    pool.answer(left=[A])
    assert pool.standings(1, 2, 3) == [Standing.RELEASED] * 3
    # Also what comes.
    record = pool.land(7)
    pool.node.landings.landed(record, ok=True)  # type: ignore[arg-type]
    assert pool.standing(7) is Standing.RELEASED
    pool.hello(1)
    pool.wait(0)
    assert pool.standings(1, 2, 3, 7) == [NORMAL] * 4
    pool.node.bye(1)
    pool.wait(0)
    assert pool.standing(1) is Standing.RELEASED
    pool.answer()
    assert pool.standing(1) is NORMAL


def test_what_is_wanted_of_chunks_of_a_namespace_that_is_left_counts() -> None:
    pool = OwnedPool(pin_share=1.0)
    pool.hello()
    pool.store(1, 2, 3)
    pool.say(SessionWord.USED, "s", 2)
    pool.say(SessionWord.PAUSED, "t", 3, pause_s=500.0)
    pool.node.bye(1)
    pool.answer(left=[A])
    assert pool.standings(1, 2, 3) == [Standing.RELEASED] * 2 + [Standing.KEPT]
