"""Sessions, by example: through the block manager, with either table of chunks."""

from __future__ import annotations

import pytest

import raykv.directory.sessions
from raykv.base.ids import MissReason
from raykv.directory.sessions import LATE_S
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Hints, MissRecord
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.sessions import (
    SessionOrder,
    SessionQuery,
    SessionStage,
    SessionStatus,
    SessionWord,
)
from tests.fixtures.directory.pinned import LINGER_S, SPACE, Cluster, key

CAME, USED, PAUSED, OVER = SessionWord

pytestmark = pytest.mark.usefixtures("table")


@pytest.fixture
def one() -> Cluster:
    made = Cluster()
    made.add("a")
    return made


def status(cluster: Cluster, session: str) -> SessionStatus:
    query = SessionQuery(PROTOCOL_VERSION, SPACE, session)
    (found,) = cluster.manager.sessions.page(query, cluster.now).sessions
    return found


def why(cluster: Cluster, number: int) -> str:
    """What is said of a request that missed a chunk."""
    missed = {str(MissReason.EVICTED): 16}
    record = MissRecord("request", 16, 0, 0, missed, missing=key(number))
    cluster.sync("a", finished=[record])
    return cluster.manager.why_miss("request", cluster.now).found[0].hint


def flood(cluster: Cluster, count: int, first: int = 100) -> None:
    assert cluster.store("a", *range(first, first + count)) == count


# Over


def test_session_that_is_over_is_evicted_before_all_others(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "done", OVER, 5, 6, 7)
    flood(one, 3)
    assert one.held("a", *range(8)) == [0, 1, 2, 3, 4]


def test_end_of_a_prefix_is_evicted_before_its_beginning(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "done", OVER, 5, 6, 7)
    flood(one, 2)
    assert one.held("a", 5, 6, 7) == [5]


def test_what_another_session_has_used_stays(one: Cluster) -> None:
    one.store("a", *reversed(range(8)))
    one.say("a", "other", USED, 5)
    one.say("a", "done", OVER, 5, 6, 7)
    flood(one, 4)
    assert one.held("a", *range(8)) == [2, 3, 4, 5]


def test_what_an_earlier_session_has_used_stays_though_it_is_over(one: Cluster) -> None:
    """The beginning that all have in common must not go with each of them."""
    one.store("a", *range(8))
    one.say("a", "first", OVER, 5, 6)
    one.say("a", "second", OVER, 5, 7)
    flood(one, 3)
    assert one.held("a", 5, 6, 7) == [5]


def test_session_of_another_namespace_does_not_matter(one: Cluster) -> None:
    one.store("a", *reversed(range(8)))
    one.say("a", "done", USED, 6, 7)
    order = SessionOrder(PROTOCOL_VERSION, "another", "done", OVER)
    assert one.manager.sessions.order(order, one.now).session is None
    flood(one, 2)
    assert one.held("a", 6, 7) == [6, 7]


def test_chunk_that_comes_after_the_end_of_its_session_is_released_too(one: Cluster) -> None:
    """Stores end after the request that computed the chunks."""
    one.store("a", *range(6))
    one.say("a", "done", OVER, 6, 7)
    one.store("a", 6, 7)
    flood(one, 2)
    assert one.held("a", *range(8)) == list(range(6))


def test_chunk_that_comes_long_after_the_end_is_anothers(one: Cluster) -> None:
    one.store("a", *range(6))
    one.say("a", "done", OVER, 6, 7)
    one.wait(LATE_S + 1)
    one.store("a", 6, 7)
    flood(one, 2)
    assert one.held("a", 6, 7) == [6, 7]


def test_chunk_that_was_evicted_and_comes_again_is_anothers(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "done", OVER, 7)
    flood(one, 1)
    assert not one.held("a", 7)
    one.store("a", 7)
    flood(one, 3, first=200)
    assert one.held("a", 7)


def test_session_that_comes_back_after_its_end_goes_on(one: Cluster) -> None:
    one.store("a", *range(6))
    one.say("a", "done", OVER, 6)
    one.say("a", "done", CAME)
    assert status(one, "done").stage is SessionStage.ACTIVE
    one.store("a", 6, 7)
    flood(one, 2)
    assert one.held("a", 6) == [6]


def test_chunks_that_are_told_after_the_end_are_released(one: Cluster) -> None:
    """An operator has ended the session while its last request was running."""
    one.store("a", *range(8))
    one.say("a", "done", USED, 6)
    order = SessionOrder(PROTOCOL_VERSION, SPACE, "done", OVER)
    answer = one.manager.sessions.order(order, one.now)
    assert answer.session is not None
    assert answer.session.stage is SessionStage.OVER
    one.say("a", "done", USED, 7)
    flood(one, 2)
    assert one.held("a", 6, 7) == []


def test_firm_pin_outlives_the_end_of_a_session(one: Cluster) -> None:
    one.store("a", *range(8))
    one.pin(7)
    one.say("a", "done", OVER, 6, 7)
    flood(one, 3)
    assert one.held("a", 6, 7) == [7]


def test_priority_of_a_request_ends_with_its_session(one: Cluster) -> None:
    one.store("a", *range(8))
    one.sync("a", hints=Hints(favoured=Keys.of([key(6), key(7)]), priorities=[9, 9]))
    one.say("a", "done", OVER, 6, 7)
    assert one.manager.pins.pinned(one.now).client_chunks == 0
    flood(one, 2)
    assert one.held("a", 6, 7) == []


# Pauses


