"""What requests ask for their chunks, on its way from the engine to its node.

           begin            add (keys of the prompt)         take
  (none) ────────► hinting ──────────────────────────► queued ────► told with the next message
                      │ name_chunks (all keys), end                ▲
                      └───────────────────────────► news of its session

What the server does not allow is ignored and counted. A hint may be lost: it costs an eviction.

Threads: `take`, and `take` and `tell_again` of `sessions`, run on the line's thread; they only pop
from the left of the queues.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from raykv.base.ids import Key
from raykv.engine.remote import take
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Hints
from raykv.protocol.sessions import MAX_PAUSE_S, SessionNews, SessionWord

T = TypeVar("T")

MAX_QUEUED = 8192
"""Chunks of hints of each kind that wait to be sent; further ones are dropped."""

MAX_TOLD = 512
"""Chunks of each kind in one message."""

MAX_HINT_S = 3600.0
"""Longest pin of a request; a longer one is cut to it."""

MAX_SESSIONS_TOLD = 64
"""Pieces of news of sessions in one message."""

MAX_SESSIONS_KNOWN = 1024
"""Sessions of which it is remembered what was sent; of others, all is sent again."""

MAX_SESSION_KEYS = 65_536
"""Chunks of sessions that wait to be sent; news of further ones is dropped."""


class Allowed(StrEnum):
    """What clients may wish for; each allows what those above it do."""

    NONE = "none"
    PRIORITY = "priority"
    SESSION = "session"
    PIN = "pin"


@dataclass(frozen=True, slots=True)
class Hint:
    """What one request asks for its prompt: to be pinned for `pin_s`, or a priority over others;
    and what it says of its session: the name, that it is over with this request, or about how long
    it pauses after it.
    """

    pin_s: float | None = None
    priority: int | None = None
    session: str = ""
    is_over: bool = False
    pause_s: float | None = None

    @property
    def num_wishes(self) -> int:
        """How many of these are set, the session as one."""
        return (self.pin_s is not None) + (self.priority is not None) + bool(self.session)

    @property
    def word(self) -> SessionWord:
        """What is to be said of the session at the end."""
        if self.is_over:
            return SessionWord.OVER
        return SessionWord.USED if self.pause_s is None else SessionWord.PAUSED


@dataclass(slots=True)
class _Said:
    """What a request that has ended says of its session; `columns` has its keys by KV group."""

    hint: Hint
    columns: list[list[Key]]
    word: SessionWord

    @property
    def num_keys(self) -> int:
        return sum(map(len, self.columns))


class SessionBox:
    """News of sessions. Prompts grow from request to request: only what is new of them is told.

    Threads: `add` runs on the engine's thread, all else on the line's thread.
    """

    def __init__(self, counters: Counter[str]) -> None:
        """News that is dropped is counted in `counters`."""
        self._counters = counters
        self._queue: deque[_Said] = deque()
        self._num_added = 0
        self._num_taken = 0
        # By session: how many keys of each column were told, and the last of them. A key stands for
        # all before it.
        self._told: OrderedDict[str, list[tuple[int, Key]]] = OrderedDict()
        # What is left of the news that was begun with an earlier message.
        self._rest: list[Key] = []

    def add(self, hint: Hint, columns: list[list[Key]], word: SessionWord) -> None:
        """The caller must not change `columns` any more."""
        said = _Said(hint, columns, word)
        if self._num_added - self._num_taken + said.num_keys > MAX_SESSION_KEYS:
            self._counters["session_news_dropped"] += 1
            return
        self._num_added += said.num_keys
        self._queue.append(said)

    @property
    def has_news(self) -> bool:
        return bool(self._queue)

    def take(self) -> list[SessionNews]:
        """What the next message tells."""
        taken: list[SessionNews] = []
        room = MAX_TOLD
        while self._queue and room and len(taken) < MAX_SESSIONS_TOLD:
            said = self._queue[0]
            keys = self._rest or self._new_keys(said)
            part, self._rest = keys[:room], keys[room:]
            room -= len(part)
            if self._rest:
                taken.append(SessionNews(said.hint.session, SessionWord.USED, Keys.of(part)))
                break
            self._queue.popleft()
            self._num_taken += said.num_keys
            taken.append(_news(said, part))
        return taken

    def _new_keys(self, said: _Said) -> list[Key]:
        """The keys that the node does not know of the session; it will know them."""
        if not said.columns:
            return []
        session = said.hint.session
        told = self._told.pop(session, [])
        told += [(0, Key(b""))] * (len(said.columns) - len(told))
        new: list[Key] = []
        for (count, last), column in zip(told, said.columns, strict=True):
            is_longer = 0 < count <= len(column) and column[count - 1] == last
            new += column[count:] if is_longer else column
        self._told[session] = [
            (len(column), column[-1]) if column else known
            for known, column in zip(told, said.columns, strict=True)
        ]
        if len(self._told) > MAX_SESSIONS_KNOWN:
            self._told.popitem(last=False)
        return new

    def tell_again(self) -> None:
        """The node may have forgotten what was sent."""
        self._told.clear()


def _news(said: _Said, keys: Sequence[Key]) -> SessionNews:
    hint = said.hint
    if said.word is not SessionWord.PAUSED:
        return SessionNews(hint.session, said.word, Keys.of(keys))
    pause_s = min(hint.pause_s or MAX_PAUSE_S, MAX_PAUSE_S)
    return SessionNews(hint.session, said.word, Keys.of(keys), pause_s, hint.priority or 0)


class HintBox:
    """See the module's docstring.

    Args:
        allowed: what the server lets clients wish for.
    """

    def __init__(self, allowed: Allowed = Allowed.NONE) -> None:
        self.allowed = allowed
        self._requests: dict[str, Hint] = {}
        # Of requests that are about to end.
        self._columns: dict[str, list[list[Key]]] = {}
        self._pinned: deque[tuple[Key, float]] = deque()
        self._favoured: deque[tuple[Key, int]] = deque()
        # Since the start: what was ignored of wishes, and chunks of the others.
        self.counters = Counter(
            hints_ignored=0, hinted_chunks=0, hinted_chunks_dropped=0, session_news_dropped=0
        )
        self.sessions = SessionBox(self.counters)

    def begin(self, request_id: str, hint: Hint) -> None:
        """A request is new; wishes that are not allowed are left out."""
        kept = self._allowed_of(hint)
        self.counters["hints_ignored"] += hint.num_wishes - kept.num_wishes
        if kept.num_wishes:
            self._requests[request_id] = kept
        if kept.session:
            self.sessions.add(kept, [], SessionWord.CAME)

    def note_ignored(self, count: int) -> None:
        """A request has asked for other things that are not done."""
        self.counters["hints_ignored"] += count

    def _allowed_of(self, hint: Hint) -> Hint:
        may_prefer = self.allowed is not Allowed.NONE
        kept = Hint(priority=hint.priority if may_prefer else None)
        if self.allowed in (Allowed.SESSION, Allowed.PIN):
            kept = replace(kept, session=hint.session, is_over=hint.is_over, pause_s=hint.pause_s)
        return replace(kept, pin_s=hint.pin_s) if self.allowed is Allowed.PIN else kept

    def add(self, request_id: str, keys: Iterable[Key]) -> None:
        """Chunks of its prompt, the first ones first; a prefix of them is sent if it is full."""
        hint = self._requests.get(request_id)
        if hint is None:
            return
        for key in keys:
            if hint.pin_s is not None:
                self._queue(self._pinned, key, min(hint.pin_s, MAX_HINT_S))
            if hint.priority is not None:
                self._queue(self._favoured, key, hint.priority)

    def _queue(self, queue: deque[tuple[Key, T]], key: Key, wish: T) -> None:
        if len(queue) < MAX_QUEUED:
            queue.append((key, wish))
            self.counters["hinted_chunks"] += 1
        else:
            self.counters["hinted_chunks_dropped"] += 1

    def name_chunks(self, request_id: str, columns: Iterable[Iterable[Key]]) -> None:
        """A request is about to end: `columns` has the keys of all its chunks, by KV group, in
        order. The caller may change them afterwards.
        """
        hint = self._requests.get(request_id)
        if hint is not None and hint.session:
            self._columns[request_id] = [list(column) for column in columns]

    def end(self, request_id: str) -> None:
        """A request has ended, and will touch no chunk any more."""
        hint = self._requests.pop(request_id, None)
        columns = self._columns.pop(request_id, [])
        if hint is not None and hint.session:
            self.sessions.add(hint, columns, hint.word)

    @property
    def has_news(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._pinned or self._favoured or self.sessions.has_news)

    def take(self) -> Hints:
        """What the next message tells."""
        pinned, favoured = take(self._pinned, MAX_TOLD), take(self._favoured, MAX_TOLD)
        return Hints(
            pinned=Keys.of([key for key, _ in pinned]),
            pin_s=[pin_s for _, pin_s in pinned],
            favoured=Keys.of([key for key, _ in favoured]),
            priorities=[priority for _, priority in favoured],
        )
