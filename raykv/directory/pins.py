"""Pins: chunks that are kept, because an operator or a request wants them to be.

              pin, hint                     the chunk is stored
   (unknown) ───────────► wished for ────────────────────────────► kept  or, without room, waiting
       ▲                      ▲  the chunk is gone                  │
       │                      └─────────────────────────────────────┤
       └────────────────────────────────────────────────────────────┘ unpin, its time is over

A wish names a chunk, whether it is stored or not, on whatever node; it is *firm* (no eviction takes
the chunk), or has a priority and gives way once nothing of less worth is left to be evicted. The
table of slots keeps evictions from what is kept; here is what is kept, how much of it, and why.

Invariants:
1. What is kept on a node takes at most the node's share for pins. What only requests want does not
   grow beyond half of that.
2. A replica of a chunk that is wished for is either kept or waiting; any other replica is neither.
3. There are at most `MAX_PINNED` names, of which requests alone have at most half.
4. A pin that is refused has changed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter

from raykv.base.ids import Key, Namespace, NodeId
from raykv.directory.book import PoolBook
from raykv.directory.members import Node
from raykv.directory.table.protocol import Changes, ChunkTable, Name
from raykv.memory.room import human_bytes
from raykv.protocol.engine import Hints
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.operator import NodePins, PinAnswer, Pinned, PinOrder, PinStatus

MAX_PINNED = 65_536
"""Names: an eviction walks past what is kept, 65,536 of them in some milliseconds at most."""

MAX_PINS = 1024

FAVOUR_S = 600.0
"""How long a request's priority counts."""

SHARE = 0.25
"""Share of a pool that pins may take by default."""

LOOK_S = 1.0
"""Pause between two searches for wishes that have expired; the table itself is exact."""

_FIRM_HINT, _FAVOUR_HINT, _PAUSE = "hint: pin", "hint: priority", "hint: pause"
"""Holder of the wishes of all requests, in place of a pin's id."""

_MAX_FOUND = 65_536
"""Replicas that are looked for in one go."""

_HINTS = frozenset({_FIRM_HINT, _FAVOUR_HINT, _PAUSE})


@dataclass(frozen=True, slots=True)
class Wish:
    """One holder's wish to keep a chunk; without a priority it is firm."""

    until: float
    priority: int | None = None


@dataclass(slots=True)
class _NodeAccount:
    """The replicas on a node that are wished for, with their bytes."""

    kept: dict[Name, int] = field(default_factory=dict)
    waiting: dict[Name, int] = field(default_factory=dict)
    kept_bytes: int = 0
    client_bytes: int = 0


