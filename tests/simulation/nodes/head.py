"""The scheduler actor in all its lives, and the store of Ray's head that outlives them.

An order is drafted, then kept by the store, and then in force; the actor may die in between. The
store may go back, or lose all, as long as a node shows in time what was lost.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raykv.base.ids import Key, Namespace, Stamp
from raykv.directory.known.directory import Directory
from raykv.directory.known.document import OrderError, Orders
from raykv.protocol.engine import Ask, AskAnswer
from raykv.protocol.framing import decode, encode
from raykv.protocol.node import Report, ReportAnswer
from raykv.protocol.operator import OrderedPin, OrderedShare, OrdersDocument
from tests.simulation.nodes.node import Post, sent

if TYPE_CHECKING:
    from tests.simulation.nodes.cluster import Cluster

DRAWN = 1 << 31

Draft = Callable[[Orders, float], OrdersDocument | None]


@dataclass(eq=False)
class HeadStore:
    """What Ray's head keeps: the document, as bytes, with those before it, and keys of pins."""

    kept: list[bytes] = field(default_factory=list)
    pins: dict[bytes, tuple[Namespace, list[Key]]] = field(default_factory=dict)

    @property
    def document(self) -> OrdersDocument | None:
        return decode(self.kept[-1], OrdersDocument) if self.kept else None


@dataclass(eq=False)
class WantedOrder:
    """What is to become of the document, and who waits for its number."""

    order_id: str
    draft: Draft
    clears: Namespace | None = None
    posts: list[Post[Stamp]] = field(default_factory=list)