def test_session_that_pauses_outlives_a_flood(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", PAUSED, 0, 1, pause_s=20)
    for start in range(100, 130, 5):
        flood(one, 5, start)
    assert one.held("a", 0, 1) == [0, 1]


def test_session_that_does_not_come_back_is_given_up_after_its_pause(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", PAUSED, 6, 7, pause_s=20)
    one.wait(19.9)
    assert status(one, "agent").stage is SessionStage.PAUSED
    one.wait(0.1)
    assert status(one, "agent").stage is SessionStage.GIVEN_UP
    flood(one, 2)
    assert one.held("a", *range(8)) == list(range(6))


def test_session_that_comes_back_in_time_is_not_given_up(one: Cluster) -> None:
    one.store("a", *reversed(range(8)))
    one.say("a", "agent", PAUSED, 6, 7, pause_s=20)
    one.wait(10)
    one.say("a", "agent", CAME)
    assert one.manager.pins.pinned(one.now).client_chunks == 0
    one.wait(10 + LINGER_S)
    flood(one, 3)
    assert status(one, "agent").stage is SessionStage.ACTIVE
    assert one.held("a", *range(8)) == [3, 4, 5, 6, 7]


def test_paused_chunks_take_no_more_than_the_share_of_requests(one: Cluster) -> None:
    """Pins may take half of eight slots, those of requests half of that."""
    one.store("a", *range(8))
    one.say("a", "agent", PAUSED, 0, 1, 2, pause_s=20)
    flood(one, 6)
    assert one.held("a", 0, 1, 2) == [0, 1]


def test_paused_chunks_give_way_when_nothing_else_is_left(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", PAUSED, 0, 1, pause_s=20)
    flood(one, 8)
    assert one.held("a", 0, 1) == []


def test_end_during_a_pause_releases_at_once(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", PAUSED, 6, 7, pause_s=20)
    one.say("a", "agent", OVER)
    assert one.manager.pins.pinned(one.now).client_chunks == 0
    flood(one, 2)
    assert one.held("a", 6, 7) == []


def test_operator_pauses_a_session(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", USED, 0, 1)
    order = SessionOrder(PROTOCOL_VERSION, SPACE, "agent", PAUSED, 20.0)
    answer = one.manager.sessions.order(order, one.now)
    assert answer.session is not None
    assert (answer.session.stage, answer.session.left_s) == (SessionStage.PAUSED, 20.0)
    flood(one, 6)
    assert one.held("a", 0, 1) == [0, 1]


# Why


def test_why_miss_names_the_session_that_was_over(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", OVER, 7)
    flood(one, 2)
    assert why(one, 7) == "released: its session 'agent' was over"
    assert why(one, 0) == ""


def test_why_miss_names_the_pause_that_was_over(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", PAUSED, 7, pause_s=20)
    one.wait(20)
    flood(one, 1)
    said = why(one, 7)
    assert said.startswith("kept for the pause of its session 'agent', 20 s, and released")


def test_why_miss_forgets_the_hint_once_the_chunk_is_evicted_without_one(one: Cluster) -> None:
    one.store("a", *range(8))
    one.say("a", "agent", OVER, 7)
    flood(one, 1)
    one.store("a", 7)
    flood(one, 8, first=200)
    assert why(one, 7) == ""


# Bounds, and looking


def test_session_that_was_used_longest_ago_is_forgotten(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.sessions, "MAX_SESSIONS", 2)
    for number, name in enumerate(("x", "y", "x", "z")):
        one.say("a", name, USED, number)
    listed = one.manager.sessions.page(SessionQuery(PROTOCOL_VERSION), one.now).sessions
    assert [each.session for each in listed] == ["z", "x"]
    assert [each.chunks for each in listed] == [1, 2]


def test_oldest_sessions_make_room_for_the_chunks_of_new_ones(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.sessions, "MAX_KEYS_ALL", 5)
    monkeypatch.setattr(raykv.directory.sessions, "MAX_KEYS_EACH", 4)
    one.say("a", "x", USED, 0, 1)
    one.say("a", "y", USED, 1, 2)
    one.say("a", "z", USED, 3, 4, 5, 6, 7)
    listed = one.manager.sessions.page(SessionQuery(PROTOCOL_VERSION), one.now).sessions
    assert [(each.session, each.chunks) for each in listed] == [("z", 4)]


def test_status_says_where_the_chunks_are(one: Cluster) -> None:
    one.add("b")
    one.store("a", 0, 1, 2)
    one.store("b", 2)
    one.say("a", "agent", CAME)
    one.say("a", "agent", USED, 0, 1, 2, 3)
    one.say("b", "other", USED, 2)
    one.now += 5
    found = status(one, "agent")
    assert (found.chunks, found.private_chunks, found.requests) == (4, 3, 1)
    assert (found.in_pools, found.node_id, found.idle_s) == ({"a": 3, "b": 1}, "a", 5.0)


def test_page_of_a_session_has_its_keys_in_order(
    one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.sessions, "MAX_KEYS", 4)
    one.say("a", "agent", USED, 3, 1, 2)
    first = one.manager.sessions.page(SessionQuery(PROTOCOL_VERSION, "", "agent"), one.now)
    query = SessionQuery(PROTOCOL_VERSION, "", "agent", first=2)
    assert first.keys == [key(3), key(1)]
    assert one.manager.sessions.page(query, one.now).keys == [key(2)]


def test_metrics_count_sessions_by_stage_and_chunks_that_were_released(one: Cluster) -> None:
    one.store("a", *range(4))
    one.say("a", "x", OVER, 0, 1)
    one.say("a", "x", USED, 1, 2)
    one.say("a", "y", PAUSED, 3, pause_s=5)
    stages, released = one.manager.sessions.families()
    assert {row.labels[0]: row.value for row in stages.rows} == {
        "active": 0,
        "paused": 1,
        "given up": 0,
        "over": 1,
    }
    assert [row.value for row in released.rows] == [3]
