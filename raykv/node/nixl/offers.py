"""The source's side of a read without its own hands: chunks are held while another node takes them.

    begin ──► held ──► end: True, what was offered is what was read
                │
                └── expire ──► end: False, a store may have overwritten it

An offer's chunks have readers, so no store touches them. The reader asks for the end, and
believes its bytes only if the offer was in force until then.
"""

from __future__ import annotations

import itertools
import threading
import time

from raykv.base import deadlines
from raykv.node.pool.records import ChunkRecord
from raykv.node.read import ReadService
from raykv.protocol.columns import Numbers
from raykv.protocol.copies import Offer, Read

# For another node to take an offer's bytes, which no store may overwrite meanwhile; it may have
# died.
OFFER_S = 10.0


class Offers:
    """Any thread may call.

    Args:
        reader: of this node's pool.
        offer_s: how long an offer is in force.
    """

    def __init__(self, reader: ReadService, offer_s: float = OFFER_S) -> None:
        self._reader = reader
        self._offer_s = offer_s
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # By number: the chunks, and until when they are held.
        self._held: dict[int, tuple[list[ChunkRecord], float]] = {}

    def begin(self, request: Read) -> Offer:
        """Hold the wanted chunks that are here.

        Raises:
            MessageError: the request is invalid.
        """
        reply, chunks = self._reader.hold(request)
        with self._lock:
            number = next(self._numbers)
            self._held[number] = chunks, time.monotonic() + self._offer_s
        return Offer(number, reply, Numbers.of(map(self._reader.keeper.address_of, chunks)))

    def end(self, number: int) -> bool:
        """Let an offer's chunks go; False: that was done already, it was too old."""
        with self._lock:
            held = self._held.pop(number, None)
        if held is None:
            return False
        chunks, _ = held
        self._reader.keeper.end_read(*chunks)
        return True

    def expire(self) -> None:
        """End all offers that are too old."""
        now = time.monotonic()
        with self._lock:
            old = [number for number, (_, ends_at) in self._held.items() if ends_at <= now]
        for number in old:
            self.end(number)

    def expire_for_ever(self) -> None:
        """End old offers for ever: the node that they are for may have died."""
        while True:
            time.sleep(deadlines.WAKE_S)
            self.expire()

    def __len__(self) -> int:
        """Offers in force."""
        with self._lock:
            return len(self._held)
