"""A session as several nodes know it."""

from __future__ import annotations

from functools import partial

import msgspec
import pytest

from raykv.base.errors import ClusterError, NotFoundError
from raykv.client.sessions import ClientSession, found_sessions
from raykv.protocol.columns import Source, SourceKind
from raykv.protocol.framing import decode, encode
from raykv.protocol.sessions import (
    SessionAnswer,
    SessionNews,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionStage,
    SessionStatus,
    SessionWord,
)
from tests.fixtures.keys import numbered_key as key
from tests.fixtures.played_cluster import Methods, play, silent, status, where_page

PAGE = 2


def known(node_id: str, idle_s: float, session: str = "agent", space: str = "ns") -> SessionStatus:
    return SessionStatus(session, space, SessionStage.ACTIVE, node_id, 3, 1, 2, idle_s)


class PlayedSessions:
    """Nodes that know sessions; the one that is asked for keys has three."""

    def __init__(self, patches: pytest.MonkeyPatch, *sessions: SessionStatus) -> None:
        self.sessions = list(sessions)
        self.orders: list[SessionOrder] = []
        self.nodes: dict[str, Methods] = {
            each.node_id: {"sessions": partial(self._page, each.node_id)} for each in sessions
        }
        one, two = Source("one"), Source("two", SourceKind.DISK)
        places = {key(0): [one], key(1): [one, two]}
        methods: Methods = {
            "where": lambda raw: where_page(raw, places),
            "order_session": self._order,
            "status": lambda: encode(status()),
        }
        self.scheduler = play(patches, methods, self.nodes)

    def _page(self, node_id: str, raw: bytes) -> bytes:
        query = decode(raw, SessionQuery)
        found = [
            each
            for each in self.sessions
            if each.node_id == node_id and query.session in ("", each.session)
        ]
        last = min(3, query.first + PAGE) if query.session else 0
        keys: list[bytes] = [key(at) for at in range(query.first, last)]
        return encode(SessionPage(found, keys))

    def _order(self, raw: bytes) -> bytes:
        order = decode(raw, SessionOrder)
        self.orders.append(order)
        self.sessions = [
            msgspec.structs.replace(each, stage=SessionStage.OVER) for each in self.sessions
        ]
        return encode(SessionAnswer(["one"]))

    def session(self, name: str = "agent") -> ClientSession:
        return ClientSession(name, "", self.scheduler)


def test_session_is_told_by_the_node_that_used_it_last(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedSessions(monkeypatch, known("one", 9.0), known("two", 1.0))
    told = played.session().status()
    assert (told.node_id, told.idle_s, told.requests) == ("two", 1.0, 4)
    assert (told.in_pools, told.on_disks) == ({"one": 2}, {"two": 1})
    assert played.session().keys() == [key(at) for at in range(3)]


def test_sessions_of_all_nodes_come_once_the_latest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    played = PlayedSessions(
        monkeypatch, known("one", 9.0), known("two", 5.0), known("one", 7.0, "other")
    )
    assert [(each.session, each.node_id) for each in found_sessions(played.scheduler, "")] == [
        ("agent", "two"),
        ("other", "one"),
    ]


def test_parts_of_an_engine_are_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its places has counted the engine's requests."""
    played = PlayedSessions(
        monkeypatch, known("one", 9.0, space="ns/0.0.a"), known("two", 5.0, space="ns/0.1.a")
    )
    (told,) = found_sessions(played.scheduler, "")
    assert (told.namespace, told.node_id, told.requests) == ("ns", "two", 2)


def test_order_waits_until_it_is_heard_and_a_silent_node_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = PlayedSessions(monkeypatch, known("one", 9.0))
    asked: list[str] = []
    played.nodes["two"] = {"sessions": silent(asked)}
    assert played.session().over().stage == SessionStage.OVER
    (order,) = played.orders
    assert (order.namespace, order.news) == ("ns", SessionNews("agent", SessionWord.OVER))
    assert len(asked) == 1
    assert "without node two" in caplog.text


def test_session_that_is_not_there_or_in_two_namespaces_is_said_to_be_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played = PlayedSessions(monkeypatch, known("one", 9.0), known("two", 5.0, space="other"))
    with pytest.raises(NotFoundError, match="no session 'nobody'"):
        played.session("nobody").status()
    with pytest.raises(ClusterError, match="in several namespaces: other, ns"):
        played.session().status()
