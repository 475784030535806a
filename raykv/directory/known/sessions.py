"""Which nodes know a session, and the words about it that one node says to the others; pure.

                 CAME, USED                 PAUSED, OVER
   (unknown) ─────────────► going on ───────────────────────► ended
       ▲                      ▲  │                              │ │
       │                      │  └──── not used for longest ────│─┤
       │                      └───────────── CAME ──────────────┘ │
       └──────────────────────────────────────────────────────────┘

Each arrow between "going on" and "ended" is a word for the other nodes. A session that is paused
or over at one node may go on at another: the last word counts. All of it may be lost or repeated:
that costs an eviction at the wrong time.

Invariants:
1. There are at most `MOST_SESSIONS` sessions with `MOST_NODES` nodes each.
2. At most `MOST_WAITING` words wait for a node; the oldest are lost first.
3. A word has the number with which it was first sent, until the node has heard of it: no node
   takes it twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from raykv.base.ids import Namespace, NodeId, family_of
from raykv.directory.known.marks import Numbering
from raykv.protocol.node import SessionsWord
from raykv.protocol.sessions import SessionNews, SessionWord

MOST_SESSIONS = 4096
MOST_NODES = 16
MOST_WAITING = 256
MOST_SENT = 64
"""Words in one answer."""

MOST_ORDERED = 256
"""Sessions that one order is for: of one name in several namespaces."""


NOBODY = NodeId("")
"""Says what an operator says."""


@dataclass(slots=True)
class _KnownSession:
    """Its nodes, the one that used it longest ago first. `has_ended`: it is paused or over."""

    nodes: dict[NodeId, None] = field(default_factory=dict)
    has_ended: bool = False


@dataclass(slots=True)
class _Words:
    """Words for one node: waiting ones, and those in its answers, with the last one's number."""

    waiting: deque[SessionsWord] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))
    out: list[SessionsWord] = field(default_factory=list)
    number: int = 0


class SessionNodes:
    """See the module's docstring.

    Args:
        numbering: of words; those of an answer follow each other.
    """

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        # The one that was used longest ago comes first.
        self._sessions: dict[tuple[Namespace, str], _KnownSession] = {}
        self._words: dict[NodeId, _Words] = {}

    def join(self, node_id: NodeId) -> None:
        """A node is a member."""
        assert node_id not in self._words, node_id
        self._words[node_id] = _Words()

    def lose(self, node_id: NodeId) -> None:
        """A member is gone."""
        del self._words[node_id]

    def take(self, node_id: NodeId, words: Iterable[SessionsWord]) -> None:
        """A member's engines say something of sessions."""
        for word in words:
            self._take(node_id, word)

    def _take(self, node_id: NodeId, word: SessionsWord) -> None:
        name = Namespace(word.namespace), word.news.session
        session = self._sessions.pop(name, None)
        is_end = word.news.word in (SessionWord.PAUSED, SessionWord.OVER)
        if session is None:
            if is_end:
                return
            session = _KnownSession()
        self._sessions[name] = session
        if not is_end:
            session.nodes.pop(node_id, None)
            session.nodes[node_id] = None
        goes_on = session.has_ended and word.news.word is SessionWord.CAME
        session.has_ended = is_end or (session.has_ended and not goes_on)
        if is_end or goes_on:
            self._hand_on(node_id, word, session)
        self._forget_oldest(session)

    def _hand_on(self, node_id: NodeId, word: SessionsWord, session: _KnownSession) -> None:
        news = word.news
        bare = SessionNews(news.session, news.word, pause_s=news.pause_s, priority=news.priority)
        for other in session.nodes:
            if other != node_id and other in self._words:
                self._words[other].waiting.append(SessionsWord(word.namespace, bare))

    def _forget_oldest(self, session: _KnownSession) -> None:
        if len(session.nodes) > MOST_NODES:
            del session.nodes[next(iter(session.nodes))]
        if len(self._sessions) > MOST_SESSIONS:
            del self._sessions[next(iter(self._sessions))]

    def order(self, namespace: str, news: SessionNews) -> list[NodeId]:
        """An operator says something of a session to all nodes that know it, in a namespace or
        (empty) in all, `MOST_ORDERED` at most; returns those nodes. If no node is known to have the
        session in that namespace, send it to all members: the session may be older than this life.
        """
        names = [
            (space, name)
            for space, name in reversed(self._sessions)
            if name == news.session and namespace in ("", space, family_of(space))
        ][:MOST_ORDERED]
        nodes = {node_id for name in names for node_id in self._sessions[name].nodes}
        for space, _ in names:
            self.take(NOBODY, [SessionsWord(space, news)])
        if namespace and not names:
            nodes = set(self._words)
            for words in self._words.values():
                words.waiting.append(SessionsWord(namespace, news))
        return sorted(nodes)

    def __len__(self) -> int:
        return len(self._sessions)

    def words(self, node_id: NodeId) -> tuple[list[SessionsWord], int]:
        """What an answer says to a member, and the number of its last word."""
        words = self._words[node_id]
        if not words.out and words.waiting:
            count = min(MOST_SENT, len(words.waiting))
            words.out = [words.waiting.popleft() for _ in range(count)]
            words.number = self._numbering.next(count)
        return words.out, words.number if words.out else 0

    def hear(self, node_id: NodeId, number: int) -> None:
        """A member shows the number of the last word that it has taken."""
        words = self._words[node_id]
        if number == words.number:
            words.out = []

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self._sessions) <= MOST_SESSIONS, len(self._sessions)
        assert all(0 < len(each.nodes) <= MOST_NODES for each in self._sessions.values())
        assert all(len(each.out) <= MOST_SENT for each in self._words.values())
