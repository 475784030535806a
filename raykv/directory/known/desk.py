"""Orders on their way into the document, one at a time; pure.

              take                next               the store has kept it
  (unknown) ───────► waiting ───────────► being kept ─────────────────────► in force
                        │ refused: why is remembered for a while

An order may come again at any time, by its id, and comes to the same. Documents that members show
wait and are kept in the same way.

Invariants:
1. At most one document is being kept.
2. The keys of every pin of the document that is in force are known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

from raykv.base.ids import Key, Namespace, Stamp
from raykv.directory.known.document import OrderError, Orders
from raykv.protocol import columns, framing, node, operator
from raykv.protocol.engine import Naming

T = TypeVar("T")

MOST_WAITING = 256
"""Orders, and documents of members."""

MOST_REFUSED = 256
"""Refused orders whose reason is remembered."""

DIGEST_BYTES = 16


class Draft(NamedTuple):
    """What the store has to keep: the keys of a pin, if they are new, and then the document."""

    document: operator.OrdersDocument
    order_id: str = ""
    digest: bytes = b""
    keys: bytes = b""


class OrderDesk:
    """See the module's docstring. Times are of the clock of the orders.

    Args:
        orders: those in force.
        pin_keys: by digest, the keys of pins that the store has.
        engines: all that nodes introduce.
    """

    def __init__(
        self,
        orders: Orders,
        pin_keys: dict[bytes, bytes],
        engines: Callable[[], Iterable[node.ReportedEngine]],
    ) -> None:
        self._orders = orders
        self._engines = engines
        self._pin_keys = dict(pin_keys)
        self._waiting: dict[str, operator.OperatorOrder] = {}
        self._shown: deque[operator.OrdersDocument] = deque(maxlen=MOST_WAITING)
        self._refused: dict[str, str] = {}
        self._keeping: Draft | None = None

    def take(self, order: operator.OperatorOrder) -> str:
        """An order, perhaps one that is known; returns why it can't be taken now."""
        order_id = order.order_id
        is_kept = self._keeping is not None and self._keeping.order_id == order_id
        if is_kept or self._orders.number_of(order_id) is not None:
            return ""
        if len(self._waiting) >= MOST_WAITING:
            return f"{MOST_WAITING} orders wait already: try again"
        self._refused.pop(order_id, None)
        self._waiting.setdefault(order_id, order)
        return ""

    def show(self, document: operator.OrdersDocument) -> None:
        """A member's document."""
        self._shown.append(document)

    @property
    def is_keeping(self) -> bool:
        """Whether the store has yet to say that it has kept something."""
        return self._keeping is not None

    def next(self, now: float) -> Draft | None:
        """The draft that the store is to keep now, if there is one; `kept` confirms it."""
        if self._keeping is None:
            self._keeping = self._first(now) or self._met(now) or self._ordered(now)
            return self._keeping
        return None

    def _first(self, now: float) -> Draft | None:
        first = self._orders.first(now)
        return None if first is None else Draft(first)

    def _met(self, now: float) -> Draft | None:
        while self._shown:
            try:
                met = self._orders.meet(self._shown.popleft(), now)
            except OrderError:
                continue
            if met is not None:
                return Draft(met)
        return None

    def _ordered(self, now: float) -> Draft | None:
        while self._waiting and not self._orders.is_early(now):
            order_id = next(iter(self._waiting))
            order = self._waiting.pop(order_id)
            try:
                return self._drafted(order, now)
            except OrderError as error:
                self._refused[order_id] = str(error)
                if len(self._refused) > MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
        return None

    def _drafted(self, order: operator.OperatorOrder, now: float) -> Draft:
        """What an order makes.

        Raises:
            OrderError: it can't be carried out.
        """
        order_id, orders = order.order_id, self._orders
        told = orders.told(now)
        assert told is not None, "it is not early"
        if isinstance(order, operator.ClearOrder):
            return Draft(orders.clear(order_id, order.namespace, now), order_id)
        if isinstance(order, operator.PinOrder):
            return self._pinned(order, told, now)
        if isinstance(order, operator.NameWeights):
            return self._named(order, told, now)
        return Draft(orders.draft(order_id, now, **_changes(order, told)), order_id)

    def _pinned(self, order: operator.PinOrder, told: operator.OrdersDocument, now: float) -> Draft:
        space = Namespace(order.namespace)
        keys = list(dict.fromkeys(map(Key, order.keys)))
        raw = framing.encode(columns.NamedKeys.of((space, key) for key in keys))
        digest = blake2b(raw, digest_size=DIGEST_BYTES).digest()
        pin = operator.OrderedPin(space, digest, len(keys), order.ttl_s, order.priority)
        made = self._orders.draft(order.order_id, now, pins={**told.pins, order.pin_id: pin})
        is_known = digest in self._pin_keys
        self._pin_keys[digest] = raw
        return Draft(made, order.order_id, b"" if is_known else digest, b"" if is_known else raw)

    def _named(
        self, order: operator.NameWeights, told: operator.OrdersDocument, now: float
    ) -> Draft:
        engines = list(self._engines())
        weights: dict[int, int] = {}
        for each in engines:
            if each.hello.engine_id.startswith(order.beginning):
                weights[each.hello.life] = max(each.weights, weights.get(each.hello.life, 0))
        if not weights:
            raise OrderError(f"the id of no engine begins with {order.beginning!r}")
        most = operator.MAX_TOLD_NAMINGS
        if len(weights) > most:
            raise OrderError(
                f"these are {len(weights)} engines, and at most {most} can be named at once: give "
                "a longer beginning of their ids"
            )
        stamp = Stamp(told.stamp.history, told.stamp.number + 1)
        # Names of engines that are not known any more go.
        others = {each.hello.life for each in engines} - weights.keys()
        namings = {life: each for life, each in told.namings.items() if life in others}
        for life, count in weights.items():
            namings[life] = Naming(stamp, order.weights_version, count)
        latest = dict(list(namings.items())[-most:])
        made = self._orders.draft(order.order_id, now, namings=latest)
        return Draft(made, order.order_id)

    def kept(self, now: float) -> list[bytes]:
        """The store has kept what was drafted: it is in force. Returns digests of keys that are of
        no pin any more.
        """
        assert self._keeping is not None
        document = self._keeping.document
        self._orders.confirm(document, now)
        self._keeping = None
        used = {pin.digest for pin in document.pins.values()}
        unused = [digest for digest in self._pin_keys if digest not in used]
        for digest in unused:
            del self._pin_keys[digest]
        return unused

    # Questions

    def state(self, order_id: str, now: float) -> operator.OrderState:
        """The state of an order; unknown until members have had time to report."""
        if self._orders.is_early(now):
            return operator.OrderState()
        stamp = self._orders.number_of(order_id)
        if stamp is not None:
            told = dict.fromkeys(each.hello.engine_id for each in self._engines_of(stamp, now))
            behind = [str(each) for each in self._orders.behind(stamp)]
            return operator.OrderState(stamp, behind=behind, told=list(told))
        is_kept = self._keeping is not None and self._keeping.order_id == order_id
        error = self._refused.get(order_id, "")
        is_known = is_kept or bool(error) or order_id in self._waiting
        return operator.OrderState(error=error, is_known=is_known)

    def _engines_of(self, stamp: Stamp, now: float) -> list[node.ReportedEngine]:
        """Engines that have names of that order."""
        told = self._orders.told(now)
        namings = told.namings if told else {}
        lives = {life for life, each in namings.items() if each.stamp == stamp}
        return [each for each in self._engines() if each.hello.life in lives]

    def has_heard(self, order_id: str, now: float) -> bool:
        """Whether all engines that live have heard what `NameWeights` of that id tells them."""
        stamp = self._orders.number_of(order_id)
        if stamp is None or self._orders.is_early(now):
            return False
        return all(each.heard >= stamp for each in self._engines_of(stamp, now))

    def pin_keys(self, digest: bytes) -> bytes:
        """The names of a pin's chunks as the store has them; empty: not known."""
        return self._pin_keys.get(digest, b"")


