"""`scale`: what a cluster of many nodes asks of the one scheduler actor.

Nodes and engines are generators of the very messages that NodeActors and engines send; they are
encoded, decoded and answered by a real `BlockManager`, in one process, and the time that it takes
is its CPU time. Each node has four engines. Each engine, each second: one exchange that asks for 32
chunks of other nodes, and 32 chunks stored, for which its node gives up as many. A node's pool here
has few chunks, so that a thousand nodes fit; what a chunk costs in memory is measured by
`directory`.

What comes when one actor is full, on paper: the directory is split by namespace, and within one by
the first bits of the key, over several scheduler actors named `scheduler:0` and so on. Leases and
evictions of a node stay with one of them (by the hash of its node id), which the others name in
batches what they hold of the node; an engine asks each shard for its keys in one exchange, and its
node's shard for leases. Generations stay safe, since each node has one granting shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from raykv.base.ids import SLOT_ALIGNMENT
from raykv.lab.bench.directory_load import M, R, exchange, manager
from raykv.lab.bench.registry import BENCHMARKS
from raykv.lab.bench.report import Options, Result, Row
from raykv.protocol.columns import Handles, Keys, Leases
from raykv.protocol.engine import AttachEngine, EngineAttached, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION, decode, encode
from raykv.protocol.node import Inventory, NodeReport, NodeReportReply

ENGINES_PER_NODE = 4
ASKED = 32
STORED = 32
POOL_SLOTS = 1024
SLAB_SLOTS = 256
NAMESPACE = "model"
NODES = (10, 100, 1000)


@dataclass
class _Traffic:
    """Messages and bytes in both directions, and the manager's seconds with and without codec."""

    messages: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0


@dataclass
class _Engine:
    """One engine's memory of what it was granted."""

    name: str
    node: str
    seq: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)


class _Cluster:
    """Nodes, engines, and the manager that they talk to."""

    def __init__(self, num_nodes: int) -> None:
        self.manager = manager()
        self._traffic = _Traffic()
        self.now = 1000.0
        self._keys = itertools.count()
        self._seqs = itertools.count(1)
        self._stored: dict[str, list[tuple[bytes, int, int]]] = {}
        self._recent: list[bytes] = []
        self.engines: list[_Engine] = []
        for number in range(num_nodes):
            node = f"{number:056d}"
            self._stored[node] = []
            self.report(node)
            for index in range(ENGINES_PER_NODE):
                engine = _Engine(f"engine-{number}-{index}", node)
                self.engines.append(engine)
                self._attach(engine)

    def _call(self, message: M, decide: Callable[[M, float], R], kind: type[R]) -> R:
        """One message to the scheduler actor, and its answer."""
        raw = encode(message)
        answered = exchange(raw, type(message), lambda it: decide(it, self.now))
        self._traffic.messages += 2
        self._traffic.num_bytes += len(raw) + len(answered.raw)
        self._traffic.seconds += answered.core_s + answered.messages_s
        self._traffic.core_seconds += answered.core_s
        return decode(answered.raw, kind)

    def report(self, node: str) -> None:
        """What a NodeActor sends every second."""
        stored, self._stored[node] = self._stored[node], []
        count = len(stored)
        message = NodeReport(
            version=PROTOCOL_VERSION,
            node_id=node,
            hostname=node,
            epoch=1,
            seq=next(self._seqs),
            pool_bytes=POOL_SLOTS * SLOT_ALIGNMENT,
            slab_bytes=SLAB_SLOTS * SLOT_ALIGNMENT,
            highest_generation=0,
            scheduler_epoch=0,
            stored=Inventory(
                namespaces=[NAMESPACE] if count else [],
                namespace_index=[0] * count,
                keys=Keys.of([key for key, _, _ in stored]),
                slots=[slot for _, slot, _ in stored],
                generations=[generation for _, _, generation in stored],
                slot_bytes=[SLOT_ALIGNMENT] * count,
            ),
        )
        self._call(message, self.manager.node_report, NodeReportReply)

    def _attach(self, engine: _Engine) -> None:
        message = AttachEngine(
            version=PROTOCOL_VERSION,
            engine_id=engine.name,
            node_id=engine.node,
            namespace=NAMESPACE,
            model="model",
            num_ranks=1,
            slot_bytes={0: SLOT_ALIGNMENT},
            leases=Leases(),
        )
        self._call(message, self.manager.attach_engine, EngineAttached)

    def serve(self, engine: _Engine) -> None:
        """One second of an engine."""
        stores, engine.free = engine.free[:STORED], engine.free[STORED:]
        keys = [self._new_key() for _ in stores]
        rows = [
            (key, slot, generation) for key, (slot, generation) in zip(keys, stores, strict=True)
        ]
        self._stored[engine.node] += rows
        announced = Handles(
            Keys.of(keys), [slot for slot, _ in stores], [generation for _, generation in stores]
        )
        engine.seq += 1
        request = SyncRequest(
            engine_id=engine.name,
            epoch=1,
            seq=engine.seq,
            wanted={0: STORED},
            touched=Keys.of(self._recent[-STORED:]),
            asked=Keys.of(self._recent[:ASKED]),
            announced=announced,
        )
        reply = self._call(request, self.manager.sync, SyncReply)
        granted = reply.granted
        engine.free += zip(granted.slots, granted.generations, strict=True)
        self._recent = [*self._recent[-256:], *keys]

    def _new_key(self) -> bytes:
        return next(self._keys).to_bytes(32, "big") + bytes(4)

    def second(self) -> _Traffic:
        """One second of all nodes and engines."""
        self._traffic = traffic = _Traffic()
        self.now += 1.0
        for engine in self.engines:
            self.serve(engine)
        for node in self._stored:
            self.report(node)
        self.manager.expire(self.now)
        return traffic


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("scale", BENCHMARKS["scale"].summary)
    busy_per_node = 0.0
    for num_nodes in (2, 4) if options.quick else NODES:
        cluster = _Cluster(num_nodes)
        for _ in range(2 if num_nodes >= 1000 else 8):
            cluster.second()
        rows: dict[str, list[float]] = {}
        for _ in range(options.repeats_or(3)):
            traffic = cluster.second()
            rows.setdefault("messages/s", []).append(traffic.messages)
            rows.setdefault("MB/s", []).append(traffic.num_bytes / 1e6)
            rows.setdefault("% busy", []).append(100 * traffic.seconds)
            rows.setdefault("% busy in the core", []).append(100 * traffic.core_seconds)
        for unit, values in rows.items():
            result.rows.append(Row(f"{num_nodes} nodes", "scheduler actor", unit, tuple(values)))
        busy_per_node = max(rows["% busy"]) / num_nodes / 100
    full_at = 1 / busy_per_node
    result.notes += [
        f"One scheduler actor is full at about {full_at:,.0f} such nodes, Ray's own cost left out.",
        f"Every engine: {ASKED} chunks asked, {STORED} stored and given up a second.",
    ]
    return result
