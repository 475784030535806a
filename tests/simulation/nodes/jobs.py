"""Copy jobs of an engine: what its scheduler knows of one, and what each rank sends to its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.base.ids import Blocks, Direction, Key, Namespace, Refusal, Stamp, part_of
from raykv.protocol.columns import Keys, Numbers
from raykv.protocol.copies import CopyJob, CopyResult
from raykv.protocol.listing import ListedRows
from tests.simulation.nodes.content import KVCache
from tests.simulation.nodes.models import Prompt

if TYPE_CHECKING:
    from tests.simulation.nodes.node import PlayedNode


@dataclass(eq=False)
class EngineJob:
    """Chunks that all ranks of an engine copy; it is over when each has said how it ended.

    `told`: by place, the orders that it had shown when the job was prepared. `floor`: nothing that
    was offered up to that step of the world may be loaded. `num_left`: ranks of which vLLM has
    not heard.
    """

    job_id: int
    direction: Direction
    request_id: str
    prompt: Prompt
    namespace: Namespace
    keys: list[Key]
    ranges: list[Blocks]
    block_ids: list[list[int]]
    orders: Stamp
    tenant: str
    told: list[set[Stamp]]
    floor: int
    made_at: int
    num_left: int
    failed: set[int] = field(default_factory=set)
    is_given_up: bool = False
    is_completed_by_vllm: bool = True

    def named(self, part: str) -> CopyJob:
        """As it crosses to a node, which has a part of the engine."""
        return CopyJob(
            self.job_id,
            int(self.direction),
            part_of(self.namespace, part),
            Keys.of(self.keys),
            Numbers.of(each.length for each in self.ranges),
            Numbers.of(each.first for each in self.ranges),
            Numbers.of(block for blocks in self.block_ids for block in blocks),
            self.orders,
            self.tenant,
        )


@dataclass(eq=False)
class RankJob:
    """A rank's share of a job: `ended` hears once how it went. `rank` is one of all ranks of the
    engine, `part` the name of what is at its place.
    """

    job: EngineJob
    place: int
    part: str
    rank: int
    kv: KVCache
    ended: Callable[[RankJob, CopyResult], None]

    def lose(self, life: int) -> None:
        """Its node is gone, or cannot be reached."""
        count = len(self.job.keys)
        lost = bytes([Refusal.NODE_LOST]) * count
        self.ended(
            self,
            CopyResult(self.job.job_id, life, 0, ListedRows(), Numbers.of(range(count)), lost),
        )


@dataclass(eq=False)
class Line:
    """A rank's connection to one life of a node; `rank` is one of those at the place.

    What was sent and has not ended is `flying`; what the node knows, `admitted`. Who is at one end
    hears later that the other has hung up.
    """

    life: int
    place: int
    rank: int
    num_ranks: int
    node: PlayedNode
    number: int
    is_open: bool = True
    flying: list[RankJob] = field(default_factory=list)
    admitted: set[RankJob] = field(default_factory=set)

    def end(self, job: RankJob, result: CopyResult) -> None:
        """A job has ended at the node."""
        if self.is_open and job in self.flying:
            self.flying.remove(job)
            job.ended(job, result)

    def lose_all(self) -> None:
        """The node copies nothing for this line any more."""
        jobs, self.flying = self.flying, []
        for job in jobs:
            job.lose(self.node.life)