def _changes(order: operator.OperatorOrder, told: operator.OrdersDocument) -> dict[str, Any]:
    """Fields of the document that an order changes.

    Raises:
        OrderError: it can't be carried out.
    """
    match order:
        case operator.PauseOrder():
            return {"is_paused": order.paused}
        case operator.UnpinOrder():
            if order.pin_id not in told.pins:
                raise OrderError(f"there is no pin {order.pin_id!r}")
            return {"pins": _without(told.pins, order.pin_id)}
        case operator.Quota():
            return {"shares": _shared(order, told.shares)}
        case operator.EndQuota():
            label = next((at for at, each in told.shares.items() if each.name == order.name), None)
            if label is None:
                raise OrderError(f"there is no quota {order.name!r}")
            return {"shares": _without(told.shares, label)}
        case _:
            raise AssertionError(order)


def _without(some: dict[str, T], gone: str) -> dict[str, T]:
    return {name: each for name, each in some.items() if name != gone}


def _shared(
    quota: operator.Quota, shares: dict[str, operator.OrderedShare]
) -> dict[str, operator.OrderedShare]:
    """The shares with a quota, in place of the one of that name.

    Raises:
        OrderError: there is no room for it.
    """
    others = {label: each for label, each in shares.items() if each.name != quota.name}
    if quota.tenant in others:
        named = others[quota.tenant].name
        raise OrderError(f"the quota {named!r} is of the same tenant: remove it first")
    total = sum(each.guaranteed for each in others.values())
    if total + quota.guaranteed > operator.MAX_GUARANTEED + 1e-9:
        raise OrderError(
            f"{quota.guaranteed:g} can't be guaranteed: others are guaranteed {total:g}, and "
            f"all together at most {operator.MAX_GUARANTEED:g}"
        )
    return {**others, quota.tenant: operator.OrderedShare(quota.name, quota.guaranteed, quota.most)}
