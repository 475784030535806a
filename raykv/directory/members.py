"""Nodes and engines as the block manager knows them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from raykv.base.geometry import PoolGeometry
from raykv.base.ids import EngineId, Epoch, Namespace, NodeId
from raykv.directory.book import PoolBook
from raykv.directory.mirror import Mirror
from raykv.protocol.engine import Naming, SyncReply, SyncRequest
from raykv.protocol.framing import PROTOCOL_VERSION
from raykv.protocol.measures import BreakerReport
from raykv.protocol.node import NodeStats

if TYPE_CHECKING:
    pass


@dataclass(slots=True)
class Node:
    """A NodeActor that has reported, and the book of its pool."""

    node_id: NodeId
    epoch: Epoch
    book: PoolBook
    last_report: float
    settled_at: float
    last_seq: int = 0
    inventory_complete: bool = False
    stats: NodeStats = field(default_factory=NodeStats)
    pid: int = 0
    hostname: str = ""
    raykv_version: str = ""


@dataclass(slots=True)
class Engine:
    """An attached engine; `reply` is the last answer, for a message that comes again."""

    engine_id: EngineId
    node_id: NodeId
    namespace: Namespace
    model: str
    num_ranks: int
    slot_bytes: dict[int, int]
    last_seen: float
    attached_at: float
    mirror: Mirror
    reply: SyncReply | None = None
    versions: str = ""
    void: bool = False
    cleared: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    # Chunks; what is long ago counts for less.
    stored_lately: int = 0
    traits: dict[str, str] = field(default_factory=dict)
    breakers: BreakerReport = field(default_factory=BreakerReport)
    # What the user calls its weights, until it has heard that.
    naming: Naming | None = None

    def take_news(self, request: SyncRequest) -> None:
        """What a message says of the engine itself."""
        self.counters = request.counters or self.counters
        self.breakers = request.breakers
        if self.naming is not None and self.naming.order_id == request.heard:
            self.naming = None


def version_objection(version: int) -> str:
    """Why an engine with that protocol version is refused; empty if it is not."""
    if version == PROTOCOL_VERSION:
        return ""
    return (
        f"the engine speaks protocol {version} of RayKV, "
        f"the scheduler actor {PROTOCOL_VERSION}: install the same version on both"
    )


def size_objection(slot_bytes: Mapping[int, int], geometry: PoolGeometry) -> str:
    """Why a pool can't take chunks of those sizes, by KV group; empty if it can."""
    for group, size in slot_bytes.items():
        if not geometry.slots_per_slab(size):
            return (
                f"a chunk of KV group {group} takes {size} bytes, more than a slab of "
                f"the pool ({geometry.slab_bytes} bytes); set a larger pool_bytes, or a "
                "smaller blocks_per_chunk"
            )
    return ""
