"""An engine's session: what it tells the view of its own troubles."""

from __future__ import annotations

import time

from raykv.base.deadlines import EXCHANGE_PAUSE_S
from raykv.base.ids import Key
from raykv.engine.requests import RequestOptions
from raykv.engine.session import MAX_INBOX
from raykv.metrics.reach import Reach
from tests.fixtures.engine.scheduler import DEADLINE_S, PlayedScheduler, attached
from tests.fixtures.waiting import wait_until


def test_view_knows_whether_the_scheduler_actor_answers() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=0.02)
    assert not view.remote.is_cut_off
    session.start()
    try:
        scheduler.answers = False
        wait_until(lambda: view.remote.is_cut_off, DEADLINE_S, "the view hears of the failure")
        scheduler.answers = True
        wait_until(lambda: not view.remote.is_cut_off, DEADLINE_S, "the view hears that it is over")
    finally:
        session.stop(DEADLINE_S)


def test_what_requests_want_and_how_long_answers_take_is_told() -> None:
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=0.02)
    first = scheduler.requests[0]
    assert (first.counters["wanted_chunks"], first.wanted_keys.ranks) == (0, b"")
    assert not sum(first.latencies["lookup"].counts)
    view.start_request("r", RequestOptions())
    keys = [Key(bytes([number]) * 32 + bytes(4)) for number in range(5)]
    view.ask("r", keys)
    session.note_wanted(keys)
    session.start()
    try:

        def is_timed() -> bool:
            session.drain()
            return any(each.latencies["lookup"].total for each in scheduler.full[:-2])

        wait_until(is_timed, DEADLINE_S, "the answer was timed, and some exchanges went by")
    finally:
        session.stop(DEADLINE_S)
    told = scheduler.full[1:]
    assert sum(bool(request.asked) for request in told) == 1
    assert sum(told[-1].latencies["lookup"].counts) == 1
    assert told[-1].counters["wanted_chunks"] == 5
    reach = Reach()
    for request in told:
        reach.add(0, request.wanted_keys)
    reach.num_wanted = 5
    assert round(reach.num_distinct) == 5


def test_chunks_that_are_being_stored_are_asked_for_again_long_before_the_next_heartbeat() -> None:
    """Also by an engine that takes the answer when the exchange thread waits for work again."""
    scheduler = PlayedScheduler()
    scheduler.is_being_stored = True
    # Else it asks for leases again and again, and for the chunks with them.
    scheduler.grants = 4
    view, session = attached(scheduler, heartbeat_s=100 * DEADLINE_S)
    assert not view.wants_leases
    view.start_request("r", RequestOptions())
    session.start()
    try:
        view.ask("r", [Key(bytes(36))])
        session.nudge()
        for times in range(1, 21):

            def is_asked(times: int = times) -> bool:
                return sum(bool(request.asked) for request in scheduler.requests) >= times

            wait_until(is_asked, DEADLINE_S, f"it is asked {times} times")
            time.sleep(10 * EXCHANGE_PAUSE_S)
            session.drain()
            session.nudge()
    finally:
        session.stop(DEADLINE_S)
    # Only the first answer wakes up the exchange thread.
    assert sum(not request.asked for request in scheduler.requests) < 10


def test_engine_that_had_nothing_to_do_knows_what_is_so_now() -> None:
    """Its peers came while it read no answers; its first request is to ask them."""
    scheduler = PlayedScheduler()
    scheduler.has_peers = False
    view, session = attached(scheduler, heartbeat_s=0.01)
    session.start()
    try:
        wait_until(
            lambda: any(request.idle for request in scheduler.requests), DEADLINE_S, "it is idle"
        )
        scheduler.has_peers = True
        told = len(scheduler.requests)
        wait_until(lambda: len(scheduler.requests) > told + 2, DEADLINE_S, "it is told")
        assert not view.remote.has_peers
        session.drain()
        assert view.remote.has_peers
    finally:
        session.stop(DEADLINE_S)


def test_engine_that_has_nothing_to_do_hoards_no_answers() -> None:
    """Not after a reset either, which every later answer confirms."""
    scheduler = PlayedScheduler()
    view, session = attached(scheduler, heartbeat_s=0.001)
    view.reset()
    session.start()
    try:
        wait_until(lambda: len(scheduler.requests) > 20, DEADLINE_S, "many heartbeats")
        assert len(session._inbox) <= MAX_INBOX
        assert scheduler.cleared == 1
    finally:
        session.stop(DEADLINE_S)
