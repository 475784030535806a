"""The document of orders as the scheduler actor keeps it; pure.

                draft, meet, first                confirm
   (in force) ──────────────────► being kept ──────────────► in force, at a higher number
       ▲                              │ the store of Ray's head has not kept it
       └──────────────────────────────┘ no node has heard of it

Numbers rise within a history. Where the store has lost what members have seen, a later history
begins: to go on above the number of one member would give a number that another one has seen with
another document. One draft at a time is being kept; where the store has not said whether it has
kept one, this life ends, and the next one begins with what the store has.

Invariants:
1. Nobody hears of a number before the store has kept its document.
2. Two documents of one number that anybody has heard of are the same, if who has heard of what the
   store has lost shows it in time. (A store that goes back twice over the same number is not seen.)
3. What a floor of any document that was met has made void stays void: in a later document of its
   history by that floor or a higher one, in a later history by its first number.
4. Nothing is ordered before members had time to show what the store may have lost.
5. Every document that is made can be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import msgspec

from raykv.base import clearings, errors
from raykv.base.ids import Namespace, NodeId, Stamp
from raykv.protocol import framing, node
from raykv.protocol.engine import NOTHING_ORDERED, Naming
from raykv.protocol.operator import (
    MAX_DOCUMENT_BYTES,
    MAX_TOLD_DONE,
    MAX_WANTED_BYTES,
    OrdersDocument,
)

MEMBERS_S = 5.0
"""How long members have to show the document that they have seen last."""

MOST_DONE = 4096
"""Orders whose numbers a life remembers: engines that all reset at once ask for theirs."""

DRAWN_BITS = 32
"""Of a history; above them is how many there were before it."""

FIRST_NUMBER = 1
"""Of a history: its floors are those of the histories before."""


class OrderError(errors.RayKVError):
    """An order can't be carried out now."""


