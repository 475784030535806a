"""Sessions of requests, as people and programs beside the engines know them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from raykv.base.deadlines import TRANSFER_S
from raykv.base.errors import ClusterError, NotFoundError, SettingError
from raykv.client.listing import Reader
from raykv.client.scheduler import Scheduler
from raykv.client.transfers import Moving, Watch
from raykv.protocol.framing import PROTOCOL_VERSION, encode
from raykv.protocol.operator import MAX_PRIORITY, TransferResult
from raykv.protocol.sessions import (
    MAX_PAUSE_S,
    MAX_SESSION_NAME,
    SessionAnswer,
    SessionOrder,
    SessionPage,
    SessionQuery,
    SessionStatus,
    SessionWord,
    check_session_page,
)


@dataclass(frozen=True)
class SessionDesk:
    """Asks the scheduler actor of a cluster about sessions."""

    scheduler: Scheduler
    reader: Reader
    transfers: Moving

    def page(self, namespace: str, session: str = "", first: int = 0) -> SessionPage:
        query = SessionQuery(PROTOCOL_VERSION, namespace, session, first)
        page = self.scheduler.ask_for(SessionPage, "sessions", encode(query))
        check_session_page(page)
        return page

    def whole(self, namespace: str) -> str:
        """The namespace that begins so; empty: any."""
        return self.reader.full_namespace(namespace) if namespace else ""


@dataclass(frozen=True)
class ClientSession:
    """A session of a client, by the name that its requests give it (`raykv_session`).

    All methods raise a `ClusterError` if there is no such session, if several namespaces have one
    of that name and none is given, or if RayKV does not run here or does not answer.
    """

    name: str
    namespace: str
    _desk: SessionDesk

    def __post_init__(self) -> None:
        check_session(self.name)

    def status(self) -> SessionStatus:
        """What is known of it, and where its chunks are now."""
        return self._found(self._desk.page(self._whole, self.name))

    def over(self) -> SessionStatus:
        """It is over: chunks that no other session has used are the next to be evicted, on every
        node. A request of the session that comes all the same takes it up again.
        """
        return self._order(SessionWord.OVER, 0.0, 0)

    def pause(self, seconds: float, *, priority: int | None = None) -> SessionStatus:
        """It goes on in about so long, an hour at most: until then its chunks are kept by
        preference, within the share of the pools that requests may pin; if it has not come back
        then, it is given up like one that is over.

        Args:
            seconds: the pause.
            priority: 1 to 9, beside other chunks that are kept by preference; None: 1.

        Raises:
            SettingError: an argument is not allowed.
        """
        check_pause(seconds, priority)
        return self._order(SessionWord.PAUSED, float(seconds), priority or 0)

    def keys(self) -> list[bytes]:
        """The offload keys of its chunks, in the order in which prompts have them."""
        return self._keys(self.status().namespace)

    def prefetch(
        self,
        to: str = "",
        *,
        deadline_s: float = TRANSFER_S,
        watch: Watch = lambda _: None,
    ) -> TransferResult:
        """Bring its chunks to a node's pool, from other pools or from disks, before it goes on
        there. What does not come is no error: the result counts it.

        Args:
            to: a node, by Ray's id, or an engine; the beginning of it suffices. Default: the node
                where the session's latest request was.
            deadline_s: for all of them.
            watch: called after every page with the result so far.
        """
        known = self.status()
        node_id = self._node(to or known.node_id)
        keys = self._keys(known.namespace)
        give_up_at = time.monotonic() + deadline_s
        return self._desk.transfers.bring(keys, node_id, known.namespace, give_up_at, watch)

    @property
    def _whole(self) -> str:
        return self._desk.whole(self.namespace)

    def _found(self, page: SessionPage) -> SessionStatus:
        if len(page.sessions) == 1:
            return page.sessions[0]
        if page.sessions:
            spaces = ", ".join(each.namespace[:12] for each in page.sessions)
            raise ClusterError(f"there is a session {self.name!r} in several namespaces: {spaces}")
        raise NotFoundError(
            f"there is no session {self.name!r}: either no request with raykv_session has ended "
            "yet, or client_hints does not allow it, or it was used too long ago"
        )

    def _order(self, word: SessionWord, pause_s: float, priority: int) -> SessionStatus:
        namespace = self.status().namespace
        order = SessionOrder(PROTOCOL_VERSION, namespace, self.name, word, pause_s, priority)
        answer = self._desk.scheduler.ask_for(SessionAnswer, "order_session", encode(order))
        if answer.session is None:
            raise NotFoundError(f"the session {self.name!r} has just been forgotten")
        return answer.session

    def _keys(self, namespace: str) -> list[bytes]:
        keys: list[bytes] = []
        while page := self._desk.page(namespace, self.name, len(keys)).keys:
            keys += page
        return keys

    def _node(self, beginning: str) -> str:
        known = self._desk.scheduler.status()
        engines = {each.node_id for each in known.engines if each.engine_id.startswith(beginning)}
        nodes = {each.node_id for each in known.nodes if each.node_id.startswith(beginning)}
        if len(engines | nodes) == 1:
            return (engines | nodes).pop()
        return self._desk.scheduler.node(beginning)


def check_session(name: str) -> None:
    """Refuse a name that no session can have, with a SettingError."""
    if not 0 < len(name) <= MAX_SESSION_NAME:
        raise SettingError(
            f"a session's name has 1 to {MAX_SESSION_NAME} characters, not {len(name)}"
        )


def check_pause(seconds: float, priority: int | None) -> None:
    """Refuse a pause that no session can make, with a SettingError."""
    if not 0 < seconds <= MAX_PAUSE_S:
        raise SettingError(f"a pause of {seconds} s: it must be above 0, at most {MAX_PAUSE_S:g}")
    if priority is not None and not 1 <= priority <= MAX_PRIORITY:
        raise SettingError(f"priority={priority} must be from 1 to {MAX_PRIORITY}")
