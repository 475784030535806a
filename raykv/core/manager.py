"""The global block manager: which node holds which chunk, who may store where, what is evicted.

            sync (grant)                node_report (stored)
   free ────────────────► leased ─────────────────────────► held
     ▲                      │ released, detached, expired     │
     └──────────────────────┴─────────────────────────────────┘ evicted, dropped, cleared, node lost

It is a directory: it never touches KV bytes, and every entry may be late or wrong. What makes that
safe is that a NodeActor refuses a handle whose generation is not the slot's.

Invariants:
1. Per node and slot size: free + leased + held slots are all slots of the slabs of that size.
2. A slot is leased to one engine at most, and a leased slot holds no chunk of the directory.
3. Every grant has a generation above all earlier ones, over restarts of the scheduler actor too.
4. A `stored` report counts only while its slot is leased at exactly the reported generation.
5. Nothing is granted on a node before its inventory is in and its engines had time to declare
   their leases.
6. The eviction policies hold exactly the chunks that the node holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from raykv.core.geometry import PoolGeometry
from raykv.core.policy import POLICIES, EvictionPolicy
from raykv.messages import (
    MAX_KEYS,
    PROTOCOL_VERSION,
    AttachEngine,
    ClusterStatus,
    EngineAttached,
    EngineStatus,
    Handles,
    Inventory,
    Leases,
    NodeReport,
    NodeReportReply,
    NodeStats,
    NodeStatus,
    SyncReply,
    SyncRequest,
)
from raykv.types import (
    NO_GENERATION,
    EngineId,
    Epoch,
    Generation,
    Key,
    Namespace,
    NodeId,
    Slot,
    epoch_of,
    make_generation,
)

MAX_PENDING_CHANGES = 262_144
"""Changes kept for an engine that does not fetch them; beyond it gets a fresh snapshot."""


@dataclass(frozen=True)
class ManagerSettings:
    """Times in seconds."""

    eviction_policy: str = "lru"
    engine_expiry_s: float = 10.0
    node_expiry_s: float = 10.0
    settle_s: float = 2.0
    pin_s: float = 10.0


@dataclass(slots=True)
class Chunk:
    """A replica that the directory believes in."""

    slot: Slot
    generation: Generation
    slot_bytes: int


@dataclass(frozen=True)
class Lease:
    """A free slot granted to an engine."""

    engine_id: EngineId
    group: int
    generation: Generation
    slot_bytes: int


@dataclass(slots=True)
class _SlotClass:
    """All slabs of one slot size on a node; `free` has the longest free slot first."""

    slot_bytes: int
    policy: EvictionPolicy[tuple[str, bytes]]
    slabs: set[int] = field(default_factory=set)
    free: OrderedDict[Slot, None] = field(default_factory=OrderedDict)

    def release(self, slot: Slot) -> None:
        assert slot not in self.free, slot
        self.free[slot] = None


@dataclass(frozen=True)
class _Change:
    """One line of an engine's mirror: a chunk that came (`stored`) or went."""

    stored: bool
    key: Key
    slot: Slot
    generation: Generation


@dataclass(slots=True)
class _Node:
    node_id: NodeId
    epoch: Epoch
    geometry: PoolGeometry
    last_report: float
    settled_at: float
    free_slabs: list[int]
    last_seq: int = 0
    inventory_complete: bool = False
    classes: dict[int, _SlotClass] = field(default_factory=dict)
    chunks: dict[Namespace, dict[Key, Chunk]] = field(default_factory=dict)
    leases: dict[Slot, Lease] = field(default_factory=dict)
    # Chunks that are about to be loaded, and until when they are not evicted.
    pinned: dict[tuple[Namespace, Key], float] = field(default_factory=dict)
    stats: NodeStats = field(default_factory=NodeStats)
    pid: int = 0
    hostname: str = ""
    raykv_version: str = ""

    def find(self, namespace: Namespace, key: Key) -> Chunk | None:
        return self.chunks.get(namespace, {}).get(key)

    @property
    def num_chunks(self) -> int:
        return sum(len(chunks) for chunks in self.chunks.values())


