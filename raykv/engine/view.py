"""The engine's view: a mirror of its own node's chunks, its leases, and what it has in flight.

              prepare_store            complete_store
   (absent) ───────────────► PENDING ─────────────────► READY ──► (absent)
                                │ failed                  failed, removed, reset
                                ▼
                            (absent), the slot is released

vLLM's scheduler thread drives it; a lookup is a dict access. What the scheduler actor should know
is appended to the outbox; its answers are applied between engine steps only, so that a HIT is
still there when the load is prepared.

Threads: `take_request` and `declared_leases` alone may run on the exchange thread. They only pop
from the left of the outbox's deques, read lengths and copy whole containers at once.

Invariants:
1. A key is PENDING or READY, never both. A lease is free or belongs to one PENDING key.
2. A key that failed at a generation is not READY again at that generation or an older one, as
   long as the NodeActor lives.
3. For one request a key that failed is a MISS for good, and once its deadline has passed every
   key that is not READY is a MISS.
4. After `reset` nothing is READY until the scheduler actor has confirmed the clearing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from raykv.base.departures import Departures
from raykv.base.ids import (
    NO_GENERATION,
    EngineId,
    Epoch,
    Generation,
    Key,
    Lookup,
    MissReason,
    NodeId,
    Slot,
    group_of,
)
from raykv.engine.accounts import Accounts
from raykv.engine.cost import FetchCost
from raykv.engine.outbox import Outbox, lease_columns, rows
from raykv.engine.remote import MAX_ASKED, FetchOrder, RemoteChunks, RemoteSettings
from raykv.engine.requests import (
    FailedLoad,
    Miss,
    RequestOptions,
    RequestTable,
    StorePlan,
    StoreSampler,
    ViewCounters,
    explain,
)
from raykv.engine.stock import LeaseStock
from raykv.protocol.columns import MAX_KEYS, Handle, Keys, Leases, Replicas
from raykv.protocol.engine import EngineAttached, SyncReply, SyncRequest
from raykv.protocol.peer import FetchResult

_OF_WINDOWS = (MissReason.NEVER_STORED, MissReason.WINDOW_MISSING, MissReason.EVICTED)
"""Why a window is missing that was not there when its prefix was; other reasons are the prefix's
too.
"""

MAX_TOMBSTONES = 65_536
"""Keys that are remembered; the oldest are forgotten first (it costs one refused load)."""


class EngineView:
    """See the module's docstring.

    Args:
        engine_id: vLLM's engine id.
        groups: the KV group indices that are offloaded.
        lookup_deadline_s: how long a request may wait for chunks that are not READY yet.
        lease_slots: most free slots to hold per group.
        remote: chunks of other nodes.
        sampler: chooses the requests that store; None: all do.
        node_id: the engine's own node.
    """

    def __init__(
        self,
        engine_id: EngineId,
        groups: Iterable[int],
        lookup_deadline_s: float,
        lease_slots: int,
        remote: RemoteChunks | None = None,
        sampler: StoreSampler | None = None,
        node_id: NodeId | None = None,
    ) -> None:
        # Of all chunks; empty: that of the workers' lines.
        self.namespace = ""
        self.sampler = sampler or StoreSampler()
        self.remote = remote or RemoteChunks(RemoteSettings(), FetchCost())
        self.node_id = node_id
        self.engine_id = engine_id
        self.counters = ViewCounters()
        self.paused = False
        self.epoch = Epoch(0)
        self.node_epoch = Epoch(0)
        self._lookup_deadline_s = lookup_deadline_s
        self._stock = LeaseStock(groups, lease_slots, self.remote.settings.step_chunks())
        self._ready: dict[Key, Handle] = {}
        self._pending: dict[Key, Handle] = {}
        self._tombstones = Tombstones()
        self.requests = RequestTable()
        # Requests of which every chunk that is READY may be loaded, and those chunks (none while
        # the cache is paused or the link is down): what a caller may look at before `lookup`.
        self.plain_requests = self.requests.plain
        self.loadable: Mapping[Key, Handle] = self._ready
        self.plain_hits = 0
        # PENDING keys that won't be READY when vLLM completes their job; their slots are not ours.
        self._failed_stores: set[Key] = set()
        self._orphans = Orphans()
        # What the last attach message claimed.
        self._declared: frozenset[Handle] = frozenset()
        # Resets so far, and how many of them the scheduler actor has confirmed.
        self._resets = 0
        self._resets_confirmed = 0
        self._link_up = True
        # The engine has left its namespace, and is in no other one yet.
        self.has_left = False
        # It has come to its namespace while it ran, and no request has begun there.
        self.is_new = False
        # Why no chunk may be loaded or stored now.
        self._off: MissReason | None = None
        self._seq = 0
        self._outbox = Outbox()
        # For people: what became of requests' tokens, and why chunks are missing.
        self.accounts = Accounts()
        self._departures: Departures[MissReason] = Departures()

    # Requests

    def start_request(self, request_id: str, options: RequestOptions) -> None:
        """A request is new, and has nothing of an earlier one with its id."""
        self.is_new = False
        self.finish_request(request_id)
        self.requests.start(request_id, self.sampler.limit(options))

    def finish_request(self, request_id: str) -> None:
        """No more lookups, loads or stores will be asked for this request."""
        request = self.requests.finish(request_id)
        if request is not None:
            self.remote.finish_request(request)

    def ask(self, request_id: str, keys: Sequence[Key]) -> None:
        """Find out early which nodes have what this one does not; nothing for an unknown request.

        `keys` are all of one KV group that the prompt has.
        """
        request = self.requests.find(request_id)
        if request is None or self.paused or self.has_left or not request.options.load:
            return
        if keys:
            request.chunks[group_of(keys[0])] = keys
        absent = (key for key in keys if key not in self._ready and key not in self._pending)
        self.remote.ask(request, islice(absent, MAX_ASKED))

    def lookup(self, request_id: str, key: Key, now: float) -> Lookup:
        """HIT if the chunk can be loaded now, HIT_PENDING while this engine stores it."""
        request = self.requests.get(request_id)
        if (barrier := self._off or request.barrier(key)) is not None:
            return request.missed(key, barrier)
        if key in self._ready:
            self.counters.hits += 1
            return Lookup.HIT
        if key in self._pending:
            if request.may_wait(now, self._lookup_deadline_s):
                return Lookup.HIT_PENDING
            self.counters.lookups_timed_out += 1
            self.counters.misses += 1
            return request.missed(key, MissReason.PENDING_TOO_LONG)
        found = self.remote.lookup(request, key, now, self._stock, self._has)
        if found is Lookup.MISS:
            self.counters.misses += 1
            explain(request, self._departures, is_attached=self.epoch != 0)
        return found

    def reach(self, request_id: str, keys: Iterable[Key]) -> int:
        """How many chunks of a prefix are known, without a gap: here, on their way, or elsewhere as
        far as the request was told.
        """
        request = self.requests.get(request_id)
        if self._off or not request.options.load:
            return 0
        count = 0
        for key in keys:
            if not (self._has(key) or key in request.found or key in request.pending):
                break
            count += 1
        return count

    def missed_window(self, request_id: str, num_tokens: int, behind: Key | None) -> None:
        """So many tokens of the prefix that a request found are not loaded, since a window or a
        state is missing; `behind` them is the first chunk that is not known, if there is one.
        """
        request = self.requests.get(request_id)
        if request.miss is None or request.miss.reason not in _OF_WINDOWS:
            return
        reason = request.miss.reason
        if reason is MissReason.NEVER_STORED:
            reason = MissReason.WINDOW_MISSING
        if behind is None:
            request.missed(request.miss.key, reason)
            return
        rest = self._departures.get(behind) or MissReason.NEVER_STORED
        request.miss = Miss(behind, rest, num_tokens, reason)

    def _has(self, key: Key) -> bool:
        """Whether the node has a chunk, or will have it."""
        return key in self._ready or key in self._pending or self.remote.is_fetching(key)

    # Fetches

    def finish_fetch(self, orders: Iterable[FetchOrder], result: FetchResult | None) -> None:
        """A fetch has ended; None: there was no answer. What arrived is READY.

        What did not is a MISS for the requests that know of it; a later one asks anew.
        """
        self.counters.bytes_fetched += 0 if result is None else result.num_bytes
        for ended in self.remote.finish(orders, result):
            order, place = ended.order, ended.place
            if place != order.handle:
                self._outbox.released.append((group_of(order.key), order.handle))
            if place is None:
                self.counters.fetches_failed += 1
                self.remote.forget_source(self.requests.values(), order.key, ended.reason)
                continue
            self.counters.chunks_fetched += 1
            is_current = result is not None and result.node_epoch == self.node_epoch
            if is_current and not self.is_clearing:
                self._tombstones.lift(order.key)
                self._add(order.key, place)

    # Loads

    def prepare_load(self, keys: Collection[Key], request_id: str = "") -> list[Handle]:
        """Handles of chunks that `lookup` called HIT; they are asked not to be evicted. Those that
        are nobody's belong to the request's tenant from now on.

        A key that is not READY gets a handle that every NodeActor refuses.
        """
        self._outbox.pinned.extend(keys)
        self._outbox.touched.extend(reversed(list(keys)))
        refused = Handle(Slot(0), NO_GENERATION)
        handles = [self._ready.get(key, refused) for key in keys]
        self._belong(request_id, handles)
        return handles

    def _belong(self, request_id: str, handles: Iterable[Handle]) -> None:
        if tenant := self.requests.get(request_id).options.tenant:
            self._outbox.owned.extend((tenant, handle) for handle in handles)

    def complete_load(self, keys: Collection[Key]) -> None:
        """A load job has ended; failures were reported by `fail_load` before."""
        self.counters.chunks_loaded += len(keys)

    def fail_load(self, failed: FailedLoad) -> None:
        """A chunk could not be loaded: bar it for this request, and at this generation for all.

        A failure in an earlier life of the NodeActor says nothing about this one's chunks.
        """
        self.counters.loads_failed += 1
        request = self.requests.bar(failed.request_id)
        if request is not None:
            request.barred.add(failed.key)
        handle = self._ready.get(failed.key)
        is_this_life = failed.node_epoch == self.node_epoch
        if handle is not None and handle.generation == failed.generation and is_this_life:
            del self._ready[failed.key]
            self._tombstones.bury(failed.key, failed.generation)
            self._departures.note([failed.key], failed.reason)
            if failed.is_gone:
                self._outbox.dropped.append((failed.key, handle))

    # Stores

    def prepare_store(self, request_id: str, keys: Collection[Key]) -> StorePlan | None:
        """Lease slots to the keys that are not cached yet, while there are leases.

        Per KV group the longest prefix of the new keys is taken, never a later one: vLLM does not
        offer skipped chunks again. None when there are new keys and no slot for any; then nothing
        has changed.
        """
        plan = StorePlan([], [])
        if self._off or not self.requests.get(request_id).options.store:
            self._departures.note(keys, MissReason.STORES_OFF)
            return plan
        exhausted: set[int] = set()
        present: list[Key] = []
        skipped: list[Key] = []
        ready, pending, is_fetching = self._ready, self._pending, self.remote.is_fetching
        for key in keys:
            if key in ready or key in pending or is_fetching(key):
                present.append(key)
            elif (group := group_of(key)) in exhausted or not (lease := self._stock.take(group)):
                exhausted.add(group)
                skipped.append(key)
            else:
                plan.keys.append(key)
                plan.handles.append(lease)
        if exhausted:
            self.counters.stores_without_lease += 1
            for group in exhausted:
                of_group = [key for key in skipped if group_of(key) == group]
                self._departures.note(of_group, self._why_no_lease(group))
            if not plan.keys:
                return None
        self._outbox.touched.extend(reversed(present))
        for key, handle in zip(plan.keys, plan.handles, strict=True):
            self._pending[key] = handle
            self.remote.announce(key, handle)
        self._belong(request_id, plan.handles)
        self.counters.chunks_offered += len(plan.keys)
        return plan

    def _why_no_lease(self, group: int) -> MissReason:
        if not self.epoch:
            return MissReason.NOT_ATTACHED
        if self.remote.is_cut_off:
            return MissReason.BREAKER_OPEN
        return MissReason.POOL_FULL if self._stock.is_dry(group) else MissReason.NO_LEASE

    def fail_store(self, key: Key, generation: Generation) -> None:
        """A chunk could not be stored: it won't become READY, and its slot is given back."""
        self.counters.stores_failed += 1
        handle = self._pending.get(key)
        if handle is None or handle.generation != generation or key in self._failed_stores:
            return
        self._failed_stores.add(key)
        self._departures.note([key], MissReason.STORE_FAILED)
        self._outbox.released.append((group_of(key), handle))

    def pending_handle(self, key: Key) -> Handle | None:
        """Where a chunk is being stored."""
        return self._pending.get(key)

    def complete_store(self, keys: Collection[Key]) -> None:
        """A store job has ended on all ranks; what did not fail is READY."""
        for key in keys:
            if self._orphans.end(key):
                continue
            handle = self._pending.pop(key, None)
            if handle is None:
                continue
            if key in self._failed_stores:
                self._failed_stores.discard(key)
                continue
            self.counters.chunks_stored += 1
            if not self.is_clearing:
                self._tombstones.lift(key)
                self._ready[key] = handle

    # Whole-cache events

    def reset(self) -> None:
        """Empty the view at once and have the namespace cleared in the whole cluster.

        vLLM does not complete the jobs that it has begun before.
        """
        self._resets += 1
        self._forget_all(MissReason.CLEARED)
        self._orphans.clear()

    def drop_stores(self) -> None:
        """vLLM does not complete the jobs that it has begun: what was being stored is given back.

        Chunks that are READY stay. A store that ends all the same is known by the next exchange.
        """
        self.keep_stores(Counter())

    def keep_stores(self, flying: Counter[Key]) -> None:
        """vLLM completes so many jobs of each key, and no others: see `drop_stores`."""
        lost = {key: at for key, at in self._pending.items() if not flying[key]}
        released = {key: at for key, at in lost.items() if key not in self._failed_stores}
        self._departures.note(released, MissReason.STORE_FAILED)
        self._outbox.released.extend((group_of(key), at) for key, at in released.items())
        for key in lost:
            del self._pending[key]
        self._failed_stores &= self._pending.keys()
        # The last job of a key that is PENDING is the view's own.
        self._orphans.clear()
        self._orphans.add((flying - Counter(self._pending.keys())).elements())

    def leave(self) -> None:
        """The engine is about to have other weights: nothing is loaded or stored until `enter`.

        What it is storing was computed before, and may end; free leases go back.
        """
        self.has_left = True
        self._set_paused(self.paused)
        self._return_leases()

    def enter(self, namespace: str) -> None:
        """The engine goes on in a namespace, of whose chunks it learns when it attaches there. In
        the one that it has left everything is as it was.

        Not while `is_clearing`: the clearing would be another namespace's.
        """
        assert not self.is_clearing, self.namespace
        self.has_left = False
        if namespace != self.namespace:
            self.namespace = namespace
            self.is_new = True
            self.epoch = Epoch(0)
            self._declared = frozenset()
            self._forget_all(MissReason.WEIGHTS_CHANGED)
            self._tombstones.clear()
            # Somebody may, until it is known.
            self.remote.has_peers = True
        self._set_paused(self.paused)

    def _return_leases(self) -> None:
        self._outbox.released.extend(self._stock.rows())
        self._stock.clear()

    @property
    def is_clearing(self) -> bool:
        """Whether the last reset is still unconfirmed by the scheduler actor."""
        return self._resets != self._resets_confirmed

    def _forget_all(self, why: MissReason) -> None:
        flying, ready = list(self._pending), list(self._ready)
        self.drop_all()
        self._orphans.add(flying)
        self._outbox.clear()
        self.remote.forget_all()
        self.remote.forget_found(self.requests.values())
        self._departures.note(chain(flying, reversed(ready)), why)

    def drop_all(self) -> None:
        """Hold no chunk and no lease any more; others have them."""
        self._stock.clear()
        self._ready.clear()
        self._pending.clear()
        self._failed_stores.clear()

    def set_link(self, up: bool) -> None:
        """Whether the workers reach their NodeActor; while they don't, everything is a MISS."""
        self._link_up = up
        self._set_paused(self.paused)

    def _set_paused(self, paused: bool) -> None:
        self.paused = paused
        self._off = MissReason.PAUSED if paused else None if self._link_up else MissReason.NODE_LOST
        if self.has_left:
            self._off = MissReason.WEIGHTS_CHANGED
        self.loadable = {} if self._off else self._ready

    def node_restarted(self, node_epoch: Epoch) -> None:
        """The node's pool began anew: no chunk and no lease of the old one is any good."""
        if node_epoch > self.node_epoch:
            self.node_epoch = node_epoch
            self._forget_all(MissReason.NODE_LOST)
            self._tombstones.clear()

    def move(self, node_id: NodeId) -> None:
        """The engine is at another node, whose pool has nothing that the view knows of.

        Its NodeActor's epoch may be any: it runs on another raylet.
        """
        self.node_id = node_id
        self.node_epoch = Epoch(0)
        self._declared = frozenset()
        self._forget_all(MissReason.NODE_LOST)
        self._tombstones.clear()

    def attached(self, message: EngineAttached) -> None:
        """The scheduler actor has taken the engine in; a snapshot of the mirror will follow."""
        self.epoch = Epoch(message.epoch)
        self._set_paused(message.paused)
        self._stock.capacity.update(message.capacity)
        self._stock.set_shares(message.lease_share, message.step_share)
        self._declared -= {h for h in self._declared if h.slot in set(message.rejected)}
        self._forget_undeclared()
        self.node_restarted(Epoch(message.node_epoch))
        # A present lease must not get earlier bytes.
        self.remote.forget_cleared(self.requests.values(), Generation(message.cleared))
        self.remote.ask_again()

    def _forget_undeclared(self) -> None:
        """Leases that came in while the engine attached, or were not believed: others have them."""
        self._stock.keep(self._declared)
        self._give_up(lambda handle: handle not in self._declared)

    def _give_up(self, is_lost: Callable[[Handle], bool]) -> None:
        """What is on its way to such places will not become READY."""
        self._failed_stores.update(key for key, held in self._pending.items() if is_lost(held))
        self.remote.abandon(lambda order: is_lost(order.handle))

    def apply(self, reply: SyncReply, request: SyncRequest | None = None) -> None:
        """Take in an answer of the scheduler actor to `request`. Only between engine steps."""
        if reply.epoch != self.epoch:
            return
        self._set_paused(reply.paused)
        self.accounts.refine(reply.refined)
        self.remote.has_peers, self.sampler.share = reply.has_peers, reply.store_share
        self.node_restarted(Epoch(reply.node_epoch))
        is_uncleared = self.is_clearing and reply.cleared < self._resets
        if is_uncleared or reply.node_epoch < self.node_epoch:
            # The answer is from before the clearing, or about the pool's last life.
            self._take_answer(Replicas(), request)
            return
        self._resets_confirmed = self._resets
        if reply.void:
            self._forget_all(MissReason.CLEARED)
        if reply.reset:
            self._departures.note(reversed(self._ready), MissReason.EVICTED)
            self._ready.clear()
        self._departures.note(reply.removed.keys, MissReason.EVICTED)
        for key, handle in rows(reply.removed):
            self._remove(key, handle)
        for key, handle in rows(reply.stored):
            self._add(key, handle)
        # A slot that is granted again while a store into it is under way: the chunk came, and was
        # evicted.
        if regranted := set(reply.granted.slots):
            self._give_up(lambda handle: handle.slot in regranted)
        self._stock.add(reply.granted, {} if request is None else request.wanted)
        self._stock.set_shares(reply.lease_share, reply.step_share)
        self._outbox.released.extend(self._stock.take_surplus())
        if self.has_left:
            self._return_leases()
        if request is not None and request.wanted:
            self.remote.unleased.clear()
        self._take_answer(reply.replicas, request)

    def _take_answer(self, replicas: Replicas, request: SyncRequest | None) -> None:
        asked = [] if request is None else request.asked
        local = self.remote.take_answer(asked, replicas, self.node_epoch, self.node_id)
        for key, handle in local:
            self._add(key, handle)

    def _add(self, key: Key, handle: Handle) -> None:
        if key in self._pending:
            return
        if self._tombstones.covers(key, handle.generation):
            return
        known = self._ready.get(key)
        if known is None or known.generation < handle.generation:
            self._ready[key] = handle

    def _remove(self, key: Key, handle: Handle) -> None:
        if self._pending.get(key) == handle:
            self._failed_stores.add(key)
        self.remote.abandon_at(key, handle)
        known = self._ready.get(key)
        if known is not None and known.generation <= handle.generation:
            del self._ready[key]

    # The exchange

    def declared_leases(self) -> tuple[Epoch, Leases]:
        """All leases, free and in flight, and the life of the pool that they are of: what an engine
        claims when it attaches again.
        """
        # First: what comes in between is of a later life, and then not believed.
        node_epoch = self.node_epoch
        leases = self._lease_rows()
        self._declared = frozenset(handle for _, handle in leases)
        return node_epoch, lease_columns(leases)

    def _lease_rows(self) -> list[tuple[int, Handle]]:
        flying = [
            (group_of(key), handle)
            for key, handle in list(self._pending.items())
            if key not in self._failed_stores
        ]
        return [*self._stock.rows(), *flying, *self.remote.leases()]

    def take_request(
        self, epoch: Epoch, may_grow: bool, may_want: bool, *, may_repeat: bool = True
    ) -> SyncRequest:
        """Build the next message of an exchange out of the outbox, for the actor's `epoch`.

        `may_grow` is False while earlier answers have not been applied: then nothing is asked
        for, and the outbox stays as it is. `may_want` is False while leases may be among them,
        `may_repeat` for some time after keys were asked for again.
        """
        may_want = may_want and self._may_lease
        self._seq += 1
        clear = self._resets if self.is_clearing else 0
        if not may_grow:
            return SyncRequest(self.engine_id, epoch, self._seq, clear=clear, idle=True)
        return SyncRequest(
            engine_id=self.engine_id,
            epoch=epoch,
            seq=self._seq,
            wanted=self._stock.wanted(self.remote.num_unleased) if may_want else {},
            **self._outbox.fields(),
            lost=self.remote.take_lost(MAX_KEYS // 4),
            asked=Keys.of(self.remote.take_questions(MAX_ASKED, may_repeat)),
            announced=self.remote.take_announced(MAX_KEYS // 2),
            clear=clear,
            counters=self.counter_values(),
            finished=self.accounts.take_records(),
        )

    def counter_values(self) -> dict[str, int]:
        """All counters by name."""
        own = {name: getattr(self.counters, name) for name in ViewCounters.__slots__}
        own["hits"] += self.plain_hits
        own["requests_not_stored"] = self.sampler.num_left_out
        own["weights_changed"] = int(self.has_left)
        return {**own, **self.remote.counter_values(), **self.accounts.counter_values()}

    @property
    def _may_lease(self) -> bool:
        return not (self.paused or self.has_left)

    @property
    def has_news(self) -> bool:
        """Whether the outbox has something that should not wait for the next heartbeat."""
        return self.is_clearing or self._outbox.has_news or self.remote.has_news

    @property
    def has_touches(self) -> bool:
        """Whether some touches of chunks wait for an exchange; any thread may ask."""
        return bool(self._outbox.touched)

    @property
    def wants_leases(self) -> bool:
        """Whether some group's leases have run low."""
        return self._may_lease and self._stock.is_low(self.remote.num_unleased)

    @property
    def num_ready(self) -> int:
        """Chunks that a lookup would find."""
        return len(self._ready)

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        assert not self._ready.keys() & self._pending.keys(), self._ready.keys()
        slots = [handle.slot for _, handle in self._lease_rows()]
        assert len(set(slots)) == len(slots), slots
        for key, handle in self._ready.items():
            assert not self._tombstones.covers(key, handle.generation), key


@dataclass
class Tombstones:
    """Up to which generation keys of failed loads are distrusted; bounded."""

    _generations: OrderedDict[Key, Generation] = field(default_factory=OrderedDict)

    def bury(self, key: Key, generation: Generation) -> None:
        """A chunk was missing at a generation."""
        self._generations[key] = generation
        self._generations.move_to_end(key)
        if len(self._generations) > MAX_TOMBSTONES:
            self._generations.popitem(last=False)

    def lift(self, key: Key) -> None:
        """A chunk has certainly arrived."""
        self._generations.pop(key, None)

    def covers(self, key: Key, generation: Generation) -> bool:
        """Whether a chunk at that generation is distrusted."""
        return generation <= self._generations.get(key, NO_GENERATION)

    def clear(self) -> None:
        """Forget everything: it was of an earlier life."""
        self._generations.clear()


@dataclass
class Orphans:
    """Stores that a view forgot while they were under way: it ignores their ends. It counts by key
    how many are still to end; jobs of one key end in order.
    """

    _left: Counter[Key] = field(default_factory=Counter)

    def add(self, keys: Iterable[Key]) -> None:
        """Stores are forgotten now."""
        self._left.update(list(keys))

    def end(self, key: Key) -> bool:
        """A store of the key has ended; returns whether it was a forgotten one."""
        left = self._left.pop(key, 0)
        if left > 1:
            self._left[key] = left - 1
        return left > 0

    def clear(self) -> None:
        """Their ends will not come any more."""
        self._left.clear()
