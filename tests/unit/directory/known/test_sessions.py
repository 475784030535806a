"""Words about sessions, from the node that heard them to the others."""

from __future__ import annotations

import pytest

import raykv.directory.known.sessions
from raykv.base.ids import NodeId
from raykv.directory.known.marks import MOST_SHOWN, Numbering
from raykv.directory.known.sessions import MOST_SENT, MOST_WAITING, SessionNodes
from raykv.protocol.columns import Keys
from raykv.protocol.node import SessionsWord
from raykv.protocol.sessions import SessionNews, SessionWord

A, B, C = map(NodeId, "abc")


def word(kind: SessionWord, session: str = "s", namespace: str = "n") -> SessionsWord:
    pause_s = 5.0 if kind is SessionWord.PAUSED else 0.0
    return SessionsWord(namespace, SessionNews(session, kind, pause_s=pause_s))


CAME, USED, PAUSED, OVER = map(word, SessionWord)


@pytest.fixture
def sessions() -> SessionNodes:
    made = SessionNodes(Numbering(100))
    for node_id in (A, B, C):
        made.join(node_id)
    return made


def hear(sessions: SessionNodes, node_id: NodeId) -> list[SessionsWord]:
    words, number = sessions.words(node_id)
    sessions.hear(node_id, number)
    sessions.check()
    return words


def test_session_that_goes_on_elsewhere_is_told_once(sessions: SessionNodes) -> None:
    sessions.take(A, [CAME])
    sessions.take(B, [CAME])
    sessions.take(A, [PAUSED])
    # What was computed before comes late.
    sessions.take(B, [USED])
    sessions.take(C, [CAME])
    sessions.take(B, [CAME])
    assert hear(sessions, A) == [CAME]
    assert hear(sessions, B) == [PAUSED, CAME]
    assert not hear(sessions, C)


def test_word_goes_without_chunks_and_no_unknown_session_ends(
    sessions: SessionNodes,
) -> None:
    sessions.take(A, [CAME])
    unknown = SessionsWord("n", SessionNews("unknown", SessionWord.OVER))
    with_keys = SessionNews("s", SessionWord.PAUSED, Keys.of([b"k"]), 5.0, 3)
    sessions.take(B, [unknown, SessionsWord("n", with_keys)])
    assert hear(sessions, A) == [
        SessionsWord("n", SessionNews("s", SessionWord.PAUSED, Keys(), 5.0, 3))
    ]


def test_words_come_again_with_their_numbers_until_they_are_heard(sessions: SessionNodes) -> None:
    sessions.take(A, [CAME])
    sessions.take(B, [CAME, OVER])
    first, number = sessions.words(A)
    sessions.take(B, [CAME])
    assert sessions.words(A) == (first, number)
    # Neither a number of before nor one of another life is it.
    sessions.hear(A, 0)
    sessions.hear(A, number + 5)
    assert sessions.words(A) == (first, number)
    sessions.hear(A, number)
    second, later = sessions.words(A)
    assert second == [CAME]
    assert later > number
    sessions.hear(A, later)
    # Those of one answer have numbers that follow each other.
    sessions.take(B, [OVER, CAME, OVER])
    words, last = sessions.words(A)
    assert last - len(words) >= later


def test_as_many_words_wait_and_go_at_once(sessions: SessionNodes) -> None:
    sessions.take(A, [CAME])
    for number in range(200):
        sessions.take(B, [CAME, word(SessionWord.PAUSED), OVER][number % 3 :])
    words = [each for _ in range(9) for each in hear(sessions, A)]
    assert len(words) == MOST_WAITING
    assert len(sessions.words(A)[0]) == 0
    sessions.take(B, [OVER] * MOST_SENT * 2)
    assert len(hear(sessions, A)) == MOST_SENT


def test_session_that_was_used_longest_ago_is_forgotten(
    sessions: SessionNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.sessions, "MOST_SESSIONS", 2)
    sessions.take(A, [word(SessionWord.CAME, each) for each in "xyxz"])
    for each in "xyz":
        sessions.take(B, [word(SessionWord.OVER, each)])
    assert hear(sessions, A) == [word(SessionWord.OVER, each) for each in "xz"]


def test_node_that_used_a_session_longest_ago_is_forgotten(
    sessions: SessionNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(raykv.directory.known.sessions, "MOST_NODES", 2)
    for node_id in (A, B, A, C):
        sessions.take(node_id, [USED])
    sessions.take(C, [OVER])
    assert hear(sessions, A) == [OVER]
    assert not hear(sessions, B)


def test_node_that_is_gone_is_told_nothing(sessions: SessionNodes) -> None:
    sessions.take(A, [CAME])
    sessions.take(B, [CAME])
    sessions.lose(B)
    sessions.take(A, [OVER])
    sessions.join(B)
    assert not hear(sessions, B)
    sessions.take(A, [OVER])
    assert hear(sessions, B) == [OVER]


def test_numbers_are_above_what_nodes_show_but_for_nonsense() -> None:
    numbering = Numbering(7)
    numbering.see(3)
    assert numbering.next() == 8
    numbering.see(20)
    assert numbering.next(3) == 23
    numbering.see(MOST_SHOWN + 1)
    assert numbering.next() == 24


def test_operator_tells_all_nodes_that_know_a_session(sessions: SessionNodes) -> None:
    sessions.take(A, [CAME])
    sessions.take(B, [word(SessionWord.CAME, "t"), CAME])
    assert sessions.order("n", OVER.news) == [A, B]
    assert [hear(sessions, each) for each in (A, B, C)] == [[OVER], [OVER], []]
    # A life that does not know it yet can't tell which nodes do.
    unknown = word(SessionWord.OVER, "unknown").news
    assert sessions.order("", unknown) == []
    assert sessions.order("n", unknown) == [A, B, C]
    assert [hear(sessions, each) for each in (A, B, C)] == [[word(SessionWord.OVER, "unknown")]] * 3
    assert sessions.order("", word(SessionWord.OVER, "t").news) == [B]
    assert sessions.order("n", word(SessionWord.OVER, "t").news) == [B]


def test_order_for_a_namespace_is_for_its_parts(sessions: SessionNodes) -> None:
    for node_id, space in ((A, "n/0"), (B, "n/1"), (C, "m")):
        sessions.take(node_id, [SessionsWord(space, CAME.news)])
    assert sessions.order("n", OVER.news) == [A, B]


def test_order_of_a_name_is_for_the_sessions_that_were_used_last(
    sessions: SessionNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node_id, space in ((A, "n"), (B, "m")):
        sessions.take(node_id, [SessionsWord(space, CAME.news)])
    assert sessions.order("m", OVER.news) == [B]
    assert sessions.order("", OVER.news) == [A, B]
    monkeypatch.setattr(raykv.directory.known.sessions, "MOST_ORDERED", 1)
    sessions.take(B, [SessionsWord("m", CAME.news)])
    assert sessions.order("", OVER.news) == [B]
