"""An engine's exchange with the scheduler actor, as `raykv/engine/session.py` does it: one message
at a time; what gets no answer is sent again as it was, and after the second time the engine
attaches anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from raykv.base.ids import EngineId, Epoch, Generation, Namespace, NodeId, Slot
from raykv.engine.hints import Allowed, HintBox
from raykv.engine.remote import FetchOrder
from raykv.engine.view import EngineView
from raykv.protocol.columns import Handle
from raykv.protocol.engine import AttachEngine, EngineAttached, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.peer import FetchResult
from tests.simulation.wire import Call

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster

MAX_INBOX = 4


@dataclass(frozen=True)
class Identity:
    """Who an engine is, where, and how many bytes its chunks have."""

    engine_id: EngineId
    node_id: NodeId
    namespace: Namespace
    slot_bytes: int


@dataclass(frozen=True)
class Exchanged:
    """A message and its answer."""

    request: SyncRequest
    reply: SyncReply


@dataclass(frozen=True)
class FetchEnded:
    """Orders that are over; None: nobody knows how."""

    orders: list[FetchOrder]
    result: FetchResult | None


class Session:
    """See the module's docstring."""

    def __init__(self, cluster: Cluster, view: EngineView, identity: Identity) -> None:
        self.identity = identity
        self.inbox: deque[EngineAttached | Exchanged | FetchEnded] = deque()
        # Leases of other engines, into which this one's chunks were fetched.
        self.borrowed: set[Handle] = set()
        self.hints = HintBox(Allowed.SESSION)
        self._cluster = cluster
        self._view = view
        self._epoch = Epoch(0)
        self._failures = 0
        self._unanswered: SyncRequest | None = None
        self._call: Call[EngineAttached] | Call[SyncReply] | None = None

    @property
    def is_attached(self) -> bool:
        return self._epoch != 0

    def die(self) -> None:
        """The engine is dead."""
        if self._call is not None:
            self._call.forget()

    def exchange(self, may_repeat: bool) -> bool:
        """Send the next message, unless one is under way; returns whether it did."""
        if self._call is not None and self._call.is_open:
            return False
        if self._epoch:
            self._sync(may_repeat)
        else:
            self._attach()
        return True

    def drain(self) -> None:
        """Take in what has come; between two steps of the engine."""
        while self.inbox:
            match self.inbox.popleft():
                case EngineAttached() as message:
                    self._view.attached(message)
                case Exchanged(request, reply):
                    self._view.apply(reply, request)
                case FetchEnded(orders, result):
                    self._view.finish_fetch(orders, result)
                    self._note_borrowed(orders, result)

    def _note_borrowed(self, orders: list[FetchOrder], result: FetchResult | None) -> None:
        if result is not None:
            places = zip(result.slots, result.generations, strict=True)
            handles = {Handle(Slot(slot), Generation(generation)) for slot, generation in places}
            self.borrowed |= handles - {order.handle for order in orders}

    def _attach(self) -> None:
        identity = self.identity
        node_epoch, leases = self._view.declared_leases()
        message = AttachEngine(
            version=PROTOCOL_VERSION,
            engine_id=identity.engine_id,
            node_id=identity.node_id,
            namespace=identity.namespace,
            model="tiny",
            num_ranks=1,
            slot_bytes={0: identity.slot_bytes},
            leases=leases,
            node_epoch=node_epoch,
        )
        self._call = Call(
            label=f"attach of {identity.engine_id}",
            ends=(identity.engine_id, "scheduler"),
            receive=lambda post: self._cluster.take_attach(message, post),
            answered=self._attached,
            given_up=self._failed,
        )
        self._cluster.wire.send(self._call, lane=f"session of {identity.engine_id}")

    def _attached(self, answer: EngineAttached) -> None:
        if answer.error:
            self._failed()
            return
        self._epoch = Epoch(answer.epoch)
        self._unanswered = None
        self.hints.tell_again()
        self.inbox.append(answer)

    def _sync(self, may_repeat: bool) -> None:
        if self._unanswered is None:
            self._unanswered = self._view.take_request(
                self._epoch,
                may_grow=len(self.inbox) < MAX_INBOX,
                may_want=not self.inbox,
                may_repeat=may_repeat,
            )
            if not (self._unanswered.idle or self._view.has_touches):
                self._unanswered = msgspec.structs.replace(
                    self._unanswered, sessions=self.hints.take_sessions()
                )
        message = self._unanswered
        self._call = Call[SyncReply](
            label=f"sync {message.seq} of {self.identity.engine_id}",
            ends=(self.identity.engine_id, "scheduler"),
            receive=lambda post: self._cluster.take_sync(message, post),
            answered=lambda reply: self._synced(message, reply),
            given_up=self._failed,
        )
        self._cluster.wire.send(self._call, lane=f"session of {self.identity.engine_id}")

    def _synced(self, message: SyncRequest, reply: SyncReply) -> None:
        self._failures = 0
        self._unanswered = None
        if reply.attach:
            self._epoch = Epoch(0)
        elif not message.idle or reply.cleared:
            self.inbox.append(Exchanged(message, reply))

    def _failed(self) -> None:
        self._failures += 1
        if self._failures > 1:
            self._epoch = Epoch(0)
