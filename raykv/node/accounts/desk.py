"""What people ask of a node: its chunks, its engines' requests, sessions, pins.

Answers come in pages. The pool's lock is held for one piece of a page at a time.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec

from raykv.base.ids import Blocks, Key, Namespace, family_of
from raykv.node.accounts.requests import EndedRequest
from raykv.node.keeper import PoolKeeper
from raykv.node.pool.catalog import STRETCH, first_ones
from raykv.node.pool.sessions import LocalSession
from raykv.protocol import events, operator, reader, status
from raykv.protocol.columns import MAX_KEYS, Numbers, require
from raykv.protocol.descriptions import Descriptions
from raykv.protocol.listing import ALL_READ, ListingPart
from raykv.protocol.sessions import (
    MAX_SESSIONS_LISTED,
    SessionPage,
    SessionQuery,
    SessionStage,
    SessionStatus,
)

MOST_PIECES = 64
"""Pieces of a listing that are looked at for one page."""

QUESTIONS: dict[str, type[msgspec.Struct] | None] = {
    "chunks": reader.ChunkQuery,
    "descriptions": None,
    "drop": operator.DropOrder,
    "listing": events.ListingQuery,
    "more_room": None,
    "pins": None,
    "requests": None,
    "sessions": SessionQuery,
    "why_miss": None,
}
"""Methods of `Desk` that answer people, by name. They take a struct of this kind, or plain values
that they check themselves."""


class Desk:
    """See the module's docstring. Any thread may ask.

    Args:
        node_id: Ray's.
        keeper: of this node's pool.
    """

    def __init__(self, node_id: str, keeper: PoolKeeper) -> None:
        self._node_id = node_id
        self._keeper = keeper
        self._lock = keeper.lock
        self._owner = keeper.owner

    # Chunks

    def listing(self, query: events.ListingQuery) -> ListingPart:
        """The next part of the listing."""
        with self._lock:
            return self._owner.index.part_after(query.position, query.most)

    def chunks(self, query: reader.ChunkQuery) -> reader.ChunkPage:
        """A page of the chunks."""
        place, now = int(query.cursor or 0), self._keeper.now()
        rows: list[reader.ListedChunk] = []
        for _ in range(MOST_PIECES):
            if place == ALL_READ or not (query.order or len(rows) < query.limit):
                break
            most = STRETCH if query.order else query.limit - len(rows)
            with self._lock:
                found, place = self._keeper.catalog.stretch(query, place, now, most)
            rows += found
            if query.order:
                rows = first_ones(rows, query.order, query.limit)
        cursor = "" if place == ALL_READ else str(place)
        return reader.ChunkPage(rows, cursor)

    def drop(self, order: operator.DropOrder) -> operator.Released:
        """Give up copies in the pool of what is elsewhere."""
        with self._lock:
            blocks = map(Blocks, order.first_block, order.num_blocks)
            chunks = dict(zip(map(Key, order.keys), blocks, strict=True))
            released = self._keeper.catalog.drop(
                Namespace(order.namespace), chunks, with_pinned=order.with_pinned
            )
            self._lock.notify_all()
        return released

    def descriptions(self, keys: Any, namespace: Any) -> Descriptions:
        """What is inside of chunks, in their order, as far as it is known and fits.

        Raises:
            MessageError: those are no keys, or too many.
        """
        require(isinstance(keys, list) and len(keys) <= MAX_KEYS, f"no list of {MAX_KEYS} keys")
        require(all(isinstance(key, bytes) for key in keys), "keys that are no bytes")
        require(namespace is None or isinstance(namespace, str), f"the namespace {namespace!r}")
        with self._lock:
            return Descriptions(self._owner.accounts.descriptions.page(keys, namespace))

    # Pins

    def pins(self) -> operator.PinsHere:
        """What pins keep here."""
        held = {}
        with self._lock:
            pins = list(self._owner.orders.pins())
        for pin_id, pin in pins:
            with self._lock:
                kept = self._keeper.catalog.kept(pin.names, pin.standing)
                held[pin_id] = _of_all_parts(kept, len(pin.parts), len(pin.names))
        with self._lock:
            claims = self._owner.index.claims
            node = operator.NodePins(
                self._node_id,
                claims.pinned_bytes,
                claims.num_pinned,
                claims.requests_bytes,
                claims.most_bytes,
                claims.num_waiting,
            )
            num_wished, num_refused = self._owner.num_wished(), claims.num_refused
        return operator.PinsHere(node, held, num_wished, num_refused)

    # Requests

    def requests(self, after: int) -> reader.RequestPage:
        """Requests of engines here that have ended, after the one of that number."""
        require(isinstance(after, int), f"the number {after!r}")
        with self._lock:
            log = self._owner.accounts.requests
            first, ended = log.after(max(0, after))
            found = [self._explained(each) for each in ended]
            return reader.RequestPage(self._keeper.life, first, log.last, found)

    def why_miss(self, beginning: str) -> reader.Explanations:
        """What became of the tokens of requests whose ids begin so."""
        require(isinstance(beginning, str), f"the beginning {beginning!r}")
        with self._lock:
            log = self._owner.accounts.requests
            return reader.Explanations(list(map(self._explained, log.find(beginning))), len(log))

    def _explained(self, ended: EndedRequest) -> reader.Explanation:
        record, hello, namespace = ended.record, ended.hello, ended.namespace
        index = self._owner.index
        parting, missing = record.parting, Key(record.missing)
        nearest = None if parting is None else (namespace, Key(parting.nearest))
        is_here = nearest is not None and (index.find(*nearest) or index.shelf.find(*nearest))
        return reader.Explanation(
            msgspec.structs.replace(record, tenant=self._owner.tenant(record.tenant)),
            hello.engine_id,
            self._node_id,
            namespace,
            hello.model,
            self._keeper.now() - ended.at,
            nearest_is_cached=bool(is_here),
            hint=self._owner.accounts.hint_on(namespace, missing),
        )

    def more_room(self) -> status.MoreRoom:
        """What a larger pool would have saved."""
        with self._lock:
            num_bytes = self._keeper.geometry.pool_bytes
            return self._owner.accounts.savings.told(num_bytes, self._keeper.now())

    # Sessions

    def sessions(self, query: SessionQuery) -> SessionPage:
        """The sessions that are known here, the most recently used one first."""
        with self._lock:
            known = [
                (namespace, name, session)
                for namespace, name, session in self._owner.sessions.latest()
                if query.namespace in ("", namespace, family_of(namespace))
                and query.session in ("", name)
            ]
        found = []
        for namespace, name, session in known[:MAX_SESSIONS_LISTED]:
            with self._lock:
                found.append(self._status(namespace, name, session))
        keys: list[Key] = []
        # The parts that are here of one namespace have the same keys.
        if query.session and len({family_of(namespace) for namespace, _, _ in known}) == 1:
            with self._lock:
                keys = self._owner.sessions.keys_of(known[0][2])
        return SessionPage(found, [*keys[query.first : query.first + MAX_KEYS // 2]])

    def _status(self, namespace: Namespace, name: str, session: LocalSession) -> SessionStatus:
        sessions, now = self._owner.sessions, self._keeper.now()
        left_s = session.until - now if session.stage is SessionStage.PAUSED else 0.0
        return SessionStatus(
            name,
            namespace,
            session.stage,
            self._node_id,
            len(sessions.keys_of(session)),
            sessions.num_private(session),
            session.num_requests,
            max(0.0, now - session.used_at),
            max(0.0, left_s),
        )


def _of_all_parts(here: operator.PinHere, num_parts: int, num_names: int) -> operator.PinHere:
    """What is kept of a pin's keys, whose parts here are numbered one after the other: a key that
    all of them keep is, and one that some part waits for waits.
    """
    if num_parts < 2:
        return here
    num_keys = num_names // num_parts
    parts = Counter(at % num_keys for at in here.kept)
    return msgspec.structs.replace(
        here,
        kept=Numbers.of(sorted(at for at, count in parts.items() if count == num_parts)),
        waiting=Numbers.of(sorted({at % num_keys for at in here.waiting})),
    )
