"""What the doctor knows of a cluster; another module has gathered it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from raykv.protocol.findings import HostFacts
from raykv.protocol.node import NodeDescription
from raykv.protocol.status import ClusterStatus, EngineStatus, NodeStatus


@dataclass(frozen=True)
class ActorFacts:
    """A named actor that exists. `ray_state` is Ray's word for it, empty where that is not known.

    `why` is what went wrong with the question to it, empty if it has answered in time.
    """

    ray_state: str = ""
    why: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """A Ray node that lives, or the NodeActor of one that does not (`is_alive` false)."""

    node_id: str
    hostname: str
    is_alive: bool
    # None: there is no such actor.
    actor: ActorFacts | None
    description: NodeDescription | None = None
    host: HostFacts | None = None
    # Its clock minus ours, and by how much that may be wrong.
    skew_s: float = 0.0
    skew_error_s: float = 0.0


@dataclass(frozen=True)
class ClusterFacts:
    """All that the doctor looks at. `raykv_version` and `protocol` are its own process's."""

    raykv_version: str
    protocol: int
    # None: there is none.
    scheduler: ActorFacts | None
    status: ClusterStatus | None
    nodes: Sequence[NodeFacts] = ()
    # Of all nodes that Ray remembers, by their ids.
    hostnames: Mapping[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> list[tuple[NodeFacts, HostFacts]]:
        """Nodes whose NodeActors have described their hosts, with the descriptions."""
        return [(node, node.host) for node in self.nodes if node.host is not None]

    @property
    def engines(self) -> list[EngineStatus]:
        """All that are attached."""
        return [] if self.status is None else self.status.engines

    @property
    def reports(self) -> dict[str, NodeStatus]:
        """What the directory has of each node that has reported, by the node's id."""
        return {} if self.status is None else {each.node_id: each for each in self.status.nodes}
