"""`scale`: the load of a cluster's many nodes on its one scheduler actor.

Nodes and engines are generators of the very messages that NodeActors and engines send; they are
encoded, decoded and answered by a real `Directory`, in one process, and the time that it takes is
its CPU time. Each node has four engines, which each second store 32 chunks, for which the node
gives up as many, and ask once where 32 chunks of other nodes are. A node reports as often as the
directory's answers say, which is less often the more there is to do. A node's pool here has few
chunks, so that two thousand nodes fit; what a chunk costs in memory is measured by `directory`.

What a call costs Ray's threads in the actor's process is not in there: how many calls a second one
actor takes is an assumption, and how many nodes that makes is said beside.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import count

from raykv.base.ids import Key
from raykv.lab.bench.report import Options, Result
from raykv.protocol.columns import Keys
from raykv.protocol.engine import Ask, AskAnswer, EngineHello
from raykv.protocol.framing import encode
from raykv.protocol.node import PAUSE_MS, Report, ReportAnswer, ReportedEngine
from tests.bench.directory import SPACE, ReportingNode, directory, exchange
from tests.fixtures.keys import random_key

ENGINES_PER_NODE = 4
ASKED = 32
STORED = 32
POOL_CHUNKS = 1024
NODES = (10, 100, 1000, 2000)
CALLS_PER_S = 5000
"""Of Ray, that one actor is taken to answer."""

COST_SHARE = 1 / 64
"""Weight of one report in the mean cost of reports."""


@dataclass
class _Traffic:
    """Calls, bytes in both directions, and the actor's seconds with and without codec."""

    calls: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0


class PlayedNode(ReportingNode):
    """With engines, and chunks that make room for others. `pause_s`: between two reports."""

    def __init__(self, number: int) -> None:
        self.engines = [
            EngineHello(f"engine-{number}-{at}", 1 + at, SPACE, slot_bytes={0: 1})
            for at in range(ENGINES_PER_NODE)
        ]
        super().__init__(f"{number:056d}", [ReportedEngine(each) for each in self.engines])
        self.pause_s = PAUSE_MS[0] / 1000
        self._held: deque[Key] = deque()

    def next_report(self, came: list[Key]) -> Report:
        """Report new chunks, and those that were evicted for them."""
        self._held += came
        return self.report(
            came, [self._held.popleft() for _ in range(len(self._held) - POOL_CHUNKS)]
        )


class _Cluster:
    """Nodes, engines, and the directory that they talk to."""

    def __init__(self, num_nodes: int) -> None:
        self._directory = directory()
        self._traffic = _Traffic()
        self._now = 1000.0
        self._numbers = count()
        self._recent: deque[Key] = deque(maxlen=256)
        self._nodes = [PlayedNode(number) for number in range(num_nodes)]

    def _report(self, node: PlayedNode, came: list[Key]) -> None:
        raw = encode(node.next_report(came))
        answered = exchange(raw, Report, self._take)
        known = self._directory
        known.cost_s += (answered.core_s + answered.messages_s - known.cost_s) * COST_SHARE
        node.pause_s = answered.reply.pause_ms / 1000
        self._count(len(raw) + len(answered.raw), answered.core_s, answered.messages_s)

    def _take(self, report: Report) -> ReportAnswer:
        return self._directory.report(report, self._now)

    def _ask(self, node: PlayedNode, engine: EngineHello, coming: list[Key]) -> None:
        asked = Keys.of(list(self._recent)[:ASKED])
        ask = Ask(
            engine.engine_id,
            engine.life,
            SPACE,
            [node.node_id],
            asked,
            Keys.of(coming),
        )
        raw = encode(ask)
        answered = exchange(raw, Ask, self._answer)
        self._count(len(raw) + len(answered.raw), answered.core_s, answered.messages_s)

    def _answer(self, ask: Ask) -> AskAnswer:
        return self._directory.ask(ask, self._now)

    def _count(self, num_bytes: int, core_s: float, messages_s: float) -> None:
        self._traffic.calls += 1
        self._traffic.num_bytes += num_bytes
        self._traffic.seconds += core_s + messages_s
        self._traffic.core_seconds += core_s

    def _second_of(self, node: PlayedNode) -> None:
        came: list[Key] = []
        for engine in node.engines:
            stored = [random_key(next(self._numbers)) for _ in range(STORED)]
            self._ask(node, engine, stored)
            came += stored
        num_reports = max(1, round(1 / node.pause_s))
        for at in range(num_reports):
            self._report(node, came[at::num_reports])
        self._recent += came

    def second(self) -> _Traffic:
        """One second of all nodes and engines."""
        self._traffic = traffic = _Traffic()
        self._now += 1.0
        for node in self._nodes:
            self._second_of(node)
        self._directory.expire(self._now)
        return traffic


def run(options: Options) -> Result:
    """See the module's docstring."""
    result = Result("scale")
    busy_per_node = 0.0
    for num_nodes in (2, 4) if options.quick else NODES:
        cluster = _Cluster(num_nodes)
        for _ in range(2 if num_nodes >= 1000 else 8):
            cluster.second()
        case = f"{num_nodes} nodes"
        for _ in range(options.repeats_or(3)):
            traffic = cluster.second()
            for unit, value in (
                ("calls/s", traffic.calls),
                ("MB/s", traffic.num_bytes / 1e6),
                ("% busy", 100 * traffic.seconds),
                ("% busy in the core", 100 * traffic.core_seconds),
            ):
                result.add(case, "scheduler actor", unit, value)
        busy = result.row(case, "scheduler actor", "% busy")
        busy_per_node = max(busy.values) / num_nodes / 100
    calls_per_node = ENGINES_PER_NODE + 1000 / PAUSE_MS[1]
    result.notes += [
        f"By its CPU one scheduler actor is full at about {1 / busy_per_node:,.0f} such nodes.",
        (
            f"By Ray's calls at {CALLS_PER_S / calls_per_node:,.0f}: {CALLS_PER_S:,} a second are "
            "assumed, and the longest pauses."
        ),
        f"Every engine: {ASKED} chunks asked, {STORED} stored and given up a second.",
    ]
    return result
