"""What a scheduler actor leaves to its next life, in the store of Ray's head node; NodeActors read
the orders there while it is away.

Calls wait for the head node as long as Ray does: only threads that nobody waits for, and people,
may make them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from ray.experimental.internal_kv import (
    _internal_kv_del,
    _internal_kv_get,
    _internal_kv_list,
    _internal_kv_put,
)

from raykv.base.ids import Stamp
from raykv.cluster.names import BEQUESTS
from raykv.protocol.framing import decode, encode
from raykv.protocol.operator import OrdersDocument

LIFE = "life"
"""The name under which every life leaves its number."""

ORDERS, WISH, PIN = "orders", "wish", "pin:"
"""Names of what it knew; behind the last one stands a digest in hexadecimal."""


class KeptOrders(msgspec.Struct, frozen=True):
    """The document, and the Unix time at which the store had it: pins have so much less time."""

    document: OrdersDocument
    at: float


def put(name: str, value: bytes) -> None:
    _internal_kv_put(name.encode(), value, overwrite=True, namespace=BEQUESTS)


def get(name: str) -> bytes | None:
    value: bytes | None = _internal_kv_get(name.encode(), namespace=BEQUESTS)
    return value


def delete(name: str) -> None:
    _internal_kv_del(name.encode(), namespace=BEQUESTS)


def entries() -> Iterator[tuple[str, bytes]]:
    """All stored values, by name."""
    for name in _internal_kv_list(b"", namespace=BEQUESTS):
        value = get(name.decode())
        if value is not None:
            yield name.decode(), value


def put_orders(document: OrdersDocument) -> None:
    """Leave the document that is in force from now on."""
    put(ORDERS, encode(KeptOrders(document, time.time())))


def orders() -> OrdersDocument | None:
    """The document that was left.

    Raises:
        msgspec.MsgspecError: it can't be read.
    """
    value = get(ORDERS)
    return None if value is None else aged(value)


def aged(value: bytes) -> OrdersDocument:
    """A document that was left, whose pins have less time than when it was kept.

    Raises:
        msgspec.MsgspecError: it can't be read.
    """
    kept = decode(value, KeptOrders)
    return kept.document.later(max(0.0, time.time() - kept.at))


def forget_orders() -> None:
    """Leave nothing of what operators have ordered to later lives, but what they have cleared.

    Only after the scheduler actor has ended: otherwise its next document would get the same number
    as the one left here.
    """
    kept = orders()
    if kept is not None and kept != OrdersDocument(kept.stamp, kept.floors):
        stamp = Stamp(kept.stamp.history, kept.stamp.number + 1)
        put_orders(OrdersDocument(stamp, kept.floors))
    for name, _ in entries():
        if name not in (LIFE, ORDERS):
            delete(name)
