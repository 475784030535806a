"""What operators have ordered, as this node has heard it.

The document of orders is taken whole: only one of a later number than the last counts. Of a pin it
has a digest; the keys are an entry of their own, and are asked for once.

Invariants:
1. Numbers of documents rise.
2. No chunk is READY that a floor of any document that was taken has made void.
3. Each pin of the document whose time is not over has claims, or its keys are wanted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from raykv.base.ids import EVERY_NAMESPACE, Key, Namespace, Stamp, family_of
from raykv.base.shares import Share
from raykv.base.tenants import is_label
from raykv.node.pool import records
from raykv.node.pool.claims import SOON_S, Name, Owner, OwnerKind
from raykv.node.pool.index import PoolIndex
from raykv.node.pool.room import NOBODY
from raykv.protocol import engine, operator


@dataclass(slots=True)
class LocalPin:
    """A pin; `names` of its chunks have come, and are claimed, unless there are none. `parts`: in
    which of the pin's namespace they are.
    """

    order: operator.OrderedPin
    until: float
    names: Sequence[Name] = ()
    parts: Sequence[Namespace] = ()

    @property
    def standing(self) -> records.Standing:
        """How its chunks stand."""
        priority = self.order.priority
        return records.Standing.PINNED if priority is None else records.Standing.kept(priority)


class LocalOrders:
    """See the module's docstring.

    Args:
        index: of the pool.
    """

    def __init__(self, index: PoolIndex) -> None:
        self._index = index
        self._document: operator.OrdersDocument | None = None
        self._taken_at = 0.0
        self._pins: dict[str, LocalPin] = {}

    @property
    def stamp(self) -> Stamp:
        """The number of the latest document."""
        return engine.NOTHING_ORDERED if self._document is None else self._document.stamp

    @property
    def is_paused(self) -> bool:
        """Whether nothing is to be stored or loaded."""
        return self._document is not None and self._document.is_paused

    def told(self, now: float) -> operator.OrdersDocument | None:
        """The latest document, for who does not know it; pins have less time left than they had."""
        return None if self._document is None else self._document.later(now - self._taken_at)

    @property
    def shares(self) -> Mapping[str, operator.OrderedShare]:
        """Of tenants, by their labels."""
        return {} if self._document is None else self._document.shares

    def take(self, document: operator.OrdersDocument, now: float) -> set[Namespace]:
        """A document, which counts if its number is later than that of the last one.

        Returns:
            Namespaces that it has cleared; the empty name: all.
        """
        if document.stamp <= self.stamp:
            return set()
        self._document, self._taken_at = document, now
        risen = self._clear(document)
        self._share(document)
        self._pin(document, now)
        return risen

    def _clear(self, document: operator.OrdersDocument) -> set[Namespace]:
        floors = self._index.floors
        is_new = document.stamp.history != floors.history
        if is_new:
            floors.begin(document.stamp.history)
        risen = floors.take(document.floors)
        # Where a history begins, the oldest one may be forgotten.
        if risen or is_new:
            self._index.drop_void({EVERY_NAMESPACE} if is_new else risen)
        return risen

    def _share(self, document: operator.OrdersDocument) -> None:
        shares = {
            label: Share(each.guaranteed, each.most)
            for label, each in document.shares.items()
            if label == NOBODY or is_label(label)
        }
        self._index.share(shares)

    # Pins

    def _pin(self, document: operator.OrdersDocument, now: float) -> None:
        for pin_id in self._pins.keys() - document.pins.keys():
            del self._pins[pin_id]
            self._index.claims.end(_owner(pin_id))
        for pin_id, order in document.pins.items():
            pin, known = LocalPin(order, now + order.left_s), self._pins.get(pin_id)
            if known is not None and known.order.digest == order.digest:
                is_same = known.standing is pin.standing
                if is_same and abs(pin.until - known.until) <= SOON_S:
                    continue
                pin.names, pin.parts = known.names, known.parts
            self._pins[pin_id] = pin
            if pin.names:
                self._claim(pin_id, pin)

    def _claim(self, pin_id: str, pin: LocalPin) -> None:
        self._index.claims.claim(_owner(pin_id), pin.names, pin.standing, pin.until)

    def pin_keys(self, digest: bytes, namespace: Namespace, keys: Iterable[Key]) -> None:
        """The keys of pins that have that digest; of a namespace that is here in parts, all of them
        are pinned.
        """
        parts = self._parts(namespace)
        some = [*islice(dict.fromkeys(keys), operator.MAX_ORDERED)]
        names = [(part, key) for part in parts for key in some]
        for pin_id, pin in self._pins.items():
            if pin.order.digest == digest and not pin.names:
                pin.names, pin.parts = names, parts
                before = self._index.claims.names_of(_owner(pin_id)) - names
                self._index.claims.end(_owner(pin_id), before)
                self._claim(pin_id, pin)

    def _parts(self, namespace: str) -> list[Namespace]:
        """The parts of a namespace that have chunks here; the namespace itself if none has."""
        parts = [each for each in self._index.sizes() if family_of(each) == namespace]
        return parts or [Namespace(namespace)]

    def pins(self) -> Iterator[tuple[str, LocalPin]]:
        """The pins of which the chunks are known, by their ids."""
        return ((pin_id, pin) for pin_id, pin in self._pins.items() if pin.names)

    def wanted(self) -> list[bytes]:
        """Digests of pins whose keys are not known."""
        return list(dict.fromkeys(p.order.digest for p in self._pins.values() if not p.names))

    def expire(self, now: float) -> None:
        """Forget pins whose time is over: their claims end alone. Claim what had no room, and in
        parts that have come.
        """
        claims = self._index.claims
        for pin_id, pin in list(self._pins.items()):
            come = set(self._parts(pin.order.namespace)) - set(pin.parts) if pin.names else ()
            if come:
                keys = list(dict.fromkeys(key for _, key in pin.names))
                pin.parts = [*pin.parts, *come]
                pin.names = [*pin.names, *((part, key) for part in come for key in keys)]
            own, free = claims.names_of(_owner(pin_id)), claims.num_free(OwnerKind.OPERATOR)
            if pin.until <= now:
                del self._pins[pin_id]
            elif len(own) < len(pin.names) and free:
                missing = [name for name in pin.names if name not in own]
                claims.claim(_owner(pin_id), missing[:free], pin.standing, pin.until)


def _owner(pin_id: str) -> Owner:
    return Owner(OwnerKind.OPERATOR, pin_id)