class Orders:
    """See the module's docstring. Times are of one clock that never goes back.

    Args:
        kept: the document in the store of Ray's head, if there is one.
        drawn: a number of 32 bits that no other life has.
        now: when this life began.
    """

    def __init__(self, kept: OrdersDocument | None, drawn: int, now: float) -> None:
        self._drawn = drawn
        # Until then members may show what the store has lost; and the latest that they have shown.
        self._waits_until = now + MEMBERS_S
        self._met: OrdersDocument | None = None
        # Histories that members have shown, and all namespaces that had a floor in one of them.
        self._histories = {kept.stamp.history} if kept else set()
        self._floored: set[str] = set()
        # The document in force, and since when: pins are sent with the time that they have left.
        self._document, self._since = kept, now
        self._done = dict(kept.done) if kept else {}
        self._shown: dict[NodeId, Stamp] = {}
        # Floors that were set since they were taken.
        self._cleared: dict[Namespace, Stamp] = {}

    @property
    def stamp(self) -> Stamp:
        """The number that is in force."""
        return self._document.stamp if self._document else NOTHING_ORDERED

    def told(self, now: float) -> OrdersDocument | None:
        """The document in force, without the pins that have expired."""
        return None if self._document is None else self._document.later(now - self._since)

    def confirm(self, draft: OrdersDocument, now: float) -> None:
        """The store has kept a draft, the latest one: it is in force."""
        assert draft.stamp > self.stamp, (self.stamp, draft)
        before: Mapping[str, int] = self._document.floors if self._document else {}
        history = draft.stamp.history
        if history != self.stamp.history:
            # What is not in that document was perhaps not done in its history.
            self._done.clear()
            before = {}
        self._cleared |= {
            Namespace(name): Stamp(history, floor)
            for name, floor in draft.floors.items()
            if floor > before.get(name, FIRST_NUMBER)
        }
        self._done |= draft.done
        for order_id in list(islice(self._done, max(0, len(self._done) - MOST_DONE))):
            del self._done[order_id]
        self._histories.add(draft.stamp.history)
        self._document, self._since = draft, now

    def first(self, now: float) -> OrdersDocument | None:
        """The draft of this life's first document, where the store has none, once members have had
        their time: what the latest of theirs says.
        """
        if self._document is not None or now < self._waits_until:
            return None
        met = self._met or OrdersDocument(Stamp(0, 0))
        return self._begun(met, met.stamp.history)

    def _begun(self, document: OrdersDocument, history: int) -> OrdersDocument:
        """What a document says, in a history after that one."""
        number = (history >> DRAWN_BITS) + 1
        stamp = Stamp(number << DRAWN_BITS | self._drawn, 1)
        mine = self._document.floors if self._document else {}
        floors = clearings.Clearings(dict.fromkeys([*document.floors, *mine, *self._floored], 1))
        # Who has shown a number of another history has not shown these.
        done = dict.fromkeys(document.done, stamp)
        return _readable(
            msgspec.structs.replace(document, stamp=stamp, floors=floors.told, done=done)
        )

    # Operators

    def is_early(self, now: float) -> bool:
        """Whether members may still show unknown orders: no order is carried out yet."""
        return self._document is None or now < self._waits_until

    def number_of(self, order_id: str) -> Stamp | None:
        """The number at which an order came into force: it may be repeated."""
        return self._done.get(order_id)

    def draft(self, order_id: str, now: float, **changes: Any) -> OrdersDocument:
        """The document that an order makes.

        Args:
            order_id: of the order.
            now: the time.
            changes: fields of the document.

        Raises:
            OrderError: it is early, or the document would be too large.
        """
        return _affordable(self._drafted(order_id, now, **changes))

    def _drafted(self, order_id: str, now: float, **changes: Any) -> OrdersDocument:
        mine = self.told(now)
        if mine is None or self.is_early(now):
            raise OrderError(
                "the scheduler actor has just begun, and asks the nodes for orders that it may not "
                "know: try again in some seconds"
            )
        stamp = Stamp(mine.stamp.history, mine.stamp.number + 1)
        done = {**mine.done, order_id: stamp}
        while len(done) > MAX_TOLD_DONE:
            del done[next(iter(done))]
        return msgspec.structs.replace(mine, stamp=stamp, done=done, **changes)

    def clear(self, order_id: str, namespace: str, now: float) -> OrdersDocument:
        """The draft of a clearing; with an empty namespace, of all.

        Raises:
            OrderError: see `draft`.
        """
        made = self._drafted(order_id, now)
        floors = clearings.Clearings(made.floors)
        # Chunks offered before this number was sent have a lower stamp.
        floors.take({namespace: made.stamp.number})
        return _readable(msgspec.structs.replace(made, floors=floors.told))

    # Members

    def show(self, node_id: NodeId, stamp: Stamp | None) -> bool:
        """A member shows the number of the latest document that it has seen; True: it is to be
        asked for that document.
        """
        self._shown[node_id] = stamp or NOTHING_ORDERED
        return stamp is not None and self._is_newer(stamp)

    def _is_newer(self, stamp: Stamp) -> bool:
        """Whether its document may say what we do not know."""
        mine = self._document or self._met
        if mine is None or stamp.history not in self._histories:
            return stamp.number > 0
        return stamp.history == mine.stamp.history and stamp.number > mine.stamp.number

    def meet(self, theirs: OrdersDocument, now: float) -> OrdersDocument | None:
        """A member's document; the draft that it makes, if one is in force here.

        If it is of the same history, theirs counts: the store has gone back. Otherwise ours does:
        the member was away when this history began, and what was cleared there is void here too.
        """
        if not self._is_newer(theirs.stamp):
            return None
        self._histories.add(theirs.stamp.history)
        mine = self.told(now)
        if mine is None:
            self._floored |= theirs.floors.keys()
            if self._met is None or theirs.stamp > self._met.stamp:
                self._met = theirs
            return None
        if theirs.stamp.history == mine.stamp.history:
            return self._begun(theirs, theirs.stamp.history)
        self._floored |= theirs.floors.keys()
        if theirs.stamp > mine.stamp:
            return self._begun(mine, theirs.stamp.history)
        stamp = Stamp(mine.stamp.history, mine.stamp.number + 1)
        floors = clearings.Clearings(mine.floors)
        floors.take(dict.fromkeys(theirs.floors, stamp.number))
        if floors.told == mine.floors:
            return None
        return _readable(msgspec.structs.replace(mine, stamp=stamp, floors=floors.told))

    def lose(self, node_id: NodeId) -> None:
        """A node is gone."""
        self._shown.pop(node_id, None)

    def behind(self, stamp: Stamp) -> list[NodeId]:
        """Nodes that have not shown that number or a later one: where there is none, an order of
        that number is done.
        """
        return [node_id for node_id, shown in self._shown.items() if shown < stamp]

    # The directory

    def take_cleared(self) -> dict[Namespace, Stamp]:
        """Namespaces that were cleared since the last call, and by which number.

        What the document says with which this life has begun, or a history, is no news.
        """
        cleared, self._cleared = self._cleared, {}
        return cleared

    def namings(self, engines: Iterable[node.ReportedEngine]) -> dict[int, Naming]:
        """Names of weights by the life of the engine, for engines that have not heard theirs."""
        known = self._document.namings if self._document else {}
        named = ((each, known.get(each.hello.life)) for each in engines)
        return {
            engine.hello.life: naming
            for engine, naming in named
            if naming is not None and naming.stamp > engine.heard
        }


def _affordable(document: OrdersDocument) -> OrdersDocument:
    """The same document, which leaves room for what will be cleared.

    Raises:
        OrderError: it doesn't, or can't be read.
    """
    size = len(framing.encode(msgspec.structs.replace(document, floors={}, done={})))
    if size > MAX_WANTED_BYTES:
        raise OrderError(
            f"all pins, quotas and names of weights together would take {size:,} bytes, more than "
            f"{MAX_WANTED_BYTES:,}: end some first"
        )
    return _readable(document)


def _readable(document: OrdersDocument) -> OrdersDocument:
    """The same document, readable for all that hear of it.

    Raises:
        OrderError: it can't be.
    """
    raw = framing.encode(document)
    if len(raw) > MAX_DOCUMENT_BYTES:
        raise OrderError(
            f"all orders together would take {len(raw):,} bytes, more than {MAX_DOCUMENT_BYTES:,}: "
            "end some pins or quotas first"
        )
    try:
        return framing.receive(raw, OrdersDocument, "the scheduler actor", "nobody")
    except errors.MessageError as error:
        raise OrderError(f"no such order is possible: {error}") from error
