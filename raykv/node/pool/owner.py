"""A node's pool: all that it decides, for the NodeActor that owns its bytes.

   engines: hello, tell, changes        workers: jobs, begin_chunks
                 │                                   │
                 ▼                                   ▼
   ┌───────────────────────────── NodePool ──────────────────────────────┐
   │ index, order, room, claims, floors, listing: which chunks are here  │
   └─────────────────────────────────────────────────────────────────────┘
                 ▲                                   ▲
                 │                                   │
   directory: report, answered, orders     other nodes: landings, begin_read

Callers use its parts; what concerns several of them has a method here. One lock of the NodeActor
guards it: threads take turns at each call. Times are of one clock that never goes back. What peers
send is sound by its declaration, and may be nonsense otherwise: that changes nothing but what is
theirs.

Until a first document of orders was taken, nothing may be put here that an earlier life of the
NodeActor has left: what of it is void is not known.

Invariants:
1. Those of each part, which `check` asserts.
2. An engine that has not introduced itself stores and loads nothing.
3. A namespace that an engine of this node is in is not left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, repeat
from math import inf
from operator import itemgetter

import msgspec

from raykv.base import tenants, version
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import NO_BLOCKS, Key, Namespace, NodeId, Refusal
from raykv.node.accounts.accounts import NodeAccounts
from raykv.node.pool import engines, floors, jobs, orders, reporting, room, sessions
from raykv.node.pool.claims import MOST_CLAIMS, PIN_SHARE, SOON_S, Claim, Name, Owner, OwnerKind
from raykv.node.pool.index import FRESH_S, PoolIndex
from raykv.node.pool.listing import Listing
from raykv.node.pool.records import ChunkRecord, Standing
from raykv.protocol import columns, node, operator
from raykv.protocol.engine import (
    NOTHING_ORDERED,
    ChangesAnswer,
    ChangesQuery,
    EngineHello,
    FoundKeys,
    Hints,
    PlaceFacts,
    Tell,
    Welcome,
)
from raykv.protocol.listing import ALL_READ, ListedRows, ListingPart, Position, Reason

FAVOUR_S = 600.0
"""How long a request's priority counts."""

SERIES_S = 60.0
"""How long what operators have brought here stays after the last chunk of their series."""


