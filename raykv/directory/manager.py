"""The global block manager: which node holds which chunk, who may store where, what is evicted.

            attach_engine                sync (each with a higher seq)
  stranger ────────────► attached ──────────────────────────────► attached
      ▲                     │ detach_engine, expire, a new life of this actor
      └─────────────────────┘ (its leases end, its chunks stay)

It is a directory: it never touches KV bytes, and every entry may be late or wrong. What makes that
safe is that a NodeActor refuses a handle whose generation is not the slot's. `book.py` keeps
what is known of one node's pool; here is who asks, who is told, and whom to believe. Every change
of the directory is an event of the log (`log.py`).

Invariants:
1. Every grant has a generation above all earlier ones, over restarts of the scheduler actor too,
   however many there are.
2. A `stored` report counts only if its slot is leased at exactly the reported generation, or is
   free and has had no later one.
3. Nothing is granted on a node before its inventory is in and its engines had time to declare
   their leases.
4. An engine's mirror is a snapshot followed by every change since, in order.
5. The events of the log, replayed, give the directory.
6. Nothing that was cleared is believed, from any source, at any time, and whether its namespace or
   its node was known when it was cleared. Each node gets all floors with every answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from raykv.base.clearings import Clearings
from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    EVERY_NAMESPACE,
    GENERATIONS_PER_EPOCH,
    MAX_EPOCH,
    NO_GENERATION,
    EngineId,
    Epoch,
    Generation,
    Key,
    MissReason,
    Namespace,
    NodeId,
    Slot,
    epoch_of,
    make_generation,
)
from raykv.directory.answers.catalog import Catalog
from raykv.directory.answers.misses import MissLog
from raykv.directory.answers.questions import Questions
from raykv.directory.answers.snapshots import Snapshots
from raykv.directory.book import PoolBook
from raykv.directory.disks import Disks
from raykv.directory.inventory import take_failed, take_inventory, take_stored
from raykv.directory.leases import (
    Generations,
    count_stored,
    grant,
    lease_shares,
    take_declared,
)
from raykv.directory.leavings import Leavings
from raykv.directory.log import MAX_EVENTS, EventLog
from raykv.directory.members import Engine, Node, size_objection, version_objection
from raykv.directory.meter.cluster import ClusterMeter
from raykv.directory.meter.reuse import ReuseGauges
from raykv.directory.meter.room import RoomMeter
from raykv.directory.mirror import Mirror
from raykv.directory.pins import SHARE, Pins
from raykv.directory.sessions import Sessions
from raykv.directory.table.dicts import DictTable
from raykv.directory.table.policies import DEFAULT_POLICY, POLICIES
from raykv.directory.table.protocol import Changes, ChunkTable
from raykv.directory.tenants.quotas import Tenants
from raykv.directory.transfers import Transfers
from raykv.protocol.columns import Leases
from raykv.protocol.engine import (
    AttachEngine,
    EngineAttached,
    Naming,
    SyncReply,
    SyncRequest,
)
from raykv.protocol.events import EventPage, SnapshotPage
from raykv.protocol.node import NodeReport, NodeReportReply
from raykv.protocol.operator import TenantStatus
from raykv.protocol.reader import Explanations
from raykv.protocol.status import ClusterStatus, MoreRoom


@dataclass(frozen=True)
class ManagerSettings:
    """Times in seconds."""

    eviction_policy: str = DEFAULT_POLICY
    engine_expiry_s: float = 10.0
    node_expiry_s: float = 5.0
    settle_s: float = 2.0
    pin_s: float = 10.0
    pin_share: float = SHARE
    transfer_s: float = 60.0
    max_events: int = MAX_EVENTS
    generations_per_epoch: int = GENERATIONS_PER_EPOCH


class BlockManager:
    """See the module's docstring. All times are seconds of one monotonic clock of the caller.

    Args:
        epoch: this life's; above that of earlier ones, or nodes' reports raise it.
        settings: times and bounds.
        table: an empty one (None: one of dicts, with the eviction policy of the settings).
        cleared: floors that an earlier life has left, by namespace.
    """

    def __init__(
        self,
        epoch: Epoch,
        settings: ManagerSettings | None = None,
        table: ChunkTable | None = None,
        cleared: Mapping[str, int] | None = None,
    ) -> None:
        self.settings = settings or ManagerSettings()
        assert self.settings.eviction_policy in POLICIES, self.settings.eviction_policy
        self._clearings = Clearings(cleared)
        # Grants must be above all that was cleared.
        epoch = max(epoch, Epoch(epoch_of(self._clearings.highest) + 1)) if cleared else epoch
        self.epoch = epoch
        self._generations = Generations(epoch, self.settings.generations_per_epoch)
        self.paused = False
        # Whether an operator has given an order in this life; until then, what a node remembers
        # counts.
        self._pause_decided = False
        self._nodes: dict[NodeId, Node] = {}
        self._engines: dict[EngineId, Engine] = {}
        # The same engines by node: every change goes to those of one node.
        self._by_node: dict[NodeId, dict[EngineId, Engine]] = {}
        # For people: engines that could not be attached, since nothing is known of their node, and
        # when they asked last.
        self._waiting: dict[EngineId, tuple[NodeId, float]] = {}
        self._table = table or DictTable(self.settings.eviction_policy)
        self.tenants = Tenants(self._nodes)
        self._disks = Disks(self.tenants.label_with_quota, lambda: self.tenants.disk_shares)
        self._questions = Questions(self._nodes, self._table_now, self._disks)
        self._reuse = ReuseGauges()
        self._room = RoomMeter()
        self._log = EventLog(epoch, self.settings.max_events)
        self._snapshots = Snapshots()
        self.catalog = Catalog(
            self._nodes, self._engines, self._table_now, self._disks, self.tenants.name_of
        )
        of_pins = (self.settings.pin_share, self.settings.pin_s)
        self.pins = Pins(self._nodes, self._table_now, *of_pins)
        self.sessions = Sessions(self._nodes, self._table_now, self._disks, self.pins)
        self.misses = MissLog(self._nodes, self.sessions.why, self.tenants.name)
        lending = (lambda: self._generations, self.settings.transfer_s)
        self.transfers = Transfers(self._nodes, self._table_now, self._disks, self.pins, *lending)
        self.leavings = Leavings(self._nodes, self._engines)
        self.meter = ClusterMeter(
            self._nodes,
            self._engines,
            self._log,
            lambda: self.tenants.metered(self._disks.tenant_bytes()),
        )

    @property
    def granting(self) -> Epoch:
        """The epoch of the generations that are granted now: this life's own, or a later one."""
        return self._generations.epoch

    @property
    def cleared(self) -> dict[str, int]:
        """The generation up to which each namespace's chunks are void; a copy."""
        return self._clearings.told

    def _table_now(self) -> ChunkTable:
        return self._table

    def change_table(self, table: ChunkTable, now: float) -> None:
        """Go on with an empty table instead of the one of dicts; all that is known moves there."""
        # What comes to it is new there now, not as old as the host's clock.
        table.set_clock(now)
        self._table = table
        for node in self._nodes.values():
            node.book.move_to(table.add_node(node.node_id, node.book.geometry))
        # Their places are in the old one.
        self._snapshots.forget()
        for engine in self._engines.values():
            if engine.mirror.is_in_snapshot:
                self._start_snapshot(engine)

    # Nodes

    def node_report(self, report: NodeReport, now: float) -> NodeReportReply:
        """Take a NodeActor's heartbeat; idempotent for a repeated `seq`."""
        node = self._nodes.get(NodeId(report.node_id))
        if node is None or node.epoch < report.epoch:
            node = self._join(report, now)
        if report.epoch < node.epoch:
            return NodeReportReply(self.granting)
        self._refresh(node, report, now)
        if report.page:
            take_inventory(node, report, self._clearings)
        elif report.seq > node.last_seq:
            node.last_seq = report.seq
            # Before the inventory is in, such news may be older than the inventory, which has them
            # all.
            if node.inventory_complete:
                take_stored(node, report.stored, self._clearings)
                take_failed(node, report.failed)
        return NodeReportReply(
            epoch=self.granting,
            inventory=not node.inventory_complete and not report.page,
            cleared=self._clearings.told,
            paused=self.paused,
            disk=self._disks.take(report, self._clearings, now),
        )

    def _join(self, report: NodeReport, now: float) -> Node:
        """A node that is new, or whose NodeActor has a new life."""
        if not self._pause_decided:
            self.paused = self.paused or report.paused
        old = self._nodes.get(NodeId(report.node_id))
        if old is not None:
            self._lose(old)
            for engine in self._engines_on(old.node_id):
                self._start_snapshot(engine)
        elif self.epoch <= _seen_epoch(report) <= self.granting:
            # It may have heard of an earlier life of this actor that had the same epoch.
            self._rise_above(self.granting)
        is_first = report.highest_generation == NO_GENERATION and report.scheduler_epoch == 0
        node = Node(
            node_id=NodeId(report.node_id),
            epoch=Epoch(report.epoch),
            book=self._new_book(NodeId(report.node_id), report),
            last_report=now,
            settled_at=now if is_first else now + self.settings.settle_s,
            inventory_complete=report.highest_generation == NO_GENERATION,
        )
        self._nodes[node.node_id] = node
        self._questions.nodes_changed()
        self._log.node_joined(node.node_id, node.epoch)
        return node

    def _lose(self, node: Node) -> None:
        """A NodeActor is gone with its pool."""
        del self._nodes[node.node_id]
        self._questions.nodes_changed()
        self._log.node_lost(node.node_id, node.epoch)
        self.misses.lost(node)
        self._room.lost((node.node_id, node.epoch))
        self._table.remove_node(node.node_id)
        self._disks.lost(node.node_id)
        self.pins.lost(node.node_id)

    def _new_book(self, node_id: NodeId, report: NodeReport) -> PoolBook:
        geometry = PoolGeometry(report.pool_bytes, report.slab_bytes)
        table = self._table.add_node(node_id, geometry)
        book = PoolBook(
            table,
            lambda changes: self._changed(node_id, changes),
            lambda slot_bytes, count: self.pins.give_way(node_id, slot_bytes, count),
            self.catalog.groups_of,
        )
        book.share(self.tenants.shares)
        return book

    def _refresh(self, node: Node, report: NodeReport, now: float) -> None:
        node.last_report = now
        node.stats = report.stats
        node.pid = report.pid
        node.hostname = report.hostname
        node.raykv_version = report.raykv_version
        floor = Generation(max(report.cleared.values(), default=0))
        seen = max(_seen_epoch(report), epoch_of(floor))
        if (seen > self.granting or floor > self._generations.last) and seen <= MAX_EPOCH:
            own = make_generation(self.epoch, 0)
            self._rise_above(seen)
            # This life meant to clear everything, and some chunks were of later epochs.
            floors = self._clearings.told.items()
            above = {name: int(self._generations.last) for name, floor in floors if floor >= own}
            self._take_clearings(above)
        # What is above all that was ever granted was never cleared.
        last = self._generations.last
        self._take_clearings({name: up for name, up in report.cleared.items() if up <= last})

    def _rise_above(self, epoch: Epoch) -> None:
        """Begin an epoch that no node has seen; all engines attach again."""
        self.epoch = Epoch(epoch + 1)
        self._generations = Generations(self.epoch, self.settings.generations_per_epoch)
        self._log.rise_to(self.epoch)

    def _take_clearings(self, told: Mapping[str, int]) -> None:
        """Floors were reported: nothing at or below them is believed any more."""
        if self._clearings.take(told):
            self._drop_cleared()

    def _drop_cleared(self) -> None:
        """Forget all chunks that are void, and leases; takes as long as there are chunks."""
        self._disks.drop_cleared(self._clearings)
        for node in self._nodes.values():
            node.book.drop_cleared(self._clearings)
            for engine in self._engines_on(node.node_id):
                floor = self._clearings.of(engine.namespace)
                leases = node.book.leases().values()
                if any(e.engine_id == engine.engine_id and e.generation <= floor for e in leases):
                    self._void(node, engine)

    def _void(self, node: Node, engine: Engine) -> None:
        """Everything that an engine has is void; its next exchange says so."""
        node.book.end_leases(engine.engine_id)
        engine.void = True
        self._start_snapshot(engine)

    # Engines

    def attach_engine(self, message: AttachEngine, now: float) -> EngineAttached:
        """Introduce an engine; again after a restart of this actor, then with its leases."""
        if error := version_objection(message.version):
            return EngineAttached(self.epoch, error=error)
        node = self._nodes.get(NodeId(message.node_id))
        if node is None:
            self._waiting[EngineId(message.engine_id)] = NodeId(message.node_id), now
            return EngineAttached(
                self.epoch, error=f"node {message.node_id} has not reported yet", retry=True
            )
        geometry = node.book.geometry
        if error := size_objection(message.slot_bytes, geometry):
            return EngineAttached(self.epoch, error=error)
        engine = self._admit(message, node, now)
        self._waiting.pop(engine.engine_id, None)
        self.catalog.introduced(message)
        engine_id = EngineId(message.engine_id)
        lease_share, step_share = lease_shares(engine, self._engines_beside(engine))
        return EngineAttached(
            epoch=self.epoch,
            rejected=[
                slot
                for slot in message.leases.slots
                if not node.book.is_leased_to(engine_id, Slot(slot))
            ],
            node_epoch=node.epoch,
            capacity={g: geometry.capacity(size) for g, size in message.slot_bytes.items()},
            lease_share=lease_share,
            step_share=step_share,
            paused=self.paused,
            cleared=self._clearings.of(Namespace(message.namespace)),
        )

    def _admit(self, message: AttachEngine, node: Node, now: float) -> Engine:
        engine_id = EngineId(message.engine_id)
        known = self._engines.get(engine_id)
        if known is not None and known.node_id != node.node_id:
            self.detach_engine(engine_id)
        engine = Engine(
            engine_id=engine_id,
            node_id=node.node_id,
            namespace=Namespace(message.namespace),
            model=message.model,
            num_ranks=message.num_ranks,
            versions=message.versions,
            traits=message.traits,
            slot_bytes=dict(message.slot_bytes),
            last_seen=now,
            attached_at=now,
            mirror=self._new_mirror(node.node_id, Namespace(message.namespace)),
            naming=None if known is None else known.naming,
        )
        self._engines[engine_id] = engine
        self._by_node.setdefault(node.node_id, {})[engine_id] = engine
        if known is None:
            self.leavings.entered(engine.namespace)
        elif known.namespace != engine.namespace:
            self.leavings.changed(known.namespace, engine.namespace)
        cleared = self._clearings.of(engine.namespace)
        # Of an earlier life the engine is about to hear that it is over.
        leases = message.leases if message.node_epoch == node.epoch else Leases()
        take_declared(engine, node, leases, cleared, self._generations.last)
        return engine

    def _start_snapshot(self, engine: Engine) -> None:
        """Have the engine's mirror rebuilt from scratch with its next exchanges."""
        engine.mirror = self._new_mirror(engine.node_id, engine.namespace)

    def _new_mirror(self, node_id: NodeId, namespace: Namespace) -> Mirror:
        node = self._nodes.get(node_id)
        return Mirror(None if node is None else node.book.table, namespace)

    def detach_engine(self, engine_id: EngineId) -> None:
        """End an engine's session: its leases return to the free slots, its chunks stay."""
        engine = self._forget_engine(engine_id)
        if engine is None:
            return
        node = self._nodes.get(engine.node_id)
        if node is None:
            return
        node.book.end_leases(engine_id)

    def sync(self, request: SyncRequest, now: float) -> SyncReply:
        """One exchange; a repeated `seq` gets the same answer again."""
        engine = self._engines.get(EngineId(request.engine_id))
        node = None if engine is None else self._nodes.get(engine.node_id)
        if engine is None or node is None or request.epoch != self.epoch:
            return SyncReply(self.epoch, request.seq, attach=True)
        engine.last_seen = now
        self.leavings.go_on()
        if engine.reply is not None and request.seq < engine.reply.seq:
            return self._quiet_reply(engine, node, request)
        if engine.reply is not None and request.seq == engine.reply.seq:
            return engine.reply
        groups = self.catalog.groups_of(engine.namespace)
        self._reuse.count(engine, node, request.counters, groups, num_nodes=len(self._by_node))
        count_stored(engine, request.counters, self._engines_beside(engine))
        size = self.catalog.slot_bytes_of(engine.namespace)
        self._room.take(request.finished, groups, size, now)
        engine.take_news(request)
        self._take_request(engine, node, request, now)
        engine.reply = self._answer(engine, node, request, now)
        return engine.reply

    def _quiet_reply(self, engine: Engine, node: Node, request: SyncRequest) -> SyncReply:
        """An answer without changes and grants."""
        return SyncReply(
            self.epoch,
            request.seq,
            node.epoch,
            cleared=engine.cleared,
            paused=self.paused,
            has_peers=self._has_peers(engine),
            store_share=self._reuse.store_share(engine.namespace),
            naming=engine.naming,
        )

    def _take_request(self, engine: Engine, node: Node, request: SyncRequest, now: float) -> None:
        if request.clear > engine.cleared:
            engine.cleared = request.clear
            self.clear(engine.namespace)
        node.book.take_back(request.released)
        node.book.drop_all(engine.namespace, request.dropped)
        self._questions.lost(engine.namespace, request.lost)
        self._questions.announce(engine, request.announced)
        if request.pinned:
            node.book.table.pin(engine.namespace, request.pinned, now + self.settings.pin_s)
        if request.touched:
            node.book.table.touch(engine.namespace, request.touched)
        if request.hints.pinned or request.hints.favoured:
            self.pins.take_hints(engine.namespace, request.hints, now)
        if request.owned.tenants:
            self.tenants.take(node, request.owned, now)
        # After the touches: what is released and then touched is not released any more.
        self.sessions.take(engine.namespace, engine.node_id, request.sessions, now)

    def _answer(self, engine: Engine, node: Node, request: SyncRequest, now: float) -> SyncReply:
        if request.idle:
            return self._quiet_reply(engine, node, request)
        self.tenants.finished(request.finished)
        # Before the changes are taken: what it evicts is part of this answer.
        may_grant = not self.paused and node.inventory_complete and now >= node.settled_at
        wanted = request.wanted if may_grant else {}
        granted = grant(engine, node, wanted, self._generations, now)
        lease_share, step_share = lease_shares(engine, self._engines_beside(engine))
        void, engine.void = engine.void, False
        reset = engine.mirror.is_reset
        stored, removed = engine.mirror.next_page()
        return SyncReply(
            epoch=self.epoch,
            seq=request.seq,
            node_epoch=node.epoch,
            reset=reset,
            void=void,
            cleared=engine.cleared,
            more=engine.mirror.has_more,
            paused=self.paused,
            stored=stored,
            removed=removed,
            granted=granted,
            replicas=self._questions.answer(engine, request.asked, now, now + self.settings.pin_s),
            has_peers=self._has_peers(engine),
            store_share=self._reuse.store_share(engine.namespace),
            lease_share=lease_share,
            step_share=step_share,
            refined=self.misses.take(engine, request.finished, now),
            naming=engine.naming,
        )

    def _engines_beside(self, engine: Engine) -> Iterable[Engine]:
        """All engines of an engine's node, itself too."""
        return self._by_node[engine.node_id].values()

    def _has_peers(self, engine: Engine) -> bool:
        """Whether anybody else has, or may get, chunks of the engine's namespace."""
        space, nodes = engine.namespace, self._nodes.values()
        return (
            self._disks.holds_any(space)
            or any(n.node_id != engine.node_id and n.book.table.holds_any(space) for n in nodes)
            or any(e is not engine and e.namespace == space for e in self._engines.values())
        )

    # Changes

    def _changed(self, node_id: NodeId, changes: Changes) -> None:
        """Chunks came to a node, or went: log and mirrors follow."""
        (self._log.stored if changes.stored else self._log.removed)(node_id, changes)
        if changes.stored:
            self.leavings.came(node_id, changes)
            self._questions.stored(changes.namespace, changes.keys)
        elif not changes.replaced:
            if changes.ages:
                self.meter.evicted(changes.ages)
                life = (node_id, self._nodes[node_id].epoch)
                size = self.catalog.slot_bytes_of(changes.namespace)
                self._room.evicted(life, changes.keys, size)
            reason = MissReason.EVICTED
            if changes.over_quota:
                self.tenants.evicted(changes)
                reason = MissReason.QUOTA
            self.misses.gone(changes.namespace, changes.keys, reason)
            self._questions.gone(node_id, changes)
        self.pins.changed(node_id, changes)
        self.sessions.changed(node_id, changes)
        for engine in self._engines_on(node_id):
            if engine.namespace == changes.namespace:
                engine.mirror.add(changes)
                if engine.mirror.is_overfull:
                    self._start_snapshot(engine)

    def _engines_on(self, node_id: NodeId) -> list[Engine]:
        return list(self._by_node.get(node_id, {}).values())

    def _forget_engine(self, engine_id: EngineId) -> Engine | None:
        engine = self._engines.pop(engine_id, None)
        if engine is not None:
            others = self._by_node[engine.node_id]
            del others[engine_id]
            if not others:
                del self._by_node[engine.node_id]
        return engine

    # Operators

    def clear(self, namespace: Namespace | None = None) -> dict[str, int]:
        """Forget all chunks and leases of a namespace (None: of all, known or not) in one step.

        Whatever was granted before is void, also where nobody knows of it now. Mirrors are empty.
        Returns what each namespace was ever cleared up to.
        """
        names = self._known_namespaces() if namespace is None else {namespace}
        last = self._generations.last
        every = EVERY_NAMESPACE if namespace is None else namespace
        risen = self._clearings.take({every: last})
        for name in names:
            self._questions.forget_namespace(name)
            self._log.cleared(name, last)
            self.misses.cleared(name)
            self.pins.cleared(name)
            self._disks.clear(name)
            for node in self._nodes.values():
                self._clear_on(node, name)
        if EVERY_NAMESPACE in risen and namespace is not None:
            # There was no room for a floor of its own.
            self._drop_cleared()
        return self._clearings.told

    def _clear_on(self, node: Node, namespace: Namespace) -> None:
        node.book.table.clear(namespace)
        for engine in self._engines_on(node.node_id):
            if engine.namespace == namespace:
                self._void(node, engine)

    def _known_namespaces(self) -> set[Namespace]:
        held = {name for node in self._nodes.values() for name in node.book.table.sizes()}
        return held | {e.namespace for e in self._engines.values()} | self._disks.namespaces()

    def set_paused(self, paused: bool) -> None:
        """Switch the cache off or on for all engines; they learn of it with their next sync."""
        self.paused = paused
        self._pause_decided = True

    def name_weights(self, beginning: str, naming: Naming) -> list[EngineId]:
        """Engines whose ids begin so are told what their weights are called; returns which."""
        found = [each for name, each in self._engines.items() if name.startswith(beginning)]
        for engine in found:
            engine.naming = naming
        return [engine.engine_id for engine in found]

    def has_heard(self, order_id: str) -> bool:
        """Whether no engine is left that is still to be told of that naming."""
        namings = [engine.naming for engine in self._engines.values()]
        return all(each is None or each.order_id != order_id for each in namings)

    def expire(self, now: float) -> None:
        """Forget engines and nodes that have been silent too long.

        The engines of such a node attach again, since its leases are forgotten with it.
        """
        self._table.set_clock(now)
        self._log.set_clock(now)
        for engine in list(self._engines.values()):
            if now - engine.last_seen > self.settings.engine_expiry_s:
                self.detach_engine(engine.engine_id)
        for engine_id, (_, asked_at) in list(self._waiting.items()):
            if now - asked_at > self.settings.engine_expiry_s:
                del self._waiting[engine_id]
        for node in list(self._nodes.values()):
            if now - node.last_report > self.settings.node_expiry_s:
                self._lose(node)
                for engine in self._engines_on(node.node_id):
                    self._forget_engine(engine.engine_id)
            node.book.table.forget_pins(now)
            node.book.trim(now)
        self.transfers.expire(now)
        self.leavings.go_on()
        self.sessions.expire(now)

    # Readers

    def events(self, epoch: Epoch, after: int) -> EventPage:
        """What happened after a position in the event log; see `EventLog.page`."""
        return self._log.page(epoch, after)

    @property
    def last_event(self) -> int:
        """Number of the newest event."""
        return self._log.last_seq

    def snapshot(self, cursor: int = 0) -> SnapshotPage:
        """A page of the directory; 0 begins a new snapshot. Changes nothing else."""
        if not cursor:
            cursor = self._snapshots.begin(
                self._log.epoch, self._log.last_seq, list(self._nodes.values())
            )
        return self._snapshots.page(cursor, self._nodes)

    def why_miss(self, beginning: str, now: float) -> Explanations:
        """What became of the prompt tokens of requests whose ids begin so; changes nothing."""
        return self.misses.find(beginning, now)

    def more_room(self, now: float) -> MoreRoom:
        """What more room would have saved; changes nothing."""
        pools = [node.book.geometry.pool_bytes for node in self._nodes.values()]
        return self._room.savings(len(pools), sum(pools), now)

    def status(self, address: str, raykv_version: str, now: float) -> ClusterStatus:
        """A picture for people; changes nothing."""
        waiting = {str(name): str(node_id) for name, (node_id, _) in self._waiting.items()}
        base = ClusterStatus(
            address,
            self.epoch,
            raykv_version,
            self.paused,
            waiting=waiting,
            tenants=self.tenant_status(),
        )
        return self.catalog.status(base, now, self.pins)

    def tenant_status(self) -> list[TenantStatus]:
        """What tenants have, and their shares; changes nothing."""
        return self.tenants.status(self._disks.tenant_bytes())

    def holds(self, node_id: NodeId, namespace: Namespace, key: Key) -> Generation | None:
        """The generation at which the directory believes a chunk to be on a node."""
        node = self._nodes.get(node_id)
        chunk = None if node is None else node.book.find(namespace, key)
        return None if chunk is None else chunk.generation

    def check(self) -> None:
        """Assert the invariants over the whole state; for tests and idle moments."""
        self._table.check()
        self._disks.check()
        self.pins.check()
        self.leavings.check()
        self.sessions.check()
        self.tenants.check()
        for node in self._nodes.values():
            node.book.check()
        by_node: dict[NodeId, dict[EngineId, Engine]] = {}
        for name, engine in self._engines.items():
            by_node.setdefault(engine.node_id, {})[name] = engine
        assert by_node == self._by_node, (by_node, self._by_node)


def _seen_epoch(report: NodeReport) -> Epoch:
    """The latest epoch of generations that the node has heard of."""
    return Epoch(max(report.scheduler_epoch, epoch_of(Generation(report.highest_generation))))