@dataclass(slots=True)
class _Engine:
    engine_id: EngineId
    node_id: NodeId
    namespace: Namespace
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    last_seen: float
    attached_at: float
    reply: SyncReply | None = None
    changes: deque[_Change] = field(default_factory=deque)
    snapshot: Iterator[Key] | None = None
    reset: bool = True
    void: bool = False
    cleared: int = 0
    counters: dict[str, int] = field(default_factory=dict)


class BlockManager:
    """See the module's docstring. All times are seconds of one monotonic clock of the caller."""

    def __init__(self, epoch: Epoch, settings: ManagerSettings | None = None) -> None:
        self.settings = settings or ManagerSettings()
        assert self.settings.eviction_policy in POLICIES, self.settings.eviction_policy
        self.epoch = epoch
        self.paused = False
        # Whether an operator has spoken in this life; before, a node's memory of it counts.
        self._pause_decided = False
        self._counter = 0
        self._nodes: dict[NodeId, _Node] = {}
        self._engines: dict[EngineId, _Engine] = {}
        # Generation up to which each namespace was cleared; later `stored` reports are void.
        self._cleared: dict[Namespace, Generation] = {}

    # Nodes

    def node_report(self, report: NodeReport, now: float) -> NodeReportReply:
        """Take a NodeActor's heartbeat; idempotent for a repeated `seq`."""
        node = self._nodes.get(NodeId(report.node_id))
        if node is None or node.epoch < report.epoch:
            node = self._join(report, now)
        if report.epoch < node.epoch:
            return NodeReportReply(self.epoch)
        self._refresh(node, report, now)
        if report.page:
            self._take_inventory(node, report)
        elif report.seq > node.last_seq:
            node.last_seq = report.seq
            self._take_stored(node, report.stored, now)
        return NodeReportReply(
            epoch=self.epoch,
            inventory=not node.inventory_complete and not report.page,
            cleared={str(name): int(gen) for name, gen in self._cleared.items()},
            paused=self.paused,
        )

    def _join(self, report: NodeReport, now: float) -> _Node:
        """A node that is new, or whose NodeActor has a new life."""
        if not self._pause_decided:
            self.paused = self.paused or report.paused
        old = self._nodes.pop(NodeId(report.node_id), None)
        if old is not None:
            self._forget_chunks(old)
        is_first = report.highest_generation == NO_GENERATION and report.scheduler_epoch == 0
        geometry = PoolGeometry(report.pool_bytes, report.slab_bytes)
        node = _Node(
            node_id=NodeId(report.node_id),
            epoch=Epoch(report.epoch),
            geometry=geometry,
            last_report=now,
            settled_at=now if is_first else now + self.settings.settle_s,
            free_slabs=list(range(geometry.num_slabs - 1, -1, -1)),
            inventory_complete=report.highest_generation == NO_GENERATION,
        )
        self._nodes[node.node_id] = node
        return node

    def _refresh(self, node: _Node, report: NodeReport, now: float) -> None:
        node.last_report = now
        node.stats = report.stats
        node.pid = report.pid
        node.hostname = report.hostname
        node.raykv_version = report.raykv_version
        seen = max(report.scheduler_epoch, epoch_of(Generation(report.highest_generation)))
        if seen > self.epoch:
            self.epoch = Epoch(seen + 1)
            self._counter = 0
        for name, generation in report.cleared.items():
            known = self._cleared.get(Namespace(name), NO_GENERATION)
            self._cleared[Namespace(name)] = Generation(max(known, generation))

    def _take_inventory(self, node: _Node, report: NodeReport) -> None:
        """One page of all READY chunks; slots that an engine has declared stay leased to it,
        unless the page has the very chunk that was stored there.
        """
        if node.inventory_complete:
            return
        for (namespace, key), chunk in _rows(report.stored):
            if chunk.generation <= self._cleared.get(namespace, NO_GENERATION):
                continue
            lease = node.leases.get(chunk.slot)
            if lease is not None and lease.generation == chunk.generation:
                del node.leases[chunk.slot]
            elif lease is not None or not self._claim_place(node, chunk):
                continue
            self._hold(node, namespace, key, chunk)
        node.inventory_complete = report.last_page

    def _claim_place(self, node: _Node, chunk: Chunk) -> bool:
        """Take a certain slot out of the free ones, with its slab; False if it can't be there."""
        if not node.geometry.is_place(chunk.slot, chunk.slot_bytes):
            return False
        slab = node.geometry.slab_of(chunk.slot)
        slot_class = self._class_of(node, chunk.slot_bytes)
        if slab in node.free_slabs:
            node.free_slabs.remove(slab)
            self._give_slab(node, slot_class, slab)
        if slab not in slot_class.slabs or chunk.slot not in slot_class.free:
            return False
        del slot_class.free[chunk.slot]
        return True

    def _take_stored(self, node: _Node, stored: Inventory, now: float) -> None:
        for (namespace, key), chunk in _rows(stored):
            lease = node.leases.get(chunk.slot)
            if lease is None or lease.generation != chunk.generation:
                continue
            del node.leases[chunk.slot]
            if chunk.generation <= self._cleared.get(namespace, NO_GENERATION):
                self._free(node, chunk)
                continue
            self._drop(node, namespace, key)
            self._hold(node, namespace, key, chunk)

    def _hold(self, node: _Node, namespace: Namespace, key: Key, chunk: Chunk) -> None:
        """The directory learns of a chunk whose slot is neither free nor leased any more."""
        existing = node.find(namespace, key)
        if existing is not None:
            self._drop(node, namespace, key)
        node.chunks.setdefault(namespace, {})[key] = chunk
        self._class_of(node, chunk.slot_bytes).policy.add((namespace, key))
        self._tell(node, namespace, _Change(True, key, chunk.slot, chunk.generation))

    def _drop(self, node: _Node, namespace: Namespace, key: Key) -> bool:
        """Forget a chunk and free its slot; False if there is none."""
        chunk = node.chunks.get(namespace, {}).pop(key, None)
        if chunk is None:
            return False
        self._class_of(node, chunk.slot_bytes).policy.remove((namespace, key))
        self._free(node, chunk)
        self._tell(node, namespace, _Change(False, key, chunk.slot, chunk.generation))
        return True

    def _free(self, node: _Node, chunk: Chunk) -> None:
        self._class_of(node, chunk.slot_bytes).release(chunk.slot)

    def _forget_chunks(self, node: _Node) -> None:
        """A NodeActor is gone with its pool: its engines start from an empty mirror."""
        for engine in self._engines_on(node.node_id):
            self._start_snapshot(engine)

    # Engines

    def attach_engine(self, message: AttachEngine, now: float) -> EngineAttached:
        """Introduce an engine; again after a restart of this actor, then with its leases."""
        error = self._objection(message)
        if error:
            return EngineAttached(self.epoch, error=error)
        node = self._nodes.get(NodeId(message.node_id))
        if node is None:
            return EngineAttached(
                self.epoch, error=f"node {message.node_id} has not reported yet", retry=True
            )
        for group, size in message.slot_bytes.items():
            if not node.geometry.slots_per_slab(size):
                return EngineAttached(
                    self.epoch,
                    error=f"one chunk of KV group {group} takes {size} bytes, more than a slab of "
                    f"the pool ({node.geometry.slab_bytes} bytes); set a larger pool_bytes, or "
                    "a smaller blocks_per_chunk",
                )
        self._admit(message, node, now)
        return EngineAttached(
            epoch=self.epoch,
            node_epoch=node.epoch,
            capacity={g: node.geometry.capacity(size) for g, size in message.slot_bytes.items()},
            paused=self.paused,
        )

    def _objection(self, message: AttachEngine) -> str:
        if message.version != PROTOCOL_VERSION:
            return (
                f"the engine speaks protocol {message.version} of RayKV, "
                f"the scheduler actor {PROTOCOL_VERSION}: install the same version on both"
            )
        return ""

    def _admit(self, message: AttachEngine, node: _Node, now: float) -> None:
        engine_id = EngineId(message.engine_id)
        known = self._engines.get(engine_id)
        if known is not None and known.node_id != node.node_id:
            self.detach_engine(engine_id)
        engine = _Engine(
            engine_id=engine_id,
            node_id=node.node_id,
            namespace=Namespace(message.namespace),
            model=message.model,
            num_ranks=message.num_ranks,
            slot_bytes=dict(message.slot_bytes),
            last_seen=now,
            attached_at=now,
        )
        self._engines[engine_id] = engine
        self._start_snapshot(engine)
        self._take_declared(engine, node, message.leases)

    def _take_declared(self, engine: _Engine, node: _Node, leases: Leases) -> None:
        """Believe an engine's leases where the slot is free or holds an older chunk, which was
        evicted for them; drop what it no longer claims.
        """
        declared = dict(zip(leases.slots, leases.generations, strict=True))
        for slot, lease in list(node.leases.items()):
            if lease.engine_id == engine.engine_id and declared.get(slot) != lease.generation:
                self._end_lease(node, slot)
        self._drop_older(node, declared)
        columns = zip(leases.groups, leases.slots, leases.generations, strict=True)
        for group, place, generation in columns:
            size = engine.slot_bytes.get(group)
            is_granted = generation <= make_generation(self.epoch, self._counter)
            if size is None or not is_granted or Slot(place) in node.leases:
                continue
            chunk = Chunk(Slot(place), Generation(generation), size)
            if self._claim_place(node, chunk):
                lease = Lease(engine.engine_id, group, chunk.generation, size)
                node.leases[chunk.slot] = lease

    def _drop_older(self, node: _Node, declared: dict[int, int]) -> None:
        """Forget chunks whose slots were granted again, by this actor's last life."""
        granted = make_generation(self.epoch, self._counter)
        older = [
            (namespace, key)
            for namespace, chunks in node.chunks.items()
            for key, chunk in chunks.items()
            if chunk.generation < declared.get(chunk.slot, NO_GENERATION) <= granted
        ]
        for namespace, key in older:
            self._drop(node, namespace, key)

    def _start_snapshot(self, engine: _Engine) -> None:
        """Have the engine's mirror rebuilt from scratch with its next exchanges."""
        engine.changes.clear()
        engine.reset = True
        node = self._nodes.get(engine.node_id)
        chunks = {} if node is None else node.chunks.get(engine.namespace, {})
        engine.snapshot = iter(list(chunks))

    def detach_engine(self, engine_id: EngineId) -> None:
        """End an engine's session: its leases return to the free slots, its chunks stay."""
        engine = self._engines.pop(engine_id, None)
        if engine is None:
            return
        node = self._nodes.get(engine.node_id)
        if node is None:
            return
        for slot, lease in list(node.leases.items()):
            if lease.engine_id == engine_id:
                self._end_lease(node, slot)

    def _end_lease(self, node: _Node, slot: Slot) -> None:
        lease = node.leases.pop(slot)
        self._class_of(node, lease.slot_bytes).release(slot)

    def sync(self, request: SyncRequest, now: float) -> SyncReply:
        """One exchange; a repeated `seq` gets the same answer again."""
        engine = self._engines.get(EngineId(request.engine_id))
        node = None if engine is None else self._nodes.get(engine.node_id)
        if engine is None or node is None or request.epoch != self.epoch:
            return SyncReply(self.epoch, request.seq, attach=True)
        engine.last_seen = now
        if engine.reply is not None and request.seq < engine.reply.seq:
            return self._quiet_reply(engine, node, request)
        if engine.reply is not None and request.seq == engine.reply.seq:
            return engine.reply
        engine.counters = request.counters
        self._take_request(engine, node, request, now)
        engine.reply = self._answer(engine, node, request, now)
        return engine.reply

    def _quiet_reply(self, engine: _Engine, node: _Node, request: SyncRequest) -> SyncReply:
        """An answer without changes and grants."""
        return SyncReply(
            self.epoch, request.seq, node.epoch, cleared=engine.cleared, paused=self.paused
        )

    def _take_request(self, engine: _Engine, node: _Node, request: SyncRequest, now: float) -> None:
        if request.clear > engine.cleared:
            engine.cleared = request.clear
            self.clear(engine.namespace)
        released_columns = zip(request.released.slots, request.released.generations, strict=True)
        for released, generation in released_columns:
            lease = node.leases.get(Slot(released))
            if lease is not None and lease.generation == generation:
                self._end_lease(node, Slot(released))
        dropped = zip(request.dropped.keys, request.dropped.generations, strict=True)
        for key, generation in dropped:
            chunk = node.find(engine.namespace, Key(key))
            if chunk is not None and chunk.generation == generation:
                self._drop(node, engine.namespace, Key(key))
        for key in request.pinned:
            if node.find(engine.namespace, Key(key)) is not None:
                node.pinned[engine.namespace, Key(key)] = now + self.settings.pin_s
        for key in request.touched:
            chunk = node.find(engine.namespace, Key(key))
            if chunk is not None:
                self._class_of(node, chunk.slot_bytes).policy.touch((engine.namespace, key))

    def _answer(self, engine: _Engine, node: _Node, request: SyncRequest, now: float) -> SyncReply:
        if request.idle:
            return self._quiet_reply(engine, node, request)
        # Before the changes are taken: what it evicts is part of this answer.
        granted = self._grant(engine, node, request.wanted, now)
        reset, engine.reset = engine.reset, False
        void, engine.void = engine.void, False
        stored, removed = self._next_changes(engine, node)
        return SyncReply(
            epoch=self.epoch,
            seq=request.seq,
            node_epoch=node.epoch,
            reset=reset,
            void=void,
            cleared=engine.cleared,
            more=bool(engine.changes) or engine.snapshot is not None,
            paused=self.paused,
            stored=stored,
            removed=removed,
            granted=granted,
        )

    def _next_changes(self, engine: _Engine, node: _Node) -> tuple[Handles, Handles]:
        """The next page of the engine's mirror: snapshot first, then what changed since.

        A mirror takes a page's removals first, so a chunk that came and went is only removed.
        """
        stored, removed = Handles([], [], []), Handles([], [], [])
        while engine.snapshot is not None and len(stored) < MAX_KEYS:
            key = next(engine.snapshot, None)
            if key is None:
                engine.snapshot = None
                break
            chunk = node.find(engine.namespace, key)
            if chunk is not None:
                _append(stored, key, chunk.slot, chunk.generation)
        came: dict[Key, _Change] = {}
        while engine.snapshot is None and engine.changes:
            if len(stored) + len(came) + len(removed) >= MAX_KEYS:
                break
            change = engine.changes.popleft()
            if change.stored:
                came[change.key] = change
            else:
                came.pop(change.key, None)
                _append(removed, change.key, change.slot, change.generation)
        for change in came.values():
            _append(stored, change.key, change.slot, change.generation)
        return stored, removed

    # Grants and eviction

    def _grant(self, engine: _Engine, node: _Node, wanted: dict[int, int], now: float) -> Leases:
        granted = Leases([], [], [])
        if self.paused or not node.inventory_complete or now < node.settled_at:
            return granted
        budget = MAX_KEYS
        for group, count in wanted.items():
            size = engine.slot_bytes.get(group)
            if size is None:
                continue
            for free in self._take_slots(node, size, min(count, budget), now):
                self._counter += 1
                generation = make_generation(self.epoch, self._counter)
                node.leases[free] = Lease(engine.engine_id, group, generation, size)
                granted.groups.append(group)
                granted.slots.append(free)
                granted.generations.append(generation)
                budget -= 1
        return granted

    def _take_slots(self, node: _Node, slot_bytes: int, count: int, now: float) -> list[Slot]:
        """Up to `count` slots: free ones, those of unused slabs, then by eviction."""
        slot_class = self._class_of(node, slot_bytes)
        while len(slot_class.free) < count and node.free_slabs:
            self._give_slab(node, slot_class, node.free_slabs.pop())
        if len(slot_class.free) < count:
            self._evict(node, slot_class, count - len(slot_class.free), now)
        while len(slot_class.free) < count and self._reclaim_slab(node, slot_class, now):
            pass
        taken = min(count, len(slot_class.free))
        return [slot_class.free.popitem(last=False)[0] for _ in range(taken)]

    def _evict(self, node: _Node, slot_class: _SlotClass, count: int, now: float) -> None:
        """Give up chunks in the policy's order; those that are about to be loaded stay."""
        victims: list[tuple[str, bytes]] = []
        for name in slot_class.policy.candidates():
            if len(victims) == count:
                break
            if node.pinned.get((Namespace(name[0]), Key(name[1])), now) <= now:
                victims.append(name)
        for namespace, key in victims:
            self._drop(node, Namespace(namespace), Key(key))

    def _reclaim_slab(self, node: _Node, slot_class: _SlotClass, now: float) -> bool:
        """Move one slab here from a class that has more than its fair share; False if none."""
        others = [c for c in node.classes.values() if c is not slot_class and c.slabs]
        share = node.geometry.num_slabs // (len(others) + 1)
        if not others or len(slot_class.slabs) >= share:
            return False
        donor = max(others, key=lambda c: len(c.slabs))
        leased = {node.geometry.slab_of(slot) for slot in node.leases}
        movable = sorted(donor.slabs - leased - self._pinned_slabs(node, now))
        if not movable:
            return False
        self._empty_slab(node, donor, movable[0])
        self._give_slab(node, slot_class, movable[0])
        return True

    def _pinned_slabs(self, node: _Node, now: float) -> set[int]:
        chunks = [node.find(*name) for name, until in node.pinned.items() if until > now]
        return {node.geometry.slab_of(chunk.slot) for chunk in chunks if chunk is not None}

    def _empty_slab(self, node: _Node, donor: _SlotClass, slab: int) -> None:
        """Evict all that a slab holds and take it out of its class."""
        held = [
            (namespace, key)
            for namespace, chunks in node.chunks.items()
            for key, chunk in chunks.items()
            if node.geometry.slab_of(chunk.slot) == slab
        ]
        for namespace, key in held:
            self._drop(node, namespace, key)
        donor.slabs.remove(slab)
        for slot in node.geometry.slots_of(slab, donor.slot_bytes):
            del donor.free[slot]

    def _class_of(self, node: _Node, slot_bytes: int) -> _SlotClass:
        found = node.classes.get(slot_bytes)
        if found is None:
            make: Callable[[], EvictionPolicy[tuple[str, bytes]]]
            make = POLICIES[self.settings.eviction_policy]
            found = node.classes[slot_bytes] = _SlotClass(slot_bytes, make())
        return found

    def _give_slab(self, node: _Node, slot_class: _SlotClass, slab: int) -> None:
        slot_class.slabs.add(slab)
        for slot in node.geometry.slots_of(slab, slot_class.slot_bytes):
            slot_class.release(slot)

    def _tell(self, node: _Node, namespace: Namespace, change: _Change) -> None:
        for engine in self._engines_on(node.node_id):
            if engine.namespace == namespace:
                engine.changes.append(change)
                if len(engine.changes) > MAX_PENDING_CHANGES:
                    self._start_snapshot(engine)

    def _engines_on(self, node_id: NodeId) -> list[_Engine]:
        return [engine for engine in self._engines.values() if engine.node_id == node_id]

    # Operators

    def clear(self, namespace: Namespace | None = None) -> None:
        """Forget all chunks and leases of a namespace (None: of all) in one step.

        Reports of stores that were granted before are void; engines get an empty mirror.
        """
        names = self._known_namespaces() if namespace is None else {namespace}
        now_generation = make_generation(self.epoch, self._counter)
        for name in names:
            self._cleared[name] = now_generation
            for node in self._nodes.values():
                self._clear_on(node, name)

    def _clear_on(self, node: _Node, namespace: Namespace) -> None:
        for key in list(node.chunks.get(namespace, {})):
            self._drop(node, namespace, key)
        node.chunks.pop(namespace, None)
        engines = {e.engine_id for e in self._engines_on(node.node_id) if e.namespace == namespace}
        for slot, lease in list(node.leases.items()):
            if lease.engine_id in engines:
                self._end_lease(node, slot)
        for engine_id in engines:
            self._engines[engine_id].void = True
            self._start_snapshot(self._engines[engine_id])

    def _known_namespaces(self) -> set[Namespace]:
        held = {name for node in self._nodes.values() for name in node.chunks}
        return held | {engine.namespace for engine in self._engines.values()}

    def set_paused(self, paused: bool) -> None:
        """Switch the cache off or on for all engines; they learn of it with their next sync."""
        self.paused = paused
        self._pause_decided = True

    def expire(self, now: float) -> None:
        """Forget engines and nodes that have been silent too long.

        The engines of such a node attach again, since its leases are forgotten with it.
        """
        for engine in list(self._engines.values()):
            if now - engine.last_seen > self.settings.engine_expiry_s:
                self.detach_engine(engine.engine_id)
        for node in list(self._nodes.values()):
            if now - node.last_report > self.settings.node_expiry_s:
                del self._nodes[node.node_id]
                for engine in self._engines_on(node.node_id):
                    del self._engines[engine.engine_id]
            node.pinned = {name: until for name, until in node.pinned.items() if until > now}

    def status(self, address: str, raykv_version: str, now: float) -> ClusterStatus:
        """A picture for people; changes nothing."""
        namespaces: dict[str, int] = {}
        for node in self._nodes.values():
            for name, chunks in node.chunks.items():
                namespaces[name] = namespaces.get(name, 0) + len(chunks)
        return ClusterStatus(
            address=address,
            epoch=self.epoch,
            raykv_version=raykv_version,
            paused=self.paused,
            nodes=[_node_status(node, now) for node in self._nodes.values()],
            engines=[self._engine_status(engine, now) for engine in self._engines.values()],
            namespaces=namespaces,
        )

    def _engine_status(self, engine: _Engine, now: float) -> EngineStatus:
        node = self._nodes.get(engine.node_id)
        leases = [] if node is None else list(node.leases.values())
        return EngineStatus(
            engine_id=engine.engine_id,
            node_id=engine.node_id,
            namespace=engine.namespace,
            model=engine.model,
            num_ranks=engine.num_ranks,
            leased_slots=sum(lease.engine_id == engine.engine_id for lease in leases),
            age_s=now - engine.attached_at,
            counters=engine.counters,
        )

    def holds(self, node_id: NodeId, namespace: Namespace, key: Key) -> Generation | None:
        """The generation at which the directory believes a chunk to be on a node."""
        node = self._nodes.get(node_id)
        chunk = None if node is None else node.find(namespace, key)
        return None if chunk is None else chunk.generation

    def check(self) -> None:
        """Assert the invariants over the whole state; for tests and idle moments."""
        for node in self._nodes.values():
            for slot_class in node.classes.values():
                self._check_class(node, slot_class)

    def _check_class(self, node: _Node, slot_class: _SlotClass) -> None:
        size = slot_class.slot_bytes
        leased = [slot for slot, lease in node.leases.items() if lease.slot_bytes == size]
        held = [
            (chunk.slot, (namespace, key))
            for namespace, chunks in node.chunks.items()
            for key, chunk in chunks.items()
            if chunk.slot_bytes == size
        ]
        slots = [*slot_class.free, *leased, *(slot for slot, _ in held)]
        total = len(slot_class.slabs) * node.geometry.slots_per_slab(size)
        assert len(slots) == total, (size, len(slots), total)
        assert len(set(slots)) == total, (size, slots)
        names = set(slot_class.policy.candidates())
        assert names == {name for _, name in held}, (size, len(names), len(held))


