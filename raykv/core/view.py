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

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from raykv.core.requests import RequestOptions, RequestState
from raykv.messages import (
    MAX_KEYS,
    EngineAttached,
    Handles,
    Leases,
    SyncReply,
    SyncRequest,
)
from raykv.types import NO_GENERATION, EngineId, Epoch, Generation, Key, Lookup, Slot, group_of

T = TypeVar("T")

MAX_TOMBSTONES = 65_536
"""Failed keys that are remembered; the oldest are forgotten first (it costs one refused load)."""

MAX_TOUCHES = 65_536
"""Touches waiting for an exchange; beyond it the oldest are lost, which only ages them."""


@dataclass(frozen=True)
class Handle:
    """Where a chunk is: a slot at a generation."""

    slot: Slot
    generation: Generation


@dataclass(frozen=True)
class FailedLoad:
    """One chunk that a request did not get.

    `is_gone`: the NodeActor says that it no longer exists there. `node_epoch` is that of the
    NodeActor from which it should have come.
    """

    request_id: str
    key: Key
    generation: Generation
    node_epoch: Epoch
    is_gone: bool


@dataclass(frozen=True)
class StorePlan:
    """Chunks to store, in the order in which they were offered."""

    keys: list[Key]
    handles: list[Handle]


@dataclass(slots=True)
class ViewCounters:
    """Since the engine's start."""

    hits: int = 0
    misses: int = 0
    chunks_offered: int = 0
    chunks_stored: int = 0
    chunks_loaded: int = 0
    loads_failed: int = 0
    stores_failed: int = 0
    stores_without_lease: int = 0
    lookups_timed_out: int = 0


