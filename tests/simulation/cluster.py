"""All parts of a simulated cluster, and how messages find them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import (
    SLOT_ALIGNMENT,
    ChunkName,
    Epoch,
    Generation,
    Key,
    Namespace,
    NodeId,
    Slot,
)
from raykv.directory.manager import BlockManager, ManagerSettings
from raykv.protocol.engine import AttachEngine, EngineAttached, SyncReply, SyncRequest
from raykv.protocol.framing import decode, encode
from raykv.protocol.node import NodeReport, NodeReportReply
from raykv.protocol.peer import FetchRequest, FetchResult, ReadRequest
from tests.simulation.engine import Engine
from tests.simulation.fetch import Post, ReadAnswer
from tests.simulation.node import Node
from tests.simulation.reader import Reader
from tests.simulation.session import Identity
from tests.simulation.wire import Wire

SLAB_PAGES = 4

GENERATIONS_PER_EPOCH = 20
"""So few that every world sees epochs rise."""

Place = tuple[NodeId, Namespace, Key]


@dataclass(eq=False)
class Cluster:
    """One scheduler actor, nodes and engines; `now` is the time of all but the engines, whose
    clocks may be ahead, and `tick` counts the steps of the world.

    Messages are encoded and decoded, so that nobody shares what is in them.
    """

    rng: random.Random
    wire: Wire
    settings: ManagerSettings
    num_slabs: int
    now: float = 1000.0
    tick: int = 0
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    engines: list[Engine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager = BlockManager(Epoch(1), self.settings)
        # Reads every event as soon as it is there.
        self.listener = Reader()
        self._old_epochs: set[Epoch] = set()
        self._first_epoch = self.manager.epoch
        # An operator, in this life of the scheduler actor.
        self.has_cleared = False
        # When an operator has last cleared a namespace (None: all).
        self._cleared_at: dict[Namespace | None, int] = {}

    # Who there is

    @property
    def geometry(self) -> PoolGeometry:
        """Of every node's pool."""
        slab_bytes = SLAB_PAGES * SLOT_ALIGNMENT
        return PoolGeometry(self.num_slabs * slab_bytes, slab_bytes)

    def add_node(self, node_id: NodeId) -> None:
        self.nodes[node_id] = Node(self, node_id, Epoch(1), self.geometry)

    def add_engine(self, identity: Identity) -> None:
        self.engines.append(Engine(self, identity))

    def engines_on(self, node_id: NodeId) -> list[Engine]:
        return [engine for engine in self.engines if engine.identity.node_id == node_id]

    @property
    def namespaces(self) -> list[Namespace]:
        return sorted({engine.identity.namespace for engine in self.engines})

    # The scheduler actor

    @property
    def has_old_epoch(self) -> bool:
        """Whether the scheduler actor has that of an earlier life, until a node has told it."""
        return self.manager.epoch in self._old_epochs

    @property
    def is_clock_late(self) -> bool:
        """Whether an earlier life had a later epoch, or the same one."""
        return any(epoch >= self.manager.epoch for epoch in self._old_epochs)

    def restart_manager(self, epoch: Epoch, cleared: dict[str, int]) -> None:
        self._old_epochs.update(map(Epoch, range(self._first_epoch, self.manager.granting + 1)))
        self.manager = BlockManager(epoch, self.settings, cleared=cleared)
        self._first_epoch = self.manager.epoch
        self.has_cleared = False
        self._after_manager()

    def take_report(self, message: NodeReport, post: Post[NodeReportReply]) -> None:
        self.manager.expire(self.now)
        reply = self.manager.node_report(decode(encode(message), NodeReport), self.now)
        self._after_manager()
        post(decode(encode(reply), NodeReportReply))

    def take_attach(self, message: AttachEngine, post: Post[EngineAttached]) -> None:
        self.manager.expire(self.now)
        answer = self.manager.attach_engine(decode(encode(message), AttachEngine), self.now)
        self._after_manager()
        post(decode(encode(answer), EngineAttached))

    def take_sync(self, message: SyncRequest, post: Post[SyncReply]) -> None:
        self.manager.expire(self.now)
        reply = self.manager.sync(decode(encode(message), SyncRequest), self.now)
        self._after_manager()
        post(decode(encode(reply), SyncReply))

    def clear(self, namespace: Namespace | None) -> None:
        self.manager.clear(namespace)
        self.has_cleared = True
        # Two lives of one epoch can't be told apart.
        if not self.has_old_epoch:
            self._cleared_at[namespace] = self.tick
        self._after_manager()

    def _after_manager(self) -> None:
        """The listener hears of every change; it may miss some when the epoch rises."""
        epoch, _ = self.listener.replay.place
        num_gaps = self.listener.num_gaps
        while not self.listener.poll(self.manager):
            pass
        has_missed = self.listener.num_gaps > num_gaps and epoch == self.manager.epoch
        assert not has_missed, "the listener has missed events"

    def _check_cleared(self) -> None:
        """No bytes from before a clearing are found, wherever they were copied to since."""
        for node in self.manager._nodes.values():
            there = self.nodes[node.node_id]
            for namespace, key in node.book.names():
                chunk = node.book.find(namespace, key)
                assert chunk is not None
                place = chunk.slot, chunk.generation, chunk.slot_bytes
                name = ChunkName(namespace, key, *place)
                content = there.bytes_at(name)
                is_there = node.epoch == there.epoch and there.table.is_ready(name)
                if is_there and content is not None:
                    since = max(self._cleared_at.get(each, -1) for each in (None, namespace))
                    assert content.made_at > since, f"{name} was cleared and has come back"

    def directory(self) -> dict[Place, tuple[Slot, Generation]]:
        """What the scheduler actor believes to be where."""
        return {
            (node.node_id, *name): (chunk.slot, chunk.generation)
            for node in self.manager._nodes.values()
            for name in node.book.names()
            if (chunk := node.book.find(*name)) is not None
        }

    # Nodes

    def fetch(self, node_id: NodeId, request: FetchRequest, post: Post[FetchResult]) -> None:
        self.nodes[node_id].fetches.begin(decode(encode(request), FetchRequest), post)

    def read(self, node_id: str, request: ReadRequest, post: Post[ReadAnswer]) -> None:
        self.nodes[NodeId(node_id)].read(decode(encode(request), ReadRequest), post)

    def restart_node(self, node_id: NodeId) -> None:
        """The NodeActor dies; another one takes its place, with an empty pool."""
        dead = self.nodes[node_id]
        dead.die()
        self.nodes[node_id] = Node(self, node_id, Epoch(dead.epoch + 1), self.geometry)
        for engine in self.engines_on(node_id):
            engine.is_link_up = False

    # What always holds

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self.manager.check()
        self._check_cleared()
        for node in self.nodes.values():
            node.table.check()
        for engine in self.engines:
            engine.view.check()
