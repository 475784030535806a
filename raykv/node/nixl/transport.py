"""Reads from other nodes through NIXL: their bytes are taken out of the other pool, one-sided.

    start_read ──► offered ──► being read ──► asked for the end ──► the answer
                     │ no answer │ failed       │ the offer was not in force until the end
                     └───────────┴──────────────┴──► PeerError

The source is asked through Ray, before and after: first it holds the chunks, and says where they
are and their checksums, at the end it says if it has held them all the time. Between the two its
NodeActor does nothing. The bytes land in buffers of this transport, never in slots: a transfer that
is given up may still write into its buffer, which nobody is lent until it has ended.

1. A node is read through Ray until its description is there, when it has no NIXL, and for
   `NIXL_AGAIN_S` after a transfer from it has failed or was given up.
2. A thread that waits for a read also moves on all the others, abandoned ones too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from raykv.base.ids import Refusal
from raykv.node.nixl.agent import NixlAgent, NixlError, Part
from raykv.node.peers import Bytes, Call, PeerError, Peers, PeerTransport, PendingRead, received
from raykv.node.read import Buffers
from raykv.protocol import columns, copies, framing, node

logger = logging.getLogger("raykv.node")

# How long a node that could not be read through NIXL, or has none, is read through Ray.
NIXL_AGAIN_S = 60.0

# Between two looks at transfers: NIXL wakes no thread up.
NIXL_LOOK_S = 0.0005


MOST_BUFFERS = 6
"""Reads under way and not copied yet; those beyond, and larger ones, go through Ray. 384 MiB at
most."""


@dataclass(slots=True)
class _Known:
    """Another node, in one life. `name`: how the agent calls it, once that is known."""

    asked: Call | None
    life: int = 0
    name: str = ""
    again_at: float = 0.0


class NixlTransport:
    """Reads through NIXL from nodes that have it, through `others` from those that don't.

    Any thread may call.

    Args:
        agent: with which the pool is registered.
        peers: the other NodeActors.
        others: the other way to them.
    """

    def __init__(self, agent: NixlAgent, peers: Peers, others: PeerTransport) -> None:
        self.agent = agent
        self.peers = peers
        self.bytes_read = 0
        self._others = others
        self._lock = threading.Lock()
        self._buffers = Buffers(MOST_BUFFERS, agent.register)
        self._known: dict[str, _Known] = {}
        self._reads: list[_NixlRead] = []
        # Buffers of transfers that have failed, and until when they are not used again.
        self._resting: deque[tuple[float, Bytes]] = deque()

    def start_read(self, source: columns.Source, request: copies.Read) -> PendingRead:
        if source.kind is not columns.SourceKind.POOL or request.from_disk:
            return self._others.start_read(source, request)
        self.advance()
        known = self._reachable(source)
        buffer = None if known is None else self._buffer(sum(request.slot_bytes))
        if known is None or buffer is None:
            return self._others.start_read(source, request)
        # Without the lock: Ray may take long to find the source.
        asked = self.peers.call(source, "offer", framing.encode(request))
        read = _NixlRead(self, source, known, request, buffer, asked)
        with self._lock:
            self._reads.append(read)
        return read

    def _buffer(self, num_bytes: int) -> Bytes | None:
        try:
            with self._lock:
                return self._buffers.take(num_bytes)
        except NixlError as error:
            logger.warning("no memory for reads through NIXL: %s", error)
            return None

    def _reachable(self, source: columns.Source) -> _Known | None:
        """The source, if it is known to have NIXL; else ask, and do not wait."""
        known = self._known.get(source.node_id)
        if known is None or (known.asked is None and not known.name and _is_due(known)):
            asked = self.peers.call(source, "describe")
            known = self._known[source.node_id] = _Known(asked)
        with self._lock:
            if known.asked is not None and known.asked.is_done():
                self._meet(source, known)
        return known if known.name and _is_due(known) else None

    def _meet(self, source: columns.Source, known: _Known) -> None:
        asked, known.asked = known.asked, None
        known.again_at = time.monotonic() + NIXL_AGAIN_S
        assert asked is not None
        try:
            described = received(source, asked.wait(0.0), node.NodeDescription)
            if not described.nixl:
                return
            known.name = self.agent.meet(described.nixl)
        except (PeerError, NixlError) as error:
            logger.warning("node %s is not read through NIXL: %s", source.node_id, error)
            return
        known.life = described.life
        known.again_at = 0.0

    def forget(self, source: columns.Source) -> None:
        """The source has begun another life: it is asked anew who it is."""
        self._known.pop(source.node_id, None)

    def failed(self, known: _Known, buffer: Bytes | None = None) -> None:
        """A transfer has failed: the node is read through Ray for a while, and its buffer is not
        used meanwhile, since NIXL may still write into it.
        """
        known.again_at = time.monotonic() + NIXL_AGAIN_S
        if buffer is not None:
            self._resting.append((known.again_at, buffer))

    def advance(self) -> None:
        """Take each read one step further, if that can be done at once."""
        with self._lock:
            while self._resting and self._resting[0][0] <= time.monotonic():
                self._resting.popleft()
            for read in self._reads:
                read.advance()
            self._reads = [read for read in self._reads if not read.is_over]


def _is_due(known: _Known) -> bool:
    return known.again_at <= time.monotonic()


class _NixlRead:
    """A read of `NixlTransport`, whose lock is held when it is advanced."""

    def __init__(
        self,
        transport: NixlTransport,
        source: columns.Source,
        known: _Known,
        request: copies.Read,
        buffer: Bytes,
        asked: Call,
    ) -> None:
        self._transport = transport
        self._source = source
        self._known = known
        self._request = request
        self._buffer: Bytes | None = buffer
        self._steps = self._all_steps(asked)
        self._handle: Any = None
        self._num_bytes = 0
        self._reply: copies.ReadReply | None = None
        self._is_wanted = True
        self._error: PeerError | None = None

    @property
    def is_over(self) -> bool:
        return self._reply is not None or self._error is not None

    def wait(self, timeout_s: float) -> tuple[copies.ReadReply, Bytes]:
        give_up_at = time.monotonic() + timeout_s
        self._transport.advance()
        while not self.is_over:
            if time.monotonic() > give_up_at:
                self.abandon()
                raise PeerError(f"node {self._source.node_id}: no answer in time through NIXL")
            time.sleep(NIXL_LOOK_S)
            self._transport.advance()
        if self._error is not None:
            # Its traceback must not keep the buffer.
            self._buffer = None
            raise self._error
        buffer, self._buffer = self._buffer, None
        assert self._reply is not None
        assert buffer is not None
        return self._reply, buffer[: self._num_bytes]

    def abandon(self) -> None:
        """Its buffer is used again as soon as nothing writes into it any more."""
        self._is_wanted = False
        if self._handle is not None:
            self._transport.failed(self._known)

    def advance(self) -> None:
        """As far as can be gone at once; never raises."""
        try:
            next(self._steps, None)
        except NixlError as error:
            self._transport.failed(self._known, self._buffer)
            self._handle = None
            self._error = PeerError(f"node {self._source.node_id}: {error}")
        except PeerError as error:
            self._error = PeerError(str(error))
        if self.is_over and not self._is_wanted:
            self._buffer = None

    def _all_steps(self, asked: Call) -> Iterator[None]:
        """Read what the source holds; yields while there is something to wait for.

        Raises:
            PeerError: the source has not held it until the end, or does not answer.
            NixlError: the transfer has failed.
        """
        source, agent = self._source, self._transport.agent
        while not asked.is_done():
            yield
        offer = received(source, asked.wait(0.0), copies.Offer)
        if offer.reply.life != self._known.life:
            self._transport.forget(source)
            raise PeerError(f"node {source.node_id}: its NodeActor has been restarted")
        parts = self._parts(offer)
        if parts and self._is_wanted:
            self._handle = agent.read(self._known.name, parts)
            while not agent.is_done(self._handle):
                yield
            agent.release(self._handle)
            self._handle = None
        ended = asked.again("end_offer", offer.reply.life, offer.number)
        while not ended.is_done():
            yield
        if ended.wait(0.0) is not True:
            raise PeerError(f"node {source.node_id}: it was read too slowly")
        self._transport.bytes_read += self._num_bytes
        self._reply = offer.reply

    def _parts(self, offer: copies.Offer) -> list[Part]:
        """Where the bytes of the chunks that were not refused lie, there and here."""
        assert self._buffer is not None
        sizes, refusals = self._request.slot_bytes, offer.reply.refusals
        num_sent = refusals.count(Refusal.NONE)
        if len(refusals) != len(sizes) or len(offer.addresses) != num_sent:
            raise PeerError(f"node {self._source.node_id}: an answer about other chunks")
        here = int(self._buffer.ctypes.data)
        addresses = iter(offer.addresses)
        parts = []
        for size, refusal in zip(sizes, refusals, strict=True):
            if refusal == Refusal.NONE:
                parts.append(Part(here + self._num_bytes, next(addresses), size))
                self._num_bytes += size
        return parts
