"""The directory of the scheduler actor: what nodes report, and what engines and nodes get to know.

```
   NodeActor ── report ──► members ─► listing ─► holdings ─► events, marks, departures
             ◄─ answer ──  how far its listing is read, marks, words, orders' number, pause
   EngineCore ─── ask ───► holdings, what is coming, what is gone
```

It composes its parts, each of which has its own rules, and routes. Whatever a node or an engine
sends may be late, repeated, lost or nonsense: it changes what is known of its sender, and no more.

Invariants:
1. What is said to be on a node is what that node's own listing said, as far as it was read.
2. A node that is no member has nothing, and is told nothing.
3. All events, folded, are the holdings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import msgspec

from raykv.base.ids import (
    EngineId,
    Key,
    Namespace,
    NodeId,
    family_of,
    name_of_part,
    part_of,
    wholes,
)
from raykv.directory.known import asks, coming, document, events, holdings, marks, members, sessions
from raykv.directory.known.spaces import NamespaceUse
from raykv.protocol import listing, node
from raykv.protocol.engine import Ask, AskAnswer, EngineHello

CORE_SHARE = 0.25
"""Of one core, that reports may take."""

FULL_ROWS = 1000
"""A part with this many rows is followed by another one."""

MOST_CHUNKS = 1 << 25
"""Of one node, that the directory keeps; one that is in RAM and on disk counts twice."""

MOST_INTRODUCED = 256
"""Namespaces whose engines' introduction is remembered, and engines that no node has introduced."""

TIERS = (listing.Where.RAM, listing.Where.DISK)

SWEEP = 8192
"""Chunks of lost nodes that are looked at in one go: some milliseconds."""