class Pins:
    """See the module's docstring.

    Args:
        nodes: all nodes, kept up to date by the block manager.
        table: of all their chunks.
        share: of each pool that pins may take.
        linger_s: what is unpinned stays for so long: somebody may be about to load it.
    """

    def __init__(
        self,
        nodes: Mapping[NodeId, Node],
        table: Callable[[], ChunkTable],
        share: float,
        linger_s: float,
    ) -> None:
        self._nodes = nodes
        self._table = table
        self._share = share
        self._linger_s = linger_s
        self._pins: dict[str, PinOrder] = {}
        self._ends: dict[str, float] = {}
        self._wishes: dict[Name, dict[str, Wish]] = {}
        # Names that requests alone wish for.
        self._client_names = 0
        self._accounts: dict[NodeId, _NodeAccount] = {}
        self._look_at = float("-inf")
        self._hints_refused = 0

    # Orders

    def pin(self, order: PinOrder, now: float) -> PinAnswer:
        """Keep chunks: all that are stored, now, and the others when they come.

        Refused as a whole if a node that has some of them has no room for its part.
        """
        names = [(Namespace(order.namespace), Key(key)) for key in dict.fromkeys(order.keys)]
        error = self._objection(order.pin_id, names)
        if error:
            return PinAnswer(PROTOCOL_VERSION, error=error)
        old = set(self._names_of(order.pin_id)).difference(names)
        ending = {name for name in old if len(self._wishes[name]) == 1}
        self._pins[order.pin_id] = order
        self._ends[order.pin_id] = now + order.ttl_s
        # What waits for room comes last: there is as much as this pin needs.
        if ending:
            self._change(sorted(ending), order.pin_id, None, now)
        self._change(names, order.pin_id, Wish(now + order.ttl_s, order.priority), now)
        if old:
            self._change(sorted(old - ending), order.pin_id, None, now)
            self._fill(now)
        return PinAnswer(PROTOCOL_VERSION, self._status(order, now))

    def _objection(self, pin_id: str, names: Sequence[Name]) -> str:
        """Why there is no room for a pin that takes the place of an earlier one of its id."""
        if pin_id not in self._pins and len(self._pins) >= MAX_PINS:
            return f"there are {MAX_PINS} pins already, the most that are allowed: unpin some first"
        own = self._names_of(pin_id)
        ending = {name for name in own if len(self._wishes[name]) == 1}.difference(names)
        num_new = sum(name not in self._wishes for name in names)
        count = len(self._wishes) + num_new - len(ending)
        if count > MAX_PINNED:
            return (
                f"{count:,} chunks would be pinned, more than {MAX_PINNED:,} in all: pin a shorter "
                "prefix, or unpin something"
            )
        for node in self._nodes.values():
            account = self._account(node.node_id)
            more = sum(
                size
                for name in names
                if name not in account.kept and (size := _size_on(node.book, name)) is not None
            )
            freed = sum(account.kept.get(name, 0) for name in ending)
            if more and account.kept_bytes - freed + more > self.quota(node):
                return self._no_room(node, more, account.kept_bytes - freed)
        return ""

    def _no_room(self, node: Node, more: int, kept: int) -> str:
        return (
            f"pinning these chunks takes {human_bytes(more)} more of node {node.node_id[:12]}, "
            f"where pins take {human_bytes(kept)} of the {human_bytes(self.quota(node))} that they "
            f"may (pin_share={self._share:g} of its pool of "
            f"{human_bytes(node.book.geometry.pool_bytes)}): pin fewer chunks, unpin something, or "
            "set a larger pin_share"
        )

    def quota(self, node: Node) -> int:
        """Bytes that pins may take on a node."""
        return int(node.book.geometry.pool_bytes * self._share)

    def unpin(self, pin_id: str, now: float) -> bool:
        """End a pin; False if there is none of that id."""
        names = self._names_of(pin_id)
        if self._pins.pop(pin_id, None) is None:
            return False
        del self._ends[pin_id]
        self._change(names, pin_id, None, now)
        self._fill(now)
        return True

    def _names_of(self, pin_id: str) -> list[Name]:
        order = self._pins.get(pin_id)
        if order is None:
            return []
        return [(Namespace(order.namespace), Key(key)) for key in dict.fromkeys(order.keys)]

    def take_hints(self, namespace: Namespace, hints: Hints, now: float) -> None:
        """What requests of an engine wish for, if there is room for it."""
        pinned = [Wish(now + ttl_s) for ttl_s in hints.pin_s]
        favoured = [Wish(now + FAVOUR_S, priority) for priority in hints.priorities]
        self._take(namespace, hints.pinned, _FIRM_HINT, pinned, now)
        self._take(namespace, hints.favoured, _FAVOUR_HINT, favoured, now)

    def keep_paused(
        self, namespace: Namespace, keys: Sequence[Key], until: float, priority: int, now: float
    ) -> None:
        """A session pauses: keep its chunks like those of a priority, if there is room for it."""
        self._take(namespace, keys, _PAUSE, [Wish(until, priority)] * len(keys), now)

    def resume(self, namespace: Namespace, keys: Sequence[Key], now: float) -> None:
        """A session's pause is over: its chunks are about to be loaded."""
        self._drop_wishes(namespace, keys, _PAUSE, now)

    def release(self, namespace: Namespace, keys: Sequence[Key], now: float) -> None:
        """Nobody will miss these chunks: what only gives way does so at once."""
        kept = [key for key in keys if (namespace, key) in self._wishes]
        for holder in (_PAUSE, _FAVOUR_HINT):
            self._drop_wishes(namespace, kept, holder, now)
        free = [key for key in kept if (namespace, key) not in self._wishes]
        for node in self._nodes.values() if free else ():
            node.book.table.protect(namespace, free, 0.0)

    def _drop_wishes(
        self, namespace: Namespace, keys: Sequence[Key], holder: str, now: float
    ) -> None:
        names = [
            (namespace, key) for key in keys if holder in self._wishes.get((namespace, key), ())
        ]
        if names:
            self._change(names, holder, None, now)
            self._fill(now)

    def _take(
        self,
        namespace: Namespace,
        keys: Sequence[bytes],
        holder: str,
        wishes: Sequence[Wish],
        now: float,
    ) -> None:
        """Wishes of requests; those that a chunk has are made longer and stronger, never less."""
        taken: dict[Wish, list[Name]] = {}
        room = min(MAX_PINNED // 2 - self._client_names, MAX_PINNED - len(self._wishes))
        for key, wish in zip(keys, wishes, strict=True):
            name = (namespace, Key(key))
            known = self._wishes.get(name, {})
            if not known and room <= 0:
                self._hints_refused += 1
                continue
            room -= not known
            if (old := known.get(holder)) is not None:
                rank = max(old.priority or 0, wish.priority or 0) or None
                if wish.until - old.until < LOOK_S and rank == old.priority:
                    continue
                wish = Wish(max(old.until, wish.until), rank)
            taken.setdefault(wish, []).append(name)
        for wish, names in taken.items():
            self._change(names, holder, wish, now)

    # Wishes

    def _change(self, names: Sequence[Name], holder: str, wish: Wish | None, now: float) -> None:
        """A holder wishes for chunks of one namespace, or (None) for them no longer."""
        step = max(1, _MAX_FOUND // max(1, len(self._nodes)))
        for start in range(0, len(names), step):
            part = names[start : start + step]
            for name, nodes in zip(part, self._holders_of(part), strict=True):
                was_clients = self._is_clients(name)
                wishes = self._wishes.setdefault(name, {})
                if wish is None:
                    wishes.pop(holder, None)
                else:
                    wishes[holder] = wish
                if not wishes:
                    del self._wishes[name]
                change = self._is_clients(name) - was_clients
                self._client_names += change
                for node in nodes:
                    account = self._account(node.node_id)
                    account.client_bytes += change * account.kept.get(name, 0)
                    self._settle(node, name, now)

    def _holders_of(self, names: Sequence[Name]) -> list[list[Node]]:
        """The nodes that have each of some chunks of one namespace."""
        every = tuple(self._nodes)
        keys = [key for _, key in names]
        found = self._table().ask(names[0][0], keys, every, (), len(every), 0.0)
        holders: list[list[Node]] = [[] for _ in names]
        for index, number in zip(found.key_index, found.node_index, strict=True):
            holders[index].append(self._nodes[found.nodes[number]])
        return holders

    def _is_clients(self, name: Name) -> bool:
        """Whether requests alone wish for a chunk."""
        wishes = self._wishes.get(name)
        return wishes is not None and _HINTS.issuperset(wishes)

    # Replicas

    def _account(self, node_id: NodeId) -> _NodeAccount:
        return self._accounts.setdefault(node_id, _NodeAccount())

    def _settle(self, node: Node, name: Name, now: float) -> None:
        """Have a replica kept, waiting, or neither, as the wishes for its chunk are now."""
        account = self._account(node.node_id)
        size = account.kept.get(name)
        if size is None:
            size = account.waiting.get(name) or _size_on(node.book, name)
        if size is None:
            return
        if name not in self._wishes:
            if name in account.kept:
                self._protect(node, name, now + self._linger_s)
            self._forget(account, name)
            return
        if name not in account.kept and not self._has_room(node, account, name, size):
            account.waiting[name] = size
            return
        self._keep(account, name, size)
        self._protect(node, name, max(wish.until for wish in self._wishes[name].values()))

    def _has_room(self, node: Node, account: _NodeAccount, name: Name, size: int) -> bool:
        quota = self.quota(node)
        if self._is_clients(name) and account.client_bytes + size > quota // 2:
            return False
        return account.kept_bytes + size <= quota

    def _keep(self, account: _NodeAccount, name: Name, size: int) -> None:
        account.waiting.pop(name, None)
        if name not in account.kept:
            account.kept[name] = size
            account.kept_bytes += size
            account.client_bytes += size * self._is_clients(name)

    def _forget(self, account: _NodeAccount, name: Name) -> None:
        """A replica is gone, or nobody wishes for it any more (then it counts as no client's)."""
        account.waiting.pop(name, None)
        size = account.kept.pop(name, None)
        if size is not None:
            account.kept_bytes -= size
            account.client_bytes -= size * self._is_clients(name)

    def _protect(self, node: Node, name: Name, until: float) -> None:
        node.book.table.protect(name[0], [name[1]], until)

    def _fill(self, now: float) -> None:
        """Room has become free: keep what waits for it."""
        for node in self._nodes.values():
            for name in list(self._account(node.node_id).waiting):
                self._settle(node, name, now)

    # What happens to the nodes

    def lost(self, node_id: NodeId) -> None:
        """A node is gone."""
        self._accounts.pop(node_id, None)

    def changed(self, node_id: NodeId, changes: Changes) -> None:
        """Chunks came to a node, or went."""
        node = self._nodes.get(node_id)
        if not self._wishes or node is None:
            return
        account = self._account(node_id)
        for key in changes.keys:
            name = (changes.namespace, Key(key))
            if name in self._wishes:
                self._forget(account, name)
                if changes.stored:
                    self._settle(node, name, float("-inf"))

    def cleared(self, namespace: Namespace) -> None:
        """All chunks of a namespace are gone; what is wished for is kept when it comes again."""
        for account in self._accounts.values():
            for name in [*account.kept, *account.waiting]:
                if name[0] == namespace:
                    self._forget(account, name)

    def give_way(self, node_id: NodeId, slot_bytes: int, count: int) -> int:
        """Let evictions take chunks that have a priority, the lowest first; returns how many.

        Called when nothing else of that slot size is left to be evicted.
        """
        node, account = self._nodes[node_id], self._account(node_id)
        giving = [
            (rank, name)
            for name, size in account.kept.items()
            if size == slot_bytes and (rank := self._rank(name)) is not None
        ]
        giving.sort(key=lambda each: each[0])
        for _, name in giving[:count]:
            self._protect(node, name, 0.0)
        return len(giving[:count])

    def _rank(self, name: Name) -> int | None:
        """The highest priority that somebody has given a chunk; None if a wish is firm."""
        ranks = [wish.priority for wish in self._wishes[name].values()]
        return None if None in ranks else max(rank for rank in ranks if rank is not None)

    def expire(self, now: float) -> list[str]:
        """End wishes whose time is over, about once a second; the ids of pins that have ended."""
        if now < self._look_at or not self._wishes:
            return []
        self._look_at = now + LOOK_S
        ended = [pin_id for pin_id, end in self._ends.items() if end <= now]
        for pin_id in ended:
            self.unpin(pin_id, now)
        for holder in _HINTS:
            over = [
                name
                for name, wishes in self._wishes.items()
                if (wish := wishes.get(holder)) is not None and wish.until <= now
            ]
            over.sort()
            for _, names in groupby(over, key=itemgetter(0)):
                self._change(list(names), holder, None, now)
            if over:
                self._fill(now)
        return ended

    # Looking

    def order_of(self, pin_id: str) -> PinOrder | None:
        """The order behind a pin, if there is one of that id."""
        return self._pins.get(pin_id)

    def pinned(self, now: float) -> Pinned:
        """A picture for people; changes nothing."""
        return Pinned(
            version=PROTOCOL_VERSION,
            pins=[self._status(order, now) for order in self._pins.values()],
            nodes=[self.on_node(node) for node in self._nodes.values()],
            client_chunks=self._client_names,
            hints_refused=self._hints_refused,
        )

    def on_node(self, node: Node) -> NodePins:
        """What pins keep there."""
        account = self._accounts.get(node.node_id, _NodeAccount())
        return NodePins(
            node_id=node.node_id,
            kept_bytes=account.kept_bytes,
            kept_chunks=len(account.kept),
            client_bytes=account.client_bytes,
            quota_bytes=self.quota(node),
            waiting_chunks=len(account.waiting),
        )

    def is_firm(self, node_id: NodeId, name: Name) -> bool:
        """Whether a replica must stay where it is."""
        account = self._accounts.get(node_id)
        return account is not None and name in account.kept and self._rank(name) is None

    def _status(self, order: PinOrder, now: float) -> PinStatus:
        names = self._names_of(order.pin_id)
        accounts = list(self._accounts.values())
        return PinStatus(
            pin_id=order.pin_id,
            namespace=order.namespace,
            chunks=len(names),
            held_chunks=sum(any(name in each.kept for each in accounts) for name in names),
            kept_bytes=sum(each.kept.get(name, 0) for each in accounts for name in names),
            left_s=max(0.0, self._ends[order.pin_id] - now),
            priority=order.priority,
            waiting_chunks=sum(any(name in each.waiting for each in accounts) for name in names),
        )

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        assert len(self._wishes) <= MAX_PINNED, len(self._wishes)
        holders = Counter(holder for wishes in self._wishes.values() for holder in wishes)
        named = Counter({pin_id: len(self._names_of(pin_id)) for pin_id in self._pins})
        assert {h: n for h, n in holders.items() if h not in _HINTS} == +named, (holders, named)
        assert self._client_names == sum(map(self._is_clients, self._wishes))
        for node in self._nodes.values():
            self._check_node(node)

    def _check_node(self, node: Node) -> None:
        account, quota = self._account(node.node_id), self.quota(node)
        held = {name: _size_on(node.book, name) for name in self._wishes}
        expected = {name: size for name, size in held.items() if size is not None}
        assert not account.kept.keys() & account.waiting.keys(), account
        assert {**account.kept, **account.waiting} == expected, (account, expected)
        assert account.kept_bytes == sum(account.kept.values()) <= quota, account
        clients = sum(size for name, size in account.kept.items() if self._is_clients(name))
        assert account.client_bytes == clients <= quota, account


def _size_on(book: PoolBook, name: Name) -> int | None:
    """Bytes of a replica; None if the node has none."""
    chunk = book.find(*name)
    return None if chunk is None else chunk.slot_bytes