class PlayedHead:
    """See the module's docstring."""

    def __init__(self, cluster: Cluster, rng: random.Random, most_events: int) -> None:
        self._cluster = cluster
        self._rng = rng
        self._most_events = most_events
        self.ahead_s = 0.0
        self.store = HeadStore()
        self.is_down = self.is_frozen = False
        self._at_door: deque[Callable[[], None]] = deque()
        self.num_lives = 0
        # When an operator or an engine has cleared a namespace: in which step of the world.
        self.cleared: list[tuple[Namespace, int]] = []
        self.begin()

    @property
    def clock(self) -> float:
        return self._cluster.now + self.ahead_s

    def begin(self) -> None:
        """The next life, which knows what the store has."""
        self.num_lives += 1
        self.is_down = self.is_frozen = False
        self._at_door.clear()
        drawn = self._rng.randrange(1, DRAWN)
        self.orders = Orders(self.store.document, drawn, self.clock)
        self.directory = Directory(self.num_lives, self.orders, most_events=self._most_events)
        if self.store.document is not None:
            self._cluster.note(self.store.document)
        self._wanted: deque[WantedOrder] = deque()
        self._keeping: tuple[WantedOrder, OrdersDocument] | None = None

    def die(self) -> None:
        """The actor is gone, and what it was about to order."""
        self.is_down, self.is_frozen = True, False

    @property
    def is_away(self) -> bool:
        """Whether it does nothing for now."""
        return self.is_down or self.is_frozen

    def thaw(self) -> None:
        """It goes on with what has come meanwhile."""
        self.is_frozen = False
        while self._at_door and not self.is_down:
            self._at_door.popleft()()

    def receive(self, deal: Callable[[], None]) -> None:
        """A message comes; who is frozen deals with it later, who is down never."""
        if self.is_frozen:
            self._at_door.append(deal)
        elif not self.is_down:
            deal()

    # What it is asked

    def report(self, report: Report, post: Post[ReportAnswer]) -> None:
        read = sent(report)
        self.receive(lambda: post(sent(self.directory.report(read, self.clock))))

    def ask(self, questions: list[Ask], post: Post[list[AskAnswer]]) -> None:
        read = list(map(sent, questions))
        self.receive(lambda: post([sent(self.directory.ask(each, self.clock)) for each in read]))

    def tell_orders(self, post: Post[OrdersDocument]) -> None:
        self.receive(lambda: self._tell_orders(post))

    def _tell_orders(self, post: Post[OrdersDocument]) -> None:
        document = self.orders.told(self.clock)
        if document is not None:
            post(sent(document))

    def meet(self, document: OrdersDocument, post: Post[bool]) -> None:
        """A node shows what it has seen."""
        theirs = sent(document)
        self.receive(lambda: self._meet(theirs, post))

    def _meet(self, theirs: OrdersDocument, post: Post[bool]) -> None:
        self._wanted.append(WantedOrder("", lambda orders, now: orders.meet(theirs, now)))
        post(True)

    def pin_keys(self, digest: bytes, post: Post[tuple[Namespace, list[Key]]]) -> None:
        if digest in self.store.pins:
            self.receive(lambda: post(self.store.pins[digest]))

    # Orders

    def order_clear(self, order_id: str, namespace: Namespace, post: Post[Stamp]) -> None:
        """Clear a namespace, or with an empty one all."""
        self.order(
            order_id,
            lambda orders, now: orders.clear(order_id, namespace, now),
            post,
            clears=namespace,
        )

    def change(self, order_id: str, post: Post[Stamp], **changes: Any) -> None:
        """Change fields of the document."""
        self.order(order_id, lambda orders, now: orders.draft(order_id, now, **changes), post)

    def pin(
        self, order_id: str, namespace: Namespace, keys: Iterable[Key], post: Post[Stamp]
    ) -> None:
        """Pin chunks for a while; the pin has the order's id."""
        named = list(keys)
        digest = order_id.encode()
        self.store.pins[digest] = namespace, named
        pin = OrderedPin(namespace, digest, len(named), 3.0)

        def draft(orders: Orders, now: float) -> OrdersDocument:
            told = orders.told(now)
            pins = {**(told.pins if told else {}), order_id: pin}
            return orders.draft(order_id, now, pins=pins)

        self.order(order_id, draft, post)

    def order(
        self, order_id: str, draft: Draft, post: Post[Stamp], clears: Namespace | None = None
    ) -> None:
        """An order, which may be repeated."""
        self.receive(lambda: self._order(order_id, draft, post, clears))

    def _order(
        self, order_id: str, draft: Draft, post: Post[Stamp], clears: Namespace | None
    ) -> None:
        known = self.orders.number_of(order_id)
        if known is not None:
            post(known)
            return
        under_way = [*self._wanted, *([self._keeping[0]] if self._keeping else [])]
        for wanted in under_way:
            if wanted.order_id == order_id:
                wanted.posts.append(post)
                return
        self._wanted.append(WantedOrder(order_id, draft, clears, [post]))

    def work(self) -> str | None:
        """The next step of an order; None if there is none."""
        if self.is_away:
            return None
        if self._keeping is not None:
            wanted, draft = self._keeping
            self.keep(draft)
            self._keeping = None
            self._confirm(wanted, draft)
            return f"{draft.stamp} is in force"
        first = self.orders.first(self.clock)
        wanted = WantedOrder("", lambda _orders, _now: first)
        if first is None:
            if not self._wanted:
                return None
            wanted = self._wanted.popleft()
        try:
            made = wanted.draft(self.orders, self.clock)
        except OrderError:
            # It has just begun: who has ordered it will repeat it.
            return "too early for orders"
        if made is None:
            return "nothing new"
        self._keeping = wanted, sent(made)
        return f"drafts {made.stamp}"

    def keep(self, draft: OrdersDocument) -> None:
        """The store has a draft."""
        self.store.kept.append(encode(draft))

    def _confirm(self, wanted: WantedOrder, draft: OrdersDocument) -> None:
        self.orders.confirm(draft, self.clock)
        self._cluster.note(draft)
        if wanted.clears is not None:
            self.cleared.append((wanted.clears, self._cluster.tick))
        for post in wanted.posts:
            post(draft.stamp)

    @property
    def is_keeping(self) -> bool:
        """Whether a draft is with the store."""
        return self._keeping is not None

    def die_while_keeping(self, *, is_kept: bool) -> None:
        """The actor dies; the store has kept its draft, or not."""
        if is_kept and self._keeping is not None:
            wanted, draft = self._keeping
            self.keep(draft)
            if wanted.clears is not None:
                self.cleared.append((wanted.clears, self._cluster.tick))
        self.die()


SHARES: tuple[dict[str, OrderedShare], ...] = (
    {},
    {"t1": OrderedShare("one", 0.3, 1.0), "t2": OrderedShare("two", 0.0, 0.4)},
    {"t1": OrderedShare("one", 0.5, 0.6)},
)
"""Of tenants, as operators order them."""