class Directory:
    """See the module's docstring. Times are of one clock that never goes back.

    Args:
        life: of the scheduler actor.
        orders: what operators want; callers change it outside of the directory.
        most_events: events that are kept.
    """

    def __init__(
        self,
        life: int,
        orders: document.Orders,
        *,
        most_events: int = events.MOST_EVENTS,
    ) -> None:
        self.life = life
        self.cost_s = 0.0002
        """What a report was measured to cost."""
        self.members = members.Members()
        self.events = events.EventRing(most_events)
        self._orders = orders
        self._holdings = holdings.Holdings()
        self._coming = coming.Coming()
        self._asks = asks.Asks(self.members, self._holdings, self._coming)
        self._numbering = marks.Numbering(life)
        self._marks = marks.SpareMarks(self._holdings, self.members.is_staying, self._numbering)
        self.sessions = sessions.SessionNodes(self._numbering)
        self._use = NamespaceUse()
        # Time of the first call: until all nodes have had time to report, none counts as alone.
        self.began_at: float | None = None
        # What engines have said of a namespace outlives them; the one that was last said is last.
        self.introduced: dict[Namespace, EngineHello] = {}
        # Engines that ask and are introduced by no node: where each is, and when it asked last.
        self._strangers: dict[members.EngineLife, tuple[NodeId, float]] = {}
        # Nodes whose last report was full.
        self._full: set[NodeId] = set()

    # Reports

    def report(self, report: node.Report, now: float) -> node.ReportAnswer:
        """Take in a node's report. One that is over is answered like that of an unknown node."""
        self._look(now)
        if self.members.is_over(report):
            return node.ReportAnswer(
                self.life, orders=self._orders.stamp, pause_ms=node.PAUSE_MS[1]
            )
        node_id = NodeId(report.node_id)
        if self.members.is_new(report):
            if node_id in self.members:
                self._lose(node_id, now)
            self._join(report, now)
        before = self.members.hear(report, now)
        wants_orders = before is not None and self._take_news(report, before, now)
        if report.part is not None:
            self._take_part(node_id, report.part, now)
        return self._answer(node_id, report.part, now, wants_orders=wants_orders)

    def _join(self, report: node.Report, now: float) -> None:
        node_id = NodeId(report.node_id)
        self._marks.join(node_id)
        self.sessions.join(node_id)
        self.events.joined(node_id, report.life, 0, now)

    def _lose(self, node_id: NodeId, now: float) -> None:
        read = self._holdings.position(node_id)
        member = self.members.lose(node_id)
        self._holdings.lose(node_id)
        self.events.lost(node_id, member.number.life, read.number, now)
        self._marks.lose(node_id)
        self.sessions.lose(node_id)
        self._use.lose(node_id, now)
        self._orders.lose(node_id)
        self._full.discard(node_id)
        self._end_engines(member.engines)

    def _end_engines(self, engines: Iterable[members.EngineLife]) -> None:
        for engine in engines:
            self._coming.end(engine)

    def _take_news(self, report: node.Report, before: members.ReportedNode, now: float) -> bool:
        """The latest report of a member; returns whether it has orders that are to be sent here."""
        node_id = NodeId(report.node_id)
        if report.is_leaving != before.report.is_leaving:
            self._marks.turn(node_id)
        self._end_engines(before.engines.keys() - self.members[node_id].engines.keys())
        for engine in report.engines:
            self._introduce(engine.hello)
        spaces = {Namespace(name) for name, count in report.spaces.items() if count}
        self._use.take(node_id, self.members[node_id].namespaces, spaces, now)
        self.sessions.take(node_id, report.sessions)
        self.sessions.hear(node_id, report.words_heard)
        self._marks.hear(node_id, report.heard)
        self._numbering.see(report.heard)
        self._numbering.see(report.words_heard)
        return self._orders.show(node_id, report.orders)

    def _introduce(self, hello: EngineHello) -> None:
        self._strangers.pop(members.EngineLife(EngineId(hello.engine_id), hello.life), None)
        namespace = Namespace(hello.namespace)
        self.introduced.pop(namespace, None)
        self.introduced[namespace] = hello
        if len(self.introduced) > MOST_INTRODUCED:
            del self.introduced[next(iter(self.introduced))]

    # Listings

    def _take_part(self, node_id: NodeId, part: listing.ListingPart, now: float) -> None:
        member = self.members[node_id]
        read, life = self._holdings.position(node_id), member.number.life
        room = MOST_CHUNKS - (0 if part.begins else member.chunks.total())
        taken = self._holdings.take(node_id, _within(part, room))
        if taken.begins:
            self.events.lost(node_id, life, read.number, now)
            self.events.joined(node_id, life, part.start.number, now)
            self._marks.lose(node_id)
            self._marks.join(node_id)
            member.chunks.clear()
        self.events.moved(node_id, life, part.end.number, taken.moved, now)
        for each in taken.moved:
            for tier in TIERS:
                change = bool(each.after & tier) - bool(each.before & tier)
                member.chunks[each.namespace, tier] += len(each.keys) * change
            self._marks.moved(node_id, each)
            if not each.held:
                self._asks.went(each)
            if each.after in holdings.IN_RAM:
                self._coming.came(node_id, each.namespace, each.keys)

    # Answers

    def _answer(
        self, node_id: NodeId, part: listing.ListingPart | None, now: float, *, wants_orders: bool
    ) -> node.ReportAnswer:
        read = self._holdings.position(node_id)
        words, words_number = self.sessions.words(node_id)
        return node.ReportAnswer(
            self.life,
            position=read,
            orders=self._orders.stamp,
            wants_orders=wants_orders,
            marks=self._marks.marks(node_id, read.number),
            pause_ms=self._pause_of(node_id, part),
            alone=self._use.alone(node_id) if self._knows_others(now) else [],
            left=self._use.left(node_id, now),
            words=words,
            words_number=words_number,
            namings=self._orders.namings(self.members[node_id].engines.values()),
        )

    def _pause_of(self, node_id: NodeId, part: listing.ListingPart | None) -> int:
        """A node that has much to tell waits only while the reports of other such nodes are taken
        in: a scheduler actor that is new reads a million chunks within seconds.
        """
        if part is None or len(part.rows.keys) < FULL_ROWS:
            self._full.discard(node_id)
            return self.pause_ms
        self._full.add(node_id)
        return min(int(1000 * (len(self._full) - 1) * self.cost_s), node.PAUSE_MS[1])

    @property
    def pause_ms(self) -> int:
        """Pause of a node between two reports, unless it has much to report."""
        wanted_ms = 1000 * len(self.members) * self.cost_s / CORE_SHARE
        return int(min(max(wanted_ms, node.PAUSE_MS[0]), node.PAUSE_MS[1]))

    def _knows_others(self, now: float) -> bool:
        """Whether all nodes that are there had time to report."""
        return self.began_at is not None and now - self.began_at >= members.EXPIRY_S

    # Questions

    def ask(self, ask: Ask, now: float) -> AskAnswer:
        """Who else has keys; what the engine has begun to store is remembered for others."""
        self._look(now)
        self._coming.expire(now)
        engine = members.EngineLife(EngineId(ask.engine_id), ask.life)
        places = [NodeId(node_id) for node_id in ask.places]
        if not any(
            each in self.members and engine in self.members[each].engines for each in places
        ):
            self._strangers.pop(engine, None)
            self._strangers[engine] = places[0], now
        return self._asks.answer(ask, self.life, now)

    def waiting(self, now: float) -> dict[str, str]:
        """Engines that have asked lately and that no node introduces: by id, where each is."""
        while self._strangers:
            engine, (_, asked_at) = next(iter(self._strangers.items()))
            if now - asked_at < members.EXPIRY_S and len(self._strangers) <= MOST_INTRODUCED:
                break
            del self._strangers[engine]
        return {engine.engine_id: node_id for engine, (node_id, _) in self._strangers.items()}

    def engines(self) -> Iterator[node.ReportedEngine]:
        """All that members introduce; one that is at several nodes comes as often."""
        return (each for member in self.members.values() for each in member.engines.values())

    def where(self, namespace: Namespace, keys: Sequence[Key]) -> list[holdings.Held]:
        """For each key, the nodes that have it; keys in the same places have the same object.

        Of engines with several places: the nodes that have a part, if all parts of that shape of
        engine are somewhere.
        """
        found = list(self._holdings.ask(namespace, keys))
        known = self._holdings.namespaces
        there = {name_of_part(each) for each in known if each != namespace == family_of(each)}
        for parts in wholes(there):
            held = [self._holdings.ask(part_of(namespace, part), keys) for part in parts]
            for at, nodes in enumerate(zip(*held, strict=True)):
                if all(nodes):
                    found[at] += tuple(chain.from_iterable(nodes))
        return found

    # Time

    def expire(self, now: float) -> list[NodeId]:
        """Forget what its time has ended, piece by piece; returns the nodes that are lost."""
        self._look(now)
        silent = self.members.silent(now)
        for node_id in silent:
            self._lose(node_id, now)
        self._coming.expire(now)
        self.waiting(now)
        self._holdings.sweep(SWEEP)
        return silent

    def _look(self, now: float) -> None:
        """Start the clock, and log the clearings since the last call."""
        if self.began_at is None:
            self.began_at = now
        for namespace, floor in self._orders.take_cleared().items():
            self.events.cleared(namespace, floor.history, floor.number, now)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self._holdings.check()
        for part in (self.members, self.events, self._coming, self._marks, self.sessions):
            part.check()
        self._use.check()


def _within(part: listing.ListingPart, room: int) -> listing.ListingPart:
    """A part cut to the number of chunks that a node may have."""
    if len(part.rows.keys) <= room:
        return part
    rows = listing.ListedRows.of(row for row in part.rows if not row.where)
    return msgspec.structs.replace(part, rows=rows)
