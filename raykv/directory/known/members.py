"""The members: nodes whose NodeActors report, and what each has said last; pure.

          first report of a life          silent for `EXPIRY_S`, or a later life reports
 (none) ─────────────────────────► member ───────────────────────────────────────────────► lost
                                     ▲                                                      │
                                     └──────────── a later report, or a later life ─────────┘

Invariants:
1. A member has one life, the highest that was heard of.
2. What is known of a member is what the latest of its reports says.
3. No report that is older than a loss makes that node a member again, among `MOST_LOST` nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from raykv.base.ids import EngineId, Namespace, NodeId
from raykv.protocol.listing import Where
from raykv.protocol.node import Report, ReportedEngine

EXPIRY_S = 10.0
"""A node that is silent for this long is lost."""

MOST_MEMBERS = 16_384

MOST_LOST = 4096
"""Nodes that were lost, whose last reports are remembered."""


class EngineLife(NamedTuple):
    """An EngineCore: another one may have the same id."""

    engine_id: EngineId
    life: int


class ReportNumber(NamedTuple):
    """Which report of a node is the later one: that of a later life, or of a higher number."""

    life: int
    seq: int


@dataclass(slots=True)
class ReportedNode:
    """A member. `report` is its latest one, without rows, engines and words about sessions.

    `chunks` are what the directory has read of its listing, by namespace and tier, RAM or DISK.
    """

    report: Report
    number: ReportNumber
    heard_at: float
    engines: dict[EngineLife, ReportedEngine] = field(default_factory=dict)
    chunks: Counter[tuple[Namespace, Where]] = field(default_factory=Counter)

    @property
    def namespaces(self) -> set[Namespace]:
        """Those of its engines."""
        return {Namespace(each.hello.namespace) for each in self.engines.values()}


class Members(Mapping[NodeId, ReportedNode]):
    """See the module's docstring. Times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._members: dict[NodeId, ReportedNode] = {}
        # The one that was lost longest ago comes first.
        self._lost: dict[NodeId, ReportNumber] = {}

    def __getitem__(self, node_id: NodeId) -> ReportedNode:
        return self._members[node_id]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def is_staying(self, node_id: NodeId) -> bool:
        """Whether a member does not leave."""
        return not self._members[node_id].report.is_leaving

    def is_over(self, report: Report) -> bool:
        """Whether nothing of a report counts: its life is over, or there are too many members."""
        node_id = NodeId(report.node_id)
        member = self._members.get(node_id)
        if member is not None:
            return report.life < member.number.life
        lost = self._lost.get(node_id)
        if lost is not None and ReportNumber(report.life, report.seq) <= lost:
            return True
        return len(self._members) >= MOST_MEMBERS

    def is_new(self, report: Report) -> bool:
        """Whether a report begins a membership."""
        member = self._members.get(NodeId(report.node_id))
        return member is None or member.number.life < report.life

    def hear(self, report: Report, now: float) -> ReportedNode | None:
        """A node reports, and is a member from then on; perhaps late or once more: then nothing
        changes.

        Returns:
            What the member was before, or is now if it was none; None: the report is no news.
        """
        node_id = NodeId(report.node_id)
        number = ReportNumber(report.life, report.seq)
        before = self._members.get(node_id)
        if before is not None and number <= before.number:
            return None
        bare = msgspec.structs.replace(report, part=None, engines=[], sessions=[])
        engines = {
            EngineLife(EngineId(each.hello.engine_id), each.hello.life): each
            for each in report.engines
        }
        member = ReportedNode(bare, number, now, engines)
        if before is not None:
            member.chunks = before.chunks
        self._lost.pop(node_id, None)
        self._members[node_id] = member
        return before or member

    def silent(self, now: float) -> list[NodeId]:
        """Members that have not been heard of for too long."""
        return [
            node_id
            for node_id, member in self._members.items()
            if now - member.heard_at >= EXPIRY_S
        ]

    def lose(self, node_id: NodeId) -> ReportedNode:
        """A member is none any more; returns what it was."""
        member = self._members.pop(node_id)
        self._lost[node_id] = member.number
        if len(self._lost) > MOST_LOST:
            del self._lost[next(iter(self._lost))]
        return member

    def check(self) -> None:
        """Assert the invariants; for tests."""
        assert not self._members.keys() & self._lost.keys()
        assert len(self._members) <= MOST_MEMBERS, len(self._members)
        assert len(self._lost) <= MOST_LOST, len(self._lost)
        for node_id, member in self._members.items():
            assert member.report.node_id == node_id, node_id
            assert member.report.life == member.number.life, node_id
            assert min(member.chunks.values(), default=0) >= 0, node_id
