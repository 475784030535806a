"""All parts of a simulated cluster in which the nodes decide, and how messages find them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import PART_MARK, Key, Namespace, NodeId, Stamp
from raykv.node.pool.records import ChunkRecord, ChunkState, Standing
from raykv.protocol.copies import CopyResult
from raykv.protocol.operator import OrdersDocument
from tests.simulation.nodes.content import BlockBytes, PoolBytes
from tests.simulation.nodes.engine import PlayedEngine, Seats
from tests.simulation.nodes.head import PlayedHead
from tests.simulation.nodes.jobs import Line, RankJob
from tests.simulation.nodes.models import PART, Model
from tests.simulation.nodes.node import PlayedNode
from tests.simulation.wire import Call, Wire

SLAB_BYTES = 4 * 4096

SPARE_REPORTS = 4
"""Of each node, after which no chunk is spare that has no keeper."""

LONG_AGO = 300
"""Steps of the world in which all hear of what was stored."""


class SpareEverywhere:
    """A chunk is spare wherever it is. The directory has to read of that, and then to say so."""

    def __init__(self, cluster: Cluster) -> None:
        self._lives = _lives(cluster)
        self._numbers = [node.pool.index.listing.number for node in cluster.nodes.values()]
        self._reports: list[int] | None = None

    def is_of(self, cluster: Cluster) -> bool:
        """Whether all nodes, and the directory, are in the lives in which they were then."""
        return self._lives == _lives(cluster)

    def is_known(self, cluster: Cluster) -> bool:
        """Whether all nodes have reported that, and have heard what follows."""
        nodes = cluster.nodes.values()
        if self._reports is None:
            read = [node.read_up_to for node in nodes]
            if all(has >= number for has, number in zip(read, self._numbers, strict=True)):
                self._reports = [node.num_answered for node in nodes]
            return False
        counts = zip((node.num_answered for node in nodes), self._reports, strict=True)
        return all(count >= before + SPARE_REPORTS for count, before in counts)


def _lives(cluster: Cluster) -> list[int]:
    return [cluster.head.num_lives, *(node.life for node in cluster.nodes.values())]


@dataclass(eq=False)
class Cluster:
    """`now` is the time of all whose clock is not ahead; `tick` counts the steps of the world.

    `results_share`: how many of the results that have come an engine takes in one step. `ghosts`
    are engines that are dead, of which a rank is frozen and knows nothing of it.
    """

    rng: random.Random
    wire: Wire
    sockets: Wire
    most_events: int
    kv_blocks: int
    results_share: float = 0.7
    is_calm: bool = False
    now: float = 1000.0
    tick: int = 1
    nodes: dict[NodeId, PlayedNode] = field(default_factory=dict)
    engines: list[PlayedEngine] = field(default_factory=list)
    ghosts: list[PlayedEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        # With the step of the world in which each was heard of first.
        self._documents: dict[Stamp, OrdersDocument] = {}
        self._noted_at: dict[Stamp, int] = {}
        self._ahead: dict[NodeId, float] = {}
        self._lives = 1
        # Chunks that are spare wherever they are.
        self._spare_since: dict[tuple[Namespace, Key], SpareEverywhere] = {}
        self._stored_at: dict[tuple[tuple[NodeId, ...], Namespace, Key], int] = {}
        self.models: dict[Namespace, Model] = {}
        self.head = PlayedHead(self, self.rng, self.most_events)

    # Who there is

    def add_node(self, node_id: NodeId, num_slabs: int, memory: PoolBytes | None = None) -> None:
        """A node's first life, or its next one."""
        geometry = PoolGeometry(num_slabs * SLAB_BYTES, SLAB_BYTES)
        self._lives += 1
        bytes_there = memory or PoolBytes()
        node = self.nodes[node_id] = PlayedNode(self, node_id, self._lives, geometry, bytes_there)
        kept = self.head.store.document
        if kept is not None and not self.is_cut(node_id):
            node.take_orders(kept)

    def add_engine(self, seats: Seats) -> PlayedEngine:
        self._lives += 1
        for weights in (0, 1):
            self.models[seats.model.namespace(weights)] = seats.model
        engine = PlayedEngine(self, seats, self.life_of(seats), self.kv_blocks)
        self.engines.append(engine)
        for place, rank in engine.ranks():
            engine.connect(place, rank)
        return engine

    def life_of(self, seats: Seats) -> int:
        """Of the next process of an engine."""
        return self.rng.getrandbits(40)

    def is_cut(self, node_id: NodeId) -> bool:
        """Whether a node cannot reach the head."""
        return not self.wire.cut.isdisjoint({f"reports of {node_id}", "head", node_id})

    def ahead_of(self, node_id: NodeId) -> float:
        """How far a node's clock is ahead, which outlives a NodeActor."""
        return self._ahead.get(node_id, 0.0)

    def jump(self, node_id: NodeId, seconds: float) -> None:
        self._ahead[node_id] = self.ahead_of(node_id) + seconds
        self.nodes[node_id].ahead_s = self._ahead[node_id]

    def num_ranks_of(self, namespace: Namespace) -> int:
        """Ranks whose parts a chunk has."""
        family, _, part = namespace.partition(PART_MARK)
        return len(part.split(PART)) if part else self.models[Namespace(family)].num_ranks

    # Messages

    def at(self, node_id: NodeId, deal: Callable[[PlayedNode], None]) -> None:
        """A message has come to a node, whichever life it is in now."""
        node = self.nodes[node_id]
        node.receive(lambda: deal(node))

    def send_jobs(self, line: Line, batch: list[RankJob]) -> None:
        """A rank's jobs go to its node, in the order in which they were sent."""
        line.flying.extend(batch)
        name = f"line {line.life} {line.place} {line.rank} {line.number}"
        call: Call[None] = Call(
            f"{len(batch)} jobs of {name}",
            ("", ""),
            lambda _: line.node.receive(lambda: line.node.admit(line, batch)),
            lambda _: None,
            lambda: None,
        )
        self.sockets.send(call, name)

    def send_result(self, line: Line, job: RankJob, result: CopyResult) -> None:
        """A rank hears how a job went."""
        call: Call[None] = Call(
            f"result of job {job.job.job_id} of rank {job.rank}",
            ("", ""),
            lambda _: line.end(job, result),
            lambda _: None,
            lambda: None,
        )
        self.sockets.send(call)

    # What befalls them

    def restart_node(self, node_id: NodeId, num_slabs: int, *, keeps_memory: bool) -> None:
        """A NodeActor dies; another one takes its place, with an empty index."""
        dead = self.nodes[node_id]
        dead.die()
        for line in dead.lines:
            if not line.is_open:
                line.lose_all()
        self.add_node(node_id, num_slabs, dead.memory if keeps_memory else None)

    def broken_lines(self) -> list[tuple[PlayedEngine, Line]]:
        """Lines to nodes that are dead, which the ranks have not noticed."""
        return [
            (engine, line)
            for engine in [*self.engines, *self.ghosts]
            for line in engine.lines.values()
            if line.is_open and line.node.is_dead
        ]

    def closed_lines(self) -> list[Line]:
        """Lines that ranks have closed, which their nodes have not noticed."""
        return [
            line
            for node in self.nodes.values()
            if not node.is_frozen
            for line in node.lines
            if not line.is_open
        ]

    # Orders

    def note(self, document: OrdersDocument) -> None:
        """Somebody knows a document: another one with its number says the same."""
        known = self._documents.setdefault(document.stamp, document)
        self._noted_at.setdefault(document.stamp, self.tick)
        assert _said(known) == _said(document), f"two documents {document.stamp}"

    def was_cleared(self, content: BlockBytes, told: Stamp) -> bool:
        """Whether bytes are of before a clear that the orders of a number know of."""
        return any(
            cleared in ("", content.namespace) and content.made_at <= tick <= self._noted_at[told]
            for cleared, tick in (self.head.cleared if told in self._noted_at else ())
        )

    # In a calm world

    def note_stored(self, engine: PlayedEngine, keys: list[Key]) -> None:
        """An engine's store has ended well."""
        for key in keys:
            name = engine.seats.node_ids, engine.namespace, key
            self._stored_at.setdefault(name, self.tick)

    def was_stored(self, engine: PlayedEngine, key: Key) -> bool:
        """Whether an engine at the same places has stored a chunk long ago."""
        name = engine.seats.node_ids, engine.namespace, key
        return self._stored_at.get(name, self.tick) < self.tick - LONG_AGO

    # What always holds

    def check(self) -> None:
        """Assert the invariants of all parts."""
        self.head.directory.check()
        for node in self.nodes.values():
            node.check()
        for engine in self.engines:
            engine.view.check()
        self._check_spares()

    def _check_spares(self) -> None:
        """Nothing is spare wherever it is, once all nodes have reported that and heard of it."""
        spare: dict[tuple[Namespace, Key], bool] = {}
        for node_id, node in self.nodes.items():
            for record in self.ready(node_id) if not node.pool.is_leaving else ():
                name = record.namespace, record.key
                is_spare = record.standing is Standing.SPARE
                spare[name] = spare.get(name, True) and is_spare
        names = {name for name, is_spare in spare.items() if is_spare}
        self._spare_since = {
            name: each for name, each in self._spare_since.items() if name in names
        }
        for name in sorted(names):
            since = self._spare_since.get(name)
            if since is None or not since.is_of(self):
                self._spare_since[name] = SpareEverywhere(self)
            else:
                assert not since.is_known(self), f"{name} is spare everywhere"

    def ready(self, node_id: NodeId) -> list[ChunkRecord]:
        """All READY records of a node."""
        return ready_records(self.nodes[node_id])


def _said(document: OrdersDocument) -> OrdersDocument:
    """What does not change while time passes."""
    return msgspec.structs.replace(document, pins={})


def ready_records(node: PlayedNode) -> list[ChunkRecord]:
    return [each for each in node.pool.index.places if each.state is ChunkState.READY]
