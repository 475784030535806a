"""Sessions of requests: the chunks that each has used, and what becomes of them when it ends.

            CAME, USED            PAUSED                its time is over
   (none) ────────────► active ────────────► paused ─────────────────────► given up
     ▲                   │  ▲ ▲      CAME      │                              │
     │                   │  │ └────────────────┴──────────────────────────────┤
     │              OVER │  └────── CAME ──────┐                              │
     │                   └───────────────────► over ◄─────────────────────────┘ OVER
     └── any: it is the one that was used longest ago, and there is no room

A client names the session of a request. Of one that pauses, all chunks are kept by preference, like
those of a priority, and within the same share of the pools. One that is over, or given up, has its
private chunks released: they are the next to be evicted. What other sessions have used stays, also
if they are over: the next one may begin with it.

All of it may be lost or wrong: that costs an eviction at the wrong time, and no more. Nothing of it
outlives the scheduler actor.

Invariants:
1. A chunk counts as one of as many sessions as have it.
2. There are at most `MAX_SESSIONS` sessions, of `MAX_KEYS_EACH` chunks each, `MAX_KEYS_ALL` in all.
3. A chunk that is listed as released is of one session only, which is over or given up.
4. Exactly the sessions that pause have a time at which that is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from raykv.base.departures import Departures
from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.disks import Disks
from raykv.directory.members import Node
from raykv.directory.pins import Pins
from raykv.directory.table.protocol import Changes, ChunkTable, Name
from raykv.metrics.table import number, numbers
from raykv.protocol.columns import MAX_KEYS
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.measures import MetricFamily
from raykv.protocol.sessions import (
    MAX_SESSIONS_LISTED,
    SessionAnswer,
    SessionNews,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionStage,
    SessionStatus,
    SessionWord,
)

MAX_SESSIONS = 4096
MAX_KEYS_EACH = 16_384
MAX_KEYS_ALL = 262_144
"""Some 60 MiB of the scheduler actor's memory."""

PAUSE_PRIORITY = 1
"""Of the chunks of a session that pauses and says no other."""

LATE_S = 60.0
"""Chunks of a session that is over are released for so long as they come: the stores of its last
request end after it."""

_MAX_FOUND = 65_536
"""Replicas that are looked for in one go."""

SessionName = tuple[Namespace, str]


@dataclass(slots=True)
class _Session:
    """`until`: of its pause, or None. `pause_s` is how long the latest one was meant to be."""

    node_id: NodeId
    used_at: float
    stage: SessionStage = SessionStage.ACTIVE
    keys: dict[Key, None] = field(default_factory=dict)
    num_requests: int = 0
    until: float | None = None
    pause_s: float = 0.0
    ended_at: float = float("-inf")

    @property
    def has_ended(self) -> bool:
        return self.stage in (SessionStage.OVER, SessionStage.GIVEN_UP)


