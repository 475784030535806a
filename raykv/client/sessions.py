"""Sessions of requests, as clients outside the engines see and control them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from raykv.base import deadlines
from raykv.base.errors import ClusterError, NotFoundError, SettingError
from raykv.base.ids import family_of, short_namespace
from raykv.client.pins import check_priority
from raykv.client.scheduler import Scheduler, refuse_parts
from raykv.client.transfers import Watch, bring
from raykv.cluster import ask
from raykv.protocol import operator, sessions
from raykv.protocol.framing import encode


def found_sessions(
    scheduler: Scheduler, namespace: str, session: str = "", of: Collection[str] | None = None
) -> list[sessions.SessionStatus]:
    """Return the sessions that all nodes know, or these nodes, the latest first: each as the node
    describes it that used it last, with the requests of all nodes.

    `namespace`: the beginning of one; empty: any.
    """
    scheduler.find()
    space = scheduler.full_namespace(namespace) if namespace else ""
    pages = ask.ask_each(sessions.SessionPage, _question(space, session, 0), of)
    by_name: dict[tuple[str, str], list[sessions.SessionStatus]] = {}
    for page in pages.values():
        for each in page.sessions:
            by_name.setdefault((family_of(each.namespace), each.session), []).append(each)
    merged = []
    for (family, _), same in by_name.items():
        latest = min(same, key=lambda each: each.idle_s)
        # Each part of an engine has counted its requests.
        requests: Counter[str] = Counter()
        for each in same:
            requests[each.namespace] += each.requests
        most = max(requests.values())
        merged.append(msgspec.structs.replace(latest, namespace=family, requests=most))
    return sorted(merged, key=lambda each: each.idle_s)[: sessions.MAX_SESSIONS_LISTED]


def _keys_of(known: sessions.SessionStatus) -> list[bytes]:
    """Ask the node that used a session last for its keys, in the order of the prompt.

    Raises:
        ClusterError: that node does not answer.
    """
    keys: list[bytes] = []
    while True:
        question = _question(known.namespace, known.session, len(keys))
        pages, silent = ask.ask_nodes(sessions.SessionPage, question, {known.node_id})
        if silent:
            raise ClusterError(
                f"node {known.node_id[:12]}, which has used the session last, does not answer: "
                f"{silent[known.node_id]}"
            )
        page = pages[known.node_id]
        if not page.keys:
            return keys
        keys += page.keys


def _placed(scheduler: Scheduler, known: sessions.SessionStatus) -> sessions.SessionStatus:
    """Add to a session where its chunks are."""
    places: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}
    for sources in scheduler.sources_of(known.namespace, _keys_of(known)):
        for source in sources:
            places[source.is_disk][source.node_id] += 1
    return msgspec.structs.replace(known, in_pools=dict(places[False]), on_disks=dict(places[True]))


@dataclass(frozen=True)
class ClientSession:
    """A session of a client, by the name that its requests give it (`raykv_session`).

    All methods raise a `ClusterError` if there is no such session, if several namespaces have one
    of that name and none is given, or if RayKV does not run here or does not answer.
    """

    name: str
    namespace: str
    _scheduler: Scheduler

    def __post_init__(self) -> None:
        check_session(self.name)

    def status(self) -> sessions.SessionStatus:
        """Return what is known of the session, and where its chunks are now."""
        return _placed(self._scheduler, self._known())

    def over(self) -> sessions.SessionStatus:
        """End the session: on every node, chunks that no other session has used are evicted next.
        A later request of the session takes it up again.
        """
        return self._order(sessions.SessionWord.OVER, 0.0, 0)

    def pause(self, seconds: float, *, priority: int | None = None) -> sessions.SessionStatus:
        """Announce that the session goes on in about this time, at most an hour. Until then its
        chunks are kept by preference, within the share of the pools that requests may pin; after
        that it counts as over.

        Args:
            seconds: the pause.
            priority: 1 to 9, compared with other chunks that are kept by preference; None: 1.

        Raises:
            SettingError: an argument is not allowed.
        """
        check_pause(seconds, priority)
        return self._order(sessions.SessionWord.PAUSED, float(seconds), priority or 0)

    def keys(self) -> list[bytes]:
        """Return the offload keys of its chunks, in the order of the prompt."""
        return _keys_of(self._known())

    def prefetch(
        self,
        to: str = "",
        *,
        deadline_s: float = deadlines.TRANSFER_S,
        watch: Watch = lambda _: None,
    ) -> operator.TransferResult:
        """Bring its chunks to a node's pool, from other pools or from disks, before it goes on
        there. Chunks that do not come are no error: the result counts them.

        Args:
            to: a node, by Ray's id, or an engine; the beginning of it suffices. Default: the node
                where the session's latest request was.
            deadline_s: for all chunks.
            watch: called after every page with the result so far.
        """
        known = self._known()
        refuse_parts(known.namespace, self._scheduler.status())
        node_id = self._node(to or known.node_id)
        keys = _keys_of(known)
        give_up_at = time.monotonic() + deadline_s
        return bring(self._scheduler, keys, node_id, known.namespace, give_up_at, watch).result

    def _known(self, of: Collection[str] | None = None) -> sessions.SessionStatus:
        found = found_sessions(self._scheduler, self.namespace, self.name, of)
        if len(found) == 1:
            return found[0]
        if found:
            spaces = ", ".join(short_namespace(each.namespace) for each in found)
            raise ClusterError(f"there is a session {self.name!r} in several namespaces: {spaces}")
        raise NotFoundError(
            f"there is no session {self.name!r}: either no request with raykv_session has ended "
            "yet, or client_hints does not allow it, or it was used too long ago"
        )

    def _order(
        self, word: sessions.SessionWord, pause_s: float, priority: int
    ) -> sessions.SessionStatus:
        """Order a change, and wait until the node that used the session last shows it; nodes that
        do not answer are asked once.
        """
        asked = self._known()
        news = sessions.SessionNews(self.name, word, pause_s=pause_s, priority=priority)
        order = sessions.SessionOrder(asked.namespace, news)
        answer = self._scheduler.ask_for(sessions.SessionAnswer, "order_session", encode(order))
        if not answer.nodes:
            raise NotFoundError(f"the session {self.name!r} has just been forgotten")
        is_pause = word is sessions.SessionWord.PAUSED
        stage = sessions.SessionStage.PAUSED if is_pause else sessions.SessionStage.OVER
        give_up_at = time.monotonic() + deadlines.CLIENT_S
        while (known := self._known({asked.node_id})).stage != stage:
            if time.monotonic() > give_up_at:
                raise ClusterError(
                    f"the session {self.name!r} is {known.stage} at node {known.node_id[:12]}: it "
                    "has gone on meanwhile, or that node does not hear (`raykv status`)"
                )
            time.sleep(deadlines.LOOK_S)
        return _placed(self._scheduler, msgspec.structs.replace(known, requests=asked.requests))

    def _node(self, beginning: str) -> str:
        known = self._scheduler.status()
        engines = {each.node_id for each in known.engines if each.engine_id.startswith(beginning)}
        nodes = {each.node_id for each in known.nodes if each.node_id.startswith(beginning)}
        if len(engines | nodes) == 1:
            return (engines | nodes).pop()
        return self._scheduler.node(beginning)


def _question(namespace: str, session: str, first: int) -> ask.NodeQuestion:
    query = sessions.SessionQuery(namespace, session, first)
    return ask.asking("sessions", encode(query))


def check_session(name: str) -> None:
    """Refuse a name that no session can have, with a SettingError."""
    if not 0 < len(name) <= sessions.MAX_SESSION_NAME:
        raise SettingError(
            f"a session's name has 1 to {sessions.MAX_SESSION_NAME} characters, not {len(name)}"
        )


def check_pause(seconds: float, priority: int | None) -> None:
    """Refuse a pause that no session can make, with a SettingError."""
    if not 0 < seconds <= sessions.MAX_PAUSE_S:
        raise SettingError(
            f"a pause of {seconds} s: it must be above 0, at most {sessions.MAX_PAUSE_S:g}"
        )
    check_priority(priority)