class NodePool:
    """See the module's docstring.

    Args:
        node_id: Ray's.
        life: of the NodeActor and its listing; a later one is higher.
        geometry: of the pool.
        pin_share: part of the pool that pins may take.
    """

    def __init__(
        self,
        node_id: NodeId,
        life: int,
        geometry: PoolGeometry,
        pin_share: float = PIN_SHARE,
    ) -> None:
        self._node_id = node_id
        self._geometry = geometry
        self.engines = engines.LocalEngines(geometry)
        companions = self.engines.companions
        self.index = PoolIndex(geometry, Listing(life), floors.Floors(), companions, pin_share)
        self.sessions = sessions.LocalSessions(self.index.claims)
        self.jobs = jobs.Jobs(self.index, self.engines)
        self.landings = jobs.Landings(self.index)
        self.orders = orders.LocalOrders(self.index)
        self.reporting = reporting.Reporting(self.index, self.sessions)
        self.stats = node.NodeStats()
        """What the NodeActor counts and measures; it sets this before each report."""
        self.is_leaving = False
        """Whether the node drains; the NodeActor sets it."""
        self.accounts = NodeAccounts(self.quota_of)
        """What people learn of it and of its engines."""
        # The highest number of orders that an engine has named since the last document.
        self._told_orders = NOTHING_ORDERED
        # Until when the chunks of each series stay.
        self._series: dict[Owner, float] = {}

    # Engines

    def hello(self, hello: EngineHello, now: float) -> Welcome:
        """An EngineCore introduces itself, perhaps again, or is refused with a sentence."""
        error = self.engines.hello(hello, now)
        self._leave()
        return Welcome(self.index.listing.life, error)

    def tell(self, tell: Tell, now: float) -> None:
        """What an engine says; nothing if it has said that already, or is not here."""
        engine = self.engines.hear(tell.life, now)
        if engine is None or tell.seq <= engine.seq:
            return
        engine.seq = tell.seq
        self.engines.spaces[engine.namespace].told(engine.counters, tell.counters)
        engine.take(tell)
        self._told_orders = max(self._told_orders, tell.orders)
        namespace = Namespace(tell.namespace)
        self._find(namespace, tell.found, now)
        self._hint(tell.life, namespace, tell.hints, now)
        # After what was found: what is released and then found is not released any more.
        self.sessions.take(namespace, tell.sessions, now)
        for each in tell.sessions:
            word = msgspec.structs.replace(each, keys=columns.Keys())
            self.reporting.say(node.SessionsWord(namespace, word))
        self.accounts.take(engine.hello, tell, now)

    def _find(self, namespace: Namespace, found: FoundKeys, now: float) -> None:
        records: dict[ChunkRecord, str] = {}
        for key, tenant in zip(found.keys, found.tenants, strict=True):
            record = self.index.find(namespace, Key(key))
            if record is not None:
                records.setdefault(record, tenant)
        owned: dict[str, list[ChunkRecord]] = {}
        for record, label in records.items():
            if record.tenant == room.NOBODY and label:
                owned.setdefault(label, []).append(record)
        for label, some in owned.items():
            self.index.room.own(some, label)
        # A request that waits says it again and again.
        new = [
            each
            for each in records
            if now - each.found_at >= FRESH_S or each.standing is Standing.RELEASED
        ]
        for record in records:
            record.found_at = now
        self.index.touch(new, now)

    def _hint(self, life: int, namespace: Namespace, hints: Hints, now: float) -> None:
        for pin_s, names in _alike(namespace, hints.pinned, hints.pin_s):
            if 0 < pin_s <= operator.MAX_PIN_S:
                owner = Owner(OwnerKind.REQUEST, f"{life}")
                self._wish(owner, names, Standing.PINNED, now + pin_s)
        for priority, names in _alike(namespace, hints.favoured, hints.priorities):
            if 0 < priority <= columns.MAX_PRIORITY:
                owner = Owner(OwnerKind.REQUEST, f"{life} priority")
                self._wish(owner, names, Standing.kept(int(priority)), now + FAVOUR_S)

    def _wish(self, owner: Owner, names: list[Name], standing: Standing, until: float) -> None:
        """Requests of an engine want this; what they have wanted before lasts as long as it did,
        and stands as high.
        """
        claims = self.index.claims
        raised: dict[Standing, list[Name]] = {}
        for name in names:
            known = claims.claims_on(name).get(owner, Claim(standing, -inf))
            if until - known.until > SOON_S or standing > known.standing:
                raised.setdefault(max(standing, known.standing), []).append(name)
        for each, some in raised.items():
            claims.claim(owner, some, each, until)

    def changes(self, query: ChangesQuery, now: float) -> ChangesAnswer:
        """What is new at this place for an engine; see `ChangesQuery`."""
        namespace = Namespace(query.namespace)
        engine = self.engines.hear(query.life, now)
        if engine is None or engine.namespace != namespace:
            facts = PlaceFacts(self.orders.stamp)
            return ChangesAnswer(self._no_part(query.position), facts, is_known=False)
        part = self._no_part(query.position)
        if query.most:
            part = self.index.part_after(query.position, query.most, {namespace})
        facts = engine.answered = self._facts(engine)
        has_more = not query.most or self._lacks(part.end, namespace)
        return ChangesAnswer(part, facts, has_more=has_more)

    def _no_part(self, position: Position) -> ListingPart:
        """What takes a reader nowhere; one of another life has read nothing of this one."""
        life = self.index.listing.life
        if position.life == life:
            return ListingPart(False, position, position)
        start = Position(life, reader=position.reader)
        return ListingPart(True, start, start)

    def _facts(self, engine: engines.LocalEngine) -> PlaceFacts:
        return PlaceFacts(
            self.orders.stamp,
            self.orders.is_paused,
            self.is_leaving,
            self.engines.spaces[engine.namespace].store_share,
            self.reporting.has_peers(engine.namespace),
            self.reporting.naming(engine.hello.life, engine.heard),
        )

    def has_changes(self, query: ChangesQuery) -> bool:
        """Whether an answer would say anything that the last one to that engine has not said."""
        namespace = Namespace(query.namespace)
        engine = self.engines.get(query.life)
        if engine is None or engine.namespace != namespace:
            return True
        if self._facts(engine) != engine.answered:
            return True
        return query.most > 0 and self._lacks(query.position, namespace)

    def _lacks(self, position: Position, namespace: Namespace) -> bool:
        """Whether a reader at that position must read on."""
        listing = self.index.listing
        if position.life != listing.life or position.place != ALL_READ:
            return True
        return listing.has_news(position.number, namespace)

    def bye(self, life: int) -> None:
        """An EngineCore is gone."""
        self.engines.bye(life)
        self.jobs.forget(life)
        self._leave()

    # Workers

    def begin_chunks(self, job: jobs.AdmittedJob, numbers: Iterable[int], now: float) -> None:
        """Admit some chunks of a store, by their numbers, from heads of prompts to tails."""
        self.jobs.begin_chunks(job, numbers, now)
        self._trim(now)

    # Other nodes

    def keep_series(
        self, series: str, namespace: Namespace, keys: Iterable[Key], now: float
    ) -> None:
        """Chunks that an operator brings here stay until others of their series have come, too."""
        owner = Owner(OwnerKind.SERIES, series)
        names = dict.fromkeys((namespace, key) for key in keys)
        self.index.claims.claim(owner, names, Standing.KEPT, inf)
        self._series[owner] = now + SERIES_S

    def begin_read(
        self, namespace: Namespace, keys: Sequence[Key], slot_bytes: Sequence[int], now: float
    ) -> list[ChunkRecord | Refusal]:
        """Let others read chunks, whole slots of these sizes; `end_read` ends each."""
        chunks = zip(repeat(namespace), keys, repeat(NO_BLOCKS), slot_bytes)
        found = self.index.begin_loads(chunks, now)
        space = self.engines.spaces.get(namespace)
        if space is not None:
            space.count(0, sum(isinstance(each, ChunkRecord) for each in found))
        return found

    def state_of(self, namespace: Namespace, keys: Iterable[Key]) -> tuple[int, int, ListedRows]:
        """How chunks are now, at which number of the listing of which life."""
        listing = self.index.listing
        return listing.life, listing.number, self.index.rows(namespace, keys)

    # The directory

    def report(self) -> node.Report:
        """The next report; the last one was answered, or given up."""
        used = self.index.room.used.items()
        self.reporting.facts = self.orders.stamp, self.is_leaving, tuple(self.engines.said())
        return self.reporting.begin(
            node.Report(
                self._node_id,
                self.index.listing.life,
                seq=0,
                orders=self.orders.stamp,
                pool_bytes=self._geometry.pool_bytes,
                slab_bytes=self._geometry.slab_bytes,
                stats=self.stats,
                engines=self.engines.reported(),
                spaces={str(name): num for name, num in self.index.sizes().items()},
                tenant_bytes={label: num for label, num in used if label != room.NOBODY},
                pinned_bytes=self.index.claims.pinned_bytes,
                pinned_chunks=self.index.claims.num_pinned,
                is_leaving=self.is_leaving,
                raykv_version=version.__version__,
            )
        )

    def answered(self, answer: node.ReportAnswer, now: float, seq: int) -> None:
        """The report of that `seq` was answered. If that one is not out, nothing changes."""
        if not self.reporting.is_of(seq):
            return
        self.reporting.take(answer, now)
        self._leave()
        self.reporting.go_on()

    @property
    def has_news(self) -> bool:
        """Whether a report would say something new."""
        facts = self.orders.stamp, self.is_leaving, tuple(self.engines.said())
        return self.wants_document or self.reporting.has_news(facts)

    def _leave(self) -> None:
        """Release chunks of namespaces that are left, and those no more that are in use again."""
        self.reporting.use(self.engines.spaces.keys())

    # Orders

    @property
    def wants_document(self) -> bool:
        """Whether there are later orders, as the directory or an engine has said; `take_orders` is
        for them.
        """
        return max(self.reporting.newest, self._told_orders) > self.orders.stamp

    def take_orders(self, document: operator.OrdersDocument, now: float) -> None:
        """A document of orders; nothing if its number is not later than that of the last one."""
        # An engine that names orders which do not exist is believed once.
        self._told_orders = NOTHING_ORDERED
        for family in self.orders.take(document, now):
            self.accounts.descriptions.forget(family or None)

    # For people

    def follow(self, now: float) -> bool:
        """Count a piece of what has happened here; returns whether there is more."""
        return self.accounts.follow(self.index.listing, self.sessions, now)

    def quota_of(self, label: str) -> str:
        """The name of a tenant's quota; all without one are `OTHERS`."""
        return self.orders.shares[label].name if label in self.orders.shares else tenants.OTHERS

    def tenant(self, label: str) -> str:
        """What people call a tenant: its quota, or its label."""
        return self.orders.shares[label].name if label in self.orders.shares else label

    def num_wished(self) -> int:
        """Chunks that requests and pauses of sessions keep, or would if they were here."""
        claims = self.index.claims
        owners = [*claims.owners(OwnerKind.REQUEST), *self.sessions.pausing()]
        return len(set().union(*map(claims.names_of, owners)))

    # Time

    def expire(self, now: float) -> None:
        """End what is late or over; about once a second, and with a piece of what takes long."""
        self.sessions.expire(now)
        for series in [each for each, until in self._series.items() if until <= now]:
            del self._series[series]
            self.index.claims.end(series)
        self.index.claims.expire(now)
        self.index.expire(now)
        self.orders.expire(now)
        for life in self.engines.silent(now):
            self.bye(life)
        self.reporting.expire(now)
        self._trim(now)
        self.reporting.go_on()

    def _trim(self, now: float) -> None:
        """Drop what tenants have above their greatest shares."""
        index = self.index
        for record in index.room.over(lambda r: not r.readers and now - r.found_at >= FRESH_S):
            index.drop(record, Reason.QUOTA)

    def check(self) -> None:
        """Assert the invariants; for tests."""
        self.index.check()
        self.engines.check()
        self.sessions.check()
        self.jobs.check()
        self.landings.check()
        self.reporting.check()


def _alike(
    namespace: Namespace, keys: Iterable[bytes], wishes: Sequence[float]
) -> Iterable[tuple[float, list[Name]]]:
    """Names with the same wish that follow each other; columns of other lengths are cut."""
    rows = zip(wishes[: MOST_CLAIMS[OwnerKind.REQUEST]], keys, strict=False)
    for wish, some in groupby(rows, key=itemgetter(0)):
        yield wish, [(namespace, Key(key)) for _, key in some]