class Sessions:
    """See the module's docstring.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        table: of all their chunks.
        disks: what they have on disks, for people.
        pins: keep the chunks of sessions that pause.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        table: Callable[[], ChunkTable],
        disks: Disks,
        pins: Pins,
    ) -> None:
        self._nodes = nodes
        self._table = table
        self._disks = disks
        self._pins = pins
        # The one that was used longest ago comes first.
        self._sessions: dict[SessionName, _Session] = {}
        self._users: Counter[Name] = Counter()
        self._released: dict[Name, SessionName] = {}
        self._paused: dict[SessionName, float] = {}
        self._num_keys = 0
        self._num_released = 0
        # What a hint did to a chunk that was evicted: (namespace, sentence); None: nothing.
        self._evicted: Departures[tuple[Namespace, str] | None] = Departures()
        self._now = float("-inf")

    # News

    def take(
        self, namespace: Namespace, node_id: NodeId, news: Iterable[SessionNews], now: float
    ) -> None:
        """What requests of an engine say of their sessions, in order."""
        self._now = now
        for each in news:
            name = (namespace, each.session)
            session = self._use(name, node_id)
            self._add(name, session, map(Key, each.keys))
            match each.word:
                case SessionWord.CAME:
                    self._go_on(name, session)
                case SessionWord.PAUSED:
                    self._pause(name, session, each.pause_s, each.priority)
                case SessionWord.OVER:
                    self._end(name, session, SessionStage.OVER)
                case SessionWord.USED if session.has_ended:
                    self._end(name, session, session.stage)
                case SessionWord.USED:
                    pass

    def order(self, order: SessionOrder, now: float) -> SessionAnswer:
        """An operator says that a session pauses or is over; nothing if it is not known."""
        self._now = now
        name = (Namespace(order.namespace), order.session)
        session = self._sessions.get(name)
        if session is None:
            return SessionAnswer(PROTOCOL_VERSION)
        if order.word is SessionWord.OVER:
            self._end(name, session, SessionStage.OVER)
        else:
            self._pause(name, session, order.pause_s, order.priority)
        return SessionAnswer(PROTOCOL_VERSION, self._status(name, session))

    def _use(self, name: SessionName, node_id: NodeId) -> _Session:
        """The session, which is the most recently used one now."""
        session = self._sessions.pop(name, None) or _Session(node_id, self._now)
        session.node_id, session.used_at = node_id, self._now
        if len(self._sessions) >= MAX_SESSIONS:
            self._forget_oldest()
        self._sessions[name] = session
        return session

    def _add(self, name: SessionName, session: _Session, keys: Iterable[Key]) -> None:
        """A session has used chunks; of very many, the first ones are remembered."""
        new = []
        for key in keys:
            if key in session.keys or len(session.keys) >= MAX_KEYS_EACH:
                continue
            session.keys[key] = None
            new.append(key)
            self._users[name[0], key] += 1
            self._num_keys += 1
        self._take_back(name[0], new)
        while self._num_keys > MAX_KEYS_ALL and len(self._sessions) > 1:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        name = next(iter(self._sessions))
        session = self._sessions.pop(name)
        self._paused.pop(name, None)
        for key in session.keys:
            chunk = (name[0], key)
            self._users[chunk] -= 1
            if not self._users[chunk]:
                del self._users[chunk]
            self._released.pop(chunk, None)
        self._num_keys -= len(session.keys)

    # Stages

    def _go_on(self, name: SessionName, session: _Session) -> None:
        session.num_requests += 1
        if session.stage is SessionStage.PAUSED:
            self._pins.resume(name[0], self._private(name, session), self._now)
        self._take_back(name[0], session.keys)
        self._set_stage(name, session, SessionStage.ACTIVE)

    def _pause(self, name: SessionName, session: _Session, pause_s: float, priority: int) -> None:
        self._take_back(name[0], session.keys)
        self._set_stage(name, session, SessionStage.PAUSED)
        session.until, session.pause_s = self._now + pause_s, pause_s
        self._paused[name] = session.until
        rank = priority or PAUSE_PRIORITY
        self._pins.keep_paused(name[0], list(session.keys), session.until, rank, self._now)

    def _end(self, name: SessionName, session: _Session, stage: SessionStage) -> None:
        """What no other session has used is evicted next, the ends of prefixes first."""
        self._set_stage(name, session, stage)
        session.ended_at = self._now
        namespace = name[0]
        private = self._private(name, session)
        private.reverse()
        self._num_released += sum((namespace, key) not in self._released for key in private)
        self._released.update(dict.fromkeys(((namespace, key) for key in private), name))
        self._pins.release(namespace, private, self._now)
        for node in self._nodes.values():
            node.book.release(namespace, private)

    def _take_back(self, namespace: Namespace, keys: Iterable[Key]) -> None:
        """These chunks are wanted again, those of them that are released."""
        freed = [key for key in keys if self._released.pop((namespace, key), None) is not None]
        for node in self._nodes.values() if freed else ():
            node.book.table.touch(namespace, freed)

    def _set_stage(self, name: SessionName, session: _Session, stage: SessionStage) -> None:
        session.stage, session.until = stage, None
        self._paused.pop(name, None)

    def _private(self, name: SessionName, session: _Session) -> list[Key]:
        """The chunks of no other session."""
        return [key for key in session.keys if self._users[name[0], key] == 1]

    def expire(self, now: float) -> None:
        """Give up the sessions that were to go on by now."""
        self._now = now
        for name in [name for name, until in self._paused.items() if until <= now]:
            self._end(name, self._sessions[name], SessionStage.GIVEN_UP)

    # What happens to chunks

    def changed(self, node_id: NodeId, changes: Changes) -> None:
        """Chunks came to a node, or went."""
        if not self._released and not len(self._evicted):
            return
        namespace = changes.namespace
        if changes.stored:
            late = [Key(key) for key in changes.keys if self._is_late((namespace, Key(key)))]
            if late:
                self._nodes[node_id].book.release(namespace, late)
        elif changes.ages:
            for key in changes.keys:
                self._note(namespace, Key(key))

    def _is_late(self, chunk: Name) -> bool:
        """Whether a chunk that comes was stored by its session; one that comes later, or once more,
        is another request's.
        """
        name = self._released.get(chunk)
        if name is None:
            return False
        if self._now - self._sessions[name].ended_at <= LATE_S and not self.why(*chunk):
            return True
        del self._released[chunk]
        return False

    def _note(self, namespace: Namespace, key: Key) -> None:
        """A chunk was evicted: remember if a session's end was why."""
        name = self._released.get((namespace, key))
        if name is not None:
            sentence = _sentence(name[1], self._sessions[name])
            self._evicted.note([key], (namespace, sentence))
        elif self._evicted.get(key) is not None:
            self._evicted.note([key], None)

    def why(self, namespace: Namespace, key: Key) -> str:
        """What a hint did to a chunk that is missing; empty: nothing that is known."""
        known = self._evicted.get(key)
        return known[1] if known is not None and known[0] == namespace else ""

    # Looking

    def families(self) -> list[MetricFamily]:
        """What the scheduler actor shows of them."""
        counts = Counter(session.stage for session in self._sessions.values())
        return [
            numbers("raykv_sessions", {(str(stage),): counts[stage] for stage in SessionStage}),
            number("raykv_session_chunks_released_total", self._num_released),
        ]

    def page(self, query: SessionQuery, now: float) -> SessionPage:
        """A picture for people; changes nothing."""
        self._now = now
        names = [name for name in reversed(self._sessions) if _is_asked(name, query)]
        names = names[:MAX_SESSIONS_LISTED]
        if not query.session:
            return SessionPage(PROTOCOL_VERSION, [self._told(name) for name in names])
        found = [self._with_places(name) for name in names]
        keys: list[bytes] = []
        if len(names) == 1:
            known = self._sessions[names[0]].keys
            keys = list(islice(known, query.first, query.first + MAX_KEYS // 2))
        return SessionPage(PROTOCOL_VERSION, found, keys)

    def _told(self, name: SessionName) -> SessionStatus:
        return self._status(name, self._sessions[name])

    def _status(self, name: SessionName, session: _Session) -> SessionStatus:
        return SessionStatus(
            session=name[1],
            namespace=name[0],
            stage=session.stage,
            node_id=session.node_id,
            chunks=len(session.keys),
            private_chunks=len(self._private(name, session)),
            requests=session.num_requests,
            idle_s=max(0.0, self._now - session.used_at),
            left_s=0.0 if session.until is None else max(0.0, session.until - self._now),
        )

    def _with_places(self, name: SessionName) -> SessionStatus:
        session = self._sessions[name]
        keys = list(session.keys)
        every = tuple(self._nodes)
        in_pools: Counter[str] = Counter()
        step = max(1, _MAX_FOUND // max(1, len(every)))
        for start in range(0, len(keys), step):
            part = keys[start : start + step]
            found = self._table().ask(name[0], part, every, (), len(every), None)
            in_pools.update(str(found.nodes[number]) for number in found.node_index)
        on_disks = Counter(each.node_id for key in keys for each in self._disks.find(name[0], key))
        return msgspec.structs.replace(
            self._status(name, session), in_pools=dict(in_pools), on_disks=dict(on_disks)
        )

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        users = Counter(
            (name[0], key) for name, session in self._sessions.items() for key in session.keys
        )
        assert users == self._users, (users, self._users)
        assert len(self._sessions) <= MAX_SESSIONS, len(self._sessions)
        sizes = [len(session.keys) for session in self._sessions.values()]
        assert sum(sizes) == self._num_keys, (sizes, self._num_keys)
        assert all(size <= MAX_KEYS_EACH for size in sizes), sizes
        assert self._num_keys <= MAX_KEYS_ALL or len(sizes) == 1, self._num_keys
        for chunk, name in self._released.items():
            session = self._sessions[name]
            assert session.has_ended, (chunk, session)
            assert chunk[1] in session.keys, (chunk, session)
            assert users[chunk] == 1, (chunk, users[chunk])
        pausing = {
            name: session.until
            for name, session in self._sessions.items()
            if session.stage is SessionStage.PAUSED
        }
        assert pausing == self._paused, (pausing, self._paused)


def _is_asked(name: SessionName, query: SessionQuery) -> bool:
    return query.namespace in ("", name[0]) and query.session in ("", name[1])


def _sentence(session: str, known: _Session) -> str:
    if known.stage is SessionStage.OVER:
        return f"released: its session {session!r} was over"
    return (
        f"kept for the pause of its session {session!r}, {known.pause_s:g} s, and released when "
        "that was over"
    )
