"""Sessions of requests: what engines say of them, what operators order, and what they get to know.

A session is whatever its client calls one: an agent's work, a conversation. It has a name and the
chunks that its requests have used, in one namespace.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Annotated

import msgspec

from raykv.protocol import columns, framing

MAX_SESSION_NAME = 128
"""Characters of a session's name."""

MAX_PAUSE_S = 3600.0
"""Longest pause of a session."""

MAX_SESSIONS_LISTED = 256
"""Sessions in one answer."""


SessionName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_SESSION_NAME)]


class SessionWord(IntEnum):
    """What is said of a session."""

    CAME = 0
    """One of its requests has come: it goes on, whatever was said before."""
    USED = 1
    """A request has used chunks."""
    PAUSED = 2
    """It goes on in about this many seconds."""
    OVER = 3


class SessionStage(StrEnum):
    """Where a session is."""

    ACTIVE = "active"
    PAUSED = "paused"
    GIVEN_UP = "given up"
    """Its pause was over, and it had not gone on."""
    OVER = "over"


class SessionNews(msgspec.Struct, frozen=True, array_like=True):
    """What an engine or an operator says of a session.

    `keys` are chunks that it has not named before, the first ones of the prefix first. `pause_s`
    and `priority` (0: none) belong to a pause.
    """

    session: SessionName
    word: SessionWord
    keys: columns.Keys = columns.Keys()
    pause_s: float = 0.0
    priority: Annotated[int, msgspec.Meta(ge=0, le=columns.MAX_PRIORITY)] = 0

    def __post_init__(self) -> None:
        columns.check_column(self.keys, most=columns.MAX_ROWS)
        has_pause = self.word == SessionWord.PAUSED
        is_valid = 0 < self.pause_s <= MAX_PAUSE_S if has_pause else self.pause_s == 0
        columns.require(is_valid, f"a pause of {self.pause_s} s")


class SessionOrder(framing.Versioned, frozen=True):
    """An operator says PAUSED or OVER of a session; with an empty namespace, of all."""

    namespace: columns.Text
    news: SessionNews

    def __post_init__(self) -> None:
        is_order = self.news.word in (SessionWord.PAUSED, SessionWord.OVER)
        columns.require(is_order, f"an order that says {self.news.word!r} of a session")
        columns.require(not self.news.keys, "an order about a session names keys")


class SessionStatus(msgspec.Struct, frozen=True):
    """A session, as the node knows it where its latest request was, `node_id`.

    `private_chunks` of its `chunks` are of no other session that is known there. `requests` are
    those of the node; what clients are told has all. `left_s`: of its pause. `in_pools` and
    `on_disks` have how many of its chunks each node has there, where a client asks for one session
    by its name.
    """

    session: SessionName
    namespace: str
    stage: SessionStage
    node_id: str
    chunks: int
    private_chunks: int
    requests: int
    idle_s: float
    left_s: float = 0.0
    in_pools: dict[str, int] = {}
    on_disks: dict[str, int] = {}


class SessionAnswer(framing.Versioned, frozen=True):
    """Answer to `SessionOrder`: the nodes that know the session, and will hear of it; none: there
    is none of that name.
    """

    nodes: list[str] = []


class SessionQuery(framing.Versioned, frozen=True):
    """Which sessions does a node know?

    Empty texts: all. A page has the most recently used ones. Of a session that is asked for by
    name, and is in one namespace only, it has the keys from number `first` on too.
    """

    namespace: columns.Text = ""
    session: Annotated[str, msgspec.Meta(max_length=MAX_SESSION_NAME)] = ""
    first: Annotated[int, msgspec.Meta(ge=0, le=1 << 32)] = 0


class SessionPage(framing.Versioned, frozen=True):
    """Answer to `SessionQuery`; `keys` in the order in which prompts have them."""

    sessions: list[SessionStatus] = []
    keys: Annotated[list[columns.KeyBytes], msgspec.Meta(max_length=columns.MAX_KEYS)] = []
