"""Sessions of requests, as far as this node has heard of them, and what they claim of its chunks.

            CAME, USED            PAUSED                its time is over
   (none) ────────────► active ────────────► paused ─────────────────────► given up
     ▲                   │  ▲ ▲      CAME      │                              │
     │                   │  │ └────────────────┴──────────────────────────────┤
     │              OVER │  └────── CAME ──────┐                              │
     │                   └───────────────────► over ◄─────────────────────────┘ OVER
     └── any: it is the one that was used longest ago, and there is no room

A client names the session of a request. What a session that is active has used is its own, so that
what several have used is known. Chunks of one that pauses are kept; those of one that is over, or
given up, are released. A chunk that another session stores again is not released any more.

All of it may be lost or wrong: that costs an eviction at the wrong time, and no more.

Invariants:
1. There are at most `MOST_SESSIONS` sessions, of `MOST_KEYS` chunks each.
2. All claims of a session are as its stage says, but for chunks that were found since it ended.
3. Exactly the sessions that pause have a time at which that is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf

from raykv.base.ids import Key, Namespace
from raykv.node.pool.claims import Claims, Name, Owner, OwnerKind
from raykv.node.pool.records import Standing
from raykv.protocol.node import SessionsWord
from raykv.protocol.sessions import SessionNews, SessionStage, SessionWord

MOST_SESSIONS = 4096
MOST_KEYS = 16_384
"""Chunks of one session."""


@dataclass(slots=True)
class LocalSession:
    """`standing`: of its chunks. `until`: of its latest pause, of `pause_s`, else infinite.
    `used_at`: the number of the node's request that used it last.
    """

    owner: Owner
    stage: SessionStage = SessionStage.ACTIVE
    standing: Standing = Standing.NORMAL
    until: float = inf
    pause_s: float = 0.0
    used_at: float = 0.0
    num_requests: int = 0


class LocalSessions:
    """See the module's docstring.

    Args:
        claims: of the pool.
    """

    def __init__(self, claims: Claims) -> None:
        self._claims = claims
        # The one that was used longest ago comes first.
        self._sessions: dict[tuple[Namespace, str], LocalSession] = {}

    def take(self, namespace: Namespace, news: Iterable[SessionNews], now: float) -> None:
        """What requests of an engine say of their sessions, in order."""
        for each in news:
            session = self._use((namespace, each.session))
            session.used_at = now
            session.num_requests += each.word is SessionWord.CAME
            self._add(session, [(namespace, Key(key)) for key in each.keys])
            self._hear(namespace, each, now)

    def hear(self, word: SessionsWord, now: float) -> None:
        """What was said of a session at another node; nothing if it is not known here."""
        if (Namespace(word.namespace), word.news.session) in self._sessions:
            self._hear(Namespace(word.namespace), word.news, now)

    def _hear(self, namespace: Namespace, news: SessionNews, now: float) -> None:
        name = namespace, news.session
        match news.word:
            case SessionWord.CAME:
                self._become(name, SessionStage.ACTIVE, Standing.NORMAL)
            case SessionWord.PAUSED:
                self._sessions[name].pause_s = news.pause_s
                standing = Standing.kept(news.priority or 1)
                self._become(name, SessionStage.PAUSED, standing, now + news.pause_s)
            case SessionWord.OVER:
                self._become(name, SessionStage.OVER, Standing.RELEASED)
            case SessionWord.USED:
                pass

    def _use(self, name: tuple[Namespace, str]) -> LocalSession:
        """The session, which is the most recently used one now."""
        session = self._sessions.pop(name, None)
        if session is None:
            session = LocalSession(Owner(OwnerKind.SESSION, "\n".join(name)))
        self._sessions[name] = session
        if len(self._sessions) > MOST_SESSIONS:
            self._forget_oldest()
        return session

    def _forget_oldest(self) -> None:
        name = next(iter(self._sessions))
        self._claims.end(self._sessions.pop(name).owner)

    def _add(self, session: LocalSession, names: Iterable[Name]) -> None:
        """It has used chunks; of very many, the first ones are remembered."""
        own = self._claims.names_of(session.owner)
        new = [name for name in dict.fromkeys(names) if name not in own]
        new = list(islice(new, max(0, MOST_KEYS - len(own))))
        while self._claims.num_free(OwnerKind.SESSION) < len(new) and len(self._sessions) > 1:
            self._forget_oldest()
        if new:
            self._claims.claim(session.owner, new, session.standing, session.until)

    def _become(
        self,
        name: tuple[Namespace, str],
        stage: SessionStage,
        standing: Standing,
        until: float = inf,
    ) -> None:
        """A session is in another stage. What is released once is not released again."""
        session = self._sessions[name]
        is_same = (standing, until) == (session.standing, session.until)
        session.stage, session.standing, session.until = stage, standing, until
        if not is_same:
            names = list(self._claims.names_of(session.owner))
            self._claims.claim(session.owner, names, standing, until)

    def expire(self, now: float) -> None:
        """Give up the sessions that were to go on by now; before claims of that time end."""
        for name, session in self._sessions.items():
            if session.until <= now:
                self._become(name, SessionStage.GIVEN_UP, Standing.RELEASED)

    def released(self, chunk: Name) -> str:
        """By which session that was over a chunk was released, as the end of a sentence; empty: by
        none that is known.
        """
        for owner in self._claims.claims_on(chunk):
            namespace, _, session = owner.name.partition("\n")
            known = self._sessions.get((Namespace(namespace), session))
            if owner.kind is not OwnerKind.SESSION or known is None:
                continue
            if known.stage is SessionStage.OVER:
                return f"released: its session {session!r} was over"
            if known.stage is SessionStage.GIVEN_UP:
                pause = f"kept for the pause of its session {session!r}, {known.pause_s:g} s"
                return f"{pause}, and released when that was over"
        return ""

    def num_private(self, session: LocalSession) -> int:
        """Chunks of a session that no other one has."""
        kinds = (
            [owner.kind for owner in self._claims.claims_on(name)]
            for name in self._claims.names_of(session.owner)
        )
        return sum(each.count(OwnerKind.SESSION) == 1 for each in kinds)

    def pausing(self) -> list[Owner]:
        """Sessions that are to go on."""
        return [each.owner for each in self._sessions.values() if each.until < inf]

    def keys_of(self, session: LocalSession) -> list[Key]:
        """The chunks of a session, from heads of prompts to tails."""
        return [key for _, key in self._claims.names_of(session.owner)]

    def latest(self) -> Iterator[tuple[Namespace, str, LocalSession]]:
        """All sessions, the most recently used one first. Not valid after a change."""
        for (namespace, name), session in reversed(self._sessions.items()):
            yield namespace, name, session

    def __len__(self) -> int:
        return len(self._sessions)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert len(self) <= MOST_SESSIONS, len(self)
        for session in self._sessions.values():
            own = self._claims.names_of(session.owner)
            assert len(own) <= MOST_KEYS, session
            is_pausing = session.stage is SessionStage.PAUSED
            assert is_pausing == (session.until < inf), session
            for chunk in own:
                claim = self._claims.claims_on(chunk).get(session.owner)
                assert claim is not None, chunk
                assert claim.until == session.until, (claim, session)
                if claim.standing is not session.standing:
                    assert session.standing is Standing.RELEASED, (claim, session)
                    assert claim.standing is Standing.NORMAL, (claim, session)