def _rows(inventory: Inventory) -> Iterable[tuple[tuple[Namespace, Key], Chunk]]:
    """The columns of an inventory as (namespace, key) and chunk."""
    columns = zip(
        inventory.namespace_index,
        inventory.keys,
        inventory.slots,
        inventory.generations,
        inventory.slot_bytes,
        strict=True,
    )
    for index, key, slot, generation, slot_bytes in columns:
        name = (Namespace(inventory.namespaces[index]), Key(key))
        yield name, Chunk(Slot(slot), Generation(generation), slot_bytes)


def _append(handles: Handles, key: Key, slot: Slot, generation: Generation) -> None:
    handles.keys.append(key)
    handles.slots.append(slot)
    handles.generations.append(generation)


def _node_status(node: _Node, now: float) -> NodeStatus:
    return NodeStatus(
        node_id=node.node_id,
        epoch=node.epoch,
        hostname=node.hostname,
        pid=node.pid,
        pool_bytes=node.stats.pool_bytes,
        prefaulted_bytes=node.stats.prefaulted_bytes,
        used_bytes=node.stats.used_bytes,
        free_slots=sum(len(c.free) for c in node.classes.values()),
        leased_slots=len(node.leases),
        chunks=node.num_chunks,
        bytes_stored=node.stats.bytes_stored,
        bytes_loaded=node.stats.bytes_loaded,
        chunks_refused=node.stats.chunks_refused,
        num_workers=node.stats.num_workers,
        age_s=now - node.last_report,
        raykv_version=node.raykv_version,
    )
