"""What sessions claim of a node's chunks."""

from __future__ import annotations

import pytest

from raykv.base.ids import Refusal
from raykv.node.pool import sessions as module
from raykv.node.pool.claims import MOST_CLAIMS, Claims, OwnerKind
from raykv.node.pool.records import Standing
from raykv.node.pool.sessions import MOST_KEYS, LocalSessions
from raykv.protocol.columns import Keys
from raykv.protocol.node import SessionsWord
from raykv.protocol.sessions import SessionNews, SessionStage, SessionWord
from tests.fixtures.node.owned_pool import A, B, OwnedPool, key

CAME, USED, PAUSED, OVER = SessionWord


def stage_of(sessions: LocalSessions, name: str) -> SessionStage | None:
    """Where a session of namespace A is; None: it is not known."""
    found = {(space, each): session.stage for space, each, session in sessions.latest()}
    return found.get((A, name))


@pytest.fixture
def pool(pool: OwnedPool) -> OwnedPool:
    pool.store(1, 2, 3)
    return pool


def test_chunks_of_a_session_go_first_once_it_is_over_unless_it_goes_on(pool: OwnedPool) -> None:
    pool.say(CAME, "s")
    pool.say(USED, "s", 1, 2)
    assert pool.standings(1, 2, 3) == [Standing.NORMAL] * 3
    pool.say(OVER, "s")
    assert pool.standings(1, 2, 3) == [Standing.RELEASED] * 2 + [Standing.NORMAL]
    # The tail of its prompt before its head.
    pool.store(*range(10, 24))
    assert pool.held()[:2] == [1, 3]
    pool.say(CAME, "s")
    assert pool.standing(1) is Standing.NORMAL


def test_chunks_of_a_session_that_pauses_are_kept_until_that_is_over(pool: OwnedPool) -> None:
    pool.say(USED, "s", 1, 2)
    pool.say(PAUSED, "s", 3, pause_s=20.0)
    # Requests may keep two of sixteen chunks.
    assert pool.standings(1, 2, 3) == [Standing.KEPT] * 2 + [Standing.NORMAL]
    pool.wait(19)
    assert pool.standing(1) is Standing.KEPT
    pool.wait(1)
    assert pool.standings(1, 2, 3) == [Standing.RELEASED] * 3
    assert stage_of(pool.node.sessions, "s") is SessionStage.GIVEN_UP
    # One that goes on in time is not given up.
    pool.say(PAUSED, "s", pause_s=20.0)
    pool.say(CAME, "s")
    pool.wait(25)
    assert pool.standing(1) is Standing.NORMAL


def test_pause_has_the_priority_that_was_said(pool: OwnedPool) -> None:
    pool.say(USED, "s", 1)
    pool.say(PAUSED, "s", pause_s=20.0, priority=4)
    assert pool.standing(1) is Standing.KEPT_4
    pool.say(PAUSED, "s", pause_s=20.0, priority=2)
    pool.say(USED, "s", 2)
    assert pool.standings(1, 2) == [Standing.KEPT_2] * 2


def test_chunk_of_two_sessions_stays_when_both_are_over(pool: OwnedPool) -> None:
    pool.say(USED, "s", 1, 2)
    pool.say(USED, "t", 1, 3)
    pool.say(OVER, "s")
    pool.say(OVER, "t")
    assert pool.standings(1, 2, 3) == [Standing.NORMAL, Standing.RELEASED, Standing.RELEASED]


def test_last_store_of_a_session_that_is_over_is_released(pool: OwnedPool) -> None:
    pool.say(USED, "s", 1)
    pool.say(OVER, "s")
    pool.say(USED, "s", 7)
    pool.store(7)
    assert pool.standings(1, 7) == [Standing.RELEASED] * 2


def test_chunk_that_is_stored_offered_or_found_again_is_not_released(pool: OwnedPool) -> None:
    pool.store(4)
    pool.say(USED, "s", 1, 2, 3, 4)
    pool.say(OVER, "s")
    pool.store(1)
    pool.found(2)
    # One that takes its place.
    pool.store(3, orders=(0, 1))
    wanted = [Standing.NORMAL] * 3 + [Standing.RELEASED]
    assert pool.standings(1, 2, 3, 4) == wanted
    # Nor if it is said once more that the session is over.
    pool.say(OVER, "s")
    assert pool.standings(1, 2, 3, 4) == wanted
    pool.store(*range(10, 23))
    assert 4 not in pool.held()
    assert pool.store(4) == [Refusal.NONE]
    assert pool.standing(4) is Standing.NORMAL


def test_session_of_another_namespace_is_another_one(pool: OwnedPool) -> None:
    pool.say(USED, "s", 1)
    pool.tell(namespace=B, sessions=[SessionNews("s", OVER)])
    assert pool.standing(1) is Standing.NORMAL


def test_words_of_other_nodes_are_about_sessions_that_are_known(pool: OwnedPool) -> None:
    sessions = pool.node.sessions
    pool.say(USED, "s", 1)
    for name in ("s", "t"):
        sessions.hear(SessionsWord(A, SessionNews(name, OVER, Keys.of([key(2)]))), pool.now)
    assert pool.standings(1, 2) == [Standing.RELEASED, Standing.NORMAL]
    assert len(sessions) == 1
    sessions.hear(SessionsWord(A, SessionNews("s", CAME)), pool.now)
    assert pool.standing(1) is Standing.NORMAL
    sessions.hear(SessionsWord(A, SessionNews("s", PAUSED, pause_s=9.0)), pool.now)
    assert pool.standing(1) is Standing.KEPT
    pool.node.check()


class BareSessions:
    """Sessions without a pool."""

    def __init__(self) -> None:
        self.claims = Claims(1 << 30, lambda *_: None, lambda *_: None)
        self.sessions = LocalSessions(self.claims)

    def use(self, session: str, first: int, count: int) -> None:
        keys = Keys.of(map(key, range(first, first + count)))
        self.sessions.take(A, [SessionNews(session, USED, keys)], 0.0)
        self.sessions.check()

    def num_claimed(self) -> int:
        return MOST_CLAIMS[OwnerKind.SESSION] - self.claims.num_free(OwnerKind.SESSION)


def test_chunks_of_a_session_are_bounded_and_its_first_ones_remembered() -> None:
    bare = BareSessions()
    bare.use("s", 0, MOST_KEYS - 1)
    bare.use("s", 0, MOST_KEYS + 5)
    assert bare.num_claimed() == MOST_KEYS


def test_session_that_was_used_longest_ago_is_forgotten_for_the_chunks_of_others() -> None:
    bare = BareSessions()
    for number in range(MOST_CLAIMS[OwnerKind.SESSION] // MOST_KEYS):
        bare.use(f"s{number}", number * MOST_KEYS, MOST_KEYS)
    bare.use("s0", 0, 1)
    bare.use("new", 10_000_000, 10)
    assert stage_of(bare.sessions, "s1") is None
    assert stage_of(bare.sessions, "s0") is SessionStage.ACTIVE
    assert bare.num_claimed() == MOST_CLAIMS[OwnerKind.SESSION] - MOST_KEYS + 10


def test_number_of_sessions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SESSIONS", 3)
    bare = BareSessions()
    for name in "abcad":
        bare.use(name, ord(name), 1)
    assert [stage_of(bare.sessions, name) is not None for name in "abcd"] == [1, 0, 1, 1]
    assert bare.num_claimed() == 3