class EngineView:
    """See the module's docstring.

    Args:
        engine_id: vLLM's engine id.
        groups: the KV group indices that are offloaded.
        lookup_deadline_s: how long a request may wait for chunks that are not READY yet.
        lease_slots: most free slots to hold per group.
    """

    def __init__(
        self,
        engine_id: EngineId,
        groups: Iterable[int],
        lookup_deadline_s: float,
        lease_slots: int,
    ) -> None:
        self.engine_id = engine_id
        self.counters = ViewCounters()
        self.paused = False
        self.epoch = Epoch(0)
        self.node_epoch = Epoch(0)
        self._lookup_deadline_s = lookup_deadline_s
        self._lease_slots = lease_slots
        self._capacity: dict[int, int] = dict.fromkeys(groups, 0)
        self._leases: dict[int, deque[Handle]] = {group: deque() for group in groups}
        self._ready: dict[Key, Handle] = {}
        self._pending: dict[Key, Handle] = {}
        self._tombstones: OrderedDict[Key, Generation] = OrderedDict()
        self._requests: dict[str, RequestState] = {}
        # PENDING keys that won't be READY when vLLM completes their job; their slots are not ours.
        self._failed_stores: set[Key] = set()
        # Completions to come of jobs whose keys were forgotten while they were PENDING.
        self._orphans: Counter[Key] = Counter()
        # What the last attach message claimed.
        self._declared: frozenset[Handle] = frozenset()
        # Resets so far, and how many of them the scheduler actor has confirmed.
        self._resets = 0
        self._resets_confirmed = 0
        self._link_up = True
        self._seq = 0
        self._touched: deque[Key] = deque(maxlen=MAX_TOUCHES)
        self._pinned: deque[Key] = deque(maxlen=MAX_TOUCHES)
        self._released: deque[tuple[int, Handle]] = deque()
        self._dropped: deque[tuple[Key, Handle]] = deque(maxlen=MAX_TOUCHES)

    # Requests

    def start_request(self, request_id: str, options: RequestOptions) -> None:
        """A request is new; a second call for the same id changes nothing."""
        self._requests.setdefault(request_id, RequestState(options))

    def finish_request(self, request_id: str) -> None:
        """No more lookups, loads or stores will be asked for this request."""
        self._requests.pop(request_id, None)

    def _request(self, request_id: str) -> RequestState:
        found = self._requests.get(request_id)
        return RequestState(RequestOptions()) if found is None else found

    def lookup(self, request_id: str, key: Key, now: float) -> Lookup:
        """HIT if the chunk can be loaded now, HIT_PENDING while this engine stores it."""
        request = self._request(request_id)
        if self.paused or not self._link_up or not request.options.load or key in request.barred:
            return Lookup.MISS
        if key in self._ready:
            self.counters.hits += 1
            return Lookup.HIT
        if key in self._pending:
            if request.may_wait(now, self._lookup_deadline_s):
                return Lookup.HIT_PENDING
            self.counters.lookups_timed_out += 1
        self.counters.misses += 1
        return Lookup.MISS

    # Loads

    def prepare_load(self, keys: Collection[Key]) -> list[Handle]:
        """Handles of chunks that `lookup` called HIT; they are asked not to be evicted.

        A key that is not READY gets a handle that every NodeActor refuses.
        """
        self._pinned.extend(keys)
        self._touched.extend(reversed(list(keys)))
        refused = Handle(Slot(0), NO_GENERATION)
        return [self._ready.get(key, refused) for key in keys]

    def complete_load(self, keys: Collection[Key]) -> None:
        """A load job has ended; failures were reported by `fail_load` before."""
        self.counters.chunks_loaded += len(keys)

    def fail_load(self, failed: FailedLoad) -> None:
        """A chunk could not be loaded: bar it for this request, and at this generation for all.

        A failure in an earlier life of the NodeActor says nothing about this one's chunks.
        """
        self.counters.loads_failed += 1
        request = self._requests.get(failed.request_id)
        if request is not None:
            request.barred.add(failed.key)
        handle = self._ready.get(failed.key)
        is_same = handle is not None and handle.generation == failed.generation
        if handle is None or not is_same or failed.node_epoch != self.node_epoch:
            return
        del self._ready[failed.key]
        self._bury(failed.key, failed.generation)
        if failed.is_gone:
            self._dropped.append((failed.key, handle))

    def _bury(self, key: Key, generation: Generation) -> None:
        self._tombstones[key] = max(generation, self._tombstones.get(key, NO_GENERATION))
        self._tombstones.move_to_end(key)
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    # Stores

    def prepare_store(self, request_id: str, keys: Collection[Key]) -> StorePlan | None:
        """Lease slots to the keys that are not cached yet, as far as the leases reach.

        Per KV group the longest prefix of the new keys is taken, never a later one: vLLM does not
        offer skipped chunks again. None when there are new keys and no slot for any; then nothing
        has changed.
        """
        plan = StorePlan([], [])
        if self.paused or not self._link_up or not self._request(request_id).options.store:
            return plan
        exhausted: set[int] = set()
        present: list[Key] = []
        for key in keys:
            group = group_of(key)
            if key in self._ready or key in self._pending:
                present.append(key)
            elif group not in exhausted:
                leases = self._leases[group]
                if leases:
                    plan.keys.append(key)
                    plan.handles.append(leases.popleft())
                else:
                    exhausted.add(group)
        if exhausted:
            self.counters.stores_without_lease += 1
            if not plan.keys:
                return None
        self._touched.extend(reversed(present))
        self._pending.update(zip(plan.keys, plan.handles, strict=True))
        self.counters.chunks_offered += len(plan.keys)
        return plan

    def fail_store(self, key: Key, generation: Generation) -> None:
        """A chunk could not be stored: it won't become READY, and its slot is given back."""
        self.counters.stores_failed += 1
        handle = self._pending.get(key)
        if handle is None or handle.generation != generation or key in self._failed_stores:
            return
        self._failed_stores.add(key)
        self._released.append((group_of(key), handle))

    def pending_handle(self, key: Key) -> Handle | None:
        """Where a chunk is being stored."""
        return self._pending.get(key)

    def complete_store(self, keys: Collection[Key]) -> None:
        """A store job has ended on all ranks; what did not fail is READY."""
        for key in keys:
            if self._is_orphaned(key):
                continue
            handle = self._pending.pop(key, None)
            if handle is None:
                continue
            if key in self._failed_stores:
                self._failed_stores.discard(key)
                continue
            self.counters.chunks_stored += 1
            if not self._is_clearing:
                self._ready[key] = handle

    def _is_orphaned(self, key: Key) -> bool:
        """Whether a completion is that of a forgotten store; jobs of one key end in order."""
        left = self._orphans.pop(key, 0)
        if left > 1:
            self._orphans[key] = left - 1
        return left > 0

    # Whole-cache events

    def reset(self) -> None:
        """Empty the view at once and have the namespace cleared in the whole cluster.

        vLLM does not complete the jobs that it has begun before.
        """
        self._forget_all()
        self._orphans.clear()
        self._resets += 1

    @property
    def _is_clearing(self) -> bool:
        return self._resets != self._resets_confirmed

    def _forget_all(self) -> None:
        self._orphans.update(self._pending.keys())
        self._ready.clear()
        self._pending.clear()
        self._failed_stores.clear()
        self._released.clear()
        self._dropped.clear()
        self._pinned.clear()
        self._touched.clear()
        for leases in self._leases.values():
            leases.clear()

    def set_link(self, up: bool) -> None:
        """Whether the workers reach their NodeActor; while they don't, everything is a MISS."""
        self._link_up = up

    def node_restarted(self, node_epoch: Epoch) -> None:
        """The node's pool began anew: no chunk and no lease of the old one is any good.

        The leases go back all the same: the scheduler actor may have believed them for the new one.
        """
        if node_epoch > self.node_epoch:
            self.node_epoch = node_epoch
            leases = self._lease_rows()
            self._forget_all()
            self._tombstones.clear()
            self._released.extend(leases)

    def attached(self, message: EngineAttached) -> None:
        """The scheduler actor has taken the engine in; a snapshot of the mirror will follow."""
        self.epoch = Epoch(message.epoch)
        self.paused = message.paused
        self._capacity.update(message.capacity)
        self._declared -= {h for h in self._declared if h.slot in set(message.rejected)}
        self._forget_undeclared()
        self.node_restarted(Epoch(message.node_epoch))

    def _forget_undeclared(self) -> None:
        """Leases that came in while the engine attached, or were not believed: others have them."""
        for group, leases in self._leases.items():
            self._leases[group] = deque(handle for handle in leases if handle in self._declared)
        for key, handle in self._pending.items():
            if handle not in self._declared:
                self._failed_stores.add(key)

    def apply(self, reply: SyncReply) -> None:
        """Take in an answer of the scheduler actor. Only between engine steps."""
        if reply.epoch != self.epoch:
            return
        self.paused = reply.paused
        self.node_restarted(Epoch(reply.node_epoch))
        if reply.node_epoch < self.node_epoch:
            return
        if self._is_clearing and reply.cleared < self._resets:
            return
        self._resets_confirmed = self._resets
        if reply.void:
            self._forget_all()
        if reply.reset:
            self._ready.clear()
        for key, handle in _chunks(reply.removed):
            self._remove(key, handle)
        for key, handle in _chunks(reply.stored):
            self._add(key, handle)
        granted = reply.granted
        columns = zip(granted.groups, granted.slots, granted.generations, strict=True)
        for group, slot, generation in columns:
            self._leases[group].append(Handle(Slot(slot), Generation(generation)))

    def _add(self, key: Key, handle: Handle) -> None:
        if key in self._pending:
            return
        if handle.generation <= self._tombstones.get(key, NO_GENERATION):
            return
        known = self._ready.get(key)
        if known is None or known.generation < handle.generation:
            self._ready[key] = handle

    def _remove(self, key: Key, handle: Handle) -> None:
        if self._pending.get(key) == handle:
            self._failed_stores.add(key)
        known = self._ready.get(key)
        if known is not None and known.generation <= handle.generation:
            del self._ready[key]

    # The exchange

    def declared_leases(self) -> Leases:
        """All leases, free and in flight: what an engine claims when it attaches again."""
        rows = self._lease_rows()
        self._declared = frozenset(handle for _, handle in rows)
        return _leases(rows)

    def _lease_rows(self) -> list[tuple[int, Handle]]:
        free = [(group, handle) for group, some in self._leases.items() for handle in list(some)]
        flying = [
            (group_of(key), handle)
            for key, handle in list(self._pending.items())
            if key not in self._failed_stores
        ]
        return [*free, *flying]

    def take_request(self, epoch: Epoch, may_grow: bool, may_want: bool) -> SyncRequest:
        """Build the next message of an exchange out of the outbox, for the actor's `epoch`.

        `may_grow` is False while earlier answers have not been applied: then nothing is asked
        for, and the outbox stays as it is. `may_want` is False while leases may be among them.
        """
        self._seq += 1
        clear = self._resets if self._is_clearing else 0
        if not may_grow:
            return SyncRequest(self.engine_id, epoch, self._seq, clear=clear, idle=True)
        dropped = _take(self._dropped, MAX_KEYS // 4)
        return SyncRequest(
            engine_id=self.engine_id,
            epoch=epoch,
            seq=self._seq,
            wanted=self._wanted() if may_want else {},
            touched=[*_take(self._touched, MAX_KEYS // 2)],
            pinned=[*_take(self._pinned, MAX_KEYS // 2)],
            released=_leases(_take(self._released, MAX_KEYS // 2)),
            dropped=Handles(
                [key for key, _ in dropped],
                [handle.slot for _, handle in dropped],
                [handle.generation for _, handle in dropped],
            ),
            clear=clear,
            counters=self.counter_values(),
        )

    def counter_values(self) -> dict[str, int]:
        """All counters by name."""
        return {name: getattr(self.counters, name) for name in ViewCounters.__slots__}

    def _wanted(self) -> dict[int, int]:
        """Refill each group's leases to their target once they are below half of it."""
        wanted: dict[int, int] = {}
        if self.paused:
            return wanted
        for group, leases in self._leases.items():
            target = self.lease_target(group)
            if 2 * len(leases) <= target:
                wanted[group] = target - len(leases)
        return wanted

    def lease_target(self, group: int) -> int:
        """Free slots to hold: a quarter of what the pool can hold at most, at least one."""
        return max(1, min(self._lease_slots, self._capacity[group] // 4))

    @property
    def has_news(self) -> bool:
        """Whether the outbox has something that should not wait for the next heartbeat."""
        return self._is_clearing or bool(self._pinned or self._released or self._dropped)

    @property
    def wants_leases(self) -> bool:
        """Whether some group's leases have run low."""
        return bool(self._wanted())

    @property
    def num_ready(self) -> int:
        """Chunks that a lookup would find."""
        return len(self._ready)

    def check(self) -> None:
        """Assert the invariants; for tests and idle moments."""
        assert not self._ready.keys() & self._pending.keys(), self._ready.keys()
        free = [handle for some in self._leases.values() for handle in some]
        flying = list(self._pending.values())
        slots = [handle.slot for handle in [*free, *flying]]
        assert len(set(slots)) == len(slots), slots
        for key, handle in self._ready.items():
            assert handle.generation > self._tombstones.get(key, NO_GENERATION), key


def _chunks(handles: Handles) -> Iterable[tuple[Key, Handle]]:
    columns = zip(handles.keys, handles.slots, handles.generations, strict=True)
    for key, slot, generation in columns:
        yield Key(key), Handle(Slot(slot), Generation(generation))


def _leases(rows: Iterable[tuple[int, Handle]]) -> Leases:
    rows = list(rows)
    return Leases(
        [group for group, _ in rows],
        [handle.slot for _, handle in rows],
        [handle.generation for _, handle in rows],
    )


def _take(queue: deque[T], most: int) -> list[T]:
    taken: list[T] = []
    while queue and len(taken) < most:
        taken.append(queue.popleft())
    return taken
